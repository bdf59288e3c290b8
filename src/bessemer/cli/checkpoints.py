"""`bessemer checkpoints`: what a run has saved: list it, check it, compare it, name it, thin it out, go back to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bessemer.cli.help import CommandGroup

if TYPE_CHECKING:
    from bessemer.run.directory import Run


class _ListByDefault(CommandGroup):
    """`checkpoints RUN` is `checkpoints list RUN`: what is no command's name is a run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {*self.commands, "-h", "--help"}
        return super().parse_args(ctx, ["list", *args] if args and args[0] not in known else args)


app = typer.Typer(
    cls=_ListByDefault,
    no_args_is_help=True,
    help="List, verify, compare, tag, prune, restore, average, import and pack checkpoints. "
    "`bessemer checkpoints RUN` lists those of a run.",
)
AS_JSON = typer.Option(False, "--json", help="As JSON.")
RUN = typer.Argument(help="The run's folder, such as runs/demo.")
PLACE = typer.Argument(help="A checkpoint's folder, or RUN:NAME with last, best, a tag or a name; RUN is RUN:last.")
NAME = typer.Argument(help="last, best, a tag or a name such as step-00001000.a1.")


@contextmanager
def damage_told() -> Iterator[None]:
    """A damaged checkpoint or a full disk is neither the user's mistake nor ours: one line, exit code 1."""
    from bessemer.checkpoint.manifest import Damaged

    try:
        yield
    except (Damaged, OSError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None


def checkpoint_at(place: str) -> Path:
    """A checkpoint by its folder, by its run (the last one), or by RUN:NAME."""
    from bessemer.run.directory import Run

    path = Path(place)
    if (path / "manifest.json").exists():
        return path
    run, mark, name = place.rpartition(":")
    alone = path.exists() or not mark  # a run's folder may have a colon in its name
    return checkpoint_of(Run.existing(place if alone else run), "last" if alone else name)


def checkpoint_of(run: Run, which: str) -> Path:
    """`last`, `best`, a tag or a name."""
    from bessemer.checkpoint.lineage import read_tags
    from bessemer.train.restore import find_checkpoint

    name = read_tags(run.checkpoints).get(which, which)
    named = run.checkpoints / name
    return named if (named / "manifest.json").exists() else find_checkpoint(run, name)


@app.command("list")
def list_(run: Path = RUN, as_json: bool = AS_JSON) -> None:
    """List a run's checkpoints, the oldest first; the word `list` may be left out.

    Example: bessemer checkpoints list runs/demo
    """
    import json
    import time

    from bessemer.checkpoint.lineage import read_tags
    from bessemer.checkpoint.manifest import CONFIRMED
    from bessemer.checkpoint.shelf import Shelf
    from bessemer.run.directory import Run
    from bessemer.spec.quantity import human_bytes, human_time

    folder = Run.existing(run).checkpoints
    shelf, tags = Shelf(folder), read_tags(folder)
    full, best = shelf.committed(), shelf.best()
    found: list[dict[str, Any]] = [
        {
            "step": manifest.step, "name": path.name, "content": manifest.content,
            "age_s": max(0.0, time.time() - manifest.time), "bytes": manifest.bytes,
            "validation_loss": manifest.validation_loss, "confirmed": (path / CONFIRMED).exists(),
            "tags": sorted(tag for tag, name in tags.items() if name == path.name),
            "best": path == best, "last": bool(full) and path == full[-1][0],
        }
        for path, manifest in [*full, *shelf.committed("model")]
    ]  # fmt: skip
    if as_json:
        print(json.dumps(found, indent=1))
        return
    line = "{:>10}  {:<20} {:>9} {:>9} {:>9}  {:<9}  {}"
    head = line.format("step", "name", "age", "size", "val", "confirmed", "marks")
    print(head if found else f"{run}: no checkpoint yet")
    for row in found:
        loss = "-" if row["validation_loss"] is None else f"{row['validation_loss']:.4f}"
        marks = [*row["tags"], *(mark for mark in ("best", "last") if row[mark])]
        about = human_time(row["age_s"]), human_bytes(row["bytes"]), loss, "yes" if row["confirmed"] else "-"
        print(line.format(f"{row['step']:,}", row["name"], *about, " ".join(marks)).rstrip())


@app.command()
def verify(place: str = typer.Argument(help="A run: all of it. RUN:NAME or a checkpoint's folder: one.")) -> None:
    """Hash every file against its manifest. Exit code 1 where one is damaged, and the file's name.

    Example: bessemer checkpoints verify runs/demo
    """
    from bessemer.checkpoint import manifest
    from bessemer.checkpoint.shelf import Shelf
    from bessemer.observe.activity import working

    folders = [checkpoint_at(place)] if not (Path(place) / "events.jsonl").exists() else []
    if not folders:
        shelf = Shelf(Path(place) / "checkpoints")
        folders = [*reversed(list(shelf.newest_first())), *(path for path, _ in shelf.committed("model"))]
    damaged = 0
    with working("hashing") as report:
        for number, folder in enumerate(folders):
            report("hashing checkpoints", number, len(folders))
            try:
                print(f"sound    {folder.name}  {len(manifest.verify(folder).files)} files")
            except manifest.Damaged as error:
                damaged += 1
                print(f"DAMAGED  {folder.name}  {error}")
    print(f"{len(folders)} checkpoints, {damaged} damaged")
    raise typer.Exit(1 if damaged else 0)


@app.command()
def diff(a: str = PLACE, b: str = PLACE, as_json: bool = AS_JSON) -> None:
    """What changed from A to B: each tensor's relative and largest change, and settings that differ.

    Example: bessemer checkpoints diff runs/demo:best runs/demo:last
    """
    import json
    from dataclasses import asdict

    from bessemer.checkpoint.difference import compare
    from bessemer.checkpoint.manifest import verify as check
    from bessemer.checkpoint.tensors import SavedTensors
    from bessemer.observe.activity import working
    from bessemer.run.journal import json_ready
    from bessemer.supervise.restore import differences

    with damage_told(), working("comparing"):
        folders = checkpoint_at(a), checkpoint_at(b)
        before, after = (asdict(check(folder)) for folder in folders)
        changes = list(compare(*(SavedTensors(folder) for folder in folders)))
    noise = ("files", "time", "attempt", "format", "guard")
    settings = {key: values for key, values in differences(before, after).items() if key.partition(".")[0] not in noise}
    moved = [change for change in changes if change.what != "same"]
    if as_json:
        tensors = [json_ready(asdict(change)) for change in moved]
        print(json.dumps({"settings": settings, "tensors": tensors, "same": len(changes) - len(moved)}, indent=1))
        return
    for key, (old, new) in settings.items():
        print(f"{key}: {old} -> {new}")
    for change in moved:
        size = "" if change.relative is None else f"  relative {change.relative:.3g}, largest {change.largest:.3g}"
        print(f"{change.name}: {change.what}{size}")
    print(f"{len(moved)} tensors differ, {len(changes) - len(moved)} are the same")


@app.command()
def prune(
    run: Path = RUN,
    keep_last: str = typer.Option("", help="Newest checkpoints to keep."),
    keep_best: str = typer.Option("", help="true or false: keep the one with the best validation loss."),
    keep_every: str = typer.Option("", help="Keep the first of every so many steps."),
    keep_age: str = typer.Option("", help="Keep those younger than this, such as 24h."),
    keep_bytes: str = typer.Option("", help="Room for them all, such as 500GB."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only say what would go."),
) -> None:
    """Delete what the rules do not keep: the run's own, or those given here.

    A tagged checkpoint, the last and the newest confirmed one always stay.

    Example: bessemer checkpoints prune runs/demo --keep-last 1 --dry-run
    """
    import time

    from bessemer.checkpoint import manifest, retention, shelf
    from bessemer.errors import UserError
    from bessemer.run.directory import Run, RunWriter
    from bessemer.spec.load import load_spec

    given = {"last": keep_last, "best": keep_best, "every": keep_every, "age": keep_age, "bytes": keep_bytes}
    settings = [f"checkpoint.keep_{key}={value}" for key, value in given.items() if value]
    rules = load_spec(Run.existing(run).folder / "spec.yaml", settings).checkpoint
    place = shelf.Shelf(run / "checkpoints")
    if not (found := place.committed()):
        raise UserError(f"{run}: no checkpoint yet")
    newest = found[-1][0]
    if dry_run:
        entries = [shelf.entry_of(p.name, about, (p / manifest.CONFIRMED).exists()) for p, about in found]
        kept = retention.keep(entries, rules, newest.name, time.time(), place.tagged())
        gone = [path.name for path, _ in found if path.name not in kept]
    else:
        with RunWriter(run) as writer:  # its lock: a run in training thins out by itself
            gone = place.thin(newest, rules)
            writer.event("pruned", removed=gone, reason="by hand")
    print("\n".join(f"{'would delete' if dry_run else 'deleted'}  {name}" for name in gone) or "nothing to delete")


@app.command()
def restore(run: Path = RUN, checkpoint: str = NAME) -> None:
    """Make a run go on from a checkpoint. Later ones are moved to checkpoints/abandoned/, not deleted.

    Example: bessemer checkpoints restore runs/demo step-00001000.a1
    """
    from bessemer.checkpoint.lineage import ABANDONED, go_back_to
    from bessemer.run.directory import Run, RunWriter

    target = checkpoint_of(Run.existing(run), checkpoint)
    with damage_told(), RunWriter(run) as writer:
        manifest, moved = go_back_to(target.parent, target.name)
        reason = "by hand; what was saved later is set aside"
        writer.event("restored", step=manifest.step, checkpoint=target.name, abandoned=moved, reason=reason)
    print(f"the run goes on from {target.name} (step {manifest.step:,}) when it is started again")
    for name in moved:
        print(f"set aside  {target.parent / ABANDONED / name}")


@app.command()
def tag(
    run: Path = RUN,
    checkpoint: str = NAME,
    version: str = typer.Argument(help="A semantic version, such as v1.2.0."),
    move: bool = typer.Option(False, "--move", help="Take the tag from the checkpoint that has it."),
) -> None:
    """Name a checkpoint with a semantic version. It is then never deleted, and found by that name.

    Example: bessemer checkpoints tag runs/demo best v1.2.0
    """
    from bessemer.checkpoint import lineage as names
    from bessemer.run.directory import Run

    found = checkpoint_of(Run.existing(run), checkpoint)
    names.tag(found.parent, found.name, version, move)
    print(f"{version}  {found}")


@app.command()
def lineage(run: Path = RUN) -> None:
    """Where a run's checkpoints come from, as JSON: code, data, spec and parents of every start, tags, averages.

    Example: bessemer checkpoints lineage runs/demo
    """
    import json

    from bessemer.checkpoint import lineage as names
    from bessemer.run.directory import Run

    print(json.dumps(names.lineage(Run.existing(run).folder), indent=1))
