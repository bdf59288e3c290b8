"""GPT-2: learned positions, LayerNorm, biases everywhere, and every matrix stored transposed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from bessemer.model.families.family import Config, Piece, activation, joined, refuse, same, transposed
from bessemer.model.families.llama import linear
from bessemer.spec.shape import ModelShape

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
    "tie_word_embeddings": True,
}  # fmt: skip


class Gpt2:
    name = "gpt2"
    architectures: tuple[str, ...] = ("GPT2LMHeadModel", "GPT2Model")
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        said = _DEFAULTS | dict(config)
        refuse(said, "scale_attn_by_inverse_layer_idx", False)
        refuse(said, "add_cross_attention", False)
        width, heads = said["n_embd"], said["n_head"]
        return ModelShape(
            vocab=said["vocab_size"], width=width, layers=said["n_layer"], heads=heads, kv_heads=heads,
            head_dim=width // heads, ffn=said["n_inner"] or 4 * width, tied=said["tie_word_embeddings"],
            norm_eps=said["layer_norm_epsilon"], attention_scale=None if said["scale_attn_weights"] else 1.0,
            positions="learned", max_positions=said["n_positions"], norm="layer",
            activation=activation(said, "activation_function"), gated=False, qkv_bias=True, out_bias=True,
            ffn_bias=True,
        )  # fmt: skip

    def config(self, shape: ModelShape) -> dict[str, Any]:
        return {
            "architectures": [self.architectures[0]], "model_type": self.name, "vocab_size": shape.vocab,
            "n_positions": shape.max_positions, "n_embd": shape.width, "n_layer": shape.layers, "n_head": shape.heads,
            "n_inner": shape.ffn,
            "activation_function": {"gelu_tanh": "gelu_new"}.get(shape.activation, shape.activation),
            "layer_norm_epsilon": shape.norm_eps, "scale_attn_weights": shape.attention_scale is None,
            "tie_word_embeddings": shape.tied,
        }  # fmt: skip

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        yield same("transformer.wte.weight", "embedding.weight")
        yield same("transformer.wpe.weight", "position.weight")
        for i in range(shape.layers):
            theirs, ours = f"transformer.h.{i}", f"blocks.{i}"
            yield from linear(f"{theirs}.ln_1", f"{ours}.attention_norm", bias=True)
            yield from _fused(f"{theirs}.attn.c_attn", f"{ours}.attention", shape.width)
            yield from _turned(f"{theirs}.attn.c_proj", f"{ours}.attention.out")
            yield from linear(f"{theirs}.ln_2", f"{ours}.ffn_norm", bias=True)
            yield from _turned(f"{theirs}.mlp.c_fc", f"{ours}.ffn.up")
            yield from _turned(f"{theirs}.mlp.c_proj", f"{ours}.ffn.down")
        yield from linear("transformer.ln_f", "norm", bias=True)
        if not shape.tied:
            yield same("lm_head.weight", "head.weight")


def _turned(theirs: str, ours: str) -> Iterator[Piece]:
    yield transposed(f"{theirs}.weight", f"{ours}.weight")
    yield same(f"{theirs}.bias", f"{ours}.bias")


def _fused(theirs: str, attention: str, width: int) -> Iterator[Piece]:
    """All queries, then all keys, then all values."""

    def split(tensors: list[Tensor]) -> list[Tensor]:
        return [part.t().contiguous() for part in tensors[0].split(width, dim=1)]

    def join(tensors: list[Tensor]) -> list[Tensor]:
        import torch

        return [torch.cat(tensors).t().contiguous()]

    names = [f"{attention}.{name}" for name in ("query", "key", "value")]
    yield Piece((f"{theirs}.weight",), tuple(f"{name}.weight" for name in names), split, join)
    yield joined(f"{theirs}.bias", tuple(f"{name}.bias" for name in names), (width, width, width))


GPT2 = Gpt2()
