"""Formats events, metrics and per-rank tables as the lines that the terminal and the log show."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bessemer.run.journal import to_number
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
    """Relative to the working directory if that is shorter."""
    if "://" in path or not path:
        return path
    relative = os.path.relpath(path)
    return relative if len(relative) < len(path) else path


def perplexity(loss: float) -> str:
    if not math.isfinite(loss):
        return str(loss)
    return f"{math.exp(loss):,.4g}" if loss < 30 else "over 1e13"


def _number(value: Any) -> float:
    """A number of a record that may have been read from JSON; NaN if it is none."""
    parsed = to_number(value)
    return math.nan if parsed is None else parsed


def veto_line(event: dict[str, Any]) -> str:
    """Why a step was vetoed, and the document that contributed most."""
    statistics, documents = event["statistics"], event["documents"]
    loss, norm = _number(event["loss"]), _number(event["grad_norm"])
    if event["reason"].startswith("loss"):
        cause = f"loss {loss:.2f} is {statistics['loss_z']:.0f} sigma above {statistics['loss_center']:.2f}"
    elif event["reason"].startswith("gradient"):
        sigmas = f"{statistics['grad_z']:.0f} sigma of its log"
        cause = f"gradient norm {norm:.3g} against {statistics['grad_center']:.3g} ({sigmas})"
    else:
        cause = f"{event['reason']} (loss {loss:.4g}, gradient norm {norm:.4g})"
    line = f"veto  step {event['step']:,}  {cause}. Weights untouched."
    if documents:
        worst = documents[0]
        details = [f"row {worst['row']}", f"{worst['tokens']} tokens"]
        if worst["share"] is not None:
            details.append(f"{worst['share']:.0%} of the loss")
        if math.isfinite(mean := _number(worst["mean_loss"])):
            details.append(f"{mean:.2f} a token")
        line += f" The batch contains {short_path(worst['file'])} ({', '.join(details)})"
    return line


def event_line(event: dict[str, Any]) -> str | None:
    """One line for an event, or None for an event that is only recorded."""
    kind = event["kind"]
    if kind == "examined":  # the event of the trial reports a conviction
        return None
    if kind == "veto":
        return veto_line(event)
    if kind == "saved":
        stall = f"training paused for {event['stall_s']:.2f} s"
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
        return f"cut   metrics of {event['steps']:,} steps from {event['from_step']:,} on: they will be trained again"
    if kind == "samples":
        return f"sample  step {event['step']:,}  {event['prompt']!r} goes on: {event['text']!r}"
    if kind == "tasks_registered":
        return f"tasks registered before step {event['step']:,}: {', '.join(event['hashes'])}"
    step = f"step {event['step']:,}  " if "step" in event else ""
    checkpoint = f"{event['checkpoint']}  " if "checkpoint" in event else ""
    return f"{kind.replace('_', ' ')}  {step}{checkpoint}{event.get('reason', '')}".rstrip()


# Keys of every step's record; the others are the objective's metrics.
STEP_KEYS = {
    "step", "loss", "grad_norm", "lr", "clip", "clipped", "veto", "tokens", "tokens_per_s", "mfu", "step_s",
    "data_wait_s", "memory_bytes", "loss_scale", "rank_step_s", "balance", "bubble", "time",
}  # fmt: skip
TOKEN_OBJECTIVES = ("pretrain", "sft")  # whose loss is nats per token


# Metrics of reinforcement learning that are recorded but not shown in a line.
NOT_SHOWN = (
    "ratio_high", "ratio_low", "importance", "mismatch", "advantage_mean", "reward_std", "reward_s", "score_s", "beta",
    "next_beta", "repetition",
)  # fmt: skip


def metrics_of(record: dict[str, Any]) -> dict[str, str]:
    """The objective's metrics in a step's record, as text. A reward of one part is shown once."""
    parts = [name for name in record if name.startswith("reward_")]
    hidden = (*STEP_KEYS, *NOT_SHOWN, *(parts if "reward" in record and len(set(parts) - {*NOT_SHOWN}) == 1 else ()))
    return {
        name: f"{value:.1%}" if "accuracy" in name else f"{value:.4g}"
        for name, value in record.items()
        if name not in hidden and isinstance(value, (int, float))
    }


def step_line(
    record: dict[str, Any], total: int, smooth: dict[str, float], validation: dict[str, Any] | None,
    objective: str = "pretrain",
) -> str:  # fmt: skip
    """One line of progress, for logs. `smooth` has the recent means of loss, rate, utilisation and seconds left."""
    parts = [
        f"step {record['step'] + 1:,}/{total:,}",
        f"loss {smooth['loss']:.3f} (mean of {smooth['loss_steps']:.0f})",
        *([f"ppl {perplexity(smooth['loss'])}"] if objective in TOKEN_OBJECTIVES else []),
        *(f"{'acc' if name == 'accuracy' else name} {value}" for name, value in metrics_of(record).items()),
    ]
    if validation:
        parts.append(f"val {validation['loss']:.3f}{format_sources(validation)}")
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
    return _loss_line(record) + "".join(f"  {name} {_score(row)}" for name, row in record.get("tasks", {}).items())


def _score(row: dict[str, Any]) -> str:
    """A task's score with its 95 % interval."""
    if "low" not in row:
        return f"{_number(row['score']):.4g}"
    return f"{row['score']:.1%} ({_number(row['low']):.1%} to {_number(row['high']):.1%})"


