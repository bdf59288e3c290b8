"""What became of a corpus: documents, bytes and tokens in and out of every step, why documents went, and examples.
The report is one JSON file beside the stores; the table and the page are made from it, so that they cannot
disagree.

The data report as one HTML page: no script from elsewhere, no network, readable in any browser and in print.
"""

from __future__ import annotations

import html
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bessemer.data.curate.corpus import Corpus, Stage
from bessemer.data.curate.ledger import StepCounts, quarantine_path, read_json, write_json
from bessemer.errors import UserError
from bessemer.storage import atomic_file

REPORT = "report.json"
PAGE = "report.html"
QUARANTINE = "quarantine.jsonl"


def write_report(folder: Path, corpus: Corpus, tokens: Mapping[str, Mapping[str, int]]) -> None:
    """The report of a curated corpus; `tokens` by source, then train and validation. Also gathers the quarantine."""
    report = build_report(corpus, tokens)
    with atomic_file(folder / QUARANTINE, parents=True) as gathered:
        for state in corpus.parts:
            aside = quarantine_path(corpus.cache, state.read_key)
            if aside.exists():
                with open(aside, "rb") as file:
                    shutil.copyfileobj(file, gathered)
    write_json(folder / REPORT, report)
    with atomic_file(folder / PAGE, parents=True) as file:
        file.write(page(report).encode())


def read_report(folder: Path) -> dict[str, Any]:
    fix = f"delete the folder {folder} and prepare again"
    try:
        return read_json(folder / REPORT, fix)
    except OSError as error:
        raise UserError(f"{folder / REPORT}: {error}; {fix}") from error


def build_report(corpus: Corpus, tokens: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    sources = {}
    for name in corpus.data.sources:
        states = [state for state in corpus.parts if state.part.source == name]
        readings = [state.reading for state in states if state.reading]
        counts = [state.census for state in states if state.census]
        labels = StepCounts()
        for count in counts:
            labels.add(StepCounts(labels=count.labels))
        sources[name] = {
            "files": len({piece.file.path for state in states for piece in state.part.pieces}),
            "parts": len(states),
            "documents_read": sum(reading.documents for reading in readings),
            "bytes_read": sum(reading.text_bytes for reading in readings),
            "empty": sum(reading.empty for reading in readings),
            "bad": sum(reading.bad for reading in readings),
            "undecodable": sum(reading.undecodable for reading in readings),
            "undecodable_files": [line for reading in readings for line in reading.undecodable_files][:5],
            "documents": sum(count.documents for count in counts),
            "bytes": sum(count.text_bytes for count in counts),
            "tokens": dict(tokens[name]),
            "lengths": [sum(column) for column in zip(*(count.lengths for count in counts), strict=True)],
            "labels": labels.labels,
        }
    bad = [line for state in corpus.parts if state.reading for line in state.reading.examples][:5]
    return {"sources": sources, "steps": [_stage(stage) for stage in corpus.stages], "bad_rows": bad}


def decoding_note(source: str, count: int, files: Sequence[str]) -> str:
    """The warning about documents of a source that are not valid UTF-8."""
    return (
        f"source {source!r}: {count:,} documents are not valid UTF-8, and U+FFFD replaces their invalid bytes: "
        f"{some_of(files, count)}; convert them to UTF-8 or exclude them"
    )


def some_of(lines: Sequence[str], count: int, most: int = 3) -> str:
    """The first of `count` lines, and how many more there are."""
    shown = lines[:most]
    return ", ".join(shown) + (f" and {count - len(shown):,} more" if count > len(shown) else "")


def _stage(stage: Stage) -> dict[str, Any]:
    total = StepCounts()
    for tally in stage.tallies.values():
        total.add(tally)
    return {
        "step": stage.step,
        "settings": stage.settings,
        "source": stage.source,
        **total.to_json(),
        "by_source": {
            name: [tally.documents_in, tally.documents_out, tally.bytes_in, tally.bytes_out]
            for name, tally in stage.tallies.items()
        },
        "summary": stage.summary,
    }


def table(report: dict[str, Any]) -> list[list[str]]:
    """Rows for a terminal: what was read, each step, what is left. The first row is the head."""
    rows = [["step", "documents", "bytes", "dropped", "changed", "most frequent reason"]]
    read = report["sources"].values()
    documents, size = sum(one["documents_read"] for one in read), sum(one["bytes_read"] for one in read)
    bad, empty = sum(one["bad"] for one in read), sum(one["empty"] for one in read)
    undecodable = sum(one.get("undecodable", 0) for one in read)  # older reports lack it
    found = [f"{bad:,} bad rows set aside"] * bool(bad) + [f"{empty:,} empty"] * bool(empty)
    found += [f"{undecodable:,} not UTF-8"] * bool(undecodable)
    rows.append(["read", f"{documents:,}", human_bytes(size), "", "", ", ".join(found)])
    for step in report["steps"]:
        dropped = step["documents_in"] - step["documents_out"]
        share = f"{dropped:,} ({100 * dropped / step['documents_in']:.1f} %)" if dropped else "0"
        worst = max(step["reasons"].items(), key=lambda item: item[1][0], default=("", [0, 0]))
        name = step["step"] + (f" ({step['source']})" if step["source"] else "")
        why = f"{worst[0]}: {worst[1][0]:,}" if worst[0] else ""
        documents, size = step["documents_out"], step["bytes_out"]
        rows.append([name, f"{documents:,}", human_bytes(size), share, f"{step['changed']:,}", why])
    return rows


def source_table(report: dict[str, Any]) -> list[list[str]]:
    rows = [["source", "documents", "bytes", "training tokens", "held out", "bytes/token"]]
    for name, source in report["sources"].items():
        train, held_out = source["tokens"].get("train", 0), source["tokens"].get("validation", 0)
        per_token = source["bytes"] / (train + held_out) if train + held_out else 0
        documents, size = source["documents"], source["bytes"]
        numbers = [f"{train:,}", f"{held_out:,}", f"{per_token:.2f}"]
        rows.append([name, f"{documents:,}", human_bytes(size), *numbers])
    return rows


def human_bytes(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


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
