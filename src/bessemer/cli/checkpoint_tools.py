"""`bessemer checkpoints import | pack | unpack | average`: checkpoints made of other files or of one another."""

from __future__ import annotations

from pathlib import Path

import typer

from bessemer.cli.checkpoints import AS_JSON, PLACE, RUN, app, checkpoint_at, checkpoint_of, damage_told


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

    from bessemer.checkpoint.imports import fit, import_weights, refuse_other_names
    from bessemer.checkpoint.tensors import save_model
    from bessemer.model.transformer import network
    from bessemer.observe.activity import working
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

    from bessemer.checkpoint.archive import pack as run_pack
    from bessemer.checkpoint.archive_bytes import Codec
    from bessemer.errors import UserError
    from bessemer.observe.activity import working
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
    from bessemer.observe.activity import working

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
    from bessemer.checkpoint.average import average as mean
    from bessemer.checkpoint.average import exponential_weights, greedy_soup
    from bessemer.checkpoint.manifest import verify
    from bessemer.checkpoint.shelf import MODEL, Shelf
    from bessemer.checkpoint.tensors import SavedTensors, save_model
    from bessemer.errors import UserError
    from bessemer.observe.activity import working
    from bessemer.run.directory import Run

    if greedy and decay is not None:
        raise UserError("--greedy chooses equal shares: leave out --decay")
    found = Run.existing(run)
    newest = [path for path, _ in Shelf(found.checkpoints).committed()][-last:]
    folders = [checkpoint_of(found, name) for name in names] or newest
    if not folders:
        raise UserError(f"{run}: no checkpoint yet; train it first")
    with damage_told(), working("averaging"):
        manifests = {folder.name: verify(folder) for folder in folders}
        sources = {folder.name: SavedTensors(folder, MODEL) for folder in folders}
        loss = None
        if greedy:
            from bessemer.supervise.validate import validator

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
