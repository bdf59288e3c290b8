"""Runs the trials of a sweep in rounds, each trial as `bessemer train` or `bessemer launch` in a process of its own.

With asha the rungs are short runs with whole schedules, not prefixes of long ones: the ranks of learning rates change
while the rate decays.
"""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.parent import child_environment
from bessemer.run.directory import Run
from bessemer.run.lock import Lock
from bessemer.session.stages import signals_to_children
from bessemer.spec.load import LoadedSpec, SpecError, dump_spec, load_document, yaml_text
from bessemer.spec.quantity import human_time
from bessemer.spec.schema import RunSpec
from bessemer.spec.sweep import SweepSpec
from bessemer.storage import write_atomic
from bessemer.sweep.record import DIVERGED, FAILED, FINISHED, SweepTrial, Trials, read_metric
from bessemer.sweep.space import Values, count_trials, draw, import_optuna, to_settings

Say = Callable[[str], None]
RunTrial = Callable[[Path, Path], int]  # (spec file, output file) -> exit code
MISTAKE = 2


@dataclass(frozen=True)
class Sweep:
    """A sweep as its file asks for it."""

    path: Path
    settings: tuple[str, ...]
    spec: RunSpec
    sweep: SweepSpec

    @property
    def folder(self) -> Path:
        return Path(self.spec.runs) / self.spec.name

    def steps(self, rung: int) -> int | None:
        """Steps of a trial; None leaves the budget of the spec."""
        if self.sweep.strategy != "asha":
            return self.sweep.steps
        longest = self.sweep.steps or self.spec.budget.steps
        assert longest is not None, "checked with the spec"
        return max(1, round(longest / self.sweep.factor ** (self.sweep.rung_count - 1 - rung)))

    def load(self, values: Values, steps: int | None = None) -> RunSpec:
        """The spec with these values. SpecError if they do not go together."""
        length = [] if steps is None else ["budget.tokens=auto", "budget.epochs=null", f"budget.steps={steps}"]
        loaded = load_document(self.path, [*self.settings, *to_settings(values), *length])
        return loaded.spec.model_copy(update={"sweep": None})


def open_sweep(path: Path, settings: Sequence[str]) -> Sweep:
    """The sweep of a file. UserError for a spec without one, and for parameters that the spec refuses."""
    loaded: LoadedSpec = load_document(path, list(settings))
    if loaded.spec.sweep is None:
        raise UserError(
            f"{path}: has no sweep section: write sweep: {{parameters: {{optimizer.lr: {{min: 1e-4, max: 1e-2, log: "
            "true}}}, and `bessemer sweep` again"
        )
    sweep = Sweep(path, tuple(settings), loaded.spec, loaded.spec.sweep)
    problems = []
    for key, parameter in sweep.sweep.parameters.items():
        one = [parameter.min, parameter.max] if parameter.values is None else parameter.values
        for value in one:
            try:
                load_document(path, [*settings, f"{key}={yaml_text(value)}"])
            except SpecError as error:
                lines = [problem for problem in error.problems if key in problem or "--set" in problem]
                problems += [line.removeprefix(f"--set {key}={yaml_text(value)}: ") for line in lines]
            except UserError as error:
                problems.append(str(error))
    if problems:
        raise SpecError([f"sweep.parameters: {problem}" for problem in dict.fromkeys(problems)])
    return sweep


def run_sweep(sweep: Sweep, say: Say, run_trial: RunTrial | None = None) -> tuple[Trials, int]:
    """Run what is left of a sweep; its trials and the exit code: of the signal that interrupted a trial, 1 if no trial
    has a value, else 0."""
    import_optuna()
    folder = sweep.folder
    _prepare_folder(sweep)
    with closing_lock(folder):
        trials = Trials.read(folder)
        if trials.trials:
            say(f"sweep  continuing {folder} after {len(trials.trials)} trials")
        with signals_to_children() as children:
            start = run_trial or partial(run_in_a_process, sweep.sweep.launch, children)
            while chosen := trials.begun or _next_round(sweep, trials):
                if code := _run_round(sweep, trials, chosen, say, start):
                    return trials, code
        ranked = trials.ranked(sweep.sweep.better)
        if ranked:
            write_best(sweep, ranked[0])
    return trials, 0 if ranked else 1


