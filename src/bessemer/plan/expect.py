"""Predicts memory, tokens/s, utilisation and time of a run before its first step, with error bars.

The step time comes from the hardware catalogue, corrected by earlier runs on this kind of machine. On other devices it
comes from a short measurement before the first step, from earlier runs, or from `bessemer bench`. Each run appends its
results to a history file next to the numbers of `bessemer bench`.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.cost_model.memory import Passes, estimate_memory, rank_needs
from bessemer.plan.cost_model.operators import Constants, constants, step_work
from bessemer.plan.cost_model.step_time import StepSetup, padded_rows, step_time
from bessemer.plan.decide import TrainPlan, with_weights
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Cluster, Machine, ceilings_path, find_gpu, same_gpu, saved_ceilings, with_ceilings
from bessemer.plan.schedule import tokens_after
from bessemer.plan.search.layout import Layout
from bessemer.spec.quantity import human_bytes, human_time
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.spec.trained import parameter_bytes

NEWEST = 5  # runs, of which a correction is the median
NEAR = 8.0  # largest ratio of parameters at which a run says something about another
FEW_RUNS_ERROR, LEAST_ERROR = 0.15, 0.05  # error of a correction with fewer than three runs, and the least with more
SUFFIX = ".runs.jsonl"
MEMORY_ERROR = 0.05  # of a GPU's peak; twice that is the worst of all peaks in docs/cost-model.md
PROCESS_ERROR = 0.15  # of a process on a CPU, whose libraries take more than a small model
MEASURED_ERROR = 0.125  # of a step time from one measured row: an assumption, not a fit
EAGER_PASSES = 2.0  # over memory by element-wise work, relative to compiled layers
BAR = 2.0  # times the mean error: 90 % of measured rows are within 1.4 to 2.8 times it (data/steptime.json)
LATER = "predictions begin after the first run here, or after `bessemer bench`"


@dataclass(frozen=True)
class RunRecord:
    """The result of one run. `base_s` is the uncorrected prediction of the step time (None: there was none), `step_s`
    the measured one without waiting for data. `cause` is what slowed it down from outside, if anything did."""

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
    """Measured over predicted numbers of earlier runs; `error` is their spread."""

    step: float | None  # measured over predicted step time; None: nothing was predicted
    flops_per_s: float  # reached
    memory: float  # measured over estimated
    beside_bytes: int  # measured minus estimated
    runs: int
    error: float

    @property
    def source(self) -> str:
        return f"{self.runs} earlier run{'s' * (self.runs > 1)} on this machine"


def history_path(name: str, count: int, torch_version: str) -> Path:
    path = ceilings_path(name, count, torch_version)
    return path.with_name(path.name.removesuffix(".json") + SUFFIX)


def append_record(path: Path, record: RunRecord) -> str | None:
    """Append a record. Returns a warning instead of raising if that fails, since the run itself has succeeded."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")
    except OSError as error:
        return f"{path}: cannot be written ({error.strerror}): set XDG_CACHE_HOME to a folder of yours"
    return None


