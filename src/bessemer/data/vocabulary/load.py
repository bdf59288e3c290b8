"""Tokenizers from files: a Hugging Face tokenizer.json, a SentencePiece model, tiktoken's ranks."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bessemer.data.tokenizer import DEFAULT_EOS
from bessemer.data.vocabulary.sentencepiece import from_sentencepiece, merges_of
from bessemer.data.vocabulary.special import check_decodes, declare
from bessemer.data.vocabulary.split import SPLITS, byte_characters, byte_level
from bessemer.errors import UserError

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
