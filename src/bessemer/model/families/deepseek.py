"""DeepSeek-V2 and V3: latent attention, experts of which some are shared, the first layers without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bessemer.errors import UserError
from bessemer.model.families.experts import decoder, experts, mixture
from bessemer.model.families.family import Config, Piece, need, refuse, same
from bessemer.model.families.llama import DEFAULTS, feed_forward, linear, read_dense, write_dense
from bessemer.model.rotary import yarn_mscale
from bessemer.spec.shape import Mla, ModelShape, Moe, Rope

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
