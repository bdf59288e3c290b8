"""What a report is made of, whatever it is written as: sections of paragraphs, tables, excerpts and pictures; and the
same as Markdown. Text of documents is hostile: it is made visible here and escaped where it is written.

The curves of a report, drawn as inline SVG: no library, no script; colours come from the page's style, so that they
follow light and dark.

A report as one HTML file that needs nothing else: no script, no outside address, pictures drawn inline. A document's
text may hold HTML, so everything is escaped, and the page's own policy refuses to load or run anything.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from bessemer.observe.format import sparkline

_EXCERPT_LINES, _EXCERPT_WIDTH = 16, 160
_CELL_CHARS = 1000


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Items:
    items: list[str]


@dataclass(frozen=True)
class Code:
    text: str
    caption: str = ""


@dataclass(frozen=True)
class Table:
    head: list[str]
    rows: list[list[str]]
    bad: list[bool] = field(default_factory=list)  # rows to stand out


@dataclass(frozen=True)
class Curve:
    """A number over the steps around the incident, in the order of time: after a rollback the steps begin anew."""

    name: str
    points: list[tuple[float, float, bool]]  # step, value, vetoed
    band: tuple[float, float]  # what was normal
    marks: list[tuple[float, str]]

    @property
    def log(self) -> bool:
        """Drawn on a log scale: a spike would flatten all else."""
        values = [value for _, value, _ in self.points if math.isfinite(value)]
        return bool(values) and min(*values, *self.band) > 0 and max(values) > 4 * min(values)


Block = Text | Items | Code | Table | Curve
Section = tuple[str, list[Block]]


def shown(value: float | None, form: str = ",.4g") -> str:
    if value is None:
        return "not measured"
    return format(value, form) if math.isfinite(value) else f"not finite ({value})"


def share(value: float | None) -> str:
    return shown(value, ".1%")


def visible(text: str) -> str:
    """One line in which every character can be seen: control characters as their pictures, others that do not print
    (bidirectional marks, lone surrogates) by their number."""
    return "".join(letter if letter.isprintable() else _picture(letter) for letter in text)


def _picture(letter: str) -> str:
    code = ord(letter)
    if code < 0x20 or code == 0x7F:
        return "\u2421" if code == 0x7F else chr(0x2400 + code)
    return " " if unicodedata.category(letter) == "Zs" else f"[U+{code:04X}]"


def excerpt(text: str) -> str:
    """The beginning of a text in lines that can be seen and are not long."""
    lines = text.split("\n", _EXCERPT_LINES)
    kept = [
        visible(line[:_EXCERPT_WIDTH]) + (f"… ({len(line) - _EXCERPT_WIDTH:,} more)" * (len(line) > _EXCERPT_WIDTH))
        for line in lines[:_EXCERPT_LINES]
    ]
    return "\n".join(kept + ["…"] * (len(lines) > _EXCERPT_LINES))


def cell(text: str) -> str:
    return visible(text if len(text) <= _CELL_CHARS else text[:_CELL_CHARS] + "…")


def markdown(title: str, sections: Sequence[Section]) -> str:
    """For a terminal and for GitHub."""
    parts = [f"# {_plain(title)}"]
    for heading, blocks in sections:
        parts += [f"## {heading}", *(_block(block) for block in blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _plain(text: str) -> str:
    """Escapes what Markdown would read as markup; an underscore only where it is not inside a word."""
    return re.sub(r"([\\`*<>|\[\]~]|(?<!\w)_|_(?!\w))", r"\\\1", cell(text))


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return _plain(block.text)
    if isinstance(block, Items):
        return "\n".join(f"- {_plain(item)}" for item in block.items)
    if isinstance(block, Code):
        runs = [len(run) for run in re.findall("`+", block.text)]
        fence = "`" * max(3, 1 + max(runs, default=0))
        text = "\n".join(visible(line) for line in block.text.split("\n"))
        return "\n\n".join(part for part in (_plain(block.caption), f"{fence}text\n{text}\n{fence}") if part)
    return _table(block) if isinstance(block, Table) else _sparkline(block)


def _table(table: Table) -> str:
    rows = [[_plain(text) for text in row] for row in [table.head, *table.rows]]
    widths = [max(len(row[k]) for row in rows) for k in range(len(table.head))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _sparkline(curve: Curve) -> str:
    values = [value for _, value, _ in curve.points if math.isfinite(value)]
    if not values:
        return f"{curve.name}: no finite values around the step"
    steps = [step for step, _, _ in curve.points]
    drawn = [math.log(value) for value in values] if curve.log else values
    missing = len(curve.points) - len(values)
    return (
        f"    {sparkline(drawn, 60)}\n    {curve.name}, steps {min(steps):,.0f} to {max(steps):,.0f}, from "
        f"{shown(min(values))} to {shown(max(values))}" + f"; {missing} not finite" * (missing > 0)
    )


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


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #57606a; --line: #d8dee4; --bad: #b3261e;
  --curve: #0b57d0; --band: rgb(26 127 55 / .16); --box: #f6f8fa }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #14171b; --soft: #9aa4af; --line: #333a42;
  --bad: #ff7a6e; --curve: #7ab0ff; --band: rgb(87 200 120 / .18); --box: #1d2127 } }
@media print { :root { --ink: #000; --paper: #fff; --soft: #444; --line: #bbb; --bad: #b3261e; --curve: #0b57d0;
  --box: #fff } section, figure, svg { break-inside: avoid } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 0 auto; padding: 1.5rem 1rem 4rem }
h1 { font-size: 1.5rem; line-height: 1.25 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p, li { overflow-wrap: anywhere } section:first-of-type p:first-of-type { font-size: 1.1rem }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere } th { color: var(--soft); font-weight: 600; white-space: nowrap }
tr.bad td { color: var(--bad) }
pre { background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: .7rem; margin: .3rem 0;
  font-size: .85rem; white-space: pre-wrap; overflow-wrap: anywhere }
figure { margin: 1rem 0 } figcaption { color: var(--soft); overflow-wrap: anywhere }
svg { width: 100%; height: auto; margin: .5rem 0 } svg text { font: 11px system-ui, sans-serif; fill: var(--soft) }
svg .name { font-size: 13px; fill: var(--ink) } .curve { fill: none; stroke: var(--curve); stroke-width: 1.5 }
.band { fill: var(--band) } .grid { stroke: var(--line); stroke-width: .5 }
line.mark { stroke: var(--soft); stroke-dasharray: 4 3 }
svg circle.refused, svg text.refused { fill: var(--bad) } svg text.refused { font-size: 16px }
.bar { height: 5px; background: var(--curve); print-color-adjust: exact } .bad .bar { background: var(--bad) }
"""


