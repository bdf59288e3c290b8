"""What is reached of what the data sheets promise: one curve for each GPU type, the habits of a framework, and the
shares of links and networks (data/steptime.json, written by benchmarks/planner_fit.py, which says how each was found).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any, Literal

from bessemer.plan.hardware import Cluster, Gpu

Manner = Literal["megatron", "fsdp", "compiled"]
# The type whose curve is taken for a generation without measured runs.
STANDS_FOR = {"hopper": "H100", "blackwell": "H100", "cdna": "H100"}
CURVES = {"A100-40GB": "A100", "A100-80GB": "A100", "H100": "H100", "H200": "H200"}


@dataclass(frozen=True)
class Curve:
    """Of one GPU type. A product of m x k by k x n takes flops / (gemm * peak) + bytes / (gemm_memory * bandwidth):
    large ones reach nearly `gemm`, narrow ones less."""

    gemm: float
    gemm_memory: float
    memory: float  # of the bandwidth, in element-wise passes
    unaligned: float  # of the peak, in products with an odd side
    batched: float  # of the peak, in unfused attention's products
    triton: float  # of the peak, in the forward pass of causal attention with heads of 128, by kernel
    flash: float
    cudnn: float
    narrow: float  # the same with heads of 64, relative
    short: float  # tokens of context at which attention reaches half of that
    fp8: float  # times as fast as bf16, casts with it


@dataclass(frozen=True)
class Habits:
    """Of a framework. Passes are reads or writes of one number in the forward pass; backward has twice as many."""

    launch_s: float  # the host's time for a layer, forward and back: a floor
    launch_tp_s: float  # more of it where layers are divided
    whole_passes: float  # over the width: norms, residuals
    attention_passes: float  # over all heads: splits, transposes, rotations
    ffn_passes: float  # over the inner units
    autocast: float  # times the passes under autocast
    head_passes: float  # over the logits, 4 bytes each
    head_s: float  # ends of a micro-batch: embedding, loss, their launches
    step_s: float  # once a step: clipping, logging, data
    optimizer_bytes: float  # read and written for a parameter
    exposed: float  # of overlapped communication that still shows


@dataclass(frozen=True)
class Shares:
    """Of the links inside a node and of its adapters; and what processes of a layer wait for one another."""

    link: float
    network: float
    sync_s: float  # of each collective inside a layer, for each doubling of the group


@dataclass(frozen=True)
class Constants:
    curves: dict[str, Curve]
    habits: dict[str, Habits]
    shares: dict[str, Shares]
    errors: dict[str, dict[str, Any]]  # kind of configuration -> mean absolute error on rows the fit had not seen

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Constants:
        return Constants(
            {name: _make(Curve, values) for name, values in data["curves"].items()},
            {name: _make(Habits, values) for name, values in data["habits"].items()},
            {name: _make(Shares, values) for name, values in data["shares"].items()},
            data.get("errors", {}),
        )


def _make(kind: type, values: dict[str, Any]) -> Any:
    return kind(**{part.name: values[part.name] for part in fields(kind)})


@cache
def constants() -> Constants:
    text = resources.files("bessemer.plan").joinpath("data/steptime.json").read_text()
    return Constants.from_dict(json.loads(text))


def curve_name(gpu: Gpu) -> str:
    return CURVES.get(gpu.name) or STANDS_FOR.get(gpu.generation, "A100")


def shares_name(cluster: Cluster) -> str:
    return cluster.constants or ("nvlink" if cluster.gpu.link_bandwidth > 1e11 else "pcie")
