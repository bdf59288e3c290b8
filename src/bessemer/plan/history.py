"""What runs really did on a kind of machine, kept beside the numbers of `bessemer bench`: the next plan is corrected by
it. A line for each run, so that several at once do not undo each other's.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from bessemer.plan.ceilings import ceilings_path
from bessemer.plan.hardware import Cluster, same_gpu

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
