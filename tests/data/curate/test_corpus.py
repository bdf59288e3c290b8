"""Steps over a corpus: the right documents, the cache, what is set aside, and what stops a job."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bessemer.data.curate.corpus import Corpus
from bessemer.data.curate.engine import LocalEngine, Meter
from bessemer.data.curate.passes import ValidationSplit
from bessemer.data.curate.step import is_global, make_step
from bessemer.data.read import list_files, read_part
from bessemer.errors import UserError
from bessemer.spec.data import DataSpec

SPLIT = ValidationSplit(0, 0.05)


class Watched(LocalEngine):
    """Remembers which steps were run on which part."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, list[str]]] = []

    def run(self, function: Any, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for task in tasks:
            if hasattr(task, "ops"):
                names = [op.spec.step for op in task.ops] + (["collect"] if task.collect else [])
                self.ran.append((task.part.name, names))
        yield from super().run(function, tasks)


def curate(data: DataSpec, cache: Path, part: int = 20_000) -> tuple[Corpus, Watched]:
    files = {name: list_files(source) for name, source in data.sources.items()}
    engine = Watched()
    corpus = Corpus(data.model_copy(update={"part": part}), files, cache, engine, Meter())
    corpus.curate(SPLIT)
    return corpus, engine


def texts(corpus: Corpus) -> list[tuple[str, int, str]]:
    return [
        (document.file, document.row, document.text)
        for state in corpus.parts
        for _, document in corpus.documents(state)
    ]


def by_hand(corpus: Corpus, data: DataSpec) -> list[tuple[str, int, str]]:
    """The local steps one after the other on each document alone, then exact copies out."""
    found, seen = [], set()
    for state in corpus.parts:
        for document in read_part(state.part, state.source):
            kept = True
            for spec in [*state.source.clean, *data.clean]:
                step = make_step(spec, 0)
                if is_global(step):
                    continue
                [outcome] = step.apply([document])
                if isinstance(outcome, str):
                    document.text = outcome
                elif outcome is not None:
                    kept = False
                    break
            key = " ".join(document.text.lower().split())
            if kept and key not in seen:
                seen.add(key)
                found.append((document.file, document.row, document.text))
    return found


def test_the_documents_are_those_of_the_steps_done_by_hand(corpus_spec: DataSpec, tmp_path: Path) -> None:
    corpus, _ = curate(corpus_spec, tmp_path / "cache")
    expected = by_hand(corpus, corpus_spec)
    assert texts(corpus) == expected and 200 < len(expected) < 400
    assert sum(state.census.documents for state in corpus.parts if state.census) == len(expected)


def test_each_pass_reads_the_corpus_once(corpus_spec: DataSpec, tmp_path: Path) -> None:
    corpus, engine = curate(corpus_spec, tmp_path / "cache")
    assert len(engine.ran) == 2 * len(corpus.parts)  # before the global step, and after it
    assert engine.ran[0][1] == ["whitespace", "length", "collect"]
    assert engine.ran[-1][1] == ["dedup_exact"]


def test_a_second_time_nothing_is_run(corpus_spec: DataSpec, tmp_path: Path) -> None:
    first, _ = curate(corpus_spec, tmp_path / "cache")
    again, engine = curate(corpus_spec, tmp_path / "cache")
    assert engine.ran == []
    assert texts(again) == texts(first)
    assert [stage.counts_by_source for stage in again.stages] == [stage.counts_by_source for stage in first.stages]


def test_another_threshold_runs_that_step_and_the_later_ones(corpus_spec: DataSpec, tmp_path: Path) -> None:
    curate(corpus_spec, tmp_path / "cache")
    clean = ["whitespace", {"length": {"min_chars": 310}}, "dedup_exact"]
    changed = corpus_spec.model_copy(
        update={"clean": DataSpec.model_validate({**_dump(corpus_spec), "clean": clean}).clean}
    )
    corpus, engine = curate(changed, tmp_path / "cache")
    assert {tuple(steps) for _, steps in engine.ran} == {("length", "collect"), ("dedup_exact",)}
    assert texts(corpus) == by_hand(corpus, changed)


def test_an_added_file_leaves_the_work_on_the_others(corpus_spec: DataSpec, tmp_path: Path) -> None:
    curate(corpus_spec, tmp_path / "cache")
    added = tmp_path / "corpus" / "web-9.jsonl"
    added.write_text(json.dumps({"text": "A text that is new. " * 30, "id": "n", "url": "u"}) + "\n")
    corpus, engine = curate(corpus_spec, tmp_path / "cache")
    first_pass = [name for name, steps in engine.ran if "collect" in steps]
    assert len(first_pass) < len(corpus.parts) / 2 and any("web-9" in name for name in first_pass)
    assert texts(corpus) == by_hand(corpus, corpus_spec)


def test_counts_of_every_step_agree_with_the_documents(corpus_spec: DataSpec, tmp_path: Path) -> None:
    corpus, _ = curate(corpus_spec, tmp_path / "cache")
    notes, whitespace, length, dedup = corpus.stages
    assert (notes.source, notes.step, whitespace.source) == ("notes", "length", None)
    assert list(notes.counts_by_source) == ["notes"] and list(whitespace.counts_by_source) == ["web", "notes"]
    for name in ("web", "notes"):
        assert length.counts_by_source[name].documents_in == whitespace.counts_by_source[name].documents_out
        assert dedup.counts_by_source[name].documents_in == length.counts_by_source[name].documents_out
        left = [row for row in texts(corpus) if ("web-" in row[0]) == (name == "web")]
        assert dedup.counts_by_source[name].documents_out == len(left)
        assert dedup.counts_by_source[name].bytes_out == sum(len(text.encode()) for _, _, text in left)
        dropped = sum(count for count, _ in length.counts_by_source[name].reasons.values())
        assert dropped == length.counts_by_source[name].documents_in - length.counts_by_source[name].documents_out


def test_bad_rows_are_set_aside_and_counted(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"Row number {n} of the file."}) for n in range(300)]
    rows[100] = '{"text": "cut off'
    rows[200] = '{"other": 1}'
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    data = DataSpec.model_validate({"sources": {"a": str(tmp_path / "a.jsonl")}})
    corpus, _ = curate(data, tmp_path / "cache", 1 << 20)
    assert corpus.parts[0].reading is not None and corpus.parts[0].reading.bad == 2
    [aside] = (tmp_path / "cache").rglob("*.quarantine.jsonl")
    lines = [json.loads(line) for line in aside.read_text().splitlines()]
    assert [(line["row"], line["raw"].strip()) for line in lines] == [(101, rows[100]), (201, rows[200])]
    assert len(texts(corpus)) == 298
    strict = data.model_copy(update={"bad_rows": 0.005})
    with pytest.raises(UserError, match=r"source 'a': .*a\.jsonl:101: .*2 of 300 rows cannot be used.*0\.005"):
        curate(strict, tmp_path / "cache2", 1 << 20)


