"""Parts of a step's time: the matrix products of each layer, collectives, and the fitted efficiencies.

Collectives: sending b bytes over one hop costs latency + b / bandwidth (Hockney 1994; Thakur et al. 2005 for rings,
trees and two-level schemes). Groups of one kind work at the same time and share their node's network adapters.

Efficiencies relative to data sheets: a curve for each GPU type, the overhead of each framework, and the shares of links
and networks (data/steptime.json, written by benchmarks/planner_fit.py, which documents the fit).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from importlib import resources
from math import ceil, log2
from typing import Any, Literal

from bessemer.errors import UserError
from bessemer.plan.hardware import Cluster, Gpu
from bessemer.spec import shape as count
from bessemer.spec.shape import ModelShape

Framework = Literal["megatron", "fsdp", "compiled"]
# The GPU type whose curve is used for a generation without measured runs.
STANDS_FOR = {"hopper": "H100", "blackwell": "H100", "cdna": "H100"}
CURVES = {"A100-40GB": "A100", "A100-80GB": "A100", "H100": "H100", "H200": "H200"}


@dataclass(frozen=True)
class LayerWork:
    """One kind of layer and its number. Products are (inputs, outputs, the side that tensor parallelism divides); those
    of experts apply to the tokens routed to them."""

    number: int
    products: tuple[tuple[int, int, str], ...]
    window: int  # of attention; 0: full
    attends: bool
    ffn: int  # inner units per token, without the gate
    gated: bool
    parameters: int  # with experts
    expert_products: tuple[tuple[int, int], ...] = ()
    experts: int = 0
    top_k: int = 0
    scan_flops: int = 0  # of a state-space model, per token

    @property
    def expert_parameters(self) -> int:
        return self.experts * sum(into * out for into, out in self.expert_products)


@dataclass(frozen=True)
class StepWork:
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: tuple[LayerWork, ...]
    depth: int
    parameters: int
    ends: int  # parameters of embedding, positions and head
    tied: bool
    causal: bool
    pads_vocab: bool = True  # to a multiple of 128

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim


def gpt(width: int, depth: int, heads: int, vocab: int, positions: int, pads_vocab: bool = True) -> StepWork:
    """GPT-2's architecture, as in MPT and Megatron: biases, LayerNorm, an inner width of 4, learned positions, tied
    embeddings."""
    products = ((width, 3 * width, "out"), (width, width, "in"), (width, 4 * width, "out"), (4 * width, width, "in"))
    each = 12 * width**2 + 13 * width
    layer = LayerWork(depth, products, 0, True, 4 * width, False, each)
    ends = (vocab + positions) * width
    total = depth * each + ends + 2 * width
    head_dim = width // heads
    return StepWork(width, heads, heads, head_dim, vocab, (layer,), depth, total, ends, True, True, pads_vocab)


@lru_cache(maxsize=256)
def step_work(shape: ModelShape) -> StepWork:
    """The work of any shape. An encoder-decoder's second stack counts as layers of the same kind."""
    kinds = Counter((shape.mixer(i), shape.window(i), shape.has_experts(i)) for i in range(shape.layers))
    counts = count.parameter_counts(shape)
    ends = sum(counts.get(part, 0) for part in ("embedding", "positions", "token types", "head"))
    depth = shape.layers + shape.decoder_layers
    layers = [_layer(shape, number, *kind) for kind, number in kinds.items()]
    if shape.decoder_layers:
        layers.append(_layer(shape, shape.decoder_layers, "attention", 0, False))
    kv = shape.heads if shape.mla else shape.kv_heads
    dim = (shape.key_dim + shape.mla.value_dim) // 2 if shape.mla else shape.head_dim
    return StepWork(
        shape.width, shape.heads, kv, dim, shape.vocab, tuple(layers), depth, shape.parameters, ends, shape.tied,
        shape.causal,
    )  # fmt: skip


