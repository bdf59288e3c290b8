"""Families with LayerNorm and no gate: GPT-2 (learned positions, transposed matrices), GPT-NeoX and Pythia (partial
rotary, parallel branches), BLOOM (ALiBi, embedding norm), and Falcon in its three layouts: 7B (multi-query, parallel),
40B and 11B (grouped queries, parallel with one or two norms) and RW (ALiBi, sequential).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from bessemer.errors import UserError
from bessemer.model.families.llama import ACTIVATIONS, linear
from bessemer.model.families.registry import (
    COMMON_KEYS,
    Config,
    WeightMapping,
    activation,
    fused,
    layers,
    read_keys,
    read_rope,
    refuse,
    rename,
    transposed,
    write_keys,
    write_rope,
)
from bessemer.spec.shape import ModelShape, Rope


def fused_qkv(hf: str, attention: str, shape: ModelShape) -> Iterator[WeightMapping]:
    """Queries, keys and values in one matrix, group by group: the query heads of a key-value head, its key, its value.
    One group is multi-query attention (Falcon 7B), one per head is multi-head attention (GPT-NeoX, BLOOM)."""
    for part in ("weight", "bias") if shape.qkv_bias else ("weight",):
        yield _grouped_qkv(f"{hf}.{part}", tuple(f"{attention}.{name}.{part}" for name in _QKV), shape)


_QKV = ("query", "key", "value")


def _grouped_qkv(hf: str, native: tuple[str, ...], shape: ModelShape) -> WeightMapping:
    heads = (shape.heads // shape.kv_heads, 1, 1)  # query, key and value heads per group

    def split(tensors: list[Tensor]) -> list[Tensor]:
        groups = tensors[0].unflatten(0, (shape.kv_heads, sum(heads), shape.head_dim))
        return [part.flatten(0, 2).contiguous() for part in groups.split(heads, dim=1)]

    def join(tensors: list[Tensor]) -> list[Tensor]:
        import torch

        parts = [x.unflatten(0, (shape.kv_heads, n, shape.head_dim)) for x, n in zip(tensors, heads, strict=True)]
        return [torch.cat(parts, dim=1).flatten(0, 2)]

    return WeightMapping((hf,), native, split, join)


_GPT2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
    "tie_word_embeddings": True,
}  # fmt: skip


_GPT2_KEYS = {
    "vocab_size": "vocab", "n_positions": "max_positions", "n_embd": "width", "n_layer": "layers", "n_head": "heads",
    "layer_norm_epsilon": "norm_eps", "tie_word_embeddings": "tied",
}  # fmt: skip


class Gpt2:
    name = "gpt2"
    architectures: tuple[str, ...] = ("GPT2LMHeadModel", "GPT2Model")
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        values = _GPT2_DEFAULTS | dict(config)
        refuse(values, "scale_attn_by_inverse_layer_idx", False)
        refuse(values, "add_cross_attention", False)
        width, heads = values["n_embd"], values["n_head"]
        return ModelShape(
            **read_keys(values, _GPT2_KEYS), kv_heads=heads, head_dim=width // heads,
            ffn=values["n_inner"] or 4 * width, attention_scale=None if values["scale_attn_weights"] else 1.0,
            positions="learned", norm="layer", activation=activation(values, "activation_function"), gated=False,
            qkv_bias=True, out_bias=True, ffn_bias=True,
        )  # fmt: skip

    def config(self, shape: ModelShape) -> dict[str, Any]:
        return write_keys(self, shape, _GPT2_KEYS) | {
            "n_inner": shape.ffn, "scale_attn_weights": shape.attention_scale is None,
            "activation_function": {"gelu_tanh": "gelu_new"}.get(shape.activation, shape.activation),
        }  # fmt: skip

    def weight_mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        yield rename("transformer.wte.weight", "embedding.weight")
        yield rename("transformer.wpe.weight", "position.weight")
        for hf, native in layers(shape, "transformer.h"):
            yield from linear(f"{hf}.ln_1", f"{native}.attention_norm", bias=True)
            yield from _fused_conv1d(f"{hf}.attn.c_attn", f"{native}.attention", shape.width)
            yield from _conv1d(f"{hf}.attn.c_proj", f"{native}.attention.out")
            yield from linear(f"{hf}.ln_2", f"{native}.ffn_norm", bias=True)
            yield from _conv1d(f"{hf}.mlp.c_fc", f"{native}.ffn.up")
            yield from _conv1d(f"{hf}.mlp.c_proj", f"{native}.ffn.down")
        yield from linear("transformer.ln_f", "norm", bias=True)
        if not shape.tied:
            yield rename("lm_head.weight", "head.weight")


def _conv1d(hf: str, native: str) -> Iterator[WeightMapping]:
    yield transposed(f"{hf}.weight", f"{native}.weight")
    yield rename(f"{hf}.bias", f"{native}.bias")


def _fused_conv1d(hf: str, attention: str, width: int) -> Iterator[WeightMapping]:
    """All queries, then all keys, then all values."""

    def split(tensors: list[Tensor]) -> list[Tensor]:
        return [part.t().contiguous() for part in tensors[0].split(width, dim=1)]

    def join(tensors: list[Tensor]) -> list[Tensor]:
        import torch

        return [torch.cat(tensors).t().contiguous()]

    names = [f"{attention}.{name}" for name in ("query", "key", "value")]
    yield WeightMapping((f"{hf}.weight",), tuple(f"{name}.weight" for name in names), split, join)
    yield fused(f"{hf}.bias", tuple(f"{name}.bias" for name in names), (width, width, width))


GPT2 = Gpt2()


_NEOX_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
    "intermediate_size": 24576, "hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False, "use_parallel_residual": True, "attention_bias": True,
    "rotary_pct": 0.25, "rotary_emb_base": 10_000.0,
}  # fmt: skip


_NEOX_KEYS = COMMON_KEYS | {"layer_norm_eps": "norm_eps"}


class GptNeoX:
    name = "gpt_neox"
    architectures: tuple[str, ...] = ("GPTNeoXForCausalLM", "GPTNeoXModel")
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        values = _NEOX_DEFAULTS | dict(config)
        width, heads, bias = values["hidden_size"], values["num_attention_heads"], values["attention_bias"]
        rope = {"rope_theta": values["rotary_emb_base"], "partial_rotary_factor": values["rotary_pct"]}
        scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
        return ModelShape(
            **read_keys(values, _NEOX_KEYS), kv_heads=heads, head_dim=width // heads,
            rope=read_rope(values, rope | scaling), norm="layer",
            parallel="two_norms" if values["use_parallel_residual"] else "none",
            activation=activation(values, "hidden_act"), gated=False, qkv_bias=bias, out_bias=bias, ffn_bias=True,
        )  # fmt: skip

    def config(self, shape: ModelShape) -> dict[str, Any]:
        return write_keys(self, shape, _NEOX_KEYS) | {
            "hidden_act": ACTIVATIONS[shape.activation], "use_parallel_residual": shape.parallel == "two_norms",
            "attention_bias": shape.qkv_bias, "rotary_pct": shape.rope.share, "rotary_emb_base": shape.rope.theta,
            "rope_scaling": write_rope(shape.rope)["rope_scaling"],
        }  # fmt: skip

    def weight_mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        yield rename("gpt_neox.embed_in.weight", "embedding.weight")
        for hf, native in layers(shape, "gpt_neox.layers"):
            yield from linear(f"{hf}.input_layernorm", f"{native}.attention_norm", bias=True)
            yield from linear(f"{hf}.post_attention_layernorm", f"{native}.ffn_norm", bias=True)
            yield from fused_qkv(f"{hf}.attention.query_key_value", f"{native}.attention", shape)
            yield from linear(f"{hf}.attention.dense", f"{native}.attention.out", shape.out_bias)
            yield from linear(f"{hf}.mlp.dense_h_to_4h", f"{native}.ffn.up", bias=True)
            yield from linear(f"{hf}.mlp.dense_4h_to_h", f"{native}.ffn.down", bias=True)
        yield from linear("gpt_neox.final_layer_norm", "norm", bias=True)
        if not shape.tied:
            yield rename("embed_out.weight", "head.weight")


GPT_NEOX = GptNeoX()


class Bloom:
    name = "bloom"
    architectures: tuple[str, ...] = ("BloomForCausalLM", "BloomModel")
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        refuse(config, "apply_residual_connection_post_layernorm", False)
        refuse(config, "slow_but_exact", False)

        def either(old: str, new: str, default: int) -> int:
            """Files on the Hub mix old and new keys."""
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

    def weight_mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        yield rename("transformer.word_embeddings.weight", "embedding.weight")
        yield from linear("transformer.word_embeddings_layernorm", "embedding_norm", bias=True)
        for hf, native in layers(shape, "transformer.h"):
            yield from linear(f"{hf}.input_layernorm", f"{native}.attention_norm", bias=True)
            yield from fused_qkv(f"{hf}.self_attention.query_key_value", f"{native}.attention", shape)
            yield from linear(f"{hf}.self_attention.dense", f"{native}.attention.out", bias=True)
            yield from linear(f"{hf}.post_attention_layernorm", f"{native}.ffn_norm", bias=True)
            yield from linear(f"{hf}.mlp.dense_h_to_4h", f"{native}.ffn.up", bias=True)
            yield from linear(f"{hf}.mlp.dense_4h_to_h", f"{native}.ffn.down", bias=True)
        yield from linear("transformer.ln_f", "norm", bias=True)
        if not shape.tied:
            yield rename("lm_head.weight", "head.weight")


BLOOM = Bloom()


_FALCON_DEFAULTS: dict[str, Any] = {
    "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
    "num_ln_in_parallel_attn": None, "layer_norm_epsilon": 1e-5, "num_kv_heads": None, "alibi": False,
    "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False,
    "max_position_embeddings": 2048, "ffn_hidden_size": None, "activation": "gelu", "tie_word_embeddings": True,
}  # fmt: skip


_FALCON_KEYS = {
    "vocab_size": "vocab", "num_hidden_layers": "layers", "num_attention_heads": "heads",
    "layer_norm_epsilon": "norm_eps", "max_position_embeddings": "max_positions", "tie_word_embeddings": "tied",
}  # fmt: skip


class Falcon:
    name = "falcon"
    architectures: tuple[str, ...] = ("FalconForCausalLM", "FalconModel")
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        values = _FALCON_DEFAULTS | dict(config)
        width, heads = values.get("n_embed") or values["hidden_size"], values["num_attention_heads"]
        new, parallel, bias = values["new_decoder_architecture"], values["parallel_attn"], values["bias"]
        kv_heads = values["num_kv_heads"] or heads
        if not new:
            kv_heads = 1 if values["multi_query"] else heads
            if parallel:
                refuse(values, "num_ln_in_parallel_attn", 1, why="only new_decoder_architecture has two norms")
        elif not parallel:
            raise UserError("config.json: parallel_attn: false contradicts new_decoder_architecture: true; remove one")
        else:
            refuse(values, "num_ln_in_parallel_attn", 1, 2)
        two_norms = new and values["num_ln_in_parallel_attn"] != 1
        return ModelShape(
            **read_keys(values, _FALCON_KEYS), width=width, kv_heads=kv_heads, head_dim=width // heads,
            ffn=values["ffn_hidden_size"] or 4 * width, positions="alibi" if values["alibi"] else "rope",
            alibi_rounded=bool(values["alibi"]), rope=Rope() if values["alibi"] else read_rope(values), norm="layer",
            parallel="two_norms" if two_norms else "one_norm" if parallel else "none",
            activation=activation(values, "activation"), gated=False, qkv_bias=bias, out_bias=bias, ffn_bias=bias,
        )  # fmt: skip

    def config(self, shape: ModelShape) -> dict[str, Any]:
        old = shape.parallel != "two_norms" and shape.kv_heads in (1, shape.heads)
        return write_keys(self, shape, _FALCON_KEYS) | {
            "hidden_size": shape.width, "num_kv_heads": shape.kv_heads, "multi_query": shape.kv_heads == 1,
            "new_decoder_architecture": not old,
            "parallel_attn": shape.parallel != "none",
            "num_ln_in_parallel_attn": {"none": None, "one_norm": 1, "two_norms": 2}[shape.parallel],
            "alibi": shape.positions == "alibi", "bias": shape.qkv_bias, "ffn_hidden_size": shape.ffn,
            "activation": ACTIVATIONS[shape.activation],
        } | write_rope(shape.rope)  # fmt: skip

    def weight_mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        first, second = {
            "none": ("input_layernorm", "post_attention_layernorm"),
            "one_norm": ("input_layernorm", ""),
            "two_norms": ("ln_attn", "ln_mlp"),
        }[shape.parallel]
        yield rename("transformer.word_embeddings.weight", "embedding.weight")
        for hf, native in layers(shape, "transformer.h"):
            yield from linear(f"{hf}.{first}", f"{native}.attention_norm", bias=True)
            if second:
                yield from linear(f"{hf}.{second}", f"{native}.ffn_norm", bias=True)
            yield from fused_qkv(f"{hf}.self_attention.query_key_value", f"{native}.attention", shape)
            yield from linear(f"{hf}.self_attention.dense", f"{native}.attention.out", shape.out_bias)
            yield from linear(f"{hf}.mlp.dense_h_to_4h", f"{native}.ffn.up", shape.ffn_bias)
            yield from linear(f"{hf}.mlp.dense_4h_to_h", f"{native}.ffn.down", shape.ffn_bias)
        yield from linear("transformer.ln_f", "norm", bias=True)
        if not shape.tied:
            yield rename("lm_head.weight", "head.weight")


FALCON = Falcon()
