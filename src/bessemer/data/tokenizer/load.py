"""Special tokens of a `tokenizers.Tokenizer`, and its twin for text that goes on where other text ended.

How text is divided before a byte-level model sees it: the split rules in use, by name.

A byte-level BPE run by tiktoken, where it can be shown to give the same ids: some six times as fast. tiktoken
ranks tokens, `tokenizers` ranks pairs of tokens. Both merge alike if every token, encoded by itself, comes out as
itself: its bytes then reach one last pair, and no other pair of its parts ever lies side by side. That is checked for
every token. The split rules are those that are tested to cut alike on every character of Unicode.

Tokenizers from files: a Hugging Face tokenizer.json, a SentencePiece model, tiktoken's ranks.
"""

from __future__ import annotations

import array
import base64
import binascii
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.tokenizer.sentencepiece import from_sentencepiece, merges_of
from bessemer.data.tokenizer.tokenizer import DEFAULT_EOS
from bessemer.errors import UserError


def declare(inner: Any, names: Iterable[str]) -> list[str]:
    """Makes every name a special token of one id; those that the vocabulary has not are added at its end. Returns
    what was added."""
    new = []
    for name in names:
        if not name or name != name.strip():
            raise UserError(f"special token {name!r}: write a name without spaces around it")
        found = inner.token_to_id(name)
        added = inner.get_added_tokens_decoder().get(found) if found is not None else None
        if added is not None and added.special:
            continue
        taken = set(inner.get_vocab(with_added_tokens=True).values())
        inner.add_special_tokens([name])
        new += [name] if found is None else []
        if found is None and inner.token_to_id(name) in taken:
            raise UserError(
                f"special token {name!r}: the tokenizer's ids have gaps, so {inner.token_to_id(name)} would stand for "
                "two tokens; give a tokenizer that has the token already"
            )
    return new


def check_decodes(inner: Any, names: Iterable[str]) -> None:
    """A byte-level decoder takes some letters of a name for bytes: those names are refused."""
    for name in names:
        shown = inner.decode([inner.token_to_id(name)], skip_special_tokens=False)
        if shown != name:
            raise UserError(f"special token {name!r}: it would be shown as {shown!r}; use ASCII characters")


def reachable(inner: Any, special: Mapping[str, int]) -> frozenset[int]:
    """Special ids that the model may give to plain text, since it holds their names as pieces of its own."""
    model = inner.model
    held = {name: i for name, i in special.items() if model.token_to_id(name) == i}
    if not held:
        return frozenset()
    kind, definition = type(model).__name__, json.loads(inner.to_str())["model"]
    # What the model cannot write otherwise is the unknown token's to say.
    held.pop(definition.get("unk_token"), None)
    held = {name: i for name, i in held.items() if i != definition.get("unk_id")}
    if kind == "BPE" and not model.ignore_merges:
        merged = {a + b for a, b in definition["merges"]}
        return frozenset(i for name, i in held.items() if name in merged or len(name) == 1)
    if kind == "Unigram":
        # If the best pieces of the name alone are others, they are better in every text.
        return frozenset(i for name, i in held.items() if i in [token.id for token in model.tokenize(name)])
    return frozenset(held.values())


def without_prefix(inner: Any) -> Any:
    """The same tokenizer without the space that it puts before a text (or takes from it): for text that goes on. The
    tokenizer itself where it does nothing of the kind."""
    from tokenizers import Tokenizer as Inner

    definition = json.loads(inner.to_str())
    plain = {part: _plain(definition[part]) for part in ("normalizer", "pre_tokenizer", "decoder")}
    if all(definition[part] == plain[part] for part in ("normalizer", "pre_tokenizer")):
        return inner
    rest = Inner.from_str(json.dumps(definition | plain))
    rest.encode_special_tokens = inner.encode_special_tokens
    return rest


