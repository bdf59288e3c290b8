"""Who waits for whom. Where processes hang, collectives hang too: each leaves its report as a file in the run's logs,
and any of them can read the others'.

`logs/hang-rank-N.txt` opens with a line of JSON, the stacks of all threads follow; the last collectives that torch
recorded are beside it in `logs/collectives-rank-N.json`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bessemer.run.directory import write_whole

GRACE_S = 5.0  # for the reports of the others, whose limits differ by a look at the clock


@dataclass(frozen=True)
class Report:
    """What one rank was in when its step did not end."""

    start: float  # of the run's processes: a report of an earlier start says nothing of this one
    rank: int
    host: str
    pid: int
    step: int
    phase: str
    entered: int  # phases of the step
    collectives: int  # that it has entered so far; 0 where nobody counts them
    collective: str  # the last one, in words
    waited_s: float

    @property
    def progress(self) -> tuple[int, int, int]:
        return self.step, self.entered, self.collectives

    @property
    def place(self) -> str:
        return f"step {self.step}, {self.phase}"


def report_path(logs: Path, rank: int) -> Path:
    return logs / f"hang-rank-{rank}.txt"


def leave_report(logs: Path, report: Report, stacks: str, collectives: str = "") -> None:
    """For the other ranks and for whoever looks later."""
    logs.mkdir(parents=True, exist_ok=True)
    if collectives:
        write_whole(logs / f"collectives-rank-{report.rank}.json", collectives)
    write_whole(report_path(logs, report.rank), f"{json.dumps(asdict(report))}\n\n{stacks}")


def give_sign(logs: Path, rank: int, start: float, beat: int) -> None:
    """A sign of life of a process that waits for the end of what follows its beat of this number."""
    logs.mkdir(parents=True, exist_ok=True)
    write_whole(logs / f"alive-rank-{rank}.json", json.dumps([start, beat]))


def without_sign(logs: Path, size: int, start: float, beat: int) -> list[int]:
    """The ranks that have given no sign of life since that beat of this start."""
    silent = []
    for rank in range(size):
        try:
            seen = json.loads((logs / f"alive-rank-{rank}.json").read_text())
        except (OSError, ValueError):
            seen = None
        if seen != [start, beat]:
            silent.append(rank)
    return silent


def read_reports(logs: Path, size: int, start: float) -> list[Report]:
    """Those of this start that are there."""
    found = []
    for rank in range(size):
        try:
            with report_path(logs, rank).open(encoding="utf-8") as file:
                report = Report(**json.loads(file.readline()))
        except (OSError, ValueError, TypeError):
            continue
        if report.start == start:
            found.append(report)
    return found


def wait_for_reports(logs: Path, size: int, start: float, grace_s: float = GRACE_S) -> list[Report]:
    """All of them, or those that came in time: a frozen process or a lost host leaves none."""
    give_up = time.monotonic() + grace_s
    while len(found := read_reports(logs, size, start)) < size and time.monotonic() < give_up:
        time.sleep(0.05)
    return found


def _ranks(numbers: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 1 and 3`, `ranks 0, 1, 2, 3 and 60 more`."""
    shown = [str(number) for number in numbers[:8]]
    if len(numbers) > len(shown):
        shown.append(f"{len(numbers) - len(shown)} more")
    if len(shown) == 1:
        return f"rank {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def who_waits(reports: Sequence[Report], hosts: Sequence[str]) -> str:
    """In one line: who is behind, and who waits for it where."""
    silent = sorted(set(range(len(hosts))) - {report.rank for report in reports})
    words = []
    if silent:
        said = f"{_ranks(silent)} ({', '.join(sorted({hosts[rank] for rank in silent}))})"
        words.append(f"{said} gives no sign: frozen, ended, or its host is out of reach")
    behind = min((report.progress for report in reports), default=None)
    late = [report for report in reports if report.progress == behind]
    others = [report for report in reports if report.progress != behind]
    if others and not silent:
        for report in late[:4]:
            words.append(f"rank {report.rank} ({report.host}) is still in {report.place}")
        it = "it" if len(late) == 1 else "them"
    else:
        others, it = list(reports), "it" if len(silent) == 1 else "them"
    places: dict[str, list[int]] = {}
    for report in others:
        places.setdefault(report.place, []).append(report.rank)
    waiting = [f"{_ranks(ranks)} in {place}" for place, ranks in places.items()]
    if not words:
        return f"all {len(hosts)} ranks wait in {'; '.join(places)}: for the network, or for a device"
    if waiting:
        words.append(f"waiting for {it}: {', '.join(waiting)}")
    return "; ".join(words)
