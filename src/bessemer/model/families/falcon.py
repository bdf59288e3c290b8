"""Falcon in its three layouts: 7B (one key-value head, branches side by side), 40B and 11B (grouped heads, branches
side by side with two norms or one), and RW (ALiBi, one branch after the other). All have LayerNorm and no gate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bessemer.errors import UserError
from bessemer.model.families.family import Config, Piece, activation, read_rope, refuse, same, write_rope
from bessemer.model.families.fused import fused_qkv
from bessemer.model.families.llama import ACTIVATIONS, linear
from bessemer.spec.shape import ModelShape, Rope

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
    "num_ln_in_parallel_attn": None, "layer_norm_epsilon": 1e-5, "num_kv_heads": None, "alibi": False,
    "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False,
    "max_position_embeddings": 2048, "ffn_hidden_size": None, "activation": "gelu", "tie_word_embeddings": True,
}  # fmt: skip


class Falcon:
    name = "falcon"
    architectures: tuple[str, ...] = ("FalconForCausalLM", "FalconModel")
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        said = _DEFAULTS | dict(config)
        width, heads, bias = said.get("n_embed") or said["hidden_size"], said["num_attention_heads"], said["bias"]
        new, side_by_side = said["new_decoder_architecture"], said["parallel_attn"]
        kv_heads = said["num_kv_heads"] or heads
        if not new:
            kv_heads = 1 if said["multi_query"] else heads
            if side_by_side:
                refuse(said, "num_ln_in_parallel_attn", 1, why="only new_decoder_architecture has two norms")
        elif not side_by_side:
            raise UserError("config.json: parallel_attn: false contradicts new_decoder_architecture: true; remove one")
        else:
            refuse(said, "num_ln_in_parallel_attn", 1, 2)
        two_norms = new and said["num_ln_in_parallel_attn"] != 1
        return ModelShape(
            vocab=said["vocab_size"], width=width, layers=said["num_hidden_layers"], heads=heads, kv_heads=kv_heads,
            head_dim=width // heads, ffn=said["ffn_hidden_size"] or 4 * width, tied=said["tie_word_embeddings"],
            norm_eps=said["layer_norm_epsilon"], positions="alibi" if said["alibi"] else "rope",
            alibi_rounded=bool(said["alibi"]), max_positions=said["max_position_embeddings"],
            rope=Rope() if said["alibi"] else read_rope(said), norm="layer",
            parallel="two_norms" if two_norms else "one_norm" if side_by_side else "none",
            activation=activation(said, "activation"), gated=False, qkv_bias=bias, out_bias=bias, ffn_bias=bias,
        )  # fmt: skip

    def config(self, shape: ModelShape) -> dict[str, Any]:
        plain = shape.parallel != "two_norms" and shape.kv_heads in (1, shape.heads)
        return {
            "architectures": [self.architectures[0]], "model_type": self.name, "vocab_size": shape.vocab,
            "hidden_size": shape.width, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
            "num_kv_heads": shape.kv_heads, "multi_query": shape.kv_heads == 1, "new_decoder_architecture": not plain,
            "parallel_attn": shape.parallel != "none",
            "num_ln_in_parallel_attn": {"none": None, "one_norm": 1, "two_norms": 2}[shape.parallel],
            "layer_norm_epsilon": shape.norm_eps, "alibi": shape.positions == "alibi", "bias": shape.qkv_bias,
            "max_position_embeddings": shape.max_positions, "ffn_hidden_size": shape.ffn,
            "activation": ACTIVATIONS[shape.activation],
            "tie_word_embeddings": shape.tied,
        } | write_rope(shape.rope)  # fmt: skip

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        first, second = {
            "none": ("input_layernorm", "post_attention_layernorm"),
            "one_norm": ("input_layernorm", ""),
            "two_norms": ("ln_attn", "ln_mlp"),
        }[shape.parallel]
        yield same("transformer.word_embeddings.weight", "embedding.weight")
        for i in range(shape.layers):
            theirs, ours = f"transformer.h.{i}", f"blocks.{i}"
            yield from linear(f"{theirs}.{first}", f"{ours}.attention_norm", bias=True)
            if second:
                yield from linear(f"{theirs}.{second}", f"{ours}.ffn_norm", bias=True)
            yield from fused_qkv(f"{theirs}.self_attention.query_key_value", f"{ours}.attention", shape)
            yield from linear(f"{theirs}.self_attention.dense", f"{ours}.attention.out", shape.out_bias)
            yield from linear(f"{theirs}.mlp.dense_h_to_4h", f"{ours}.ffn.up", shape.ffn_bias)
            yield from linear(f"{theirs}.mlp.dense_4h_to_h", f"{ours}.ffn.down", shape.ffn_bias)
        yield from linear("transformer.ln_f", "norm", bias=True)
        if not shape.tied:
            yield same("lm_head.weight", "head.weight")


FALCON = Falcon()
