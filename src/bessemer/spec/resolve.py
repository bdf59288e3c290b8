"""From the spec's model section to a shape: the preset with the user's fields laid over it."""

from __future__ import annotations

from bessemer.spec.schema import ModelSpec
from bessemer.spec.shape import ModelShape, preset


def model_shape(model: ModelSpec, vocab: int) -> ModelShape:
    """The shape asked for. Without a preset: as many KV heads as heads, ffn 8/3 of the width, tied below width 2048."""
    named = preset(model.preset) if model.preset else None
    width = model.width or (named.width if named else 0)
    heads = model.heads or (named.heads if named else 1)
    resized = model.width is not None or model.heads is not None
    head_dim = model.head_dim or (named.head_dim if named and not resized else max(1, width // heads))
    kv_heads = model.kv_heads or (named.kv_heads if named and not model.heads else heads)
    ffn = model.ffn or (named.ffn if named and not model.width else -(-8 * width // (3 * 32)) * 32)
    tied = model.tied if model.tied is not None else (named.tied if named else width < 2048)
    return ModelShape(
        vocab=vocab,
        width=width,
        layers=model.layers or (named.layers if named else 1),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        tied=tied,
        qk_norm=model.qk_norm if model.qk_norm is not None else (named.qk_norm if named else False),
        rope_theta=model.rope_theta or (named.rope_theta if named else 10_000.0),
        norm_eps=model.norm_eps or (named.norm_eps if named else 1e-5),
    )