def _loss_line(record: dict[str, Any]) -> str:
    line = f"val   step {record['step']:,}  loss {record['loss']:.4f}{format_sources(record)}"
    if "bits_per_byte" in record:
        line += f"  perplexity {perplexity(record['loss'])}  {record['bits_per_byte']:.3f} bits per byte"
        return f"{line}  accuracy {record['accuracy']:.1%}"
    numbers = {name: value for name, value in record.items() if name not in (*STEP_KEYS, "seconds")}
    return line + "".join(f"  {name} {value}" for name, value in metrics_of(numbers).items())


def format_sources(record: dict[str, Any]) -> str:
    """Losses of all sources if some are watched for forgetting: `  general 2.31 (+1.2%)  domain 1.88`."""
    rises = record.get("rise") or {}
    parts = {name: f"  {name} {_number(loss):.4g}" for name, loss in record["per_source"].items()} if rises else {}
    return "".join(f"{text} ({_number(rises[name]):+.1%})" if name in rises else text for name, text in parts.items())


def resume_hint(folder: Path, spec_path: str | None) -> str:
    return f"continue with: bessemer train {spec_path or folder / 'spec.yaml'}"


MEMORY_KINDS = ("weights", "gradients", "moments", "averages")


def format_ranks(ranks: Sequence[int]) -> str:
    """0, 1, 2 and 5 as `0-2, 5`."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _format_amount(kind: dict[str, Any]) -> str:
    """`1.2M divided + 340 whole, 4.8 MB`: sharded and replicated numbers, and their size."""
    parts = [f"{human_count(kind[how]['numbers'])} {how}" for how in ("divided", "whole") if kind[how]["numbers"]]
    size = sum(kind[how]["bytes"] for how in ("divided", "whole"))
    return f"{' + '.join(parts)}, {human_bytes(size)}" if parts else "-"


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def rank_memory_table(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Memory of each rank by kind. Ranks with equal amounts share a line."""
    ranks_by_amounts: dict[tuple[str, ...], list[int]] = {}
    for record in ranks:
        cells = tuple(_format_amount(record[kind]) for kind in MEMORY_KINDS)
        ranks_by_amounts.setdefault((*cells, human_bytes(record["bytes"])), []).append(record["rank"])
    shown = [i for i, kind in enumerate(MEMORY_KINDS) if any(cells[i] != "-" for cells in ranks_by_amounts)]
    rows = [["ranks", *(MEMORY_KINDS[i] for i in shown), "total"]]
    rows += [
        [format_ranks(members), *(cells[i] for i in shown), cells[-1]] for cells, members in ranks_by_amounts.items()
    ]
    return align_columns(rows)


def pace_table(record: dict[str, Any]) -> list[str]:
    """A record of metrics/ranks.jsonl: the ten slowest ranks, slowest first."""
    order = sorted(range(len(record["own_s"])), key=lambda rank: -record["own_s"][rank])
    rows = [["rank", "own work", "waits for data", "memory"]]
    for rank in order[:10]:
        numbers = (f"{record[key][rank] * 1000:,.1f} ms" for key in ("own_s", "data_wait_s"))
        rows.append([str(rank), *numbers, human_bytes(record["memory_bytes"][rank])])
    return align_columns(rows)


def describe_processes(layout: dict[str, Any], last: dict[str, Any] | None) -> list[str]:
    """Layout and memory of a run's processes, and their pace at the last report."""
    degrees = [f"{key} {degree}" for key, degree in layout["layout"].items() if degree > 1]
    lines = [f"processes: {len(layout['ranks'])} ({', '.join(degrees)})", *rank_memory_table(layout["ranks"])]
    if last:
        balance = f", the slowest rank has {last['balance']:.2f} times the mean work" if last.get("balance") else ""
        lines += ["", f"at step {last['step']:,}{balance}", *pace_table(last)]
    return lines
