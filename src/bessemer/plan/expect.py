"""What runs really did on a kind of machine, kept beside the numbers of `bessemer bench`: the next plan is corrected by
it. A line for each run, so that several at once do not undo each other's.

What a run will do, said before it does: memory, tokens a second, utilisation and time, with an error bar.

The hardware catalogue gives a step's time, and what earlier runs on this machine did corrects it. On a device that is
in no catalogue it follows from a short measurement before the first step, from earlier runs, or from `bessemer bench`.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.cost_model.memory import Passes, estimate
from bessemer.plan.cost_model.operators import constants, work_of
from bessemer.plan.cost_model.rank_memory import rank_needs
from bessemer.plan.cost_model.step_time import StepSetup, padded_rows, step_time
from bessemer.plan.decide import TrainPlan, keeping, tokens_after
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Cluster, Machine, ceilings_path, find_gpu, kept_ceilings, same_gpu, with_ceilings
from bessemer.plan.search.layout import Layout
from bessemer.spec.optimizer import optimizer_bytes
from bessemer.spec.quantity import human_bytes, human_time
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

NEWEST = 5  # runs that a correction is the median of
NEAR = 8.0  # times as many parameters, or as few: beyond that a run says little of another
SEEN_ONCE, LEAST_ERROR = 0.15, 0.05  # said of a correction until three runs show how far apart they lie, and then
SUFFIX = ".runs.jsonl"


@dataclass(frozen=True)
class RunRecord:
    """One run. `base_s` is what the plan would have said of a step without a correction (None: nothing), `step_s` what
    a step took, without waiting for data. `cause` is what held it up, if anything did that is none of the machine's."""

    date: str
    run: str
    machine: str
    precision: str
    processes: int
    parameters: int
    context: int
    compiled: bool
    flops: float  # of a step
    base_s: float | None
    step_s: float
    estimated_bytes: int
    peak_bytes: int
    cause: str = ""

    def resembles(self, precision: str, processes: int, parameters: int, compiled: bool) -> bool:
        near = 1 / NEAR <= self.parameters / max(1, parameters) <= NEAR
        return (self.precision, self.processes, self.compiled) == (precision, processes, compiled) and near


@dataclass(frozen=True)
class Correction:
    """By what earlier runs were slower (or larger) than said; `error` is how far they lay apart."""

    step: float | None  # measured over said; None: nothing had been said
    flops_per_s: float  # that they reached
    memory: float  # measured over estimated
    beside_bytes: int  # measured less estimated
    runs: int
    error: float

    @property
    def source(self) -> str:
        return f"{self.runs} earlier run{'s' * (self.runs > 1)} on this machine"


def history_path(name: str, count: int, torch_version: str) -> Path:
    path = ceilings_path(name, count, torch_version)
    return path.with_name(path.name.removesuffix(".json") + SUFFIX)


def keep_record(path: Path, record: RunRecord) -> str | None:
    """Appended; in words why not, where it cannot be: a run has ended well without it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")
    except OSError as fault:
        return f"{path}: cannot be written ({fault.strerror}): set XDG_CACHE_HOME to a folder of yours"
    return None


def load_records(path: Path) -> list[RunRecord]:
    """Oldest first. Lines that cannot be read are told of and passed over."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as fault:
        warnings.warn(f"{path}: not readable ({fault}): plans go uncorrected", stacklevel=2)
        return []
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(RunRecord(**json.loads(line)))
        except (ValueError, TypeError):
            warnings.warn(f"{path}: line {number} is no run: remove it", stacklevel=2)
    return found


def correction(
    records: list[RunRecord], precision: str, processes: int, parameters: int, compiled: bool
) -> Correction | None:
    """From the newest runs that resemble the planned one and were not held up; None where there are none."""
    alike = [one for one in records if not one.cause and one.resembles(precision, processes, parameters, compiled)]
    newest = alike[-NEWEST:]
    if not newest:
        return None
    ratios = [one.step_s / one.base_s for one in newest if one.base_s]
    reached = [one.flops / one.step_s for one in newest]
    apart = ratios if len(ratios) == len(newest) else reached
    middle = median(apart)
    spread = max(abs(one / middle - 1) for one in apart)
    return Correction(
        step=median(ratios) if ratios else None,
        flops_per_s=median(reached),
        memory=median(one.peak_bytes / max(1, one.estimated_bytes) for one in newest),
        beside_bytes=int(median(one.peak_bytes - one.estimated_bytes for one in newest)),
        runs=len(newest),
        error=max(SEEN_ONCE if len(newest) < 3 else LEAST_ERROR, spread),
    )


def with_history(cluster: Cluster, precision: str, parameters: int) -> Cluster:
    """The cluster with what compiled runs of such a size on as many of its GPUs have shown, by whatever torch, as far
    as this user keeps them."""
    folder = ceilings_path("any", 1, "any").parent
    kept = [one for path in sorted(folder.glob(f"*{SUFFIX}")) for one in load_records(path)]
    same = sorted((one for one in kept if same_gpu(cluster.gpu, one.machine)), key=lambda one: one.date)
    found = correction(same, precision, cluster.count, parameters, compiled=True)
    if found is None or not found.step:
        return cluster
    return replace(cluster, slower=found.step, slower_error=found.error, slower_source=found.source)


