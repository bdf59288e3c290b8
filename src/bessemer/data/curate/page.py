"""The data report as one HTML page: no script from elsewhere, no network, readable in any browser and in print."""

from __future__ import annotations

import html
import json
from typing import Any

from bessemer.data.curate.report import human_bytes

_STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 18%, transparent); --bar: #c4622d; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th:first-child, td:first-child, td.words { text-align: left; }
.bar { display: inline-block; height: .7em; background: var(--bar); vertical-align: baseline; }
.flow { display: flex; height: 1.1rem; margin: .2rem 0; background: var(--line); } .flow > i { background: var(--bar); }
details { margin: .3rem 0 .3rem 1rem; } summary { cursor: pointer; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--line); }
pre { padding-left: .7rem; margin: .3rem 0; }
small, .quiet { opacity: .7; }
"""


def page(report: dict[str, Any]) -> str:
    """The whole page."""
    parts = [_head(report), _sources(report), _steps(report)]
    parts += [_lengths(report), _labels(report), _reasons(report), _bad_rows(report)]
    body = "\n".join(part for part in parts if part)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head><title>Data report</title>{head}</head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def _text(value: Any) -> str:
    return html.escape(str(value))


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = "".join(f"<th>{_text(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"


def _head(report: dict[str, Any]) -> str:
    sources = report["sources"].values()
    read, left = sum(one["documents_read"] for one in sources), sum(one["documents"] for one in sources)
    tokens = sum(sum(one["tokens"].values()) for one in sources)
    share = f" ({100 * left / read:.1f} %)" if read else ""
    return (
        f"<h1>Data report</h1><p>{read:,} documents read, {left:,} kept{share}: "
        f"{human_bytes(sum(one['bytes'] for one in sources))} of text, {tokens:,} tokens.</p>"
    )


def _sources(report: dict[str, Any]) -> str:
    rows = []
    total = sum(sum(one["tokens"].values()) for one in report["sources"].values()) or 1
    for name, one in report["sources"].items():
        tokens = sum(one["tokens"].values())
        rows.append(
            [
                _text(name), f"{one['files']:,}", f"{one['documents_read']:,}", f"{one['documents']:,}",
                human_bytes(one["bytes_read"]), human_bytes(one["bytes"]), f"{one['tokens'].get('train', 0):,}",
                f"{one['tokens'].get('validation', 0):,}", f"{100 * tokens / total:.1f} %",
                f"{one['bytes'] / tokens:.2f}" if tokens else "", f"{one['bad']:,}", f"{one['empty']:,}",
            ]
        )  # fmt: skip
    head = ["source", "files", "documents in", "out", "bytes in", "out", "training tokens", "held out"]
    return "<h2>Sources</h2>" + _table([*head, "share", "bytes/token", "bad rows", "empty"], rows)


def _steps(report: dict[str, Any]) -> str:
    if not report["steps"]:
        return "<h2>Steps</h2><p>No curation steps: every document was taken as it is (data.clean in the spec).</p>"
    rows = []
    for step in report["steps"]:
        dropped = step["documents_in"] - step["documents_out"]
        kept = step["documents_out"] / step["documents_in"] if step["documents_in"] else 1
        scope = f" <small>({_text(step['source'])})</small>" if step["source"] else ""
        given = ((key, value) for key, value in step["settings"].items() if value not in (None, [], {}))
        settings = ", ".join(f"{key}: {_short(value)}" for key, value in given)
        rows.append(
            [
                f'{_text(step["step"])}{scope}<br><small class="quiet">{_text(settings)}</small>',
                f"{step['documents_in']:,}", f"{step['documents_out']:,}", f"{dropped:,}",
                f'{100 * kept:.1f} %<div class="flow"><i style="width:{100 * kept:.2f}%"></i></div>',
                f"{step['changed']:,}", human_bytes(step["bytes_in"]), human_bytes(step["bytes_out"]),
            ]
        )  # fmt: skip
    head = ["step", "documents in", "out", "dropped", "kept", "changed", "bytes in", "out"]
    return "<h2>Steps</h2>" + _table(head, rows)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return text if len(text) <= 60 else text[:57] + "..."


def _bars(counts: list[tuple[str, float]]) -> str:
    total, most = sum(count for _, count in counts) or 1, max((count for _, count in counts), default=1) or 1
    lines = "".join(
        f"<tr><td>{_text(name)}</td><td>{count:,.0f}</td><td>{100 * count / total:.1f} %</td>"
        f'<td class="words"><span class="bar" style="width:{12 * count / most:.2f}rem"></span></td></tr>'
        for name, count in counts
    )
    return f"<table><tbody>{lines}</tbody></table>"


def _lengths(report: dict[str, Any]) -> str:
    columns = [one["lengths"] for one in report["sources"].values() if one["lengths"]]
    counts = [sum(column) for column in zip(*columns, strict=True)]
    used = [k for k, count in enumerate(counts) if count]
    if not used:
        return ""
    shown = range(used[0], used[-1] + 1)
    bins = [(f"{1 << (k - 1) if k else 0:,} to {(1 << k) - 1:,}", counts[k]) for k in shown]
    return "<h2>Lengths of the documents, in characters</h2>" + _bars(bins)


def _labels(report: dict[str, Any]) -> str:
    found: dict[str, dict[str, float]] = {}
    for one in report["sources"].values():
        for label, counts in one["labels"].items():
            for value, count in counts.items():
                found.setdefault(label, {})[value] = found.get(label, {}).get(value, 0) + count
    parts = []
    for label, counts in sorted(found.items()):
        if set(counts) == {"sum", "count"}:  # a number's; a word may be one of the two
            mean = counts["sum"] / max(counts["count"], 1)
            over = f"{mean:.4g} on average over {counts['count']:,.0f} documents"
            parts.append(f"<h3>{_text(label)}</h3><p>{counts['sum']:,.6g} in all, {over}</p>")
        else:
            most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:20]
            parts.append(f"<h3>{_text(label)}</h3>" + _bars(most))
    return "<h2>What the steps found out</h2>" + "".join(parts) if parts else ""


def _reasons(report: dict[str, Any]) -> str:
    parts = []
    for step in report["steps"]:
        if not step["reasons"] and not step["summary"]:
            continue
        parts.append(f"<h3>{_text(step['step'])}</h3>")
        for reason, (documents, size) in sorted(step["reasons"].items(), key=lambda item: -item[1][0]):
            shown = "".join(_example(one) for one in step["examples"].get(reason, []))
            line = f"{_text(reason)}: {documents:,} documents, {human_bytes(size)}"
            parts.append(f"<details><summary>{line}</summary>{shown}</details>")
        if step["summary"]:
            parts.append(f"<details><summary>summary</summary>{_summary(step['summary'])}</details>")
    return "<h2>Why documents went, with random examples</h2>" + "".join(parts) if parts else ""


def _example(one: dict[str, Any]) -> str:
    value = f" <small>({_text(one['value'])})</small>" if one["value"] is not None else ""
    return f"<p><code>{_text(one['place'])}</code>{value}</p><pre>{_text(one['text'])}</pre>"


def _summary(summary: dict[str, Any]) -> str:
    said = {key: json.dumps(value, indent=1, ensure_ascii=False)[:4000] for key, value in summary.items()}
    lines = "".join(
        f'<tr><td>{_text(key)}</td><td class="words"><pre>{_text(value)}</pre></td></tr>' for key, value in said.items()
    )
    return f"<table><tbody>{lines}</tbody></table>"


def _bad_rows(report: dict[str, Any]) -> str:
    if not report["bad_rows"]:
        return ""
    shown = "".join(
        f"<p><code>{_text(row['file'])}:{row['row']}</code> {_text(row['reason'])}</p><pre>{_text(row['raw'])}</pre>"
        for row in report["bad_rows"]
    )
    return f"<h2>Rows that could not be used</h2><p>All of them are in quarantine.jsonl beside this page.</p>{shown}"
