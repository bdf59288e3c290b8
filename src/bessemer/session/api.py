"""The Python API: plan, train, plot and evaluate a run. Each function calls what the command of its name calls.

Mistakes in a spec or an argument are a UserError with the fix, as on the command line.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.errors import UserError
from bessemer.observe.figure import LineChart
from bessemer.plan.local import check_options, local_json, local_lines
from bessemer.plan.present import proposal_json, proposal_lines, spec_text, write_spec
from bessemer.plan.search.proposal import Proposal
from bessemer.run.directory import Run
from bessemer.session.planning import local_gpus, propose_on, request_plan
from bessemer.spec.load import load_spec, override_lines
from bessemer.spec.schema import RunSpec

if TYPE_CHECKING:
    from bessemer.evaluate.results import Evaluation

Spec = str | Path | Mapping[str, Any] | RunSpec
Overrides = Mapping[str, Any] | Sequence[str]


@dataclass(frozen=True)
class RunPlan:
    """A plan. `facts` is the JSON of `bessemer plan --json`; `str()` is the text that the command prints."""

    facts: dict[str, Any]
    text: str
    proposal: Proposal | None = None  # None on a machine whose speed was measured

    @property
    def decisions(self) -> dict[str, dict[str, Any]]:
        """By key: value, reason, source and basis."""
        return {decision["key"]: decision for decision in self.facts["decisions"]}

    def write(self, path: str | Path) -> Path:
        """Write the planned spec, each decision with its reason, as `bessemer plan --write` does."""
        if self.proposal is None:
            raise UserError(
                "write: for plans on GPUs of the catalogue: name them, such as plan_run(spec, gpus='8xH100')"
            )
        write_spec(Path(path), spec_text(self.proposal))
        return Path(path)

    def __str__(self) -> str:
        return self.text


def plan_run(
    spec: Spec | None = None, overrides: Overrides = (), *, model: str | None = None, tokens: str | None = None,
    gpus: str | None = None, network: str | None = None,
) -> RunPlan:  # fmt: skip
    """Plan a run, on `gpus` such as "8xA100-80GB", or on this machine, whose speed is measured in a few seconds.

    A spec is a file, a mapping of its keys, or a RunSpec. Overrides are `{"data.context": 8192}` or `--set` strings.
    Without a spec, `model` such as "7b" and `gpus` are needed.
    """
    if spec is None and not (model and gpus):
        raise UserError("plan_run: pass a spec, or model and gpus, such as plan_run(model='7b', gpus='8xH100')")
    request = request_plan(spec, model, tokens, override_lines(overrides))
    gpus = gpus or local_gpus(request)
    if gpus is None:
        from bessemer.train.speed import plan_measured

        check_options({"network": network})
        local = plan_measured(request)
        return RunPlan(local_json(local), "\n".join(local_lines(local)))
    proposal = propose_on(request, gpus, network)
    return RunPlan(proposal_json(proposal), "\n".join(proposal_lines(proposal)), proposal)


def train_run(
    spec: Spec, overrides: Overrides = (), *, datasets: Mapping[str, Any] | None = None, restart: bool = False,
    progress: bool = False,
) -> Run:  # fmt: skip
    """Train a run in this process, or continue it from its last checkpoint; with `restart`, begin at step 0.

    Returns the run; its `state` says how it ended: finished, interrupted, stopped by the guard, or failed. `progress`
    prints the lines of `bessemer train --plain`. `datasets` are your own, by the names of sources whose path is
    `python`: map-style ones (`len`, `[i]`) are as replayable as files, iterables only go forward. An item is a text,
    token ids, or a mapping with tokens and a mask. Several processes: start the script with torchrun.
    """
    from bessemer.observe.view import LineView
    from bessemer.session.session import run_folder, train

    run_spec = load_spec(spec, override_lines(overrides))
    view = LineView(None, run_spec.observe.line_every, sys.stdout) if progress else None
    train(run_spec, view, datasets, restart)
    return Run.existing(run_folder(run_spec))


def plot_run(run: Run, *metrics: str) -> LineChart:
    """Metrics by step, the loss by default, with a line at each vetoed step. A notebook shows it; `.text()` is for
    terminals."""
    columns = run.columns("step", *(metrics or ("loss",)))
    steps = columns.pop("step")
    series = {name: [math.nan if y is None else float(y) for y in values] for name, values in columns.items()}
    marks = {f"veto {event['step']}": event["step"] for event in run.events("veto")}
    return LineChart(run.name, steps, series, "step", marks=marks)


def evaluate_run(
    run: Run | str | Path, tasks: str | Path | Sequence[str | Path] = (), *, checkpoint: str = "last",
    texts: Mapping[str, str | Path] | None = None, held_out: bool = False, limit: int | None = None,
    shots: int | None = None, chat: bool = False, data: str | Path | None = None, formats: int = 1,
    contamination: bool = False, seed: int | None = None, device: str = "auto", out: str | Path | None = None,
) -> Evaluation:  # fmt: skip
    """Score a run, or any model folder, on tasks (names, lm-eval's .yaml files, .jsonl of own questions), on texts by
    name, and on its held-out data. The options are those of `bessemer evaluate`. Results are written to `out`, for a
    run by default to its `evaluations/CHECKPOINT`."""
    from bessemer.evaluate.model import evaluate_model, results_folder
    from bessemer.evaluate.run_tasks import TaskSettings, open_tasks

    model = run.folder if isinstance(run, Run) else Path(run)
    names = (tasks,) if isinstance(tasks, str | Path) else tasks
    if not (names or texts or held_out):
        raise UserError("evaluate_run: name what to measure: tasks, texts or held_out=True")
    settings = TaskSettings(tuple(map(str, names)), limit, shots, chat, Path(data) if data else None, formats=formats)
    if seed is not None:
        settings = replace(settings, seed=seed)
    files = [f"{name}={file}" for name, file in (texts or {}).items()]
    result = evaluate_model(model, settings, open_tasks(settings), checkpoint, device, files, held_out, contamination)
    if folder := Path(out) if out else results_folder(model, checkpoint):
        result.write(folder)
    return result
