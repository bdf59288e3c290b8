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

_COLOURS = {"veto": "bold yellow", "failed": "bold red", "finished": "bold green", "interrupted": "yellow", "val": "cyan"}


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
        last, smooth = self.recent[-1], self.smooth()
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        bar.add_row(
            f"step {last['step'] + 1:,}/{self.total:,}",
            ProgressBar(total=max(1, self.total), completed=last["step"] + 1),
            f"{human_time(smooth['left_s'])} left",
        )
        table = Table.grid(padding=(0, 2))
        for row in self._cells(last, smooth):
            table.add_row(*(Text.assemble((f"{name} ", "dim"), value) for name, value in row))
        return Group(Panel(Group(bar, table), title="training", title_align="left", border_style="dim"))

    def _cells(self, last: dict[str, Any], smooth: dict[str, float]) -> list[list[tuple[str, str]]]:
        validation = self.last_validation
        shown = f"{validation['loss']:.4f}, {validation['bits_per_byte']:.3f} bits per byte" if validation else "-"
        return [
            [("loss", f"{smooth['loss']:.4f}"), ("", sparkline(self.losses)), ("perplexity", perplexity(smooth["loss"])), ("accuracy", f"{last['accuracy']:.1%}")],
            [("validation", shown), ("lr", f"{last['lr']:.2e}"), ("gradient norm", f"{last['grad_norm']:.3f}"), ("clipped", f"{self.clipped / max(1, self.steps_seen):.0%}")],
            [("rate", f"{smooth['rate']:,.0f} tokens/s"), ("of peak", f"{smooth['mfu']:.0%}"), ("memory", human_bytes(last["memory_bytes"])), ("data wait", f"{smooth['wait']:.1%}")],
            [("vetoes", str(self.vetoes))],
        ]  # fmt: skip
