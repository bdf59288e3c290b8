"""Which documents made the loss of a step: from the per-token losses that the step itself computed."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from bessemer.data.own_stream import ForwardStream
from bessemer.data.stream import Batch, BatchStream


def blame(
    stream: BatchStream | ForwardStream, batches: list[Batch], losses: list[Tensor], most: int = 8
) -> list[dict[str, Any]]:
    """The documents of a step with their share of its loss, largest first: file, row, tokens, mean loss, share.

    Documents with non-finite losses come first, with the number of such tokens; shares are of the finite loss.
    """
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    total = 0.0
    for batch, loss in zip(batches, losses, strict=True):
        nll_RT = np.asarray(loss.float().cpu(), dtype=np.float64)
        for row, number, origin in stream.locate(batch):
            inside = (batch.documents[row] == number) & (batch.weights[row] > 0)
            values = nll_RT[row][inside]
            bad = int((~np.isfinite(values)).sum())
            amount = float(values[np.isfinite(values)].sum())
            total += amount
            entry = found.setdefault(
                (origin.file, origin.document_id, origin.row),
                {
                    "file": origin.file,
                    "row": origin.row,
                    "document": origin.document_id,
                    "tokens": 0,
                    "loss": 0.0,
                    "nonfinite": 0,
                },
            )
            entry["tokens"] += int(inside.sum())
            entry["loss"] += amount
            entry["nonfinite"] += bad
    ranked = sorted(found.values(), key=lambda entry: (-entry["nonfinite"], -entry["loss"]))[:most]
    return [
        {
            "file": entry["file"],
            "row": entry["row"],
            "document": entry["document"],
            "tokens": entry["tokens"],
            "mean_loss": round(entry["loss"] / max(1, entry["tokens"]), 4),
            "share": round(entry["loss"] / total, 4) if total else None,
            **({"nonfinite": entry["nonfinite"]} if entry["nonfinite"] else {}),
        }
        for entry in ranked
    ]
