"""BLOOM: ALiBi, a norm on the embeddings, LayerNorm and biases everywhere, a feed-forward part of four widths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bessemer.model.families.family import Config, Piece, refuse, same
from bessemer.model.families.fused import fused_qkv
from bessemer.model.families.llama import linear
from bessemer.spec.shape import ModelShape


class Bloom:
    name = "bloom"
    architectures: tuple[str, ...] = ("BloomForCausalLM", "BloomModel")
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        refuse(config, "apply_residual_connection_post_layernorm", False)
        refuse(config, "slow_but_exact", False)

        def either(old: str, new: str, default: int) -> int:
            """The Hub's files mix the names of two times."""
            return int(config.get(old) or config.get(new) or default)

        width, heads = either("n_embed", "hidden_size", 64), either("n_head", "num_attention_heads", 8)
        return ModelShape(
            vocab=config.get("vocab_size", 250_880), width=width, layers=either("n_layer", "num_hidden_layers", 2),
            heads=heads, kv_heads=heads, head_dim=width // heads, ffn=4 * width,
            tied=config.get("tie_word_embeddings", True), norm_eps=config.get("layer_norm_epsilon", 1e-5),
            positions="alibi", max_positions=config.get("seq_length", 0), norm="layer", activation="gelu_tanh",
            gated=False, qkv_bias=True, out_bias=True, ffn_bias=True, embedding_norm=True,
        )  # fmt: skip

    def config(self, shape: ModelShape) -> dict[str, Any]:
        return {
            "architectures": [self.architectures[0]], "model_type": self.name, "vocab_size": shape.vocab,
            "hidden_size": shape.width, "n_layer": shape.layers, "n_head": shape.heads,
            "seq_length": shape.max_positions, "layer_norm_epsilon": shape.norm_eps, "tie_word_embeddings": shape.tied,
        }  # fmt: skip

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        yield same("transformer.word_embeddings.weight", "embedding.weight")
        yield from linear("transformer.word_embeddings_layernorm", "embedding_norm", bias=True)
        for i in range(shape.layers):
            theirs, ours = f"transformer.h.{i}", f"blocks.{i}"
            yield from linear(f"{theirs}.input_layernorm", f"{ours}.attention_norm", bias=True)
            yield from fused_qkv(f"{theirs}.self_attention.query_key_value", f"{ours}.attention", shape)
            yield from linear(f"{theirs}.self_attention.dense", f"{ours}.attention.out", bias=True)
            yield from linear(f"{theirs}.post_attention_layernorm", f"{ours}.ffn_norm", bias=True)
            yield from linear(f"{theirs}.mlp.dense_h_to_4h", f"{ours}.ffn.up", bias=True)
            yield from linear(f"{theirs}.mlp.dense_4h_to_h", f"{ours}.ffn.down", bias=True)
        yield from linear("transformer.ln_f", "norm", bias=True)
        if not shape.tied:
            yield same("lm_head.weight", "head.weight")


BLOOM = Bloom()
