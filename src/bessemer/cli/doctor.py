"""`bessemer doctor`: is this machine ready for a run?"""

from __future__ import annotations

from pathlib import Path

import typer

from bessemer.cli.console import AS_JSON, print_json


def doctor(
    folder: Path = typer.Argument(Path("."), help="Where runs will be written."),
    port: int = typer.Option(29500, "--port", min=1, max=65535, help="The port of torch.distributed."),
    as_json: bool = AS_JSON,
) -> None:
    """Check this machine before a run, with a fix for each problem.

    Checks versions, GPUs, memory, limits, disk, clock and network.

    Writes 64 MiB to the folder to measure the disk. Exit code 1 if something is critical.

    Example: bessemer doctor /scratch/runs
    """
    from bessemer.bench.doctor import examine_machine
    from bessemer.observe.progress import working

    with working("examining the machine"):
        checks = examine_machine(folder, port)
    if as_json:
        print_json([check.to_json() for check in checks])
    else:
        for check in checks:
            print(f"{check.severity or 'ok':8}  {check.name}: {check.value}")
            if check.fix:
                print(f"          fix: {check.fix}")
    if any(check.severity == "critical" for check in checks):
        raise typer.Exit(1)
