"""Events and numbers as the lines that people read, in the terminal and in the log.

What the processes of a run hold and how they keep up, as tables of plain lines.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bessemer.run.journal import number
from bessemer.spec.quantity import human_bytes, human_count, human_time

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """A curve in one line of text; long series are averaged into `width` columns."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    largest = max(map(abs, finite)) or 1.0
    scaled = [value / largest for value in finite]  # so that no sum overflows
    columns = min(width, len(scaled))
    edges = [i * len(scaled) // columns for i in range(columns + 1)]
    means = [sum(scaled[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in means)


def short_path(path: str) -> str:
    """Relative to here when that is shorter."""
    if "://" in path or not path:
        return path
    relative = os.path.relpath(path)
    return relative if len(relative) < len(path) else path


def perplexity(loss: float) -> str:
    if not math.isfinite(loss):
        return str(loss)
    return f"{math.exp(loss):,.4g}" if loss < 30 else "over 1e13"


def _number(value: Any) -> float:
    """A number of a record, which may have been through JSON."""
    found = number(value)
    return math.nan if found is None else found


def veto_line(event: dict[str, Any]) -> str:
    """What was refused, why, and which document made it."""
    numbers, documents = event["statistics"], event["documents"]
    loss, norm = _number(event["loss"]), _number(event["grad_norm"])
    if event["reason"].startswith("loss"):
        what = f"loss {loss:.2f} is {numbers['loss_z']:.0f} sigma above {numbers['loss_center']:.2f}"
    elif event["reason"].startswith("gradient"):
        sigmas = f"{numbers['grad_z']:.0f} sigma of its log"
        what = f"gradient norm {norm:.3g} against {numbers['grad_center']:.3g} ({sigmas})"
    else:
        what = f"{event['reason']} (loss {loss:.4g}, gradient norm {norm:.4g})"
    line = f"veto  step {event['step']:,}  {what}. Weights untouched."
    if documents:
        worst = documents[0]
        about = [f"row {worst['row']}", f"{worst['tokens']} tokens"]
        if worst["share"] is not None:
            about.append(f"{worst['share']:.0%} of the loss")
        if math.isfinite(mean := _number(worst["mean_loss"])):
            about.append(f"{mean:.2f} a token")
        line += f" Batch held {short_path(worst['file'])} ({', '.join(about)})"
    return line


def event_line(event: dict[str, Any]) -> str | None:
    """One line for an event, or None for those that are only for the record."""
    kind = event["kind"]
    if kind == "examined":  # a conviction is told by its trial
        return None
    if kind == "veto":
        return veto_line(event)
    if kind == "saved":
        stall = f"training stood still for {event['stall_s']:.2f} s"
        return f"saved {event['checkpoint']} in {event['seconds']:.2f} s, {stall}"
    if kind == "trial":
        verdict = f"verdict {event['verdict']} ({event['confidence']:.2f})"
        return f"trial step {event['step']:,}  {verdict}: {event['reason']} ({event['seconds']:.1f} s)"
    if kind == "rollback":
        return f"back  step {event['step']:,} to {event['to_step']:,} ({event['origin']}): {event['reason']}"
    if kind == "alarm":
        return f"alarm step {event['step']:,}  {event['reason']}. {event['fix']}"
    if kind == "report":
        return f"report  {event['file']}: {event['reason']}"
    if kind == "started":
        resumed = event.get("resumed_from")
        return f"resumed from {resumed} at step {event['step']:,}" if resumed else None
    if kind == "spec_changed":
        changes = (f"{key} {old} -> {new}" for key, (old, new) in event["changes"].items())
        return f"spec  changed: {'; '.join(changes)}"
    if kind == "metrics_cut":
        return f"cut   metrics of {event['steps']:,} steps from {event['from_step']:,} on: they are trained again"
    step = f"step {event['step']:,}  " if "step" in event else ""
    checkpoint = f"{event['checkpoint']}  " if "checkpoint" in event else ""
    return f"{kind.replace('_', ' ')}  {step}{checkpoint}{event.get('reason', '')}".rstrip()


def step_line(record: dict[str, Any], total: int, smooth: dict[str, float], validation: dict[str, Any] | None) -> str:
    """One line of progress, for logs. `smooth` has the recent means of loss, rate, utilisation, and seconds left."""
    parts = [
        f"step {record['step'] + 1:,}/{total:,}",
        f"loss {smooth['loss']:.3f} (mean of {smooth['loss_steps']:.0f})",
        f"ppl {perplexity(smooth['loss'])}",
        f"acc {record['accuracy']:.1%}",
    ]
    if validation:
        parts.append(f"val {validation['loss']:.3f}{sources_words(validation)}")
    parts += [
        f"lr {record['lr']:.2e}",
        f"grad {record['grad_norm']:.2f}",
        f"{smooth['rate']:,.0f} tok/s" + (f" ({smooth['of_plan']:.0%} of plan)" if smooth.get("of_plan") else ""),
        f"{smooth['mfu']:.0%} of peak",
        human_bytes(record["memory_bytes"]),
        f"eta {human_time(smooth['left_s'])}",
    ]
    return "  ".join(parts)


def validation_line(record: dict[str, Any]) -> str:
    return (
        f"val   step {record['step']:,}  loss {record['loss']:.4f}{sources_words(record)}  perplexity "
        f"{perplexity(record['loss'])}  {record['bits_per_byte']:.3f} bits per byte  accuracy {record['accuracy']:.1%}"
    )


def sources_words(record: dict[str, Any]) -> str:
    """Sources side by side where some are watched for forgetting: `  general 2.31 (+1.2%)  domain 1.88`."""
    rises = record.get("rise") or {}
    parts = {name: f"  {name} {_number(loss):.4g}" for name, loss in record["per_source"].items()} if rises else {}
    return "".join(f"{text} ({_number(rises[name]):+.1%})" if name in rises else text for name, text in parts.items())


def resume_hint(folder: Path, spec_path: str | None) -> str:
    return f"continue with: bessemer train {spec_path or folder / 'spec.yaml'}"


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
