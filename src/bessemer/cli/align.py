"""`bessemer align`: commands on trained models that make, measure or audit alignment data."""

from __future__ import annotations

import typer

from bessemer.cli import align_data, align_probe, align_vote
from bessemer.cli.console import CommandGroup

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Make and audit alignment data, probe and compare trained models."
)
app.command("critique")(align_data.critique)
app.command("measure")(align_data.measure)
app.command("audit")(align_data.audit)
app.command("redteam")(align_data.redteam)
app.add_typer(align_probe.app, name="probe")
app.command("vote")(align_vote.vote)
app.command("tally")(align_vote.tally)
