"""A ranking for a budget and a deadline as a person reads it, and as JSON."""

from __future__ import annotations

from typing import Any

from bessemer.plan.cost import Cost
from bessemer.plan.show import WIDTH, cost_json, lines, to_json
from bessemer.plan.wishes import Ranking, Way
from bessemer.spec.quantity import human_time

SHOWN = 8


def ranking_lines(ranking: Ranking) -> list[str]:
    """The best offer of each GPU type and term, why other types lost, and the best one's plan in full."""
    limits = ranking.limits
    own = " (no --deadline was given)" if limits.patience else ""
    shown = [f"within {limits.words()}{own}, cheapest first:", ""]
    for way, cost in _apart(ranking)[:SHOWN]:
        price = cost.price
        where = f"{price.provider} {price.region}, {price.term.replace('_', ' ')} at ${price.usd_hour:.2f}"
        notes = f" ({'; '.join(cost.notes)})" if cost.notes else ""
        mfu = f"{way.proposal.best.mfu:.0%} MFU"
        row = f"  {way.name:<18} {human_time(cost.wall_s):>8}  ${cost.usd:>12,.0f}  {mfu}  {where}{notes}"
        shown.append(row[:WIDTH])
    if len(ranking.lost):
        shown.append("")
        shown += [f"  {name:<18} lost: {why}"[:WIDTH] for name, why in ranking.lost[:SHOWN]]
        if (more := len(ranking.lost) - SHOWN) > 0:
            shown.append(f"  and {more} more: {', '.join(name for name, _ in ranking.lost[SHOWN:])}"[:WIDTH])
    best = ranking.best
    if best.wish.cluster.count < best.wish.cluster.gpu.node:
        node = best.wish.cluster.gpu.node
        shown.append(f"  note: some providers rent whole nodes of {node} {best.wish.cluster.gpu.name} only")
    return [*shown, "", *lines(best)]


def _apart(ranking: Ranking) -> list[tuple[Way, Cost]]:
    found: dict[tuple[str, str], tuple[Way, Cost]] = {}
    for way, cost in ranking.offers():
        found.setdefault((way.name, cost.price.term), (way, cost))
    return list(found.values())


def ranking_json(ranking: Ranking) -> dict[str, Any]:
    offers = [
        {"gpus": way.proposal.wish.cluster.count, "gpu": way.proposal.wish.cluster.gpu.name,
         "mfu": way.proposal.best.mfu, **cost_json(cost)}
        for way, cost in ranking.offers()
    ]  # fmt: skip
    limits = {"budget_usd": ranking.limits.budget_usd, "deadline_days": ranking.limits.deadline_s / 86_400}
    return to_json(ranking.best) | {
        "limits": limits, "offers": offers, "lost": [{"gpus": name, "why": why} for name, why in ranking.lost],
    }  # fmt: skip
