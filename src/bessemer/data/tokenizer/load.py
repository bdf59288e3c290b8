"""Loads tokenizers from files: a Hugging Face tokenizer.json, a SentencePiece model, tiktoken's ranks.

SentencePiece models are read without their package. `fast_encoder` runs a byte-level BPE with tiktoken, six times as
fast, if it provably gives the same ids.
"""

from __future__ import annotations

import array
import base64
import binascii
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.read.records import as_bytes, as_float, parse_fields
from bessemer.data.tokenizer.tokenizer import DEFAULT_EOS, check_decodes, declare
from bessemer.errors import UserError

# How text is split before a byte-level model, as Oniguruma expressions for `tokenizers`: \z is the end of the text,
# where tiktoken writes $. gpt2, cl100k and o200k give the same pieces as tiktoken's. Training uses llama3: words with
# their leading space, up to three digits, punctuation, newlines, and runs of spaces (indentation) as one piece.
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
    """The pre-tokenizer that splits text by the pattern and writes each byte as one visible character."""
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
    """A function that encodes one text with tiktoken, special tokens as plain text, without holding the GIL. None if
    tiktoken is not installed or not shown to give the same ids.

    tiktoken ranks tokens, `tokenizers` ranks pairs. Both merge alike if every token, encoded by itself, gives itself:
    its bytes then reach one last pair, and no other pair of its parts is ever adjacent. This is checked for every
    token. The split rules are tested to cut alike on every character of Unicode.
    """
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
    """The split rule of a plain byte-level BPE, if both libraries are tested on it."""
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
    """All tokens that text can give, in the order of their merges; None if merges do not order the tokens."""
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
        # The file has no special tokens; the given ones get the next ids, in order.
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
# What the names of OpenAI's files imply: the split rule, and the special tokens with their ids.
_END, _FIM = "<|endoftext|>", ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_CL100K = {_END: 100257, _FIM[0]: 100258, _FIM[1]: 100259, _FIM[2]: 100260, "<|endofprompt|>": 100276}
_KNOWN: dict[str, tuple[str, dict[str, int]]] = {
    **dict.fromkeys(("gpt2", "r50k_base", "p50k_base"), ("gpt2", {_END: 50256})),
    "cl100k_base": ("cl100k", _CL100K),
    "o200k_base": ("o200k", {_END: 199999, "<|endofprompt|>": 200018}),
}


def from_ranks(path: str, pattern: str | None = None) -> Any:
    """A `tokenizers.Tokenizer` with the ids of tiktoken's Encoding. `pattern` is a key of SPLITS or an Oniguruma
    expression; files with OpenAI's names need none and have known special tokens."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models

    split, special = _KNOWN.get(os.path.basename(path).removesuffix(".tiktoken"), (None, {}))
    split = pattern or split
    if split is None:
        raise UserError(
            f"{path}: the name does not say how text is split; set tokenizer.pattern to {', '.join(SPLITS)} "
            "or to a regular expression"
        )
    ranks = _read(path)
    character = byte_characters()
    written = {token: "".join(character[byte] for byte in token) for token in ranks}
    vocab = {written[token]: rank for token, rank in ranks.items()}
    merges = merges_of(written[token] for token in sorted(ranks, key=ranks.__getitem__))
    # Ids must have no gaps, or a new token would get a used one.
    for number in sorted(set(range(max(special.values(), default=0))) - {*vocab.values(), *special.values()}):
        vocab[f"<|reserved_{number}|>"] = number
    # tiktoken looks a piece of text up before it merges, so tokens that no merges reach are found too.
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


SPACE = "▁"  # U+2581, how SentencePiece writes a space
NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM, _BPE, _WORD, _CHAR = range(1, 5)
# Pieces that text must never give (control symbols, bytes) get a score this far below the others in a Unigram model.
_NEVER = 1000.0
BYTE_NAME_CHARACTERS = "<0123456789ABCDEFx>"


@dataclass
class SentencePieceModel:
    """The parts of a SentencePiece model file that encoding needs."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)  # text, score, type
    kind: int = _UNIGRAM
    byte_fallback: bool = False
    space_behind: bool = False
    charsmap: bytes = b""
    dummy_prefix: bool = True
    remove_extra_spaces: bool = True
    escape_spaces: bool = True

    def of_type(self, *types: int) -> list[str]:
        return [piece for piece, _, kind in self.pieces if kind in types]


