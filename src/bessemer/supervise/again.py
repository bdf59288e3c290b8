"""A start that a launcher makes by itself after a fault: when it is not wanted, and whose lock it may take over.

torchrun starts all workers again whatever their exit code was. A run that ended for a reason would end for it again.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import psutil

from bessemer.errors import UserError
from bessemer.run.directory import Run, RunWriter
from bessemer.run.journal import last_record, number
from bessemer.run.lock import HEARTBEAT_S, STALE_S, read_owner

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
