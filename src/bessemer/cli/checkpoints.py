"""`bessemer checkpoints`: what a run has saved: list it, check it, compare it, name it, thin it out, go back to it.

`bessemer checkpoints import | pack | unpack | average`: checkpoints made of other files or of one another.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bessemer.cli.console import CommandGroup

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
    from bessemer.checkpoint.manifest import DamagedCheckpoint

    try:
        yield
    except (DamagedCheckpoint, OSError) as error:
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
    from bessemer.train.trained import find_checkpoint

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
    from bessemer.checkpoint.store import CheckpointStore
    from bessemer.run.directory import Run
    from bessemer.spec.quantity import human_bytes, human_time

    folder = Run.existing(run).checkpoints
    shelf, tags = CheckpointStore(folder), read_tags(folder)
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
    from bessemer.checkpoint.store import CheckpointStore
    from bessemer.observe.progress import working

    folders = [checkpoint_at(place)] if not (Path(place) / "events.jsonl").exists() else []
    if not folders:
        shelf = CheckpointStore(Path(place) / "checkpoints")
        folders = [*reversed(list(shelf.newest_first())), *(path for path, _ in shelf.committed("model"))]
    damaged = 0
    with working("hashing") as report:
        for number, folder in enumerate(folders):
            report("hashing checkpoints", number, len(folders))
            try:
                print(f"sound    {folder.name}  {len(manifest.verify(folder).files)} files")
            except manifest.DamagedCheckpoint as error:
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

    from bessemer.checkpoint.manifest import verify as check
    from bessemer.checkpoint.tensors import SavedTensors, compare
    from bessemer.observe.progress import working
    from bessemer.run.journal import json_ready
    from bessemer.session.restore import differences

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

    from bessemer.checkpoint import manifest
    from bessemer.checkpoint import store as retention
    from bessemer.checkpoint import store as shelf
    from bessemer.errors import UserError
    from bessemer.run.directory import Run, RunWriter
    from bessemer.spec.load import load_spec

    given = {"last": keep_last, "best": keep_best, "every": keep_every, "age": keep_age, "bytes": keep_bytes}
    settings = [f"checkpoint.keep_{key}={value}" for key, value in given.items() if value]
    rules = load_spec(Run.existing(run).folder / "spec.yaml", settings).checkpoint
    place = shelf.CheckpointStore(run / "checkpoints")
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


@app.command("import")
def import_(
    path: Path = typer.Argument(help="A .pt, .bin or .safetensors file, a torch DCP or DeepSpeed folder."),
    folder: Path = typer.Argument(help="Where it goes: a folder for checkpoints, or a run's folder."),
    like: Path | None = typer.Option(None, "--like", help="A run whose model the weights must fit."),
    trust: bool = typer.Option(False, "--trust", help="Unpickle whatever it holds, which can run any code."),
) -> None:
    """Make a checkpoint of weights alone from another program's files, for a new run to start from.

    Example: bessemer checkpoints import other/global_step1000 start --like runs/demo
    """
    import json

    import torch

    from bessemer.checkpoint.import_weights import fit, import_weights, refuse_other_names
    from bessemer.checkpoint.tensors import save_model
    from bessemer.model.transformer import network
    from bessemer.observe.progress import working
    from bessemer.run.directory import Run
    from bessemer.spec.shape import ModelShape

    is_run = (folder / "events.jsonl").exists()
    with working("reading the weights"):
        weights = import_weights(path, trusted=trust)
    if like is None and not is_run:
        refuse_other_names(weights, str(path))
    else:
        about = json.loads((Run.existing(like or folder).folder / "model.json").read_text())
        with torch.device("meta"):
            model = network(ModelShape.from_dict(about["shape"]))
        weights = fit(weights, {name: tuple(p.shape) for name, p in model.named_parameters()}, str(path))
    made_from = {"imported_from": str(path.absolute()), "trusted": trust}
    with working("writing the checkpoint"):
        made = save_model(folder / "checkpoints" if is_run else folder, weights, made_from)
    numbers = sum(tensor.numel() for tensor in weights.values())
    print(f"{len(weights)} tensors, {numbers:,} parameters\nwritten  {made}")


@app.command()
def pack(
    checkpoint: str = PLACE,
    to: Path = typer.Option(..., "--to", help="The folder of packed checkpoints."),
    delta_from: str = typer.Option("", "--delta-from", help="One packed there: store what differs from it."),
    compress: str = typer.Option("zstd", "--compress", help="zstd, zlib or none."),
    dtype: str = typer.Option("same", "--dtype", help="same, or bf16: weights and moments are rounded."),
    name: str = typer.Option("", "--name", help="What to call it there (default: run and checkpoint)."),
    as_json: bool = AS_JSON,
) -> None:
    """Pack a checkpoint small: compressed, equal tensors once, and read back before it counts.

    Example: bessemer checkpoints pack runs/demo:last --to packed --delta-from demo.step-00001000.a1
    """
    import json
    from dataclasses import asdict
    from typing import cast

    from bessemer.checkpoint.archive import Codec
    from bessemer.checkpoint.archive import pack as run_pack
    from bessemer.errors import UserError
    from bessemer.observe.progress import working
    from bessemer.spec.quantity import human_bytes

    if compress not in ("zstd", "zlib", "none") or dtype not in ("same", "bf16"):
        raise UserError(f"--compress {compress} --dtype {dtype}: write zstd, zlib or none; same or bf16")
    with damage_told(), working("packing"):
        folder = checkpoint_at(checkpoint)
        called, codec = name or _packed_name(folder), cast(Codec, compress)
        done = run_pack(folder, to, called, delta_from or None, codec, bf16=dtype == "bf16")
    if as_json:
        print(json.dumps(asdict(done), indent=1))
        return
    share = done.bytes_written / max(1, done.bytes_before)
    print(
        f"{done.name}  {human_bytes(done.bytes_before)} -> {human_bytes(done.bytes_written)} ({share:.0%}); "
        f"{done.tensors} tensors, {done.already_there} there already, {done.as_difference} as differences"
    )
    for group, error in done.errors.items():
        print(f"read back  {group}: {'every bit the same' if error == 0 else f'largest error {error:.3g}'}")


def _packed_name(folder: Path) -> str:
    """Steps have the same names in all runs, so the run's goes before."""
    shelf = folder.absolute().parent
    return f"{shelf.parent.name}.{folder.name}" if shelf.name == "checkpoints" else folder.name


