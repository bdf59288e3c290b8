"""tiktoken's files: one token a line, in base64, and its rank. Made into a byte-level BPE with the same ids."""

from __future__ import annotations

import base64
import binascii
import os
import re
from typing import Any

from bessemer.data.vocabulary.merges import merges_of
from bessemer.data.vocabulary.split import SPLITS, byte_characters, byte_level
from bessemer.errors import UserError

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s*")
# What a file of OpenAI's says by its name: the split rule, and the special tokens with their ids.
_END, _FIM = "<|endoftext|>", ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_KNOWN: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": ("gpt2", {_END: 50256}),
    "r50k_base": ("gpt2", {_END: 50256}),
    "p50k_base": ("gpt2", {_END: 50256}),
    "cl100k_base": (
        "cl100k",
        {_END: 100257, _FIM[0]: 100258, _FIM[1]: 100259, _FIM[2]: 100260, "<|endofprompt|>": 100276},
    ),
    "o200k_base": ("o200k", {_END: 199999, "<|endofprompt|>": 200018}),
}


def looks_like_ranks(head: bytes) -> bool:
    return _LINE.fullmatch(head.split(b"\n", 1)[0]) is not None


def from_ranks(path: str, pattern: str | None = None) -> Any:
    """A `tokenizers.Tokenizer` that gives the ids of tiktoken's Encoding.

    `pattern` is a name of SPLITS or a regular expression in Oniguruma's syntax; a file with one of OpenAI's names
    needs none and brings its special tokens.
    """
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
    for number in sorted(set(range(max(special.values(), default=0))) - {*vocab.values(), *special.values()}):
        vocab[f"<|reserved_{number}|>"] = (
            number  # ids have to be without gaps, or a new token would take a used one
        )
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
                raise UserError(
                    f"{path}:{row}: not a token in base64 and its rank ({error}); download the file again"
                ) from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise UserError(f"{path}: has no token for byte {missing[0]}; download the file again")
    if len(set(ranks.values())) < len(ranks):
        raise UserError(f"{path}: two tokens have the same rank; download the file again")
    return ranks
