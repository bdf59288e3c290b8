"""How long a run will take on this machine, and, where that is long for a CPU, a smaller run that takes 20 minutes.

`train/speed.py` measures a step before the first one; here is the arithmetic that follows from it.

`bessemer plan SPEC` without `--gpus`: the run on this machine, decided as `bessemer train` would, before its data is
read, and how long it will take there.

For machines outside of the GPU catalogue; the others are planned by proposal.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.decide import TrainPlan, decide_context, decide_training, tokens_after, vocab_limit
from bessemer.plan.decision import Plan
from bessemer.plan.expect import BAR, ExpectedRun, Occasion, RunRecord, expect
from bessemer.plan.hardware import Machine
from bessemer.plan.mixtures import SourceSize
from bessemer.plan.present.show import WIDTH, decision_lines
from bessemer.plan.request import PlanRequest, tokens_of
from bessemer.plan.search.layout import ALONE
from bessemer.spec.quantity import human_bytes, human_count
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import PRESETS, ModelShape

LONG_S = 3600.0  # on a CPU; beyond it a smaller run is suggested
SHORT_S = 1200.0  # of the suggested run
TOKENS_PER_PARAMETER = 20  # enough for the suggested run (Chinchilla 2022)
FORWARD_SHARE = 1 / 3  # of a training step: what an evaluation takes for as many tokens


@dataclass(frozen=True)
class SmallerRun:
    """What to write for a run of about 20 minutes. None: that key stays as it is."""

    preset: str | None
    tokens: int | None
    seconds: float

    def __str__(self) -> str:
        keys = {"model": self.preset, "budget.tokens": None if self.tokens is None else human_count(self.tokens)}
        written = [f"`{key}: {value}`" for key, value in keys.items() if value is not None]
        return f"{' with '.join(written)} takes {rough_time(self.seconds)}"


@dataclass(frozen=True)
class DurationEstimate:
    """Of the steps that are left, with their evaluations. `error` is the mean error, as a fraction; None: `seconds` is
    a lower bound."""

    seconds: float
    tokens_per_s: float
    error: float | None
    basis: str
    smaller: SmallerRun | None = None

    def __str__(self) -> str:
        """Such as "about 55 h here (250 tokens/s); `model: 1M` takes 20 min"."""
        rate = f"{self.tokens_per_s:,.0f} tokens/s"
        about = "at least" if self.error is None else "about"
        words = f"{about} {rough_time(self.seconds)} here ({rate})"
        return words if self.smaller is None else f"{words}; {self.smaller}"


def estimate_duration(
    occasion: Occasion, expected: ExpectedRun, start_step: int = 0, rate_of: Callable[[ModelShape], float] | None = None
) -> DurationEstimate | None:
    """The time from `start_step` to the end; None where nothing is known of this machine's speed.

    `rate_of` measures the training rate of another shape here, in tokens/s. It is called only for a run from random
    weights of over an hour on a CPU, for one or two presets. Without it there is no suggestion: small models do not
    reach the FLOP/s of large ones.
    """
    rate, training = expected.tokens_per_s, occasion.training
    if rate is None:
        return None
    rows = tokens_after(training.batch_rows, training.total_steps) - tokens_after(training.batch_rows, start_step)
    tokens = rows * training.context
    seconds = tokens / rate * (1 + evaluation_share(occasion))
    smaller = None
    if occasion.machine.device == "cpu" and seconds > LONG_S and start_step == 0 and rate_of is not None:
        smaller = smaller_run(occasion, tokens, rate, rate_of)
    return DurationEstimate(seconds, rate, expected.error, expected.basis, smaller)


def evaluation_share(occasion: Occasion) -> float:
    """Time of evaluations over that of training steps."""
    training = occasion.training
    every = training.evaluate.steps
    if not every:  # by seconds
        return 0.0
    times = training.total_steps // every
    tokens = tokens_after(training.batch_rows, training.total_steps) * training.context
    return FORWARD_SHARE * times * training.evaluate_tokens / max(1, tokens)


def smaller_run(occasion: Occasion, tokens: int, rate: float, rate_of: Callable[[ModelShape], float]) -> SmallerRun:
    """The largest preset that reads the run's tokens, or 20 for each parameter where that is fewer, in 20 minutes.
    Where none does, the smallest with fewer tokens. A run that continues a model keeps it, and reads fewer tokens."""
    spec, shape, context = occasion.spec, occasion.shape, occasion.training.context
    slower = 1 + evaluation_share(occasion)
    if spec.model.hf is not None or spec.start_from is not None:
        return SmallerRun(None, _round_down(SHORT_S * rate / slower), SHORT_S)
    flops_per_s = rate * shape.flops_per_token(context)
    smallest: tuple[str, float] | None = None
    for name, small in _smaller_presets(spec, shape):
        needed = min(tokens, TOKENS_PER_PARAMETER * small.parameters)
        last = name == next(iter(PRESETS))
        if needed * small.flops_per_token(context) * slower / flops_per_s > SHORT_S and not last:
            continue  # too long even at the FLOP/s of the larger model
        small_rate = rate_of(small)
        seconds = needed * slower / small_rate
        if seconds <= SHORT_S:
            return SmallerRun(name, None if needed == tokens else _round_down(needed), seconds)
        smallest = name, small_rate
    if smallest is None:  # nothing is smaller
        return SmallerRun(None, _round_down(SHORT_S * rate / slower), SHORT_S)
    return SmallerRun(smallest[0], _round_down(SHORT_S * smallest[1] / slower), SHORT_S)


def _smaller_presets(spec: RunSpec, shape: ModelShape) -> list[tuple[str, ModelShape]]:
    """With the vocabulary that they would get, largest first."""
    named = []
    for name, small in PRESETS.items():
        vocab = min(shape.vocab, vocab_limit(small.width)) if spec.tokenizer.vocab == "auto" else shape.vocab
        named.append((name, replace(small, vocab=vocab)))
    return [(name, small) for name, small in reversed(named) if small.parameters < shape.parameters]


def _round_down(tokens: float) -> int:
    """To two digits: a suggestion is read by people."""
    scale = 10 ** max(0, len(str(int(tokens))) - 2)
    return max(1, int(tokens) // scale * scale)


def rough_time(seconds: float) -> str:
    """For an estimate: '40 s', '20 min', '3.5 h', '55 h', '12 days'."""
    for limit, size, unit in ((90, 1, "s"), (5400, 60, "min"), (259_200, 3600, "h"), (float("inf"), 86_400, "days")):
        if seconds < limit:
            count = seconds / size
            return f"{count:.1f} {unit}" if unit in ("h", "days") and count < 9.95 else f"{count:,.0f} {unit}"
    raise AssertionError(f"{seconds} s is no duration")


NEEDS_DATA = ("data.", "epochs", "mixture", "evaluate.tokens")  # decisions that only the data can settle
OTHERS = "--gpus 8xH100 plans the same run for other machines, --budget 500usd --deadline 7d for what can be rented"
RateOf = Callable[[ModelShape, int, str], float | None]  # shape, context and precision -> tokens/s measured here


@dataclass(frozen=True)
class LocalPlan:
    shape: ModelShape
    machine: Machine
    plan: Plan
    training: TrainPlan
    expected: ExpectedRun
    duration: DurationEstimate | None

    @property
    def tokens(self) -> int:
        return tokens_after(self.training.batch_rows, self.training.total_steps) * self.training.context


def plan_here(asked: PlanRequest, machine: Machine, rate_of: RateOf, records: list[RunRecord]) -> LocalPlan:
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
