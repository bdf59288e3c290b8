"""`bessemer plan SPEC` without `--gpus`: the run on this machine, decided as `bessemer train` would, before its data is
read, and how long it will take there.

For machines outside of the GPU catalogue; the others are planned by proposal.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.asked import Asked, tokens_of
from bessemer.plan.decide import TrainPlan, decide_context, decide_training, tokens_after
from bessemer.plan.decision import Plan
from bessemer.plan.duration import DurationEstimate, estimate_duration
from bessemer.plan.expect import BAR, Expected, Occasion, expect
from bessemer.plan.history import RunRecord
from bessemer.plan.layout import ALONE
from bessemer.plan.machine import Machine
from bessemer.plan.mixtures import SourceSize
from bessemer.plan.show import WIDTH, decision_lines
from bessemer.spec.quantity import human_bytes, human_count
from bessemer.spec.shape import ModelShape

NEEDS_DATA = ("data.", "epochs", "mixture", "evaluate.tokens")  # decisions that only the data can settle
OTHERS = "--gpus 8xH100 plans the same run for other machines, --budget 500usd --deadline 7d for what can be rented"
RateOf = Callable[[ModelShape, int, str], float | None]  # shape, context and precision -> tokens/s measured here


@dataclass(frozen=True)
class LocalPlan:
    shape: ModelShape
    machine: Machine
    plan: Plan
    training: TrainPlan
    expected: Expected
    duration: DurationEstimate | None

    @property
    def tokens(self) -> int:
        return tokens_after(self.training.batch_rows, self.training.total_steps) * self.training.context


def plan_here(asked: Asked, machine: Machine, rate_of: RateOf, records: list[RunRecord]) -> LocalPlan:
    """What `train` would decide, with as much data as the budget reads, and the time by a short measurement."""
    spec, shape, plan = asked.spec, asked.shape, Plan()
    plan.add("model", f"{human_count(shape.parameters)} parameters", asked.reason, asked.source, asked.basis)
    context = decide_context(spec, shape, plan)
    if spec.budget.epochs is not None:
        tokens_of(spec, context)  # which refuses it: no data is read
    if spec.precision == "auto" and machine.matmul.get("bf16", 0.0) > 1.3 * machine.matmul["fp32"]:
        short = replace(shape, layers=min(2, shape.layers))  # as at the start of a run
        rates = {key: rate for key in ("fp32", "bf16") if (rate := rate_of(short, context, key))}
        machine = replace(machine, training=rates if len(rates) == 2 else {})
    enough = SourceSize(1 << 60, (1 << 60) // context)
    training = decide_training(
        spec, shape, context, machine, dict.fromkeys(spec.data.sources, enough), enough.tokens, plan
    )
    for key in [key for key in plan.decisions if key.startswith(NEEDS_DATA) and key != "data.context"]:
        del plan.decisions[key]
    occasion = Occasion(spec, shape, training, machine, ALONE, 1, machine.peak(training.precision)[0])
    rate = rate_of(shape, context, training.precision)
    expected = expect(occasion, records, occasion.rows * context / rate if rate else None)

    def preset_rate(small: ModelShape) -> float:
        return rate_of(small, context, training.precision) or 1e-9  # a preset can always be measured

    return LocalPlan(shape, machine, plan, training, expected, estimate_duration(occasion, expected, 0, preset_rate))


def local_lines(found: LocalPlan, width: int = WIDTH) -> list[str]:
    machine, expected = found.machine, found.expected
    what = f"{human_count(found.shape.parameters)} parameters on {human_count(found.tokens)} tokens"
    where = f"this machine ({machine.name}, {machine.threads} threads, {human_bytes(machine.memory_bytes)})"
    bar = f", within {BAR * expected.error:.0%}" if expected.error else ""
    if found.duration:
        time = f"{found.duration} ({expected.basis}{bar})"
    else:
        time = expected.basis
    memory = f"{human_bytes(expected.estimated_bytes)} of tensors in a step, of {human_bytes(machine.memory_bytes)}"
    return [
        f"{what}, {where}", "", *decision_lines(found.plan, width), "", f"  memory  {memory}", f"  time    {time}",
        f"  others  {OTHERS}",
    ]  # fmt: skip


def local_json(found: LocalPlan) -> dict[str, Any]:
    return {
        "model": found.shape.to_dict(), "parameters": found.shape.parameters, "tokens": found.tokens,
        "machine": found.machine.to_json(), "context": found.training.context,
        "batch_rows": found.training.batch_rows[0][1],
        "decisions": [asdict(decision) for decision in found.plan.decisions.values()],
        "expected": asdict(found.expected), "duration": asdict(found.duration) if found.duration else None,
    }  # fmt: skip


def check_options(options: dict[str, object]) -> None:
    """Refuse what only a plan for GPUs of the catalogue has."""
    if wrong := [name for name, value in options.items() if value]:
        raise UserError(f"{wrong[0]}: for GPUs of the catalogue: write --gpus, such as --gpus 8xH100, or leave it out")
