"""What a run of a spec would be, decided as at its start, without one: for who looks at it or writes it elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bessemer.data.stream.rows import Rows
from bessemer.plan.decide import TrainPlan, decide_training
from bessemer.plan.decision import Plan
from bessemer.session.data import Data, held_out_rows, make_rows, open_data, sizes
from bessemer.session.start import WeightSource, decide_shape, open_source
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import measure


@dataclass(frozen=True)
class DryRun:
    """All that is decided before a job is built."""

    plan: Plan
    training: TrainPlan
    shape: ModelShape
    context: int
    data: Data
    rows: dict[str, Rows]
    source: WeightSource | None


def decide(spec: RunSpec, device: torch.device) -> DryRun:
    """Prepares the spec's data if that has not been done."""
    plan, source = Plan(), open_source(spec)
    data = open_data(spec, plan)
    shape, context = decide_shape(spec, source, data.tokenizer.vocab_size, plan)
    rows = make_rows(spec, data, context)
    held_out = sum(held.tokens for held in held_out_rows(data, context).values())
    training = decide_training(spec, shape, context, measure(device), sizes(spec, rows, data, context), held_out, plan)
    return DryRun(plan, training, shape, context, data, rows, source)
