"""Small figures without a plotting library: each draws itself as inline SVG for a page and as lines for a terminal.

Values that are not finite are left out: a curve has a gap there. Nothing here needs torch.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bessemer.observe.format import sparkline

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 260, 64, 36, 26  # of a figure, in SVG units
COLOURS = ("#c4622d", "#2d7dc4", "#3f9d5c", "#9b59b6", "#b8860b", "#777777")
GLYPHS = "*o+x^~"
RAMP = " .:-=+*#%@"
STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 18%, transparent); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th:first-child, td:first-child, td.words { text-align: left; }
svg { max-width: 100%; height: auto; display: block; margin: 1rem 0; }
svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
"""


def page(title: str, body: str) -> str:
    """A self-contained HTML page: no script, no network. `body` is HTML already."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
    title = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><title>{title}</title>{head}</head>\n'
        f"<body>\n<h1>{title}</h1>\n{body}\n</body></html>\n"
    )


def svg_file(svg: str) -> str:
    """A figure as a file of its own, which needs a name space, a font and a ground to stand on."""
    about = 'xmlns="http://www.w3.org/2000/svg" style="background:white" font-family="sans-serif" font-size="11"'
    return svg.replace("<svg", f"<svg {about}", 1)


@dataclass(frozen=True)
class Axis:
    """From values to shares of the figure's side."""

    low: float
    high: float
    log: bool = False

    @staticmethod
    def around(values: Iterable[float], log: bool = False) -> Axis:
        """The range of what can be shown: finite, and positive on a logarithmic axis."""
        shown = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
        low, high = (min(shown), max(shown)) if shown else (1.0, 1.0)
        if high - low <= 1e-9 * abs(high):  # one value, as far as a figure can tell
            room = max(0.5, 1e-3 * abs(high))
            low, high = (low / 2, high * 2) if log else (low - room, high + room)
        return Axis(low, high, log)

    def place(self, value: float) -> float | None:
        """0 at the low end, 1 at the high end, None for what has no place."""
        if not math.isfinite(value) or (self.log and value <= 0):
            return None
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        share = (at - low) / (high - low)
        return share if 0 <= share <= 1 else None

    def ticks(self) -> list[float]:
        """At most seven: powers of ten where the axis spans several, else round steps."""
        if self.log and self.high / self.low >= 100:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**k for k in range(first, last + 1, 1 + (last - first) // 7)]
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough * 0.999)
        return [k * step for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _frame(title: str, x: Axis, y: Axis, x_label: str, inside: str) -> str:
    """The figure around what is drawn inside it."""
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{html.escape(title)}</title>']
    parts.append(f'<text x="{LEFT}" y="15" style="font-weight:600">{html.escape(title)}</text>')
    for value in x.ticks():
        at = _across(x.place(value) or 0.0)
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{value:.4g}</text>')
    for value in y.ticks():
        at = _down(y.place(value) or 0.0)
        line = f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{at:.1f}" y2="{at:.1f}" stroke="currentColor" opacity=".15"/>'
        parts.append(f'{line}<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    middle = (LEFT + WIDTH - 8) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{html.escape(x_label)}</text>')
    return "".join(parts) + inside + "</svg>"


def _across(share: float) -> float:
    return LEFT + share * (WIDTH - 8 - LEFT)


def _down(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)


@dataclass(frozen=True)
class Lines:
    """Curves over one axis. `marks` are named vertical lines."""

    title: str
    x: Sequence[float]
    series: Mapping[str, Sequence[float]]
    x_label: str = ""
    log_x: bool = False
    log_y: bool = False
    marks: Mapping[str, float] = field(default_factory=dict)

    def _axes(self) -> tuple[Axis, Axis]:
        every = [value for values in self.series.values() for value in values]
        return Axis.around(self.x, self.log_x), Axis.around(every, self.log_y)

    def svg(self) -> str:
        x, y = self._axes()
        parts = []
        for k, (name, values) in enumerate(self.series.items()):
            pen, path = "M", []
            for across, up in ((x.place(a), y.place(b)) for a, b in zip(self.x, values, strict=True)):
                if across is None or up is None:
                    pen = "M"
                    continue
                path.append(f"{pen}{_across(across):.1f} {_down(up):.1f}")
                pen = "L"
            colour = COLOURS[k % len(COLOURS)]
            parts.append(f'<path d="{" ".join(path)}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
            name_at = f'x="{WIDTH - 10}" y="{15 + 13 * k}" text-anchor="end" style="fill:{colour}"'
            parts.append(f"<text {name_at}>{html.escape(name)}</text>")
        for k, (name, value) in enumerate(self.marks.items()):
            if (place := x.place(value)) is not None:
                at = f"{_across(place):.1f}"
                line = f'<line x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="currentColor"'
                parts.append(f'{line} stroke-dasharray="3 3"/>')
                side = 'dx="3"' if place < 0.8 else 'dx="-3" text-anchor="end"'
                parts.append(f'<text x="{at}" y="{TOP + 10 + 12 * k}" {side}>{html.escape(name)}</text>')
        return _frame(self.title, x, y, self.x_label, "".join(parts))

    def text(self, width: int = 72, height: int = 14) -> str:
        x, y = self._axes()
        cells = [[" "] * width for _ in range(height)]
        for value in self.marks.values():
            if (across := x.place(value)) is not None:
                for row in cells:
                    row[round(across * (width - 1))] = "|"
        for k, values in enumerate(self.series.values()):
            for a, b in zip(self.x, values, strict=True):
                across, up = x.place(a), y.place(b)
                if across is not None and up is not None:
                    cells[round((1 - up) * (height - 1))][round(across * (width - 1))] = GLYPHS[k % len(GLYPHS)]
        legend = [f"{GLYPHS[k % len(GLYPHS)]} {name}" for k, name in enumerate(self.series)]
        legend += [f"| {name} {value:.3g}" for name, value in self.marks.items()]
        labels = {0: f"{y.high:.4g}", height - 1: f"{y.low:.4g}"}
        lines = [f"{labels.get(i, ''):>10} {''.join(row).rstrip()}" for i, row in enumerate(cells)]
        ends = f"{x.low:.4g}" + f"{x.high:.4g}".rjust(width - len(f"{x.low:.4g}"))
        return "\n".join([f"{self.title}   {'   '.join(legend)}", *lines, f"{'':>10} {ends}  {self.x_label}"])


@dataclass(frozen=True)
class Bars:
    """A histogram: counts of equal bins between low and high."""

    title: str
    low: float
    high: float
    counts: Sequence[float]
    x_label: str = ""

    def svg(self) -> str:
        x, y = Axis.around((self.low, self.high)), Axis.around([0.0, *self.counts])
        step = (_across(1) - _across(0)) / max(1, len(self.counts))
        bars = [
            f'<rect x="{_across(0) + k * step:.1f}" y="{_down(up):.1f}" width="{step * 0.92:.1f}" '
            f'height="{_down(0) - _down(up):.1f}" fill="{COLOURS[0]}"/>'
            for k, count in enumerate(self.counts)
            if (up := y.place(count))
        ]
        return _frame(self.title, x, y, self.x_label, "".join(bars))

    def text(self) -> str:
        return f"{self.title}   {self.low:.3g} {sparkline(self.counts, len(self.counts))} {self.high:.3g}"


@dataclass(frozen=True)
class Heat:
    """A surface: `rows[j][i]` is the value at the i-th x and the j-th y, both rising."""

    title: str
    x: Sequence[float]
    y: Sequence[float]
    rows: Sequence[Sequence[float]]
    x_label: str = ""

    def _share(self) -> Axis:
        return Axis.around(value for row in self.rows for value in row)

    def svg(self) -> str:
        share = self._share()
        wide, high = (_across(1) - _across(0)) / len(self.x), (_down(0) - _down(1)) / len(self.y)
        cells = []
        for j, row in enumerate(self.rows):
            for i, value in enumerate(row):
                place = share.place(value)
                fill = "#888" if place is None else f"hsl({240 - 220 * place:.0f} 70% 50%)"
                at = f'x="{_across(0) + i * wide:.1f}" y="{_down(0) - (j + 1) * high:.1f}"'
                size = f'width="{wide + 0.3:.1f}" height="{high + 0.3:.1f}"'
                cells.append(f'<rect {at} {size} fill="{fill}"><title>{value:.4g}</title></rect>')
        title = f"{self.title}: {share.low:.4g} (blue) to {share.high:.4g} (red)"
        return _frame(title, Axis.around(self.x), Axis.around(self.y), self.x_label, "".join(cells))

    def text(self) -> str:
        share = self._share()
        lines = [f"{self.title}: {share.low:.4g} ( ) to {share.high:.4g} (@)"]
        for row in reversed(self.rows):
            places = [share.place(value) for value in row]
            lines.append("  " + "".join("??" if p is None else RAMP[round(p * 9)] * 2 for p in places))
        return "\n".join(lines)


Figure = Lines | Bars | Heat
