"""Queries, keys and values in one matrix, group by group: query heads that share a key-value head, its key, its value.

With one group it is multi-query attention (Falcon 7B), with as many groups as heads the plain one (GPT-NeoX, BLOOM).

GPT-2: learned positions, LayerNorm, biases everywhere, and every matrix stored transposed.

GPT-NeoX and Pythia: rotary positions on a part of each head, and usually both branches side by side.

BLOOM: ALiBi, a norm on the embeddings, LayerNorm and biases everywhere, a feed-forward part of four widths.

Falcon in its three layouts: 7B (one key-value head, branches side by side), 40B and 11B (grouped heads, branches
side by side with two norms or one), and RW (ALiBi, one branch after the other). All have LayerNorm and no gate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from bessemer.errors import UserError
from bessemer.model.families.family import (
    Config,
    Piece,
    activation,
    joined,
    read_rope,
    refuse,
    same,
    transposed,
    write_rope,
)
from bessemer.model.families.llama import ACTIVATIONS, linear
from bessemer.spec.shape import ModelShape, Rope


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


_GPT2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
    "tie_word_embeddings": True,
}  # fmt: skip


class Gpt2:
    name = "gpt2"
    architectures: tuple[str, ...] = ("GPT2LMHeadModel", "GPT2Model")
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        said = _GPT2_DEFAULTS | dict(config)
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


_NEOX_DEFAULTS: dict[str, Any] = {
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
        said = _NEOX_DEFAULTS | dict(config)
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


_FALCON_DEFAULTS: dict[str, Any] = {
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
        said = _FALCON_DEFAULTS | dict(config)
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
