"""Mixtures of experts: Mixtral, Qwen3-MoE, DeepSeek-V2 and V3 (latent attention, shared experts). Files store experts
one by one; the native model stacks them.

A mapping is one matrix of all experts of a layer, so a conversion holds one such stack twice: 2 x 7.5 GB for the 256
experts of DeepSeek-V3 in bf16, not a whole layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from bessemer.errors import UserError
from bessemer.model.families.llama import (
    DEFAULTS,
    Llama,
    attention,
    embedding_and_head,
    feed_forward,
    linear,
    read_dense,
    write_dense,
)
from bessemer.model.families.registry import Config, WeightMapping, need, refuse, rename
from bessemer.model.layers import yarn_mscale
from bessemer.spec.shape import Mla, ModelShape, Moe, Rope

Mappings = Callable[[ModelShape, str, str], Iterator[WeightMapping]]  # of a shape and the two name prefixes


def stacked(hf: tuple[str, ...], native: str) -> WeightMapping:
    """The native tensor stacks the others along a new first dimension."""

    def stack(tensors: list[Tensor]) -> list[Tensor]:
        import torch

        return [torch.stack(tensors)]

    def unstack(tensors: list[Tensor]) -> list[Tensor]:
        return list(tensors[0].unbind(0))

    return WeightMapping(hf, (native,), stack, unstack)


def experts(
    shape: ModelShape, hf: str, native: str, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> Iterator[WeightMapping]:
    """The router and its experts; `names` are the names of gate, up and down."""
    yield rename(f"{hf}.gate.weight", f"{native}.router.weight")
    for name, native_name in zip(names, ("gate", "up", "down"), strict=True):
        per_expert = tuple(f"{hf}.experts.{e}.{name}.weight" for e in range(require_moe(shape).experts))
        yield stacked(per_expert, f"{native}.{native_name}")


def decoder(
    shape: ModelShape, attention: Mappings, experts: Mappings, moe_name: str = "mlp"
) -> Iterator[WeightMapping]:
    """A Llama's layers, some or all with experts under `moe_name`."""
    yield from embedding_and_head(shape)
    for i in range(shape.layers):
        hf, native = f"model.layers.{i}", f"blocks.{i}"
        yield rename(f"{hf}.input_layernorm.weight", f"{native}.attention_norm.weight")
        yield from attention(shape, f"{hf}.self_attn", f"{native}.attention")
        yield rename(f"{hf}.post_attention_layernorm.weight", f"{native}.ffn_norm.weight")
        if shape.has_experts(i):
            yield from experts(shape, f"{hf}.{moe_name}", f"{native}.ffn")
        else:
            yield from feed_forward(shape, f"{hf}.mlp", f"{native}.ffn")


def require_moe(shape: ModelShape) -> Moe:
    assert shape.moe is not None, "no experts"
    return shape.moe


def balance_coefficient(moe: Moe) -> float:
    """transformers' balance loss weight: its loss grows with K, the native one does not (see model/moe.py).

    Rounded to 12 digits, so that it is exactly the native weight again when multiplied by K.
    """
    return float(f"{moe.balance / moe.top_k:.12g}")


_MIXTRAL_DENSE = Llama("mixtral", ("MixtralForCausalLM",), biases="none", windows="all")
_MIXTRAL_DEFAULTS = {
    "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001,
}  # fmt: skip


class Mixtral:
    name = "mixtral"
    architectures: tuple[str, ...] = ("MixtralForCausalLM",)
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        values = {**_MIXTRAL_DEFAULTS, **config}
        refuse(values, "router_jitter_noise", 0)
        dense, top_k = _MIXTRAL_DENSE.shape(values), int(values["num_experts_per_tok"])
        balance = top_k * float(values["router_aux_loss_coef"])
        moe = Moe(int(values["num_local_experts"]), top_k, dense.ffn, balance=balance)
        return replace(dense, moe=moe)

    def config(self, shape: ModelShape) -> dict[str, Any]:
        moe = require_moe(shape)
        return _MIXTRAL_DENSE.config(shape) | {
            "intermediate_size": moe.ffn, "num_local_experts": moe.experts, "num_experts_per_tok": moe.top_k,
            "router_aux_loss_coef": balance_coefficient(moe),
        }  # fmt: skip

    def weight_mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        yield from decoder(shape, attention, partial(experts, names=("w1", "w3", "w2")), "block_sparse_moe")


