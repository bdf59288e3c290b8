"""`bessemer align`: commands on reward models, and on models that are aligned."""

from __future__ import annotations

import typer

from bessemer.cli import align_data, align_probe, align_reward, align_vote
from bessemer.cli.console import CommandGroup

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Make, score and audit alignment data, and measure a model's behaviour.\n\n"
    "Example: bessemer align audit pairs.jsonl --write clean.jsonl --drop",
)
app.command("score")(align_reward.score)
app.command("best")(align_reward.best)
app.command("critique")(align_data.critique)
app.command("measure")(align_data.measure)
app.command("audit")(align_data.audit)
app.command("redteam")(align_data.redteam)
app.add_typer(align_probe.app, name="probe")
app.command("vote")(align_vote.vote)
app.command("tally")(align_vote.tally)
