"""`bessemer evaluate MODEL --needle`: how far back a model finds what it has read."""

from __future__ import annotations

from pathlib import Path

from bessemer.cli.console import print_json
from bessemer.errors import UserError


def measure(
    model: Path, lengths: str, kind: str, trials: int, seed: int, checkpoint: str, device: str, as_json: bool
) -> None:
    """Prints the share of hits for each length and depth."""
    import json

    from pydantic import TypeAdapter, ValidationError

    from bessemer.evaluate.needle import Kind, held_out_text
    from bessemer.evaluate.needle import needle as measure_needle
    from bessemer.observe.progress import working
    from bessemer.spec.quantity import Count
    from bessemer.train.trained import find_model, load_model

    with working("loading the model"):
        loaded = load_model(model, checkpoint, device)
    place = find_model(model, checkpoint).place  # the run of a checkpoint
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
