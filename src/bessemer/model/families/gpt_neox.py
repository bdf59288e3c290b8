"""GPT-NeoX and Pythia: rotary positions on a part of each head, and usually both branches side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bessemer.model.families.family import Config, Piece, activation, read_rope, same, write_rope
from bessemer.model.families.fused import fused_qkv
from bessemer.model.families.llama import ACTIVATIONS, linear
from bessemer.spec.shape import ModelShape

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
    "intermediate_size": 24576, "hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False, "use_parallel_residual": True, "attention_bias": True,
    "rotary_pct": 0.25, "rotary_emb_base": 10_000.0,
}  # fmt: skip


class GptNeoX:
    name = "gpt_neox"
    architectures: tuple[str, ...] = ("GPTNeoXForCausalLM", "GPTNeoXModel")
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        said = _DEFAULTS | dict(config)
        width, heads, bias = said["hidden_size"], said["num_attention_heads"], said["attention_bias"]
        own = {"rope_theta": said["rotary_emb_base"], "partial_rotary_factor": said["rotary_pct"]}
        scaling = said.get("rope_parameters") or said.get("rope_scaling") or {}
        return ModelShape(
            vocab=said["vocab_size"], width=width, layers=said["num_hidden_layers"], heads=heads, kv_heads=heads,
            head_dim=width // heads, ffn=said["intermediate_size"], tied=said["tie_word_embeddings"],
            norm_eps=said["layer_norm_eps"], max_positions=said["max_position_embeddings"],
            rope=read_rope(said, own | scaling), norm="layer",
            parallel="two_norms" if said["use_parallel_residual"] else "none",
            activation=activation(said, "hidden_act"), gated=False, qkv_bias=bias, out_bias=bias, ffn_bias=True,
        )  # fmt: skip

    def config(self, shape: ModelShape) -> dict[str, Any]:
        return {
            "architectures": [self.architectures[0]], "model_type": self.name, "vocab_size": shape.vocab,
            "hidden_size": shape.width, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
            "intermediate_size": shape.ffn,
            "hidden_act": ACTIVATIONS[shape.activation],
            "max_position_embeddings": shape.max_positions, "layer_norm_eps": shape.norm_eps,
            "tie_word_embeddings": shape.tied, "use_parallel_residual": shape.parallel == "two_norms",
            "attention_bias": shape.qkv_bias, "rotary_pct": shape.rope.share, "rotary_emb_base": shape.rope.theta,
            "rope_scaling": write_rope(shape.rope)["rope_scaling"],
        }  # fmt: skip

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        yield same("gpt_neox.embed_in.weight", "embedding.weight")
        for i in range(shape.layers):
            theirs, ours = f"gpt_neox.layers.{i}", f"blocks.{i}"
            yield from linear(f"{theirs}.input_layernorm", f"{ours}.attention_norm", bias=True)
            yield from linear(f"{theirs}.post_attention_layernorm", f"{ours}.ffn_norm", bias=True)
            yield from fused_qkv(f"{theirs}.attention.query_key_value", f"{ours}.attention", shape)
            yield from linear(f"{theirs}.attention.dense", f"{ours}.attention.out", shape.out_bias)
            yield from linear(f"{theirs}.mlp.dense_h_to_4h", f"{ours}.ffn.up", bias=True)
            yield from linear(f"{theirs}.mlp.dense_4h_to_h", f"{ours}.ffn.down", bias=True)
        yield from linear("gpt_neox.final_layer_norm", "norm", bias=True)
        if not shape.tied:
            yield same("embed_out.weight", "head.weight")


GPT_NEOX = GptNeoX()
