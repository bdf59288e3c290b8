"""`bessemer align`: commands on reward models, and on models that are aligned."""

from __future__ import annotations

import typer

from bessemer.cli import align_reward
from bessemer.cli.console import CommandGroup

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Align a model: score answers with a reward model, best-of-N."
)
app.command("score")(align_reward.score)
app.command("best")(align_reward.best)
