"""Mixtral: a Mistral whose every feed-forward part is a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from bessemer.model.families.experts import coefficient, decoder, experts, mixture
from bessemer.model.families.family import Config, Piece, refuse
from bessemer.model.families.llama import Llama, attention
from bessemer.spec.shape import ModelShape, Moe

_DENSE = Llama("mixtral", ("MixtralForCausalLM",), biases="none", windows="all")
_DEFAULTS = {
    "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001,
}  # fmt: skip


class Mixtral:
    name = "mixtral"
    architectures: tuple[str, ...] = ("MixtralForCausalLM",)
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        said = {**_DEFAULTS, **config}
        refuse(said, "router_jitter_noise", 0)
        dense, top_k = _DENSE.shape(said), int(said["num_experts_per_tok"])
        moe = Moe(int(said["num_local_experts"]), top_k, dense.ffn, balance=top_k * float(said["router_aux_loss_coef"]))
        return replace(dense, moe=moe)

    def config(self, shape: ModelShape) -> dict[str, Any]:
        moe = mixture(shape)
        return _DENSE.config(shape) | {
            "intermediate_size": moe.ffn, "num_local_experts": moe.experts, "num_experts_per_tok": moe.top_k,
            "router_aux_loss_coef": coefficient(moe),
        }  # fmt: skip

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        yield from decoder(shape, attention, partial(experts, names=("w1", "w3", "w2")), "block_sparse_moe")


MIXTRAL = Mixtral()