MEMORY_ERROR = 0.05  # of a GPU's peak; the bar is twice that, the worst of all peaks in docs/cost-model.md
PROCESS_ERROR = 0.15  # of a process on a CPU, whose libraries take more than a small model
MEASURED_ERROR = 0.125  # of a step's time by one measured row: what is aimed at, not fitted; the bar is twice that
BAR = 2.0  # times the mean error: nine of ten measured rows lay within 1.4 to 2.8 times it (data/steptime.json)
LATER = "predictions begin once a run has ended here, or after `bessemer bench`"


@dataclass(frozen=True)
class ExpectedRun:
    """None is what nobody knows. `error` is the mean error of the step's time, as a fraction; without one the time is
    only a bound: no run can be faster. `base_s` and `estimated_bytes` are before any correction."""

    step_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    time_s: float | None
    memory_bytes: int | None
    error: float | None
    memory_error: float
    basis: str
    base_s: float | None
    estimated_bytes: int
    flops: float  # of a step
    total_steps: int
    withheld: str = ""  # why a prediction that there would be is not given

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> ExpectedRun:
        return ExpectedRun(**json.loads(text))

    @property
    def bar(self) -> float | None:
        """How far a run may be from the plan before somebody should ask why."""
        return None if self.error is None else BAR * self.error


@dataclass(frozen=True)
class Occasion:
    """What is to run and on what; `beside_bytes` lie in memory besides a step (copies of the state, averages)."""

    spec: RunSpec
    shape: ModelShape
    training: TrainPlan
    machine: Machine
    layout: Layout
    per_node: int
    peak_flops: float  # of all processes
    beside_bytes: int = 0

    @property
    def rows(self) -> int:
        """Of the batch that most steps have."""
        phases, total = self.training.batch_rows, self.training.total_steps
        ends = [start for start, _ in phases[1:]] + [max(total, phases[-1][0] + 1)]
        return max(zip(phases, ends, strict=True), key=lambda pair: pair[1] - pair[0][0])[0][1]

    @property
    def compiled(self) -> bool:
        return self.training.compiled

    @property
    def flops(self) -> float:
        context = self.training.context
        return float(self.shape.flops_per_token(context) * self.rows * context)


def expect(occasion: Occasion, records: list[RunRecord], measured_s: float | None = None) -> ExpectedRun:
    """The prediction; `records` are of earlier runs on this machine, `measured_s` the time of a step as measured just
    now (`train/speed.py`), which is used where the catalogue says nothing."""
    shape, training, machine = occasion.shape, occasion.training, occasion.machine
    processes = occasion.layout.size
    found = correction(records, training.precision, processes, shape.parameters, occasion.compiled)
    step_s, error, basis, base_s = _step(occasion, found, measured_s)
    mfu, withheld = None if step_s is None else occasion.flops / step_s / occasion.peak_flops, ""
    if mfu is not None and mfu > most_mfu(training.precision) + 1e-6:
        withheld = (
            f"{basis}: a step in {step_s:.3g} s would be {mfu:.0%} of the {occasion.peak_flops / 1e9:,.0f} GFLOP/s "
            f"that are the most here ({machine.peak(training.precision)[1]})"
        )
        mfu = None
        if step_s != measured_s:  # what was just measured stands: then it is the peak that is wrong
            step_s, error, basis = None, None, withheld
    estimated = _memory(occasion)
    memory, memory_error = _corrected_memory(machine, estimated, found)
    tokens = occasion.rows * training.context
    rate = tokens / step_s if step_s else None
    all_tokens = tokens_after(training.batch_rows, training.total_steps) * training.context
    return ExpectedRun(
        step_s=step_s,
        tokens_per_s=rate,
        mfu=mfu,
        time_s=all_tokens / rate if rate else None,
        memory_bytes=memory,
        error=error,
        memory_error=memory_error,
        basis=basis,
        base_s=base_s,
        estimated_bytes=estimated,
        flops=occasion.flops,
        total_steps=training.total_steps,
        withheld=withheld,
    )


def most_mfu(precision: str) -> float:
    """Utilisation that no device exceeds. That of fp8 is counted against bf16, which fp8 units are twice as fast as."""
    return 2.0 if precision.startswith("fp8") else 1.0


