"""Queries, keys and values in one matrix, group by group: query heads that share a key-value head, its key, its value.

With one group it is multi-query attention (Falcon 7B), with as many groups as heads the plain one (GPT-NeoX, BLOOM).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from bessemer.model.families.family import Piece
from bessemer.spec.shape import ModelShape


def fused_qkv(theirs: str, attention: str, shape: ModelShape) -> Iterator[Piece]:
    """`attention` is the prefix of our layers query, key and value."""
    for part in ("weight", "bias") if shape.qkv_bias else ("weight",):
        yield _grouped(f"{theirs}.{part}", tuple(f"{attention}.{name}.{part}" for name in _NAMES), shape)


_NAMES = ("query", "key", "value")


def _grouped(theirs: str, ours: tuple[str, ...], shape: ModelShape) -> Piece:
    heads = (shape.heads // shape.kv_heads, 1, 1)  # of each kind in a group

    def split(tensors: list[Tensor]) -> list[Tensor]:
        groups = tensors[0].unflatten(0, (shape.kv_heads, sum(heads), shape.head_dim))
        return [part.flatten(0, 2).contiguous() for part in groups.split(heads, dim=1)]

    def join(tensors: list[Tensor]) -> list[Tensor]:
        import torch

        parts = [x.unflatten(0, (shape.kv_heads, n, shape.head_dim)) for x, n in zip(tensors, heads, strict=True)]
        return [torch.cat(parts, dim=1).flatten(0, 2)]

    return Piece((theirs,), ours, split, join)
