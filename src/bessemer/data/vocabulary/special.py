"""Special tokens of a `tokenizers.Tokenizer`, and its twin for text that goes on where other text ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

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