def _step(
    occasion: Occasion, found: Correction | None, measured_s: float | None
) -> tuple[float | None, float | None, str, float | None]:
    """Seconds, their error, what both rest on, and the seconds before any correction."""
    known = _catalogued(occasion)
    if not isinstance(known, str):
        base_s, error, basis = known
        if found and found.step:
            return base_s * found.step, found.error, f"the catalogue, corrected by {found.source}", base_s
        return base_s, error, basis, base_s
    if measured_s is not None:
        return measured_s, MEASURED_ERROR, "passes over a few rows, measured before the first step", None
    if found:
        return occasion.flops / found.flops_per_s, found.error, found.source, None
    machine = occasion.machine
    if "bessemer bench" in machine.source:
        counted = "bf16" if occasion.training.precision.startswith("fp8") else occasion.training.precision
        rate = machine.matmul.get(counted) or machine.matmul["fp32"]
        bound = occasion.flops / (rate * occasion.layout.size)
        return bound, None, f"at best: products alone, as {machine.source}; runs here will correct it", None
    return None, None, f"{known}: {LATER}", None


def _catalogued(occasion: Occasion) -> tuple[float, float, str] | str:
    """Where the step's time follows from the catalogue: (seconds, error, basis); else why it does not."""
    training, shape, layout = occasion.training, occasion.shape, occasion.layout
    if occasion.machine.device != "cuda":
        return f"{occasion.machine.name} is in no catalogue"
    if occasion.spec.parallel.engine != "torch" or shape.wrapped:
        return "steps of DeepSpeed and of other libraries' models are not modelled"
    how = training.activations if isinstance(training.activations, str) else "selective"
    try:
        gpu = find_gpu(occasion.machine.name)
        cluster = Cluster(gpu, layout.size, occasion.per_node, gpu.network_bandwidth, gpu.network_name)
        setup = StepSetup(
            work_of(shape), layout, training.micro_rows, padded_rows(occasion.rows, layout, training.micro_rows),
            training.context, training.precision,
            how,  # type: ignore[arg-type]
            sequence_parallel=layout.tp > 1,
        )  # fmt: skip
        time = step_time(setup, with_ceilings(cluster, kept_ceilings(gpu)))
    except UserError as fault:  # no such GPU in the catalogue, or no such precision on it
        return str(fault).partition(":")[0]
    if not occasion.compiled:
        wide = constants().errors["unmeasured"]
        return time.total_s, wide["mean_absolute_error"], f"{wide['of']}; of compiled layers, which these are not"
    return time.total_s, time.error, time.basis


def _memory(occasion: Occasion) -> int:
    """Of the fullest process, as torch would count it."""
    training, shape, layout = occasion.training, occasion.shape, occasion.layout
    spec = keeping(occasion.spec, training.weights)
    dense = occasion.compiled and not (shape.moe or shape.mamba)
    several = training.micro_rows * layout.dp < occasion.rows
    passes = Passes(
        training.context, training.micro_rows, training.precision, training.activations, dense,
        occasion.machine.device, several,
    )  # fmt: skip
    if layout.size == 1:
        return estimate(spec, shape, passes).total + occasion.beside_bytes
    each = optimizer_bytes(spec.optimizer, spec.memory, training.precision)
    batches = max(1, occasion.rows // (training.micro_rows * layout.dp))
    return rank_needs(shape, layout, each, passes, batches).allocated + occasion.beside_bytes


def _corrected_memory(machine: Machine, estimated: int, found: Correction | None) -> tuple[int | None, float]:
    """A process on a CPU is more than its tensors: by how much, only an earlier one can tell."""
    if machine.device == "cuda":
        return int(estimated * found.memory) if found else estimated, MEMORY_ERROR
    return max(0, estimated + found.beside_bytes) if found else None, PROCESS_ERROR


def note_expected(expected: ExpectedRun, plan: Plan) -> None:
    """Into the plan, with the error bar."""
    source = "prediction"
    if expected.step_s is None:
        plan.add("expected.tokens_per_s", "withheld" if expected.withheld else "unknown", expected.basis, source)
    else:
        bar = "" if expected.bar is None else f"within {expected.bar:.0%}: "
        assert expected.tokens_per_s is not None and expected.time_s is not None
        plan.add("expected.tokens_per_s", round(expected.tokens_per_s), f"{bar}{expected.basis}", source)
        if expected.mfu is None:
            plan.add("expected.mfu", "withheld", expected.withheld, source)
        else:
            plan.add("expected.mfu", f"{expected.mfu:.1%}", "of the peak that utilisation is counted against", source)
        plan.add("expected.time", human_time(expected.time_s), "all steps, without evaluations and saves", source)
    if expected.memory_bytes is not None:
        bar = f"within {BAR * expected.memory_error:.0%}"
        plan.add("expected.memory", human_bytes(expected.memory_bytes), f"at a step's peak, {bar}", source)


def record_of(occasion: Occasion, expected: ExpectedRun, measured: dict[str, Any]) -> RunRecord:
    """For the history: `measured` has date, run, step_s, peak_bytes and cause."""
    training = occasion.training
    return RunRecord(
        machine=occasion.machine.name, precision=training.precision, processes=occasion.layout.size,
        parameters=occasion.shape.parameters, context=training.context, compiled=occasion.compiled,
        flops=occasion.flops, base_s=expected.base_s, estimated_bytes=expected.estimated_bytes, **measured,
    )  # fmt: skip
