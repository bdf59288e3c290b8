"""`bessemer spec check|show|schema`: validate and show a spec without running it."""

from __future__ import annotations

from pathlib import Path

import typer

from bessemer.cli.console import AS_JSON, SETTINGS, SPEC, CommandGroup, print_json

app = typer.Typer(
    cls=CommandGroup,
    help="Check a spec, show it in full, or print its JSON Schema.\n\nExample: bessemer spec check my-run.yaml",
    no_args_is_help=True,
)


@app.command()
def check(
    spec: Path = SPEC,
    settings: list[str] = SETTINGS,
    skip_paths: bool = typer.Option(
        False, "--skip-paths", help="Do not check the files and folders that it names: they are on another machine."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Report every mistake in a spec with its line and fix, and warn about settings that run but rarely work.

    The files and folders that it names must exist; URLs are not opened. Exit code 2 if there is a mistake. To silence a
    warning, write `lints: {silence: [RULE]}` in the spec.

    Example: bessemer spec check my-run.yaml
    """
    from bessemer.model.families.registry import read_shape
    from bessemer.spec.lints import lint_spec
    from bessemer.spec.load import SpecError, load_document
    from bessemer.spec.paths import path_problems
    from bessemer.spec.stages import has_stages, load_chain
    from bessemer.sweep.run import open_sweep

    if has_stages(spec):
        chain = load_chain(spec, settings)
        if as_json:
            names = [stage.name for stage in chain.stages]
            print_json({"spec": str(spec), "stages": names, "warnings": [], "paths_checked": False})
            return
        print(f"{spec}: fine, {len(chain.stages)} stages: {', '.join(stage.name for stage in chain.stages)}")
        return
    loaded = load_document(spec, settings)
    if loaded.spec.sweep is not None:
        open_sweep(spec, settings)
    if not skip_paths and (problems := loaded.locate(path_problems(loaded.spec, read_shape))):
        raise SpecError([*problems, f"{spec}: pass --skip-paths if its files are on another machine"])
    warnings = sorted(
        lint_spec(loaded.spec, None if skip_paths else Path()), key=lambda lint: loaded.document.rank(lint.path)
    )
    rows = [
        {
            "place": loaded.document.place(lint.path), "key": ".".join(map(str, lint.path)), "message": lint.message,
            "rule": lint.rule,
        }
        for lint in warnings
    ]  # fmt: skip
    if as_json:
        print_json({"spec": str(spec), "run": loaded.spec.name, "warnings": rows, "paths_checked": not skip_paths})
        return
    for row in rows:
        print(f"{row['place']}: warning: {row['key']}: {row['message']} [{row['rule']}]")
    result = f"{len(warnings)} warning{'s' * (len(warnings) != 1)}" if warnings else "fine"
    unchecked = "; its paths were not checked" if skip_paths else ""
    print(f"{spec}: {result} (run {loaded.spec.name}){unchecked}")


@app.command()
def show(
    spec: Path = SPEC,
    settings: list[str] = SETTINGS,
    plot: bool = typer.Option(False, "--plot", help="Draw the learning rate over the run instead."),
    as_json: bool = AS_JSON,
) -> None:
    """Print a spec with every default filled in. Keys that stay `auto` are decided when the run starts.

    Example: bessemer spec show my-run.yaml --set schedule.kind=wsd --plot
    """
    from bessemer.spec.load import dump_spec, load_spec

    loaded = load_spec(spec, settings)
    if not plot:
        if as_json:
            print_json(loaded.model_dump(mode="json"))
        else:
            print(dump_spec(loaded), end="")
        return
    from bessemer.observe.figure import LineChart
    from bessemer.plan.decide import sketch_run
    from bessemer.plan.schedule import curve, run_schedule

    sketch, notes = sketch_run(loaded)
    schedule = run_schedule(loaded.schedule, sketch)
    steps, rates = curve(schedule, max(sketch.total_steps, 1))
    if as_json:
        print_json({"steps": list(steps), "lr": rates, "notes": notes})
        return
    marks = {reason: float(step) for step, reason in schedule.changes().items()}
    print(LineChart("learning rate", steps, {loaded.schedule.kind: rates}, "step", marks=marks).text())
    print("\n".join(notes))


@app.command()
def schema() -> None:
    """Print the JSON Schema of specs, for editors.

    Example: bessemer spec schema > bessemer.schema.json
    """

    from bessemer.spec.schema import RunSpec

    print_json(RunSpec.model_json_schema())
