"""Predicts the time of a training step: operators by their roofline, collectives by the cluster's topology, the
pipeline bubble, the optimizer and the host. A prediction takes tens of microseconds, since a search makes thousands.

A micro-batch has `tokens` = rows x context / cp on a process. Seconds are those of the busiest process.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Any, Literal

from bessemer.errors import UserError
from bessemer.plan.cost_model.operators import (
    CURVES,
    Constants,
    Curve,
    Fabric,
    Framework,
    FrameworkHabits,
    Group,
    LayerWork,
    StepWork,
    all_gather,
    all_reduce,
    all_to_all,
    constants,
    curve_name,
    make_group,
    point_to_point,
    shares_name,
)
from bessemer.plan.hardware import Cluster
from bessemer.plan.search.layout import Layout

Recompute = Literal["none", "selective", "full"]
Attention = Literal["auto", "unfused", "triton", "flash", "cudnn"]
CUDNN = ("hopper", "blackwell")  # generations on which `auto` is cuDNN's kernel, 1.5 to 2 times as fast as flash
# Passes over the scores of unfused attention: forward product 1, mask and softmax 2, dropout 2.5, product 1.
SCORES_FORWARD, SCORES_BACKWARD = 6.5, 13.0
FLASH_BACKWARD = 2.5  # times the forward's products: five instead of two (Dao et al. 2022)
IN_STEP = (
    0.95  # rate of a product inside a step, relative to a benchmark: 735 of 770 TFLOP/s on an H200 (power, clocks)
)
ATTENTION_IN_STEP = 0.76  # the same for attention: 286 of 376 TFLOP/s, heads of 64, forward and backward
SOFT = 4.0  # exponent of the smooth maximum of two overlapping times: (a^4 + b^4)^(1/4)


@dataclass(frozen=True)
class StepSetup:
    """A configuration to predict. `framework`: megatron reduces gradients after the last micro-batch; fsdp gathers and
    reduces each layer during the products, as llm-foundry did in 2023; compiled is the same with fused layers and
    loss, as in Bessemer."""

    work: StepWork
    layout: Layout
    micro_batch: int  # rows
    global_batch: int  # rows
    context: int
    precision: str = "bf16"
    recompute: Recompute = "none"
    attention: Attention = "auto"
    framework: Framework = "compiled"
    virtual: int = 1  # pipeline stages per process (interleaved)
    sequence_parallel: bool = False
    reduce_bytes: int = 4  # per gradient in the reduction
    keeps_weights: bool = False  # gathered weights stay until the backward pass (ZeRO-2)
    autocast: bool = False

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.micro_batch * self.layout.dp)


def micro_batches(rows: int, layout: Layout, micro_rows: int, virtual: int = 1) -> int:
    """Micro-batches per process and step. As in training, rows are padded until they divide evenly. A pipeline runs at
    least one micro-batch per stage, and full rounds of them if a process holds several stages."""
    share = -(-rows // layout.dp)
    count = -(-share // micro_rows)
    if layout.pp == 1:
        return count
    return -(-count // layout.pp) * layout.pp if virtual > 1 else max(count, layout.pp)


def padded_rows(rows: int, layout: Layout, micro_rows: int, virtual: int = 1) -> int:
    """Rows that a step computes, with padding."""
    return micro_batches(rows, layout, micro_rows, virtual) * micro_rows * layout.dp


@dataclass(frozen=True)
class StepTime:
    """Parts of a step's seconds, which add up to `total_s`. `error` is the mean absolute error for this kind of
    configuration, as a fraction, and `basis` says where it was measured."""

    compute_s: float
    tp_s: float  # collectives inside layers: tensor, context and expert parallelism
    dp_s: float  # gathering weights and reducing gradients, as far as it is not hidden
    pp_s: float  # sending activations between stages
    bubble_s: float
    optimizer_s: float
    stall_s: float  # the host: launches, waiting, once-per-step work
    error: float
    basis: str

    @property
    def parts(self) -> dict[str, float]:
        names = ("compute", "tp", "dp", "pp", "bubble", "optimizer", "stall")
        return {name: getattr(self, f"{name}_s") for name in names}

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    def corrected(self, cluster: Cluster) -> StepTime:
        """Scaled by the measured over predicted time of earlier runs here, all parts by the same factor."""
        parts = {f"{name}_s": seconds * cluster.slower for name, seconds in self.parts.items()}
        return StepTime(**parts, error=cluster.slower_error, basis=f"corrected by {cluster.slower_source}")

    def to_dict(self) -> dict[str, Any]:
        return {"total_s": self.total_s, **{f"{k}_s": v for k, v in self.parts.items()}, "error": self.error}


@dataclass(frozen=True)
class _Rates:
    """Rates of the device: products in FLOP/s, memory traffic in bytes/s."""

    gemm: float
    head: float  # the output embedding's products, never in fp8
    gemm_memory: float
    memory: float
    unaligned: float
    batched: float
    attention: float


def step_time(setup: StepSetup, cluster: Cluster, fitted: Constants | None = None) -> StepTime:
    """The predicted time. Impossible configurations are refused with the fix."""
    _check(setup, cluster)
    fitted = fitted or constants()
    habits = fitted.habits[setup.framework]
    share = fitted.shares[shares_name(cluster)]
    fabric = Fabric(
        cluster.per_node,
        cluster.measured.get("all_reduce") or cluster.gpu.link_bandwidth * share.link,
        cluster.network_bandwidth * share.network,
    )
    rates = _rates(setup, cluster, fitted.curves[curve_name(cluster.gpu)])
    # The compiled framework was measured on one GPU; power limits, stragglers and clocks slow down a cluster.
    alone = setup.framework != "compiled" or _on_one_h200(cluster)
    slower = 1.0 if alone else fitted.errors["unmeasured"].get("slower", 1.0)
    time = _Timer(setup, habits, fabric, share.sync_s, rates).step(*expected_error(setup, cluster, fitted), slower)
    return time.corrected(cluster) if cluster.slower_source else time


def _on_one_h200(cluster: Cluster) -> bool:
    return cluster.gpu.name == "H200" and cluster.count == 1


def expected_error(setup: StepSetup, cluster: Cluster, fitted: Constants) -> tuple[float, str]:
    """Error of this kind of configuration on held-out rows; wider for unmeasured kinds."""
    where = "several nodes" if cluster.nodes > 1 else "one node"
    wide = fitted.errors["unmeasured"]
    kind = f"{setup.framework}, {where}"
    if setup.framework == "compiled" and _on_one_h200(cluster):
        kind = "compiled, one H200"
    error = fitted.errors.get(kind, wide)
    unmeasured = setup.layout.cp > 1 or any(layer.experts or layer.scan_flops for layer in setup.work.layers)
    if unmeasured:
        return wide["mean_absolute_error"], wide["of"]
    if cluster.gpu.name not in CURVES and not cluster.measured:
        basis = f"{wide['of']}; the curve of {curve_name(cluster.gpu)} stands in for {cluster.gpu.name}"
        return wide["mean_absolute_error"], basis
    return error["mean_absolute_error"], error["of"]


def _check(setup: StepSetup, cluster: Cluster) -> None:
    layout, work = setup.layout, setup.work
    if min(setup.micro_batch, setup.global_batch, setup.context, setup.virtual) < 1:
        raise UserError("batch and context: write numbers above zero")
    if layout.size != cluster.count:
        raise UserError(f"layout: its degrees multiply to {layout.size}, and there are {cluster.count} GPUs")
    if work.heads % layout.tp:
        fits = [str(n) for n in (1, 2, 4, 8, 16) if work.heads % n == 0]
        raise UserError(f"tp: {layout.tp} does not divide {work.heads} heads: write {' or '.join(fits)}")
    if layout.pp * setup.virtual > work.depth:
        raise UserError(f"pp: {layout.pp} x {setup.virtual} stages for {work.depth} layers: write fewer")
    each = setup.micro_batch * layout.dp
    if setup.global_batch % each:
        near = max(each, round(setup.global_batch / each) * each)
        raise UserError(
            f"global batch: {setup.global_batch} is no multiple of micro-batch {setup.micro_batch} x {layout.dp} "
            f"replicas: write {near}"
        )


def _rates(setup: StepSetup, cluster: Cluster, curve: Curve) -> _Rates:
    """Rates measured on this machine, else the data sheet times the curve."""
    gpu, measured = cluster.gpu, cluster.measured
    half = "bf16" if setup.precision.startswith(("fp8", "fp4")) else setup.precision
    peak = gpu.peak(half)
    gemm = head = measured.get(f"matmul_{half}", 0.0) * IN_STEP or peak * curve.gemm
    if setup.precision.startswith(("fp8", "fp4")):
        gpu.peak("fp8")  # refuses a GPU without fp8 units
        gemm *= curve.fp8
    wide = setup.work.head_dim >= 96
    attention = 0.0
    if setup.attention != "unfused":
        usual = "cudnn" if gpu.generation in CUDNN else "flash"
        share = getattr(curve, usual if setup.attention == "auto" else setup.attention)
        attention = share * peak * (1.0 if wide else curve.narrow)
        attention = measured.get(f"attention_both_{128 if wide else 64}", 0.0) * ATTENTION_IN_STEP or attention
        attention *= setup.context / (setup.context + curve.short)
    copy = measured.get("copy", 0.0)
    return _Rates(
        gemm, head, gpu.memory_bandwidth * curve.gemm_memory, copy * IN_STEP or gpu.memory_bandwidth * curve.memory,
        peak * curve.unaligned, peak * curve.batched, attention,
    )  # fmt: skip


def _soft_max(first: float, second: float) -> float:
    return (first**SOFT + second**SOFT) ** (1 / SOFT)


class _Timer:
    """One prediction; holds the values that its parts share."""

    def __init__(self, setup: StepSetup, habits: FrameworkHabits, fabric: Fabric, sync_s: float, rates: _Rates) -> None:
        self.setup, self.work, self.layout = setup, setup.work, setup.layout
        self.habits, self.fabric, self.sync_s, self.rates = habits, fabric, sync_s, rates
        layout = setup.layout
        self.tokens = setup.micro_batch * setup.context / layout.cp
        self.bytes = 4 if setup.precision in ("fp32", "tf32") else 2
        inner = layout.tp * layout.cp
        self.tensor = make_group(layout.tp, 1, fabric)
        self.contexts = make_group(layout.cp, layout.tp, fabric)
        self.experts = make_group(layout.ep, inner, fabric)
        self.shards = make_group(layout.dp_shard * layout.cp, layout.tp, fabric)
        self.copies = make_group(layout.dp_replicate, inner * layout.dp_shard, fabric)

    # One layer of a micro-batch, on one process.

    def products(self, layer: LayerWork) -> float:
        """Forward time of the matrix products, divided by tensor parallelism along one side."""
        tokens, tp, rates = self.tokens, self.layout.tp, self.rates
        multiplied = sides = 0.0
        for into, out, divided in layer.products:
            a = into / tp if divided == "in" else into
            b = out / tp if divided == "out" else out
            multiplied += a * b
            sides += tokens * (a + b) + a * b
        flops = 2 * tokens * multiplied
        if layer.experts:
            routed, local = tokens * layer.top_k, layer.experts / self.layout.ep
            for into, out in layer.expert_products:
                flops += 2 * routed * into * out
                sides += routed * (into + out) + local * into * out
        return (
            flops / rates.gemm + self.bytes * sides / rates.gemm_memory + self.tokens * layer.scan_flops / rates.batched
        )

    def scores(self, layer: LayerWork) -> tuple[float, float]:
        """Forward and backward time of attention scores. Causal kernels skip the masked half; unfused products do
        not."""
        if not layer.attends:
            return 0.0, 0.0
        setup, rates = self.setup, self.rates
        heads = self.work.heads / self.layout.tp / self.layout.cp
        rows, context = setup.micro_batch, setup.context
        keys = min(layer.window or context, context)
        flops = 4 * rows * heads * context * keys * self.work.head_dim
        if setup.attention == "unfused":
            passes = rows * heads * context * context * self.bytes / rates.memory
            forward = flops / rates.batched
            return forward + SCORES_FORWARD * passes, 2 * forward + SCORES_BACKWARD * passes
        seen = 1.0 if not self.work.causal or keys < context / 2 else 0.5
        forward = flops * seen / rates.attention
        return forward, FLASH_BACKWARD * forward

    def passes(self, layer: LayerWork) -> float:
        """Forward time of element-wise work."""
        habits, tp = self.habits, self.layout.tp
        full_width = habits.whole_passes * self.work.width / (tp if self.setup.sequence_parallel else 1)
        attention = habits.attention_passes * self.work.attention_width if layer.attends else 0.0
        ffn = habits.ffn_passes * layer.ffn * (1.5 if layer.gated else 1.0)
        numbers = self.tokens * (full_width + (attention + ffn) / tp)
        return numbers * self.bytes * (habits.autocast if self.setup.autocast else 1.0) / self.rates.memory

    def inner(self, layer: LayerWork) -> float:
        """Seconds of the collectives inside a layer's forward pass."""
        seconds, number = 0.0, 0
        hidden = self.tokens * self.work.width * self.bytes
        if self.tensor.size > 1:
            seconds += 2 * all_reduce(hidden, self.tensor, self.fabric)
            number += 2
        if self.contexts.size > 1 and layer.attends:
            heads = (2 * self.work.heads + 2 * self.work.kv_heads) / self.layout.tp
            seconds += all_to_all(self.tokens * heads * self.work.head_dim * self.bytes, self.contexts, self.fabric)
            number += 2
        if self.experts.size > 1 and layer.experts:
            seconds += 2 * all_to_all(hidden * layer.top_k, self.experts, self.fabric)
            number += 2
        sync = self.sync_s * log2(max(self.tensor.size, self.contexts.size, self.experts.size))
        return seconds + number * sync

    def layer(self, layer: LayerWork) -> tuple[float, float, float, float]:
        """Compute, inner collectives, host stalls, and exposed FSDP traffic, forward and backward."""
        setup = self.setup
        products, passes = self.products(layer), self.passes(layer)
        forward, backward = self.scores(layer)
        # Selective recomputes attention scores in Megatron, here everything but products.
        selective = forward if setup.framework == "megatron" else passes
        recomputed = {"none": 0.0, "selective": selective, "full": products + forward + passes}[setup.recompute]
        compute = 3 * (products + passes) + forward + backward + recomputed
        inner = self.inner(layer) * (3 if setup.recompute == "full" else 2)
        launch = self.habits.launch_s + (self.habits.launch_tp_s if self.layout.tp > 1 else 0.0)
        launch *= 4 / 3 if setup.recompute == "full" else 1.0
        device = compute + inner
        stall = _soft_max(device, launch) - device
        return compute, inner, stall, self.exposed_fsdp(layer, device + stall)

    def exposed_fsdp(self, layer: LayerWork, layer_s: float) -> float:
        """Seconds that FSDP's gathers and reductions add to one layer."""
        if self.setup.framework == "megatron" or self.shards.size == 1 or self.layout.pp > 1:
            return 0.0
        # Experts that are divided among the shards are not gathered.
        gathered = layer.parameters - layer.expert_parameters * (1 - 1 / self.layout.ep)
        seconds = self.fsdp_traffic(gathered / self.layout.tp)
        return _soft_max(layer_s, seconds) - layer_s + self.habits.exposed * seconds

    def fsdp_traffic(self, parameters: float) -> float:
        gathers = 1 if self.setup.keeps_weights else 2
        gathered = gathers * all_gather(parameters * self.bytes, self.shards, self.fabric)
        return gathered + all_gather(parameters * self.setup.reduce_bytes, self.shards, self.fabric)

    # The head and the full step.

    def head(self) -> tuple[float, float]:
        """Compute and collectives of the output embedding and loss of a micro-batch, forward and backward."""
        tokens, width, tp = self.tokens, self.work.width, self.layout.tp
        padded = self.work.pads_vocab or tp > 1
        vocab = ceil(self.work.vocab / (128 * tp)) * 128 if padded else self.work.vocab
        rate = self.rates.head if padded or vocab % 8 == 0 else self.rates.unaligned
        sides = self.bytes * (tokens * (width + vocab) + width * vocab)
        products = 3 * (2 * tokens * width * vocab / rate + sides / self.rates.gemm_memory)
        passes = tokens * vocab * 4 * self.habits.head_passes / self.rates.memory
        exchange = 0.0
        if self.tensor.size > 1:  # embedding forward, head backward, and three short ones for the loss
            hidden = all_reduce(tokens * width * self.bytes, self.tensor, self.fabric)
            short = all_reduce(tokens * 4, self.tensor, self.fabric)
            exchange = 2 * hidden + 3 * short + 5 * self.sync_s * log2(self.tensor.size)
        return products + passes, exchange

    def step(self, error: float, basis: str, slower: float = 1.0) -> StepTime:
        """The full step. `slower` scales compute."""
        setup, layout, work = self.setup, self.layout, self.work
        batches, pp = setup.micro_batches, layout.pp
        compute = inner = stall = data = 0.0
        for layer in work.layers:
            layer_compute, layer_inner, layer_stall, layer_data = self.layer(layer)
            number = layer.number * ceil(work.depth / pp) / work.depth  # on the fullest stage
            compute += number * layer_compute
            inner += number * layer_inner
            stall += number * layer_stall
            data += number * layer_data
        head, exchange = self.head()
        compute, head = compute * slower, head * slower
        stage = compute + inner + stall + data
        if setup.framework != "megatron" and pp == 1 and self.shards.size > 1:
            data += self.fsdp_traffic(work.ends / layout.tp) * self.habits.exposed
        passing = 0.0
        if pp > 1:
            hidden = self.tokens * work.width * self.bytes / layout.tp
            passing = 2 * setup.virtual * point_to_point(hidden, layout.tp * layout.cp * layout.dp, self.fabric)
        after = self.gradients(batches * stage)
        updated = work.parameters / (layout.tp * pp)  # parameters per process
        if setup.framework != "megatron":
            updated /= self.shards.size
        return StepTime(
            compute_s=batches * (compute + head),
            tp_s=batches * (inner + exchange),
            dp_s=batches * data + after,
            pp_s=(batches + pp - 1) * passing,
            bubble_s=(pp - 1) * stage / setup.virtual,
            optimizer_s=updated * self.habits.optimizer_bytes / self.rates.memory,
            stall_s=batches * (stall + self.habits.head_s) + self.habits.step_s,
            error=error,
            basis=basis,
        )

    def gradients(self, running_s: float) -> float:
        """Seconds of reductions once per step: among replicas, and of tied embeddings between first and last stage."""
        setup, layout, work = self.setup, self.layout, self.work
        local = work.parameters / layout.pp + (work.ends if layout.pp > 1 else 0) * (1 - 1 / layout.pp)
        local /= layout.tp
        seconds = 0.0
        if setup.framework == "megatron":
            replicas = make_group(layout.dp * layout.cp, layout.tp, self.fabric)
            seconds = all_reduce(local * setup.reduce_bytes, replicas, self.fabric)
            if layout.pp > 1 and work.tied:
                ends = work.vocab * work.width / layout.tp * setup.reduce_bytes
                pair = _pair(layout, self.fabric)
                seconds += all_reduce(ends, pair, self.fabric)
            return seconds
        if self.copies.size > 1:
            seconds += all_reduce(local / self.shards.size * setup.reduce_bytes, self.copies, self.fabric)
        if layout.pp > 1 and self.shards.size > 1:
            seconds += self.fsdp_traffic(local)
        # It overlaps the backward pass of the last micro-batch, about two thirds of its time.
        backward_s = running_s / setup.micro_batches * 2 / 3
        return _soft_max(backward_s, seconds) - backward_s + self.habits.exposed * seconds if seconds else 0.0


def _pair(layout: Layout, fabric: Fabric) -> Group:
    """First and last stage; every process of a node may have such a partner."""
    stride = layout.tp * layout.cp * layout.dp
    return make_group(2, stride * (layout.pp - 1), fabric)
