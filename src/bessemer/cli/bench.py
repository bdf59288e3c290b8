"""`bessemer bench`: what this machine does at most, measured, printed and kept for the planner."""

from __future__ import annotations

from pathlib import Path

import typer


def bench(
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
    from bessemer.errors import UserError
    from bessemer.plan.ceilings import HEADER, store_ceilings
    from bessemer.spec.schema import ParallelSpec

    if device not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"--device {device}: write auto, cpu, cuda or mps")
    from bessemer.train.ceilings import measure_ceilings
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
