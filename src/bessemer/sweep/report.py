"""The result of a sweep as a table, with the parameters that mattered and what to change in the next sweep."""

from __future__ import annotations

from typing import Any

from bessemer.sweep.record import DIVERGED, FAILED, SweepTrial, Trials
from bessemer.sweep.run import Sweep
from bessemer.sweep.space import at_the_edge, importance


def table_rows(sweep: Sweep, trials: Trials) -> list[list[str]]:
    """A row for each trial, the best first and those without a value last."""
    keys = list(sweep.sweep.parameters)
    ranked = trials.ranked(sweep.sweep.better)
    rest = [trial for trial in trials.trials if trial not in ranked]
    asha = sweep.sweep.strategy == "asha"
    rows = [["", "run", *(["steps"] if asha else []), sweep.sweep.metric, *keys]]
    for place, trial in enumerate([*ranked, *rest], 1):
        value = f"{trial.value:.4f}" if trial.value is not None else trial.state
        steps = [f"{sweep.steps(trial.rung):,}"] if asha else []
        rows.append([str(place) if trial in ranked else "", trial.name, *steps, value, *_cells(trial, keys)])
    return rows


def _cells(trial: SweepTrial, keys: list[str]) -> list[str]:
    values = [trial.values[key] for key in keys]
    return [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]


def closing_lines(sweep: Sweep, trials: Trials) -> list[str]:
    """What mattered, where a range was too narrow, what failed, and the next command."""
    ranked, lines = trials.ranked(sweep.sweep.better), []
    if shares := importance(sweep.sweep, [trial.result for trial in trials.at_rung(0)]):
        lines.append("mattered  " + ", ".join(f"{key} {share:.0%}" for key, share in shares.items()))
    if ranked and (edges := at_the_edge(sweep.sweep, ranked[0].values)):
        lines.append(f"edge      the best {' and '.join(edges)} is at an end of its range: the best may be outside")
    for state in (DIVERGED, FAILED):
        if names := [trial.name for trial in trials.trials if trial.state == state]:
            reason = next(trial.reason for trial in trials.trials if trial.state == state)
            lines.append(f"{state:<9} {len(names)} of {len(trials.trials)}, such as {names[0]}: {reason}")
    if ranked:
        lines.append(f"best      {sweep.folder / 'best.yaml'}: bessemer train {sweep.folder / 'best.yaml'}")
    lines.append(f"runs      bessemer runs {sweep.folder}")
    return lines


def to_json(sweep: Sweep, trials: Trials) -> dict[str, Any]:
    ranked = trials.ranked(sweep.sweep.better)
    return {
        "folder": str(sweep.folder), "metric": sweep.sweep.metric, "goal": sweep.sweep.goal,
        "trials": [
            {"run": trial.name, "rung": trial.rung, "steps": sweep.steps(trial.rung), "state": trial.state,
             "value": trial.value, "values": trial.values, "reason": trial.reason}
            for trial in trials.trials
        ],
        "best": None if not ranked else {"run": ranked[0].name, "value": ranked[0].value, "values": ranked[0].values},
        "importance": importance(sweep.sweep, [trial.result for trial in trials.at_rung(0)]),
        "at_the_edge": at_the_edge(sweep.sweep, ranked[0].values) if ranked else [],
    }  # fmt: skip
