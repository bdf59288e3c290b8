"""What the processes of a run hold and how they keep up, as tables of plain lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bessemer.spec.quantity import human_bytes, human_count

KINDS = ("weights", "gradients", "moments", "averages")


def spans(ranks: Sequence[int]) -> str:
    """0, 1, 2 and 5 as `0-2, 5`."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def amount_words(kind: dict[str, Any]) -> str:
    """`1.2M divided + 340 whole, 4.8 MB`."""
    parts = [f"{human_count(kind[how]['numbers'])} {how}" for how in ("divided", "whole") if kind[how]["numbers"]]
    size = sum(kind[how]["bytes"] for how in ("divided", "whole"))
    return f"{' + '.join(parts)}, {human_bytes(size)}" if parts else "-"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def holdings_table(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Processes that hold the same amounts share a line."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for each in ranks:
        cells = tuple(amount_words(each[kind]) for kind in KINDS)
        alike.setdefault((*cells, human_bytes(each["bytes"])), []).append(each["rank"])
    shown = [i for i, kind in enumerate(KINDS) if any(cells[i] != "-" for cells in alike)]
    rows = [["ranks", *(KINDS[i] for i in shown), "in all"]]
    rows += [[spans(held), *(cells[i] for i in shown), cells[-1]] for cells, held in alike.items()]
    return columns(rows)


def pace_table(record: dict[str, Any]) -> list[str]:
    """A line of metrics/ranks.jsonl: the slowest first, ten at most."""
    order = sorted(range(len(record["own_s"])), key=lambda rank: -record["own_s"][rank])
    rows = [["rank", "own work", "waits for data", "memory"]]
    for rank in order[:10]:
        numbers = (f"{record[key][rank] * 1000:,.1f} ms" for key in ("own_s", "data_wait_s"))
        rows.append([str(rank), *numbers, human_bytes(record["memory_bytes"][rank])])
    return columns(rows)


def processes(layout: dict[str, Any], last: dict[str, Any] | None) -> list[str]:
    """What the processes of a run hold, and how they kept up when they last told."""
    degrees = [f"{key} {degree}" for key, degree in layout["layout"].items() if degree > 1]
    lines = [f"processes: {len(layout['ranks'])} ({', '.join(degrees)})", *holdings_table(layout["ranks"])]
    if last:
        balance = f", the slowest has {last['balance']:.2f} times the mean to do" if last.get("balance") else ""
        lines += ["", f"at step {last['step']:,}{balance}", *pace_table(last)]
    return lines
