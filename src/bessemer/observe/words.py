"""Events and numbers as the lines that people read, in the terminal and in the log."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bessemer.run.journal import number
from bessemer.spec.quantity import human_bytes, human_time

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
