"""One step's timeline: what every stage of a pipeline does when, as letters for a terminal and as a drawing.

A simulation as a person reads it, as a drawing, and for other programs.
"""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.search.proposal import Proposal
from bessemer.plan.simulate.events import Kind, Span, StepTrace
from bessemer.plan.simulate.simulate import Outcome, Simulation, Spread, simulate
from bessemer.spec.quantity import human_count

LETTERS: dict[Kind, str] = {
    "forward": "F", "backward": "B", "exchange": "x", "hop": "h", "data": "g", "host": "-", "reduce": "g",
    "update": "u",
}  # fmt: skip
WAITS = "."
COLOURS: dict[str, str] = {
    "forward": "#2d7dc4", "backward": "#1b4f7d", "exchange": "#c4622d", "hop": "#e0a458", "data": "#9b59b6",
    "reduce": "#9b59b6", "update": "#3f9d5c", "host": "#777777", "bubble": "#e6e6e6",
}  # fmt: skip
LEGEND = {
    "forward": "forward", "backward": "backward", "exchange": "exchanges inside layers", "hop": "between stages",
    "reduce": "weights and gradients", "update": "update", "host": "host", "bubble": "waiting",
}  # fmt: skip
LEFT, WIDTH, ROW, TOP = 80, 1000, 22, 64  # of the drawing, in SVG units
NARROW = 0.15  # units below which nothing is to be seen


def _some(stages: int, most: int) -> list[int]:
    """Stages to be shown: all, or as many as there is room for, evenly, first and last with them."""
    if stages <= most:
        return list(range(stages))
    return sorted({round(i * (stages - 1) / (most - 1)) for i in range(most)})


def _rows(trace: StepTrace, most: int) -> dict[int, list[Span]]:
    rows: dict[int, list[Span]] = {stage: [] for stage in _some(trace.stages, most)}
    for span in trace.spans:
        if span.stage in rows:
            rows[span.stage].append(span)
    return rows


def text(trace: StepTrace, shown: int, whole: int, cells: int = 96, most: int = 8) -> list[str]:
    """A line for each stage, in which letters are as frequent as what they stand for. `shown` of `whole` micro-batches
    were played."""
    rows = _rows(trace, most)
    found = [f"stage {stage:<3} {_letters(spans, trace.total_s, cells)}" for stage, spans in rows.items()]
    used = "".join(found)
    words = [f"{LETTERS[kind]} {LEGEND[kind]}" for kind in LETTERS if kind in LEGEND and LETTERS[kind] in used]
    some = f"; {shown} of {whole} micro-batches drawn" if shown < whole else ""
    return [*found, ", ".join(words) + (f", {WAITS} waiting" if WAITS in used else "") + some]


def _letters(spans: list[Span], total_s: float, cells: int) -> str:
    filled: list[dict[str, float]] = [{} for _ in range(cells)]
    for span in spans:
        start, end = (min(cells, at / total_s * cells) for at in (span.start, span.end))
        letter = LETTERS[span.kind]
        for at in range(int(start), min(cells, math.ceil(end))):
            share = min(end, at + 1) - max(start, at)
            filled[at][letter] = filled[at].get(letter, 0.0) + share
    letters, owed = "", dict.fromkeys((WAITS, *LETTERS.values()), 0.0)
    for cell in filled:
        for letter in owed:
            owed[letter] += cell.get(letter, 0.0) if letter != WAITS else 1 - sum(cell.values())
        # Of what is here, that which earlier cells left out most: short passes show in their proportion.
        here = [letter for letter in owed if cell.get(letter, 0.0) > 0.02 or letter == WAITS]
        letters += max(here, key=lambda letter: owed[letter])
        owed[letters[-1]] -= 1
    return letters


def svg(trace: StepTrace, title: str, caption: str, most: int = 32) -> str:
    """A drawing to scale that needs nothing else: no script, no font, no network."""
    rows = _rows(trace, most)
    bottom = TOP + ROW * len(rows)
    inside = [_text(LEFT, 20, title, "bold"), _text(LEFT, 38, caption), _legend()]
    for place, (stage, spans) in enumerate(rows.items()):
        top = TOP + place * ROW
        inside.append(_text(LEFT - 6, top + 14, f"stage {stage}", anchor="end"))
        inside.append(_box(0, 1, top, ROW - 4, "bubble"))
        for span in spans:
            start, end = span.start / trace.total_s, span.end / trace.total_s
            if (end - start) * WIDTH >= NARROW:
                inside.append(_box(start, end, top, ROW - 4, span.kind))
    for tick in range(11):
        x = LEFT + WIDTH * tick / 10
        inside.append(f'<path d="M{x:.1f} {bottom}v5" stroke="#777777"/>')
        inside.append(_text(x, bottom + 18, f"{trace.total_s * tick / 10:.3g} s", anchor="middle"))
    size = f'width="{LEFT + WIDTH + 40}" height="{bottom + 30}"'
    about = (
        f'xmlns="http://www.w3.org/2000/svg" {size} style="background:white" font-family="sans-serif" font-size="11"'
    )
    return f"<svg {about}><title>{html.escape(title)}</title>\n" + "\n".join(inside) + "\n</svg>\n"


def _box(start: float, end: float, top: float, height: float, kind: str) -> str:
    x, width = LEFT + WIDTH * start, WIDTH * (end - start)
    return f'<rect x="{x:.2f}" y="{top:g}" width="{width:.2f}" height="{height:g}" fill="{COLOURS[kind]}"/>'


def _text(x: float, y: float, words: str, weight: str = "normal", anchor: str = "start") -> str:
    how = f'font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {how} fill="#222222">{html.escape(words)}</text>'


def _legend() -> str:
    parts, x = [], float(LEFT)
    for kind, words in LEGEND.items():
        parts.append(f'<rect x="{x:.1f}" y="46" width="10" height="10" fill="{COLOURS[kind]}"/>')
        parts.append(_text(x + 14, 55, words))
        x += 30 + 6.2 * len(words)
    return "".join(parts)


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
    return svg(step.trace, title, f"{step.events_s:.3g} s: {parts} ({found.proposal.best.name()}; {some})")


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
