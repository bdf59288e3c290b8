"""Phi-3 and Phi-4: a Llama with fused matrices and LongRoPE; small ones rotate a part of each head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bessemer.errors import UserError
from bessemer.model.families.family import Config, Piece, joined, refuse, same
from bessemer.model.families.llama import DEFAULTS, ends, read_dense, write_dense
from bessemer.spec.shape import ModelShape


@dataclass(frozen=True)
class Phi3:
    name: str = "phi3"
    architectures: tuple[str, ...] = ("Phi3ForCausalLM",)
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        said = {**DEFAULTS, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **config}
        said.setdefault("original_max_position_embeddings", 4096)
        for key in ("rope_scaling", "rope_parameters"):
            stretch = said.get(key) or {}
            if stretch.get("rope_type", stretch.get("type")) in ("su", "yarn"):  # the first files' words for it
                said[key] = {**stretch, "rope_type": "longrope"}
        refuse(said, "attention_bias", False, why="Phi-3 has none")
        shape = replace(read_dense(said, partly_rotated=True), windows=(said.get("sliding_window") or 0,))
        if shape.rope.scaling not in ("none", "longrope"):
            raise UserError(f"config.json: rope scaling {shape.rope.scaling!r}: Phi-3 has only 'longrope'")
        return shape

    def config(self, shape: ModelShape) -> dict[str, Any]:
        return write_dense(shape, self.name, self.architectures[0]) | {
            # Here it counts for more than inside rope_scaling.
            "original_max_position_embeddings": shape.rope.original or shape.max_positions,
            "partial_rotary_factor": shape.rope.share, "sliding_window": shape.window(0) or None,
        }  # fmt: skip

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        yield from ends(shape)
        kv_width = shape.kv_heads * shape.head_dim
        for i in range(shape.layers):
            theirs, ours = f"model.layers.{i}", f"blocks.{i}"
            yield same(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight")
            qkv = tuple(f"{ours}.attention.{name}.weight" for name in ("query", "key", "value"))
            yield joined(f"{theirs}.self_attn.qkv_proj.weight", qkv, (shape.attention_width, kv_width, kv_width))
            yield same(f"{theirs}.self_attn.o_proj.weight", f"{ours}.attention.out.weight")
            yield same(f"{theirs}.post_attention_layernorm.weight", f"{ours}.ffn_norm.weight")
            gate_up = f"{ours}.ffn.gate.weight", f"{ours}.ffn.up.weight"
            yield joined(f"{theirs}.mlp.gate_up_proj.weight", gate_up, (shape.ffn, shape.ffn))
            yield same(f"{theirs}.mlp.down_proj.weight", f"{ours}.ffn.down.weight")


PHI3 = Phi3()
