"""A plan as a person reads it, and as JSON.

A ranking for a budget and a deadline as a person reads it, and as JSON.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bessemer.plan.cost_model.cost import Cost
from bessemer.plan.decision import Plan
from bessemer.plan.search.budget import BudgetOption, BudgetRanking
from bessemer.plan.search.proposal import Proposal
from bessemer.plan.search.search import Candidate, why
from bessemer.spec.quantity import human_bytes, human_count, human_time

WIDTH = 150  # of a line; the whole text is in the JSON and in a spec that is written


def title(proposal: Proposal) -> str:
    size, tokens = human_count(proposal.shape.parameters), human_count(proposal.tokens)
    idle = proposal.given.count - proposal.wish.cluster.count
    of = f", {idle} of {proposal.given.count} idle" if idle else ""
    return f"{size} parameters on {tokens} tokens, {proposal.wish.cluster}{of}"


def lines(proposal: Proposal, width: int = WIDTH) -> list[str]:
    """The plan as a person reads it."""
    shown = [
        title(proposal),
        "",
        *decision_lines(proposal.plan, width),
        "",
        *memory_bar(proposal),
        "",
        *speed(proposal),
    ]
    for cost in proposal.costs[:5]:
        shown.append(f"  cost    ${cost.usd:>12,.0f}  {offer(cost)}")
    if not proposal.costs:
        cluster = proposal.wish.cluster
        shown.append(f"  cost    nobody in the price list rents {cluster.count} x {cluster.gpu.name}")
    best, wish = proposal.best, proposal.wish
    for other in proposal.found.ranked[1:3]:
        shown.append(f"  next    {other.name()}: {why(best, other, wish)}"[:width])
    for other in proposal.found.too_large[:1]:
        shown.append(f"  not     {other.name()}: {why(best, other, wish)}"[:width])
    return shown + [f"  note    {note}" for note in proposal.notes]


def decision_lines(plan: Plan, width: int = WIDTH) -> list[str]:
    rows = [(key, value, f"{reason} [{source}]") for key, value, reason, source in plan.rows()]
    first, second = max(len(row[0]) for row in rows), min(44, max(len(row[1]) for row in rows))
    return [f"  {key:<{first}}  {value:<{second}}  {reason}"[:width] for key, value, reason in rows]


def speed(proposal: Proposal) -> list[str]:
    """Tokens a second, where a step's time goes, and days, each with its error."""
    best, wish, error = proposal.best, proposal.wish, proposal.error
    parts = sorted(best.time.parts.items(), key=lambda item: -item[1])
    times = [proposal.wall_s, proposal.wall_s / (1 + error), proposal.wall_s / (1 - error)]
    unit = " days" if times[-1] >= 86_400 else ""
    whole, soonest, latest = (f"{s / 86_400:,.1f}" if unit else human_time(s) for s in times)
    hours = proposal.wall_s / 3600 * wish.cluster.count
    return [
        f"  speed   {best.tokens_per_s:,.0f} tokens/s, {best.mfu:.1%} MFU, a step in {best.time.total_s:.2f} s "
        f"(mean error {error:.0%}: {best.time.basis})",
        "  a step  " + ", ".join(f"{name} {s / best.time.total_s:.0%}" for name, s in parts if s),
        f"  time    {whole}{unit} ({soonest} to {latest}), {hours:,.0f} GPU-hours, "
        f"failures with it ({proposal.seconds / proposal.wall_s:.1%} of the time is kept)",
    ]


def offer(cost: Cost) -> str:
    """Where, on what terms, and at what price an hour."""
    price, notes = cost.price, f" ({'; '.join(cost.notes)})" if cost.notes else ""
    term = price.term.replace("_", " ")
    return f"{price.provider} {price.region}, {term} at ${price.usd_hour:.2f} (prices of {price.date}){notes}"


def memory_bar(proposal: Proposal, cells: int = 60) -> list[str]:
    """Memory of the fullest GPU, to scale."""
    needs, whole = proposal.best.needs, proposal.wish.cluster.gpu.memory_bytes
    kinds = {
        "W weights": needs.weights, "G gradients": needs.gradients, "M moments": needs.moments,
        "A activations": needs.activations,
        "+ rest": needs.total - needs.weights - needs.gradients - needs.moments - needs.activations,
    }  # fmt: skip
    bar = "".join(name[0] * round(cells * size / whole) for name, size in kinds.items())[:cells]
    words = ", ".join(f"{name} {human_bytes(size)}" for name, size in kinds.items() if size > whole / 1000)
    return [f"  memory  [{bar:<{cells}}] {human_bytes(needs.total)} of {human_bytes(whole)}", f"          {words}"]


def to_json(proposal: Proposal) -> dict[str, Any]:
    return {
        "model": proposal.shape.to_dict(), "parameters": proposal.shape.parameters, "tokens": proposal.tokens,
        "gpus": str(proposal.wish.cluster), "idle_gpus": proposal.given.count - proposal.wish.cluster.count,
        "context": proposal.wish.context, "batch_rows": proposal.wish.rows,
        "decisions": [asdict(decision) for decision in proposal.plan.decisions.values()],
        "best": _way(proposal.best), "next": [_way(other) for other in proposal.found.ranked[1:3]],
        "error": proposal.error, "training_s": proposal.seconds, "wall_s": proposal.wall_s,
        "gpu_hours": proposal.wall_s / 3600 * proposal.wish.cluster.count,
        "costs": [cost_json(cost) for cost in proposal.costs], "notes": list(proposal.notes),
    }  # fmt: skip


def _way(candidate: Candidate) -> dict[str, Any]:
    return {
        "layout": asdict(candidate.layout), "micro_batch": candidate.micro_rows,
        "activations": candidate.activations, "stages_each": candidate.virtual,
        "memory_bytes": asdict(candidate.needs) | {"total": candidate.needs.total},
        "step": candidate.time.to_dict(), "tokens_per_s": candidate.tokens_per_s, "mfu": candidate.mfu,
    }  # fmt: skip


def cost_json(cost: Cost) -> dict[str, Any]:
    price = cost.price
    return {
        "provider": price.provider, "region": price.region, "term": price.term, "usd": cost.usd, "days": cost.days,
        "usd_hour": price.usd_hour, "date": price.date, "estimate": price.estimate, "energy_kwh": cost.energy_kwh,
        "carbon_kg": cost.carbon_kg, "parts_usd": dict(cost.parts),
    }  # fmt: skip


SHOWN = 8


def ranking_lines(ranking: BudgetRanking) -> list[str]:
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


def _apart(ranking: BudgetRanking) -> list[tuple[BudgetOption, Cost]]:
    found: dict[tuple[str, str], tuple[BudgetOption, Cost]] = {}
    for way, cost in ranking.offers():
        found.setdefault((way.name, cost.price.term), (way, cost))
    return list(found.values())


def ranking_json(ranking: BudgetRanking) -> dict[str, Any]:
    offers = [
        {"gpus": way.proposal.wish.cluster.count, "gpu": way.proposal.wish.cluster.gpu.name,
         "mfu": way.proposal.best.mfu, **cost_json(cost)}
        for way, cost in ranking.offers()
    ]  # fmt: skip
    limits = {"budget_usd": ranking.limits.budget_usd, "deadline_days": ranking.limits.deadline_s / 86_400}
    return to_json(ranking.best) | {
        "limits": limits, "offers": offers, "lost": [{"gpus": name, "why": why} for name, why in ranking.lost],
    }  # fmt: skip
