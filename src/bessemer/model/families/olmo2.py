"""OLMo 2: norms on what a branch adds, and on all queries and all keys at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bessemer.model.families.family import Config, Piece, refuse, same
from bessemer.model.families.llama import DEFAULTS, attention, ends, feed_forward, read_dense, write_dense
from bessemer.spec.shape import ModelShape


@dataclass(frozen=True)
class Olmo2:
    name: str = "olmo2"
    architectures: tuple[str, ...] = ("Olmo2ForCausalLM",)
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        said = {**DEFAULTS, "rms_norm_eps": 1e-5, **config}
        refuse(said, "clip_qkv")
        biased = bool(said["attention_bias"])
        return replace(read_dense(said), norm_place="branch", qk_norm="full", qkv_bias=biased, out_bias=biased)

    def config(self, shape: ModelShape) -> dict[str, Any]:
        return write_dense(shape, self.name, self.architectures[0]) | {"attention_bias": shape.qkv_bias}

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        yield from ends(shape)
        for i in range(shape.layers):
            theirs, ours = f"model.layers.{i}", f"blocks.{i}"
            yield from attention(shape, f"{theirs}.self_attn", f"{ours}.attention")
            yield same(f"{theirs}.post_attention_layernorm.weight", f"{ours}.attention_out_norm.weight")
            yield from feed_forward(shape, f"{theirs}.mlp", f"{ours}.ffn")
            yield same(f"{theirs}.post_feedforward_layernorm.weight", f"{ours}.ffn_out_norm.weight")


OLMO2 = Olmo2()