def _plain(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer, pre-tokenizer or decoder that treats the beginning of a text like any other place."""
    if part is None:
        return None
    for name in ("normalizers", "pretokenizers", "decoders"):
        if name in part:
            kept = [plain for child in part[name] if (plain := _plain(child)) is not None]
            return {**part, name: kept}
    kind = part["type"]
    if kind == "Prepend" or (kind == "Replace" and part["pattern"].get("Regex", "").startswith(r"\A")):
        return None
    plain = {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}}
    if kind == "Strip":
        return {**part, **({"strip_left": False} if "strip_left" in part else {"start": 0})}
    return {**part, **plain.get(kind, {})}


# Written for the regular expressions of `tokenizers` (Oniguruma): \z is the end of the text, where tiktoken writes $.
# gpt2, cl100k and o200k give the same pieces as tiktoken's. llama3 is what we train with: words with their leading
# space, up to three digits, punctuation, newlines, and runs of spaces (indentation) as one piece.
SPLITS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s+\z|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "o200k": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "llama3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def byte_level(pattern: str) -> Any:
    """The pre-tokenizer that divides text by the pattern and writes each byte as one visible character."""
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_characters() -> dict[int, str]:
    """The visible character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in plain}
    others = (byte for byte in range(256) if byte not in table)
    return table | {byte: chr(256 + place) for place, byte in enumerate(others)}


Ids = npt.NDArray[np.uint32]

_GPT2_AS_PUBLISHED = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def fast_encoder(inner: Any) -> Callable[[str], Ids] | None:
    """Encodes one text, special tokens in it as plain text; other threads run meanwhile. None where tiktoken is not
    installed or not known to give the same ids."""
    try:
        import tiktoken
    except ImportError:
        return None
    definition = json.loads(inner.to_str())
    pattern = _pattern(definition)
    order = _order(definition) if pattern else None
    if pattern is None or order is None or not _stable(definition, order):
        return None
    to_byte = {character: byte for byte, character in byte_characters().items()}
    ranks = {bytes(to_byte[character] for character in token): rank for rank, token in enumerate(order)}
    ids = np.array([definition["model"]["vocab"][token] for token in order], np.uint32)
    encoding = tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return lambda text: ids[np.frombuffer(array.array("I", encoding.encode_ordinary(text)), np.uint32)]


def _pattern(definition: dict[str, Any]) -> str | None:
    """The split rule of a plain byte-level BPE, if it is one of those that both libraries are tested on."""
    model, steps = definition["model"], definition["pre_tokenizer"] or {}
    unusual = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    if (
        model["type"] != "BPE"
        or definition["normalizer"] is not None
        or any(model.get(name) for name in unusual)
        or not all(token["special"] for token in definition["added_tokens"])
    ):
        return None
    if steps.get("type") == "ByteLevel" and steps["use_regex"] and not steps["add_prefix_space"]:
        return SPLITS["gpt2"]
    parts = steps["pretokenizers"] if steps.get("type") == "Sequence" else []
    if [part["type"] for part in parts] != ["Split", "ByteLevel"]:
        return None
    split, to_bytes = parts
    plain = split["behavior"] == "Isolated" and not split["invert"]
    if not plain or to_bytes["use_regex"] or to_bytes["add_prefix_space"]:
        return None
    pattern = split["pattern"].get("Regex")
    if pattern == _GPT2_AS_PUBLISHED:
        return SPLITS["gpt2"]
    return pattern if pattern in SPLITS.values() else None


def _order(definition: dict[str, Any]) -> list[str] | None:
    """All tokens that text can give, in the order of their merges; None if that is no order of tokens."""
    model = definition["model"]
    alphabet = list(byte_characters().values())
    place: dict[str, tuple[int, int]] = {}  # first and last merge that makes the token
    for number, (left, right) in enumerate(model["merges"]):
        first, last = place.get(left + right, (number, number - 1))
        if last != number - 1:
            return None
        place[left + right] = first, number
    special = {token["content"] for token in definition["added_tokens"]}
    others = set(model["vocab"]) - special - set(place) - set(alphabet)
    complete = set(alphabet) <= set(model["vocab"])
    if not complete or special & set(place) or (others and model["ignore_merges"]):
        return None
    return [*alphabet, *sorted(place, key=lambda token: place[token][0])]


