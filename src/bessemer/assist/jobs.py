"""Runs verbs in separate processes: a slow call becomes a job, whose answer a later call reads.

Jobs end with the server, except training, which continues as it would in a terminal.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.assist.access import Level, redact
from bessemer.errors import UserError
from bessemer.parent import PARENT, child_environment

TOKEN_VARIABLE = "BESSEMER_MCP_TOKEN"
OUTLIVES_SERVER = ("train",)
LONGEST_ANSWER = 1_000_000  # characters
MOST_JOBS = 8  # at a time
POLL_S = 0.1
END_S = 10.0
_FRACTION = re.compile(r"\b(\d[\d,]*)/(\d[\d,]*)\b")
Report = Callable[[float, float | None, str], Awaitable[None]]


@dataclass
class VerbJob:
    """A verb in a process. Its output goes to files, because pipes would fill while nobody reads."""

    id: str
    verb: str
    level: Level
    command: list[str]
    process: subprocess.Popen[bytes]
    folder: Path
    began_s: float

    @property
    def state(self) -> str:
        code = self.process.poll()
        return "running" if code is None else "finished" if code >= 0 else "cancelled"

    def output(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8", errors="replace")

    def last_line(self) -> str:
        """The newest line of progress."""
        lines = self.output("stderr")[-4000:].strip().splitlines()
        return redact(lines[-1]) if lines else ""

    def to_json(self) -> dict[str, Any]:
        return {
            "job": self.id, "verb": self.verb, "state": self.state, "seconds": round(time.time() - self.began_s, 1),
            "progress": self.last_line(),
        }  # fmt: skip


@dataclass(frozen=True)
class VerbAnswer:
    """What a finished verb printed. `value` is None if it printed no JSON; `text` is the JSON as it was printed."""

    code: int
    text: str
    value: Any
    error: str


class VerbJobs:
    """The processes of one server."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.jobs: dict[str, VerbJob] = {}
        self._numbers = itertools.count(1)
        self._folder = tempfile.TemporaryDirectory(prefix="bessemer-mcp-")

    def start(self, verb: str, level: Level, words: list[str]) -> VerbJob:
        running = sum(job.state == "running" for job in self.jobs.values())
        if running >= MOST_JOBS:
            raise UserError(f"{running} jobs are running already: wait for one or cancel one")
        job_id = f"job-{next(self._numbers)}"
        folder = Path(self._folder.name) / job_id
        folder.mkdir()
        environment = dict(os.environ) if verb in OUTLIVES_SERVER else child_environment()
        environment.pop(TOKEN_VARIABLE, None)
        if verb in OUTLIVES_SERVER:
            environment.pop(PARENT, None)
        command = [sys.executable, "-m", "bessemer", *words]
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
        self.jobs[job_id] = VerbJob(job_id, verb, level, command, process, folder, time.time())
        return self.jobs[job_id]

    def get(self, job_id: str) -> VerbJob:
        if job_id not in self.jobs:
            raise UserError(f"{job_id}: no such job; there are {', '.join(self.jobs) or 'none'}")
        return self.jobs[job_id]

    async def wait(self, job: VerbJob, seconds: float, report: Report) -> VerbAnswer | None:
        """The answer, or None if the verb still runs after these seconds."""
        import anyio

        end_s, shown = time.monotonic() + seconds, ""
        while job.process.poll() is None:
            if time.monotonic() >= end_s:
                return None
            await anyio.sleep(POLL_S)
            if (line := job.last_line()) and line != shown:
                shown = line
                await report(*_progress(line, time.time() - job.began_s), line)
        return read_answer(job)

    def cancel(self, job: VerbJob) -> None:
        """Ask the process to end: training saves first."""
        with suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGTERM)

    def close(self) -> None:
        """End all jobs but training."""
        ending = [job for job in self.jobs.values() if job.state == "running" and job.verb not in OUTLIVES_SERVER]
        for job in ending:
            self.cancel(job)
        for job in ending:
            try:
                job.process.wait(END_S)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(job.process.pid, signal.SIGKILL)
                job.process.wait()
        self._folder.cleanup()


def _progress(line: str, seconds: float) -> tuple[float, float | None]:
    """Done and total, if the line has them as 12/290; else the seconds so far."""
    for done, total in _FRACTION.findall(line):
        counts = int(done.replace(",", "")), int(total.replace(",", ""))
        if 0 <= counts[0] <= counts[1]:
            return float(counts[0]), float(counts[1])
    return round(seconds, 1), None


def read_answer(job: VerbJob) -> VerbAnswer:
    """What a finished verb printed, without secrets."""
    code, text = job.process.wait(), redact(job.output("stdout").strip())
    error = redact(job.output("stderr").strip())[-4000:]
    if len(text) > LONGEST_ANSWER:
        return VerbAnswer(code, "", None, f"the answer has {len(text):,} characters: ask for less of it")
    try:
        return VerbAnswer(code, text, json.loads(text), error)
    except ValueError:
        pass
    try:  # one JSON object a line
        return VerbAnswer(code, text, [json.loads(line) for line in text.splitlines()] or None, error)
    except ValueError:
        return VerbAnswer(code, text, None, error or text[-4000:])
