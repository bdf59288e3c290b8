"""How a prompt becomes token ids and where an answer ends: by the conventions that the model was trained with.

A run of our own read documents that begin after the end token of another, so that token begins a prompt. A model of
Hugging Face gets what its own tokenizer adds (the post-processor of tokenizer.json, `add_bos_token`), and its answer
ends with the tokens that generation_config.json, config.json and tokenizer_config.json name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.data.tokenizer import Tokenizer

_BOS_BY_DEFAULT = ("llama", "gemma", "codellama", "mistral")  # classes whose tokenizer.model begins texts with BOS


@dataclass(frozen=True)
class PromptFormat:
    """Ids before and after a prompt, what an empty prompt begins with, and the ids that end an answer."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    start: int
    ends: frozenset[int]

    def encode(self, tokenizer: Tokenizer, prompt: str, parse_special: bool = False) -> list[int]:
        """The ids that the model reads. With `parse_special`, names of special tokens in the prompt are those tokens;
        without it they are plain text. Never empty."""
        text = tokenizer.encode_with_special(prompt) if parse_special else tokenizer.encode(prompt)
        return [*self.prefix, *text, *self.suffix] or [self.start]


def own_format(tokenizer: Tokenizer) -> PromptFormat:
    """Of models trained here."""
    return PromptFormat((tokenizer.eos_id,), (), tokenizer.eos_id, frozenset({tokenizer.eos_id}))


def folder_format(folder: Path, tokenizer: Tokenizer, trained_here: bool = False) -> PromptFormat:
    """Of a Hugging Face folder. `trained_here`: the model was trained on, so the tokenizer's own end token counts too.

    As in transformers, a tokenizer.json says by itself what is added; flags count for a tokenizer.model alone.
    """
    config, about, generation = (
        _read(folder / name) for name in ("config.json", "tokenizer_config.json", "generation_config.json")
    )
    eos, bos = (_token_id(tokenizer, about.get(f"{role}_token")) for role in ("eos", "bos"))
    if (folder / "tokenizer.json").is_file():
        prefix, suffix = _added(tokenizer)
    else:
        kind = str(about.get("tokenizer_class", "")).lower()
        begins = about.get("add_bos_token", kind.startswith(_BOS_BY_DEFAULT)) and bos is not None
        prefix = (bos,) if begins and bos is not None else ()
        suffix = (eos,) if about.get("add_eos_token") and eos is not None else ()
    text_config = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    named = _ids(generation, "eos_token_id") or _ids(config, "eos_token_id") or _ids(text_config, "eos_token_id")
    ends = {*named, *([eos] if eos is not None else ())}
    if trained_here or not ends:
        ends.add(tokenizer.eos_id)
    starts = [*_ids(generation, "bos_token_id"), *_ids(config, "bos_token_id"), *([bos] if bos is not None else ())]
    return PromptFormat(prefix, suffix, next(iter(starts), tokenizer.eos_id), frozenset(ends))


def end_token(folder: Path) -> str | None:
    """The name of the end token in tokenizer_config.json, where it is written."""
    token = _read(folder / "tokenizer_config.json").get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None


def _added(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text."""
    plain = tokenizer.inner.encode("a", add_special_tokens=False).ids
    whole = tokenizer.inner.encode("a").ids
    at = next((i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain), 0)
    return tuple(whole[:at]), tuple(whole[at + len(plain) :])


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _ids(config: Any, key: str) -> list[int]:
    """One id or a list of them."""
    value = config.get(key) if isinstance(config, dict) else None
    values = value if isinstance(value, list) else [value]
    return [id for id in values if isinstance(id, int) and not isinstance(id, bool)]


def _token_id(tokenizer: Tokenizer, token: Any) -> int | None:
    """Older files write a token as an object with its content."""
    name = token.get("content") if isinstance(token, dict) else token
    found: int | None = tokenizer.inner.token_to_id(name) if isinstance(name, str) else None
    return found
