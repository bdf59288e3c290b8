"""Charts as inline SVG for pages and as text for terminals, without a plotting library.

Values that are not finite are left out: a curve has a gap there. Needs neither torch nor numpy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from bessemer.observe.format import sparkline

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 260, 64, 8, 26, 36  # of a chart, in SVG units
COLOURS = ("#c4622d", "#2d7dc4", "#3f9d5c", "#9b59b6", "#b8860b", "#777777")
FLAGGED_COLOUR = "#d03a2f"
GLYPHS = "*o+x^~"
RAMP = " .:-=+*#%@"
LARGEST, SMALLEST = sys.float_info.max, 1e-300  # of what an axis can span


def svg_file(svg: str) -> str:
    """A chart as a stand-alone SVG file, which needs a namespace, a font and a background."""
    attributes = 'xmlns="http://www.w3.org/2000/svg" style="background:white" font-family="sans-serif" font-size="11"'
    return svg.replace("<svg", f"<svg {attributes}", 1)


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "") -> str:
    style = f' style="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}">{inner}</rect>'


@dataclass(frozen=True)
class Axis:
    """Maps values to shares of the chart's side."""

    low: float
    high: float
    log: bool = False

    @staticmethod
    def around(values: Iterable[float], log: bool = False) -> Axis:
        """Spans the values that can be drawn: finite, and positive on a logarithmic axis."""
        drawable = [value for value in values if math.isfinite(value) and (value >= SMALLEST or not log)]
        low, high = (min(drawable), max(drawable)) if drawable else (1.0, 1.0)
        if high - low <= max(1e-9 * abs(high), SMALLEST):  # all values are equal at the chart's resolution
            margin = max(0.5, 1e-3 * abs(high))
            low, high = (low / 2, high * 2) if log else (low - margin, high + margin)
        return Axis(max(low, -LARGEST), min(high, LARGEST), log)

    def place(self, value: float) -> float | None:
        """0 at the low end, 1 at the high end, None for a value outside of the axis."""
        if not math.isfinite(value) or (self.log and value <= 0):
            return None
        unit = max(abs(self.low), abs(self.high)) or 1.0  # so that no difference overflows
        low, high, at = (math.log(v) if self.log else v / unit for v in (self.low, self.high, value))
        share = (at - low) / (high - low)
        return share if 0 <= share <= 1 else None

    def ticks(self) -> list[float]:
        """At most seven: powers of ten if the axis spans several, else round steps."""
        if self.log and self.high / self.low >= 100:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**k for k in range(first, last + 1, 1 + (last - first) // 7)]
        rough = self.high / 5 - self.low / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough * 0.999)
        return [k * step for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - RIGHT - LEFT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)