def test_a_truncated_file_is_named_and_nothing_is_dropped(corpus_spec: DataSpec, tmp_path: Path) -> None:
    packed = tmp_path / "corpus" / "web-3.jsonl.gz"
    whole = packed.read_bytes()
    packed.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"source 'web'.*web-3\.jsonl\.gz"):
        curate(corpus_spec, tmp_path / "cache")
    packed.write_bytes(whole)
    corpus, _ = curate(corpus_spec, tmp_path / "cache")
    assert texts(corpus) == by_hand(corpus, corpus_spec)


def test_a_conversation_is_changed_turn_by_turn(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "one  \ntwo"}, {"role": "assistant", "content": "three\t\nfour"}]
    with gzip.open(tmp_path / "chat.jsonl.gz", "wt") as file:
        file.write(json.dumps({"messages": messages}) + "\n")
    source = {"path": str(tmp_path / "chat.jsonl.gz"), "messages_field": "messages"}
    data = DataSpec.model_validate({"sources": {"chat": source}, "clean": ["whitespace"]})
    corpus, _ = curate(data, tmp_path / "cache")
    [(_, document)] = corpus.documents(corpus.parts[0])
    assert document.messages == [
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "three\nfour"},
    ]
    assert document.text == "one\ntwo\n\nthree\nfour"


def test_a_killed_writer_leaves_nothing_that_counts(corpus_spec: DataSpec, tmp_path: Path) -> None:
    corpus, _ = curate(corpus_spec, tmp_path / "cache")
    expected = texts(corpus)
    for commit in sorted((tmp_path / "cache").rglob("*.json"))[::3]:  # as if they had not been reached
        commit.unlink()
    for folder in (tmp_path / "cache" / "rulings").iterdir():
        shutil.rmtree(folder)
    again, _ = curate(corpus_spec, tmp_path / "cache")
    assert texts(again) == expected


def _dump(data: DataSpec) -> dict[str, Any]:
    return data.model_dump(mode="json")
