"""The largest size that fits, in few measurements: two small ones tell what a unit takes, the line through them where
the card ends. What is predicted is tried, and less if need be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TRIES, MARGIN_GIB = 4, 2.0
HOST_GIB = 118.0  # of the machine's 128
# bf16 weights, a byte for each moment, whole layers computed again, and no second state of the run on the card
LEAN = ["memory.weights=stochastic", "memory.moments=8bit", "memory.activations=full", "guard.copies=off"]


def largest(
    measure: Callable[[int], dict[str, Any]], probes: list[int], unit: int, card_gib: float | None
) -> int | None:
    """The largest size, a multiple of `unit`, that was really trained on; `measure` gives a result or an error."""
    import torch

    card_gib = card_gib or torch.cuda.get_device_properties(0).total_memory / 2**30
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
    for tried in range(size, max(probes[1], size - TRIES * unit), -unit):
        error = measure(tried).get("error", "")
        if not error:
            return tried
        if error.startswith("not done"):  # a smaller one would take as long
            break
    return probes[1]
