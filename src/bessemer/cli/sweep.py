"""`bessemer sweep`: run one spec with many values, and write the best."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from bessemer.cli.console import AS_JSON, SETTINGS, SPEC, naming_spec, print_json, print_rows


def sweep(spec: Path = SPEC, settings: list[str] = SETTINGS, as_json: bool = AS_JSON) -> None:
    """Run a spec with many values of its `sweep` section, and write the best spec.

    Trials run one after the other, each an ordinary run in runs/NAME. The same command again continues a sweep that was
    interrupted, and prints the table of one that is finished. Exit code 1 if no trial has a value.

    Example: bessemer sweep my-sweep.yaml --set sweep.trials=30
    """
    from bessemer.sweep.report import closing_lines, table_rows, to_json
    from bessemer.sweep.run import open_sweep, run_sweep

    out = sys.stderr if as_json else sys.stdout  # of the progress
    opened = open_sweep(spec, settings)
    with naming_spec(spec, settings):
        trials, code = run_sweep(opened, lambda line: print(line, file=out, flush=True))
    if as_json:
        print_json(to_json(opened, trials))
    elif not trials.begun:
        print()
        print_rows(table_rows(opened, trials))
        print("\n" + "\n".join(closing_lines(opened, trials)))
    if code:
        raise typer.Exit(code)
