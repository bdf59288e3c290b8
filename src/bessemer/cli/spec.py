"""`bessemer spec check|show|schema`: a spec before it is run."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer(help="Check a spec, show it in full, or print its JSON Schema.", no_args_is_help=True)
_SPEC = typer.Argument(help="The run's YAML file.")
_SETTINGS = typer.Option([], "--set", help="Override a key, such as --set optimizer.lr=3e-4. Repeatable.")


@app.command()
def check(spec: Path = _SPEC, settings: list[str] = _SETTINGS) -> None:
    """Say every mistake in a spec, with its line and its fix, and warn of what would run and should not.

    Exit code 2 if there is a mistake. A warning changes nothing; `lints: {silence: [RULE]}` in the spec silences it.

    Example: bessemer spec check my-run.yaml
    """
    from bessemer.spec.lints import lint
    from bessemer.spec.load import load_document

    loaded = load_document(spec, settings)
    found = sorted(lint(loaded.spec), key=lambda warning: loaded.document.rank(warning.path))
    for warning in found:
        key = ".".join(str(step) for step in warning.path)
        print(f"{loaded.document.place(warning.path)}: warning: {key}: {warning.message} [{warning.rule}]")
    told = f"{len(found)} warning{'s' * (len(found) != 1)}" if found else "fine"
    print(f"{spec}: {told} (run {loaded.spec.name})")


@app.command()
def show(spec: Path = _SPEC, settings: list[str] = _SETTINGS) -> None:
    """Print a spec with every default filled in.

    What is left `auto` is decided when the run starts.

    Example: bessemer spec show my-run.yaml --set model=30M
    """
    from bessemer.spec.load import dump_spec, load_spec

    print(dump_spec(load_spec(spec, settings)), end="")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors.

    Example: bessemer spec schema > bessemer.schema.json
    """
    import json

    from bessemer.spec.schema import RunSpec

    print(json.dumps(RunSpec.model_json_schema(), indent=1))
