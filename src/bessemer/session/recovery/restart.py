"""Relaunches by torchrun, and the response to a hang.

torchrun relaunches all workers whatever their exit code was, so a run that ended for good must be recognised. A hang is
reported with the ranks that wait for each other; if it lasts, the process ends so that the launcher starts all again.
The hang response runs in the watchdog's thread and asks no other process for anything: they may hang too.
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
from bessemer.parallel.world import last_collective, recorded_collectives
from bessemer.run.directory import Run, RunWriter
from bessemer.run.journal import last_record, to_number
from bessemer.run.lock import HEARTBEAT_S, STALE_S, read_owner
from bessemer.train.job import Job

# Final events after which a relaunch would end the same way; an unexpected failure has no step.
EXIT_CODES = {"refused": 2, "failed": 1, "stopped": 1}


def under_launcher() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RESTART_COUNT" in os.environ


def is_relaunched() -> bool:
    """Whether torchrun has started this process in place of one that failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def ended_before(folder: Path) -> int:
    """The exit code with which earlier processes of the same launcher ended for good; 0 if they did not."""
    if not is_relaunched():
        return 0
    last = last_record(Run(folder).events_path) or {}
    kind, ended_s = str(last.get("kind")), to_number(last.get("time")) or 0.0
    for_good = kind == "refused" or "step" in last
    try:
        launched_s = psutil.Process(os.getppid()).create_time()
    except psutil.Error:
        return 0
    return EXIT_CODES.get(kind, 0) if for_good and ended_s > launched_s else 0


def open_run(folder: Path) -> RunWriter:
    """Opens the run for writing. If rank 0 died with its host, another host takes over the lock once its heartbeat is
    stale."""
    give_up = time.monotonic() + STALE_S + 2 * HEARTBEAT_S
    while True:
        try:
            return RunWriter(folder)
        except UserError:
            owner = read_owner(folder)
            elsewhere = owner is not None and owner.host != socket.gethostname()
            if not (is_relaunched() and elsewhere and time.monotonic() < give_up):
                raise
        time.sleep(1.0)


HANG_EXIT_CODE = 1  # torchrun relaunches all workers


class HangResponse:
    """Reports hangs of one start of a run. All ranks create it together."""

    def __init__(self, job: Job, log: Callable[[str], None]) -> None:
        self.job, self._log = job, log
        self._hosts = job.world.gather(socket.gethostname())
        self._start = job.world.agree(time.time())

    def report(self, hang: Hang) -> None:
        """Reports the stacks of this process; with several ranks also where each rank waits."""
        job, finding = self.job, hang.finding()
        if job.world.size == 1:
            self._log(hang.stacks)
            job.recorder.event("hang", step=hang.step, reason=finding.symptom, cause=finding.cause, fix=finding.fix)
            return
        logs, size = job.recorder.run.folder / "logs", job.world.size
        collectives = recorded_collectives()
        write_wait_report(logs, self._wait_report(hang, collectives), hang.stacks, collectives)
        reports = collect_wait_reports(logs, size, self._start)
        description = describe_hang(reports, self._hosts)
        job.recorder.event(
            "hang", step=hang.step, reason=f"{finding.symptom}: {description}", cause=finding.cause,
            fix="logs/hang-rank-N.txt hold the stacks of each rank: look at the one that the others wait for",
            ranks=[
                {"rank": r.rank, "host": r.host, "step": r.step, "phase": r.phase, "collective": r.collective}
                for r in reports
            ],
        )  # fmt: skip
        if job.world.rank == min((report.rank for report in reports), default=0) and not job.world.main:
            print(f"rank {job.world.rank}: {description}", file=sys.stderr, flush=True)  # rank 0 cannot report it

    def write_heartbeat(self, beat: int) -> None:
        with contextlib.suppress(OSError):  # a full disk: the others report this rank as silent
            write_heartbeat(self.job.recorder.run.folder / "logs", self.job.world.rank, self._start, beat)

    def frozen(self, beat: int) -> bool:
        return bool(
            ranks_without_heartbeat(self.job.recorder.run.folder / "logs", self.job.world.size, self._start, beat)
        )

    def report_pause(self, step: int, seconds: float) -> None:
        """Reports that this process was stopped for a while."""
        reason = f"the process did not run for {seconds:.0f} s after step {step}"
        cause = "it was stopped (SIGSTOP, a debugger), the machine was suspended, or it was starved of processor time"
        self.job.recorder.event("paused", step=step, reason=reason, cause=cause)

    def _wait_report(self, hang: Hang, recorded_collectives: str) -> WaitReport:
        world, phases = self.job.world, self.job.guard.phase_tracker
        collectives, last = last_collective(recorded_collectives)
        return WaitReport(
            self._start, world.rank, socket.gethostname(), os.getpid(), phases.step, phases.phase, phases.entered,
            collectives, last, round(hang.waited_s, 3),
        )  # fmt: skip

    def end_process(self, hang: Hang) -> NoReturn:
        """Exits at once: a hanging call cannot be interrupted otherwise. The last checkpoint is intact."""
        reason = f"hung for {hang.waited_s:.0f} s after step {hang.step}; the processes end, to be started again"
        self.job.recorder.event("failed", reason=reason)
        self.job.recorder.run.sync()
        print(f"rank {self.job.world.rank}: {reason}", file=sys.stderr, flush=True)
        os._exit(HANG_EXIT_CODE)