@app.command()
def unpack(
    store: Path = typer.Argument(help="The folder of packed checkpoints."),
    name: str = typer.Argument(help="What it is called there."),
    folder: Path = typer.Argument(help="The folder for checkpoints to write it to."),
) -> None:
    """Turn a packed checkpoint into one that a run can load. Every tensor is checked against its hash.

    Example: bessemer checkpoints unpack packed demo.step-00001000.a1 runs/again/checkpoints
    """
    from bessemer.checkpoint.archive import unpack as run_unpack
    from bessemer.observe.progress import working

    with damage_told(), working("unpacking"):
        print(f"written  {run_unpack(store, name, folder)}")


@app.command()
def average(
    run: Path = RUN,
    last: int = typer.Option(5, "--last", min=1, help="Average so many of the newest."),
    names: list[str] = typer.Option([], "--names", help="Or these: names or tags. Repeatable."),
    decay: float | None = typer.Option(None, "--decay", help="An exponential average, such as 0.5."),
    greedy: bool = typer.Option(False, "--greedy", help="Add one only if the validation loss goes down."),
) -> None:
    """Average checkpoints of a run into one of weights alone, on the run's shelf.

    Example: bessemer checkpoints average runs/demo --last 5 --greedy
    """
    from bessemer.checkpoint.manifest import verify
    from bessemer.checkpoint.store import MODEL, CheckpointStore
    from bessemer.checkpoint.tensors import SavedTensors, exponential_weights, greedy_soup, save_model
    from bessemer.checkpoint.tensors import average as mean
    from bessemer.errors import UserError
    from bessemer.observe.progress import working
    from bessemer.run.directory import Run

    if greedy and decay is not None:
        raise UserError("--greedy chooses equal shares: leave out --decay")
    found = Run.existing(run)
    newest = [path for path, _ in CheckpointStore(found.checkpoints).committed()][-last:]
    folders = [checkpoint_of(found, name) for name in names] or newest
    if not folders:
        raise UserError(f"{run}: no checkpoint yet; train it first")
    with damage_told(), working("averaging"):
        manifests = {folder.name: verify(folder) for folder in folders}
        sources = {folder.name: SavedTensors(folder, MODEL) for folder in folders}
        loss = None
        if greedy:
            from bessemer.session.replay import validator

            soup = greedy_soup(sources, validator(found.folder))
            chosen, weights, loss, shares = soup.names, soup.weights, soup.loss, [1.0] * len(soup.names)
            for name, alone in soup.alone.items():
                print(f"{name}  validation loss {alone:.4f}{'  taken' if name in chosen else ''}")
        else:
            chosen = list(sources)
            shares = [1.0] * len(chosen) if decay is None else exponential_weights(len(chosen), decay)
            weights = mean(list(sources.values()), shares)
    total = sum(shares)
    made_from = {"averaged_of": chosen, "shares": [share / total for share in shares], "greedy": greedy}
    like = max((manifests[name] for name in chosen), key=lambda manifest: manifest.step)
    made = save_model(found.checkpoints, weights, made_from, like, loss)
    print(f"average of {', '.join(chosen)}" + ("" if loss is None else f"; validation loss {loss:.4f}"))
    print(f"written  {made}")
