"""`bessemer model show` and `evaluate`: look at a model, or measure a trained one."""

from __future__ import annotations

from pathlib import Path

import typer

from bessemer.cli.console import AS_JSON, CHECKPOINT, DEVICE, CommandGroup, print_json
from bessemer.errors import UserError

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Show a model: parameters, FLOPs, memory, a diagram.")


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


def evaluate(
    run: Path = typer.Argument(help="A run such as runs/long, or any model that `bessemer generate` takes."),
    needle: bool = typer.Option(
        False, "--needle", help="Needle in a haystack: hide a fact in a long text and ask for it."
    ),
    lengths: str = typer.Option(
        "auto", "--lengths", help="Tokens of the text (default: 1/4 to 2 times the run's context)."
    ),
    kind: str = typer.Option(
        "auto", "--kind", help="key (a question in words), copy (random tokens) or auto (by size)."
    ),
    trials: int = typer.Option(10, "--trials", min=1, help="Questions per length and depth."),
    seed: int = typer.Option(0, "--seed", help="The same seed asks the same questions."),
    checkpoint: str = CHECKPOINT,
    device: str = DEVICE,
    as_json: bool = AS_JSON,
) -> None:
    """Measure how far back a model finds what it has read: the share of hits for each length and depth.

    Example: bessemer evaluate runs/long --needle --lengths 4Ki,16Ki,32Ki
    """
    import json

    from pydantic import TypeAdapter, ValidationError

    from bessemer.evaluate.needle import Kind, held_out_text
    from bessemer.evaluate.needle import needle as measure_needle
    from bessemer.observe.progress import working
    from bessemer.spec.quantity import Count
    from bessemer.train.trained import find_model, load_model

    if not needle:
        raise UserError("evaluate: name what to measure: --needle")
    with working("loading the model"):
        loaded = load_model(run, checkpoint, device)
    place = find_model(run, checkpoint).place  # the run of a checkpoint
    try:
        if lengths == "auto":
            settings, limit = place / "settings.json", loaded.model.shape.position_limit
            context = json.loads(settings.read_text())["context"] if settings.exists() else 2048
            context = min(context, loaded.context or context)
            candidates = [context // 4, context // 2, context, 2 * context][: 3 if limit else 4]
            tokens = [length for length in candidates if length >= 16] or [context]  # room for a needle
        else:
            tokens = [TypeAdapter(Count).validate_python(length.strip()) for length in lengths.split(",")]
        needle_kind = None if kind == "auto" else TypeAdapter(Kind).validate_python(kind)
    except ValidationError:
        raise UserError(f"--lengths {lengths} --kind {kind}: write for example 512,4Ki; auto, key or copy") from None
    with working("measuring"):
        filler = held_out_text(place, max(tokens)) if (place / "events.jsonl").exists() else None
        grid = measure_needle(
            loaded.model, loaded.tokenizer, tokens, trials=trials, seed=seed, kind=needle_kind, filler=filler
        )
    if as_json:
        print_json(grid.to_dict())
    else:
        hits = "answers with the key" if grid.kind == "key" else "hidden tokens predicted"
        print("\n".join([f"share of {hits}, {trials} trials each; columns are tokens of text", *grid.lines()]))
