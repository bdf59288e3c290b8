"""A step that does not end: told with who waits for whom, and after a while ended, so that a launcher starts all again.

Called from the watchdog's thread. Nothing here asks another process for anything: they hang too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from bessemer.guard.hang import Hang
from bessemer.guard.waits import Report, give_sign, leave_report, wait_for_reports, who_waits, without_sign
from bessemer.parallel.health import last_collective, recorded
from bessemer.train.job import Job

EXIT = 1  # a fault: torchrun starts all workers again


class Hung:
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
            job.event("hang", step=found.step, reason=finding.symptom, cause=finding.cause, fix=finding.fix)
            return
        logs, size = job.run.folder / "logs", job.world.size
        text = recorded()
        leave_report(logs, self._report(found, text), found.stacks, text)
        reports = wait_for_reports(logs, size, self._start)
        who = who_waits(reports, self._hosts)
        job.event(
            "hang", step=found.step, reason=f"{finding.symptom}: {who}", cause=finding.cause,
            fix="logs/hang-rank-N.txt have the stacks of each rank: look at the one that the others wait for",
            ranks=[
                {"rank": r.rank, "host": r.host, "step": r.step, "phase": r.phase, "collective": r.collective}
                for r in reports
            ],
        )  # fmt: skip
        if job.world.rank == min((report.rank for report in reports), default=0) and not job.world.main:
            print(f"rank {job.world.rank}: {who}", file=sys.stderr, flush=True)  # the first one cannot say it

    def give_sign(self, beat: int) -> None:
        with contextlib.suppress(OSError):  # on a full disk the others say that it gives no sign
            give_sign(self.job.run.folder / "logs", self.job.world.rank, self._start, beat)

    def frozen(self, beat: int) -> bool:
        return bool(without_sign(self.job.run.folder / "logs", self.job.world.size, self._start, beat))

    def paused(self, step: int, seconds: float) -> None:
        """This process was stopped, or held up as a whole; of several, the others have said that it gave no sign."""
        reason = f"the process did not run for {seconds:.0f} s after step {step}"
        cause = "it was stopped (SIGSTOP, a debugger), the machine was suspended, or it was starved of processor time"
        self.job.event("paused", step=step, reason=reason, cause=cause)

    def _report(self, found: Hang, text: str) -> Report:
        world, where = self.job.world, self.job.where
        collectives, words = last_collective(text)
        return Report(
            self._start, world.rank, socket.gethostname(), os.getpid(), where.step, where.phase, where.entered,
            collectives, words, round(found.waited_s, 3),
        )  # fmt: skip

    def end(self, found: Hang) -> NoReturn:
        """Without another word to anybody: what hangs cannot be interrupted otherwise. The last checkpoint stands."""
        reason = f"hung for {found.waited_s:.0f} s after step {found.step}; the processes end, to be started again"
        self.job.event("failed", reason=reason)
        self.job.run.sync()
        print(f"rank {self.job.world.rank}: {reason}", file=sys.stderr, flush=True)
        os._exit(EXIT)
