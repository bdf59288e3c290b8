"""Progress of long work and of a training step, and standard streams that are closed or fail.

Nothing is shown for the first seconds. Then a terminal gets a line that is redrawn in place, with a bar if the total is
known; a pipe or a log gets a plain line from time to time.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.table import Table

QUIET_S = 3.0  # shorter work shows nothing
EVERY_S = 10.0  # between plain lines
_NUMBERS = re.compile(r"[\d.,:]+")


class ProgressReport(Protocol):
    """Reports the current activity: `report("writing tensors", 12, 290)`. Costs a microsecond."""

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None: ...


def silent(what: str, done: int = 0, total: int = 0) -> None:
    """Shows nothing."""


@dataclass
class Activity:
    """What is being done, since when (monotonic clock), and how much of it is done if that is known."""

    what: str = ""
    done: int = 0
    total: int = 0
    began_s: float = field(default_factory=time.monotonic)
    last_s: float = field(default_factory=time.monotonic)  # when `done` was reported

    def next(self, what: str, done: int = 0, total: int = 0) -> Activity:
        """The same activity a little later, or a new one. Texts that differ only in numbers are the same activity."""
        same = _NUMBERS.sub("", what) == _NUMBERS.sub("", self.what)
        return Activity(what, done, total, self.began_s) if same else Activity(what, done, total)

    def left_s(self, now_s: float) -> float | None:
        """Seconds left at the rate so far; None if unknown."""
        if not (self.done and self.total):
            return None
        each_s = (self.last_s - self.began_s) / self.done
        return max(0.0, each_s * (self.total - self.done) - (now_s - self.last_s))

    def line(self, now_s: float) -> str:
        """`writing tensors  12/290  4%  13s, 5m left`."""
        from bessemer.spec.quantity import human_time  # loads pydantic, which `--help` must not wait for

        counted = f"  {self.done:,}/{self.total:,}  {self.done / self.total:.0%}" if self.total else ""
        elapsed_s, left_s = now_s - self.began_s, self.left_s(now_s)
        left = "" if left_s is None else f", {human_time(left_s)} left"
        return f"{self.what}{counted}" + (f"  {human_time(elapsed_s)}{left}" if elapsed_s >= QUIET_S else "")

    def render(self, now_s: float) -> Table:
        """For a terminal: the line, and a bar if the total is known."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 1))
        bar = [ProgressBar(total=self.total, completed=self.done, width=24)] if self.total else []
        grid.add_row(*bar, Text(self.line(now_s), style="dim", no_wrap=True, overflow="ellipsis"))
        return grid


class PlainLines:
    """Shows the current activity as a line after QUIET_S and then every EVERY_S. It runs in a thread, so that a single
    call that takes minutes is shown too. Close it, or use `with`."""

    def __init__(self, show: Callable[[str], None], quiet_s: float = QUIET_S, every_s: float = EVERY_S) -> None:
        self.show, self.quiet_s, self.every_s = show, quiet_s, every_s
        self.current = Activity()
        self.shown_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="activity", daemon=True)
        self._thread.start()

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
        self.current = self.current.next(what, done, total)

    def due(self, now_s: float) -> str | None:
        """The line to show now, if any."""
        current = self.current
        if not current.what or now_s < max(current.began_s + self.quiet_s, self.shown_s + self.every_s):
            return None
        self.shown_s = now_s
        return current.line(now_s)

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self.quiet_s)):
            if line := self.due(time.monotonic()):
                self.show(line)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def working(what: str, out: TextIO | None = None) -> Iterator[ProgressReport]:
    """Shows on `out` (default: stderr) that `what` is being done while the block runs. The block gets a function to
    report details."""
    out = out or sys.stderr
    if out is None:  # closed by the caller
        yield silent
    elif out.isatty():
        with _bar(what, out) as report:
            yield report
    else:

        def show(line: str) -> None:
            print(line, file=out, flush=True)

        with PlainLines(show) as lines:
            lines(what)
            yield lines


@contextmanager
def _bar(what: str, out: TextIO) -> Iterator[ProgressReport]:
    current = Activity(what)

    def report(what: str, done: int = 0, total: int = 0) -> None:
        nonlocal current
        current = current.next(what, done, total)

    ended = threading.Event()

    def watch() -> None:
        if ended.wait(QUIET_S):
            return
        from rich.console import Console
        from rich.live import Live

        # What the block prints goes above the bar; a stdout that is a file is left alone.
        with Live(
            get_renderable=lambda: current.render(time.monotonic()), console=Console(file=out), transient=True,
            refresh_per_second=4, redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        ):  # fmt: skip
            ended.wait()

    thread = threading.Thread(target=watch, name="activity", daemon=True)
    thread.start()
    try:
        yield report
    finally:
        ended.set()
        thread.join()


@dataclass
class StepProgress:
    """A step that is being computed. Times are the host's; a GPU may lag behind."""

    step: int
    total: int  # micro-batches
    tokens: int  # of all micro-batches
    began_s: float
    done: int = 0
    first_s: float = 0.0  # when the first micro-batch was done: it may have compiled something
    last_s: float = 0.0

    def advance(self, done: int, now_s: float) -> None:
        self.first_s = self.first_s or now_s
        self.done, self.last_s = done, now_s

    @property
    def share(self) -> float:
        return self.done / max(1, self.total)

    @property
    def micro_batch_s(self) -> float | None:
        """Mean seconds of a micro-batch without the first one; None before the second."""
        return max(1e-9, self.last_s - self.first_s) / (self.done - 1) if self.done > 1 else None

    @property
    def tokens_per_s(self) -> float | None:
        seconds = self.micro_batch_s
        return None if seconds is None else self.tokens / self.total / seconds

    def left_s(self, total_steps: int) -> float | None:
        """Seconds to the end of a run of `total_steps` steps of this size."""
        seconds = self.micro_batch_s
        return None if seconds is None else seconds * (self.total * max(1, total_steps - self.step) - self.done)

    def line(self, total_steps: int) -> str:
        """`step 1/6,104  micro-batch 3/16  812 tok/s  eta 17h 10m`."""
        from bessemer.spec.quantity import human_time

        parts = [f"step {self.step + 1:,}/{total_steps:,}", f"micro-batch {self.done}/{self.total}"]
        rate, left = self.tokens_per_s, self.left_s(total_steps)
        if rate is not None and left is not None:
            parts += [f"{rate:,.0f} tok/s", f"eta {human_time(left)}"]
        return "  ".join(parts)


def open_missing_streams() -> None:
    """Opens the null device for a standard stream that was closed at the start (`>&-`). Otherwise the next file that
    is opened would become the standard output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)
        try:
            os.fstat(number)
        except OSError:  # the descriptor is still free
            os.dup2(opened, number)
            os.close(opened)
            opened = number
        os.set_inheritable(opened, True)
        stream = os.fdopen(opened, "w" if number else "r", encoding="utf-8", closefd=False)
        setattr(sys, name, stream)


def silence(stream: IO[str]) -> None:
    """Redirects a stream to the null device, with what it still buffers, so that no later flush fails."""
    with suppress(OSError, ValueError):  # ValueError: not a real file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()


def output_fault(probe: str = "") -> OSError | None:
    """The error of writing to stdout, which is then silenced; None if the output was written. An unbuffered stream
    has raised its error already: `probe` is written to raise it again."""
    try:
        sys.stdout.write(probe)
        sys.stdout.flush()
    except OSError as error:
        silence(sys.stdout)
        return error
    return None
