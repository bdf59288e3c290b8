"""Control of a live run from outside: one small file for each request in the run's folder `control/`.

A request is renamed into place, so that it is complete when it is seen. Rank 0 reads it between two steps, all ranks
follow in the same step, and an event tells what became of it. Signals would not do: launchers swallow them.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import math
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.run.lock import read_owner
from bessemer.storage import write_atomic

FOLDER = "control"
EVENT = "control"  # the kind of the event that answers a request
# What can be asked, and what its value means; None: it takes none.
ACTIONS: dict[str, str | None] = {
    "save": None,
    "evaluate": None,
    "stop": None,
    "pause": None,
    "resume": None,
    "lr": "factor on the schedule's learning rate from now on",
    "rollback": "step to go back to; the newest healthy state if left out",
    "profile": "steps to profile; 10 if left out",
}
MOST_PROFILED = 100  # steps: a trace grows by megabytes a step
MAX_BYTES, MAX_WAITING = 4096, 64
POLL_S = 0.5


@dataclass(frozen=True)
class ControlRequest:
    """One request: what, with which value, by whom and when."""

    id: str
    action: str
    value: float | None
    who: str
    time: float

    @staticmethod
    def make(action: str, value: Any = None, who: str = "") -> ControlRequest:
        """A checked request. UserError for an unknown action or a value that it cannot have."""
        if action not in ACTIONS:
            raise UserError(f"{action}: no such action; use one of {', '.join(ACTIONS)}")
        try:
            number = None if value is None else float(value)
        except (TypeError, ValueError):
            raise UserError(f"{action} {value}: the value is not a number") from None
        if action == "lr" and (number is None or not 0 < number <= 100):
            raise UserError("lr needs a factor above 0 and at most 100, such as 0.5")
        if action == "rollback" and number is not None and not (math.isfinite(number) and number >= 0):
            raise UserError(f"rollback {value}: the step is not a number from 0 up")
        if action == "profile" and number is not None and number not in range(1, MOST_PROFILED + 1):
            raise UserError(f"profile {value}: the number of steps is from 1 to {MOST_PROFILED}")
        if ACTIONS[action] is None and number is not None:
            raise UserError(f"{action} takes no value")
        who = who or f"{getpass.getuser()} on {socket.gethostname()}"
        return ControlRequest(uuid.uuid4().hex[:12], action, number, who[:200], round(time.time(), 3))


def write_request(run: Run, request: ControlRequest) -> None:
    """Hand a request to a live run. UserError if the run would not read it."""
    if (state := run.state) != "running":
        raise UserError(f"{run.name} is not running ({state}): only a live run reads requests")
    folder = run.folder / FOLDER
    if folder.is_dir() and sum(1 for _ in folder.glob("*.json")) >= MAX_WAITING:
        raise UserError(f"{run.name}: {MAX_WAITING} requests wait already")
    name = f"{time.time_ns()}-{request.id}.json"  # names in order of time, also of two written in one millisecond
    write_atomic(folder / name, json.dumps(asdict(request)), parents=True, durable=False)


class RequestReader:
    """Reads the requests of a run, oldest first. Those from before this start are too late, and removed."""

    def __init__(self, folder: Path) -> None:
        owner = read_owner(folder)
        self.folder, self._due_s = folder / FOLDER, 0.0
        self._returned: ControlRequest | None = None
        self._since = owner.since if owner else time.time()

    def put_back(self, request: ControlRequest) -> None:
        """A request that could not be obeyed yet is the next one again."""
        self._returned = request

    def next(self) -> ControlRequest | None:
        """The oldest request, which is removed; at most one look at the folder every POLL_S."""
        now = time.monotonic()
        if request := self._returned:
            self._returned = None
            return request
        if now < self._due_s:
            return None
        self._due_s = now + POLL_S
        oldest = next(self._waiting(), None)
        if oldest is not None:
            self._due_s = now  # there may be more
        return oldest

    def _waiting(self) -> Iterator[ControlRequest]:
        with contextlib.suppress(OSError):
            for path in sorted(self.folder.glob("*.json")):
                content = path.read_bytes()[: MAX_BYTES + 1]
                path.unlink()
                with contextlib.suppress(ValueError, TypeError, UserError, KeyError):
                    given = json.loads(content)
                    request = ControlRequest.make(given["action"], given["value"], str(given["who"]) or "unknown")
                    if float(given["time"]) >= self._since:
                        yield ControlRequest(
                            str(given["id"])[:40], request.action, request.value, request.who, given["time"]
                        )


def answer_of(run: Run, identifier: str, seconds: float) -> dict[str, Any] | None:
    """Wait for the event that answers a request."""
    give_up = time.monotonic() + seconds
    while True:
        for event in run.events(EVENT):
            if event.get("id") == identifier:
                return event
        if time.monotonic() > give_up:
            return None
        time.sleep(0.2)