def html_page(title: str, sections: Sequence[Section]) -> str:
    body = "".join(
        f"<section><h2>{escape(heading)}</h2>{''.join(map(_html_block, blocks))}</section>\n"
        for heading, blocks in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{_text(title)}</h1>\n{body}</body></html>\n"
    )


def _text(text: str) -> str:
    return escape(cell(text))


def _html_block(block: Block) -> str:
    match block:
        case Text():
            return f"<p>{_text(block.text)}</p>"
        case Items():
            return f"<ul>{''.join(f'<li>{_text(item)}</li>' for item in block.items)}</ul>"
        case Code():
            text = escape("\n".join(visible(line) for line in block.text.split("\n")))
            caption = f"<figcaption>{_text(block.caption)}</figcaption>" if block.caption else ""
            return f"<figure>{caption}<pre>{text}</pre></figure>"
        case Table():
            return _html_table(block)
        case Curve():
            return curve_svg(block)


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{_text(text)}</th>" for text in table.head)
    bad = table.bad or [False] * len(table.rows)
    rows = "".join(
        f"<tr{' class=bad' * stands_out}>{''.join(map(_cell, row))}</tr>"
        for row, stands_out in zip(table.rows, bad, strict=True)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(text: str) -> str:
    """A share also shows as a bar."""
    found = re.fullmatch(r"(\d+\.\d)%", text)
    bar = f'<div class="bar" style="width: {min(100.0, float(found[1]))}%"></div>' if found else ""
    return f"<td>{_text(text)}{bar}</td>"
