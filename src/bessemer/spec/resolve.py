"""From the spec's model section to a shape: the preset, or a given shape, with the user's fields laid over it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from bessemer.spec.model import ModelSpec
from bessemer.spec.part import Part
from bessemer.spec.shape import Mamba, Mla, ModelShape, Moe, Rope, preset

PARTS: dict[str, type] = {"rope": Rope, "moe": Moe, "mla": Mla, "mamba": Mamba}


def model_shape(model: ModelSpec, vocab: int, given: ModelShape | None = None) -> ModelShape:
    """The shape asked for; `given` is what a folder of weights says. Without it and without a preset: as many KV heads
    as heads, ffn 8/3 of the width, tied below width 2048."""
    named = given or (preset(model.preset) if model.preset else None)
    width = model.width or (named.width if named else 0)
    heads = model.heads or (named.heads if named else 1)
    resized = model.width is not None or model.heads is not None
    base = named or ModelShape(0, width, 1, heads, heads, 1, 0)
    head_dim = base.head_dim if named and not resized else max(1, width // heads)
    kv_heads = base.kv_heads if named and not model.heads else heads
    ffn = base.ffn if named and not model.width else -(-8 * width // (3 * 32)) * 32
    tied = base.tied if named else width < 2048
    base = replace(
        base, vocab=vocab, width=width, heads=heads, head_dim=head_dim, kv_heads=kv_heads, ffn=ffn, tied=tied
    )
    for field in fields(ModelShape):
        written = getattr(model, field.name, None)
        if written is not None:
            base = replace(base, **{field.name: _laid_over(field.name, written, base)})
    if model.init == "mup":
        # The head's logits shrink as the width grows, so that one learning rate serves all widths.
        base = replace(base, logit_scale=base.logit_scale * model.mup_width / base.width)
    return base


def _laid_over(name: str, written: Any, base: ModelShape) -> Any:
    """A part of the spec over the part of the shape, key by key."""
    if not isinstance(written, Part):
        return tuple(written) if isinstance(written, list) else written
    keys = {key: tuple(v) if isinstance(v, list) else v for key, v in written.model_dump(exclude_none=True).items()}
    before = getattr(base, name)
    if before is not None:
        return replace(before, **keys)
    if name == "moe":
        keys.setdefault("ffn", base.ffn)
    return PARTS[name](**keys)
