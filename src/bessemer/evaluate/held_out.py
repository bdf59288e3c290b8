"""Loss, perplexity and bits per byte of held-out text, by source."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from bessemer.data.prepare import open_prepared
from bessemer.errors import UserError
from bessemer.evaluate.language_model import LanguageModel
from bessemer.spec.load import load_spec, read_text
from bessemer.train.evaluate import Evaluator
from bessemer.train.objective import Pretrain
from bessemer.train.trained import LoadedModel

TOKENS = 1_000_000  # held-out tokens, spread over the sources
CONTEXT = 1024
ROWS = 4


def run_held_out(loaded: LoadedModel, place: Path, tokens: int = TOKENS) -> dict[str, dict[str, float]]:
    """Losses of a run's held-out documents, on the rows that it validates on, as plain text prediction."""
    data = place / "data.json"
    folder = Path(json.loads(data.read_text())["folder"]) if data.exists() else None
    if folder is None or not (folder / "prepared.json").exists():
        raise UserError(f"--held-out: {place} has no prepared data here: give texts with --text NAME=FILE")
    settings = place / "settings.json"
    context = json.loads(settings.read_text())["context"] if settings.exists() else loaded.context or CONTEXT
    evaluator = Evaluator(
        open_prepared(folder).validation, context, tokens, ROWS, "fp32", loaded.model.head_weight.device
    )
    if not evaluator.available:
        raise UserError(f"--held-out: {place} holds nothing back: train with data.validation, or give --text NAME=FILE")
    try:
        spec = load_spec(place / "spec.yaml")
        result = evaluator.evaluate(loaded.model, Pretrain(spec.data.cross_documents))
    finally:
        loaded.model.eval()
    sizes = {name: part.bytes_per_token for name, part in evaluator.held_out.items()}
    return {name: _numbers(loss, loss / sizes[name] / math.log(2)) for name, loss in result.per_source.items()} | {
        "all": _numbers(result.loss, float(result.metrics["bits_per_byte"]))
    }


def text_losses(model: LanguageModel, sources: Sequence[str]) -> dict[str, dict[str, float]]:
    """Losses of files: NAME=FILE, a text, or a .jsonl with `text` in each row. Each document is read from its start."""
    losses = {}
    for source in sources:
        name, _, file = source.partition("=")
        if not name or not file:
            raise UserError(f"--text {source}: write NAME=FILE, such as law=law.jsonl")
        texts = _texts(Path(file))
        logps = model.score_texts(texts)
        tokens = sum(len(row) for row in model.encode(texts))
        size = sum(len(text.encode()) for text in texts)
        losses[name] = _numbers(-sum(logps) / tokens, -sum(logps) / size / math.log(2)) | {"tokens": float(tokens)}
    return losses


def _numbers(loss: float, bits: float) -> dict[str, float]:
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits}


def _texts(path: Path) -> list[str]:
    content = read_text(path, "a text, or a .jsonl file with `text` in each row")
    if path.suffix != ".jsonl":
        return [content]
    texts = []
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: is not JSON ({error}); correct or delete the row") from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise UserError(f'{path}:{number}: has no "text"; write one, or delete the row')
        texts.append(row["text"])
    if not any(texts):
        raise UserError(f"{path}: has no text")
    return [text for text in texts if text]
