"""`bessemer inspect`: learning-rate test, gradients, loss landscape, histograms, noise scale, origin of NaN."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bessemer.cli.console import CommandGroup

if TYPE_CHECKING:
    from bessemer.diagnose.report import InspectionReport

app = typer.Typer(
    cls=CommandGroup,
    help="Inspect a model: learning rate, gradients, loss landscape, NaN.\n\n"
    "Example: bessemer inspect gradients runs/demo",
    no_args_is_help=True,
)
RunFolder = Annotated[Path, typer.Argument(help="The run's folder, such as runs/demo.")]
Batches = Annotated[int, typer.Option(min=1, help="Number of the run's steps to use.")]
Checkpoint = Annotated[str, typer.Option(help="last, best, a tag, or a name such as step-00001000.a1.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Html = Annotated[Path | None, typer.Option(help="Also write a page with all figures to this file.")]


def _print_report(inspect: Callable[[], InspectionReport], as_json: bool, html: Path | None) -> None:
    from bessemer.observe.progress import working

    with working("inspecting the model"):
        report = inspect()
    if html is not None:
        html.write_text(report.html(), encoding="utf-8")
    print(report.to_json() if as_json else report.text())


@app.command()
def lr(
    spec: Annotated[Path, typer.Argument(help="The run's YAML file, or a run's folder to start from its weights.")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a key of the spec. Repeatable.")] = None,
    first: Annotated[float, typer.Option(help="Lowest learning rate.")] = 1e-6,
    last: Annotated[float, typer.Option(help="Highest rate; the test stops earlier if the loss diverges.")] = 10.0,
    steps: Annotated[int, typer.Option(help="Updates from the lowest to the highest rate.")] = 200,
    checkpoint: Checkpoint = "last", device: Device = "auto", as_json: Json = False, html: Html = None,
) -> None:  # fmt: skip
    """Raise the learning rate until the loss diverges, and suggest one (range test). Writes no run.

    Example: bessemer inspect lr my-run.yaml --html lr.html
    """
    from bessemer.session.inspect import inspect_lr

    _print_report(lambda: inspect_lr(spec, settings or [], checkpoint, device, first, last, steps), as_json, html)


@app.command()
def transfer(
    spec: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a key of the spec.")] = None,
    widths: Annotated[str, typer.Option(help="Widths to compare.")] = "64,128,256",
    first: Annotated[float, typer.Option(help="Lowest learning rate.")] = 1e-3,
    last: Annotated[float, typer.Option(help="Highest learning rate.")] = 3e-2,
    points: Annotated[int, typer.Option(min=2, help="Rates to try.")] = 6,
    steps: Annotated[int, typer.Option(min=8, help="Updates of each run.")] = 100,
    device: Device = "auto", as_json: Json = False, html: Html = None,
) -> None:  # fmt: skip
    """Transfer check: train short runs of several widths at several rates, and plot whether the best rate stays.

    Example: bessemer inspect transfer my-run.yaml --set model.init=mup --html transfer.html
    """
    from bessemer.diagnose.short_runs import spread_rates
    from bessemer.session.inspect import inspect_transfer

    sizes, rates = [int(width) for width in widths.split(",")], spread_rates(first, last, points)
    _print_report(lambda: inspect_transfer(spec, settings or [], device, sizes, rates, steps), as_json, html)


@app.command()
def warmup(
    spec: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a key of the spec.")] = None,
    warmups: Annotated[str, typer.Option(help="Lengths to try, in steps.")] = "1,10,30,100",
    steps: Annotated[int, typer.Option(min=16, help="Updates of each run.")] = 200,
    rate: Annotated[float | None, typer.Option(help="Peak learning rate (default: the planned one).")] = None,
    device: Device = "auto", as_json: Json = False, html: Html = None,
) -> None:  # fmt: skip
    """Warm-up calibration: the shortest warm-up to the peak rate that keeps gradients calm and the loss low.

    Example: bessemer inspect warmup my-run.yaml --warmups 1,20,50,100
    """
    from bessemer.session.inspect import inspect_warmup

    lengths = [int(length) for length in warmups.split(",")]
    _print_report(lambda: inspect_warmup(spec, settings or [], device, lengths, steps, rate), as_json, html)


@app.command()
def gradients(
    run: RunFolder, batches: Batches = 4, checkpoint: Checkpoint = "last", device: Device = "auto",
    as_json: Json = False, html: Html = None,
) -> None:  # fmt: skip
    """Compare every parameter's gradient with its weight, and report what vanishes or explodes.

    Example: bessemer inspect gradients runs/demo --checkpoint best
    """
    from bessemer.session.inspect import from_run, inspect_gradients

    _print_report(lambda: inspect_gradients(from_run(run, checkpoint, device), batches), as_json, html)


@app.command()
def landscape(
    run: RunFolder, batches: Batches = 1,
    reach: Annotated[float, typer.Option(help="Distance in units of the weights' norm.")] = 1.0,
    points: Annotated[int, typer.Option(min=3, help="Points along the first direction.")] = 21,
    grid: Annotated[int, typer.Option(min=0, help="Points per side of the surface; 0 for none.")] = 9,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the directions.")] = 0,
    checkpoint: Checkpoint = "last", device: Device = "auto", as_json: Json = False, html: Html = None,
) -> None:  # fmt: skip
    """Compute the loss around the weights, along filter-normalized random directions.

    Costs points + grid x grid forward passes.

    Example: bessemer inspect landscape runs/demo --grid 15 --html landscape.html
    """
    from bessemer.session.inspect import from_run, inspect_landscape

    def inspect() -> InspectionReport:
        return inspect_landscape(from_run(run, checkpoint, device), batches, reach, points, grid, seed)

    _print_report(inspect, as_json, html)


@app.command()
def histograms(
    run: RunFolder, checkpoint: Checkpoint = "last", device: Device = "auto", as_json: Json = False, html: Html = None
) -> None:  # fmt: skip
    """Show histograms of weights, gradients and activations; zero gradients, dead units, updates lost to bf16.

    Example: bessemer inspect histograms runs/demo --html histograms.html
    """
    from bessemer.session.inspect import from_run, inspect_histograms

    _print_report(lambda: inspect_histograms(from_run(run, checkpoint, device)), as_json, html)


@app.command()
def noise(
    run: RunFolder, batches: Batches = 16, checkpoint: Checkpoint = "last", device: Device = "auto",
    as_json: Json = False, html: Html = None,
) -> None:  # fmt: skip
    """Estimate the gradient noise scale and what it implies for the batch size.

    Example: bessemer inspect noise runs/demo --batches 32
    """
    from bessemer.session.inspect import from_run, inspect_noise

    _print_report(lambda: inspect_noise(from_run(run, checkpoint, device), batches), as_json, html)


@app.command()
def nan(
    run: RunFolder,
    step: Annotated[int, typer.Option(help="The step number, as in the metrics and events.")],
    checkpoint: Annotated[
        str | None, typer.Option(help="Use these weights; default: replay the steps since the last checkpoint.")
    ] = None,
    device: Device = "auto", as_json: Json = False, html: Html = None,
) -> None:  # fmt: skip
    """Find the module or gradient where a step stops being finite, and show its inputs.

    Example: bessemer inspect nan runs/demo --step 655
    """
    from bessemer.session.inspect import inspect_nan

    _print_report(lambda: inspect_nan(run, step, checkpoint, device), as_json, html)