def _chart(title: str, x: Axis, y: Axis, x_label: str, content: str) -> str:
    """Title, axes and grid around the content."""
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{escape(title)}</title>']
    parts.append(_text(LEFT, 15, title, style="font-weight:600"))
    for value in x.ticks():
        parts.append(_text(_x(x.place(value) or 0.0), HEIGHT - BOTTOM + 15, f"{value:,.6g}", "middle"))
    for value in y.ticks():
        at = _y(y.place(value) or 0.0)
        ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"'
        line = f'<line {ends} stroke="currentColor" opacity=".15"/>'
        parts.append(line + _text(LEFT - 6, at + 4, f"{value:,.6g}", "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_label, "middle"))
    return "".join(parts) + content + "</svg>"


@dataclass(frozen=True)
class LineChart:
    """Curves over one axis. A curve is broken at values that are not finite, and where x goes back (after a rollback).

    `marks` are named vertical lines, `band` is a shaded range of y. `flagged` are indices of points that stand out.
    """

    title: str
    x: Sequence[float]
    series: Mapping[str, Sequence[float]]
    x_label: str = ""
    log_x: bool = False
    log_y: bool = False
    marks: Mapping[str, float] = field(default_factory=dict)
    band: tuple[float, float] | None = None
    flagged: Collection[int] = ()
    x_limits: tuple[float, float] | None = None  # default: the range of x; marks outside are not drawn

    def _axes(self) -> tuple[Axis, Axis]:
        values = [value for values in self.series.values() for value in values]
        return Axis.around(self.x_limits or self.x, self.log_x), Axis.around([*values, *(self.band or ())], self.log_y)

    def svg(self) -> str:
        x, y = self._axes()
        parts = [self._band_svg(y)]
        for k, (name, values) in enumerate(self.series.items()):
            colour = COLOURS[k % len(COLOURS)]
            path = self._path(x, y, values)
            parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
            parts.append(_text(WIDTH - 10, 15 + 13 * k, name, "end", f"fill:{colour}"))
            parts += [self._flag_svg(x, y, self.x[i], values[i]) for i in self.flagged]
        for k, (name, value) in enumerate(self.marks.items()):
            if (place := x.place(value)) is not None:
                at = f"{_x(place):.1f}"
                line = f'<line x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="currentColor"'
                offset, anchor = (3, "start") if place < 0.8 else (-3, "end")
                label = _text(_x(place) + offset, TOP + 10 + 12 * k, name, anchor)
                parts.append(f'{line} stroke-dasharray="3 3"/>{label}')
        return _chart(self.title, x, y, self.x_label, "".join(parts))

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        return svg_file(self.svg())

    def _path(self, x: Axis, y: Axis, values: Sequence[float]) -> str:
        path, command, previous = [], "M", -math.inf
        for at, value in zip(self.x, values, strict=True):
            across, up = x.place(at), y.place(value)
            if across is None or up is None:
                command = "M"
                continue
            path.append(f"{'M' if at <= previous else command}{_x(across):.1f} {_y(up):.1f}")
            command, previous = "L", at
        return " ".join(path)

    def _band_svg(self, y: Axis) -> str:
        places = [y.place(value) for value in self.band or ()]
        if len(places) < 2 or places[0] is None or places[1] is None:
            return ""
        low, high = _y(places[0]), _y(places[1])
        title = "normal: {:,.4g} to {:,.4g}".format(*self.band or ())
        fill = '#3f9d5c" fill-opacity=".18'
        return _rect(LEFT, high, WIDTH - RIGHT - LEFT, max(1.0, low - high), fill, title)

    def _flag_svg(self, x: Axis, y: Axis, at: float, value: float) -> str:
        """A dot on the curve, or a cross at the top for a value that cannot be drawn."""
        across, up = x.place(at), y.place(value)
        if across is None:
            return ""
        title = f"<title>{escape(self.x_label)} {at:,.6g}: {value:,.4g}</title>"
        if up is None:
            style = f"fill:{FLAGGED_COLOUR};font-size:16px"
            return _text(_x(across), TOP + 4, "×", "middle", style).replace("</text>", f"{title}</text>")
        return f'<circle cx="{_x(across):.1f}" cy="{_y(up):.1f}" r="4" fill="{FLAGGED_COLOUR}">{title}</circle>'

    def text(self, width: int = 72, height: int = 14) -> str:
        x, y = self._axes()
        cells = [[" "] * width for _ in range(height)]
        for value in self.marks.values():
            if (across := x.place(value)) is not None:
                for row in (cells[0], cells[-1]):  # a full line would look like a spike of the curve
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

    def sparklines(self) -> list[str]:
        """For each curve a sparkline and a line with its range."""
        lines = []
        for name, values in self.series.items():
            finite = [value for value in values if math.isfinite(value) and (value > 0 or not self.log_y)]
            if not finite:
                lines.append(f"{name}: no finite values")
                continue
            missing = f"; {len(values) - len(finite)} not finite" if len(finite) < len(values) else ""
            span = f"{self.x_label} {min(self.x):,.6g} to {max(self.x):,.6g}"
            lines.append(sparkline([math.log(value) for value in finite] if self.log_y else finite, 60))
            lines.append(f"{name}, {span}, from {min(finite):,.4g} to {max(finite):,.4g}{missing}")
        return lines


@dataclass(frozen=True)
class Histogram:
    """Counts in equal bins between low and high."""

    title: str
    low: float
    high: float
    counts: Sequence[float]
    x_label: str = ""

    def svg(self) -> str:
        x, y = Axis.around((self.low, self.high)), Axis.around([0.0, *self.counts])
        width = (_x(1) - _x(0)) / max(1, len(self.counts))
        bars = [
            _rect(_x(0) + k * width, _y(up), width * 0.92, _y(0) - _y(up), COLOURS[0])
            for k, count in enumerate(self.counts)
            if (up := y.place(count))
        ]
        return _chart(self.title, x, y, self.x_label, "".join(bars))

    def text(self) -> str:
        return f"{self.title}   {self.low:.3g} {sparkline(self.counts, len(self.counts))} {self.high:.3g}"


@dataclass(frozen=True)
class Heatmap:
    """A surface: `rows[j][i]` is the value at the i-th x and the j-th y, both rising."""

    title: str
    x: Sequence[float]
    y: Sequence[float]
    rows: Sequence[Sequence[float]]
    x_label: str = ""

    def _colour_axis(self) -> Axis:
        return Axis.around(value for row in self.rows for value in row)

    def svg(self) -> str:
        colours = self._colour_axis()
        width, height = (_x(1) - _x(0)) / len(self.x), (_y(0) - _y(1)) / len(self.y)
        cells = []
        for j, row in enumerate(self.rows):
            for i, value in enumerate(row):
                place = colours.place(value)
                fill = "#888" if place is None else f"hsl({240 - 220 * place:.0f} 70% 50%)"
                left, top = _x(0) + i * width, _y(0) - (j + 1) * height
                cells.append(_rect(left, top, width + 0.3, height + 0.3, fill, f"{value:.4g}"))
        title = f"{self.title}: {colours.low:.4g} (blue) to {colours.high:.4g} (red)"
        return _chart(title, Axis.around(self.x), Axis.around(self.y), self.x_label, "".join(cells))

    def text(self) -> str:
        colours = self._colour_axis()
        lines = [f"{self.title}: {colours.low:.4g} ( ) to {colours.high:.4g} (@)"]
        for row in reversed(self.rows):
            places = [colours.place(value) for value in row]
            lines.append("  " + "".join("??" if p is None else RAMP[round(p * 9)] * 2 for p in places))
        return "\n".join(lines)


class SpanStyle(NamedTuple):
    """How spans of one kind are drawn: as text, in SVG, and in the legend."""

    letter: str
    colour: str
    label: str


Span = tuple[float, float, str]  # start, end, kind
IDLE = "idle"  # the kind of time that no span covers
TIMELINE_LEFT, TIMELINE_WIDTH, ROW_HEIGHT, TIMELINE_TOP = 80, 1000, 22, 64  # in SVG units
NARROWEST = 0.15  # narrower spans cannot be seen


@dataclass(frozen=True)
class Timeline:
    """Rows of spans from time 0 to `end`, in seconds. `styles` covers every kind of span, and IDLE."""

    title: str
    caption: str
    rows: Mapping[str, Sequence[Span]]
    end: float
    styles: Mapping[str, SpanStyle]

    def svg(self) -> str:
        """Drawn to scale, with a legend."""
        bottom = TIMELINE_TOP + ROW_HEIGHT * len(self.rows)
        parts = [_text(TIMELINE_LEFT, 20, self.title, style="font-weight:600"), _text(TIMELINE_LEFT, 38, self.caption)]
        parts.append(self._legend_svg())
        for i, (name, spans) in enumerate(self.rows.items()):
            top = TIMELINE_TOP + i * ROW_HEIGHT
            parts.append(_text(TIMELINE_LEFT - 6, top + 14, name, "end"))
            for start, end, kind in [(0.0, self.end, IDLE), *spans]:
                left, width = TIMELINE_WIDTH * start / self.end, TIMELINE_WIDTH * (end - start) / self.end
                if width >= NARROWEST:
                    colour = self.styles[kind].colour
                    parts.append(_rect(TIMELINE_LEFT + left, top, width, ROW_HEIGHT - 4, colour))
        for tick in range(11):
            x = TIMELINE_LEFT + TIMELINE_WIDTH * tick / 10
            parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="#777777"/>')
            parts.append(_text(x, bottom + 18, f"{self.end * tick / 10:.3g} s", "middle"))
        box = f"0 0 {TIMELINE_LEFT + TIMELINE_WIDTH + 40} {bottom + 30}"
        return f'<svg viewBox="{box}" role="img"><title>{escape(self.title)}</title>' + "\n".join(parts) + "</svg>"

    def _legend_svg(self) -> str:
        parts, x = [], float(TIMELINE_LEFT)
        for style in self.styles.values():
            parts += [_rect(x, 46, 10, 10, style.colour), _text(x + 14, 55, style.label)]
            x += 30 + 6.2 * len(style.label)
        return "".join(parts)

    def text(self, cells: int = 96) -> list[str]:
        """A line of letters for each row, each letter in proportion to the time that it represents, and the legend."""
        lines = [f"{name:<9} {self._letters(spans, cells)}" for name, spans in self.rows.items()]
        used = "".join(line[10:] for line in lines)
        return [*lines, ", ".join(f"{s.letter} {s.label}" for s in self.styles.values() if s.letter in used)]

    def _letters(self, spans: Sequence[Span], cells: int) -> str:
        filled: list[dict[str, float]] = [{} for _ in range(cells)]
        for span_start, span_end, kind in spans:
            start, end = (min(cells, at / self.end * cells) for at in (span_start, span_end))
            for at in range(int(start), min(cells, math.ceil(end))):
                share = min(end, at + 1) - max(start, at)
                filled[at][kind] = filled[at].get(kind, 0.0) + share
        letters, owed = "", dict.fromkeys((IDLE, *self.styles), 0.0)
        for cell in filled:
            for kind in owed:
                owed[kind] += cell.get(kind, 0.0) if kind != IDLE else 1 - sum(cell.values())
            # Of the kinds in this cell, the one that earlier cells left out most: short spans keep their proportion.
            present = [kind for kind in owed if cell.get(kind, 0.0) > 0.02 or kind == IDLE]
            chosen = max(present, key=lambda kind: owed[kind])
            letters += self.styles[chosen].letter
            owed[chosen] -= 1
        return letters


Figure = LineChart | Histogram | Heatmap
