"""Reports as Markdown and as one HTML file: sections of paragraphs, lists, tables, excerpts and charts.

The HTML needs nothing else: no script, no outside address. Text may come from training documents and is untrusted:
everything is escaped, characters that do not print are made visible, and the page's policy refuses to load anything.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from bessemer.observe.figure import Figure, Heatmap, Histogram, LineChart

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
class WeightedText:
    """A text in pieces, each with its weight in the loss; those above 0 are marked."""

    pieces: list[tuple[str, float]]
    caption: str = ""

    def plain(self) -> str:
        """The text with the marked pieces in double brackets, after their weight if it is not 1."""
        return "".join(f"[[{_weight(weight)}{text}]]" if weight > 0 else text for text, weight in self.visible())

    def visible(self) -> list[tuple[str, float]]:
        return [(_visible_lines(text), weight) for text, weight in self.pieces]


@dataclass(frozen=True)
class Table:
    """A cell such as `12.5%` also shows as a bar in HTML."""

    columns: list[str]
    rows: list[list[str]]
    highlighted: list[bool] = field(default_factory=list)  # by row


@dataclass(frozen=True)
class Details:
    """Blocks behind a line that opens them."""

    summary: str
    blocks: list[Block]


Block = Text | Items | Code | WeightedText | Table | Details | Figure
Section = tuple[str, list[Block]]  # heading (none if empty) and content


def format_number(value: float | None, form: str = ",.4g") -> str:
    if value is None:
        return "not measured"
    return format(value, form) if math.isfinite(value) else f"not finite ({value})"


def format_share(value: float | None) -> str:
    return format_number(value, ".1%")


def make_visible(text: str) -> str:
    """One line in which every character can be seen: control characters as their pictures, others that do not print
    (bidirectional marks, lone surrogates) by their number."""
    return "".join(letter if letter.isprintable() else _picture(letter) for letter in text)


def _picture(letter: str) -> str:
    code = ord(letter)
    if code < 0x20 or code == 0x7F:
        return "\u2421" if code == 0x7F else chr(0x2400 + code)
    return " " if unicodedata.category(letter) == "Zs" else f"[U+{code:04X}]"


def _visible_lines(text: str) -> str:
    return "\n".join(make_visible(line) for line in text.split("\n"))


def _weight(weight: float) -> str:
    return "" if weight == 1 else f"{weight:g}: "


def _clip(text: str) -> str:
    return make_visible(text if len(text) <= _CELL_CHARS else text[:_CELL_CHARS] + "…")


def excerpt(text: str) -> str:
    """The first lines of a text, each visible and of bounded length."""
    lines = text.split("\n", _EXCERPT_LINES)
    head = [
        make_visible(line[:_EXCERPT_WIDTH])
        + (f"… ({len(line) - _EXCERPT_WIDTH:,} more)" * (len(line) > _EXCERPT_WIDTH))
        for line in lines[:_EXCERPT_LINES]
    ]
    return "\n".join(head + ["…"] * (len(lines) > _EXCERPT_LINES))


def markdown(title: str, sections: Sequence[Section]) -> str:
    """The report as Markdown, for a terminal and for GitHub."""
    parts = [f"# {_escape_markdown(title)}"]
    for heading, blocks in sections:
        parts += [f"## {heading}" if heading else "", *map(_block_markdown, blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _escape_markdown(text: str) -> str:
    """Escapes what Markdown would read as markup; an underscore only at the edge of a word."""
    return re.sub(r"([\\`*<>|\[\]~]|(?<!\w)_|_(?!\w))", r"\\\1", _clip(text))


def _block_markdown(block: Block) -> str:
    match block:
        case Text():
            return _escape_markdown(block.text)
        case Items():
            return "\n".join(f"- {_escape_markdown(item)}" for item in block.items)
        case Code():
            return _code_markdown(block.text, block.caption)
        case WeightedText():
            return _code_markdown(block.plain(), block.caption)
        case Table():
            return _table_markdown(block)
        case Details():
            return "\n\n".join([_escape_markdown(block.summary), *map(_block_markdown, block.blocks)])
        case LineChart() | Histogram() | Heatmap():
            lines = block.sparklines() if isinstance(block, LineChart) else block.text().splitlines()
            return "\n".join(f"    {line}" for line in lines)


def _code_markdown(text: str, caption: str) -> str:
    runs = [len(run) for run in re.findall("`+", text)]
    fence = "`" * max(3, 1 + max(runs, default=0))
    code = f"{fence}text\n{_visible_lines(text)}\n{fence}"
    return "\n\n".join(part for part in (_escape_markdown(caption), code) if part)


def _table_markdown(table: Table) -> str:
    rows = [[_escape_markdown(text) for text in row] for row in [table.columns, *table.rows]]
    widths = [max(len(row[k]) for row in rows) for k in range(len(table.columns))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --paper: #fff; --soft: #5b6570; --line: #d8dde3; --bad: #b3261e;
  --bar: #c4622d; --box: #f6f8fa }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #14171b; --soft: #9aa4af; --line: #333a42;
  --bad: #ff7a6e; --box: #1d2127 } }
@media print { :root { --ink: #000; --paper: #fff; --soft: #444; --line: #bbb; --bad: #b3261e; --box: #fff }
  section, figure, svg { break-inside: avoid } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 68rem;
  margin: 0 auto; padding: 1.5rem 1rem 4rem }
h1 { font-size: 1.5rem; line-height: 1.25 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p, li { overflow-wrap: anywhere } section:first-of-type p:first-of-type { font-size: 1.1rem }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere } th { color: var(--soft); font-weight: 600; white-space: nowrap }
tr.bad td { color: var(--bad) }
pre { background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: .7rem; margin: .3rem 0;
  font-size: .85rem; white-space: pre-wrap; overflow-wrap: anywhere }
mark { background: color-mix(in srgb, var(--bar) 30%, transparent); color: inherit; border-radius: 3px;
  print-color-adjust: exact } sub { color: var(--soft); margin-right: .2rem }
figure { margin: 1rem 0 } figcaption { color: var(--soft); overflow-wrap: anywhere }
details { margin: .3rem 0 } summary { cursor: pointer; overflow-wrap: anywhere }
svg { width: 100%; max-width: 60rem; height: auto; display: block; margin: .5rem 0 }
svg text { font: 11px system-ui, sans-serif; fill: currentColor }
.bar { height: 5px; background: var(--bar); print-color-adjust: exact } .bad .bar { background: var(--bad) }
"""


