"""The folder of a sweep and its journal, from which a killed sweep goes on.

runs/NAME/
  sweep.yaml             the spec with its sweep section
  trials.jsonl           one line when the values of a round of trials are drawn, one with each result
  specs/trial-001.yaml   the spec of a trial, and its output beside it
  trial-000/             an ordinary run
  best.yaml              the spec with the best values
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.run.directory import LOSS_WINDOW, Run, mean_loss
from bessemer.run.journal import Journal, last_record, last_records, read_records, to_number
from bessemer.sweep.space import Result, Values

TRIALS = "trials.jsonl"
OTHER_NUMBERS = ("step", "tokens", "seconds", "time")  # of a validation record that no sweep compares
FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"


@dataclass
class SweepTrial:
    """One run of a sweep: the configuration `number` at a rung (0 unless the strategy is asha)."""

    number: int
    values: Values
    rung: int = 0
    state: str = "begun"  # or finished, diverged (the guard stopped it, or the metric is not finite), failed
    value: float | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        return f"trial-{self.number + 1:03d}" + (f"-rung-{self.rung}" if self.rung else "")

    @property
    def result(self) -> Result:
        return Result(self.values, self.value if self.state == FINISHED else None)


@dataclass
class Trials:
    """All trials of a sweep, in the order in which they began, on disk."""

    folder: Path
    trials: list[SweepTrial] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Trials:
        trials: dict[tuple[int, int], SweepTrial] = {}
        for record in read_records(folder / TRIALS):
            if "values" in record or "round" in record:
                for begun in record.get("round", [record]):
                    trial = SweepTrial(begun["trial"], begun["values"], begun["rung"])
                    trials[trial.number, trial.rung] = trial
            else:
                trial = trials[record["trial"], record["rung"]]
                trial.state, trial.value, trial.reason = record["state"], record["value"], record["reason"]
        return cls(folder, list(trials.values()))

    def begin(self, new: list[SweepTrial]) -> None:
        """A round of trials, which are in the list already: one line, so that no kill divides it."""
        records = [{"trial": trial.number, "rung": trial.rung, "values": trial.values} for trial in new]
        self._append(records[0] if len(records) == 1 else {"round": records})

    def end(self, trial: SweepTrial, state: str, value: float | None, reason: str) -> None:
        trial.state, trial.value, trial.reason = state, value, reason
        record = {"trial": trial.number, "rung": trial.rung, "state": state, "value": value, "reason": reason}
        self._append(record)

    def _append(self, record: dict[str, Any]) -> None:
        journal = Journal(self.folder / TRIALS)
        try:
            journal.append(record)
            journal.sync()
        finally:
            journal.close()

    @property
    def begun(self) -> list[SweepTrial]:
        """The trials that have no result yet."""
        return [trial for trial in self.trials if trial.state == "begun"]

    def at_rung(self, rung: int) -> list[SweepTrial]:
        return [trial for trial in self.trials if trial.rung == rung]

    def ranked(self, better: float) -> list[SweepTrial]:
        """Trials with a value, the best first: the longest runs before all others."""
        finished = [trial for trial in self.trials if trial.state == FINISHED and trial.value is not None]
        return sorted(finished, key=lambda t: (-t.rung, better * (t.value or 0.0), t.number))


def read_metric(run: Run, metric: str) -> float:
    """The number that a finished run is compared by; NaN if it diverged. UserError names the numbers that exist."""
    if metric == "loss":
        loss = mean_loss(last_records(run.steps_path, LOSS_WINDOW))
        return math.nan if loss is None else loss
    record = last_record(run.validation_path) or {}
    name = "loss" if metric == "validation_loss" else metric
    value = to_number(record.get(name))
    if value is None:
        names = [key for key in record if key not in OTHER_NUMBERS and to_number(record[key]) is not None]
        known = f"it has loss, {', '.join(names)}" if names else "nothing is held out: write metric: loss"
        raise UserError(f"sweep.metric: {metric}: the validation of {run.folder} has no such number: {known}")
    return value
