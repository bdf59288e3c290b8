"""The largest size that fits, in few measurements: two small ones tell what a unit takes, the line through them where
the card ends. What is predicted is tried, and less if need be.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

TRIES, MARGIN_GIB = 4, 2.0
HOST_GIB = 118.0  # of the machine's 128
# bf16 weights, a byte for each moment, whole layers computed again, and no second state of the run on the card
LEAN = ["memory.weights=stochastic", "memory.moments=8bit", "memory.activations=full", "guard.copies=off"]


def add_search(parser: argparse.ArgumentParser, probes: list[int], of: str) -> None:
    parser.add_argument("--probes", nargs=2, type=int, default=probes, help=f"{of} of the two small ones")
    parser.add_argument("--only-probes", action="store_true", help="say what should fit; this may share the card")
    parser.add_argument("--start", type=int, help=f"{of} to try first, where the probes were made before")
    parser.add_argument("--card", type=float, help="GiB that may be filled (default: the GPU's)")


def largest(measure: Callable[[int], dict[str, Any]], unit: int, options: argparse.Namespace) -> int | None:
    """The largest size, a multiple of `unit`, that was really trained on; `measure` gives a result or an error."""
    if options.start:
        return _downwards(measure, options.start, unit, 0)
    import torch

    probes = options.probes
    card_gib = options.card or torch.cuda.get_device_properties(0).total_memory / 2**30
    small, large = (measure(size) for size in probes)
    if "error" in small or "error" in large:
        return None if "error" in small else probes[0]
    ends = []
    for key, room in (("peak_gib", card_gib - MARGIN_GIB), ("host_gib", HOST_GIB)):
        slope = (large[key] - small[key]) / (probes[1] - probes[0])
        if slope > 0:
            ends.append(probes[0] + (room - small[key]) / slope)
    size = int(min(ends) // unit * unit) if ends else probes[1]
    print(f"{probes} took {small['peak_gib']} and {large['peak_gib']} GiB: {size:,} should fit", flush=True)
    if options.only_probes:
        return None
    return _downwards(measure, size, unit, probes[1]) or probes[1]


def _downwards(measure: Callable[[int], dict[str, Any]], size: int, unit: int, above: int) -> int | None:
    for tried in range(size, max(above, size - TRIES * unit), -unit):
        error = measure(tried).get("error", "")
        if not error:
            return tried
        if error.startswith("not done"):  # a smaller one would take as long
            break
    return None
