"""A job put together from decided parts: for a run that trains, and for one that is only looked at again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

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
from bessemer.model.transformer import build
from bessemer.observe.view import RunView
from bessemer.optim.choose import optimizer_for
from bessemer.optim.ema import Ema
from bessemer.optim.schedule import Schedule
from bessemer.parallel.shard import lay_over
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
from bessemer.train.precision import FP8, compute_type
from bessemer.train.saver import CheckpointSaver
from bessemer.train.scaling import LossScale


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


def spec_fingerprint(spec: RunSpec) -> str:
    return str(xxhash.xxh3_128(dump_spec(spec).encode()).hexdigest())


def open_remote(spec: RunSpec, run_folder: Path) -> Remote | None:
    """The durable tier, if the spec names one."""
    url = spec.checkpoint.remote
    return Remote(f"{url.rstrip('/')}/{run_folder.name}") if url else None


def make_job(spec: RunSpec, parts: Parts, run: RunWriter, view: RunView) -> Job:
    """The job at step 0, with fresh weights."""
    plan, device, fingerprint = parts.plan, parts.device, spec_fingerprint(spec)
    spec = keeping(spec, plan.weights)
    matrices = torch.float32 if plan.weights == "fp32" else torch.bfloat16
    model = build(parts.shape, device, spec.seed, spec.model.init, matrices)
    set_dropout(model, spec.dropout.embedding, spec.dropout.attention, spec.dropout.residual)
    if plan.precision in FP8:
        convert(model, plan.precision, device)
    if plan.compiled:
        compile_blocks(model, plan.micro_rows, plan.context, compute_type(plan.precision))
    recompute.apply(model, plan.activations, spec.memory.offload_activations)
    world = parts.world
    lay_over(model, world, half=device.type == "cuda" and plan.precision in HALF)
    optimizer = optimizer_for(model, spec)  # what it freezes has no average either
    named = list(model.named_parameters())
    objective = make_pretrain(spec, parts.stream.order.names, parts.tokenizer, parts.shape, plan.context)
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
        watch=Watch(spec.guard, memory_limit(device), plan.total_steps),
        inside=Inside(model, optimizer.remainders(), world),
        ladder=Ladder(spec.guard), decode=parts.tokenizer.decode,
        ema=Ema(named, spec.optimizer.ema) if spec.optimizer.ema else None,
        world=world,
        scaling=LossScale(spec.loss_scale, device) if plan.precision == "fp16" else None,
    )  # fmt: skip
