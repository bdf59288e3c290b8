"""The report's numbers against counts by hand; the page shows them, and nothing in a document can spoil it."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bessemer.data.curate.ledger import LENGTH_BINS, StepCounts
from bessemer.data.curate.report import (
    PAGE,
    QUARANTINE,
    REPORT,
    human_bytes,
    page,
    read_report,
    source_table,
    step_table,
)
from bessemer.data.curate.step import Drop
from bessemer.data.prepare import Prepared, prepare
from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.spec.data import DataSpec, TokenizerSpec

EVIL = "<script>alert('é')</script> & \"quotes\" https://example.org/x.js"
SHORT = ["tiny", "small é", EVIL[:19]]  # below 20 characters
LONG = [f"Document {i} is long enough to be kept, and tells of {i * 17} things." for i in range(12)]
COPIES = [LONG[0], LONG[5] + "  ", LONG[0]]
NOTES = ["A note of some length: " + "x" * 40, "B " * 30, EVIL]  # 63, 60 and 63 characters
SCORER = "def words(texts):\n    return [len(text.split()) for text in texts]\n"


def make(tmp_path: Path, part: int = 300) -> Prepared:
    """Source `web`: 18 documents, an empty row and two bad ones. Source `notes`: three files."""
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in [*SHORT, *LONG, *COPIES]]
    rows[4:4] = ['{"text": "cut off <script>', json.dumps({"text": "  "})]
    rows.append('{"other": "<img src=x>"}')
    (tmp_path / "in").mkdir(exist_ok=True)
    (tmp_path / "in" / "a<b>.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "in" / "notes").mkdir(exist_ok=True)
    for i, text in enumerate(NOTES):
        (tmp_path / "in" / "notes" / f"{i}.txt").write_text(text)
    (tmp_path / "scorer.py").write_text(SCORER)
    data = DataSpec.model_validate(
        {
            "sources": {
                "web": str(tmp_path / "in" / "a<b>.jsonl"),
                "notes": {"path": str(tmp_path / "in" / "notes"), "clean": [{"length": {"max_chars": 60}}]},
            },
            "clean": [
                {"length": {"min_chars": 20}},
                "dedup_exact",
                {"score": {"function": f"{tmp_path}/scorer.py:words", "name": "words"}},
            ],
            "validation": 0.2,
            "bad_rows": 0.2,
            "part": part,
        }
    )
    return prepare(data, TokenizerSpec(), tmp_path / "cache", 300, 0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Prepared, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("report")
    prepared = make(folder)
    return folder, prepared, read_report(prepared.folder)


def size(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def test_sources_are_counted_as_by_hand(made: tuple[Path, Prepared, dict[str, Any]]) -> None:
    _, prepared, report = made
    assert list(report["sources"]) == ["web", "notes"]
    web, notes = report["sources"]["web"], report["sources"]["notes"]
    everything = [*SHORT, *LONG, *COPIES]
    assert (web["files"], notes["files"]) == (1, 3)
    assert web["parts"] > 3
    assert (web["documents_read"], web["bytes_read"]) == (18, size(everything))
    assert (web["empty"], web["bad"], notes["empty"], notes["bad"]) == (1, 2, 0, 0)
    assert (web["documents"], web["bytes"]) == (12, size(LONG))
    assert (notes["documents_read"], notes["documents"], notes["bytes"]) == (3, 1, 60)
    for name, source in report["sources"].items():
        assert source["tokens"] == {
            "train": prepared.train[name].tokens,
            **({"validation": prepared.validation[name].tokens} if name in prepared.validation else {}),
        }


def test_lengths_are_counted_by_powers_of_two(made: tuple[Path, Prepared, dict[str, Any]]) -> None:
    _, _, report = made
    bins = Counter(len(text).bit_length() for text in LONG)
    assert report["sources"]["web"]["lengths"] == [bins[k] for k in range(LENGTH_BINS)]


def test_steps_are_counted_as_by_hand(made: tuple[Path, Prepared, dict[str, Any]]) -> None:
    _, _, report = made
    own, length, dedup, score = report["steps"]
    assert [step["step"] for step in report["steps"]] == ["length", "length", "dedup_exact", "score"]
    assert [step["source"] for step in report["steps"]] == ["notes", None, None, None]
    assert own["by_source"] == {"notes": [3, 1, size(NOTES), 60]}
    kept = [*LONG, *COPIES]
    everything = [*SHORT, *kept]
    assert length["by_source"] == {"web": [18, 15, size(everything), size(kept)], "notes": [1, 1, 60, 60]}
    assert list(length["by_source"]) == ["web", "notes"]
    assert (length["documents_in"], length["documents_out"]) == (19, 16)
    assert (length["bytes_in"], length["bytes_out"]) == (size(everything) + 60, size(kept) + 60)
    [reason] = length["reasons"]
    assert length["reasons"][reason] == [3, size(SHORT)]
    assert dedup["by_source"]["web"] == [15, 12, size(kept), size(LONG)]
    assert list(dedup["reasons"].values()) == [[3, size(COPIES)]]
    assert length["changed"] == dedup["changed"] == 0
    assert score["documents_out"] == 13 and score["reasons"] == {}
    assert report["sources"]["web"]["labels"]["words"] == {"sum": sum(len(text.split()) for text in LONG), "count": 12}


def test_examples_are_what_was_dropped_and_where_it_stood(made: tuple[Path, Prepared, dict[str, Any]]) -> None:
    folder, _, report = made
    own, length, dedup, _ = report["steps"]
    lines = (folder / "in" / "a<b>.jsonl").read_text().splitlines()
    for step in (length, dedup):
        [found] = step["examples"].values()
        assert len(found) == 3
        for one in found:
            file, _, row = one["place"].rpartition(":")
            assert file.endswith("a<b>.jsonl") and one["text"] == json.loads(lines[int(row) - 1])["text"]
    assert {one["value"] for one in next(iter(length["examples"].values()))} == {len(text) for text in SHORT}
    assert {one["text"] for one in next(iter(own["examples"].values()))} == {NOTES[0], NOTES[2]}


def test_the_report_does_not_depend_on_parts_but_for_their_number(
    made: tuple[Path, Prepared, dict[str, Any]], tmp_path: Path
) -> None:
    _, _, report = made
    other = read_report(make(tmp_path, part=1 << 20).folder)
    texts = [json.dumps(one, sort_keys=True) for one in (report, other)]
    for k, folder in enumerate((made[0], tmp_path)):
        texts[k] = texts[k].replace(str(folder), "")
    first, second = (json.loads(text) for text in texts)
    # The draw of examples goes by the place, which has the folder in it here.
    for one in (first, second):
        for source in one["sources"].values():
            del source["parts"]
        for step in one["steps"]:
            del step["summary"]
            for examples in step["examples"].values():
                examples.sort(key=lambda example: example["place"])
                for example in examples:
                    del example["draw"]
    assert first == second


def test_of_many_the_examples_are_drawn_by_place_alone() -> None:
    documents = [Document(f"text {n}", "file", n) for n in range(200)]
    forward, backward = StepCounts(), StepCounts()
    for document in documents:
        forward.dropped(document, Drop("poor", 0.123456), 1)
    for document in reversed(documents):
        backward.dropped(document, Drop("poor", 0.123456), 1)
    assert forward.examples == backward.examples
    rows = [int(one["place"].partition(":")[2]) for one in forward.examples["poor"]]
    assert len(rows) == 3 and rows != [0, 1, 2] and max(rows) > 20  # not the first ones
    assert {one["value"] for one in forward.examples["poor"]} == {0.1235}


def test_the_quarantine_is_gathered_in_the_order_of_the_rows(made: tuple[Path, Prepared, dict[str, Any]]) -> None:
    folder, prepared, report = made
    lines = [json.loads(line) for line in (prepared.folder / QUARANTINE).read_text().splitlines()]
    raw = (folder / "in" / "a<b>.jsonl").read_text().splitlines()
    assert [(line["row"], line["raw"].strip()) for line in lines] == [(5, raw[4]), (21, raw[20])]
    assert all(line["file"].endswith("a<b>.jsonl") for line in lines)
    assert "not valid JSON" in lines[0]["reason"] and "no field 'text'" in lines[1]["reason"]
    assert report["bad_rows"] == lines


VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Complains about a tag that is not closed in its turn; gathers text and attributes."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags = Counter[str]()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def parse(text: str) -> Page:
    found = Page()
    found.feed(text)
    found.close()
    assert found.open == []
    return found


def test_the_page_is_well_formed_and_documents_are_only_text(made: tuple[Path, Prepared, dict[str, Any]]) -> None:
    _, prepared, report = made
    written = (prepared.folder / PAGE).read_text(encoding="utf-8")
    assert written == page(report)
    found = parse(written)
    assert not {"script", "img", "link", "iframe", "b"} & set(found.tags)
    assert not {"href", "src", "onload", "onclick"} & {name for name, _ in found.attributes}
    assert not any("//" in (value or "") for _, value in found.attributes)
    assert not re.search(r"url\(|@import", written)
    assert EVIL in found.text  # shown as it stands
    assert "a<b>.jsonl" in found.text
    assert '{"other": "<img src=x>"}' in found.text


def test_the_page_has_the_numbers_of_the_report(made: tuple[Path, Prepared, dict[str, Any]]) -> None:
    _, prepared, report = made
    found = parse((prepared.folder / PAGE).read_text(encoding="utf-8"))
    tokens = sum(sum(source["tokens"].values()) for source in report["sources"].values())
    left = human_bytes(size(LONG) + 60)
    assert f"21 documents read, 13 kept (61.9 %): {left} of text, {tokens:,} tokens." in found.text
    total = sum(len(text.split()) for text in [*LONG, NOTES[1]])
    assert f"{total} in all, {total / 13:.4g} on average over 13 documents" in found.text


def test_hostile_names_settings_and_labels_are_escaped() -> None:
    evil = "</td><script>x</script>"
    step = {
        "step": evil, "settings": {evil: evil}, "source": evil, "summary": {evil: [evil]}, "by_source": {},
        "documents_in": 2, "documents_out": 1, "bytes_in": 2, "bytes_out": 1, "changed": 0,
        "reasons": {evil: [1, 1]}, "examples": {evil: [{"draw": 1, "place": evil, "value": evil, "text": evil}]},
        "labels": {},
    }  # fmt: skip
    source = {
        "files": 1, "parts": 1, "documents_read": 2, "bytes_read": 2, "empty": 0, "bad": 1, "documents": 1, "bytes": 1,
        "tokens": {"train": 5}, "lengths": [0] * LENGTH_BINS, "labels": {evil: {evil: 1}, "count": {"count": 4}},
    }  # fmt: skip
    bad = [{"file": evil, "row": 1, "reason": evil, "raw": evil}]
    found = parse(page({"sources": {evil: source}, "steps": [step], "bad_rows": bad}))
    assert found.tags["script"] == 0
    assert found.text.count(evil) >= 12


def test_an_empty_report_has_a_page() -> None:
    assert "No curation steps" in parse(page({"sources": {}, "steps": [], "bad_rows": []})).text


def test_the_tables_are_for_a_terminal(made: tuple[Path, Prepared, dict[str, Any]]) -> None:
    _, prepared, report = made
    head, read, own, length, dedup, score = step_table(report)
    assert read == [
        "read",
        "21",
        human_bytes(size([*SHORT, *LONG, *COPIES, *NOTES])),
        "",
        "",
        "2 bad rows set aside, 1 empty",
    ]
    assert own[:2] == ["length (notes)", "1"] and own[3] == "2 (66.7 %)"
    assert length[1] == "16" and length[3] == "3 (15.8 %)" and length[5].endswith(": 3")
    assert dedup[3] == "3 (18.8 %)" and score[3] == "0"
    assert {len(row) for row in step_table(report)} == {len(head)}
    _, web, notes = source_table(report)
    assert web[:2] == ["web", "12"] and notes[4] == "0"
    assert web[3].replace(",", "") == str(prepared.train["web"].tokens)


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KB"),
        (1_500_000, "1.5 MB"),
        (2e9, "2.0 GB"),
        (3.25e12, "3.25 TB"),
        (4e15, "4000.00 TB"),
    ],
)
def test_bytes_for_people(size_bytes: float, shown: str) -> None:
    assert human_bytes(size_bytes) == shown


@pytest.mark.parametrize("content", [None, "{"])
def test_a_report_that_is_gone_or_damaged_says_what_to_do(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / REPORT).write_text(content)
    with pytest.raises(UserError, match=rf"report\.json: .*delete the folder {tmp_path} and prepare again"):
        read_report(tmp_path)
