"""Finds faster settings of a run on this machine by short measured trials (`bessemer bench optimise`).

Coordinate descent from the spec as given: of all single changes the one with the largest predicted gain is measured
next, and stays if its gain exceeds the noise. Each trial is a real start of the run in processes of its own, so running
out of memory or a failed compilation is a row of the table.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from bessemer.bench.candidates import PERMISSIONS, Configuration, Predictor, SpecChange, changes
from bessemer.bench.scaling import BUSY, run_workers, timed_spec
from bessemer.bench.scaling_worker import TIMED, WARMUP
from bessemer.errors import UserError
from bessemer.observe.format import align_columns
from bessemer.plan.decide import TrainPlan
from bessemer.plan.search.layout import Layout, count_processes
from bessemer.session.start import complete_spec, dry_run
from bessemer.spec.document import edit_text, parse_yaml
from bessemer.spec.load import dump_spec, load_spec, validate, with_default_name, yaml_text
from bessemer.spec.quantity import human_bytes, human_time
from bessemer.spec.rl import RL_OBJECTIVES
from bessemer.storage import write_atomic
from bessemer.train.device import measure_machine, name_and_memory, pick_device, use_threads
from bessemer.train.saver import package_versions

MOST_STEPS = 200  # timed in a trial
RESTLESS = 0.05  # difference of two baselines above which a third one is measured
LEAST_NOISE = 0.005  # of a rate, however well two baselines agree
UNCLEAR = 3.0  # times the noise: a gain below it is measured twice, beside the configuration that it changes
ERROR_OF_MEDIAN = 0.93  # standard error of a median, times sqrt(n), in interquartile ranges
NEARLY = -0.05  # a change that gained more than this may be tried again beside other changes
UNKNOWN = 0.05  # gain by which changes without a prediction are ordered
WORSE = -0.01  # predicted gain below which a change is not tried
TRIAL_S = 10.0  # the least time that is left to begin a trial
LEAST_LIMIT_S = 60.0  # for a trial, whatever time is left
AUTO = ("compile", "memory.activations", "budget.micro_batch")  # what the planner decides if the spec leaves it open
Report = Callable[[str], None]


@dataclass(frozen=True)
class TimedTrial:
    """One row: a change of the configuration that was the best until then. Gains are of throughput, 0.1 for 10 %."""

    change: str
    settings: dict[str, Any]
    verdict: str  # baseline, kept, no gain, failed, not tried
    why: str
    predicted_gain: float | None = None
    gain: float | None = None
    spread: float | None = None  # of the measured gain
    tokens_per_s: float | None = None
    memory_bytes: int | None = None
    note: str = ""


@dataclass
class Optimisation:
    """The measurements and the best settings over the spec."""

    target: str
    machine: str
    device: str
    date: str
    context: int
    batch_tokens: int
    noise: float
    trials: list[TimedTrial]
    best: dict[str, Any]
    tokens_per_s: float
    baseline_tokens_per_s: float
    decided: dict[str, str]  # what the runs measured and chose themselves
    load: float = 0.0  # of the machine by others at the start, per core
    wall_s: float = 0.0
    stopped: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        return self.tokens_per_s / self.baseline_tokens_per_s - 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"gain": self.gain, "settings": as_settings(self.best)}


def as_settings(settings: dict[str, Any]) -> list[str]:
    """Values of keys as arguments of --set."""
    return [f"{key}={yaml_text(value)}" for key, value in settings.items()]


@dataclass(frozen=True)
class Timing:
    """What a trial measured."""

    tokens_per_s: float
    error: float  # standard error of the rate, as a fraction
    config: Configuration
    memory_bytes: int
    decided: dict[str, str]


class Optimiser:
    """The search. `limit_s` and `most` bound its time and its trials; `seconds` is the timed part of each."""

    def __init__(
        self, target: Path, settings: Sequence[str], allow: Sequence[str] = (), limit_s: float = 900.0, most: int = 24,
        seconds: float = 4.0, tell: Report = lambda line: None,
    ) -> None:  # fmt: skip
        for name in allow:
            if name not in PERMISSIONS:
                raise UserError(f"--allow {name}: write {' or '.join(PERMISSIONS)}")
        self.target, self.settings, self.allowed = target, list(settings), set(allow)
        self.ends_at, self.most, self.seconds, self.tell = time.monotonic() + limit_s, most, seconds, tell
        self.spec = complete_spec(load_spec(target, self.settings))
        if self.spec.objective in RL_OBJECTIVES:
            raise UserError(
                f"objective: {self.spec.objective}: most of such a step is rollouts, which these settings do not "
                "change: optimise an sft or pretrain spec of the same model"
            )
        use_threads(self.spec.parallel)
        self.device = pick_device(self.spec.parallel)
        self.gpus = torch.cuda.device_count() if self.device.type == "cuda" else 0
        self.devices = count_processes(self.spec.parallel, self.gpus)
        tell(f"preparing {target}")
        self.resolved = dry_run(self.spec, self.device)
        training = self.resolved.training
        self.rows = training.batch_rows[0][1]
        self.tokens = self.rows * training.context
        self.predictor = Predictor(self.spec, self.resolved.shape, measure_machine(self.device), self.rows, self.device)
        self.load = round(os.getloadavg()[0] / (os.cpu_count() or 1), 2) if self.device.type == "cpu" else 0.0
        self.trials: list[TimedTrial] = []
        self.longest_s = TRIAL_S  # of a trial, with its start
        self.noise, self.count, self.stopped = LEAST_NOISE, 0, ""
        self.tried: dict[str, int | None] = {}  # change -> kept changes when it was tried; None: not again
        self.too_large: set[str] = set()
        self.kept = 0

    def run(self) -> Optimisation:
        began = time.monotonic()
        current = self._baseline()
        baseline = current.tokens_per_s
        while (option := self._next(current)) is not None:
            current = self._try(current, *option)
        current = self._planner_choice(current)
        return Optimisation(
            str(self.target), name_and_memory(self.device)[0], self.device.type,
            datetime.now(UTC).isoformat(timespec="seconds"), self.resolved.context, self.tokens, self.noise,
            self.trials, current.config.settings, current.tokens_per_s, baseline, current.decided, self.load,
            time.monotonic() - began, self.stopped, package_versions(),
        )  # fmt: skip

    def _baseline(self) -> Timing:
        """The spec as given, measured twice: how far two measurements differ is the noise. A third time if they differ
        much, since one of them may have been disturbed."""
        self.tell("measuring the spec as given, twice")
        timings = [self._measure_given(), self._measure_given()]
        if _apart(timings)[0] > RESTLESS and self._used_up() is None:
            timings.append(self._measure_given())
        apart = statistics.median(_apart(timings))
        self.noise = max(LEAST_NOISE, apart, *(timing.error for timing in timings))
        rate = statistics.median(timing.tokens_per_s for timing in timings)
        times = {2: "twice", 3: "three times"}[len(timings)]
        why = f"measured {times}, {apart:.1%} apart"
        memory = timings[-1].memory_bytes
        self.trials.append(TimedTrial("spec as given", {}, "baseline", why, None, 0.0, self.noise, rate, memory))
        self._show()
        return replace(timings[-1], tokens_per_s=rate)

    def _measure_given(self) -> Timing:
        timing = self.measure({})
        if isinstance(timing, str):
            raise UserError(f"{self.target}: the spec does not train as given: {timing}")
        return timing

    def _next(self, current: Timing) -> tuple[SpecChange, Configuration, float | None] | None:
        """The untried change with the largest predicted gain. One that was about as fast is tried once more if others
        have been kept since."""
        if (left := self._used_up()) is not None:
            self.stopped = left
            return None
        base_s = self.predictor.seconds(current.config)
        options: list[tuple[float, SpecChange, Configuration, float | None]] = []
        arguments = (current.config, self.spec, self.rows, self.allowed, self.device, self.devices)
        for change, expected in changes(*arguments):
            if self.tried.get(str(change), -1) in (None, self.kept):
                continue
            seconds = None if base_s is None else self.predictor.seconds(expected)
            gain = None if base_s is None or seconds is None else base_s / seconds - 1
            if gain is not None and gain < WORSE:
                continue
            if reason := self.predictor.too_large(expected):
                self._note_too_large(change, expected, gain, reason)
                continue
            rank = UNKNOWN if gain is None else gain
            options.append((min(0.0, rank) if str(change) in self.tried else rank, change, expected, gain))
        if not options:
            return None
        _, change, expected, gain = max(options, key=lambda option: option[0])
        return change, expected, gain

    def _used_up(self) -> str | None:
        if self.count >= self.most:
            return f"--trials {self.most} are used up"
        if self.ends_at - time.monotonic() < self.longest_s:
            return "--minutes are used up"
        return None

    def _note_too_large(self, change: SpecChange, expected: Configuration, gain: float | None, reason: str) -> None:
        if str(change) not in self.too_large:
            self.too_large.add(str(change))
            self.trials.append(TimedTrial(str(change), expected.settings, "not tried", reason, gain))
            self._show()

    def _try(self, current: Timing, change: SpecChange, expected: Configuration, predicted: float | None) -> Timing:
        words = "" if predicted is None else f", predicted {predicted:+.0%}"
        self.tell(f"trying {change}{words}")
        better = self._compare(current, str(change), expected.settings, predicted, change.note)
        gain, again = self.trials[-1].gain, str(change) in self.tried
        once_more = not again and gain is not None and gain > NEARLY
        self.tried[str(change)] = self.kept if once_more else None
        return better

    def _compare(
        self, current: Timing, name: str, settings: dict[str, Any], predicted: float | None, note: str = ""
    ) -> Timing:
        """Measure settings against the present ones, and return the better of both."""
        timing = self.measure(settings)
        if isinstance(timing, str):
            self.trials.append(TimedTrial(name, settings, "failed", timing, predicted, note=note))
            self._show()
            return current
        spread = _spread(self.noise, current, timing)
        gain = timing.tokens_per_s / current.tokens_per_s - 1
        why = ""
        if 0 < gain <= UNCLEAR * spread and self._used_up() is None:
            again, other = self.measure(current.config.settings), self.measure(settings)
            if isinstance(again, Timing) and isinstance(other, Timing):
                current, timing = _mean(current, again), _mean(timing, other)
                spread, why = _spread(self.noise, current, timing), ", measured twice"
                gain = timing.tokens_per_s / current.tokens_per_s - 1
        better = gain > spread
        verdict = "kept" if better else "no gain"
        why = f"{'above' if better else 'within or below'} the noise of {spread:.1%}{why}"
        row = TimedTrial(
            name, settings, verdict, why, predicted, gain, spread, timing.tokens_per_s, timing.memory_bytes, note
        )
        self.trials.append(row)
        self._show()
        self.kept += better
        return timing if better else current

    def _planner_choice(self, current: Timing) -> Timing:
        """The planner's own choice of everything that it decides, against the best so far."""
        settings = {**current.config.settings, **dict.fromkeys(AUTO, "auto")}
        spec = complete_spec(load_spec(self.target, [*self.settings, *as_settings(settings)]))
        planned, present = dry_run(spec, self.device).training, current.config.training
        same = all(getattr(planned, key) == getattr(present, key) for key in ("compile", "activations", "micro_rows"))
        if same or self.devices > 1 or self._used_up() is not None:
            return current
        config = replace(current.config, training=planned)
        before_s, after_s = self.predictor.seconds(current.config), self.predictor.seconds(config)
        predicted = before_s / after_s - 1 if before_s and after_s else None
        self.tell("trying the planner's own choice")
        return self._compare(current, f"{', '.join(AUTO)}: auto", settings, predicted)

    def measure(self, settings: dict[str, Any]) -> Timing | str:
        """Train a few steps in processes of their own; the reason if that failed."""
        self.count, began = self.count + 1, time.monotonic()
        try:
            spec = complete_spec(load_spec(self.target, [*self.settings, *as_settings(settings)]))
        except UserError as error:
            return str(error).splitlines()[0]
        ranks, threads = count_processes(spec.parallel, self.gpus), None
        if self.device.type == "cpu" and ranks > 1:
            threads = max(1, (os.cpu_count() or 1) // ranks)
        with tempfile.TemporaryDirectory(prefix="bessemer-optimise-") as scratch:
            folder = Path(scratch)
            (folder / "spec.yaml").write_text(dump_spec(timed_spec(spec, None, self.tokens, WARMUP + MOST_STEPS)))
            request = {"steps": MOST_STEPS, "vocab": None, "seconds": self.seconds}
            (folder / "request.json").write_text(json.dumps(request))
            fault = run_workers(folder, ranks, threads, max(LEAST_LIMIT_S, self.ends_at - began))
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            if not (folder / TIMED).exists():
                return fault or "it ended without a result"
            timed = json.loads((folder / TIMED).read_text())
        return _timing(timed, settings, spec.data.workers)

    def _show(self) -> None:
        trial = self.trials[-1]
        rate = "" if trial.tokens_per_s is None else f"{trial.tokens_per_s:,.0f} tokens/s, "
        gain = "" if trial.gain is None or trial.verdict == "baseline" else f"{trial.gain:+.1%}, "
        self.tell(f"  {trial.change}: {rate}{gain}{trial.verdict}: {trial.why}")


def _timing(timed: dict[str, Any], settings: dict[str, Any], workers: int) -> Timing:
    times_s, step_s = timed["times_s"], timed["step_s"]
    low, _, high = statistics.quantiles(times_s, n=4)
    error = ERROR_OF_MEDIAN * (high - low) / step_s / len(times_s) ** 0.5
    training = TrainPlan.from_json(json.dumps(timed["training"]))
    config = Configuration(settings, training, Layout(**timed["layout"]), workers, timed["data_wait"])
    decided = {
        item["key"]: f"{item['value']} ({item['reason']})"
        for item in timed["decided"]["decisions"]
        if item["key"] == "attention"
    }
    decided["waiting for batches"] = f"{timed['data_wait']:.1%} of a step"
    return Timing(timed["tokens"] / step_s, error, config, timed["memory_bytes"], decided)


def _apart(timings: Sequence[Timing]) -> list[float]:
    """How far each pair of rates differs."""
    rates = [timing.tokens_per_s for timing in timings]
    return [max(pair) / min(pair) - 1 for pair in combinations(rates, 2)]


def _mean(first: Timing, second: Timing) -> Timing:
    return replace(second, tokens_per_s=statistics.mean((first.tokens_per_s, second.tokens_per_s)))


def _spread(noise: float, first: Timing, second: Timing) -> float:
    """The spread of the ratio of two rates: at least that of two starts of the same settings."""
    return max(noise, float((first.error**2 + second.error**2) ** 0.5))


def write_best(target: Path, settings: Sequence[str], out: Path) -> None:
    """The spec with these settings in its text, so that comments and order stay. Settings that cannot be placed there
    lead to a spec written from its values."""
    text = target.read_text(encoding="utf-8")
    wanted = load_spec(target, list(settings))
    for setting in settings:
        key, _, value = setting.partition("=")
        text = edit_text(text, key.strip(), value)
    try:
        same = with_default_name(validate(parse_yaml(text, str(out))), target) == wanted
    except UserError:
        same = False
    try:
        write_atomic(out, text if same else dump_spec(wanted))
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from None


def table(result: Optimisation) -> list[str]:
    """The trials and the outcome."""
    rows = [["change", "predicted", "measured", "tokens/s", "memory", "", "why"]]
    for trial in result.trials:
        predicted = "-" if trial.predicted_gain is None else f"{trial.predicted_gain:+.0%}"
        gain = "-" if trial.gain is None else f"{trial.gain:+.1%} ± {trial.spread:.1%}"
        if trial.verdict == "baseline":
            gain = f"± {trial.spread:.1%}"
        rate = "-" if trial.tokens_per_s is None else f"{trial.tokens_per_s:,.0f}"
        memory = "-" if trial.memory_bytes is None else human_bytes(trial.memory_bytes)
        why = f"{trial.why}; {trial.note}" if trial.note else trial.why
        rows.append([trial.change, predicted, gain, rate, memory, trial.verdict, why])
    size = f"{result.batch_tokens:,} tokens a step in rows of {result.context:,}"
    lines = [f"{result.target} on {result.machine}: {size}", "", *align_columns(rows), ""]
    lines += [f"{key}: {words}" for key, words in result.decided.items()]
    if result.load > BUSY:
        lines.append(f"other programs used this machine (load {result.load:g} per core): measure when it is idle")
    if result.stopped:
        lines.append(f"stopped early: {result.stopped}")
    measured = f"{result.baseline_tokens_per_s:,.0f} to {result.tokens_per_s:,.0f} tokens/s ({result.gain:+.0%})"
    lines.append(f"{measured} in {human_time(result.wall_s)}")
    lines.append("best: " + (" ".join(as_settings(result.best)) or "the spec as given"))
    return lines
