"""Builds a job from a resolved run: model, optimizer, guard, recorder; fits it into memory, and cuts the layers into
pipeline stages.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import xxhash
from torch import Tensor, nn

from bessemer.align.prompts import PromptData
from bessemer.align.rollout_maker import RolloutMaker
from bessemer.align.rollout_stream import RolloutStream
from bessemer.checkpoint.remote import RemoteCheckpoints
from bessemer.checkpoint.store import CheckpointStore
from bessemer.data.stream.order import Segment
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.guard.detectors import Detectors
from bessemer.guard.judge import Judge
from bessemer.guard.ladder import Ladder
from bessemer.guard.layer_stats import LayerStats
from bessemer.guard.replica_check import ReplicaCheck
from bessemer.guard.watchdog import StepPace
from bessemer.model.adapters import (
    BaseModel,
    adapted_modules,
    add_adapters,
    clear_adapters,
    describe_adapters,
    linear_layers,
)
from bessemer.model.attention import SelfAttention
from bessemer.model.attention_backends import choose, set_backend
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.families.adapter import with_folder
from bessemer.model.quantized import NF4, allocate_in_nf4, describe_quantized
from bessemer.model.transformer import Decoder, TransformerBlock, build_model, init_weights, make_module
from bessemer.observe.view import RunView
from bessemer.optim.choose import add_groups_to_plan, freeze, optimizer_for
from bessemer.optim.guarded import weight_average
from bessemer.parallel.context import RingAttention, UlyssesAttention
from bessemer.parallel.deepspeed import initialize_deepspeed
from bessemer.parallel.nf4 import divide_in_nf4
from bessemer.parallel.replicas import zero1_optimizer
from bessemer.parallel.shard import init_sharded_weights, shard_experts, shard_or_replicate
from bessemer.parallel.world import World
from bessemer.plan.decide import HALF, TrainPlan, with_weights
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.plan.schedule import run_schedule
from bessemer.plan.search.layout import check_static_graph, stages_each
from bessemer.run.directory import RunWriter
from bessemer.session.data import Stream, build_stream, log_packing
from bessemer.session.models import ModelSource, attach_trained, companion, load_frozen, record_models
from bessemer.session.objectives import make_objective
from bessemer.session.rl import attach_rollouts, judge_names
from bessemer.session.start import ResolvedRun
from bessemer.spec.guard import GuardSpec
from bessemer.spec.load import dump_spec
from bessemer.spec.model import BASE
from bessemer.spec.quantity import human_bytes
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape, matmul_parameters
from bessemer.train.compile import FP8, compile_blocks, compute_in, compute_type, use_tf32
from bessemer.train.device import memory_limit, synchronize
from bessemer.train.engine import Engine, PipelineRunner, sharpness_aware
from bessemer.train.evaluate import Evaluator, HeldOutSet
from bessemer.train.job import DataFeed, Guard, Job, Recorder
from bessemer.train.loss import linear_cross_entropy
from bessemer.train.lowp import LossScale, convert_to_fp8, fp8_layers
from bessemer.train.memory import recompute
from bessemer.train.memory.fit import explain_build_out_of_memory, fit
from bessemer.train.memory.snapshots import MemorySnapshots, fits_snapshots
from bessemer.train.objective import Objective
from bessemer.train.saver import CheckpointSaver

if TYPE_CHECKING:
    from bessemer.parallel.pipeline import Pipeline


def build_job(
    spec: RunSpec,
    resolved: ResolvedRun,
    machine: Machine,
    world: World,
    run: RunWriter,
    view: RunView,
    previous: Plan | None,
) -> Job:
    """The job at step 0, with fresh weights and the attention kernel chosen. `previous` is the plan to continue."""
    training, shape, plan, device = resolved.training, resolved.shape, resolved.plan, world.device
    log_packing(spec, resolved.rows, training, plan)
    stream = build_stream(spec, resolved.data, resolved.rows, training, [Segment(0, 0)])
    peak_flops = machine.peak(training.precision)[0] * world.size
    stages = decide_stages(spec, shape, training, world, plan)
    parts = JobParts(
        training, shape, stream, resolved.held_out, resolved.data.tokenizer, device, peak_flops, world, stages,
        resolved.others, resolved.data if isinstance(resolved.data, PromptData) else None,
    )  # fmt: skip
    with explain_build_out_of_memory(
        with_weights(spec, training.weights), shape, training, device, world.layout.dp_shard
    ):
        view.activity("building the model")
        job = make_job(spec, parts, run, view)
        record_models(resolved.others, plan, previous)
        choose_attention(job.engine, plan, previous)
    if spec.adapter:
        plan.add("adapter", spec.adapter.kind, describe_adapters(job.engine.model), "asked")
        if spec.adapter.base == NF4:
            plan.add("adapter.base", NF4, describe_quantized(job.engine.model), "asked")
    if training.precision in FP8:
        reason = "the linear layers of inner blocks; the first and last block and the head stay in bf16"
        plan.add("precision.layers", len(fp8_layers(job.engine.model)), reason, "rule")
    return job


def fit_memory(job: Job, plan: Plan, resumed: bool) -> int | None:
    """Fits the micro-batch to the device memory, which may change `job.plan`, and attaches the checks that depend on
    it. Returns the measured peak in bytes."""
    rollouts = job.rollouts if isinstance(job.rollouts, RolloutMaker) else None
    if rollouts:
        rollouts.reserve(job.engine, job.world)
    with use_tf32(job.plan.precision):
        job.recorder.view.activity("measuring the memory of a step")
        peak_bytes = fit(job, plan, resumed=resumed)
    if rollouts and peak_bytes is not None:
        rollouts.sampler.generator.make_room(peak_bytes, job.engine.device)
    check_static_graph(job.spec, job.world.layout, job.plan)
    model, guard = job.engine.model, job.spec.guard
    if job.world.size > 1:
        job.guard.step_pace = StepPace(model.blocks, job.engine.device)
        job.guard.replica_check = ReplicaCheck(model, job.world, guard.detect.weights if guard.enabled else None)
    add_groups_to_plan(all_stages(model.shape, job.spec) if job.engine.pipeline else model, job.spec, plan)
    return peak_bytes


def attach_snapshots(job: Job, peak_bytes: int | None) -> None:
    """Keeps recent states in memory if they fit, for fast rollbacks."""
    spec = job.spec
    if spec.guard.copies == "off" or not spec.guard.enabled or spec.parallel.engine == "deepspeed":
        return
    fits, needed, free = fits_snapshots(job.snapshot_state(), job.engine.device, job.world, peak_bytes)
    if all(job.world.gather(fits)):
        job.guard.snapshots = MemorySnapshots()
    else:
        memory = f"two snapshots of the state need {human_bytes(needed)}, {human_bytes(free)} are free"
        job.recorder.event("no_copies", reason=f"{memory}: rollbacks will read checkpoints")


@dataclass(frozen=True)
class JobParts:
    """The parts of a job."""

    plan: TrainPlan
    shape: ModelShape
    stream: Stream
    held_out: dict[str, HeldOutSet]
    tokenizer: Tokenizer
    device: torch.device
    peak_flops: float
    world: World = field(default_factory=World)
    stages: tuple[range, ...] = ()  # the layers of each pipeline stage
    others: Sequence[ModelSource] = ()  # further models of the run
    prompts: PromptData | None = None  # of a run that makes rollouts


def spec_fingerprint(spec: RunSpec) -> str:
    return str(xxhash.xxh3_128(dump_spec(spec).encode()).hexdigest())


def open_remote(spec: RunSpec, run_folder: Path) -> RemoteCheckpoints | None:
    """The remote checkpoint tier, if the spec names one."""
    url = spec.checkpoint.remote
    return RemoteCheckpoints(f"{url.rstrip('/')}/{run_folder.name}") if url else None


def all_stages(shape: ModelShape, spec: RunSpec) -> nn.Module:
    """The model before it is cut into pipeline stages, without memory, frozen as in the spec. Refuses patterns that
    match nothing in any stage."""
    with torch.device("meta"):
        model = make_module(shape)
    freeze(model, spec.optimizer.freeze)
    return model


def parallelize_layers(model: Decoder, world: World, spec: RunSpec, stages: tuple[range, ...]) -> Pipeline | None:
    """Applies the parts of the layout that change the layers; `shard_or_replicate` shards the weights afterwards."""
    layout, mesh = world.layout, world.mesh
    pipeline = None
    if layout.pp > 1:
        from bessemer.parallel.pipeline import Pipeline  # torch's schedules take a second to import

        all_stages(model.shape, spec)
        pipeline = Pipeline(model, world, spec.parallel.pipeline, stages)
    if layout.tp > 1:
        assert mesh is not None
        from bessemer.parallel.tensor import parallelize_tensors

        parallelize_tensors(model, mesh["tp"], spec.parallel.sequence)
    if layout.ep > 1:
        assert mesh is not None
        shard_experts(model, mesh["dp_shard"])
    return pipeline


def make_job(spec: RunSpec, parts: JobParts, run: RunWriter, view: RunView) -> Job:
    """The job at step 0, with fresh weights."""
    plan, device, fingerprint = parts.plan, parts.device, spec_fingerprint(spec)
    spec = with_weights(spec, plan.weights)
    matrices = torch.float32 if plan.weights == "fp32" else torch.bfloat16
    world = parts.world
    quantized = spec.adapter is not None and spec.adapter.base == NF4
    later = world.divided or quantized
    model = build_model(parts.shape, "meta" if later else device, spec.seed, spec.model.init, matrices)
    set_dropout(model, spec.dropout.embedding, spec.dropout.attention, spec.dropout.residual)
    adapt(model, spec, plan, device, world)
    if plan.precision in FP8:
        convert_to_fp8(model, plan.precision, device)
    pipeline = parallelize_layers(model, world, spec, parts.stages)
    if plan.compiled:
        kind = compute_type(plan.precision)
        compile_blocks(model, plan.micro_rows, plan.context, kind, chained=plan.compile == "chain")
    recompute.apply(model, plan.activations, spec.memory.offload_activations)
    half = device.type == "cuda" and plan.precision in HALF
    attach_trained(model, parts.others, world, spec, matrices, half)
    if spec.parallel.engine == "deepspeed":
        optimizer = initialize_deepspeed(model, spec, world, plan.micro_rows)
    else:
        stages = pipeline.stages if pipeline else ()
        after_step = shard_or_replicate(model, world, half, spec.parallel, stages)
        if world.divided:
            init_sharded_weights(model, stages, device, spec.seed, spec.model.init)
        clear_adapters(model)
        spread_heads(model, spec)
        sharded = spec.parallel.replicas.divide_optimizer and world.size > 1
        optimizer = zero1_optimizer(model, spec, world) if sharded else optimizer_for(model, spec, bool(stages))
        if after_step:
            optimizer.post_step_hooks.append(after_step)
    named = list(model.named_parameters())  # frozen parameters have no average
    objective = make_objective(spec, parts.stream, parts.tokenizer, parts.shape, plan.context)
    objective.models = further_models(model, spec, parts.others, world, plan.precision)
    objective.check_models()
    if world.layout.cp > 1:
        columns = RingAttention if spec.parallel.context == "ring" else UlyssesAttention
        objective.columns = columns(world.columns, world.cp_rank, world.layout.cp)
    if world.layout.tp > 1:
        assert world.mesh is not None
        objective.tensors = world.mesh["tp"]
    runner = PipelineRunner(pipeline, model, objective, plan.precision, spec.parallel.sequence) if pipeline else None
    engine = Engine(
        spec, plan, device, model, objective, optimizer,
        run_schedule(spec.schedule, plan), world,
        weight_average(named, spec.optimizer, optimizer), runner,
        LossScale(spec.loss_scale, device) if plan.precision == "fp16" else None,
        sharpness_aware(optimizer, spec.optimizer, world),
    )  # fmt: skip
    rollouts: RolloutMaker | None = None
    evaluator: Evaluator | None = None
    if parts.prompts is not None and isinstance(parts.stream, RolloutStream):
        rollouts, evaluator = attach_rollouts(
            spec, parts.prompts, parts.stream, parts.held_out, plan, device, world, run.folder
        )
    evaluator = evaluator or Evaluator(
        parts.held_out, plan.context, plan.evaluate_tokens, plan.micro_rows, plan.precision, device, world
    )
    # Apple's backend has no median that skips NaN: there the judge runs on the CPU, at the price of a sync.
    judge_device = torch.device("cpu") if device.type == "mps" else device
    hosts, detected = world.gather(socket.gethostname()), with_loss_unit(spec.guard, objective)
    guard = Guard(
        Judge(spec.guard, judge_device, parts.stream.steps.rows(0), objective.judged),
        Detectors(detected, memory_limit(device), plan.total_steps, hosts, spec.objective, judge_names(spec)),
        LayerStats(model, optimizer.remainders(), world), Ladder(spec.guard),
    )  # fmt: skip
    remote = open_remote(spec, run.folder) if world.main else None
    return Job(
        engine, DataFeed(parts.stream, evaluator, parts.tokenizer.decode), guard,
        Recorder(run, view, step_flops(model, parts.shape, plan.context), parts.peak_flops),
        CheckpointSaver(CheckpointStore(run.checkpoints, world), fingerprint, remote), rollouts=rollouts,
    )  # fmt: skip


def spread_heads(model: nn.Module, spec: RunSpec) -> None:
    """The heads of a reward ensemble start with different scores of all answers, and keep their differences where no
    pair decides (Osband et al. 2018, randomized prior functions). Drawn with 0.02, they learn to agree everywhere."""
    if spec.objective != "reward" or spec.reward.heads == 1 or spec.model.init not in ("gpt", "depth"):
        return
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("head.weight"):
                weight.mul_(50 * spec.reward.spread / weight.shape[1] ** 0.5)


def adapt(model: Decoder, spec: RunSpec, plan: TrainPlan, device: torch.device, world: World | None = None) -> None:
    """Adds the run's adapters to a model; with `base: nf4` to one on the meta device, which is allocated unless its
    weights are divided: then only those in NF4 are."""
    if spec.adapter is None:
        return
    assert plan.adapter is not None
    layers = list(linear_layers(model))
    add_adapters(model, with_folder(spec.adapter, model.shape), *plan.adapter)
    if spec.adapter.base == NF4 and world is not None and world.divided:
        assert world.mesh is not None
        divide_in_nf4(model, layers, world.mesh["dp_shard"].get_group(), device)
    elif spec.adapter.base == NF4:
        allocate_in_nf4(model, layers, device)
        init_weights(model, spec.seed, spec.model.init)


def further_models(
    model: Decoder, spec: RunSpec, sources: Sequence[ModelSource], world: World, precision: str
) -> dict[str, Decoder]:
    """The objective's models: trained ones inside the run's model, frozen ones loaded, and the base of an adapter."""
    models = {
        source.name: companion(model, source) or load_frozen(source, world, spec, precision) for source in sources
    }
    bases = [name for name, other in spec.models.items() if other.path == BASE]
    return models | dict.fromkeys(bases, cast("Decoder", BaseModel(model)))


def step_flops(model: Decoder, shape: ModelShape, context: int) -> int:
    """FLOPs per trained token. The frozen matrices of a model with adapters have no gradients."""
    if not adapted_modules(model):
        return shape.flops_per_token(context)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return shape.flops_per_token(context) - 2 * matmul_parameters(shape) + 6 * trained


def with_loss_unit(guard: GuardSpec, objective: Objective) -> GuardSpec:
    """The guard's settings with the objective's scale of the loss, unless the spec sets one."""
    if guard.detect.loss_unit is not None or not objective.judged.level:
        return guard
    return guard.model_copy(update={"detect": guard.detect.model_copy(update={"loss_unit": objective.judged.level})})


def set_dropout(model: nn.Module, embedding: float, attention: float, residual: float) -> None:
    for module in model.modules():
        if isinstance(module, Decoder):
            module.dropout = embedding
        elif isinstance(module, SelfAttention):
            module.dropout = attention
        elif isinstance(module, TransformerBlock):
            module.dropout = residual


def choose_attention(engine: Engine, plan: Plan, previous: Plan | None) -> None:
    """Chooses the fastest correct attention kernel by measurement; a resumed run keeps its kernel."""
    if engine.device.type != "cuda" or engine.model.shape.wrapped:
        plan.add("attention", "sdpa", "torch chooses the kernel on this device", "rule")
        return
    if engine.world.layout.cp > 1 and engine.spec.parallel.context == "ring":
        plan.add("attention", "sdpa", "ring attention needs kernels that return the log-sum-exp", "rule")
        return
    name = plan.keep("attention", "auto", previous)
    if name is None:
        dtype = compute_type(engine.plan.precision)
        tasks = {task.kind for task in engine.spec.tasks}
        packed = not engine.spec.data.cross_documents
        shared = engine.spec.objective == "dpo" and engine.spec.dpo.share_prefix is True
        prefix = shared or not tasks <= {"causal", "infill"}
        choice = choose(
            engine.model.shape, engine.plan.context, engine.plan.micro_rows, dtype, engine.device, packed,
            prefix=prefix, dropout=engine.spec.dropout.attention > 0,
        )  # fmt: skip
        name = plan.add("attention", choice.name, choice.reason, "measured")
    set_backend(engine.model, str(name))
    shape = engine.model.shape
    for other in engine.objective.models.values():
        if (other.shape.head_dim, other.shape.positions) == (shape.head_dim, shape.positions):
            set_backend(other, str(name))


REPEATS = 3
TOKENS = 8192  # of a measurement: enough to saturate a device


def cut_layers(costs: Sequence[float], stages: int, before: float = 0.0, behind: float = 0.0) -> list[range]:
    """The layers of each stage such that the most expensive stage is as cheap as possible; each has at least one.
    `before` and `behind` are additional costs of the first and the last stage (embedding, head)."""
    layers = len(costs)
    sums = list(accumulate(costs, initial=0.0))

    def price(first: int, last: int, stage: int) -> float:
        return sums[last] - sums[first] + before * (stage == 0) + behind * (stage == stages - 1)

    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # last layer -> highest price, ends of the stages
    for stage in range(stages):
        left = stages - stage - 1
        extended: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (worst, ends) in best.items():
            for last in range(first + 1, layers - left + 1):
                highest = max(worst, price(first, last, stage))
                if last not in extended or highest < extended[last][0]:
                    extended[last] = (highest, (*ends, last))
        best = extended
    ends = best[layers][1]
    return [range(first, last) for first, last in zip((0, *ends), ends, strict=False)]


def decide_stages(spec: RunSpec, shape: ModelShape, training: TrainPlan, world: World, plan: Plan) -> tuple[range, ...]:
    """The layers of each pipeline stage, by their cost on this device as rank 0 measures it."""
    if world.layout.pp == 1:
        return ()
    kinds = [(shape.mixer(layer), shape.has_experts(layer)) for layer in range(shape.layers)]
    measured = world.agree(_measure_layers(shape, kinds, training, world.device) if world.main else None)
    assert measured is not None
    costs, behind = measured
    cuts = cut_layers([costs[kind] for kind in kinds], world.layout.pp * stages_each(spec), behind=behind)
    layer = max(costs.values())
    reason = f"a layer takes {layer * 1e3:.1f} ms forward and back, the head {behind * 1e3:.1f} ms"
    plan.add("parallel.pipeline.layers", ", ".join(str(len(cut)) for cut in cuts), reason, "measured")
    return tuple(cuts)


def _measure_layers(
    shape: ModelShape, kinds: list[tuple[str, bool]], training: TrainPlan, device: torch.device
) -> tuple[dict[tuple[str, bool], float], float]:
    """Seconds of a forward and backward pass through a layer of each kind, and through the head."""
    rows = max(1, min(training.micro_rows, TOKENS // training.context))
    costs: dict[tuple[str, bool], float] = {}
    behind = 0.0
    for kind in dict.fromkeys(kinds):
        model = build_model(_up_to(shape, kinds.index(kind)), device, 0)
        x_BTW = torch.randn(rows, training.context, shape.width, device=device, requires_grad=True)
        targets_R = torch.zeros(rows * training.context, dtype=torch.int64, device=device)
        place, block = model.attention_inputs(x_BTW, AttentionMask(causal=shape.causal)), model.blocks[-1]

        def layer() -> Tensor:
            out: Tensor = block(x_BTW, place, None)  # noqa: B023  only called in this iteration
            return out.float().sum()

        def head() -> Tensor:
            weights_R = torch.ones_like(targets_R, dtype=torch.float32)  # noqa: B023
            hidden_RW = x_BTW.flatten(0, 1)  # noqa: B023
            return linear_cross_entropy(hidden_RW, model.head_weight, targets_R, weights_R, 1.0)[0]  # noqa: B023

        with compute_in(training.precision, device):
            costs[kind] = _fastest(layer, device)
            behind = behind or _fastest(head, device)
    return costs, behind


def _up_to(shape: ModelShape, layer: int) -> ModelShape:
    """The model of the layers up to this one; most models have one kind of layer, and it is the first."""
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