def _layer(shape: ModelShape, number: int, mixer: str, window: int, experts: bool) -> LayerWork:
    width = shape.width
    products: list[tuple[int, int, str]] = []
    scan = 0
    if mixer == "mamba":
        assert shape.mamba is not None
        mamba = shape.mamba
        inner = mamba.heads * mamba.head_dim
        products += [(width, 2 * inner + 2 * mamba.groups * mamba.state + mamba.heads, "out"), (inner, width, "in")]
        scan = 4 * inner * mamba.state + 2 * mamba.chunk * (mamba.groups * mamba.state + inner)
    elif shape.mla is not None:
        mla, heads = shape.mla, shape.heads
        if mla.q_rank:
            products.append((width, mla.q_rank, "none"))
        products += [
            (mla.q_rank or width, heads * shape.key_dim, "out"),
            (width, mla.kv_rank + mla.rope_dim, "none"),
            (mla.kv_rank, heads * (mla.nope_dim + mla.value_dim), "out"),
            (heads * mla.value_dim, width, "in"),
        ]
    else:
        inner, kv = shape.attention_width, shape.kv_heads * shape.head_dim
        products += [(width, inner + 2 * kv, "out"), (inner, width, "in")]
    ffn, moe = 0, shape.moe
    routed: tuple[tuple[int, int], ...] = ()
    sides = 2 if shape.gated else 1
    if experts:
        assert moe is not None
        products.append((width, moe.experts, "none"))
        routed = ((width, sides * moe.ffn), (moe.ffn, width))
        if moe.shared:
            inner = moe.shared * moe.ffn
            products += [(width, sides * inner, "out"), (inner, width, "in")]
        ffn = moe.ffn * (moe.top_k + moe.shared)
    elif shape.ffn:
        products += [(width, sides * shape.ffn, "out"), (shape.ffn, width, "in")]
        ffn = shape.ffn
    number_of_experts, top_k = (moe.experts, moe.top_k) if experts and moe else (0, 0)
    dense = sum(into * out for into, out, _ in products) + 4 * width
    parameters = dense + number_of_experts * sum(into * out for into, out in routed)
    return LayerWork(
        number, tuple(products), window, mixer != "mamba", ffn, shape.gated, parameters, routed, number_of_experts,
        top_k, scan,
    )  # fmt: skip


@dataclass(frozen=True)
class Fabric:
    """The interconnect. Bandwidths are bytes per second in one direction."""

    per_node: int
    link: float  # of one GPU inside its node
    network: float  # of one node
    link_latency_s: float = 3e-6
    network_latency_s: float = 8e-6

    def __post_init__(self) -> None:
        if self.per_node < 1 or self.link <= 0 or self.network <= 0:
            raise UserError(f"network: a node needs GPUs and bandwidths above zero, not {self}")


@dataclass(frozen=True)
class Group:
    """A process group: `size` processes, `inside` of them in each of `nodes` nodes. `rivals` such groups share a node's
    network adapters."""

    size: int
    inside: int
    nodes: int
    rivals: float


ALONE = Group(1, 1, 1, 1)


