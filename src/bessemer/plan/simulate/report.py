"""Presents a simulation: as lines for a terminal, as JSON, and as an SVG timeline of one step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.observe.figure import IDLE, SpanStyle, Timeline, svg_file
from bessemer.plan.search.proposal import Proposal
from bessemer.plan.simulate.events import StepTrace
from bessemer.plan.simulate.simulate import Outcome, Simulation, Spread, simulate
from bessemer.spec.quantity import human_count

STYLES: dict[str, SpanStyle] = {
    "forward": SpanStyle("F", "#2d7dc4", "forward"),
    "backward": SpanStyle("B", "#1b4f7d", "backward"),
    "exchange": SpanStyle("x", "#c4622d", "exchanges inside layers"),
    "hop": SpanStyle("h", "#e0a458", "between stages"),
    "host": SpanStyle("-", "#777777", "host"),
    "reduce": SpanStyle("g", "#9b59b6", "weights and gradients"),
    "update": SpanStyle("u", "#3f9d5c", "update"),
    IDLE: SpanStyle(".", "#e6e6e6", "waiting"),
}


def timeline(trace: StepTrace, title: str = "", caption: str = "", most: int = 32) -> Timeline:
    """One row for each stage; of more than `most` stages an even selection with the first and the last."""
    stages: Iterable[int] = range(trace.stages)
    if trace.stages > most:
        stages = sorted({round(i * (trace.stages - 1) / (most - 1)) for i in range(most)})
    rows: dict[int, list[tuple[float, float, str]]] = {stage: [] for stage in stages}
    for span in trace.spans:
        if span.stage in rows:
            kind = "reduce" if span.kind == "data" else span.kind
            rows[span.stage].append((span.start, span.end, kind))
    named = {f"stage {stage}": spans for stage, spans in rows.items()}
    return Timeline(title, caption, named, trace.total_s, STYLES)


def text(trace: StepTrace, simulated: int, total: int, cells: int = 96, most: int = 8) -> list[str]:
    """A line of letters for each stage. `simulated` of `total` micro-batches are in the trace."""
    *rows, legend = timeline(trace, most=most).text(cells)
    partly = f"; {simulated} of {total} micro-batches drawn" if simulated < total else ""
    return [*rows, legend + partly]


def to_json(found: Simulation) -> dict[str, Any]:
    def outcome(one: Outcome) -> dict[str, Any]:
        money = one.usd.to_json() if one.usd else None
        return {"name": one.name, "runs": one.runs, "finish_s": one.wall_s.to_json(), "usd": money}

    step, offer = found.step, found.offer
    return {
        **outcome(found.plan),
        "seed": found.seed,
        "price": f"{offer.price.provider} {offer.price.region} {offer.price.term}" if offer else None,
        "with_error": outcome(found.with_error) | {"mean_absolute_error": found.proposal.error},
        "interruptions": found.failures.to_json(), "shares": found.shares,
        "step": {
            "planned_s": step.planned_s, "events_s": step.events_s, "slowest_s": step.slowest_s,
            "slow_node_s": step.slow_node_s, "columns": step.columns, "gpus_in_lockstep": step.peers,
            "stages": step.step.stages, "micro_batches": step.step.batches, "shares": step.shares,
            "contended_s": step.trace.contended_s,
        },
        "save_every_s": found.job.every_s, "save_written_s": found.job.write_s,
        "spare_nodes": found.chances.standing_by(found.job.nodes),
        "what_ifs": [
            outcome(one) | {"change": one.change if math.isfinite(one.change) else None} for one in found.what_ifs
        ],
    }  # fmt: skip


def lines(found: Simulation) -> list[str]:
    """The simulation as a person reads it."""
    step, plan, job, offer = found.step, found.plan, found.job, found.offer
    shown = [f"  played  {plan.runs} runs by events, seed {found.seed}"]
    gpus = found.proposal.wish.cluster.count
    shown.append(
        f"  a step  {step.events_s:.2f} s by events ({step.events_s / step.planned_s - 1:+.1%} of the plan's), "
        f"{step.slowest_s:.2f} s as the slowest of {gpus:,} GPUs has it, {step.slow_node_s:.2f} s with a slow node"
    )
    shown.append("          " + ", ".join(f"{name} {share:.1%}" for name, share in step.shares.items() if share > 5e-4))
    shown += [f"          {line}" for line in text(step.trace, step.shown, step.step.batches)]
    shown.append(
        f"  finish  {_days(plan.wall_s)} by chance; {_days(found.with_error.wall_s)} with the step time's error"
    )
    if offer and plan.usd and found.with_error.usd:
        where = f"{offer.price.provider} {offer.price.region}, {offer.price.term.replace('_', ' ')}"
        shown.append(f"  cost    {_usd(plan.usd)} by chance; {_usd(found.with_error.usd)} with that error ({where})")
    shares = ", ".join(f"{name} {share:.1%}" for name, share in found.shares.items() if share > 5e-4)
    failures = found.failures
    shown.append(f"  lost    {failures.p10:,.0f} to {failures.p90:,.0f} interruptions; of the time {shares or 'all'}")
    spares = found.chances.standing_by(job.nodes)
    shown.append(
        f"          {spares} spare nodes, saves every {job.every_s / 60:,.0f} min, written in {job.write_s:,.0f} s"
    )
    for one in found.what_ifs:
        money = f"  p50 ${one.usd.p50:,.0f}" if one.usd and math.isfinite(one.usd.p50) else ""
        word = f"{one.change:+.1%}" if math.isfinite(one.change) else "never"
        shown.append(f"  what if {one.name:<40} {_days(one.wall_s)} ({word}){money}")
    return shown


def _days(spread: Spread) -> str:
    words = [f"{value / 86_400:,.1f}" if math.isfinite(value) else "never" for value in vars(spread).values()]
    return "p10 {} p50 {} p90 {} days".format(*words)


def _usd(spread: Spread) -> str:
    words = [f"${value:,.0f}" if math.isfinite(value) else "without end" for value in vars(spread).values()]
    return "p10 {} p50 {} p90 {}".format(*words)


def picture(found: Simulation) -> str:
    """One step as a drawing."""
    step, wish = found.step, found.proposal.wish
    title = f"One step of {human_count(found.proposal.shape.parameters)} parameters on {wish.cluster}"
    parts = ", ".join(f"{name} {share:.1%}" for name, share in step.shares.items() if share > 5e-4)
    some = f"{step.shown} of {step.step.batches} micro-batches drawn" if step.shown < step.step.batches else "all drawn"
    caption = f"{step.events_s:.3g} s: {parts} ({found.proposal.best.name()}; {some})"
    return svg_file(timeline(step.trace, title, caption).svg()) + "\n"


def simulated(proposal: Proposal, seed: int = 0, path: Path | None = None) -> Simulation:
    """The plan, played; a picture of its step goes to `path`."""
    if path and path.suffix.lower() != ".svg":
        raise UserError(f"--picture {path}: the picture is drawn as SVG: write {path.with_suffix('.svg')}")
    found = simulate(proposal, seed=seed)
    if path:
        try:
            path.write_text(picture(found))
        except OSError as fault:
            raise UserError(f"--picture {path}: cannot be written ({fault.strerror}): write another place") from None
    return found
