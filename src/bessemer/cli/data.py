"""`bessemer data`: prepare a corpus, look at what became of it, check files before using them."""

from __future__ import annotations

from pathlib import Path

import typer

from bessemer.cli.help import CommandGroup
from bessemer.cli.output import name_spec, naming_spec

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Prepare a corpus, see what became of it, check files.")

_SETTINGS = typer.Option([], "--set", help="Override a key, such as --set data.validation=2%. Repeatable.")
_JSON = typer.Option(False, "--json", help="As JSON.")


@app.command()
def prepare(
    spec: Path = typer.Argument(help="The run's YAML file."),
    settings: list[str] = _SETTINGS,
    workers: int | None = typer.Option(None, "--workers", min=1, help="Processes (default: one per core)."),
    engine: str = typer.Option("local", "--engine", help="local, or ray."),
    address: str | None = typer.Option(None, "--address", help="Address of a running Ray cluster, or auto."),
    as_json: bool = _JSON,
) -> None:
    """Read, clean, deduplicate, filter and tokenize the sources of a spec; print what became of them.

    The same command again goes on where it was stopped, with any number of workers; steps whose settings did not
    change are not run again. `bessemer train` on the same spec uses the result.

    Example: bessemer data prepare my-run.yaml --workers 8
    """
    import sys

    from bessemer.data.curate.engine import make_engine
    from bessemer.data.curate.report import PAGE, read_report
    from bessemer.errors import UserError
    from bessemer.observe.activity import working
    from bessemer.plan.decision import Plan
    from bessemer.spec.load import load_spec
    from bessemer.supervise.data import prepare_data

    if engine not in ("local", "ray"):
        raise UserError(f"--engine {engine}: write local or ray")
    run_spec = load_spec(spec, settings)
    chosen = make_engine(engine, workers, address)
    try:
        with working("listing the sources") as report, naming_spec(spec, settings):
            prepared = prepare_data(run_spec, Plan(), report, chosen)
    finally:
        chosen.close()
    for note in prepared.notes:
        print(f"note  {note}", file=sys.stderr)
    _show(read_report(prepared.folder), prepared.folder / PAGE, as_json)


@app.command()
def report(
    spec: Path = typer.Argument(help="The run's YAML file, or a folder of prepared data."),
    settings: list[str] = _SETTINGS,
    as_json: bool = _JSON,
) -> None:
    """Print the report of data that was prepared before.

    Example: bessemer data report my-run.yaml --json
    """
    from bessemer.data.curate.report import PAGE, read_report
    from bessemer.plan.decision import Plan
    from bessemer.spec.load import load_spec
    from bessemer.supervise.data import prepared_folder_of

    folder = spec if (spec / "prepared.json").exists() else prepared_folder_of(load_spec(spec, settings), Plan())
    _show(read_report(folder), folder / PAGE, as_json)


@app.command()
def verify(
    place: Path = typer.Argument(help="A run's YAML file, a run, a folder of prepared data, or a store's prefix."),
    settings: list[str] = _SETTINGS,
    add_digests: bool = typer.Option(False, "--add-digests", help="Write digests for stores that have none."),
    as_json: bool = _JSON,
) -> None:
    """Compare every byte of prepared data with the digests that were written with it.

    A run compares what it reads when it reads it; this compares everything. Exit code 1 where something is damaged,
    with the file, the place in it and what to do.

    Example: bessemer data verify my-run.yaml
    """
    import json
    import sys
    from dataclasses import replace

    from bessemer.data.curate.progress import Meter
    from bessemer.data.verify import data_bytes
    from bessemer.data.verify import verify as run_verify
    from bessemer.spec.quantity import human_bytes

    # A run keeps its spec, in which `--set` of its command is written.
    spec, place = (place / "spec.yaml" if place.is_dir() else place), _prepared_place(place, settings)
    meter = Meter(lambda line: print(line, file=sys.stderr, flush=True))
    meter.start("verifying", data_bytes(place))
    results = []
    for result in run_verify(place, meter.advance, add_digests):
        if spec.is_file() and spec.suffix in (".yaml", ".yml"):
            result = replace(result, damage=tuple(name_spec(line, spec, settings) for line in result.damage))
        results.append(result)
        if not as_json:
            note = f"  ({result.note})" if result.note else ""
            print(f"{'DAMAGED' if result.damage else 'sound  '}  {result.path}  {human_bytes(result.bytes)}{note}")
            for line in result.damage:
                print(f"         {line}")
    damaged = sum(bool(result.damage) for result in results)
    if as_json:
        print(json.dumps({"damaged": damaged, "files": [result.to_json() for result in results]}, indent=1))
    else:
        print(f"{len(results)} verified, {damaged} damaged")
    raise typer.Exit(1 if damaged else 0)


def _prepared_place(place: Path, settings: list[str]) -> Path:
    """Where the data of a spec or a run is; other places are taken as they are."""
    import json

    from bessemer.plan.decision import Plan
    from bessemer.spec.load import load_spec
    from bessemer.supervise.data import prepared_folder_of

    if (place / "data.json").exists():
        return Path(json.loads((place / "data.json").read_text())["folder"])
    if place.is_file() and place.suffix in (".yaml", ".yml"):
        return prepared_folder_of(load_spec(place, settings), Plan())
    return place


def _show(found: dict, page: Path, as_json: bool) -> None:  # type: ignore[type-arg]
    import json

    if as_json:
        print(json.dumps({**found, "page": str(page)}, indent=1))
        return
    from rich.table import Table

    from bessemer.cli.output import table_console
    from bessemer.data.curate.report import source_table, table

    console = table_console()
    for rows in (table(found), source_table(found)):
        grid = Table(box=None, pad_edge=False, header_style="bold")
        for i, name in enumerate(rows[0]):
            grid.add_column(name, justify="left" if (i in (0, 5) and rows[0][0] == "step") or i == 0 else "right")
        for row in rows[1:]:
            grid.add_row(*row)
        console.print(grid)
        console.print()
    print(f"report  {page}")
