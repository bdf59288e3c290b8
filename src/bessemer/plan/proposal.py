"""A whole plan from a wish: model, tokens and GPUs in; layout, batch, rates, memory, days and money out, each with why.

Nothing here reads data or devices: what a run measures on its own machine comes later, and takes precedence.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.cost import Cost, Work, impossible, preparation_of, rank, storage_of
from bessemer.plan.decision import Plan
from bessemer.plan.goodput import goodput
from bessemer.plan.hardware import kept_ceilings, parse_cluster, with_ceilings
from bessemer.plan.prices import load_prices
from bessemer.plan.recipe.rates import batch_tokens, learning_rate, warmup_steps
from bessemer.plan.recipe.shape import design
from bessemer.plan.recipe.tokens import tokens_for_model
from bessemer.plan.search import Candidate, Found, Wish, nearest, search, why
from bessemer.spec.memory import MemorySpec, optimizer_bytes
from bessemer.spec.optimizer import OptimizerSpec
from bessemer.spec.quantity import human_bytes, human_count, human_time
from bessemer.spec.shape import PRESETS, ModelShape

LLAMA_WORDS = 32_000
SIZE = re.compile(r"(?:[a-z0-9.]+[-_ ])*?(\d+(?:\.\d+)?)\s*([kmbt])", re.I)
SCALES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Proposal:
    """`found` has the best layout first. Money is cheapest first; empty where nobody rents such GPUs."""

    shape: ModelShape
    tokens: int
    wish: Wish
    found: Found
    plan: Plan
    seconds: float  # of training, if nothing fails
    wall_s: float  # with failures
    costs: tuple[Cost, ...]

    @property
    def best(self) -> Candidate:
        return self.found.best

    @property
    def error(self) -> float:
        return self.best.time.error


def read_model(text: str, context: int) -> tuple[ModelShape, str]:
    """A preset, or the shape that a size asks for; and why that shape."""
    match = SIZE.fullmatch(text.strip())
    if not match:
        raise UserError(
            f"--model {text!r}: no size found: write one such as 7B or llama-7b, or a preset of {', '.join(PRESETS)}"
        )
    name = f"{match[1]}{match[2].upper()}"
    if name in PRESETS:
        return replace(PRESETS[name], vocab=PRESETS[name].vocab or LLAMA_WORDS), f"the preset {name}"
    size = float(match[1]) * SCALES[match[2].lower()]
    found = design(size, context)
    return found.shape, f"{human_count(found.shape.parameters)} parameters for a wish of {name}"


def propose(
    model: str, gpus: str, tokens: int | None = None, context: int = 4096, batch: int | None = None,
    precision: str = "bf16", network: str | None = None,
) -> Proposal:  # fmt: skip
    """The plan. Impossible wishes are refused with the arithmetic and the nearest possible one."""
    if context < 1:
        raise UserError(f"--context {context}: write a number above 0")
    cluster = parse_cluster(gpus, network)
    cluster = with_ceilings(cluster, kept_ceilings(cluster.gpu))
    plan = Plan()
    shape, reason = read_model(model, context)
    plan.add("model", f"{human_count(shape.parameters)} parameters", reason, "asked")
    if tokens is None:
        answer = tokens_for_model(shape.parameters)
        tokens = int(plan.add("budget.tokens", int(answer.value), answer.reason, f"{answer.source} ({answer.basis})"))
    elif tokens < context:
        raise UserError(f"--tokens {tokens}: fewer than a row of {context}: write more, such as 1B")
    rows = _rows(plan, shape, tokens, context, batch)
    wish = Wish(shape, cluster, context, rows, optimizer_bytes(OptimizerSpec(), MemorySpec(), precision), precision)
    found = search(wish)
    if not found.ranked:
        raise UserError(nearest(wish, found) if found.too_large else _no_layout(wish))
    _explain(plan, wish, found, tokens)
    best = found.best
    seconds = tokens / best.tokens_per_s
    kept = goodput(cluster.nodes)
    plan.add(
        "checkpoint.every", human_time(kept.save_every_s),
        f"failures come about every {human_time(kept.mtti_s)} on {cluster.nodes} nodes", "Young 1974",
    )  # fmt: skip
    work = Work(cluster.gpu.name, cluster.count, seconds, shape.parameters, tokens, cluster.per_node)
    costs = rank(
        {cluster.gpu.name: work}, load_prices(), storage=storage_of(shape.parameters, tokens),
        preparation=preparation_of(tokens),
    )  # fmt: skip
    return Proposal(shape, tokens, wish, found, plan, seconds, kept.wall_s(seconds), tuple(costs))


def check_rate(proposal: Proposal, wanted: float) -> None:
    """Refuse a wished-for throughput that no machine of this kind can give, with the arithmetic."""
    gpu, count = proposal.wish.cluster.gpu, proposal.wish.cluster.count
    if fault := impossible(proposal.shape.parameters, wanted, count, gpu, proposal.wish.precision):
        raise UserError(fault)


def _rows(plan: Plan, shape: ModelShape, tokens: int, context: int, batch: int | None) -> int:
    """Rows of a step, a multiple of a power of two that shares out well."""
    if batch is not None:
        if batch < context:
            raise UserError(f"--batch {batch}: fewer tokens than a row of {context}: write {context} or more")
        rows = batch // context
        plan.asked("budget.batch", rows * context)
        return rows
    answer = batch_tokens(shape.parameters, tokens)
    rows = max(1, round(answer.value / context))
    power = 1 << max(0, rows.bit_length() - 3)
    rows = max(1, round(rows / power) * power)
    plan.add("budget.batch", rows * context, answer.reason, f"{answer.source} ({answer.basis})")
    return rows


def _no_layout(wish: Wish) -> str:
    count, rows = wish.cluster.count, wish.rows
    return (
        f"no layout shares {rows} rows of a step among {count} GPUs: write --batch {count * wish.context} or a multiple"
    )


def _explain(plan: Plan, wish: Wish, found: Found, tokens: int) -> None:
    best, shape = found.best, wish.shape
    steps = -(-tokens // (wish.rows * wish.context))
    ways = f"the fastest of {len(found.ranked)} layouts that fit, {len(found.too_large)} do not"
    degrees = {key: value for key, value in asdict(best.layout).items() if value > 1} or {"dp_replicate": 1}
    plan.add("parallel", ", ".join(f"{key} {value}" for key, value in degrees.items()), ways, "search")
    batches = wish.rows // (best.layout.dp * best.micro_rows)
    plan.add("budget.micro_batch", best.micro_rows, f"{batches} passes of each process make a step", "search")
    plan.add("memory.activations", best.activations, "the least that is computed again for the rest to fit", "search")
    if best.layout.pp > 1:
        kind = "interleaved" if best.virtual > 1 else "1f1b"
        plan.add("parallel.pipeline", f"{kind}, {best.virtual} stages each", "the smallest bubble that fits", "search")
    plan.add("precision", wish.precision, f"{wish.cluster.gpu.name} computes in it", "asked")
    plan.add("steps", steps, f"{human_count(tokens)} tokens in batches of {wish.rows * wish.context:,}", "counted")
    rate, warm = learning_rate(shape.parameters, tokens), warmup_steps(steps)
    plan.add("optimizer.lr", float(f"{rate.value:.3g}"), rate.reason, f"{rate.source} ({rate.basis})")
    plan.add("schedule.warmup", warm.value, warm.reason, f"{warm.source} ({warm.basis})")


def lines(proposal: Proposal, width: int = 150) -> list[str]:
    """The plan as a person reads it."""
    best, wish, error = proposal.best, proposal.wish, proposal.error
    shown = [
        f"{human_count(proposal.shape.parameters)} parameters on {human_count(proposal.tokens)} tokens, {wish.cluster}",
        "",
    ]
    rows = [(key, value, f"{reason} [{source}]") for key, value, reason, source in proposal.plan.rows()]
    first, second = max(len(row[0]) for row in rows), min(44, max(len(row[1]) for row in rows))
    shown += [f"  {key:<{first}}  {value:<{second}}  {reason}"[:width] for key, value, reason in rows]
    shown += ["", *memory_bar(proposal), ""]
    shown.append(
        f"  speed   {best.tokens_per_s:,.0f} tokens/s, {best.mfu:.1%} MFU, a step in {best.time.total_s:.2f} s "
        f"(mean error {error:.0%}: {best.time.basis})"
    )
    parts = sorted(best.time.parts.items(), key=lambda item: -item[1])
    shown.append("  a step  " + ", ".join(f"{name} {s / best.time.total_s:.0%}" for name, s in parts if s))
    days = proposal.wall_s / 86_400
    hours = proposal.wall_s / 3600 * wish.cluster.count
    shown.append(
        f"  time    {days:,.1f} days ({days * (1 - error):,.1f} to {days * (1 + error):,.1f}), {hours:,.0f} GPU-hours, "
        f"failures with it ({proposal.seconds / proposal.wall_s:.1%} of the time is kept)"
    )
    for cost in proposal.costs[:5]:
        price, notes = cost.price, f" ({'; '.join(cost.notes)})" if cost.notes else ""
        shown.append(
            f"  cost    ${cost.usd:>12,.0f}  {price.provider} {price.region}, {price.term.replace('_', ' ')} at "
            f"${price.usd_hour:.2f} (prices of {price.date}){notes}"
        )
    if not proposal.costs:
        shown.append(f"  cost    nobody in the price list rents {wish.cluster.count} x {wish.cluster.gpu.name}")
    for other in proposal.found.ranked[1:3]:
        shown.append(f"  next    {other.name()}: {why(best, other, wish)}")
    for other in proposal.found.too_large[:1]:
        shown.append(f"  not     {other.name()}: {why(best, other, wish)}"[:width])
    return shown


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
    def way(candidate: Candidate) -> dict[str, Any]:
        return {
            "layout": asdict(candidate.layout), "micro_batch": candidate.micro_rows,
            "activations": candidate.activations, "stages_each": candidate.virtual,
            "memory_bytes": asdict(candidate.needs) | {"total": candidate.needs.total},
            "step": candidate.time.to_dict(), "tokens_per_s": candidate.tokens_per_s, "mfu": candidate.mfu,
        }  # fmt: skip

    return {
        "model": proposal.shape.to_dict(), "parameters": proposal.shape.parameters, "tokens": proposal.tokens,
        "gpus": str(proposal.wish.cluster), "context": proposal.wish.context, "batch_rows": proposal.wish.rows,
        "decisions": [asdict(decision) for decision in proposal.plan.decisions.values()],
        "best": way(proposal.best), "next": [way(other) for other in proposal.found.ranked[1:3]],
        "error": proposal.error, "training_s": proposal.seconds, "wall_s": proposal.wall_s,
        "gpu_hours": proposal.wall_s / 3600 * proposal.wish.cluster.count,
        "costs": [
            {"provider": c.price.provider, "region": c.price.region, "term": c.price.term, "usd": c.usd,
             "usd_hour": c.price.usd_hour, "date": c.price.date, "energy_kwh": c.energy_kwh, "carbon_kg": c.carbon_kg}
            for c in proposal.costs
        ],
    }  # fmt: skip
