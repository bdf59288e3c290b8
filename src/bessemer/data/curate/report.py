"""What became of a corpus: documents, bytes and tokens in and out of every step, why documents went, and examples.
The report is one JSON file beside the stores; the table and the page are made from it, so that they cannot
disagree."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bessemer.data.curate.corpus import Corpus, Stage
from bessemer.data.curate.files import quarantine_path, writing
from bessemer.data.curate.ledger import Tally, read_json, write_json
from bessemer.errors import UserError

REPORT = "report.json"
PAGE = "report.html"
QUARANTINE = "quarantine.jsonl"


def write_report(folder: Path, corpus: Corpus, tokens: Mapping[str, Mapping[str, int]]) -> None:
    """The report of a curated corpus; `tokens` by source, then train and validation. Also gathers the quarantine."""
    from bessemer.data.curate.page import page

    report = build_report(corpus, tokens)
    with writing(folder / QUARANTINE) as gathered:
        for state in corpus.parts:
            aside = quarantine_path(corpus.cache, state.read_key)
            if aside.exists():
                with open(aside, "rb") as file:
                    shutil.copyfileobj(file, gathered)
    write_json(folder / REPORT, report)
    with writing(folder / PAGE) as file:
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
        labels = Tally()
        for count in counts:
            labels.add(Tally(labels=count.labels))
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
    total = Tally()
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
