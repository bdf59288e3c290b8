"""`bessemer bench`: what this machine does at most, measured, printed and kept for the planner; and what more processes
gain."""

from __future__ import annotations

from pathlib import Path

import typer

from bessemer.cli.console import CommandGroup

app = typer.Typer(cls=CommandGroup)


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    quick: bool = typer.Option(False, "--quick", help="Some seconds, less exact; not kept unless --save."),
    save: bool | None = typer.Option(None, "--save/--no-save", help="Keep the numbers for plans and profiles."),
    device: str = typer.Option("auto", "--device", help="auto, cpu, cuda or mps."),
    folder: Path = typer.Option(Path("runs"), "--folder", help="Where the disk is measured."),
    as_json: bool = typer.Option(False, "--json", help="As JSON."),
) -> None:
    """Measure this machine's ceilings: products by precision, attention, memory, disk, links between GPUs.

    Nothing else should run meanwhile. Plans and profiles then count from these numbers.

    Example: bessemer bench
    """
    if context.invoked_subcommand:
        return
    from bessemer.errors import UserError
    from bessemer.plan.hardware import HEADER, store_ceilings
    from bessemer.spec.parallel import ParallelSpec

    if device not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"--device {device}: write auto, cpu, cuda or mps")
    from bessemer.bench.ceilings import measure_ceilings
    from bessemer.train.device import bench_file, name_and_memory, pick_device, use_threads

    spec = ParallelSpec(device=device)  # type: ignore[arg-type]
    target = pick_device(spec)
    use_threads(spec)
    if not as_json:
        print(f"{name_and_memory(target)[0]}\n\n{HEADER}", flush=True)
    found = measure_ceilings(target, folder, quick, tell=lambda line: None if as_json else print(line, flush=True))
    if as_json:
        print(found.to_json())
    if save or (save is None and not quick):
        store_ceilings(found, bench_file(target))
        if not as_json:
            print(f"\nkept in {bench_file(target)}")


@app.command()
def scaling(
    target: str = typer.Argument(help="A spec's file, a preset such as 10M, or a Hugging Face folder."),
    settings: list[str] = typer.Option([], "--set", help="Override a key of the spec. Repeatable."),
    ranks: str | None = typer.Option(None, "--ranks", help="Numbers of processes, such as 1,2,4. All GPUs by default."),
    layouts: str | None = typer.Option(
        None, "--layouts", help="Such as dp_replicate,tp=2+dp_shard; a degree without a number takes what is left."
    ),
    weak: bool = typer.Option(False, "--weak", help="As many tokens for each process, instead of the same batch."),
    steps: int = typer.Option(10, "--steps", help="Steps that are timed, after four of warm-up."),
    row: int = typer.Option(1024, "--context", help="Tokens of a row, where only a model is named."),
    batch: int | None = typer.Option(None, "--batch", help="Tokens of a step, instead of the spec's."),
    out: Path | None = typer.Option(None, "--out", help="A file for the numbers, or a folder for a dated one."),
    as_json: bool = typer.Option(False, "--json", help="As JSON."),
) -> None:
    """Train a few steps in 1, 2, 4, ... processes and every layout: throughput, efficiency, communication, and which
    layout to take.

    Example: bessemer bench scaling my-run.yaml --ranks 1,2 --layouts dp_replicate,dp_shard
    """
    import json
    import sys

    from bessemer.bench.scaling import USUAL, measure_scaling, save, table
    from bessemer.errors import UserError

    try:
        counts = [int(count) for count in ranks.split(",")] if ranks else None
    except ValueError:
        raise UserError(f"--ranks {ranks}: write numbers with commas between, such as 1,2,4") from None
    asked = [text.strip() for text in layouts.split(",")] if layouts else USUAL

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    found = measure_scaling(target, settings, counts, asked, weak, steps, row, batch, tell)
    print(json.dumps(found.to_json(), indent=1) if as_json else "\n".join(["", *table(found)]))
    if out:
        tell(f"kept in {save(found, out)}")
    if not any(row.tokens_per_s for row in found.rows):
        raise typer.Exit(1)
