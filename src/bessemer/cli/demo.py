"""`bessemer demo`: three minutes from raw text to a small model that writes Python."""

from __future__ import annotations

import sys

import typer


def demo(
    minutes: float = typer.Option(3.0, min=0.2, max=600, help="Training time to aim for."),
    runs: str = typer.Option("runs", help="Folder for the run and its data."),
) -> None:
    """Train a small model on this machine's Python library, survive a bad batch and a kill, and generate text.

    Example: bessemer demo --minutes 1
    """
    from bessemer.demo import run_demo

    for line in run_demo(runs, minutes, live=sys.stdout.isatty()):
        print(line, flush=True)
