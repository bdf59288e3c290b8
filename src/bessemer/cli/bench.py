"""`bessemer bench`: the peak speed of this machine for the planner, how training scales, faster settings of a run, and
load on a server."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from bessemer.cli.console import AS_JSON, DEVICE, SETTINGS, SPEC, CommandGroup
from bessemer.errors import UserError

app = typer.Typer(cls=CommandGroup)


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    quick: bool = typer.Option(False, "--quick", help="A few seconds, less exact; not saved unless --save."),
    save: bool | None = typer.Option(None, "--save/--no-save", help="Save the numbers for plans and profiles."),
    device: str = DEVICE,
    folder: Path = typer.Option(Path("runs"), "--folder", help="The folder whose disk is measured."),
    as_json: bool = AS_JSON,
) -> None:
    """Measure this machine's peak rates: matmul, attention, memory, disk, GPU links.

    Run nothing else meanwhile. Plans and profiles then use these numbers.

    Example: bessemer bench
    """
    if context.invoked_subcommand:
        return
    from bessemer.plan.hardware import HEADER, store_ceilings
    from bessemer.spec.schema import ParallelSpec

    if device not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"--device {device}: write auto, cpu, cuda or mps")
    from bessemer.bench.ceilings import measure_ceilings
    from bessemer.train.device import bench_file, name_and_memory, pick_device, use_threads

    spec = ParallelSpec(device=device)  # type: ignore[arg-type]
    target = pick_device(spec)
    use_threads(spec)
    if not as_json:
        print(f"{name_and_memory(target)[0]}\n\n{HEADER}", flush=True)
    ceilings = measure_ceilings(target, folder, quick, tell=lambda line: None if as_json else print(line, flush=True))
    if as_json:
        print(ceilings.to_json())
    if save or (save is None and not quick):
        store_ceilings(ceilings, bench_file(target))
        if not as_json:
            print(f"\nsaved to {bench_file(target)}")


@app.command()
def scaling(
    target: str = typer.Argument(help="A spec file, a preset such as 10M, or a Hugging Face folder."),
    settings: list[str] = SETTINGS,
    ranks: str | None = typer.Option(
        None, "--ranks", help="Numbers of processes, such as 1,2,4 (default: up to all GPUs)."
    ),
    layouts: str | None = typer.Option(
        None, "--layouts", help="For example dp_replicate,tp=2+dp_shard; a degree without a number takes the rest."
    ),
    weak: bool = typer.Option(
        False, "--weak", help="Weak scaling: the same tokens per process, instead of the same batch."
    ),
    steps: int = typer.Option(10, "--steps", help="Timed steps, after four of warm-up."),
    row: int = typer.Option(1024, "--context", help="Tokens per row, if only a model is named."),
    batch: int | None = typer.Option(None, "--batch", help="Tokens per step, instead of the spec's."),
    out: Path | None = typer.Option(None, "--out", help="A file for the numbers, or a folder for a dated one."),
    as_json: bool = AS_JSON,
) -> None:
    """Measure throughput of 1 to N processes in every layout, and suggest the best.

    Trains a few steps in each, and reports efficiency and the share of communication.

    Example: bessemer bench scaling my-run.yaml --ranks 1,2 --layouts dp_replicate,dp_shard
    """
    import json
    import sys

    from bessemer.bench.scaling import USUAL, measure_scaling, save, table

    try:
        counts = [int(count) for count in ranks.split(",")] if ranks else None
    except ValueError:
        raise UserError(f"--ranks {ranks}: write numbers separated by commas, such as 1,2,4") from None
    layout_names = [text.strip() for text in layouts.split(",")] if layouts else USUAL

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    result = measure_scaling(target, settings, counts, layout_names, weak, steps, row, batch, report)
    print(json.dumps(result.to_json(), indent=1) if as_json else "\n".join(["", *table(result)]))
    if out:
        report(f"saved to {save(result, out)}")
    if not any(row.tokens_per_s for row in result.rows):
        raise typer.Exit(1)


@app.command()
def optimise(
    spec: Path = SPEC,
    settings: list[str] = SETTINGS,
    allow: list[str] = typer.Option(
        [], "--allow", help="precision (bf16, tf32) or fp8: changes that alter the numbers of every pass. Repeatable."
    ),
    minutes: float = typer.Option(15.0, "--minutes", min=0.5, help="Time for all trials."),
    trials: int = typer.Option(24, "--trials", min=3, help="Most measurements, the first two of the spec as given."),
    seconds: float = typer.Option(4.0, "--seconds", min=0.1, help="Timed part of each trial, of at least three steps."),
    out: Path | None = typer.Option(None, "--out", help="Write the best spec here, with the comments of the original."),
    as_json: bool = AS_JSON,
) -> None:
    """Measure which settings train a spec faster on this machine.

    Tries compilation, micro-batch, recomputation, layout, data workers, and precision if allowed. Each trial trains
    some steps of the real run and discards them.

    Example: bessemer bench optimise my-run.yaml --allow precision --out fast.yaml
    """
    import shlex
    import sys

    from bessemer.bench.optimise import Optimiser, as_settings, table, write_best
    from bessemer.cli.console import print_json

    if "WORLD_SIZE" in os.environ:
        raise UserError("bench optimise starts processes itself: run it without torchrun")
    if out is not None and out.exists():
        raise UserError(f"--out {out}: the file exists: give another name, or remove it")

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    result = Optimiser(spec, settings, allow, 60 * minutes, trials, seconds, report).run()
    best = [*settings, *as_settings(result.best)]
    command = ["bessemer", "train", str(spec), *(part for setting in best for part in ("--set", setting))]
    if out is not None:
        write_best(spec, best, out)
        command = ["bessemer", "train", str(out)]
    if as_json:
        print_json(result.to_json() | {"command": shlex.join(command)})
    else:
        print("\n".join(["", *table(result), f"train with it: {shlex.join(command)}"]))


@app.command()
def serve(
    url: str = typer.Argument(help="An OpenAI-compatible server, such as http://127.0.0.1:8000/v1."),
    model: str | None = typer.Option(None, "--model", help="The model's name (default: the server's first)."),
    requests: int = typer.Option(100, "--requests", min=1, help="Number of requests."),
    rate: float = typer.Option(4.0, "--rate", min=0, help="Mean arrivals per second; 0 sends all at once."),
    lengths: str = typer.Option(
        "256x128", "--lengths", help="PROMPTxANSWER tokens, or a mix such as 128x64:0.8,2048x256:0.2."
    ),
    slo: str | None = typer.Option(None, "--slo", help="Latency limits: interactive, streaming, edge or batch."),
    chat: bool = typer.Option(False, "--chat", help="Send chats instead of completions."),
    ignore_eos: bool = typer.Option(
        False, "--ignore-eos", help="Answers of full length. vLLM and Bessemer know the option; others may refuse it."
    ),
    seed: int = typer.Option(0, "--seed", help="The same seed sends the same load."),
    seconds: float | None = typer.Option(
        None, "--seconds", min=0.1, help="Measure no longer; requests that have not ended are counted and left out."
    ),
    out: Path | None = typer.Option(None, "--out", help="A file for the numbers and each request's times."),
    as_json: bool = AS_JSON,
) -> None:
    """Measure an OpenAI-compatible server under load: latencies, throughput and goodput.

    The key comes from OPENAI_API_KEY. The exit code is 1 if requests fail or the limits of --slo are not met.

    Example: bessemer bench serve http://127.0.0.1:8000/v1 --rate 8 --slo interactive
    """
    import json
    import sys
    from dataclasses import asdict

    from bessemer.bench.serve import PROMISES, Load, measure_load, parse_lengths, table
    from bessemer.storage import write_atomic

    if slo is not None and slo not in PROMISES:
        raise UserError(f"--slo {slo}: write one of {', '.join(PROMISES)}")
    key = os.environ.get("OPENAI_API_KEY")
    load = Load(url, model, requests, rate, parse_lengths(lengths), chat, ignore_eos, seed, key, seconds=seconds)
    result = measure_load(load, lambda line: print(line, file=sys.stderr, flush=True))
    summary = result.summary(PROMISES[slo] if slo else None)
    print(json.dumps(summary, indent=1) if as_json else "\n".join(table(summary)))
    if error := next((times.error for times in result.times if times.error and not times.unfinished), None):
        print(f"first error: {error}", file=sys.stderr)
    if out is not None:
        details = {
            "command": ["bessemer", *sys.argv[1:]],
            **summary,
            "times": [asdict(times) for times in result.times],
        }
        write_atomic(out, json.dumps(details, indent=1) + "\n")
    if summary["failed"] or not summary.get("passed", True):
        raise typer.Exit(1)