MIXTRAL = Mixtral()


_QWEN3_DENSE = Llama("qwen3_moe", ("Qwen3MoeForCausalLM",), head_norm=True, windows="all")
_QWEN3_DEFAULTS = {
    "max_position_embeddings": 32768, "num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 4096,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "norm_topk_prob": False,
    "decoder_sparse_step": 1, "router_aux_loss_coef": 0.001,
}  # fmt: skip


class Qwen3Moe:
    name = "qwen3_moe"
    architectures: tuple[str, ...] = ("Qwen3MoeForCausalLM",)
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        values = {**_QWEN3_DEFAULTS, **config}
        if not values["use_sliding_window"]:
            values["sliding_window"] = None  # files name one that is unused
        dense, top_k = _QWEN3_DENSE.shape(values), int(values["num_experts_per_tok"])
        dense_layers, step = values.get("mlp_only_layers") or (), values["decoder_sparse_step"]
        moe = Moe(
            # transformers 5 writes the first key, earlier versions the second.
            experts=int(values.get("num_local_experts", values.get("num_experts", 128))), top_k=top_k,
            ffn=int(values["moe_intermediate_size"]), normalise=bool(values["norm_topk_prob"]),
            dense_layers=tuple(i for i in range(dense.layers) if i in dense_layers or (i + 1) % step),
            balance=top_k * float(values["router_aux_loss_coef"]),
        )  # fmt: skip
        return replace(dense, moe=moe)

    def config(self, shape: ModelShape) -> dict[str, Any]:
        moe = require_moe(shape)
        return _QWEN3_DENSE.config(shape) | {
            "use_sliding_window": shape.window(0) > 0, "num_experts": moe.experts, "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.ffn, "norm_topk_prob": moe.normalise, "decoder_sparse_step": 1,
            "mlp_only_layers": list(moe.dense_layers), "router_aux_loss_coef": balance_coefficient(moe),
        }  # fmt: skip

    def weight_mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        yield from decoder(shape, attention, experts)


QWEN3_MOE = Qwen3Moe()


_DEEPSEEK_DEFAULTS = {
    **DEFAULTS, "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "aux_loss_alpha": 0.0,
}  # fmt: skip
_V2_DEFAULTS = _DEEPSEEK_DEFAULTS | {
    "first_k_dense_replace": 0, "moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2,
    "routed_scaling_factor": 1.0, "topk_method": "greedy", "norm_topk_prob": False, "n_group": None, "topk_group": None,
}  # fmt: skip
_V3_DEFAULTS = _DEEPSEEK_DEFAULTS | {
    "max_position_embeddings": 4096, "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "n_group": 8, "topk_group": 4, "rope_interleave": True,
}  # fmt: skip


