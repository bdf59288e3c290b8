"""The live view of a terminal: a panel that is redrawn in place, with events scrolling above it."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bessemer.observe.view import RunView
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
        self._status = ""

    def open(self) -> None:
        self._live = Live(get_renderable=self.render, console=self.console, refresh_per_second=4, transient=True)
        self._live.start()

    def close(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def show(self, text: str) -> None:
        self._status = ""
        style = next((colour for word, colour in _COLOURS.items() if text.startswith(word)), "")
        self.console.print(Text(text, style=style))

    def progress(self, text: str) -> None:
        self.log(f"data  {text}")
        self._status = text

    def render(self) -> Group | Text:
        """The panel as it stands now."""
        if not self.recent:
            return Text(self._status or "starting", style="dim")
        smooth, last = self.smooth(), self.recent[-1]
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        bar.add_row(
            f"step {last['step'] + 1:,}/{self.total:,}",
            ProgressBar(total=max(1, self.total), completed=last["step"] + 1),
            f"{human_time(smooth['left_s'])} left",
        )
        cells = self._cells(last, smooth)
        columns = max(1, min(4, (self.console.width - 2) // (_CELL + 2)))
        table = Table.grid(padding=(0, 2))
        for start in range(0, len(cells), columns):
            row = cells[start : start + columns]
            table.add_row(*(Text.assemble((f"{name} " if name else "", "dim"), value) for name, value in row))
        return Group(Panel(Group(bar, table), title="training", title_align="left", border_style="dim"))

    def _cells(self, last: dict[str, Any], smooth: dict[str, float]) -> list[tuple[str, str]]:
        """(name, value) of each number; none is wider than _CELL, so that a narrow terminal only gets more rows."""
        validation = self.last_validation
        return [
            ("loss", f"{smooth['loss']:.4f}"),
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
