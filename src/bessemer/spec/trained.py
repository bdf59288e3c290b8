"""How much of a model trains under `optimizer.freeze` or with adapters, and the bytes of its parameters, by the sizes
of its parts, before the model exists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING

from bessemer.spec.adapter import AdapterSpec, adapter_share, quantized_parameters
from bessemer.spec.optimizer import ParameterBytes, optimizer_bytes
from bessemer.spec.shape import ModelShape, layer_counts, parameter_counts

if TYPE_CHECKING:
    from bessemer.spec.schema import RunSpec


def expand_ranges(pattern: str) -> Iterator[str]:
    """`blocks.0-1.ffn` as `blocks.0.ffn`, `blocks.1.ffn`. A descending range is left as it is and matches nothing."""
    match = re.search(r"(?<=\.)(\d+)-(\d+)(?=\.|$)", pattern)
    layers = range(int(match[1]), int(match[2]) + 1) if match else ()
    if match is None or not layers:
        return iter([pattern])
    return (f"{pattern[: match.start()]}{layer}{pattern[match.end() :]}" for layer in layers)


def matches(name: str, glob: str) -> bool:
    """Whether a pattern without ranges names the parameter or a module around it."""
    return fnmatchcase(name, glob) or fnmatchcase(name, f"{glob}.*")


def trained_share(shape: ModelShape, freeze: Sequence[str], adapter: AdapterSpec | None = None) -> float:
    """The share of the parameters that train. Exact for patterns of layers, of their parts, and of the matrices of
    attention and feed-forward parts; parameters that it does not know by name count as trained. With an adapter, its
    size as a share of the model."""
    if adapter is not None:
        return adapter_share(shape, adapter)
    return _trained_share(shape, tuple(freeze)) if freeze and not shape.wrapped else 1.0


def parameter_bytes(spec: RunSpec, shape: ModelShape, precision: str) -> ParameterBytes:
    """Bytes per parameter of a run, by what trains and what is quantized."""
    share = trained_share(shape, spec.optimizer.freeze, spec.adapter)
    each = optimizer_bytes(spec.optimizer, spec.memory, precision, share)
    if spec.adapter is None or spec.adapter.base == "full":
        return each
    quantized = quantized_parameters(shape) / shape.parameters
    return replace(each, quantized=quantized, working=(1 - quantized) * each.working)


@lru_cache(maxsize=64)  # a search calls it thousands of times
def _trained_share(shape: ModelShape, freeze: tuple[str, ...]) -> float:
    globs = [glob for pattern in freeze for glob in expand_ranges(pattern)]
    frozen = sum(size for name, size in _parts(shape) if any(matches(name, glob) for glob in globs))
    return 1.0 - frozen / shape.parameters


def _parts(shape: ModelShape) -> Iterator[tuple[str, float]]:
    counts = parameter_counts(shape)
    yield "embedding.weight", counts.get("embedding", 0)
    yield "position.weight", counts.get("positions", 0)
    yield "types.weight", counts.get("token types", 0)
    yield "head.weight", counts.get("head", 0)
    for layer in range(shape.layers + shape.decoder_layers):
        for name, size in _layer_parts(shape, layer):
            yield f"blocks.{layer}.{name}", size


def _layer_parts(shape: ModelShape, layer: int) -> Iterator[tuple[str, float]]:
    counts = layer_counts(shape, layer)
    inner, kv = shape.attention_width * shape.width, shape.kv_heads * shape.head_dim * shape.width
    matrices = {"query": inner, "key": kv, "value": kv, "out": inner}
    plain = shape.mla is None and layer < shape.layers and counts["attention"]
    for name, size in (matrices if plain else {}).items():
        yield f"attention.{name}.weight", size
    yield "attention.rest", counts["attention"] - (sum(matrices.values()) if plain else 0)
    yield "mamba.rest", counts["state space"]
    names = ("gate", "up", "down") if shape.gated else ("up", "down")
    for name in names:
        yield f"ffn.{name}.weight", (counts["feed-forward"] + counts["experts"]) / len(names)
        yield f"ffn.shared.{name}.weight", counts["shared experts"] / len(names)
    yield "ffn.router.weight", counts["router"]
    yield "norm.weight", counts["norms"]
