"""`bessemer chaos`: break a run on purpose, in many ways, and see what becomes of it."""

from __future__ import annotations

from pathlib import Path

import typer


def chaos(
    spec: Path = typer.Argument(help="The run's YAML file; short runs of it are trained and broken."),
    faults: str = typer.Option("all", "--faults", help="Kinds, with commas between, such as poison,nan,sigkill."),
    count: int = typer.Option(16, "--count", min=1, help="Faults in all."),
    per_run: int = typer.Option(4, "--per-run", min=2, help="Faults in one run."),
    learn: int = typer.Option(1000, "--learn", min=100, help="Steps before the first fault."),
    seeds: int = typer.Option(5, "--seeds", min=2, help="Clean runs to compare with."),
    jobs: int = typer.Option(1, "--jobs", min=1, help="Runs at once."),
    seed: int = typer.Option(0, "--seed", help="Where and when the faults fall."),
    folder: Path = typer.Option(Path("runs/chaos"), "--folder", help="Where the runs go; what is there is removed."),
    settings: list[str] = typer.Option([], "--set", help="Override a key of the spec. Repeatable."),
    as_json: bool = typer.Option(False, "--json", help="As JSON: a summary and a row for each fault."),
) -> None:
    """Inject faults and print for each: detected at, verdict, action, recovered, cost in steps; and the final loss
    against clean runs.

    Example: bessemer chaos recipes/chaos.yaml --faults poison,lr-jump,flip --count 20
    """
    import json
    import sys
    from dataclasses import asdict

    from bessemer.chaos.campaign import run_campaign
    from bessemer.chaos.faults import parse_kinds
    from bessemer.spec.load import load_spec

    kinds = parse_kinds(faults)
    run_spec = load_spec(spec, settings)
    found = run_campaign(
        run_spec, kinds, count, folder, per_run=per_run, learn=learn, seeds=seeds, jobs=jobs, seed=seed,
        say=lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    if as_json:
        print(json.dumps({"summary": found.summary(), "rows": [asdict(row) for row in found.rows]}, indent=1))
        return
    print(f"{'fault':22} {'run':10} {'step':>5} {'found':>6}  {'verdict':14} {'cost':>5}  action")
    for row in sorted(found.rows, key=lambda row: (row.kind, row.run, row.step)):
        at = "-" if row.detected_at is None else str(row.detected_at)
        mark = "" if row.right is not False else " (wrong)"
        print(
            f"{row.kind:22} {row.run:10} {row.step:>5} {at:>6}  {(row.verdict or '-') + mark:14} {row.cost_steps:>5}  "
            f"{row.action}{'' if row.recovered else '; NOT RECOVERED'}"
        )
    print()
    for key, value in found.summary().items():
        print(f"{key.replace('_', ' '):18} {value}")
