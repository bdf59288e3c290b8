"""Tokenizers from files: a Hugging Face tokenizer.json, a SentencePiece model, tiktoken's ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bessemer.data.tokenizer import DEFAULT_EOS
from bessemer.data.vocabulary.ranks import from_ranks, looks_like_ranks
from bessemer.data.vocabulary.sentencepiece import from_sentencepiece
from bessemer.data.vocabulary.special import check_decodes, declare
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
    if looks_like_ranks(head):
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
