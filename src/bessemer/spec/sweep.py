"""The sweep section: which keys of the spec `bessemer sweep` varies, how it chooses values, and what it compares."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from bessemer.spec.quantity import SpecSection, StepCount, setting

LAUNCHERS = ("local", "slurm", "ssh")  # whose runs are written to this machine's folder
TRIALS, RUNGS, REDUCTION = 20, 3, 3  # defaults


class ParameterSpec(SpecSection):
    """The values of one key. A list is short for `values`."""

    values: list[Any] | None = setting(None, "values to choose from", [1e-4, 3e-4], min_length=1)
    min: int | float | None = setting(None, "smallest value of a range", 1e-4, ge=-1e18, le=1e18)
    max: int | float | None = setting(None, "largest value of the range", 1e-2, ge=-1e18, le=1e18)
    log: bool = setting(False, "draw the exponent uniformly instead of the value", True)
    points: int | None = setting(None, "with strategy grid: values of the range", 4, ge=2, le=1000)


def _expand(value: Any) -> Any:
    return {"values": value} if isinstance(value, list) else value


Parameter = Annotated[ParameterSpec, BeforeValidator(_expand)]


class SweepSpec(SpecSection):
    """What `bessemer sweep` varies. `bessemer train` ignores it."""

    parameters: dict[str, Parameter] = setting(
        ..., "values by dotted key", {"optimizer.lr": {"min": 1e-4, "max": 1e-2, "log": True}}, min_length=1
    )
    strategy: Literal["tpe", "random", "grid", "asha"] = setting(
        "tpe",
        "tpe (learns from earlier trials), random, grid (every combination), or asha (many short trials, of which the "
        "best are run again for longer)",
        "asha",
    )
    trials: int | None = setting(
        None, "trials (20; of grid all); of asha those of the first rung", 30, ge=1, le=100_000
    )
    steps: StepCount | None = setting(None, "steps of each trial, instead of the budget; of asha the longest", 500)
    metric: str = setting(
        "validation_loss", "validation_loss, loss (of the last steps), or a number of the last validation", "accuracy"
    )
    goal: Literal["minimize", "maximize"] = setting("minimize", "minimize or maximize", "maximize")
    seed: int = setting(0, "seed of the draws; that of the runs is the spec's", 1, ge=0, lt=2**31)
    parallel: int = setting(
        1, "trials at a time: each round of so many is drawn from the results of the rounds before", 4, ge=1, le=1000
    )
    launch: str | None = setting(
        None, "options of `bessemer launch` with which each trial is submitted", "--on slurm --gpus 8 --time 4h"
    )
    rungs: int | None = setting(
        None, "asha: lengths of trials, each `reduction` times the one before (3)", 4, ge=2, le=10
    )
    reduction: int | None = setting(
        None, "asha: one in so many trials is run again, so many times as long (3)", 4, ge=2, le=100
    )

    @property
    def count(self) -> int:
        """Trials, unless the strategy is grid."""
        return self.trials or TRIALS

    @property
    def rung_count(self) -> int:
        return self.rungs or RUNGS

    @property
    def factor(self) -> int:
        """How much longer a rung is than the one below it."""
        return self.reduction or REDUCTION

    @property
    def better(self) -> float:
        """1 if smaller values are better, otherwise -1."""
        return 1.0 if self.goal == "minimize" else -1.0


def sweep_problems(sweep: SweepSpec) -> Iterator[tuple[tuple[str, ...], str]]:
    """Keys of the section that conflict with each other, each with the fix."""
    if sweep.launch is not None:
        words = re.split(r"[\s=]+", sweep.launch)
        target = next((after for word, after in pairwise(words) if word == "--on"), "")
        if target not in LAUNCHERS:
            shared = "trials are compared by their folders on this machine"
            yield ("launch",), f"--on {target or 'is missing'}: {shared}: write --on {', '.join(LAUNCHERS)}"
    for key, parameter in sweep.parameters.items():
        path = ("parameters", key)
        if key.split(".")[0] in ("name", "runs", "sweep"):
            yield path, "the sweep names its runs itself: remove this"
        bounds = [bound is not None for bound in (parameter.min, parameter.max)]
        if (parameter.values is not None) == any(bounds) or any(bounds) != all(bounds):
            yield path, "write a list of values, or min and max"
        elif parameter.min is not None and parameter.max is not None:
            if parameter.min >= parameter.max:
                yield (*path, "max"), f"{parameter.max} is not above min: {parameter.min}"
            if parameter.log and parameter.min <= 0:
                yield (*path, "min"), f"with log: true a range begins above 0, got {parameter.min}"
            if sweep.strategy == "grid" and parameter.points is None:
                yield path, "a grid needs values, or points: the number of values of the range"
    least = sweep.factor ** (sweep.rung_count - 1)
    if sweep.strategy == "asha" and sweep.count < least:
        fix = f"write trials: {least} or more, or fewer rungs"
        yield ("trials",), f"{sweep.count} trials leave none for the last of {sweep.rung_count} rungs: {fix}"
    for key in ("rungs", "reduction"):
        if sweep.strategy != "asha" and getattr(sweep, key) is not None:
            yield (key,), f"{sweep.strategy} has no {key}: remove it, or write strategy: asha"
