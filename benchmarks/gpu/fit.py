"""The largest size that fits, in few measurements: the planner says which one should, the card has the last word."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from models import MODELS

TRIES, MARGIN_GIB = 4, 2.5  # what no allocator sees: 1.9 GiB beside 134.8
HOST_GIB = 118.0  # of the machine's 128
# bf16 weights, a byte for each moment, whole layers computed again, and no second state of the run on the card
LEAN = ["memory.weights=stochastic", "memory.moments=8bit", "memory.activations=full", "guard.copies=off"]


def add_search(parser: argparse.ArgumentParser, of: str) -> None:
    parser.add_argument("--start", type=int, help=f"{of} to try first (default: what the planner says)")
    parser.add_argument("--card", type=float, help="GiB that may be filled (default: the GPU's)")


def estimated_gib(name: str, settings: list[str], **size: int) -> float:
    """The planner's estimate of a model with other layers, context or rows."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import planner_memory

    said = " ".join(setting for setting in settings if not setting.startswith("guard."))
    row = asdict(replace(MODELS[name], **size)) | {"settings": said, "precision": "bf16"}  # type: ignore[arg-type]
    return planner_memory.estimated_gib(row)


def largest(
    measure: Callable[[int], dict[str, Any]],
    estimate: Callable[[int], float],
    unit: int,
    options: argparse.Namespace,
    most: int = sys.maxsize,
) -> int | None:
    """The largest size, a multiple of `unit` and at most `most`, that was really trained on. `measure` gives a result
    or an error."""
    start = options.start or _predicted(estimate, unit, options.card or _card_gib(), most)
    print(f"{start:,} should fit, in {estimate(start):.1f} GiB", flush=True)
    for tried in range(start, max(0, start - TRIES * unit), -unit):
        error = measure(tried).get("error", "")
        if not error:
            return tried
        if error.startswith("not done"):  # a smaller one would take as long
            break
    return None


def _predicted(estimate: Callable[[int], float], unit: int, card_gib: float, most: int) -> int:
    size = unit
    while size + unit <= most and estimate(size + unit) <= card_gib - MARGIN_GIB:
        size += unit
    return size


def _card_gib() -> float:
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory / 2**30)
