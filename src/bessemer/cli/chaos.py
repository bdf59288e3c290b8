"""`bessemer chaos`: inject faults into short runs and report how each was handled."""

from __future__ import annotations

from pathlib import Path

import typer

from bessemer.cli.console import AS_JSON, SETTINGS, print_json


def chaos(
    spec: Path = typer.Argument(help="The run's YAML file; short runs of it are trained and broken."),
    faults: str = typer.Option("all", "--faults", help="Kinds of faults, such as poison,nan,sigkill."),
    count: int = typer.Option(16, "--count", min=1, help="Total number of faults."),
    per_run: int = typer.Option(4, "--per-run", min=2, help="Faults per run."),
    learn: int = typer.Option(1000, "--learn", min=100, help="Steps before the first fault."),
    seeds: int = typer.Option(5, "--seeds", min=2, help="Clean runs for comparison."),
    jobs: int = typer.Option(1, "--jobs", min=1, help="Parallel runs."),
    seed: int = typer.Option(0, "--seed", help="Seed of the places and steps of the faults."),
    folder: Path = typer.Option(
        Path("runs/chaos"), "--folder", help="The folder of the runs; its content is deleted first."
    ),
    settings: list[str] = SETTINGS,
    as_json: bool = AS_JSON,
) -> None:
    """Inject faults into short runs of a spec and report how each was handled.

    Prints for each fault the step of detection, the verdict, the action, the recovery and its cost in steps; then
    compares the final loss with that of clean runs.

    Example: bessemer chaos recipes/chaos.yaml --faults poison,lr-jump,flip --count 20
    """
    import sys
    from dataclasses import asdict

    from bessemer.chaos.campaign import run_campaign
    from bessemer.chaos.faults import parse_kinds
    from bessemer.spec.load import load_spec

    kinds = parse_kinds(faults)
    run_spec = load_spec(spec, settings)
    campaign = run_campaign(
        run_spec, kinds, count, folder, per_run=per_run, learn=learn, seeds=seeds, jobs=jobs, seed=seed,
        say=lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    if as_json:
        print_json({"summary": campaign.summary(), "rows": [asdict(row) for row in campaign.rows]})
        return
    print(f"{'fault':22} {'run':10} {'step':>5} {'found':>6}  {'verdict':14} {'cost':>5}  action")
    for row in sorted(campaign.rows, key=lambda row: (row.kind, row.run, row.step)):
        at = "-" if row.detected_at is None else str(row.detected_at)
        mark = "" if row.right is not False else " (wrong)"
        print(
            f"{row.kind:22} {row.run:10} {row.step:>5} {at:>6}  {(row.verdict or '-') + mark:14} {row.cost_steps:>5}  "
            f"{row.action}{'' if row.recovered else '; NOT RECOVERED'}"
        )
    print()
    for key, value in campaign.summary().items():
        print(f"{key.replace('_', ' '):18} {value}")
