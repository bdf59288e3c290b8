"""Qwen3-MoE: a Qwen3 with experts in all or some of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bessemer.model.families.experts import coefficient, decoder, experts, mixture
from bessemer.model.families.family import Config, Piece
from bessemer.model.families.llama import Llama, attention
from bessemer.spec.shape import ModelShape, Moe

_DENSE = Llama("qwen3_moe", ("Qwen3MoeForCausalLM",), head_norm=True, windows="all")
_DEFAULTS = {
    "max_position_embeddings": 32768, "num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 4096,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "norm_topk_prob": False,
    "decoder_sparse_step": 1, "router_aux_loss_coef": 0.001,
}  # fmt: skip


class Qwen3Moe:
    name = "qwen3_moe"
    architectures: tuple[str, ...] = ("Qwen3MoeForCausalLM",)
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        said = {**_DEFAULTS, **config}
        if not said["use_sliding_window"]:
            said["sliding_window"] = None  # files name one that nobody uses
        dense, top_k = _DENSE.shape(said), int(said["num_experts_per_tok"])
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
        return _DENSE.config(shape) | {
            "use_sliding_window": shape.window(0) > 0, "num_experts": moe.experts, "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.ffn, "norm_topk_prob": moe.normalise, "decoder_sparse_step": 1,
            "mlp_only_layers": list(moe.dense_layers), "router_aux_loss_coef": coefficient(moe),
        }  # fmt: skip

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        yield from decoder(shape, attention, experts)


QWEN3_MOE = Qwen3Moe()
