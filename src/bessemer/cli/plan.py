"""`bessemer plan`: what to run, on what, for how long, at what price, and why; and how right such plans have been."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer()


@app.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
    model: str | None = typer.Option(None, "--model", help="A size or preset, such as 7B or llama-7b."),
    gpus: str | None = typer.Option(None, "--gpus", help="Such as 8xA100-80GB or '2 nodes of 8 H100'."),
    tokens: str | None = typer.Option(None, "--tokens", help="Such as 100B; left out: as many as suit the model."),
    row: int = typer.Option(4096, "--context", help="Tokens of a row."),
    batch: str | None = typer.Option(None, "--batch", help="Tokens of a step, such as 4M; left out: by size."),
    precision: str = typer.Option("bf16", "--precision", help="bf16, fp16, fp8, tf32 or fp32."),
    network: str | None = typer.Option(None, "--network", help="Of a node, such as '8 x NDR' or '400 Gb/s'."),
    rate: str | None = typer.Option(None, "--tokens-per-second", help="A wish to be checked against what is possible."),
    as_json: bool = typer.Option(False, "--json", help="As JSON."),
) -> None:
    """Plan a training run before there is anything to run: layout, batch, learning rate, memory, days and money, each
    with its reason and the error that such predictions had.

    Example: bessemer plan --model 7b --tokens 100B --gpus 8xA100-80GB
    """
    if context.invoked_subcommand:
        return
    import json

    from bessemer.errors import UserError
    from bessemer.plan.proposal import check_rate, lines, propose, to_json

    if model is None or gpus is None:
        raise UserError("write --model and --gpus, such as: bessemer plan --model 7b --tokens 100B --gpus 8xA100-80GB")
    given = {"--tokens": tokens, "--batch": batch, "--tokens-per-second": rate}
    wanted = {name: _count(name, text) for name, text in given.items()}
    found = propose(model, gpus, wanted["--tokens"], row, wanted["--batch"], precision, network)
    if wanted["--tokens-per-second"]:
        check_rate(found, wanted["--tokens-per-second"])
    print(json.dumps(to_json(found), indent=1) if as_json else "\n".join(lines(found)))


def _count(name: str, text: str | None) -> int | None:
    from bessemer.errors import UserError
    from bessemer.spec.quantity import parse_count

    if text is None:
        return None
    try:
        return parse_count(text, least=1)
    except ValueError as fault:
        raise UserError(f"{name} {text}: {fault}") from None


@app.command()
def check(
    rows: Path = typer.Argument(help="A CSV file with the columns of vTrain's or llm-foundry's published table."),
    as_json: bool = typer.Option(False, "--json", help="As JSON."),
) -> None:
    """Predict the step time of every row from its configuration alone, beside what was measured.

    Example: bessemer plan check benchmarks/data/planner/llmfoundry_mfu.csv
    """
    import json

    from bessemer.plan.check import check_file, table, to_json

    found = check_file(rows)
    print(json.dumps(to_json(found), indent=1) if as_json else "\n".join(table(found)))
