"""What a run's own records say of its past: what was usual, where it was best, since when its digits stand."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bessemer.run.journal import number
from bessemer.train.job import Job
from bessemer.trial.case import Normal


def digits_from(events: Iterable[Mapping[str, Any]]) -> int:
    """The step since which a run's sums are rounded as they are now."""
    return max((int(number(e.get("step")) or 0) for e in events if e.get("kind") == "digits_may_differ"), default=0)


def refill_history(job: Job) -> None:
    """After a restore: the records of the steps before, as if no process had ended. Trials compare with such steps."""
    size = job.history.maxlen or 0
    records = [r for r in job.run.metrics() if r["step"] < job.start_step][-size:] if job.world.main else []
    job.history.extend(job.world.agree(records))


def recent(job: Job) -> list[dict[str, Any]]:
    """What a report shows of the last steps."""
    keys = ("step", "loss", "grad_norm", "lr", "veto")
    return [{key: record[key] for key in keys} for record in job.history]


def usual(history: Iterable[dict[str, Any]], loss_sigma: float, grad_sigma: float) -> Normal:
    """What was usual, from the records: the block of 32 accepted steps with the lowest median loss."""
    block = lowest_block([record for record in history if record["veto"] is None])
    losses = [float(record["loss"]) for record in block] or [float("nan")]
    norms = [float(record["grad_norm"]) for record in block] or [float("nan")]
    loss, norm = statistics.median(losses), statistics.median(norms)
    spread = 1.4826 * statistics.median(abs(value - loss) for value in losses)
    return Normal(loss, max(spread, 0.02 * abs(loss)), norm, 0.25, loss_sigma, grad_sigma)


def lowest_block(records: Sequence[dict[str, Any]], size: int = 32) -> list[dict[str, Any]]:
    """The best stretch of a run: the block of so many records with the lowest median loss."""
    blocks = [list(records[i : i + size]) for i in range(0, len(records), size)] if records else [[]]
    whole = [block for block in blocks if len(block) == size] or blocks
    return min(whole, key=lambda block: statistics.median(r["loss"] for r in block) if block else float("inf"))


def best_before(history: Sequence[dict[str, Any]]) -> int:
    """The step after the run's best stretch: slow trouble began somewhere behind it."""
    block = lowest_block([record for record in history if record["veto"] is None and number(record["loss"])])
    return int(block[-1]["step"]) + 1 if block else 0