def from_sentencepiece(path: str) -> Any:
    """A `tokenizers.Tokenizer` with the model's ids; control symbols are its special tokens."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        model = parse_sentencepiece(data)
    except ValueError as error:
        raise UserError(
            f"{path}: neither a tokenizer.json, a SentencePiece model nor tiktoken's ranks ({error}); "
            "download the file again"
        ) from error
    if not model.pieces or model.kind not in (_UNIGRAM, _BPE, _CHAR):
        raise UserError(f"{path}: not a unigram, BPE or character model of SentencePiece; convert it first")
    if model.space_behind or not model.escape_spaces or (model.kind == _BPE and model.of_type(_UNUSED)):
        what = f"{path}: a model with spaces behind words, unescaped spaces or unused BPE pieces"
        raise UserError(f"{what}; convert it first")
    return build_sentencepiece(model)


def parse_sentencepiece(data: bytes) -> SentencePieceModel:
    """Reads the ModelProto of sentencepiece_model.proto, by its field numbers."""
    model = SentencePieceModel()
    for number, value in parse_fields(data):
        part: dict[int, Any] = dict(parse_fields(as_bytes(value))) if number <= 3 else {}
        if number == 1:
            text, score = as_bytes(part.get(1, b"")).decode(), as_float(part.get(2, 0))
            model.pieces.append((text, score, part.get(3, NORMAL)))
        elif number == 2:
            model.kind = part.get(3, _UNIGRAM)
            model.space_behind = bool(part.get(24, 0))
            model.byte_fallback = bool(part.get(35, 0))
        elif number == 3:
            model.charsmap = part.get(2, b"")
            model.dummy_prefix = bool(part.get(3, 1))
            model.remove_extra_spaces = bool(part.get(4, 1))
            model.escape_spaces = bool(part.get(5, 1))
    return model


def build_sentencepiece(model: SentencePieceModel) -> Any:
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Inner

    unknown = next((i for i, (_, _, kind) in enumerate(model.pieces) if kind == _UNKNOWN), 0)
    if model.kind == _UNIGRAM:
        never = min((score for _, score, kind in model.pieces if kind == NORMAL), default=0.0) - _NEVER
        # Rounded: the library reads long numbers from its own file inexactly, ten digits exactly.
        scored = [(text, round(score if kind == NORMAL else never, 9)) for text, score, kind in model.pieces]
        inner = Inner(models.Unigram(scored, unk_id=unknown, byte_fallback=model.byte_fallback))
    else:
        ranked = sorted((entry for entry in model.pieces if entry[2] == NORMAL), key=lambda entry: -entry[1])
        vocab = {piece: i for i, (piece, _, _) in enumerate(model.pieces)}
        merges = merges_of(piece for piece, _, _ in ranked) if model.kind == _BPE else []
        name, bytes_too = model.pieces[unknown][0], model.byte_fallback
        inner = Inner(models.BPE(vocab, merges, unk_token=name, fuse_unk=True, byte_fallback=bytes_too))
    defined = model.of_type(_USER_DEFINED)
    inner.normalizer = _normalizer(model, defined)
    inner.pre_tokenizer = _pre_tokenizer(model)
    leading = [decoders.Strip(" ", 1, 0)] if model.dummy_prefix else []
    inner.decoder = piece_decoder(*leading)
    control = model.of_type(_UNKNOWN, _CONTROL)
    inner.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in control])
    # Matched after normalization, which must see the whole text: spaces at its ends belong to no symbol.
    inner.add_tokens([AddedToken(piece, special=False, normalized=True) for piece in defined])
    return inner


def _normalizer(model: SentencePieceModel, defined: list[str]) -> Any:
    """The model's rules. A rule that begins with \\A applies only to the beginning of a document."""
    from tokenizers import Regex, normalizers

    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_spaces:
        extra = ((" {2,}", " "), (r"\A ", ""), (r" \z", ""))
        steps += [normalizers.Replace(Regex(pattern), text) for pattern, text in extra]
    if model.dummy_prefix:
        # The library normalizes user-defined symbols to match them in normalized text; they must not get a space.
        symbols = "|".join(map(re.escape, defined))
        steps.append(normalizers.Replace(Regex(rf"\A(?!(?:{symbols})\z)" if defined else r"\A"), SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _pre_tokenizer(model: SentencePieceModel) -> Any:
    """Splits into words with the spaces before them if no piece crosses words: that is faster, and long documents can
    be cut. Otherwise a text is one stretch, as in SentencePiece."""
    from tokenizers import Regex, pre_tokenizers

    normal = model.of_type(NORMAL)
    steps: list[Any] = []
    if model.kind == _UNIGRAM and (cuts := _cuts_through_names(model, set(normal))):
        steps.append(pre_tokenizers.Split(Regex(cuts), behavior="isolated"))
    across = re.compile(f"[^{SPACE}]{SPACE}")
    if not any(across.search(piece) for piece in normal):
        steps.append(pre_tokenizers.Split(Regex(f"{SPACE}*[^{SPACE}]+|{SPACE}+"), behavior="isolated"))
    return pre_tokenizers.Sequence(steps) if steps else None


def _cuts_through_names(model: SentencePieceModel, normal: set[str]) -> str:
    """Cuts in text that spells <s> or <0x41>. Needed only for names with characters that are not pieces: other names
    lose to their characters' pieces because of their low score."""
    names = [piece for piece in model.of_type(_UNKNOWN, _CONTROL, _UNUSED) if not set(piece) <= normal]
    cuts = []
    for name in names:
        # Not between two unknown characters, which together give one unknown token.
        at = next((i for i in range(1, len(name)) if name[i - 1] in normal or name[i] in normal), 1)
        cuts.append(f"(?<={re.escape(name[:at])})(?={re.escape(name[at:])})")
    if model.of_type(_BYTE) and not set(BYTE_NAME_CHARACTERS) <= normal:
        cuts.append("(?<=<)(?=0x[0-9A-F]{2}>)")
    return "|".join(cuts)


def piece_decoder(*last: Any) -> Any:
    """The decoder from pieces to text, followed by the steps in `last`."""
    from tokenizers import decoders

    return decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last])


def merges_of(pieces: Iterable[str]) -> list[tuple[str, str]]:
    """Every pair of pieces that joins to a third, in the order of the thirds; `pieces` come best first.

    SentencePiece and tiktoken rank the joined piece, `tokenizers` ranks pairs. With all pairs of a piece adjacent, both
    merge alike unless two pairs that make one piece overlap in the text (a, aa, a). Merging from the left avoids that;
    no test found a case.
    """
    ordered = list(pieces)
    known = set(ordered)
    merges = []
    for piece in ordered:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in known and right in known:
                merges.append((left, right))
    return merges