def load_records(path: Path) -> list[RunRecord]:
    """Oldest first. Unreadable lines cause a warning."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        warnings.warn(f"{path}: not readable ({error}): plans are not corrected by it", stacklevel=2)
        return []
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(RunRecord(**json.loads(line)))
        except (ValueError, TypeError):
            warnings.warn(f"{path}: line {number} is no run: remove it", stacklevel=2)
    return records


def find_correction(
    records: list[RunRecord], precision: str, processes: int, parameters: int, compiled: bool
) -> Correction | None:
    """From the newest similar runs that nothing slowed down; None if there are none."""
    similar = [run for run in records if not run.cause and run.resembles(precision, processes, parameters, compiled)]
    newest = similar[-NEWEST:]
    if not newest:
        return None
    ratios = [run.step_s / run.base_s for run in newest if run.base_s]
    speeds = [run.flops / run.step_s for run in newest]
    values = ratios if len(ratios) == len(newest) else speeds
    spread = max(abs(value / median(values) - 1) for value in values)
    return Correction(
        step=median(ratios) if ratios else None,
        flops_per_s=median(speeds),
        memory=median(run.peak_bytes / max(1, run.estimated_bytes) for run in newest),
        beside_bytes=int(median(run.peak_bytes - run.estimated_bytes for run in newest)),
        runs=len(newest),
        error=max(FEW_RUNS_ERROR if len(newest) < 3 else LEAST_ERROR, spread),
    )


def with_history(cluster: Cluster, precision: str, parameters: int) -> Cluster:
    """The cluster corrected by this user's compiled runs of similar size on as many GPUs of that type, with any torch
    version."""
    folder = ceilings_path("any", 1, "any").parent
    records = [record for path in sorted(folder.glob(f"*{SUFFIX}")) for record in load_records(path)]
    same = sorted((run for run in records if same_gpu(cluster.gpu, run.machine)), key=lambda run: run.date)
    earlier = find_correction(same, precision, cluster.count, parameters, compiled=True)
    if earlier is None or not earlier.step:
        return cluster
    return replace(cluster, slower=earlier.step, slower_error=earlier.error, slower_source=earlier.source)


@dataclass(frozen=True)
class ExpectedRun:
    """The prediction for a run; None: unknown. `error` is the mean error of the step time, as a fraction; without one
    the time is a lower bound. `base_s` and `estimated_bytes` are uncorrected."""

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
    withheld: str = ""  # why a prediction is not shown

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> ExpectedRun:
        return ExpectedRun(**json.loads(text))

    @property
    def bar(self) -> float | None:
        """The error bar: a larger gap between run and plan is a finding."""
        return None if self.error is None else BAR * self.error


@dataclass(frozen=True)
class RunSetup:
    """A run and its machine. `beside_bytes` are in memory besides a step (snapshots, weight averages); `filled` is the
    share of the rows that is not padding, which rates leave out."""

    spec: RunSpec
    shape: ModelShape
    training: TrainPlan
    machine: Machine
    layout: Layout
    per_node: int
    peak_flops: float  # of all processes
    beside_bytes: int = 0
    filled: float = 1.0

    @property
    def rows(self) -> int:
        """Batch size of most steps."""
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


def predict_run(occasion: RunSetup, records: list[RunRecord], measured_s: float | None = None) -> ExpectedRun:
    """The prediction. `records` are earlier runs on this machine; `measured_s` is a step time that was just measured
    (train/speed.py), used if the machine is not in the catalogue."""
    shape, training, machine = occasion.shape, occasion.training, occasion.machine
    processes = occasion.layout.size
    earlier = find_correction(records, training.precision, processes, shape.parameters, occasion.compiled)
    step_s, error, basis, base_s = _step_seconds(occasion, earlier, measured_s)
    mfu, withheld = None if step_s is None else occasion.flops / step_s / occasion.peak_flops, ""
    if mfu is not None and mfu > most_mfu(training.precision) + 1e-6:
        withheld = (
            f"{basis}: a step in {step_s:.3g} s would be {mfu:.0%} of the {occasion.peak_flops / 1e9:,.0f} GFLOP/s "
            f"that are the peak here ({machine.peak(training.precision)[1]})"
        )
        mfu = None
        if step_s != measured_s:  # a fresh measurement stands: then the peak is wrong
            step_s, error, basis = None, None, withheld
    estimated = _estimate_memory(occasion)
    memory, memory_error = _corrected_memory(machine, estimated, earlier)
    tokens = occasion.rows * training.context
    rate = tokens * occasion.filled / step_s if step_s else None
    all_tokens = tokens_after(training.batch_rows, training.total_steps) * training.context * occasion.filled
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
    """The highest possible utilisation. That of fp8 refers to the bf16 peak, half of the fp8 peak."""
    return 2.0 if precision.startswith("fp8") else 1.0


def _step_seconds(
    occasion: RunSetup, earlier: Correction | None, measured_s: float | None
) -> tuple[float | None, float | None, str, float | None]:
    """Seconds of a step, their error, the basis of both, and the uncorrected seconds."""
    prediction = _predict_step(occasion)
    if not isinstance(prediction, str):
        base_s, error, basis = prediction
        if earlier and earlier.step:
            return base_s * earlier.step, earlier.error, f"the catalogue, corrected by {earlier.source}", base_s
        return base_s, error, basis, base_s
    if measured_s is not None:
        return measured_s, MEASURED_ERROR, "passes over a few rows, measured before the first step", None
    if earlier:
        return occasion.flops / earlier.flops_per_s, earlier.error, earlier.source, None
    machine = occasion.machine
    if "bessemer bench" in machine.source:
        counted = "bf16" if occasion.training.precision.startswith("fp8") else occasion.training.precision
        rate = machine.matmul.get(counted) or machine.matmul["fp32"]
        bound = occasion.flops / (rate * occasion.layout.size)
        return bound, None, f"at best: products only, as {machine.source}; runs here will correct it", None
    return None, None, f"{prediction}: {LATER}", None


def _predict_step(occasion: RunSetup) -> tuple[float, float, str] | str:
    """(seconds, error, basis) from the catalogue, or why it has no prediction."""
    training, shape, layout = occasion.training, occasion.shape, occasion.layout
    if occasion.machine.device != "cuda":
        return f"{occasion.machine.name} is not in the catalogue"
    if occasion.spec.parallel.engine != "torch" or shape.wrapped:
        return "steps of DeepSpeed and of other libraries' models are not modelled"
    recompute = training.activations if isinstance(training.activations, str) else "selective"
    try:
        gpu = find_gpu(occasion.machine.name)
        cluster = Cluster(gpu, layout.size, occasion.per_node, gpu.network_bandwidth, gpu.network_name)
        setup = StepSetup(
            step_work(shape), layout, training.micro_rows, padded_rows(occasion.rows, layout, training.micro_rows),
            training.context, training.precision,
            recompute,  # type: ignore[arg-type]
            sequence_parallel=layout.tp > 1,
        )  # fmt: skip
        fitted = constants() if occasion.compiled else uncompiled_constants()
        time = step_time(setup, with_ceilings(cluster, saved_ceilings(gpu)), fitted)
    except UserError as error:  # the GPU is not in the catalogue, or lacks the precision
        return str(error).partition(":")[0]
    if not occasion.compiled:
        wide = constants().errors["unmeasured"]
        return time.total_s, wide["mean_absolute_error"], f"{wide['of']}; layers that are not compiled are assumed"
    return time.total_s, time.error, time.basis


def uncompiled_constants() -> Constants:
    """For layers that are not compiled: launches as measured without compilation, and twice the passes over memory,
    which is an assumption."""
    fitted = constants()
    fused, separate = fitted.habits["compiled"], fitted.habits["fsdp"]
    passes = {name: EAGER_PASSES * getattr(fused, name) for name in ("whole_passes", "attention_passes", "ffn_passes")}
    eager = replace(fused, launch_s=separate.launch_s, launch_tp_s=separate.launch_tp_s, **passes)
    return replace(fitted, habits={**fitted.habits, "compiled": eager})


def _estimate_memory(occasion: RunSetup) -> int:
    """Bytes of the fullest process, as torch counts them."""
    training, shape, layout = occasion.training, occasion.shape, occasion.layout
    spec = with_weights(occasion.spec, training.weights)
    dense = occasion.compiled and not (shape.moe or shape.mamba)
    several = training.micro_rows * layout.dp < occasion.rows
    passes = Passes(
        training.context, training.micro_rows, training.precision, training.activations, dense,
        occasion.machine.device, several,
    )  # fmt: skip
    if layout.size == 1:
        return estimate_memory(spec, shape, passes).total + occasion.beside_bytes
    each = parameter_bytes(spec, shape, training.precision)
    batches = max(1, occasion.rows // (training.micro_rows * layout.dp))
    return rank_needs(shape, layout, each, passes, batches).allocated + occasion.beside_bytes


def _corrected_memory(machine: Machine, estimated: int, earlier: Correction | None) -> tuple[int | None, float]:
    """A CPU process takes more than its tensors; only an earlier run shows how much."""
    if machine.device == "cuda":
        return int(estimated * earlier.memory) if earlier else estimated, MEMORY_ERROR
    return max(0, estimated + earlier.beside_bytes) if earlier else None, PROCESS_ERROR


def record_expected(expected: ExpectedRun, plan: Plan) -> None:
    """Record the prediction in the plan, with its error bar."""
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
            plan.add("expected.mfu", f"{expected.mfu:.1%}", "of the peak FLOP/s", source)
        plan.add("expected.time", human_time(expected.time_s), "all steps, without evaluations and saves", source)
    if expected.memory_bytes is not None:
        bar = f"within {BAR * expected.memory_error:.0%}"
        plan.add("expected.memory", human_bytes(expected.memory_bytes), f"at a step's peak, {bar}", source)


def make_run_record(occasion: RunSetup, expected: ExpectedRun, measured: dict[str, Any]) -> RunRecord:
    """A record for the history; `measured` has date, run, step_s, peak_bytes and cause."""
    training = occasion.training
    return RunRecord(
        machine=occasion.machine.name, precision=training.precision, processes=occasion.layout.size,
        parameters=occasion.shape.parameters, context=training.context, compiled=occasion.compiled,
        flops=occasion.flops, base_s=expected.base_s, estimated_bytes=expected.estimated_bytes, **measured,
    )  # fmt: skip
