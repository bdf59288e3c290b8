"""`bessemer checkpoints`: list, verify, compare, tag, prune, restore, import, pack and average checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bessemer.cli.console import AS_JSON, RUN, group_with_default, print_json
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.run.directory import Run


app = typer.Typer(
    cls=group_with_default("list"),
    no_args_is_help=True,
    help="List, verify, compare, tag, prune, restore, average, import and pack checkpoints. "
    "`bessemer checkpoints RUN` lists those of a run.\n\nExample: bessemer checkpoints runs/demo",
)
PLACE = typer.Argument(help="A checkpoint's folder, or RUN:NAME with last, best, a tag or a name; RUN means RUN:last.")
NAME = typer.Argument(help="last, best, a tag or a name such as step-00001000.a1.")


@contextmanager
def reporting_damage() -> Iterator[None]:
    """A damaged checkpoint or a full disk is not a mistake in the input: print one line, exit code 1."""
    from bessemer.checkpoint.manifest import DamagedCheckpoint

    try:
        yield
    except (DamagedCheckpoint, OSError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None


def find_checkpoint_at(place: str) -> Path:
    """The checkpoint at a folder, the last one of a run, or RUN:NAME."""
    from bessemer.run.directory import Run

    path = Path(place)
    if (path / "manifest.json").exists():
        return path
    run, colon, name = place.rpartition(":")
    is_run = path.exists() or not colon  # a run's folder may have a colon in its name
    return checkpoint_of(Run.existing(place if is_run else run), "last" if is_run else name)


def checkpoint_of(run: Run, name: str) -> Path:
    """The checkpoint called `last`, `best`, by a tag or by its name."""
    from bessemer.checkpoint.lineage import read_tags
    from bessemer.train.trained import find_checkpoint

    name = read_tags(run.checkpoints).get(name, name)
    folder = run.checkpoints / name
    return folder if (folder / "manifest.json").exists() else find_checkpoint(run, name)


@app.command("list")
def list_(run: Path = RUN, as_json: bool = AS_JSON) -> None:
    """List a run's checkpoints, oldest first. The word `list` may be left out.

    Example: bessemer checkpoints list runs/demo
    """
    import time

    from bessemer.checkpoint.lineage import read_tags
    from bessemer.checkpoint.manifest import CONFIRMED
    from bessemer.checkpoint.store import CheckpointStore
    from bessemer.run.directory import Run
    from bessemer.spec.quantity import human_bytes, human_time

    folder = Run.existing(run).checkpoints
    store, tags = CheckpointStore(folder), read_tags(folder)
    full, best = store.committed(), store.best()
    rows: list[dict[str, Any]] = [
        {
            "step": manifest.step, "name": path.name, "content": manifest.content,
            "age_s": max(0.0, time.time() - manifest.time), "bytes": manifest.bytes,
            "validation_loss": manifest.validation_loss, "confirmed": (path / CONFIRMED).exists(),
            "tags": sorted(tag for tag, name in tags.items() if name == path.name),
            "best": path == best, "last": bool(full) and path == full[-1][0],
        }
        for path, manifest in [*full, *store.committed("model")]
    ]  # fmt: skip
    if as_json:
        print_json(rows)
        return
    line = "{:>10}  {:<20} {:>9} {:>9} {:>9}  {:<9}  {}"
    head = line.format("step", "name", "age", "size", "val", "confirmed", "marks")
    print(head if rows else f"{run}: no checkpoint yet")
    for row in rows:
        loss = "-" if row["validation_loss"] is None else f"{row['validation_loss']:.4f}"
        marks = [*row["tags"], *(mark for mark in ("best", "last") if row[mark])]
        columns = human_time(row["age_s"]), human_bytes(row["bytes"]), loss, "yes" if row["confirmed"] else "-"
        print(line.format(f"{row['step']:,}", row["name"], *columns, " ".join(marks)).rstrip())


@app.command()
def verify(
    place: str = typer.Argument(help="A run, or one checkpoint: RUN:NAME or its folder."), as_json: bool = AS_JSON
) -> None:
    """Verify checkpoints: compare every file with its manifest, and frozen weights with their base, once for all
    checkpoints. Names damaged files and changed bases; exit code 1 if there are any.

    Example: bessemer checkpoints verify runs/demo
    """
    from bessemer.checkpoint import manifest
    from bessemer.checkpoint.base import ChangedBase, FrozenTensors, frozen_tensors
    from bessemer.checkpoint.store import CheckpointStore
    from bessemer.observe.progress import working

    folders = [find_checkpoint_at(place)] if not (Path(place) / "events.jsonl").exists() else []
    if not folders:
        store = CheckpointStore(Path(place) / "checkpoints")
        folders = [*reversed(list(store.newest_first())), *(path for path, _ in store.committed("model"))]
    results: list[dict[str, Any]] = []  # checkpoints, then bases
    bases: dict[tuple[str, str], FrozenTensors] = {}
    with working("hashing") as report:
        for number, folder in enumerate(folders):
            report("hashing checkpoints", number, len(folders))
            try:
                results.append({"name": folder.name, "files": len(manifest.verify(folder).files), "error": None})
                if frozen := frozen_tensors(folder):
                    bases.setdefault((frozen.base.path, frozen.base.fingerprint), frozen)
            except manifest.DamagedCheckpoint as error:
                results.append({"name": folder.name, "error": str(error)})
        for (path, fingerprint), frozen in bases.items():
            report(f"reading frozen weights from {path}")
            try:
                frozen.verify()
                row = {"base": path, "tensors": len(frozen), "fingerprint": fingerprint, "error": None}
            except ChangedBase as error:
                row = {"base": path, "error": str(error)}
            results.append(row)
    checked = [row for row in results if "name" in row], [row for row in results if "base" in row]
    damaged, changed = (sum(row["error"] is not None for row in rows) for rows in checked)
    if as_json:
        print_json({"damaged": damaged, "changed_bases": changed, "checkpoints": checked[0], "bases": checked[1]})
    else:
        _print_verified(results)
        print(
            f"{len(folders)} checkpoints, {damaged} damaged"
            + f"; {changed} of {len(bases)} bases changed" * bool(bases)
        )
    raise typer.Exit(1 if damaged or changed else 0)


def _print_verified(results: list[dict[str, Any]]) -> None:
    for row in results:
        if "base" in row and row["error"]:
            print(f"CHANGED  base {row['error']}")
        elif "base" in row:
            print(f"sound    base {row['base']}  {row['tensors']} frozen tensors, fingerprint {row['fingerprint']}")
        elif row["error"]:
            print(f"DAMAGED  {row['name']}  {row['error']}")
        else:
            print(f"sound    {row['name']}  {row['files']} files")


@app.command()
def diff(a: str = PLACE, b: str = PLACE, as_json: bool = AS_JSON) -> None:
    """Compare two checkpoints: the relative and largest change of each tensor, and settings that differ.

    Example: bessemer checkpoints diff runs/demo:best runs/demo:last
    """
    from dataclasses import asdict

    from bessemer.checkpoint.manifest import verify as check
    from bessemer.checkpoint.tensors import SavedTensors, compare
    from bessemer.observe.progress import working
    from bessemer.run.journal import json_ready
    from bessemer.session.restore import differences

    with reporting_damage(), working("comparing"):
        folders = find_checkpoint_at(a), find_checkpoint_at(b)
        before, after = (asdict(check(folder)) for folder in folders)
        changes = list(compare(*(SavedTensors(folder) for folder in folders)))
    ignored = ("files", "time", "attempt", "format", "guard", "base")
    settings = {
        key: values for key, values in differences(before, after).items() if key.partition(".")[0] not in ignored
    }
    changed = [change for change in changes if change.what != "same"]
    if as_json:
        tensors = [json_ready(asdict(change)) for change in changed]
        print_json({"settings": settings, "tensors": tensors, "same": len(changes) - len(changed)})
        return
    for key, (old, new) in settings.items():
        print(f"{key}: {old} -> {new}")
    for change in changed:
        size = "" if change.relative is None else f"  relative {change.relative:.3g}, largest {change.largest:.3g}"
        print(f"{change.name}: {change.what}{size}")
    print(f"{len(changed)} tensors differ, {len(changes) - len(changed)} are the same")


@app.command()
def prune(
    run: Path = RUN,
    keep_last: str = typer.Option("", help="Number of newest checkpoints to keep."),
    keep_best: str = typer.Option("", help="true or false: keep the one with the best validation loss."),
    keep_every: str = typer.Option("", help="Keep the first checkpoint of every N steps."),
    keep_age: str = typer.Option("", help="Keep those younger than this, such as 24h."),
    keep_bytes: str = typer.Option("", help="Maximum total size, such as 500GB."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only print what would be deleted."),
    as_json: bool = AS_JSON,
) -> None:
    """Delete checkpoints that the rules do not keep: the rules of the run's spec, or those given here.

    Tagged checkpoints, the last one and the newest confirmed one are never deleted.

    Example: bessemer checkpoints prune runs/demo --keep-last 1 --dry-run
    """
    import time

    from bessemer.checkpoint.manifest import CONFIRMED
    from bessemer.checkpoint.store import CheckpointStore, entry_of, keep
    from bessemer.run.directory import Run, RunWriter
    from bessemer.spec.load import load_spec

    options = {"last": keep_last, "best": keep_best, "every": keep_every, "age": keep_age, "bytes": keep_bytes}
    settings = [f"checkpoint.keep_{key}={value}" for key, value in options.items() if value]
    rules = load_spec(Run.existing(run).folder / "spec.yaml", settings).checkpoint
    store = CheckpointStore(run / "checkpoints")
    if not (committed := store.committed()):
        raise UserError(f"{run}: no checkpoint yet")
    newest = committed[-1][0]
    if dry_run:
        entries = [entry_of(path.name, manifest, (path / CONFIRMED).exists()) for path, manifest in committed]
        retained = keep(entries, rules, newest.name, time.time(), store.tagged())
        removed = [path.name for path, _ in committed if path.name not in retained]
    else:
        with RunWriter(run) as writer:  # takes the lock: a run in training prunes by itself
            removed = store.thin(newest, rules)
            writer.event("pruned", removed=removed, reason="by hand")
    if as_json:
        print_json({"dry_run": dry_run, "removed": removed})
        return
    print("\n".join(f"{'would delete' if dry_run else 'deleted'}  {name}" for name in removed) or "nothing to delete")


@app.command()
def restore(run: Path = RUN, checkpoint: str = NAME, as_json: bool = AS_JSON) -> None:
    """Make a run continue from a checkpoint. Later checkpoints move to checkpoints/abandoned/; none is deleted.

    Example: bessemer checkpoints restore runs/demo step-00001000.a1
    """
    from bessemer.checkpoint.lineage import ABANDONED, continue_from
    from bessemer.run.directory import Run, RunWriter

    target = checkpoint_of(Run.existing(run), checkpoint)
    with reporting_damage(), RunWriter(run) as writer:
        manifest, moved = continue_from(target.parent, target.name)
        reason = "by hand; what was saved later is set aside"
        writer.event("restored", step=manifest.step, checkpoint=target.name, abandoned=moved, reason=reason)
    if as_json:
        places = [str(target.parent / ABANDONED / name) for name in moved]
        print_json({"checkpoint": target.name, "step": manifest.step, "moved_to": places})
        return
    print(f"the run will continue from {target.name} (step {manifest.step:,})")
    for name in moved:
        print(f"moved to  {target.parent / ABANDONED / name}")


@app.command()
def tag(
    run: Path = RUN,
    checkpoint: str = NAME,
    version: str = typer.Argument(help="A semantic version, such as v1.2.0."),
    move: bool = typer.Option(False, "--move", help="Move the tag from the checkpoint that has it."),
    as_json: bool = AS_JSON,
) -> None:
    """Tag a checkpoint with a semantic version. A tagged checkpoint is never deleted.

    Example: bessemer checkpoints tag runs/demo best v1.2.0
    """
    from bessemer.checkpoint import lineage as names
    from bessemer.run.directory import Run

    folder = checkpoint_of(Run.existing(run), checkpoint)
    names.tag(folder.parent, folder.name, version, move)
    if as_json:
        print_json({"tag": version, "checkpoint": str(folder)})
    else:
        print(f"{version}  {folder}")


@app.command()
def lineage(run: Path = RUN) -> None:
    """Print the origin of a run's checkpoints as JSON: code, data, spec and parents of every start, tags, averages.

    Example: bessemer checkpoints lineage runs/demo
    """

    from bessemer.checkpoint import lineage as names
    from bessemer.run.directory import Run

    print_json(names.lineage(Run.existing(run).folder))


@app.command("import")
def import_(
    path: Path = typer.Argument(help="A .pt, .bin or .safetensors file, a torch DCP or DeepSpeed folder."),
    folder: Path = typer.Argument(help="The folder to write to: a folder of checkpoints, or a run."),
    like: Path | None = typer.Option(None, "--like", help="A run whose model the weights must fit."),
    trust: bool = typer.Option(False, "--trust", help="Unpickle any content, which can run arbitrary code."),
    as_json: bool = AS_JSON,
) -> None:
    """Convert another program's weights to a model-only checkpoint, for `start_from` of a new run.

    Example: bessemer checkpoints import other/global_step1000 start --like runs/demo
    """
    import json

    import torch

    from bessemer.checkpoint.import_weights import import_weights, require_native_names, select_weights
    from bessemer.checkpoint.tensors import save_model
    from bessemer.model.transformer import make_module
    from bessemer.observe.progress import working
    from bessemer.run.directory import Run
    from bessemer.spec.shape import ModelShape

    is_run = (folder / "events.jsonl").exists()
    with working("reading the weights"):
        weights = import_weights(path, trusted=trust)
    if like is None and not is_run:
        require_native_names(weights, str(path))
    else:
        description = json.loads((Run.existing(like or folder).folder / "model.json").read_text())
        with torch.device("meta"):
            model = make_module(ModelShape.from_dict(description["shape"]))
        weights = select_weights(weights, {name: tuple(p.shape) for name, p in model.named_parameters()}, str(path))
    made_from = {"imported_from": str(path.absolute()), "trusted": trust}
    with working("writing the checkpoint"):
        saved = save_model(folder / "checkpoints" if is_run else folder, weights, made_from)
    parameters = sum(tensor.numel() for tensor in weights.values())
    if as_json:
        print_json({"tensors": len(weights), "parameters": parameters, "checkpoint": str(saved)})
    else:
        print(f"{len(weights)} tensors, {parameters:,} parameters\nwritten  {saved}")


@app.command()
def pack(
    checkpoint: str = PLACE,
    to: Path = typer.Option(..., "--to", help="The folder of packed checkpoints."),
    delta_from: str = typer.Option("", "--delta-from", help="A packed checkpoint: store only the differences from it."),
    compress: str = typer.Option("zstd", "--compress", help="zstd, zlib or none."),
    dtype: str = typer.Option("same", "--dtype", help="same, or bf16 or int8: weights and moments are rounded."),
    threshold: float | None = typer.Option(
        None,
        "--threshold",
        min=0.0,
        help="With --delta-from: keep only changes beyond this share of a tensor's root mean square, such as 0.001.",
    ),
    name: str = typer.Option("", "--name", help="Name in the archive (default: RUN.CHECKPOINT)."),
    as_json: bool = AS_JSON,
) -> None:
    """Compress a checkpoint into an archive that stores equal tensors once. The result is read back and compared.

    Example: bessemer checkpoints pack runs/demo:last --to packed --delta-from demo.step-00001000.a1
    """
    from dataclasses import asdict
    from typing import cast

    from bessemer.checkpoint.archive import Codec
    from bessemer.checkpoint.archive import pack as run_pack
    from bessemer.checkpoint.rounding import Rounding
    from bessemer.observe.progress import working
    from bessemer.session.replay import packed_losses
    from bessemer.spec.quantity import human_bytes

    if compress not in ("zstd", "zlib", "none") or dtype not in ("same", "bf16", "int8"):
        raise UserError(f"--compress {compress} --dtype {dtype}: write zstd, zlib or none; same, bf16 or int8")
    losses: tuple[float, float] | str | None = None
    with reporting_damage(), working("packing") as report:
        folder = find_checkpoint_at(checkpoint)
        packed_name, codec, rounding = name or _packed_name(folder), cast(Codec, compress), cast(Rounding, dtype)
        result = run_pack(folder, to, packed_name, delta_from or None, codec, rounding, threshold)
        if dtype != "same" or threshold is not None:
            report("measuring the loss")
            losses = packed_losses(folder, to, packed_name)
    if as_json:
        print_json(asdict(result) | ({"validation_loss": losses} if losses else {}))
        return
    share = result.bytes_written / max(1, result.bytes_before)
    print(
        f"{result.name}  {human_bytes(result.bytes_before)} -> {human_bytes(result.bytes_written)} ({share:.0%}); "
        f"{result.tensors} tensors, {result.already_there} already stored, {result.as_difference} as differences"
    )
    if result.compared:
        print(f"changed beyond {threshold:g}: {result.changed / result.compared:.2%} of {result.compared:,} numbers")
    for group, error in result.errors.items():
        print(f"read back  {group}: {'every bit the same' if error == 0 else f'largest error {error:.3g}'}")
    if isinstance(losses, tuple):
        before, after = losses
        print(f"validation loss  {before:.5f} -> {after:.5f} ({after - before:+.5f})")
    elif losses:
        print(f"validation loss  not measured: {losses}")


def _packed_name(folder: Path) -> str:
    """RUN.CHECKPOINT: checkpoints have the same names in all runs."""
    parent = folder.absolute().parent
    return f"{parent.parent.name}.{folder.name}" if parent.name == "checkpoints" else folder.name


@app.command()
def unpack(
    store: Path = typer.Argument(help="The folder of packed checkpoints."),
    name: str = typer.Argument(help="Its name there."),
    folder: Path = typer.Argument(help="The folder of checkpoints to write it to."),
    as_json: bool = AS_JSON,
) -> None:
    """Unpack a checkpoint so that a run can load it. Every tensor is compared with its hash.

    Example: bessemer checkpoints unpack packed demo.step-00001000.a1 runs/again/checkpoints
    """
    from bessemer.checkpoint.archive import unpack as run_unpack
    from bessemer.observe.progress import working

    with reporting_damage(), working("unpacking"):
        written = run_unpack(store, name, folder)
    if as_json:
        print_json({"checkpoint": str(written)})
    else:
        print(f"written  {written}")


@app.command()
def average(
    run: Path = RUN,
    last: int = typer.Option(5, "--last", min=1, help="Number of newest checkpoints to average."),
    names: list[str] = typer.Option([], "--names", help="Average these instead: names or tags. Repeatable."),
    decay: float | None = typer.Option(None, "--decay", help="Exponential average with this decay, such as 0.5."),
    greedy: bool = typer.Option(
        False, "--greedy", help="Add a checkpoint only if the validation loss falls (greedy soup)."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Average checkpoints of a run into a model-only checkpoint of the same run.

    Example: bessemer checkpoints average runs/demo --last 5 --greedy
    """
    from bessemer.checkpoint.manifest import verify
    from bessemer.checkpoint.store import MODEL, CheckpointStore
    from bessemer.checkpoint.tensors import SavedTensors, exponential_weights, greedy_soup, save_model
    from bessemer.checkpoint.tensors import average as mean
    from bessemer.observe.progress import working
    from bessemer.run.directory import Run

    if greedy and decay is not None:
        raise UserError("--greedy uses equal shares: leave out --decay")
    existing = Run.existing(run)
    newest = [path for path, _ in CheckpointStore(existing.checkpoints).committed()][-last:]
    folders = [checkpoint_of(existing, name) for name in names] or newest
    if not folders:
        raise UserError(f"{run}: no checkpoint yet; train it first")
    with reporting_damage(), working("averaging"):
        manifests = {folder.name: verify(folder) for folder in folders}
        sources = {folder.name: SavedTensors(folder, MODEL) for folder in folders}
        loss = None
        if greedy:
            from bessemer.session.replay import validator

            soup = greedy_soup(sources, validator(existing.folder))
            chosen, weights, loss, shares = soup.names, soup.weights, soup.loss, [1.0] * len(soup.names)
            for name, alone in soup.alone.items() if not as_json else ():
                print(f"{name}  validation loss {alone:.4f}{'  used' if name in chosen else ''}")
        else:
            chosen = list(sources)
            shares = [1.0] * len(chosen) if decay is None else exponential_weights(len(chosen), decay)
            weights = mean(list(sources.values()), shares)
    total = sum(shares)
    made_from = {"averaged_of": chosen, "shares": [share / total for share in shares], "greedy": greedy}
    like = max((manifests[name] for name in chosen), key=lambda manifest: manifest.step)
    saved = save_model(existing.checkpoints, weights, made_from, like, loss)
    if as_json:
        print_json({"checkpoint": str(saved), "validation_loss": loss, **made_from})
        return
    print(f"average of {', '.join(chosen)}" + ("" if loss is None else f"; validation loss {loss:.4f}"))
    print(f"written  {saved}")
