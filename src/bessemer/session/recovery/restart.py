"""A start that a launcher makes by itself after a fault: when it is not wanted, and whose lock it may take over.

torchrun starts all workers again whatever their exit code was. A run that ended for a reason would end for it again.

A step that does not end: told with who waits for whom, and after a while ended, so that a launcher starts all again.

Called from the watchdog's thread. Nothing here asks another process for anything: they hang too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil

from bessemer.errors import UserError
from bessemer.guard.watchdog import (
    Hang,
    WaitReport,
    collect_wait_reports,
    describe_hang,
    ranks_without_heartbeat,
    write_heartbeat,
    write_wait_report,
)
from bessemer.parallel.world import last_collective, recorded
from bessemer.run.directory import Run, RunWriter
from bessemer.run.journal import last_record, number
from bessemer.run.lock import HEARTBEAT_S, STALE_S, read_owner
from bessemer.train.job import Job

# Last words after which the same start would come to the same end; an unforeseen fault has no step.
CODES = {"refused": 2, "failed": 1, "stopped": 1}


def under_launcher() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RESTART_COUNT" in os.environ


def restarted() -> bool:
    """Whether torchrun has started this process in the place of one that failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def ended_before(folder: Path) -> int:
    """The exit code with which the processes before these ended for good under the same launcher; 0 if they did not."""
    if not restarted():
        return 0
    last = last_record(Run(folder).events_path) or {}
    kind, told_s = str(last.get("kind")), number(last.get("time")) or 0.0
    for_good = kind == "refused" or "step" in last
    try:
        launched_s = psutil.Process(os.getppid()).create_time()
    except psutil.Error:
        return 0
    return CODES.get(kind, 0) if for_good and told_s > launched_s else 0


def open_again(folder: Path) -> RunWriter:
    """The run for writing. Where the first process died with its host, another host takes over: after a while, since
    only silence tells a dead host from one that is still writing."""
    give_up = time.monotonic() + STALE_S + 2 * HEARTBEAT_S
    while True:
        try:
            return RunWriter(folder)
        except UserError:
            owner = read_owner(folder)
            elsewhere = owner is not None and owner.host != socket.gethostname()
            if not (restarted() and elsewhere and time.monotonic() < give_up):
                raise
        time.sleep(1.0)


EXIT = 1  # a fault: torchrun starts all workers again


class HangResponse:
    """The hangs of one start of a run. Made by all processes together."""

    def __init__(self, job: Job, log: Callable[[str], None]) -> None:
        self.job, self._log = job, log
        self._hosts = job.world.gather(socket.gethostname())
        self._start = job.world.agree(time.time())

    def tell(self, found: Hang) -> None:
        """The stacks of this process, and of several what each is in."""
        job, finding = self.job, found.finding()
        if job.world.size == 1:
            self._log(found.stacks)
            job.recorder.event("hang", step=found.step, reason=finding.symptom, cause=finding.cause, fix=finding.fix)
            return
        logs, size = job.recorder.run.folder / "logs", job.world.size
        text = recorded()
        write_wait_report(logs, self._report(found, text), found.stacks, text)
        reports = collect_wait_reports(logs, size, self._start)
        who = describe_hang(reports, self._hosts)
        job.recorder.event(
            "hang", step=found.step, reason=f"{finding.symptom}: {who}", cause=finding.cause,
            fix="logs/hang-rank-N.txt have the stacks of each rank: look at the one that the others wait for",
            ranks=[
                {"rank": r.rank, "host": r.host, "step": r.step, "phase": r.phase, "collective": r.collective}
                for r in reports
            ],
        )  # fmt: skip
        if job.world.rank == min((report.rank for report in reports), default=0) and not job.world.main:
            print(f"rank {job.world.rank}: {who}", file=sys.stderr, flush=True)  # the first one cannot say it

    def write_heartbeat(self, beat: int) -> None:
        with contextlib.suppress(OSError):  # on a full disk the others say that it gives no sign
            write_heartbeat(self.job.recorder.run.folder / "logs", self.job.world.rank, self._start, beat)

    def frozen(self, beat: int) -> bool:
        return bool(
            ranks_without_heartbeat(self.job.recorder.run.folder / "logs", self.job.world.size, self._start, beat)
        )

    def paused(self, step: int, seconds: float) -> None:
        """This process was stopped, or held up as a whole; of several, the others have said that it gave no sign."""
        reason = f"the process did not run for {seconds:.0f} s after step {step}"
        cause = "it was stopped (SIGSTOP, a debugger), the machine was suspended, or it was starved of processor time"
        self.job.recorder.event("paused", step=step, reason=reason, cause=cause)

    def _report(self, found: Hang, text: str) -> WaitReport:
        world, where = self.job.world, self.job.guard.phase_tracker
        collectives, words = last_collective(text)
        return WaitReport(
            self._start, world.rank, socket.gethostname(), os.getpid(), where.step, where.phase, where.entered,
            collectives, words, round(found.waited_s, 3),
        )  # fmt: skip

    def end(self, found: Hang) -> NoReturn:
        """Without another word to anybody: what hangs cannot be interrupted otherwise. The last checkpoint stands."""
        reason = f"hung for {found.waited_s:.0f} s after step {found.step}; the processes end, to be started again"
        self.job.recorder.event("failed", reason=reason)
        self.job.recorder.run.sync()
        print(f"rank {self.job.world.rank}: {reason}", file=sys.stderr, flush=True)
        os._exit(EXIT)
