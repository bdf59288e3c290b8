"""`bessemer model show`: what a model is made of."""

from __future__ import annotations

import typer

from bessemer.cli.console import AS_JSON, CommandGroup, print_json

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Show a model: parameters, FLOPs, memory, a diagram.\n\nExample: bessemer model show 1B",
)


@app.callback()
def _group() -> None:
    """Makes `model` a group although it has one command."""


@app.command()
def show(
    target: str = typer.Argument(help="A spec file, a preset such as 1B, a run, or a Hugging Face folder."),
    batch: int = typer.Option(1, "--batch", min=1, help="Sequences in memory at a time."),
    context: int | None = typer.Option(
        None, "--context", min=1, help="Tokens per sequence (default: the spec's data.context, else 2048)."
    ),
    vocab: int | None = typer.Option(
        None, "--vocab", min=1, help="For a preset, or a tokenizer that is not trained yet."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Count a model's parameters, FLOPs and memory, and draw it. No weights are needed.

    Example: bessemer model show Mixtral-8x7B/ --batch 4 --context 4096
    """

    from bessemer.export.describe import describe, diagram, find_context, find_shape, table

    shape = find_shape(target, vocab)
    description = describe(shape, batch, context or find_context(target))
    if as_json:
        print_json({"shape": shape.to_dict(), **description})
    else:
        print("\n".join([*diagram(shape), "", *table(description)]))