@contextmanager
def closing_lock(folder: Path) -> Iterator[None]:
    """Only one process runs a sweep."""
    lock = Lock(folder)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _prepare_folder(sweep: Sweep) -> None:
    """Make the folder, or check that it is of the same sweep. Its runs share the prepared data of other runs."""
    folder, text = sweep.folder, dump_spec(sweep.spec)
    written = folder / "sweep.yaml"
    if (folder / "events.jsonl").exists():
        raise UserError(f"{folder}: is a run: write another name in the spec, or --set name=my-sweep")
    if written.exists():
        before = load_document(written).spec
        if _without_trials(before) != _without_trials(sweep.spec):
            empty = not any(trial.state == FINISHED for trial in Trials.read(folder).trials)
            fix = "none of its trials has a result: delete the folder" if empty else "restore that"
            raise UserError(
                f"{folder}: holds a sweep of another spec ({written}): {fix}, or write another name, such as "
                f"--set name={sweep.spec.name}-2"
            )
    write_atomic(written, text, parents=True)
    (folder.parent / ".data").mkdir(exist_ok=True)
    if not (folder / ".data").exists():
        (folder / ".data").symlink_to(Path("..") / ".data")


def _without_trials(spec: RunSpec) -> dict[str, Any]:
    """What must not change between two calls: all but the number of trials and where they run."""
    return spec.model_dump(mode="json", exclude={"sweep": {"trials", "launch"}})


def _next_round(sweep: Sweep, trials: Trials) -> list[SweepTrial]:
    """Draw the next trials, as many as run at a time, and write them down; empty if there is none."""
    new: list[SweepTrial] = []
    while len(new) < sweep.sweep.parallel and (trial := _next_trial(sweep, trials)):
        trials.trials.append(trial)
        new.append(trial)
    if new:
        trials.begin(new)
    return new


def _next_trial(sweep: Sweep, trials: Trials) -> SweepTrial | None:
    trial = _promoted(sweep.sweep, trials) if sweep.sweep.strategy == "asha" else None
    first = trials.at_rung(0)
    if trial is None and len(first) < count_trials(sweep.sweep):
        results = [earlier.result for earlier in first if earlier.state in (FINISHED, DIVERGED)]
        trial = SweepTrial(len(first), draw(sweep.sweep, len(first), results))
    return trial


