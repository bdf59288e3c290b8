"""A job put together from decided parts: for a run that trains, and for one that is only looked at again."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from bessemer.checkpoint.remote import Remote
from bessemer.checkpoint.shelf import Shelf
from bessemer.data.own_stream import ForwardStream
from bessemer.data.stream import BatchStream
from bessemer.data.tokenizer import Tokenizer
from bessemer.guard.detect.watch import Watch
from bessemer.guard.inside import Inside
from bessemer.guard.judge import Judge
from bessemer.guard.ladder import Ladder
from bessemer.model.transformer import Decoder, build
from bessemer.observe.view import RunView
from bessemer.optim.choose import optimizer_for
from bessemer.optim.ema import Ema
from bessemer.optim.schedule import Schedule
from bessemer.parallel.context import Columns
from bessemer.parallel.deepspeed import engage
from bessemer.parallel.experts import divide_experts
from bessemer.parallel.replicas import optimizer_of_replicas
from bessemer.parallel.ring import Ring
from bessemer.parallel.shard import first_weights, lay_over
from bessemer.parallel.world import World
from bessemer.plan.decide import HALF, TrainPlan, keeping
from bessemer.run.directory import RunWriter
from bessemer.spec.load import dump_spec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.supervise.start import set_dropout
from bessemer.train import recompute
from bessemer.train.compiled import compile_blocks
from bessemer.train.device import memory_limit
from bessemer.train.evaluate import Evaluator, HeldOut
from bessemer.train.fp8 import convert
from bessemer.train.job import Job
from bessemer.train.objective import make_pretrain
from bessemer.train.passage import Passage
from bessemer.train.precision import FP8, compute_type
from bessemer.train.saver import CheckpointSaver
from bessemer.train.scaling import LossScale

if TYPE_CHECKING:
    from bessemer.parallel.pipeline import Pipeline


@dataclass(frozen=True)
class Parts:
    """What a job is made of, all decided."""

    plan: TrainPlan
    shape: ModelShape
    stream: BatchStream | ForwardStream
    held_out: dict[str, HeldOut]
    tokenizer: Tokenizer
    device: torch.device
    peak_flops: float
    world: World = field(default_factory=World)
    cuts: tuple[range, ...] = ()  # the layers of each stage of a pipeline


def spec_fingerprint(spec: RunSpec) -> str:
    return str(xxhash.xxh3_128(dump_spec(spec).encode()).hexdigest())


def open_remote(spec: RunSpec, run_folder: Path) -> Remote | None:
    """The durable tier, if the spec names one."""
    url = spec.checkpoint.remote
    return Remote(f"{url.rstrip('/')}/{run_folder.name}") if url else None


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


def make_job(spec: RunSpec, parts: Parts, run: RunWriter, view: RunView) -> Job:
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
        shared = Ring if spec.parallel.context == "ring" else Columns
        objective.columns = shared(world.columns, world.cp_rank, world.layout.cp)
    if world.layout.tp > 1:
        assert world.mesh is not None
        objective.tensors = world.mesh["tp"]
    passage = Passage(pipeline, model, objective, plan.precision, spec.parallel.sequence) if pipeline else None
    return Job(
        spec=spec, plan=plan, device=device, model=model, objective=objective,
        optimizer=optimizer,
        schedule=Schedule(
            plan.peak_lr, plan.warmup_steps, plan.total_steps, spec.schedule.kind, spec.schedule.floor
        ),
        # Apple's backend has no median that skips NaN: there the judge sits on the CPU, at the price of a sync.
        judge=Judge(
            spec.guard, torch.device("cpu") if device.type == "mps" else device, parts.stream.steps.rows(0)
        ),
        stream=parts.stream,
        evaluator=Evaluator(
            parts.held_out, plan.context, plan.evaluate_tokens, plan.micro_rows, plan.precision, device, world
        ),
        run=run, view=view,
        saver=CheckpointSaver(
            Shelf(run.checkpoints, world), fingerprint, open_remote(spec, run.folder) if world.main else None
        ),
        flops_per_token=parts.shape.flops_per_token(plan.context), peak_flops=parts.peak_flops,
        watch=Watch(spec.guard, memory_limit(device), plan.total_steps, world.gather(socket.gethostname())),
        inside=Inside(model, optimizer.remainders(), world),
        ladder=Ladder(spec.guard), decode=parts.tokenizer.decode,
        ema=Ema(named, spec.optimizer.ema) if spec.optimizer.ema else None,
        world=world, pipeline=passage,
        scaling=LossScale(spec.loss_scale, device) if plan.precision == "fp16" else None,
    )  # fmt: skip
