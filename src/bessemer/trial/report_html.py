"""A report as one HTML file that needs nothing else: no script, no outside address, pictures drawn inline. A document's
text may hold HTML, so everything is escaped, and the page's own policy refuses to load or run anything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from bessemer.trial.report_page import Block, Code, Curve, Items, Section, Table, Text, cell, visible
from bessemer.trial.report_plot import curve_svg

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
        f"<section><h2>{escape(heading)}</h2>{''.join(map(_block, blocks))}</section>\n" for heading, blocks in sections
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


def _block(block: Block) -> str:
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
            return _table(block)
        case Curve():
            return curve_svg(block)


def _table(table: Table) -> str:
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
