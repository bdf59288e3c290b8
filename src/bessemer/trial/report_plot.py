"""The curves of a report, drawn as inline SVG: no library, no script; colours come from the page's style, so that they
follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from bessemer.trial.report_page import Curve, cell, shown

_WIDTH, _HEIGHT = 760.0, 230.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 16.0, 30.0, 28.0


def curve_svg(curve: Curve) -> str:
    """The curve with the normal band, refused steps as dots (crosses at the top where not finite), marks as lines."""
    values = [value for _, value, _ in curve.points if math.isfinite(value)]
    if not values:
        return f"<p>{escape(curve.name)}: no finite values around the step.</p>"
    ends = [value for value in curve.band if math.isfinite(value)]
    log = curve.log
    steps = [step for step, _, _ in curve.points] + [step for step, _ in curve.marks]
    x = _scale(min(steps), max(steps), _LEFT, _WIDTH - _RIGHT)
    y = _scale(min(values + ends), max(values + ends), _HEIGHT - _BOTTOM, _TOP, log)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="{escape(curve.name)} around the step">',
        f'<text x="{_LEFT}" y="14" class="name">{escape(curve.name)}{" (log scale)" * log}</text>',
    ]
    if len(ends) == 2:
        low, high = y(ends[0]), y(ends[1])
        parts.append(
            f'<rect class="band" x="{_LEFT}" y="{high:.1f}" width="{_WIDTH - _LEFT - _RIGHT}" '
            f'height="{max(1.0, low - high):.1f}"><title>normal: {shown(ends[0])} to {shown(ends[1])}</title></rect>'
        )
    parts += _axes(curve, x, y, min(values + ends), max(values + ends), log)
    for line in _lines(curve):
        places = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in line)
        parts.append(f'<polyline class="curve" points="{places}"/>')
    for step, value, vetoed in curve.points:
        told = f"<title>step {step:,.0f}: {shown(value)}{', vetoed' * vetoed}</title>"
        if not math.isfinite(value):
            parts.append(f'<text class="refused" x="{x(step):.1f}" y="{_TOP}" text-anchor="middle">×{told}</text>')
        elif vetoed:
            parts.append(f'<circle class="refused" cx="{x(step):.1f}" cy="{y(value):.1f}" r="4">{told}</circle>')
    return "".join([*parts, "</svg>"])


def _axes(
    curve: Curve, x: Callable[[float], float], y: Callable[[float], float], low: float, high: float, log: bool
) -> list[str]:
    parts = []
    for value in sorted({_between(low, high, k / 4, log) for k in range(5)}):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{shown(value, ".3g")}</text>'
        )
    steps = [step for step, _, _ in curve.points]
    for tick in sorted({round(_between(min(steps), max(steps), k / 4, False)) for k in range(5)}):
        parts.append(f'<text x="{x(tick):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{tick:,}</text>')
    for k, (step, label) in enumerate(curve.marks):
        anchor = "end" if x(step) > _WIDTH / 2 else "start"
        parts.append(
            f'<line class="mark" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{_TOP - 8}" y2="{_HEIGHT - _BOTTOM}"/>'
            f'<text class="mark" x="{x(step):.1f}" y="{_TOP + 12 * k}" dx="{-4 if anchor == "end" else 4}" '
            f'text-anchor="{anchor}">{escape(cell(label))}</text>'
        )
    return parts


def _lines(curve: Curve) -> list[list[tuple[float, float]]]:
    """Stretches that are drawn through: broken at what is not finite and where the steps begin anew."""
    lines: list[list[tuple[float, float]]] = [[]]
    for step, value, _ in curve.points:
        if not math.isfinite(value) or (lines[-1] and step <= lines[-1][-1][0]):
            lines.append([])
        if math.isfinite(value):
            lines[-1].append((step, value))
    return [line for line in lines if line]


def _between(low: float, high: float, part: float, log: bool) -> float:
    if log:
        return math.exp(math.log(low) * (1 - part) + math.log(high) * part)
    return low * (1 - part) + high * part  # no difference, which could overflow


def _scale(low: float, high: float, start: float, stop: float, log: bool = False) -> Callable[[float], float]:
    """From values to places on the page."""
    unit = max(abs(low), abs(high)) or 1.0

    def flat(value: float) -> float:
        return math.log(value) if log else value / unit

    span = flat(high) - flat(low)
    return lambda value: start + (stop - start) * ((flat(value) - flat(low)) / span if span else 0.5)
