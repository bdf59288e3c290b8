"""`bessemer spec check|show|schema`: a spec before it is run."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer(help="Check a spec, show it in full, or print its JSON Schema.", no_args_is_help=True)
_SETTINGS = typer.Option([], "--set", help="Override a key, such as --set optimizer.lr=3e-4. Repeatable.")


@app.command()
def check(spec: Path = typer.Argument(help="The run's YAML file."), settings: list[str] = _SETTINGS) -> None:
    """Say every mistake in a spec, each with its line and its fix; exit 2 if there is one.

    Example: bessemer spec check my-run.yaml
    """
    from bessemer.spec.load import SpecError, load_spec

    try:
        loaded = load_spec(spec, settings)
    except SpecError as error:
        for problem in error.problems:
            typer.echo(problem, err=True)
        raise typer.Exit(2) from None
    print(f"{spec}: fine (run {loaded.name})")


@app.command()
def show(spec: Path = typer.Argument(help="The run's YAML file."), settings: list[str] = _SETTINGS) -> None:
    """Print the spec with every default filled in; what is left `auto` is decided when the run starts.

    Example: bessemer spec show my-run.yaml --set model=30M
    """
    from bessemer.spec.load import dump_spec, load_spec

    print(dump_spec(load_spec(spec, settings)), end="")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors that complete and check YAML.

    Example: bessemer spec schema > bessemer.schema.json
    """
    import json

    from bessemer.spec.schema import RunSpec

    print(json.dumps(RunSpec.model_json_schema(), indent=1))
