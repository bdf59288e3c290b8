"""A job put together from decided parts: for a run that trains, and for one that is only looked at again.

Which layers each stage of a pipeline holds, by what they cost on this device.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor

from bessemer.checkpoint.remote import RemoteCheckpoints
from bessemer.checkpoint.store import CheckpointStore
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.guard.detect.watch import Detectors
from bessemer.guard.judge import Judge
from bessemer.guard.ladder import Ladder
from bessemer.guard.layer_stats import LayerStats
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.transformer import Decoder, build
from bessemer.observe.view import RunView
from bessemer.optim.choose import optimizer_for
from bessemer.optim.ema import Ema
from bessemer.optim.schedule import Schedule
from bessemer.parallel.context import ContextColumns, Ring
from bessemer.parallel.deepspeed import engage
from bessemer.parallel.replicas import optimizer_of_replicas
from bessemer.parallel.shard import divide_experts, first_weights, lay_over
from bessemer.parallel.world import World
from bessemer.plan.decide import HALF, TrainPlan, keeping
from bessemer.plan.decision import Plan
from bessemer.plan.search.layout import stages_each
from bessemer.run.directory import RunWriter
from bessemer.session.start import set_dropout
from bessemer.spec.load import dump_spec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.compile import FP8, compile_blocks, compute_in, compute_type
from bessemer.train.device import memory_limit, synchronize
from bessemer.train.engine import Engine
from bessemer.train.evaluate import Evaluator, HeldOutSet
from bessemer.train.job import DataFeed, Guard, Job, Recorder
from bessemer.train.loss import linear_cross_entropy
from bessemer.train.lowp.fp8 import convert
from bessemer.train.lowp.loss_scale import LossScale
from bessemer.train.memory import recompute
from bessemer.train.objective import make_pretrain
from bessemer.train.pipeline_runner import PipelineRunner
from bessemer.train.saver import CheckpointSaver

if TYPE_CHECKING:
    from bessemer.parallel.pipeline import Pipeline


@dataclass(frozen=True)
class JobParts:
    """What a job is made of, all decided."""

    plan: TrainPlan
    shape: ModelShape
    stream: BatchStream | IterableStream
    held_out: dict[str, HeldOutSet]
    tokenizer: Tokenizer
    device: torch.device
    peak_flops: float
    world: World = field(default_factory=World)
    cuts: tuple[range, ...] = ()  # the layers of each stage of a pipeline


def spec_fingerprint(spec: RunSpec) -> str:
    return str(xxhash.xxh3_128(dump_spec(spec).encode()).hexdigest())


def open_remote(spec: RunSpec, run_folder: Path) -> RemoteCheckpoints | None:
    """The durable tier, if the spec names one."""
    url = spec.checkpoint.remote
    return RemoteCheckpoints(f"{url.rstrip('/')}/{run_folder.name}") if url else None


def divide(model: Decoder, world: World, spec: RunSpec, cuts: tuple[range, ...]) -> Pipeline | None:
    """Of the layout, all that changes the layers themselves; weights are laid out after this, by `lay_over`."""
    layout, mesh = world.layout, world.mesh
    pipeline = None
    if layout.pp > 1:
        from bessemer.parallel.pipeline import Pipeline  # torch's schedules take a second to import

        pipeline = Pipeline(model, world, spec.parallel.pipeline, cuts)
    if layout.tp > 1:
        assert mesh is not None
        from bessemer.parallel.tensor import divide_tensors

        divide_tensors(model, mesh["tp"], spec.parallel.sequence)
    if layout.ep > 1:
        assert mesh is not None
        divide_experts(model, mesh["dp_shard"])
    return pipeline


def make_job(spec: RunSpec, parts: JobParts, run: RunWriter, view: RunView) -> Job:
    """The job at step 0, with fresh weights."""
    plan, device, fingerprint = parts.plan, parts.device, spec_fingerprint(spec)
    spec = keeping(spec, plan.weights)
    matrices = torch.float32 if plan.weights == "fp32" else torch.bfloat16
    world = parts.world
    laid_out = world.divided
    model = build(parts.shape, "meta" if laid_out else device, spec.seed, spec.model.init, matrices)
    set_dropout(model, spec.dropout.embedding, spec.dropout.attention, spec.dropout.residual)
    if plan.precision in FP8:
        convert(model, plan.precision, device)
    pipeline = divide(model, world, spec, parts.cuts)
    if plan.compiled:
        kind = compute_type(plan.precision)
        compile_blocks(model, plan.micro_rows, plan.context, kind, chained=plan.compile == "chain")
    recompute.apply(model, plan.activations, spec.memory.offload_activations)
    if spec.parallel.engine == "deepspeed":
        optimizer = engage(model, spec, world, plan.micro_rows)
    else:
        stages = pipeline.stages if pipeline else ()
        told = lay_over(model, world, device.type == "cuda" and plan.precision in HALF, spec.parallel, stages)
        if laid_out:
            first_weights(model, stages, device, spec.seed, spec.model.init)
        divided = spec.parallel.replicas.divide_optimizer and world.size > 1
        optimizer = optimizer_of_replicas(model, spec, world) if divided else optimizer_for(model, spec)
        if told:
            optimizer.afterwards.append(told)
    named = list(model.named_parameters())  # what the optimizer freezes has no average either
    objective = make_pretrain(spec, parts.stream.order.names, parts.tokenizer, parts.shape, plan.context)
    if world.layout.cp > 1:
        shared = Ring if spec.parallel.context == "ring" else ContextColumns
        objective.columns = shared(world.columns, world.cp_rank, world.layout.cp)
    if world.layout.tp > 1:
        assert world.mesh is not None
        objective.tensors = world.mesh["tp"]
    runner = PipelineRunner(pipeline, model, objective, plan.precision, spec.parallel.sequence) if pipeline else None
    engine = Engine(
        spec, plan, device, model, objective, optimizer,
        Schedule(plan.peak_lr, plan.warmup_steps, plan.total_steps, spec.schedule.kind, spec.schedule.floor), world,
        Ema(named, spec.optimizer.ema) if spec.optimizer.ema else None, runner,
        LossScale(spec.loss_scale, device) if plan.precision == "fp16" else None,
    )  # fmt: skip
    evaluator = Evaluator(
        parts.held_out, plan.context, plan.evaluate_tokens, plan.micro_rows, plan.precision, device, world
    )
    # Apple's backend has no median that skips NaN: there the judge runs on the CPU, at the price of a sync.
    judge_device = torch.device("cpu") if device.type == "mps" else device
    guard = Guard(
        Judge(spec.guard, judge_device, parts.stream.steps.rows(0)),
        Detectors(spec.guard, memory_limit(device), plan.total_steps, world.gather(socket.gethostname())),
        LayerStats(model, optimizer.remainders(), world), Ladder(spec.guard),
    )  # fmt: skip
    remote = open_remote(spec, run.folder) if world.main else None
    return Job(
        engine, DataFeed(parts.stream, evaluator, parts.tokenizer.decode), guard,
        Recorder(run, view, parts.shape.flops_per_token(plan.context), parts.peak_flops),
        CheckpointSaver(CheckpointStore(run.checkpoints, world), fingerprint, remote),
    )  # fmt: skip


REPEATS = 3
TOKENS = 8192  # of a measurement: enough to fill a device


def cut_layers(costs: Sequence[float], stages: int, before: float = 0.0, behind: float = 0.0) -> list[range]:
    """Which layers each stage holds such that the dearest stage is as cheap as can be; every stage has one at least.
    `before` and `behind` are what the first and the last stage pay besides (embedding, head)."""
    layers = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def price(first: int, last: int, stage: int) -> float:
        return sums[last] - sums[first] + before * (stage == 0) + behind * (stage == stages - 1)

    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        left = stages - stage - 1
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (worst, ends) in best.items():
            for last in range(first + 1, layers - left + 1):
                dearest = max(worst, price(first, last, stage))
                if last not in found or dearest < found[last][0]:
                    found[last] = (dearest, (*ends, last))
        best = found
    ends = best[layers][1]
    return [range(first, last) for first, last in zip((0, *ends), ends, strict=False)]


def decide_stages(spec: RunSpec, shape: ModelShape, training: TrainPlan, world: World, plan: Plan) -> tuple[range, ...]:
    """Cut where the dearest stage is cheapest; the first process measures, for all."""
    if world.layout.pp == 1:
        return ()
    kinds = [(shape.mixer(layer), shape.has_experts(layer)) for layer in range(shape.layers)]
    found = world.agree(_measure(shape, kinds, training, world.device) if world.main else None)
    assert found is not None
    costs, behind = found
    cuts = cut_layers([costs[kind] for kind in kinds], world.layout.pp * stages_each(spec), behind=behind)
    layer = max(costs.values())
    reason = f"a layer takes {layer * 1e3:.1f} ms forward and back, the head {behind * 1e3:.1f} ms"
    plan.add("parallel.pipeline.layers", ", ".join(str(len(cut)) for cut in cuts), reason, "measured")
    return tuple(cuts)


def _measure(
    shape: ModelShape, kinds: list[tuple[str, bool]], training: TrainPlan, device: torch.device
) -> tuple[dict[tuple[str, bool], float], float]:
    """Seconds of a forward and backward pass through a layer of each kind, and through the head."""
    rows = max(1, min(training.micro_rows, TOKENS // training.context))
    costs: dict[tuple[str, bool], float] = {}
    behind = 0.0
    for kind in dict.fromkeys(kinds):
        model = build(_alone(shape, kinds.index(kind)), device, 0)
        x_BTW = torch.randn(rows, training.context, shape.width, device=device, requires_grad=True)
        targets_R = torch.zeros(rows * training.context, dtype=torch.int64, device=device)
        place, block = model.place(x_BTW, AttentionMask(causal=shape.causal)), model.blocks[-1]

        def layer() -> Tensor:
            out: Tensor = block(x_BTW, place, None)  # noqa: B023  called in this round alone
            return out.float().sum()

        def head() -> Tensor:
            weights_R = torch.ones_like(targets_R, dtype=torch.float32)  # noqa: B023
            hidden_RW = x_BTW.flatten(0, 1)  # noqa: B023
            return linear_cross_entropy(hidden_RW, model.head_weight, targets_R, weights_R, 1.0)[0]  # noqa: B023

        with compute_in(training.precision, device):
            costs[kind] = _fastest(layer, device)
            behind = behind or _fastest(head, device)
    return costs, behind


def _alone(shape: ModelShape, layer: int) -> ModelShape:
    """A model of layers up to this one has it last; most models have but one kind, and the first is it."""
    assert layer == 0 or not shape.decoder_layers
    return replace(shape, layers=layer + 1)


def _fastest(run, device: torch.device) -> float:  # type: ignore[no-untyped-def]
    best = float("inf")
    for _ in range(REPEATS):
        synchronize(device)
        began = time.perf_counter()
        run().backward()
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