def _stable(definition: dict[str, Any], order: list[str]) -> bool:
    """Whether the merges turn every token's bytes into the token."""
    from tokenizers import models

    model = definition["model"]
    merging = models.BPE(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    return all([part.value for part in merging.tokenize(token)] == [token] for token in order)


_IN_FOLDERS = ("tokenizer.json", "tokenizer.model")
_KNOWN_EOS = (DEFAULT_EOS, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")


def load(
    path: str | Path, eos: str | None = None, special: Sequence[str] = (), pattern: str | None = None
) -> tuple[Any, str]:
    """The `tokenizers.Tokenizer` of a file or folder, and the name of its end-of-document token."""
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        there = [name for name in _IN_FOLDERS if os.path.isfile(os.path.join(path, name))]
        path = os.path.join(path, (there or _IN_FOLDERS)[0])
    if not os.path.isfile(path):
        raise UserError(f"tokenizer.path: no file {path}; give a Hugging Face tokenizer.json")
    with open(path, "rb") as file:
        head = file.read(4096)
    if _LINE.fullmatch(head.split(b"\n", 1)[0]):
        inner = from_ranks(path, pattern)
        # The file has no special tokens; those given get the ids behind it, in the order given.
        check_decodes(inner, declare(inner, [*special, eos or DEFAULT_EOS]))
    elif head[:1] == b"\n":  # the key of a protobuf's first field
        inner = from_sentencepiece(path)
    else:
        inner = _from_json(path)
    names = (eos,) if eos is not None else _KNOWN_EOS
    for name in names:
        if inner.token_to_id(name) is not None:
            return inner, name
    special = [token.content for token in inner.get_added_tokens_decoder().values()][:12]
    raise UserError(
        f"{path}: no end-of-document token {' or '.join(names)}; "
        f"set tokenizer.eos to one it has ({', '.join(special) or 'it names no special tokens'})"
    )


def _from_json(path: str) -> Any:
    from tokenizers import Tokenizer as Inner

    try:
        return Inner.from_file(path)
    except Exception as error:  # the library raises plain Exception for whatever it cannot parse
        raise UserError(f"{path}: not a Hugging Face tokenizer.json ({error})") from error


# tiktoken's files have one token a line, in base64, and its rank.
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s*")
# What a file of OpenAI's says by its name: the split rule, and the special tokens with their ids.
_END, _FIM = "<|endoftext|>", ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_CL100K = {_END: 100257, _FIM[0]: 100258, _FIM[1]: 100259, _FIM[2]: 100260, "<|endofprompt|>": 100276}
_KNOWN: dict[str, tuple[str, dict[str, int]]] = {
    **dict.fromkeys(("gpt2", "r50k_base", "p50k_base"), ("gpt2", {_END: 50256})),
    "cl100k_base": ("cl100k", _CL100K),
    "o200k_base": ("o200k", {_END: 199999, "<|endofprompt|>": 200018}),
}


def from_ranks(path: str, pattern: str | None = None) -> Any:
    """A `tokenizers.Tokenizer` that gives the ids of tiktoken's Encoding. `pattern` is a name of SPLITS or a regular
    expression in Oniguruma's syntax; a file with one of OpenAI's names needs none and brings its special tokens."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models

    split, special = _KNOWN.get(os.path.basename(path).removesuffix(".tiktoken"), (None, {}))
    split = pattern or split
    if split is None:
        raise UserError(
            f"{path}: the name does not tell how text is split; set tokenizer.pattern to {', '.join(SPLITS)} "
            "or to a regular expression"
        )
    ranks = _read(path)
    character = byte_characters()
    written = {token: "".join(character[byte] for byte in token) for token in ranks}
    vocab = {written[token]: rank for token, rank in ranks.items()}
    merges = merges_of(written[token] for token in sorted(ranks, key=ranks.__getitem__))
    # Ids have to be without gaps, or a new token would take a used one.
    for number in sorted(set(range(max(special.values(), default=0))) - {*vocab.values(), *special.values()}):
        vocab[f"<|reserved_{number}|>"] = number
    # tiktoken looks a piece of text up before it merges, so a token that no merges reach is found as well.
    inner = Inner(models.BPE(vocab=vocab | special, merges=merges, ignore_merges=True))
    inner.pre_tokenizer = byte_level(SPLITS.get(split, split))
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(special))
    return inner


def _read(path: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    with open(path, "rb") as file:
        for row, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error) as error:
                what = f"{path}:{row}: not a token in base64 and its rank ({error})"
                raise UserError(f"{what}; download the file again") from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise UserError(f"{path}: has no token for byte {missing[0]}; download the file again")
    if len(set(ranks.values())) < len(ranks):
        raise UserError(f"{path}: two tokens have the same rank; download the file again")
    return ranks
