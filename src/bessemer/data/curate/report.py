"""The data report: documents, bytes and tokens in and out of every curation step, why documents were dropped, examples.

The report is one JSON file next to the stores. The terminal tables and the HTML page are built from it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bessemer.data.curate.corpus import Corpus, CurationStage
from bessemer.data.curate.ledger import StepCounts, quarantine_path, read_json, write_json
from bessemer.errors import UserError
from bessemer.observe.page import Block, Code, Details, Section, Table, Text, html_page
from bessemer.storage import atomic_file

REPORT = "report.json"
PAGE = "report.html"
QUARANTINE = "quarantine.jsonl"


def write_report(folder: Path, corpus: Corpus, tokens: Mapping[str, Mapping[str, int]]) -> None:
    """Writes the report of a curated corpus and collects the quarantine; `tokens` by source, then train and
    validation."""
    report = build_report(corpus, tokens)
    with atomic_file(folder / QUARANTINE, parents=True) as target:
        for state in corpus.parts:
            quarantine = quarantine_path(corpus.cache, state.read_key)
            if quarantine.exists():
                with open(quarantine, "rb") as file:
                    shutil.copyfileobj(file, target)
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


def utf8_warning(source: str, count: int, files: Sequence[str]) -> str:
    """The warning about documents of a source that are not valid UTF-8."""
    return (
        f"source {source!r}: {count:,} documents are not valid UTF-8, and U+FFFD replaces their invalid bytes: "
        f"{format_some(files, count)}; convert them to UTF-8 or exclude them"
    )


def format_some(lines: Sequence[str], count: int, most: int = 3) -> str:
    """The first of `count` lines, and how many more there are."""
    examples = lines[:most]
    return ", ".join(examples) + (f" and {count - len(examples):,} more" if count > len(examples) else "")


def _stage(stage: CurationStage) -> dict[str, Any]:
    total = StepCounts()
    for counts in stage.counts_by_source.values():
        total.add(counts)
    return {
        "step": stage.step,
        "settings": stage.settings,
        "source": stage.source,
        **total.to_json(),
        "by_source": {
            name: [counts.documents_in, counts.documents_out, counts.bytes_in, counts.bytes_out]
            for name, counts in stage.counts_by_source.items()
        },
        "summary": stage.summary,
    }


def step_table(report: dict[str, Any]) -> list[list[str]]:
    """Rows for a terminal: what was read, each step, what is left. The first row is the header."""
    rows = [["step", "documents", "bytes", "dropped", "changed", "most frequent reason"]]
    read = report["sources"].values()
    documents, size = sum(source["documents_read"] for source in read), sum(source["bytes_read"] for source in read)
    bad, empty = sum(source["bad"] for source in read), sum(source["empty"] for source in read)
    undecodable = sum(source.get("undecodable", 0) for source in read)  # older reports lack it
    notes = [f"{bad:,} bad rows set aside"] * bool(bad) + [f"{empty:,} empty"] * bool(empty)
    notes += [f"{undecodable:,} not UTF-8"] * bool(undecodable)
    rows.append(["read", f"{documents:,}", human_bytes(size), "", "", ", ".join(notes)])
    for step in report["steps"]:
        dropped = step["documents_in"] - step["documents_out"]
        share = f"{dropped:,} ({100 * dropped / step['documents_in']:.1f} %)" if dropped else "0"
        top_reason = max(step["reasons"].items(), key=lambda item: item[1][0], default=("", [0, 0]))
        name = step["step"] + (f" ({step['source']})" if step["source"] else "")
        why = f"{top_reason[0]}: {top_reason[1][0]:,}" if top_reason[0] else ""
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


def page(report: dict[str, Any]) -> str:
    """The report as one self-contained HTML page."""
    steps: list[Block] = [_steps(report)] if report["steps"] else []
    none = Text("No curation steps: every document was taken as it is (data.clean in the spec).")
    sections: list[Section] = [
        ("", [Text(_summary(report))]),
        ("Sources", [_sources(report)]),
        ("Steps", steps or [none]),
        ("Document lengths in characters", _lengths(report)),
        ("Labels set by the steps", _labels(report)),
        ("Why documents were dropped, with random examples", _reasons(report)),
        ("Rows that could not be used", _bad_rows(report)),
    ]
    return html_page("Data report", [(heading, blocks) for heading, blocks in sections if blocks])


def _summary(report: dict[str, Any]) -> str:
    sources = report["sources"].values()
    keys = ("documents_read", "documents", "bytes")
    read, left, size_bytes = (sum(source[key] for source in sources) for key in keys)
    tokens = sum(sum(source["tokens"].values()) for source in sources)
    share = f" ({100 * left / read:.1f} %)" if read else ""
    return f"{read:,} documents read, {left:,} kept{share}: {human_bytes(size_bytes)} of text, {tokens:,} tokens."


def _sources(report: dict[str, Any]) -> Table:
    rows = []
    total = sum(sum(source["tokens"].values()) for source in report["sources"].values()) or 1
    for name, source in report["sources"].items():
        tokens = sum(source["tokens"].values())
        counts = [f"{source[key]:,}" for key in ("files", "documents_read", "documents")]
        sizes = [human_bytes(source[key]) for key in ("bytes_read", "bytes")]
        split = [f"{source['tokens'].get(key, 0):,}" for key in ("train", "validation")]
        ratios = [f"{tokens / total:.1%}", f"{source['bytes'] / tokens:.2f}" if tokens else ""]
        rows.append([name, *counts, *sizes, *split, *ratios, f"{source['bad']:,}", f"{source['empty']:,}"])
    columns = ["source", "files", "documents in", "out", "bytes in", "out", "training tokens", "held out"]
    return Table([*columns, "share", "bytes/token", "bad rows", "empty"], rows)


def _steps(report: dict[str, Any]) -> Table:
    rows = []
    for step in report["steps"]:
        dropped = step["documents_in"] - step["documents_out"]
        kept_share = step["documents_out"] / step["documents_in"] if step["documents_in"] else 1
        settings = {key: value for key, value in step["settings"].items() if value not in (None, [], {})}
        rows.append(
            [
                step["step"] + (f" ({step['source']})" if step["source"] else ""),
                f"{step['documents_in']:,}", f"{step['documents_out']:,}", f"{dropped:,}", f"{kept_share:.1%}",
                f"{step['changed']:,}", human_bytes(step["bytes_in"]), human_bytes(step["bytes_out"]),
                ", ".join(f"{key}: {_short(value)}" for key, value in settings.items()),
            ]
        )  # fmt: skip
    columns = ["step", "documents in", "out", "dropped", "kept", "changed", "bytes in", "out", "settings"]
    return Table(columns, rows)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return text if len(text) <= 60 else text[:57] + "..."


def _count_table(name: str, counts: Sequence[tuple[str, float]]) -> Table:
    total = sum(count for _, count in counts) or 1
    rows = [[value, f"{count:,.0f}", f"{count / total:.1%}"] for value, count in counts]
    return Table([name, "documents", "share"], rows)


def _lengths(report: dict[str, Any]) -> list[Block]:
    columns = [source["lengths"] for source in report["sources"].values() if source["lengths"]]
    counts = [sum(column) for column in zip(*columns, strict=True)]
    used = [k for k, count in enumerate(counts) if count]
    if not used:
        return []
    bins = range(used[0], used[-1] + 1)
    ranges = [(f"{1 << (k - 1) if k else 0:,} to {(1 << k) - 1:,}", counts[k]) for k in bins]
    return [_count_table("characters", ranges)]


def _labels(report: dict[str, Any]) -> list[Block]:
    totals: dict[str, dict[str, float]] = {}
    for source in report["sources"].values():
        for label, counts in source["labels"].items():
            for value, count in counts.items():
                totals.setdefault(label, {})[value] = totals.get(label, {}).get(value, 0) + count
    blocks: list[Block] = []
    for label, counts in sorted(totals.items()):
        if set(counts) == {"sum", "count"}:  # a numeric label; a text label may have one of the two as its value
            mean = counts["sum"] / max(counts["count"], 1)
            over = f"{mean:.4g} on average over {counts['count']:,.0f} documents"
            blocks.append(Text(f"{label}: {counts['sum']:,.6g} in all, {over}"))
        else:
            blocks.append(_count_table(label, sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:20]))
    return blocks


def _reasons(report: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    for step in report["steps"]:
        for reason, (documents, size) in sorted(step["reasons"].items(), key=lambda item: -item[1][0]):
            examples: list[Block] = [
                Code(example["text"], example["place"] + ("" if example["value"] is None else f" ({example['value']})"))
                for example in step["examples"].get(reason, [])
            ]
            line = f"{step['step']}: {reason}: {documents:,} documents, {human_bytes(size)}"
            blocks.append(Details(line, examples))
        if step["summary"]:
            values = [(key, json.dumps(value, indent=1, ensure_ascii=False)) for key, value in step["summary"].items()]
            blocks.append(Details(f"{step['step']}: summary", [Code(text[:4000], key) for key, text in values]))
    return blocks


def _bad_rows(report: dict[str, Any]) -> list[Block]:
    if not report["bad_rows"]:
        return []
    rows = [Code(row["raw"], f"{row['file']}:{row['row']} {row['reason']}") for row in report["bad_rows"]]
    return [Text(f"All of them are in {QUARANTINE} in this folder."), *rows]
