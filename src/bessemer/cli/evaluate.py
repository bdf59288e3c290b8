"""`bessemer evaluate`: what a trained run can do."""

from __future__ import annotations

from pathlib import Path

import typer


def evaluate(
    run: Path = typer.Argument(help="The run's folder, such as runs/long."),
    needle: bool = typer.Option(False, "--needle", help="Hide something in a long text and ask for it at its end."),
    lengths: str = typer.Option("auto", "--lengths", help="Tokens of the text (default: 1/4 to twice the run's)."),
    kind: str = typer.Option("auto", "--kind", help="key (asked in words), copy (of random tokens) or auto (by size)."),
    trials: int = typer.Option(10, "--trials", min=1, help="Questions for each length and depth."),
    seed: int = typer.Option(0, "--seed", help="The same seed asks the same questions."),
    checkpoint: str = typer.Option("last", "--checkpoint", help="last, best, a tag or a name."),
    device: str = typer.Option("auto", "--device", help="auto, cpu, cuda or mps."),
    as_json: bool = typer.Option(False, "--json", help="As JSON."),
) -> None:
    """Measure how far back a model still finds what it has read: a share for each length and depth.

    Example: bessemer evaluate runs/long --needle --lengths 4Ki,16Ki,32Ki
    """
    import json

    from pydantic import TypeAdapter, ValidationError

    from bessemer.errors import UserError
    from bessemer.evaluate.needle import Kind, held_out_text
    from bessemer.evaluate.needle import needle as hide
    from bessemer.observe.progress import working
    from bessemer.run.directory import Run
    from bessemer.spec.quantity import Count
    from bessemer.train.trained import load_trained

    if not needle:
        raise UserError("evaluate: say what to measure: --needle")
    with working("loading the model"):
        model, tokenizer = load_trained(run, checkpoint, device)
    try:
        if lengths == "auto":
            context = json.loads((Run.existing(run).folder / "settings.json").read_text())["context"]
            tokens = [context // 4, context // 2, context, 2 * context]
        else:
            tokens = [TypeAdapter(Count).validate_python(length.strip()) for length in lengths.split(",")]
        asked = None if kind == "auto" else TypeAdapter(Kind).validate_python(kind)
    except ValidationError:
        raise UserError(f"--lengths {lengths} --kind {kind}: write 512,4Ki; auto, key or copy") from None
    with working("measuring"):
        filler = held_out_text(run, max(tokens))
        grid = hide(model, tokenizer, tokens, trials=trials, seed=seed, kind=asked, filler=filler)
    if as_json:
        print(json.dumps(grid.to_dict(), indent=1))
    else:
        what = "answers with the key" if grid.kind == "key" else "hidden tokens expected"
        print("\n".join([f"share of {what}, {trials} trials each; columns are tokens of text", *grid.lines()]))
