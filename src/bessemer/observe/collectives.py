"""Communication of profiled steps over all ranks: each collective's calls, bytes, time, and how much of it is waiting.

A rank that arrives first waits inside of the collective until the last one has come. So of one call the shortest time
over the ranks is the transfer, and what a rank takes beyond it is waiting for slower ranks. No clocks are compared.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bessemer.observe.profile import COMMUNICATION, KERNELS, WINDOW, TraceEvent, part_of
from bessemer.spec.quantity import human_bytes

_KERNEL = re.compile(r"(?:nccl|rccl)\w*?Kernel_(\w+?)(?:_|\(|$)", re.I)
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True)
class Collective:
    """One call on one rank. `bytes` is 0 where the trace does not name them."""

    name: str
    us: float
    bytes: int = 0


@dataclass(frozen=True)
class CollectiveRow:
    """All calls of one name, of the mean step and the mean rank. `wait_ms` is None if the ranks' calls do not match, as
    in the stages of a pipeline; `last_rank` is the one that the others wait for."""

    name: str
    calls: float
    ms: float
    wait_ms: float | None
    last_rank: int | None
    bytes: float

    @property
    def rate(self) -> float | None:
        """Bytes per second of the transfer alone."""
        transfer_ms = self.ms - (self.wait_ms or 0.0)
        return self.bytes / transfer_ms * 1e3 if self.bytes and transfer_ms > 0 else None


def collective_name(name: str) -> str:
    """`nccl all_reduce` for `ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)`, `gloo all_reduce` for `gloo:all_reduce`."""
    if match := _KERNEL.match(name):
        return f"{name[:4]} {_WORD.sub('_', match[1]).lower()}"
    return name.replace(":", " ")


def collectives(events: list[TraceEvent]) -> list[Collective]:
    """A rank's calls inside the profiled steps, in their order: NCCL's kernels, and gloo's on its own threads."""
    window = next(event for event in events if event.name == WINDOW)
    return [
        Collective(collective_name(event.name), event.end - event.start, event.bytes)
        for event in sorted(events, key=lambda event: event.start)
        if window.start <= event.start < window.end
        and (
            part_of(event.name, KERNELS) == COMMUNICATION if event.kind == "device" else event.name.startswith("gloo:")
        )
    ]


def compare_ranks(by_rank: Sequence[Sequence[Collective]], steps: int) -> list[CollectiveRow]:
    """A row for each collective, the longest first."""
    calls: dict[str, list[list[Collective]]] = defaultdict(lambda: [[] for _ in by_rank])
    for rank, own_calls in enumerate(by_rank):
        for each in own_calls:
            calls[each.name][rank].append(each)
    rows = []
    for name, of_rank in calls.items():
        all_calls = [each for own_calls in of_rank for each in own_calls]
        share = 1 / len(by_rank) / steps
        waits = [0.0] * len(by_rank)
        matching = len({len(own_calls) for own_calls in of_rank}) == 1 and len(by_rank) > 1
        if matching:
            for same in zip(*of_rank, strict=True):
                least = min(each.us for each in same)
                waits = [wait + each.us - least for wait, each in zip(waits, same, strict=True)]
        rows.append(
            CollectiveRow(
                name, len(all_calls) * share, sum(each.us for each in all_calls) * share / 1e3,
                sum(waits) * share / 1e3 if matching else None, waits.index(min(waits)) if matching else None,
                sum(each.bytes for each in all_calls) * share,
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: -row.ms)


def ranks_text(ranks: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """The parts of the step by rank, and its collectives, as tables. Empty for one rank."""
    if len(ranks) < 2:
        return ""
    names = [name for name in ranks[0]["parts_ms"] if any(rank["parts_ms"].get(name) for rank in ranks)]
    lines = ["", "rank" + "".join(f"{name:>{len(name) + 2}}" for name in names) + f"{'memory':>12}"]
    for rank in ranks:
        cells = "".join(f"{rank['parts_ms'].get(name, 0.0):>{len(name) + 2}.1f}" for name in names)
        lines.append(f"{rank['rank']:>4}{cells}{human_bytes(rank['memory_bytes']):>12}")
    lines += ["(ms of the mean step)"]
    if rows:
        lines += ["", f"{'ms':>8}{'waiting':>10}{'calls':>8}{'bytes':>12}{'GB/s':>8}  collective"]
    for row in rows:
        wait = "?" if row["wait_ms"] is None else f"{row['wait_ms']:.2f}"
        size = human_bytes(round(row["bytes"])) if row["bytes"] else ""
        rate = f"{row['bytes_per_s'] / 1e9:.1f}" if row["bytes_per_s"] else ""
        late = "" if not row["wait_ms"] else f", the others wait for rank {row['last_rank']}"
        lines.append(f"{row['ms']:>8.2f}{wait:>10}{row['calls']:>8.1f}{size:>12}{rate:>8}  {row['name']}{late}")
    return "\n".join(lines) + "\n"