def html_page(title: str, sections: Sequence[Section]) -> str:
    body = "".join(
        f"<section>{f'<h2>{escape(heading)}</h2>' if heading else ''}{''.join(map(_block_html, blocks))}</section>\n"
        for heading, blocks in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_html(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{_html(title)}</h1>\n{body}</body></html>\n"
    )


def _html(text: str) -> str:
    return escape(_clip(text))


def _block_html(block: Block) -> str:
    match block:
        case Text():
            return f"<p>{_html(block.text)}</p>"
        case Items():
            return f"<ul>{''.join(f'<li>{_html(item)}</li>' for item in block.items)}</ul>"
        case Code():
            return _code_html(escape(_visible_lines(block.text)), block.caption)
        case WeightedText():
            marked = (
                f"<mark>{f'<sub>{weight:g}</sub>' if weight != 1 else ''}{escape(text)}</mark>"
                if weight > 0
                else escape(text)
                for text, weight in block.visible()
            )
            return _code_html("".join(marked), block.caption)
        case Table():
            return _table_html(block)
        case Details():
            content = "".join(map(_block_html, block.blocks))
            return f"<details><summary>{_html(block.summary)}</summary>{content}</details>"
        case LineChart() | Histogram() | Heatmap():
            return block.svg()


def _code_html(code: str, caption: str) -> str:
    return f"<figure>{f'<figcaption>{_html(caption)}</figcaption>' if caption else ''}<pre>{code}</pre></figure>"


def _table_html(table: Table) -> str:
    head = "".join(f"<th>{_html(name)}</th>" for name in table.columns)
    highlighted = table.highlighted or [False] * len(table.rows)
    rows = "".join(
        f"<tr{' class=bad' * bad}>{''.join(map(_cell_html, row))}</tr>"
        for row, bad in zip(table.rows, highlighted, strict=True)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell_html(text: str) -> str:
    percent = re.fullmatch(r"(\d+\.\d)%", text)
    bar = f'<div class="bar" style="width: {min(100.0, float(percent[1]))}%"></div>' if percent else ""
    return f"<td>{_html(text)}{bar}</td>"
