"""What a report is made of, whatever it is written as: sections of paragraphs, tables, excerpts and pictures; and the
same as Markdown. Text of documents is hostile: it is made visible here and escaped where it is written."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

from bessemer.observe.words import sparkline

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
