"""`bessemer train`: start a run, or continue it where it stopped; or profile a few of its steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer


def train(
    spec: Path = typer.Argument(help="The run's YAML file."),
    settings: list[str] = typer.Option(
        [], "--set", help="Override a key, such as --set optimizer.lr=3e-4. Repeatable."
    ),
    plain: bool = typer.Option(False, "--plain", help="Plain lines, also in a terminal."),
    profile: bool = typer.Option(
        False, "--profile", help="Only see where a step's time goes; the run stays untouched."
    ),
    profile_steps: int = typer.Option(3, help="With --profile: steps to look at, after five of warm-up."),
    nsight: bool = typer.Option(False, "--nsight", help="As --profile, under nsys or ncu: marks steps for them."),
) -> None:
    """Train the run that a spec describes. The same command again continues it.

    Example: bessemer train my-run.yaml --set budget.tokens=50M
    """
    from bessemer.spec.load import load_spec

    run_spec = load_spec(spec, settings)
    if profile or nsight:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler tells of its stages otherwise
    from bessemer.observe.live import LiveView
    from bessemer.observe.view import LineView
    from bessemer.supervise.session import Session

    live = sys.stdout.isatty() and not plain
    again = None if settings else str(spec)  # with overrides, the spec in the run's folder is the one to continue with
    view = LiveView(again) if live else LineView(again, run_spec.observe.line_every)
    if profile or nsight:
        from bessemer.supervise.profile import ProfileSession

        session = ProfileSession(run_spec, view, profile_steps, nsight)
        session.train()
        if session.text:
            print(
                f"\n{session.text}\nin {session.folder}: profile.txt, profile.json, trace.json.gz for ui.perfetto.dev"
            )
        return
    outcome = Session(run_spec, view).train()
    if outcome.kind == "interrupted":
        raise typer.Exit(143 if outcome.reason == "SIGTERM" else 130)
    if outcome.kind in ("failed", "stopped"):
        raise typer.Exit(1)