def _promoted(sweep: SweepSpec, trials: Trials) -> SweepTrial | None:
    """ASHA (Li et al. 2020): the best configuration of the highest rung that is among the best 1/reduction of its rung
    and was not promoted yet."""
    for rung in reversed(range(sweep.rung_count - 1)):
        ended = [trial for trial in trials.at_rung(rung) if trial.state == FINISHED and trial.value is not None]
        ended.sort(key=lambda t: (sweep.better * (t.value or 0.0), t.number))
        above = {trial.number for trial in trials.at_rung(rung + 1)}
        for trial in ended[: len(trials.at_rung(rung)) // sweep.factor]:
            if trial.number not in above:
                return SweepTrial(trial.number, trial.values, rung + 1)
    return None


def _run_round(sweep: Sweep, trials: Trials, chosen: list[SweepTrial], say: Say, start: RunTrial) -> int:
    """Run trials beside each other and write their results down as they end. The exit code of one that was interrupted
    ends the sweep here, as soon as the others have ended."""
    began_s, codes = time.monotonic(), [0]
    ready = [(trial, path) for trial in chosen if (path := _write_spec(sweep, trials, trial, say))]
    if len(ready) == 1:
        codes.append(
            _end(sweep, trials, ready[0][0], start(ready[0][1], ready[0][1].with_suffix(".log")), began_s, say)
        )
    elif ready:
        with ThreadPoolExecutor(len(ready)) as threads:
            running: dict[Future[int], SweepTrial] = {
                threads.submit(start, path, path.with_suffix(".log")): trial for trial, path in ready
            }
            for ended in as_completed(running):
                codes.append(_end(sweep, trials, running[ended], ended.result(), began_s, say))
    return max(codes)


def _head(sweep: Sweep, trial: SweepTrial) -> str:
    return f"trial {trial.number + 1}/{count_trials(sweep.sweep)}" + (f" rung {trial.rung}" if trial.rung else "")


def _write_spec(sweep: Sweep, trials: Trials, trial: SweepTrial, say: Say) -> Path | None:
    """The spec of a trial; None if its values do not go together, which is its result."""
    say(f"{_head(sweep, trial)}  {describe(trial.values)}")
    try:
        spec = sweep.load(trial.values, sweep.steps(trial.rung))
    except SpecError as error:
        trials.end(trial, FAILED, None, error.problems[0])
        say(f"{_head(sweep, trial)}  refused: {error.problems[0]}")
        return None
    spec = spec.model_copy(update={"runs": str(trials.folder), "name": trial.name})
    path = trials.folder / "specs" / f"{trial.name}.yaml"
    write_atomic(path, dump_spec(spec), parents=True)
    return path


def _end(sweep: Sweep, trials: Trials, trial: SweepTrial, code: int, began_s: float, say: Say) -> int:
    """Write the result of a trial down. An exit code other than 0 ends the sweep here."""
    run, head = Run(trials.folder / trial.name), _head(sweep, trial)
    state = run.state if run.events_path.exists() else "new"
    if code and state == "interrupted":
        say(f"{head}  interrupted; the same command continues the sweep")
        return code if code > 0 else 128 - code
    reason = _last_line(trials.folder / "specs" / f"{trial.name}.log")
    if code == MISTAKE and not any(other.state == FINISHED for other in trials.trials):
        raise UserError(f"{trial.name}: {reason}")
    value = read_metric(run, sweep.sweep.metric) if state == FINISHED else math.nan
    taken = human_time(time.monotonic() - began_s)
    if math.isfinite(value):
        trials.end(trial, FINISHED, value, "")
        best = trials.ranked(sweep.sweep.better)[0]
        note = "the best" if best is trial else f"best {best.value:.4f} in {best.name}"
        say(f"{head}  {sweep.sweep.metric} {value:.4f} ({note})  {taken}")
    else:
        kind = DIVERGED if state in (FINISHED, "stopped") else FAILED
        trials.end(trial, kind, None, reason)
        say(f"{head}  {kind}: {reason}  {taken}")
    return 0


def describe(values: Values) -> str:
    """The values on one line, numbers with 4 digits."""
    return "  ".join(f"{key}={v:.4g}" if isinstance(v, float) else f"{key}={v}" for key, v in values.items())


def run_in_a_process(launch: str | None, children: list[subprocess.Popen[bytes]], spec: Path, output: Path) -> int:
    """The exit code of `bessemer train`, which ends with this process; or of `bessemer launch`, which waits for its job
    and goes on waiting for a job that it has submitted before."""
    command = [sys.executable, "-m", "bessemer", "train", str(spec), "--plain"]
    if launch is not None:
        command = [sys.executable, "-m", "bessemer", "launch", "submit", str(spec), *shlex.split(launch), "--wait"]
    with output.open("ab") as file:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=child_environment())
        children.append(child)
        return child.wait()


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def write_best(sweep: Sweep, best: SweepTrial) -> Path:
    """Write the spec with the best values and its own budget, ready for `bessemer train`."""
    spec = sweep.load(best.values).model_copy(update={"name": f"{sweep.spec.name}-best"[:100]})
    comment = f"# {best.name} of {sweep.folder}: {sweep.sweep.metric} {best.value:.6g}\n"
    comment += "".join(f"#   {line}\n" for line in to_settings(best.values))
    path = sweep.folder / "best.yaml"
    write_atomic(path, comment + dump_spec(spec))
    return path
