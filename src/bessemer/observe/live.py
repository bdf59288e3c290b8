"""The live view of a terminal: a panel that is redrawn in place, with events scrolling above it."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bessemer.observe.activity import QUIET_S
from bessemer.observe.output import silence
from bessemer.observe.view import LONG_STEP_S, RunView
from bessemer.observe.words import perplexity, sparkline
from bessemer.spec.quantity import human_bytes, human_time

_COLOURS = {
    "veto": "bold yellow",
    "failed": "bold red",
    "finished": "bold green",
    "interrupted": "yellow",
    "val": "cyan",
}

_CELL = 21  # the widest: `gradient norm 1.2e+03`


class LiveView(RunView):
    """Redraws four times a second; costs nothing between."""

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
                self.heard = False
                self.unheard(error)

    def unheard(self, error: OSError) -> None:
        """The terminal is gone: what would still be drawn goes nowhere."""
        silence(self.console.file)

    def show(self, text: str) -> None:
        style = next((colour for word, colour in _COLOURS.items() if text.startswith(word)), "")
        self.console.print(Text(text, style=style))

    def progress(self, text: str) -> None:
        self.log(f"data  {text}")
        self.activity(text)

    def render(self) -> RenderableType:
        """The panel as it stands now, and below it what is done outside of steps, once that takes long."""
        now, doing = time.monotonic(), self.doing
        if not (self.recent or self.within):
            return doing.render(now) if doing.what else Text("starting", style="dim")
        waits = doing.what and now - doing.began_s > QUIET_S
        return Group(self._panel(now), doing.render(now)) if waits else self._panel(now)

    def _panel(self, now: float) -> Panel:
        """Numbers of the last steps; of a step that takes long, its micro-batches."""
        smooth, within = self.smooth() if self.recent else None, self.within
        done: float = self.recent[-1]["step"] + 1 if self.recent else 0
        left_s = smooth["left_s"] if smooth else None
        step = f"step {max(1, int(done)):,}/{self.total:,}"
        if within and (not self.recent or now - within.began_s > LONG_STEP_S):
            done, step = within.step + within.share, f"step {within.step + 1:,}/{self.total:,}"
            step += f"  micro-batch {within.done}/{within.total}" if within.total > 1 else ""
            left_s = within.left_s(self.total) if left_s is None else max(0.0, left_s - (now - within.began_s))
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
            rate = within.tokens_per_s if within else None
            cells = [("tokens/s", f"{rate:,.0f}" if rate else "-")]
        columns = max(1, min(4, (self.console.width - 2) // (_CELL + 2)))
        table = Table.grid(padding=(0, 2))
        for start in range(0, len(cells), columns):
            row = cells[start : start + columns]
            table.add_row(*(Text.assemble((f"{name} " if name else "", "dim"), value) for name, value in row))
        return Panel(Group(bar, table), title="training", title_align="left", border_style="dim")

    def _cells(self, last: dict[str, Any], smooth: dict[str, float]) -> list[tuple[str, str]]:
        """(name, value) of each number; none is wider than _CELL, so that a narrow terminal only gets more rows."""
        validation = self.last_validation
        return [
            ("mean loss", f"{smooth['loss']:.4f}"),
            ("", sparkline(self.losses, _CELL)),
            ("perplexity", perplexity(smooth["loss"])),
            ("accuracy", f"{last['accuracy']:.1%}"),
            ("validation", f"{validation['loss']:.4f}" if validation else "-"),
            ("bits per byte", f"{validation['bits_per_byte']:.3f}" if validation else "-"),
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
