"""Reads torch's snapshot of the CUDA allocator: what held the memory at the moment when most of it was in use.

The snapshot has the allocations and frees since its recording began, each with the Python stack, and the blocks that
are in use at its end. Blocks that were there before belong to the state: weights, moments, buffers.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from bessemer.spec.quantity import human_bytes

BEFORE, NO_PYTHON = (
    "allocated before these steps (weights, moments, buffers)",
    "the backward pass, from autograd's thread",
)
HOLDERS = 12
OWN = "bessemer/"  # in the path of a frame's file


def holder(frames: list[dict[str, Any]]) -> str:
    """The place that asked for the memory: the innermost frame of Bessemer's own, else the innermost with a file."""
    named = [frame for frame in frames if str(frame.get("filename", "")).endswith(".py")]
    if not named:
        return NO_PYTHON
    frame = next((frame for frame in named if OWN in frame["filename"]), named[0])
    place = frame["filename"].rpartition(OWN)[2] if OWN in frame["filename"] else frame["filename"].rpartition("/")[2]
    return f"{place}:{frame.get('line', 0)} {frame.get('name', '')}".rstrip()


def peak_holders(snapshot: dict[str, Any], device: int = 0) -> dict[str, Any]:
    """Bytes in use at the peak of the recorded time, and who held them, largest first."""
    trace = snapshot["device_traces"][device] if snapshot.get("device_traces") else []
    blocks = [
        block for segment in snapshot["segments"] if segment.get("device", 0) == device for block in segment["blocks"]
    ]
    end_bytes = sum(
        block.get("requested_size", block["size"]) for block in blocks if block["state"].startswith("active")
    )
    change = sum(_sign(entry) * entry["size"] for entry in trace)
    in_use = peak = start = end_bytes - change
    at_peak = -1
    for i, entry in enumerate(trace):
        in_use += _sign(entry) * entry["size"]
        if in_use > peak:
            peak, at_peak = in_use, i
    live: dict[int, tuple[int, str]] = {}
    before = start
    for entry in trace[: at_peak + 1]:
        if _sign(entry) > 0:
            live[entry["addr"]] = entry["size"], holder(entry.get("frames", []))
        elif _sign(entry) < 0 and live.pop(entry["addr"], None) is None:
            before -= entry["size"]
    held: Counter[str] = Counter({BEFORE: before})
    for size, place in live.values():
        held[place] += size
    return {"peak_bytes": peak, "held": [{"by": place, "bytes": size} for place, size in held.most_common() if size]}


def _sign(entry: dict[str, Any]) -> int:
    """+1 for an allocation, -1 for a free that is complete, 0 for the allocator's own segments."""
    return {"alloc": 1, "free_completed": -1}.get(entry["action"], 0)


def peak_text(peak: dict[str, Any]) -> str:
    lines = ["", f"memory at its peak: {human_bytes(peak['peak_bytes'])}"]
    lines += [f"{human_bytes(each['bytes']):>12}  {each['by']}" for each in peak["held"][:HOLDERS]]
    if rest := sum(each["bytes"] for each in peak["held"][HOLDERS:]):
        lines.append(f"{human_bytes(rest):>12}  {len(peak['held']) - HOLDERS} other places")
    return "\n".join(lines) + "\n"