@dataclass(frozen=True)
class Deepseek:
    """V3 differs from V2 in its router: sigmoid scores, and a selection bias in place of most of the balance loss."""

    name: str
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any]
    v3: bool
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        values = {**self.defaults, **config}
        refuse(values, "moe_layer_freq", 1)
        refuse(values, "mlp_bias", False)
        refuse(values, "num_key_value_heads", values.get("num_attention_heads"), why="MLA has keys per head")
        dense, biased = read_dense(values), bool(values["attention_bias"])
        rope = replace(dense.rope, interleaved=not self.v3 or bool(values["rope_interleave"]))
        mla = Mla(
            int(values["kv_lora_rank"]), int(values["qk_nope_head_dim"]), int(values["qk_rope_head_dim"]),
            int(values["v_head_dim"]), values["q_lora_rank"],
        )  # fmt: skip
        return replace(
            dense, rope=rope, mla=mla, moe=self._moe(values, dense.layers), kv_heads=dense.heads,
            head_dim=mla.nope_dim + mla.rope_dim, qkv_bias=biased, out_bias=biased,
            attention_scale=_scale(rope, mla.nope_dim + mla.rope_dim),
        )  # fmt: skip

    def _moe(self, values: Config, layers: int) -> Moe:
        refuse(values, "scoring_func", "sigmoid" if self.v3 else "softmax")
        if self.v3:
            refuse(values, "topk_method", "noaux_tc")
        else:
            refuse(values, "topk_method", "greedy", "group_limited_greedy")
            refuse(values, "norm_topk_prob", False, why="transformers ignores it, DeepSeek's own code does not")
        grouped = self.v3 or values["topk_method"] == "group_limited_greedy"
        if not values["n_shared_experts"]:
            raise UserError(f"config.json: n_shared_experts: {values['n_shared_experts']!r}: {self.name} needs one")
        return Moe(
            experts=int(need(values, "n_routed_experts")), top_k=int(need(values, "num_experts_per_tok")),
            ffn=int(values["moe_intermediate_size"]), shared=int(values["n_shared_experts"]),
            dense_layers=tuple(range(min(values["first_k_dense_replace"] or 0, layers))),
            score="sigmoid" if self.v3 else "softmax", normalise=bool(values["norm_topk_prob"]),
            scale=float(values["routed_scaling_factor"]), groups=int(values["n_group"] or 1) if grouped else 1,
            top_groups=int(values["topk_group"] or 1) if grouped else 1, group_score="top2" if self.v3 else "max",
            choice_bias=self.v3, balance=float(values["aux_loss_alpha"]),
        )  # fmt: skip

    def config(self, shape: ModelShape) -> dict[str, Any]:
        mla, moe = shape.mla, require_moe(shape)
        assert mla is not None, "no latent attention"
        config = write_dense(self, shape) | {
            "num_key_value_heads": shape.heads, "head_dim": mla.rope_dim, "attention_bias": shape.qkv_bias,
            "kv_lora_rank": mla.kv_rank, "q_lora_rank": mla.q_rank, "qk_nope_head_dim": mla.nope_dim,
            "qk_rope_head_dim": mla.rope_dim, "v_head_dim": mla.value_dim, "moe_layer_freq": 1,
            "first_k_dense_replace": len(moe.dense_layers), "n_routed_experts": moe.experts,
            "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.ffn, "n_shared_experts": moe.shared,
            "routed_scaling_factor": moe.scale, "norm_topk_prob": moe.normalise, "n_group": moe.groups,
            "topk_group": moe.top_groups, "aux_loss_alpha": moe.balance,
        }  # fmt: skip
        if self.v3:
            more = {"rope_interleave": shape.rope.interleaved, "num_nextn_predict_layers": 0}
            return config | more | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        method = "group_limited_greedy" if moe.groups > 1 else "greedy"
        return config | {"scoring_func": "softmax", "topk_method": method}

    def weight_mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        yield from decoder(shape, _attention, _experts)


def _scale(rope: Rope, key_dim: int) -> float | None:
    """YaRN's temperature applies to the logits, so that it covers the part without positions too."""
    if not rope.mscale_all_dim:
        return None
    mscale = yarn_mscale(rope.factor, rope.mscale_all_dim)
    return float(key_dim**-0.5 * mscale**2)


def _attention(shape: ModelShape, hf: str, native: str) -> Iterator[WeightMapping]:
    assert shape.mla is not None
    if shape.mla.q_rank is None:
        yield rename(f"{hf}.q_proj.weight", f"{native}.query.weight")
    else:
        yield from linear(f"{hf}.q_a_proj", f"{native}.query_down", shape.qkv_bias)
        yield rename(f"{hf}.q_a_layernorm.weight", f"{native}.query_norm.weight")
        yield rename(f"{hf}.q_b_proj.weight", f"{native}.query.weight")
    yield from linear(f"{hf}.kv_a_proj_with_mqa", f"{native}.kv_down", shape.qkv_bias)
    yield rename(f"{hf}.kv_a_layernorm.weight", f"{native}.kv_norm.weight")
    yield rename(f"{hf}.kv_b_proj.weight", f"{native}.kv.weight")
    yield from linear(f"{hf}.o_proj", f"{native}.out", shape.out_bias)


def _experts(shape: ModelShape, hf: str, native: str) -> Iterator[WeightMapping]:
    yield from experts(shape, hf, native)
    yield from feed_forward(shape, f"{hf}.shared_experts", f"{native}.shared")
    if require_moe(shape).choice_bias:
        yield rename(f"{hf}.gate.e_score_correction_bias", f"{native}.choice_bias")


DEEPSEEK_V2 = Deepseek("deepseek_v2", ("DeepseekV2ForCausalLM",), _V2_DEFAULTS, v3=False)
# Published files have a 62nd layer for multi-token prediction; transformers ignores it too.
DEEPSEEK_V3 = Deepseek(
    "deepseek_v3", ("DeepseekV3ForCausalLM",), _V3_DEFAULTS, v3=True, ignored=(r"^model\.layers\.61\.",)
)
