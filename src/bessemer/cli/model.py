"""`bessemer model show`: a network counted and drawn before anything is trained."""

from __future__ import annotations

import typer

from bessemer.cli.console import CommandGroup

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Look at a model: parameters, FLOPs, memory, a diagram.")


@app.callback()
def _group() -> None:
    """A group, so that `show` has to be said."""


@app.command()
def show(
    target: str = typer.Argument(help="A spec's file, a preset such as 1B, a run, or a Hugging Face folder."),
    batch: int = typer.Option(1, "--batch", min=1, help="Sequences in memory at a time."),
    context: int | None = typer.Option(
        None, "--context", min=1, help="Tokens of a sequence (default: the spec's data.context, else 2048)."
    ),
    vocab: int | None = typer.Option(None, "--vocab", min=1, help="For a preset, or a tokenizer not yet trained."),
    as_json: bool = typer.Option(False, "--json", help="As JSON."),
) -> None:
    """Count a model's parameters, FLOPs and memory, and draw it. No weights are needed.

    Example: bessemer model show Mixtral-8x7B/ --batch 4 --context 4096
    """
    import json

    from bessemer.export.describe import describe, diagram, find_context, find_shape, table

    shape = find_shape(target, vocab)
    found = describe(shape, batch, context or find_context(target))
    if as_json:
        print(json.dumps({"shape": shape.to_dict(), **found}, indent=1))
    else:
        print("\n".join([*diagram(shape), "", *table(found)]))
