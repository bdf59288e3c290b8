"""Experts: one by one in their files, stacked here; what Mixtral, Qwen3-MoE and DeepSeek share.

A piece is one matrix of all experts of a layer, so memory holds one such stack and its parts besides the model: twice
7.5 GB for the 256 experts of DeepSeek-V3 in bf16, and not a whole layer.

Mixtral: a Mistral whose every feed-forward part is a mixture of experts.

Qwen3-MoE: a Qwen3 with experts in all or some of its layers.

DeepSeek-V2 and V3: latent attention, experts of which some are shared, the first layers without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from bessemer.errors import UserError
from bessemer.model.families.family import Config, Piece, need, refuse, same
from bessemer.model.families.llama import (
    DEFAULTS,
    Llama,
    attention,
    ends,
    feed_forward,
    linear,
    read_dense,
    write_dense,
)
from bessemer.model.positions import yarn_mscale
from bessemer.spec.shape import Mla, ModelShape, Moe, Rope

Layer = Callable[[ModelShape, str, str], Iterator[Piece]]  # of a shape, the prefix of their names, and of ours


def stacked(theirs: tuple[str, ...], ours: str) -> Piece:
    """Ours has theirs along a first dimension."""

    def stack(tensors: list[Tensor]) -> list[Tensor]:
        import torch

        return [torch.stack(tensors)]

    def unstack(tensors: list[Tensor]) -> list[Tensor]:
        return list(tensors[0].unbind(0))

    return Piece(theirs, (ours,), stack, unstack)


def experts(
    shape: ModelShape, theirs: str, ours: str, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> Iterator[Piece]:
    """The router and its experts; `names` are their gate, up and down."""
    yield same(f"{theirs}.gate.weight", f"{ours}.router.weight")
    for name, our in zip(names, ("gate", "up", "down"), strict=True):
        each = tuple(f"{theirs}.experts.{e}.{name}.weight" for e in range(mixture(shape).experts))
        yield stacked(each, f"{ours}.{our}")


def decoder(shape: ModelShape, attention: Layer, experts: Layer, place: str = "mlp") -> Iterator[Piece]:
    """A Llama's layers, some or all with experts; `place` is the name of what holds them."""
    yield from ends(shape)
    for i in range(shape.layers):
        theirs, ours = f"model.layers.{i}", f"blocks.{i}"
        yield same(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight")
        yield from attention(shape, f"{theirs}.self_attn", f"{ours}.attention")
        yield same(f"{theirs}.post_attention_layernorm.weight", f"{ours}.ffn_norm.weight")
        if shape.has_experts(i):
            yield from experts(shape, f"{theirs}.{place}", f"{ours}.ffn")
        else:
            yield from feed_forward(shape, f"{theirs}.mlp", f"{ours}.ffn")


def mixture(shape: ModelShape) -> Moe:
    assert shape.moe is not None, "no experts"
    return shape.moe


def coefficient(moe: Moe) -> float:
    """transformers' weight of the balance loss: theirs grows with K where ours does not (see model/moe.py).

    Without what division adds in the last digits, so that times K it is ours again.
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
        said = {**_MIXTRAL_DEFAULTS, **config}
        refuse(said, "router_jitter_noise", 0)
        dense, top_k = _MIXTRAL_DENSE.shape(said), int(said["num_experts_per_tok"])
        moe = Moe(int(said["num_local_experts"]), top_k, dense.ffn, balance=top_k * float(said["router_aux_loss_coef"]))
        return replace(dense, moe=moe)

    def config(self, shape: ModelShape) -> dict[str, Any]:
        moe = mixture(shape)
        return _MIXTRAL_DENSE.config(shape) | {
            "intermediate_size": moe.ffn, "num_local_experts": moe.experts, "num_experts_per_tok": moe.top_k,
            "router_aux_loss_coef": coefficient(moe),
        }  # fmt: skip

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
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
        said = {**_QWEN3_DEFAULTS, **config}
        if not said["use_sliding_window"]:
            said["sliding_window"] = None  # files name one that nobody uses
        dense, top_k = _QWEN3_DENSE.shape(said), int(said["num_experts_per_tok"])
        plain, step = said.get("mlp_only_layers") or (), said["decoder_sparse_step"]
        moe = Moe(
            # transformers 5 writes the first name, earlier ones the second.
            experts=int(said.get("num_local_experts", said.get("num_experts", 128))), top_k=top_k,
            ffn=int(said["moe_intermediate_size"]), normalise=bool(said["norm_topk_prob"]),
            dense_layers=tuple(i for i in range(dense.layers) if i in plain or (i + 1) % step),
            balance=top_k * float(said["router_aux_loss_coef"]),
        )  # fmt: skip
        return replace(dense, moe=moe)

    def config(self, shape: ModelShape) -> dict[str, Any]:
        moe = mixture(shape)
        return _QWEN3_DENSE.config(shape) | {
            "use_sliding_window": shape.window(0) > 0, "num_experts": moe.experts, "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.ffn, "norm_topk_prob": moe.normalise, "decoder_sparse_step": 1,
            "mlp_only_layers": list(moe.dense_layers), "router_aux_loss_coef": coefficient(moe),
        }  # fmt: skip

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        yield from decoder(shape, attention, experts)


QWEN3_MOE = Qwen3Moe()


_SHARED = {
    **DEFAULTS, "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "aux_loss_alpha": 0.0,
}  # fmt: skip
_V2 = _SHARED | {
    "first_k_dense_replace": 0, "moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2,
    "routed_scaling_factor": 1.0, "topk_method": "greedy", "norm_topk_prob": False, "n_group": None, "topk_group": None,
}  # fmt: skip
_V3 = _SHARED | {
    "max_position_embeddings": 4096, "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "n_group": 8, "topk_group": 4, "rope_interleave": True,
}  # fmt: skip


@dataclass(frozen=True)
class Deepseek:
    """V3 differs from V2 in its router: sigmoid scores, and a bias for the choice in place of most balance loss."""

    name: str
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any]
    v3: bool
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        said = {**self.defaults, **config}
        refuse(said, "moe_layer_freq", 1)
        refuse(said, "mlp_bias", False)
        refuse(said, "num_key_value_heads", said.get("num_attention_heads"), why="each head has its keys in MLA")
        dense, biased = read_dense(said), bool(said["attention_bias"])
        rope = replace(dense.rope, interleaved=not self.v3 or bool(said["rope_interleave"]))
        mla = Mla(
            int(said["kv_lora_rank"]), int(said["qk_nope_head_dim"]), int(said["qk_rope_head_dim"]),
            int(said["v_head_dim"]), said["q_lora_rank"],
        )  # fmt: skip
        return replace(
            dense, rope=rope, mla=mla, moe=self._moe(said, dense.layers), kv_heads=dense.heads,
            head_dim=mla.nope_dim + mla.rope_dim, qkv_bias=biased, out_bias=biased,
            attention_scale=_scale(rope, mla.nope_dim + mla.rope_dim),
        )  # fmt: skip

    def _moe(self, said: Config, layers: int) -> Moe:
        refuse(said, "scoring_func", "sigmoid" if self.v3 else "softmax")
        if self.v3:
            refuse(said, "topk_method", "noaux_tc")
        else:
            refuse(said, "topk_method", "greedy", "group_limited_greedy")
            refuse(said, "norm_topk_prob", False, why="transformers does not read it, DeepSeek's own code does")
        grouped = self.v3 or said["topk_method"] == "group_limited_greedy"
        if not said["n_shared_experts"]:
            raise UserError(f"config.json: n_shared_experts: {said['n_shared_experts']!r}: {self.name} has some")
        return Moe(
            experts=int(need(said, "n_routed_experts")), top_k=int(need(said, "num_experts_per_tok")),
            ffn=int(said["moe_intermediate_size"]), shared=int(said["n_shared_experts"]),
            dense_layers=tuple(range(min(said["first_k_dense_replace"] or 0, layers))),
            score="sigmoid" if self.v3 else "softmax", normalise=bool(said["norm_topk_prob"]),
            scale=float(said["routed_scaling_factor"]), groups=int(said["n_group"] or 1) if grouped else 1,
            top_groups=int(said["topk_group"] or 1) if grouped else 1, group_score="top2" if self.v3 else "max",
            choice_bias=self.v3, balance=float(said["aux_loss_alpha"]),
        )  # fmt: skip

    def config(self, shape: ModelShape) -> dict[str, Any]:
        mla, moe = shape.mla, mixture(shape)
        assert mla is not None, "no latent attention"
        found = write_dense(shape, self.name, self.architectures[0]) | {
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
            return found | more | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        method = "group_limited_greedy" if moe.groups > 1 else "greedy"
        return found | {"scoring_func": "softmax", "topk_method": method}

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        yield from decoder(shape, _attention, _experts)


def _scale(rope: Rope, key_dim: int) -> float | None:
    """YaRN's temperature belongs to the logits here, so that it works on the part without positions too."""
    if not rope.mscale_all_dim:
        return None
    mscale = yarn_mscale(rope.factor, rope.mscale_all_dim)
    return float(key_dim**-0.5 * mscale**2)


def _attention(shape: ModelShape, theirs: str, ours: str) -> Iterator[Piece]:
    assert shape.mla is not None
    if shape.mla.q_rank is None:
        yield same(f"{theirs}.q_proj.weight", f"{ours}.query.weight")
    else:
        yield from linear(f"{theirs}.q_a_proj", f"{ours}.query_down", shape.qkv_bias)
        yield same(f"{theirs}.q_a_layernorm.weight", f"{ours}.query_norm.weight")
        yield same(f"{theirs}.q_b_proj.weight", f"{ours}.query.weight")
    yield from linear(f"{theirs}.kv_a_proj_with_mqa", f"{ours}.kv_down", shape.qkv_bias)
    yield same(f"{theirs}.kv_a_layernorm.weight", f"{ours}.kv_norm.weight")
    yield same(f"{theirs}.kv_b_proj.weight", f"{ours}.kv.weight")
    yield from linear(f"{theirs}.o_proj", f"{ours}.out", shape.out_bias)


def _experts(shape: ModelShape, theirs: str, ours: str) -> Iterator[Piece]:
    yield from experts(shape, theirs, ours)
    yield from feed_forward(shape, f"{theirs}.shared_experts", f"{ours}.shared")
    if mixture(shape).choice_bias:
        yield same(f"{theirs}.gate.e_score_correction_bias", f"{ours}.choice_bias")


DEEPSEEK_V2 = Deepseek("deepseek_v2", ("DeepseekV2ForCausalLM",), _V2, v3=False)
# Published files hold a 62nd layer, which predicts the token after the next; transformers leaves it out too.
DEEPSEEK_V3 = Deepseek("deepseek_v3", ("DeepseekV3ForCausalLM",), _V3, v3=True, ignored=(r"^model\.layers\.61\.",))
