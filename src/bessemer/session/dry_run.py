"""Resolves a spec to the settings of a run: layout, rows and training plan. `Session` uses it at each start;
`bessemer inspect`, the emitters and `bench scaling` use it without starting a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

import torch

from bessemer.data.stream.rows import Rows
from bessemer.parallel.world import World, set_patience
from bessemer.plan.decide import TrainPlan, decide_training
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.plan.search.layout import ONE_PROCESS, Layout, decide_layout
from bessemer.plan.search.replicas import note_replicas
from bessemer.session.data import Data, held_out_rows, make_rows, open_data, sizes
from bessemer.session.start import WeightSource, decide_shape, open_source
from bessemer.spec.quantity import human_count
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import measure
from bessemer.train.evaluate import HeldOutSet
from bessemer.train.speed import training_rate


@dataclass(frozen=True)
class ResolvedRun:
    """Everything that is decided before a job is built."""

    plan: Plan
    training: TrainPlan
    shape: ModelShape
    context: int
    data: Data
    rows: dict[str, Rows]
    held_out: dict[str, HeldOutSet]
    source: WeightSource | None = None

    def summary(self, training: TrainPlan) -> str:
        """The plan in one line."""
        rows = training.batch_rows[0][1]
        return (
            f"{human_count(self.shape.parameters)} parameters, vocabulary {self.shape.vocab:,}, "
            f"{training.total_steps:,} steps of {rows} x {training.context} tokens, peak lr {training.peak_lr:g}, "
            f"{training.precision}"
        )


def decide(spec: RunSpec, device: torch.device) -> ResolvedRun:
    """Resolves a spec without starting a run. Prepares the spec's data if that has not been done."""
    plan, source = Plan(), open_source(spec)
    data = open_data(spec, plan)
    shape, context = decide_shape(spec, source, data.tokenizer.vocab_size, plan)
    return replace(resolve_run(spec, data, shape, context, measure(device), plan), source=source)


def resolve_run(
    spec: RunSpec,
    data: Data,
    shape: ModelShape,
    context: int,
    machine: Machine,
    plan: Plan,
    previous: Plan | None = None,
    layout: Layout = ONE_PROCESS,
) -> ResolvedRun:
    """Rows and training plan; `previous` is the plan of the checkpoint to continue from."""
    rows, held_out = make_rows(spec, data, context), held_out_rows(data, context)
    held_out_tokens = sum(held.tokens for held in held_out.values())
    sources = sizes(spec, rows, data, context)
    training = decide_training(spec, shape, context, machine, sources, held_out_tokens, plan, previous, layout)
    return ResolvedRun(plan, training, shape, context, data, rows, held_out)


def choose_layout(
    spec: RunSpec, world: World, shape: ModelShape, context: int, machine: Machine, plan: Plan, previous: Plan | None
) -> Machine:
    """Decides how the model is parallelized and sets it up in `world`. A new run also measures precisions: the machine
    with the result."""
    if previous is None:
        machine = world.agree(measure_precision(spec, machine, shape, context, world.device) if world.main else machine)
    layout = decide_layout(spec, shape, context, machine, world.size, plan)
    note_replicas(spec, layout, plan)
    world.lay(layout, alone=spec.parallel.shard.alone)
    set_patience(timedelta(seconds=spec.parallel.patience))
    return machine


def measure_precision(
    spec: RunSpec, machine: Machine, shape: ModelShape, context: int, device: torch.device
) -> Machine:
    """On a CPU a fast bf16 matmul does not imply a fast step: trains two layers in both precisions to compare."""
    promising = machine.matmul["bf16"] > 1.3 * machine.matmul["fp32"]
    if device.type != "cpu" or spec.precision != "auto" or not promising or shape.wrapped:
        return machine
    short, rows = replace(shape, layers=min(2, shape.layers)), max(1, 1024 // context)
    rates = {key: training_rate(short, context, rows, key, device, budget_s=0.3) for key in ("fp32", "bf16")}
    return replace(machine, training=rates)