def make_group(size: int, stride: int, fabric: Fabric) -> Group:
    """The group of every stride-th process; neighbours (stride 1) fill a node first."""
    if size <= 1:
        return ALONE
    inside = max(1, min(size, fabric.per_node // stride))
    nodes = ceil(size / inside)
    return Group(size, inside, nodes, fabric.per_node / inside if nodes > 1 else 1)


def bandwidth(members: Group, fabric: Fabric) -> float:
    """Bandwidth of a ring through the group: that of its slowest hop."""
    between = fabric.network / members.rivals
    return min(fabric.link, between) if members.nodes > 1 else fabric.link


def latency(members: Group, fabric: Fabric) -> float:
    return fabric.network_latency_s if members.nodes > 1 else fabric.link_latency_s


def ring_pass(size: float, members: Group, fabric: Fabric) -> float:
    """Half of a ring all-reduce: `size` bytes, n - 1 hops of 1 / n each."""
    n = members.size
    hops = n - members.nodes
    lag = hops * fabric.link_latency_s + (members.nodes - 1) * fabric.network_latency_s
    return (n - 1) / n * size / bandwidth(members, fabric) + lag


def two_level_pass(size: float, members: Group, fabric: Fabric) -> float:
    """Half of a two-level all-reduce: inside the nodes, then each part among its peers in other nodes."""
    inside, nodes = members.inside, members.nodes
    near = (inside - 1) / inside * size / fabric.link + (inside - 1) * fabric.link_latency_s
    far = (nodes - 1) / nodes * size / inside / (fabric.network / members.rivals / inside)
    return near + far + (nodes - 1) * fabric.network_latency_s


def tree_reduce(size: float, members: Group, fabric: Fabric) -> float:
    """All-reduce up and down a tree of nodes with a chain inside each, pipelined: all bytes pass twice."""
    depth = ceil(log2(members.nodes)) if members.nodes > 1 else 0
    lag = depth * fabric.network_latency_s + (members.inside - 1) * fabric.link_latency_s
    return 2 * (size / bandwidth(members, fabric) + lag)


def all_reduce(size: float, members: Group, fabric: Fabric) -> float:
    """Every process gets the sum of `size` bytes, by the fastest algorithm, as NCCL's tuner chooses."""
    if members.size == 1:
        return 0.0
    ring = 2 * ring_pass(size, members, fabric)
    if members.nodes == 1:
        return ring
    return min(ring, 2 * two_level_pass(size, members, fabric), tree_reduce(size, members, fabric))


def all_gather(size: float, members: Group, fabric: Fabric) -> float:
    """Every process gets all `size` bytes, of which it had a part."""
    if members.size == 1:
        return 0.0
    ring = ring_pass(size, members, fabric)
    return ring if members.nodes == 1 else min(ring, two_level_pass(size, members, fabric))


def reduce_scatter(size: float, members: Group, fabric: Fabric) -> float:
    """Every process gets its part of the sum of `size` bytes: an all-gather in reverse."""
    return all_gather(size, members, fabric)


def all_to_all(size: float, members: Group, fabric: Fabric) -> float:
    """Every process sends `size` bytes, an equal part to each of the others."""
    n = members.size
    if n == 1:
        return 0.0
    near = (members.inside - 1) / n * size / fabric.link
    # All GPUs of a node send at once and share its adapters.
    far = (n - members.inside) / n * size / (fabric.network / fabric.per_node) if members.nodes > 1 else 0.0
    return max(near, far) + latency(members, fabric) * ceil(log2(n))


def point_to_point(size: float, stride: int, fabric: Fabric) -> float:
    """`size` bytes to the process `stride` ranks away, while the others of the node do the same."""
    if stride >= fabric.per_node:
        return size / (fabric.network / fabric.per_node) + fabric.network_latency_s
    return size / fabric.link + fabric.link_latency_s


@dataclass(frozen=True)
class Curve:
    """Efficiencies of one GPU type. A product takes flops / (gemm * peak) + bytes / (gemm_memory * bandwidth): large
    products nearly reach `gemm`, narrow ones less."""

    gemm: float
    gemm_memory: float
    memory: float  # of the bandwidth, in element-wise passes
    unaligned: float  # of the peak, in products whose sides are not multiples of 8
    batched: float  # of the peak, in unfused attention's products
    triton: float  # of the peak, in the forward pass of causal attention with heads of 128, by kernel
    flash: float
    cudnn: float
    narrow: float  # the same with heads of 64, relative
    short: float  # tokens of context at which attention reaches half of that
    fp8: float  # speed relative to bf16, including casts


@dataclass(frozen=True)
class FrameworkHabits:
    """Overheads of a framework. Passes are reads or writes of one number in the forward pass; backward has twice as
    many."""

    launch_s: float  # host time per layer, forward and backward: a lower bound
    launch_tp_s: float  # additional host time with tensor parallelism
    whole_passes: float  # over the width: norms, residuals
    attention_passes: float  # over all heads: splits, transposes, rotations
    ffn_passes: float  # over the inner units
    autocast: float  # times the passes under autocast
    head_passes: float  # over the logits, 4 bytes each
    head_s: float  # per micro-batch: embedding, loss, their launches
    step_s: float  # once per step: clipping, logging, data
    optimizer_bytes: float  # read and written per parameter
    exposed: float  # share of overlapped communication that is not hidden


@dataclass(frozen=True)
class Shares:
    """Shares of the bandwidth of links and network that are reached, and the synchronization time of collectives."""

    link: float
    network: float
    sync_s: float  # per collective inside a layer and doubling of the group


@dataclass(frozen=True)
class Constants:
    curves: dict[str, Curve]
    habits: dict[str, FrameworkHabits]
    shares: dict[str, Shares]
    errors: dict[str, dict[str, Any]]  # kind of configuration -> mean absolute error on held-out rows

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Constants:
        return Constants(
            {name: _make(Curve, values) for name, values in data["curves"].items()},
            {name: _make(FrameworkHabits, values) for name, values in data["habits"].items()},
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
