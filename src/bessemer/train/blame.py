"""Which documents made the loss of a step: from the per-token losses that the step itself computed."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from bessemer.data.own_stream import ForwardStream
from bessemer.data.stream import Batch, BatchStream

Found = dict[tuple[str, str, int], dict[str, Any]]


def blame(
    stream: BatchStream | ForwardStream, batches: list[Batch], losses: list[Tensor], most: int = 8
) -> list[dict[str, Any]]:
    """The documents of a step with their share of its loss, largest first: file, row, tokens, mean loss, share."""
    return ranked([by_document(stream, batches, losses)], most)


def by_document(
    stream: BatchStream | ForwardStream,
    batches: list[Batch],
    losses: list[Tensor],
    columns: slice | np.ndarray = slice(None),
) -> Found:
    """Tokens and loss of each document in some micro-batches, and how many of its losses are not finite. `columns` says
    which of the batches' the losses are of."""
    found: Found = {}
    for batch, loss in zip(batches, losses, strict=True):
        nll_RT = np.asarray(loss.float().cpu(), dtype=np.float64)
        for row, number, origin in stream.locate(batch):
            inside = ((batch.documents[row] == number) & (batch.weights[row] > 0))[columns]
            values = nll_RT[row][inside]
            entry = found.setdefault(
                (origin.file, origin.document_id, origin.row), {"tokens": 0, "loss": 0.0, "nonfinite": 0}
            )
            entry["tokens"] += int(inside.sum())
            entry["loss"] += float(values[np.isfinite(values)].sum())
            entry["nonfinite"] += int((~np.isfinite(values)).sum())
    return found


def ranked(parts: list[Found], most: int = 8) -> list[dict[str, Any]]:
    """What several processes found, together. Documents with non-finite losses come first, with the number of such
    tokens; shares are of the finite loss."""
    found: Found = {}
    for part in parts:
        for key, entry in part.items():
            whole = found.setdefault(key, dict.fromkeys(entry, 0))
            for name, value in entry.items():
                whole[name] += value
    total = sum(entry["loss"] for entry in found.values())
    best = sorted(found.items(), key=lambda item: (-item[1]["nonfinite"], -item[1]["loss"]))[:most]
    return [
        {
            "file": file,
            "row": row,
            "document": document,
            "tokens": entry["tokens"],
            "mean_loss": round(entry["loss"] / max(1, entry["tokens"]), 4),
            "share": round(entry["loss"] / total, 4) if total else None,
            **({"nonfinite": entry["nonfinite"]} if entry["nonfinite"] else {}),
        }
        for (file, document, row), entry in best
    ]
