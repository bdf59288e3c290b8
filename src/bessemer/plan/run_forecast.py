"""The forecast of a run from its folder, or while it trains, and what would lower its loss most: a longer run, more
data or a larger model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.decide import sketch_run
from bessemer.plan.decision import Plan
from bessemer.plan.forecast import Forecast, forecast
from bessemer.plan.recipe.pretraining import ALPHA, BETA, FITTED, A, B
from bessemer.plan.schedule import Schedule, ScheduleSketch, run_schedule
from bessemer.run.directory import FORECAST, LOSS_WINDOW, Run, mean_loss
from bessemer.run.journal import Record, last_records, to_number
from bessemer.spec.load import load_spec
from bessemer.spec.quantity import human_count
from bessemer.storage import write_atomic

FORECAST_OF = ("pretrain",)  # objectives whose loss follows the law
EVERY_S = 60.0  # between two forecasts of a live run; one takes 20 to 60 ms
BINS = 1024  # means that a live run keeps of its curve
EPOCHS = 4  # repeated tokens teach little beyond (Muennighoff et al. 2023)


def schedule_of(run: Run) -> tuple[Schedule, int]:
    """The schedule of a run as it was planned, and its steps. UserError if the folder does not tell."""
    spec = load_spec(run.folder / "spec.yaml")
    if spec.objective not in FORECAST_OF:
        raise UserError(f"{run.folder}: the loss of {spec.objective} follows no known law: only pretrain is forecast")
    try:
        plan = Plan.from_json((run.folder / "plan.json").read_text())
        peak, warmup, total = (plan.value(key) for key in ("optimizer.lr", "schedule.warmup", "steps"))
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{run.folder}: plan.json has no schedule ({error})") from None
    sketch, _ = sketch_run(spec)
    return run_schedule(spec.schedule, ScheduleSketch(peak, warmup, total, sketch.batch_rows, sketch.context)), total


def accepted(records: Iterable[Record]) -> list[tuple[int, float]]:
    """(step, loss) of the steps that were not vetoed."""
    pairs = ((to_number(r.get("step")), to_number(r.get("loss"))) for r in records if r.get("veto") is None)
    return [(int(step), loss) for step, loss in pairs if step is not None and loss is not None]


@dataclass(frozen=True)
class RunForecast:
    """A forecast, what the run ended with if it has, and the gains of what costs twice the compute."""

    run: str
    forecast: Forecast
    at_step: int
    total: int
    final: float | None  # mean of the last steps of a finished run
    parameters: float
    tokens: float  # of the whole run
    epochs: float | None

    @property
    def longer(self) -> float:
        """The loss of a run twice as long."""
        return self.forecast.longer(2.0)

    @property
    def larger(self) -> float:
        """The loss of a model with twice the parameters on the same tokens: the gain of twice the tokens, which this
        curve tells, times the ratio of both in the law of published runs."""
        of_model = A * self.parameters**-ALPHA * (1 - 2**-ALPHA)
        of_tokens = B * self.tokens**-BETA * (1 - 2**-BETA)
        return self.forecast.final - (self.forecast.final - self.longer) * of_model / of_tokens

    @property
    def advice(self) -> str:
        """What to spend twice the compute on."""
        if self.epochs is not None and 2 * self.epochs > EPOCHS:
            return "more data"
        return "larger model" if self.larger < self.longer else "train longer"

    def lines(self) -> list[str]:
        now, epochs = self.forecast, self.epochs
        seen = f"seen to step {self.at_step:,} of {self.total:,} ({now.seen:.0%})"
        lines = [f"forecast      final loss {now.text()}, 95 % interval; {seen}"]
        if self.final is not None:
            error = self.forecast.final / self.final - 1
            lines.append(f"ended with    {self.final:.3f}; the forecast is {error:+.2%} off")
        lines.append(f"train longer  {self.longer:.3f} with twice the tokens ({human_count(round(2 * self.tokens))})")
        lines.append(
            f"larger model  {self.larger:.3f} with twice the parameters ({human_count(round(2 * self.parameters))})"
        )
        if epochs is not None and 2 * epochs > EPOCHS:
            often = f"twice the tokens would repeat the data {2 * epochs:.1f} times"
            lines.append(
                f"more data     {often}, and beyond {EPOCHS} repeated tokens teach little: add documents first"
            )
        lines.append(f"advice        {self.advice}")
        lines.append(f"  Both cost twice the compute. The gain of parameters is by the ratio of {FITTED}.")
        return lines

    def to_json(self) -> dict[str, Any]:
        numbers = {key: value for key, value in asdict(self).items() if key != "forecast"}
        gains = {"twice_the_tokens": self.longer, "twice_the_parameters": self.larger, "advice": self.advice}
        return {**numbers, **asdict(self.forecast), "loss_of_the_run": self.final, "final": self.forecast.final} | gains


def forecast_run(run: Run, at: float | None = None) -> RunForecast:
    """The forecast of a run from its metrics, or from the first share `at` of its steps."""
    (schedule, total), records = schedule_of(run), list(run.metrics())
    seen = [r for r in records if at is None or (to_number(r.get("step")) or 0) < at * total]
    if not records or not seen:
        raise UserError(f"{run.folder}: no step is recorded yet")
    ended = int(to_number(records[-1].get("step")) or 0) + 1 >= total
    if ended and at is None:
        raise UserError(f"{run.folder}: the run is over: write --at 30% to see what was forecast then")
    result = forecast(accepted(seen), schedule.lr, total, schedule.warmup)
    if result is None:
        raise UserError(f"{run.folder}: {len(seen):,} steps after a warm-up of {schedule.warmup:,} are too few")
    started = next(run.events("started"), {})
    tokens = (to_number(seen[-1].get("tokens")) or 0.0) / len(seen) * total
    plan = Plan.from_json((run.folder / "plan.json").read_text())
    epochs = to_number(plan.value("epochs")) if "epochs" in plan.decisions else None
    final = mean_loss(last_records(run.steps_path, LOSS_WINDOW)) if ended else None
    return RunForecast(
        run.name, result, len(seen), total, final, to_number(started.get("parameters")) or 1.0, tokens, epochs
    )


class LiveForecast:
    """Follows a run: takes each record, and renews the forecast once a minute, on the live line and in forecast.json.
    It keeps a bounded number of means, however long the run is."""

    def __init__(self, run: Run, schedule: Schedule, total: int) -> None:
        self.run, self.schedule, self.total = run, schedule, total
        self.stride = max(1, total // BINS)
        self.bins: dict[int, tuple[float, float, int]] = {}
        self.due_s, self.text = time.monotonic() + EVERY_S, ""
        for step, loss in accepted(run.metrics()):
            self._add(step, loss)

    def _add(self, step: int, loss: float) -> None:
        steps, losses, count = self.bins.get(step // self.stride, (0.0, 0.0, 0))
        self.bins[step // self.stride] = (steps + step, losses + loss, count + 1)

    def add(self, record: Record) -> str:
        """The text of the newest forecast; empty before the first."""
        for step, loss in accepted([record]):
            self._add(step, loss)
        if (now := time.monotonic()) >= self.due_s:
            self.due_s = now + EVERY_S
            pairs = [(round(steps / count), losses / count) for _, (steps, losses, count) in sorted(self.bins.items())]
            result = forecast(pairs, self.schedule.lr, self.total, self.schedule.warmup)
            if result is not None:
                self.text = result.text()
                write_atomic(self.run.folder / FORECAST, json.dumps(asdict(result)), durable=False)
        return self.text
