"""Plans a spec on this machine, if it is not in the GPU catalogue (`bessemer plan SPEC`), and estimates how long it
takes.

train/speed.py measures a few rows; the estimate follows from them. For a long run on a CPU it suggests a smaller run of
20 minutes. proposal.py plans for GPUs of the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.adapter_choice import choose_adapter
from bessemer.plan.cost_model.memory import reserve_memory
from bessemer.plan.decide import TrainPlan, decide_context, decide_training, vocab_limit
from bessemer.plan.decision import Plan
from bessemer.plan.expect import BAR, ExpectedRun, RunRecord, RunSetup, predict_run
from bessemer.plan.hardware import Machine
from bessemer.plan.mixtures import SourceSize
from bessemer.plan.present import WIDTH, decision_lines
from bessemer.plan.request import DATA_SIZE, PlanRequest, log_estimate, spec_tokens
from bessemer.plan.rollouts import log_rl
from bessemer.plan.schedule import tokens_after
from bessemer.plan.search.layout import ONE_PROCESS
from bessemer.spec.quantity import human_bytes, human_count
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import PRESETS, ModelShape

LONG_S = 3600.0  # on a CPU, above which a smaller run is suggested
SHORT_S = 1200.0  # of the suggested run
TOKENS_PER_PARAMETER = 20  # enough for the suggested run (Chinchilla 2022)
FORWARD_SHARE = 1 / 3  # time of an evaluation relative to a training step of the same tokens
NEEDS_DATA = ("data.", "epochs", "mixture", "evaluate.tokens")  # decisions that depend on the data
OTHER_MACHINES = "--gpus 8xH100 plans the same run on other machines, `plan search --budget 500usd` on rented ones"
RateOf = Callable[[ModelShape, int, str], float | None]  # shape, context and precision -> measured tokens/s


@dataclass(frozen=True)
class SmallerRun:
    """Settings for a run of about 20 minutes. None: that key stays as it is."""

    preset: str | None
    tokens: int | None
    seconds: float

    def __str__(self) -> str:
        keys = {"model": self.preset, "budget.tokens": None if self.tokens is None else human_count(self.tokens)}
        settings = [f"`{key}: {value}`" for key, value in keys.items() if value is not None]
        return f"{' with '.join(settings)} takes {rough_time(self.seconds)}"


@dataclass(frozen=True)
class DurationEstimate:
    """Time of the remaining steps, with their evaluations. `error` is the mean error, as a fraction; None: `seconds` is
    a lower bound."""

    seconds: float
    tokens_per_s: float
    error: float | None
    basis: str
    smaller: SmallerRun | None = None

    def __str__(self) -> str:
        """Such as "about 55 h here (250 tokens/s); `model: 1M` takes 20 min"."""
        rate = f"{self.tokens_per_s:,.0f} tokens/s"
        bound = "at least" if self.error is None else "about"
        words = f"{bound} {rough_time(self.seconds)} here ({rate})"
        return words if self.smaller is None else f"{words}; {self.smaller}"


def estimate_duration(
    occasion: RunSetup, expected: ExpectedRun, start_step: int = 0, rate_of: Callable[[ModelShape], float] | None = None
) -> DurationEstimate | None:
    """The time from `start_step` to the end; None if the speed of this machine is unknown.

    `rate_of` measures the tokens/s of another shape on this machine. It is called only for runs of over an hour on a
    CPU, for one or two presets. Without it there is no suggestion: small models do not reach the FLOP/s of large ones.
    """
    rate, training = expected.tokens_per_s, occasion.training
    if rate is None:
        return None
    rows = tokens_after(training.batch_rows, training.total_steps) - tokens_after(training.batch_rows, start_step)
    tokens = rows * training.context
    with_padding = rate / occasion.filled
    seconds = tokens / with_padding * (1 + evaluation_share(occasion))
    smaller = None
    if occasion.machine.device == "cpu" and seconds > LONG_S and start_step == 0 and rate_of is not None:
        smaller = smaller_run(occasion, tokens, with_padding, rate_of)
    return DurationEstimate(seconds, rate, expected.error, expected.basis, smaller)


def evaluation_share(occasion: RunSetup) -> float:
    """Time of evaluations relative to that of training steps."""
    training = occasion.training
    every = training.evaluate.steps
    if not every:  # by seconds
        return 0.0
    times = training.total_steps // every
    tokens = tokens_after(training.batch_rows, training.total_steps) * training.context
    return FORWARD_SHARE * times * training.evaluate_tokens / max(1, tokens)


def smaller_run(occasion: RunSetup, tokens: int, rate: float, rate_of: Callable[[ModelShape], float]) -> SmallerRun:
    """The largest preset that trains on the run's tokens (at most 20 per parameter) in 20 minutes, or the smallest
    preset with fewer tokens. A run that continues a model keeps the model and reads fewer tokens."""
    spec, shape, context = occasion.spec, occasion.shape, occasion.training.context
    overhead = 1 + evaluation_share(occasion)
    if spec.model.hf is not None or spec.start_from is not None:
        return SmallerRun(None, _round_down(SHORT_S * rate / overhead), SHORT_S)
    flops_per_s = rate * shape.flops_per_token(context)
    smallest: tuple[str, float] | None = None
    for name, small in _smaller_presets(spec, shape):
        needed = min(tokens, TOKENS_PER_PARAMETER * small.parameters)
        last = name == next(iter(PRESETS))
        if needed * small.flops_per_token(context) * overhead / flops_per_s > SHORT_S and not last:
            continue  # too long even at the FLOP/s of the larger model
        small_rate = rate_of(small)
        seconds = needed * overhead / small_rate
        if seconds <= SHORT_S:
            return SmallerRun(name, None if needed == tokens else _round_down(needed), seconds)
        smallest = name, small_rate
    if smallest is None:  # no preset is smaller
        return SmallerRun(None, _round_down(SHORT_S * rate / overhead), SHORT_S)
    return SmallerRun(smallest[0], _round_down(SHORT_S * smallest[1] / overhead), SHORT_S)


def _smaller_presets(spec: RunSpec, shape: ModelShape) -> list[tuple[str, ModelShape]]:
    """With the vocabulary that each would get, largest first."""
    presets = []
    for name, small in PRESETS.items():
        vocab = min(shape.vocab, vocab_limit(small.width)) if spec.tokenizer.vocab == "auto" else shape.vocab
        presets.append((name, replace(small, vocab=vocab)))
    return [(name, small) for name, small in reversed(presets) if small.parameters < shape.parameters]


def _round_down(tokens: float) -> int:
    """To two digits."""
    scale = 10 ** max(0, len(str(int(tokens))) - 2)
    return max(1, int(tokens) // scale * scale)


def rough_time(seconds: float) -> str:
    """For an estimate: '40 s', '20 min', '3.5 h', '55 h', '12 days'."""
    for limit, size, unit in ((90, 1, "s"), (5400, 60, "min"), (259_200, 3600, "h"), (float("inf"), 86_400, "days")):
        if seconds < limit:
            count = seconds / size
            return f"{count:.1f} {unit}" if unit in ("h", "days") and count < 9.95 else f"{count:,.0f} {unit}"
    raise AssertionError(f"{seconds} s is no duration")


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


def plan_local(request: PlanRequest, machine: Machine, rate_of: RateOf, records: list[RunRecord]) -> LocalPlan:
    """The decisions of `bessemer train`, assuming as much data as the budget reads, and a measured estimate of the
    time."""
    spec, shape, plan = request.spec, request.shape, Plan()
    plan.add("model", f"{human_count(shape.parameters)} parameters", request.reason, request.source, request.basis)
    machine = reserve_memory(spec, request.others, machine, 1, plan)
    context = decide_context(spec, shape, plan)
    log_rl(spec, shape, context, plan)
    if spec.budget.epochs is not None and not request.sources:
        spec_tokens(spec, context)  # refuses epochs, since no data is read
    if spec.precision == "auto" and machine.matmul.get("bf16", 0.0) > 1.3 * machine.matmul["fp32"]:
        short = replace(shape, layers=min(2, shape.layers))  # as a run does at its start
        rates = {key: rate for key in ("fp32", "bf16") if (rate := rate_of(short, context, key))}
        machine = replace(machine, training=rates if len(rates) == 2 else {})
    spec = choose_adapter(spec, shape, context, machine, plan)
    enough = SourceSize(1 << 60, (1 << 60) // context)
    sources = request.sources or dict.fromkeys(spec.data.sources, enough)
    training = decide_training(spec, shape, context, machine, sources, enough.tokens, plan)
    log_estimate(request, plan)
    for key in [key for key in plan.decisions if key.startswith(NEEDS_DATA) and key not in ("data.context", DATA_SIZE)]:
        del plan.decisions[key]
    occasion = RunSetup(spec, shape, training, machine, ONE_PROCESS, 1, machine.peak(training.precision)[0])
    rate = rate_of(shape, context, training.precision)
    expected = predict_run(occasion, records, occasion.rows * context / rate if rate else None)

    def preset_rate(small: ModelShape) -> float:
        return rate_of(small, context, training.precision) or 1e-9  # a preset can always be measured

    return LocalPlan(shape, machine, plan, training, expected, estimate_duration(occasion, expected, 0, preset_rate))


def local_lines(local: LocalPlan, width: int = WIDTH) -> list[str]:
    machine, expected = local.machine, local.expected
    run = f"{human_count(local.shape.parameters)} parameters on {human_count(local.tokens)} tokens"
    place = f"this machine ({machine.name}, {machine.threads} threads, {human_bytes(machine.memory_bytes)})"
    bar = f", within {BAR * expected.error:.0%}" if expected.error else ""
    time = f"{local.duration} ({expected.basis}{bar})" if local.duration else expected.basis
    memory = f"{human_bytes(expected.estimated_bytes)} of tensors in a step, of {human_bytes(machine.memory_bytes)}"
    return [
        f"{run}, {place}", "", *decision_lines(local.plan, width), "", f"  memory  {memory}", f"  time    {time}",
        f"  others  {OTHER_MACHINES}",
    ]  # fmt: skip


def local_json(local: LocalPlan) -> dict[str, Any]:
    return {
        "model": local.shape.to_dict(), "parameters": local.shape.parameters, "tokens": local.tokens,
        "machine": local.machine.to_json(), "context": local.training.context,
        "batch_rows": local.training.batch_rows[0][1],
        "decisions": [asdict(decision) for decision in local.plan.decisions.values()],
        "expected": asdict(local.expected), "duration": asdict(local.duration) if local.duration else None,
    }  # fmt: skip


def check_options(options: dict[str, object]) -> None:
    """Refuse options that need GPUs of the catalogue."""
    if used := [name for name, value in options.items() if value]:
        raise UserError(f"{used[0]}: for GPUs of the catalogue: write --gpus, such as --gpus 8xH100, or leave it out")
