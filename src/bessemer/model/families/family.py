"""What a family is: a translation of config.json to a shape and back, and of tensors, piece by piece.

A `Piece` is the smallest group of tensors that translates alone (a fused QKV matrix and our three), so a checkpoint of
any size is converted while only one piece is in memory. Expected shapes follow from the pieces themselves, applied to
tensors without data. Translations only move numbers, so that a round trip gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from bessemer.errors import UserError
from bessemer.spec.shape import Activation, ModelShape, Rope

if TYPE_CHECKING:  # a configuration is translated without torch
    from torch import Tensor

Config = Mapping[str, Any]
WRAP = "`model: {hf: PATH, wrap: true}` trains it through transformers"
Translate = Callable[[list["Tensor"]], list["Tensor"]]


def _same(tensors: list[Tensor]) -> list[Tensor]:
    return tensors


@dataclass(frozen=True)
class Piece:
    """Their tensors by name, ours by name, and the way between."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    to_ours: Translate = _same
    to_theirs: Translate = _same


def same(theirs: str, ours: str) -> Piece:
    return Piece((theirs,), (ours,))


def transposed(theirs: str, ours: str) -> Piece:
    """GPT-2 stores the transpose of what a linear layer holds."""

    def turn(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].t().contiguous()]

    return Piece((theirs,), (ours,), turn, turn)


def joined(theirs: str, ours: tuple[str, ...], sizes: tuple[int, ...], dim: int = 0) -> Piece:
    """One of theirs is several of ours end to end."""

    def split(tensors: list[Tensor]) -> list[Tensor]:
        return [part.contiguous() for part in tensors[0].split(sizes, dim)]

    def join(tensors: list[Tensor]) -> list[Tensor]:
        import torch

        return [torch.cat(tensors, dim)]

    return Piece((theirs,), ours, split, join)


class Family(Protocol):
    """One architecture of Hugging Face."""

    name: str  # its model_type
    architectures: tuple[str, ...]  # class names; the first is written on export
    ignored: tuple[str, ...]  # regular expressions of tensors that older files carry and nobody needs

    def shape(self, config: Config) -> ModelShape:
        """Raises UserError for what the native model cannot do, naming the key."""
        ...

    def config(self, shape: ModelShape) -> dict[str, Any]:
        """The inverse of `shape`, as far as this family can say it: whoever exports checks that
        `family.shape(family.config(shape)) == shape`."""
        ...

    def pieces(self, shape: ModelShape) -> Iterable[Piece]:
        """Covers every tensor of both sides once (a tied head is left out)."""
        ...


def refuse(config: Config, key: str, *allowed: Any, why: str = "the native model does not do it") -> None:
    """A key that may only have these values (or be absent)."""
    if key in config and config[key] not in (*allowed, None):
        fix = "" if config.get("model_type") in ("bert", "t5") else f"; {WRAP}"  # only causal models are wrapped
        raise UserError(f"config.json: {key}: {config[key]!r} is not supported ({why}){fix}")


def need(config: Config, key: str) -> Any:
    if config.get(key) is None:
        raise UserError(f"config.json: {key} is missing: this is not a whole configuration")
    return config[key]


ACTIVATION_NAMES: dict[str, Activation] = {
    "relu": "relu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "swish": "silu", "relu2": "relu2",
}  # fmt: skip


def activation(config: Config, key: str) -> Activation:
    name = need(config, key)
    if name not in ACTIVATION_NAMES:
        raise UserError(f"config.json: {key}: {name!r} is none of {', '.join(ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[name]


def read_rope(config: Config, parameters: Mapping[str, Any] | None = None) -> Rope:
    """Both ways in which files say it: `rope_theta` with `rope_scaling`, and `rope_parameters` (transformers 5).

    Only what a kind of scaling uses is read, so that the same positions are always the same `Rope`."""
    said = {**(config.get("rope_scaling") or {}), **(parameters or config.get("rope_parameters") or {})}
    kind = said.get("rope_type", said.get("type", "default"))
    if kind not in _SCALINGS:
        raise UserError(f"config.json: rope scaling {kind!r} is none of {', '.join(_SCALINGS)}")
    theta: float = said.get("rope_theta") or config.get("rope_theta") or 10_000.0
    share: float = said.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    rope = Rope(theta=float(theta), share=float(share), scaling=_SCALINGS[kind])
    if kind == "default":
        return rope
    if kind == "linear":
        return replace(rope, factor=float(need(said, "factor")))
    longest = int(need(config, "max_position_embeddings"))
    if kind == "dynamic":  # transformers takes the stretch from there, whatever else the file says
        return replace(rope, factor=float(need(said, "factor")), original=longest)
    key = "original_max_position_embeddings"  # counts for more outside (Phi-3)
    original = int(config.get(key) or said.get(key) or longest)
    rope = replace(rope, original=original, factor=float(said.get("factor") or longest / original))
    if kind == "llama3":
        low, high = float(need(said, "low_freq_factor")), float(need(said, "high_freq_factor"))
        return replace(rope, low_freq=low, high_freq=high)
    rope = replace(rope, attention_factor=said.get("attention_factor"))
    if kind == "yarn":
        return replace(
            rope, beta_fast=float(said.get("beta_fast") or 32.0), beta_slow=float(said.get("beta_slow") or 1.0),
            truncate=bool(said.get("truncate", True)), mscale=float(said.get("mscale") or 0.0),
            mscale_all_dim=float(said.get("mscale_all_dim") or 0.0),
        )  # fmt: skip
    return replace(rope, short=tuple(need(said, "short_factor")), long=tuple(need(said, "long_factor")))


_SCALINGS: dict[str, Any] = {
    "default": "none", "linear": "linear", "dynamic": "dynamic", "yarn": "yarn", "longrope": "longrope",
    "su": "longrope", "llama3": "llama3",
}  # fmt: skip


def write_rope(rope: Rope) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which every version of transformers and other readers understand."""
    found: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.share != 1.0:
        found["partial_rotary_factor"] = rope.share
    if rope.scaling == "none":
        return found
    if rope.scaling == "ntk":  # a fixed stretch is only another base; the exporter writes that base
        raise UserError("rope scaling ntk has no name in Hugging Face's files: write its theta instead")
    said: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling not in ("linear",):
        said["original_max_position_embeddings"] = rope.original
    if rope.scaling == "llama3":
        said |= {"low_freq_factor": rope.low_freq, "high_freq_factor": rope.high_freq}
    if rope.scaling == "yarn":
        said |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        said |= {key: getattr(rope, key) for key in ("mscale", "mscale_all_dim") if getattr(rope, key)}
    if rope.scaling == "longrope":
        said |= {"short_factor": list(rope.short), "long_factor": list(rope.long)}
    if rope.attention_factor is not None:
        said["attention_factor"] = rope.attention_factor
    return found | {"rope_scaling": said}
