"""Views of a running training: RunView only writes logs/rank-N.log, LineView also prints plain lines (pipes, CI),
LiveView redraws a panel in a terminal, with events scrolling above it.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bessemer.observe.format import (
    TOKEN_OBJECTIVES,
    event_line,
    metrics_of,
    perplexity,
    resume_hint,
    sparkline,
    step_line,
    validation_line,
)
from bessemer.observe.progress import EVERY_S, QUIET_S, Activity, PlainLines, StepProgress, silence
from bessemer.run.directory import LOSS_WINDOW, Run, mean_loss
from bessemer.run.journal import last_records
from bessemer.spec.quantity import human_bytes, human_time

LONG_STEP_S = 2.0  # longer steps show their micro-batches


class RunView:
    """Keeps the recent numbers and the log; subclasses show them."""

    line_every_s = 5.0

    def __init__(self, spec_path: str | None = None) -> None:
        self.spec_path = spec_path
        self.total = 0
        self.recent: deque[dict[str, Any]] = deque(maxlen=LOSS_WINDOW)
        self._averaged: deque[dict[str, Any]] = deque(maxlen=LOSS_WINDOW)  # also of earlier starts of the run
        self.losses: list[float] = []
        self.last_validation: dict[str, Any] | None = None
        self.expected_rate: float | None = None  # tokens/s of the plan
        self.objective = "pretrain"
        self.forecaster: Callable[[dict[str, Any]], str] | None = None  # the final loss that a record suggests
        self.forecast = ""
        self.vetoes = self.clipped = self.steps_seen = 0
        self.current_step: StepProgress | None = None
        self.doing = Activity()  # between steps
        self.output_works = True
        self._log: TextIO | None = None
        self._run: Run | None = None
        self._line_due = self._micro_line_due = self._progress_due = 0.0
        self._stride = 1

    @contextmanager
    def following(self, run: Run, rank: int = 0) -> Iterator[None]:
        """Opens the log, and the display if there is one."""
        path = run.folder / "logs" / f"rank-{rank}.log"
        # A file name in a message may not be valid text: it is written with escapes.
        self._log, self._run = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1), run
        self.open()
        try:
            yield
        finally:
            self.close()
            with contextlib.suppress(OSError):  # buffered lines that a full disk refused
                self._log.close()
            self._log = self._run = None

    def open(self) -> None: ...
    def close(self) -> None: ...

    def log(self, text: str) -> None:
        """Writes to the log file, with the time. A full disk loses the line but does not stop the run."""
        if self._log:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            with contextlib.suppress(OSError):
                self._log.writelines(f"{stamp}  {line}\n" for line in text.splitlines())

    def show(self, text: str) -> None:
        """Shows a line to the user. The base class has no display."""

    def say(self, text: str) -> None:
        self.log(text)
        if not self.output_works:
            return
        try:
            self.show(text)
        except OSError as error:  # the run and its log continue
            self.output_works = False
            self.on_output_error(error)

    def on_output_error(self, error: OSError) -> None:
        """The output failed: its disk is full, or its reader (`| head`) or terminal is gone."""

    def activity(self, what: str, done: int = 0, total: int = 0) -> None:
        """Sets what is being done between steps, and how much of it; an empty text ends it."""
        self.doing = self.doing.next(what, done, total)

    def progress(self, text: str) -> None:
        """Progress of the preparation. New work is a line at once, its progress a line from time to time."""
        previous, now = self.doing, time.monotonic()
        self.activity(text)
        if self.doing.began_s != previous.began_s or now >= self._progress_due:
            self._progress_due = now + EVERY_S
            self.say(f"data  {text}")

    def planned(self, rows: list[tuple[str, str, str, str]], summary: str) -> None:
        """Logs the decisions (key, value, reason, source) and shows one line that summarizes them."""
        for key, value, reason, source in rows:
            self.log(f"plan  {key} = {value}  ({reason}; {source})")
        self.say(f"plan  {summary}")

    def micro_batch(self, step: int, done: int, total: int, tokens: int) -> None:
        """Progress within a step. A long step gets lines of its own, fewer once the step rate is known."""
        now = time.monotonic()
        if self.current_step is None or done == 0:
            self.current_step = StepProgress(step, total, tokens, now)
            self.activity("" if self.recent else f"computing step {step + 1:,}")  # later the step rate tells
            return
        self.current_step.advance(done, now)
        if self.doing.what:
            self.activity("")
        wait_s = LONG_STEP_S if done > 1 else self.line_every_s  # the first one may include compilation
        if now >= max(self._micro_line_due, self.current_step.began_s + wait_s) and total > 1:
            self._micro_line_due = now + self.line_every_s * (6 if self.recent else 1)
            self.show_step(self.current_step.line(self.total))

    def step(self, record: dict[str, Any]) -> None:
        self.recent.append(record)
        self._averaged.append(record)
        self.steps_seen += 1
        if self.forecaster:
            self.forecast = self.forecaster(record)
        self.vetoes += record["veto"] is not None
        self.clipped += record["clipped"]
        if self.steps_seen % self._stride == 0 and isinstance(record["loss"], float):
            self.losses.append(record["loss"])
            if len(self.losses) > 4096:  # a long run: keep every second point
                self.losses, self._stride = self.losses[::2], self._stride * 2
        now = time.monotonic()
        if now >= self._line_due:
            self._line_due = now + self.line_every_s
            line = step_line(record, self.total, self.smooth(), self.last_validation, self.objective)
            self.show_step(line + (f"  forecast {self.forecast}" if self.forecast else ""))

    def show_step(self, line: str) -> None:
        self.log(line)

    def smooth(self) -> dict[str, float]:
        """The mean loss as `bessemer runs` shows it, and rates over the recent steps of this start."""
        recent = list(self.recent)  # copied: the display reads in another thread while steps arrive
        averaged = list(self._averaged)
        loss = mean_loss(averaged)
        seconds = sum(record["step_s"] for record in recent) or 1e-9
        tokens = sum(record["tokens_per_s"] * record["step_s"] for record in recent)
        return {
            "loss": math.nan if loss is None else loss,
            "loss_steps": len(averaged),
            "rate": tokens / seconds,
            "of_plan": tokens / seconds / self.expected_rate if self.expected_rate else 0.0,
            "mfu": sum(record["mfu"] * record["step_s"] for record in recent) / seconds,
            "wait": sum(record["data_wait_s"] for record in recent) / seconds,
            "left_s": max(0, self.total - recent[-1]["step"] - 1) * seconds / len(recent),
        }

    def validation(self, record: dict[str, Any]) -> None:
        self.last_validation = record
        self.say(validation_line(record))

    def event(self, record: dict[str, Any]) -> None:
        self.total = record.get("total_steps", self.total)
        if record["kind"] in ("started", "rollback") and self._run:  # steps that were cut leave the mean
            self._averaged = deque(last_records(self._run.steps_path, LOSS_WINDOW), maxlen=LOSS_WINDOW)
        line = event_line(record)
        if line:
            (self.log if record["kind"] in ("saved", "uploaded", "scene_saved") else self.say)(line)

    def outcome(self, kind: str, reason: str, step: int, run: Run) -> None:
        last = self.last_validation
        numbers = ""
        if last:
            numbers = f"  validation loss {last['loss']:.4f}"
            if "bits_per_byte" in last:
                numbers += f", {last['bits_per_byte']:.3f} bits per byte"
            elif "accuracy" in last:
                numbers += f", accuracy {last['accuracy']:.1%}"
        self.say(f"{kind}  step {step:,}  {reason}{numbers}  run: {run.folder}")
        if kind == "finished":
            if self.objective in TOKEN_OBJECTIVES:
                self.say(f"try   bessemer generate {run.folder} --prompt '...'")
        else:
            self.say(resume_hint(run.folder, self.spec_path))


class LineView(RunView):
    """Prints plain lines, for pipes and CI."""

    def __init__(self, spec_path: str | None = None, line_every_s: float = 5.0, out: TextIO | None = None) -> None:
        super().__init__(spec_path)
        self.line_every_s = line_every_s
        self.out: TextIO = out or sys.stdout
        self._waiting: PlainLines | None = None

    def open(self) -> None:
        self._waiting = PlainLines(self.say)

    def close(self) -> None:
        if self._waiting:
            self._waiting.close()

    def activity(self, what: str, done: int = 0, total: int = 0) -> None:
        super().activity(what, done, total)
        if self._waiting:
            self._waiting.current = self.doing

    def progress(self, text: str) -> None:
        super().progress(text)
        if self._waiting:  # postpones its next line
            self._waiting.shown_s = time.monotonic()

    def show(self, text: str) -> None:
        print(text, file=self.out, flush=True)

    def on_output_error(self, error: OSError) -> None:
        silence(self.out)
        if not isinstance(error, BrokenPipeError):
            where = f"; its log is {self._log.name}" if self._log else ""
            with contextlib.suppress(OSError):
                print(f"cannot write to the output: {error.strerror}. The run continues{where}", file=sys.stderr)

    def show_step(self, line: str) -> None:
        self.say(line)


_COLOURS = {
    "veto": "bold yellow",
    "failed": "bold red",
    "finished": "bold green",
    "interrupted": "yellow",
    "val": "cyan",
}

_CELL = 21  # the widest cell: `gradient norm 1.2e+03`


class LiveView(RunView):
    """Redraws a panel four times a second."""

    def __init__(self, spec_path: str | None = None, console: Console | None = None) -> None:
        super().__init__(spec_path)
        self.console = console or Console()
        self._live: Live | None = None

    def open(self) -> None:
        self._live = Live(get_renderable=self.render, console=self.console, refresh_per_second=4, transient=True)
        self._live.start()

    def close(self) -> None:
        live, self._live = self._live, None
        if live:
            try:
                live.stop()
            except OSError as error:
                self.output_works = False
                self.on_output_error(error)

    def on_output_error(self, error: OSError) -> None:
        """The terminal is gone: sends further output to the null device."""
        silence(self.console.file)

    def show(self, text: str) -> None:
        style = next((colour for word, colour in _COLOURS.items() if text.startswith(word)), "")
        self.console.print(Text(text, style=style))

    def progress(self, text: str) -> None:
        self.log(f"data  {text}")
        self.activity(text)

    def render(self) -> RenderableType:
        """The panel, and below it long work between steps."""
        now, doing = time.monotonic(), self.doing
        if not (self.recent or self.current_step):
            return doing.render(now) if doing.what else Text("starting", style="dim")
        long = doing.what and now - doing.began_s > QUIET_S
        return Group(self._panel(now), doing.render(now)) if long else self._panel(now)

    def _panel(self, now: float) -> Panel:
        """Numbers of the last steps, and the micro-batches of a long step."""
        smooth, current_step = self.smooth() if self.recent else None, self.current_step
        done: float = self.recent[-1]["step"] + 1 if self.recent else 0
        left_s = smooth["left_s"] if smooth else None
        step = f"step {max(1, int(done)):,}/{self.total:,}"
        if current_step and (not self.recent or now - current_step.began_s > LONG_STEP_S):
            done, step = current_step.step + current_step.share, f"step {current_step.step + 1:,}/{self.total:,}"
            step += f"  micro-batch {current_step.done}/{current_step.total}" if current_step.total > 1 else ""
            left_s = (
                current_step.left_s(self.total) if left_s is None else max(0.0, left_s - (now - current_step.began_s))
            )
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        bar.add_row(
            step,
            ProgressBar(total=max(1, self.total), completed=done),
            f"{human_time(left_s)} left" if left_s is not None else "",
        )
        if smooth:
            cells = self._cells(self.recent[-1], smooth)
        else:
            rate = current_step.tokens_per_s if current_step else None
            cells = [("tokens/s", f"{rate:,.0f}" if rate else "-")]
        columns = max(1, min(4, (self.console.width - 2) // (_CELL + 2)))
        table = Table.grid(padding=(0, 2))
        for start in range(0, len(cells), columns):
            row = cells[start : start + columns]
            table.add_row(*(Text.assemble((f"{name} " if name else "", "dim"), value) for name, value in row))
        return Panel(Group(bar, table), title="training", title_align="left", border_style="dim")

    def _cells(self, last: dict[str, Any], smooth: dict[str, float]) -> list[tuple[str, str]]:
        """(name, value) of each number; none is wider than _CELL, so that a narrow terminal gets more rows."""
        validation, tokens = self.last_validation, self.objective in TOKEN_OBJECTIVES
        return [
            ("mean loss", f"{smooth['loss']:.4f}"),
            ("", sparkline(self.losses, _CELL)),
            *([("perplexity", perplexity(smooth["loss"]))] if tokens else []),
            *metrics_of(last).items(),
            ("validation", f"{validation['loss']:.4f}" if validation else "-"),
            *([("forecast", self.forecast.split(" ")[0])] if self.forecast else []),
            *([("bits per byte", f"{validation['bits_per_byte']:.3f}" if validation else "-")] if tokens else []),
            ("lr", f"{last['lr']:.2e}"),
            ("gradient norm", f"{last['grad_norm']:.3g}"),
            ("clipped", f"{self.clipped / max(1, self.steps_seen):.0%}"),
            ("tokens/s", f"{smooth['rate']:,.0f}"),
            ("of peak", f"{smooth['mfu']:.0%}"),
            ("of plan", f"{smooth['of_plan']:.0%}" if smooth["of_plan"] else "-"),
            ("memory", human_bytes(last["memory_bytes"])),
            ("data wait", f"{smooth['wait']:.1%}"),
            ("vetoes", f"{self.vetoes:,}"),
        ]
