"""Whole runs over every way of feeding them: packing, order, noise, mixtures, conversations.

Each kind of run is trained once for the file; the tests look at its records, and rebuild its batches from them.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.data.prepare import Prepared
from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.packing import BestFitRows
from bessemer.data.stream.rows import PADDING, PadRows
from bessemer.data.tokenizer.chat import render
from bessemer.run.directory import Run
from bessemer.session.replay import documents_of, stream_of
from bessemer.session.session import Session, run_folder
from bessemer.spec.mixture import target_shares
from bessemer.spec.schema import RunSpec

from .conftest import spec_data, train_until, write_corpus

STEPS, ROWS, CONTEXT = 10, 4, 32
SCORER = "def steel(texts):\n    return [text.split().count('steel') / len(text.split()) for text in texts]\n"
QUESTIONS = ("How hot is the blast?", "What is slag, and where does it go when the steel is poured?")


def write_talks(path: Path) -> Path:
    draw = random.Random(1)
    with path.open("w") as file:
        for i in range(40):
            turns: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] if i % 3 == 0 else []
            for _ in range(draw.randint(1, 3)):
                turns.append({"role": "user", "content": draw.choice(QUESTIONS)})
                turns.append({"role": "assistant", "content": f"It is {draw.randint(1, 999)}. " * draw.randint(1, 5)})
            if i % 5 == 0:
                turns[-1]["weight"] = 0
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


class Workshop:
    """Corpora, and the runs over them: each trained when it is first asked for."""

    def __init__(self, home: Path) -> None:
        self.home, self.trained = home, set[str]()
        self.words = write_corpus(home / "words.jsonl")
        self.few = write_corpus(home / "few.jsonl", documents=3, seed=7)
        self.talks = write_talks(home / "talks.jsonl")
        self.ragged = home / "ragged.jsonl"
        rows = [json.loads(line)["text"] for line in self.words.read_text().splitlines()]
        rows = [row.replace(" ore ", " ore  \n") if i % 2 else row for i, row in enumerate(rows)]
        self.ragged.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        (home / "scorer.py").write_text(SCORER)

    def kinds(self) -> dict[str, dict[str, Any]]:
        words, few = {"path": [str(self.words)]}, {"path": [str(self.few)]}
        score = {"function": f"{self.home}/scorer.py:steel", "name": "steel"}
        noise = {"replace": 0.1, "delete": 0.1, "mask_spans": 0.15, "mask": ["<mask>"]}
        return {
            "concat": {},
            "best_fit": {"packing": "best_fit"},
            "pad": {"packing": "pad", "padding": {"buckets": 4, "multiple_of": 4}, "context": 256},
            "by_length": {"curriculum": {"by": "length", "groups": 4}},
            "by_label": {"curriculum": {"by": "label", "label": "steel", "groups": 4}, "clean": [{"score": score}]},
            "noise": {"noise": noise},
            "mix_auto": {"mix": "auto", "sources": {"web": words, "github": {"path": [str(self.ragged)]}}},
            "capped": {"sources": {"words": words, "few": {**few, "max_epochs": 1.0}}, "validation": 0},
            "chat": {
                "packing": "pad", "sources": {"talks": {"path": [str(self.talks)], "messages_field": "messages"}}
            },
            "phase": {
                "sources": {"words": words, "few": {**few, "weight": 0}},
                "phases": [{"start": 6 * ROWS * CONTEXT, "weights": {"few": 1.0}}],
            },
            "cleaned": {"sources": {"ragged": {"path": [str(self.ragged)], "clean": ["whitespace"]}}},
        }  # fmt: skip

    def spec(self, kind: str, name: str | None = None) -> RunSpec:
        data = {"sources": {"words": {"path": [str(self.words)]}}, "context": CONTEXT, "validation": 0.1}
        tokenizer: dict[str, Any] = {"vocab": 300, "special": ["<mask>"] if kind == "noise" else []}
        parts = spec_data(
            name or kind, self.words, self.home / "runs", tokenizer=tokenizer,
            budget={"steps": STEPS, "batch": ROWS * self.kinds()[kind].get("context", CONTEXT)},
            checkpoint={"every": 4}, evaluate={"every": STEPS, "tokens": 256},
        )  # fmt: skip
        return RunSpec.model_validate({**parts, "data": {**data, **self.kinds()[kind]}})

    def run(self, kind: str) -> Path:
        spec = self.spec(kind)
        if kind not in self.trained:
            assert Session(spec).train().kind == "finished"
            self.trained.add(kind)
        return run_folder(spec)

    def stream(self, kind: str) -> tuple[BatchStream, Any]:
        _, stream, data, _ = stream_of(self.run(kind))
        return stream, data


KINDS = [
    "concat", "best_fit", "pad", "by_length", "by_label", "noise", "mix_auto", "capped", "chat", "phase",
    "cleaned",
]  # fmt: skip


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    found = Workshop(tmp_path_factory.mktemp("feed"))
    assert list(found.kinds()) == KINDS
    return found


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in Run(folder).metrics()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_each_kind_finishes_with_finite_losses(workshop: Workshop, kind: str) -> None:
    folder = workshop.run(kind)
    found = losses(folder)
    assert len(found) == STEPS and all(map(math.isfinite, found))
    if kind != "capped":
        assert all(math.isfinite(record["loss"]) for record in Run(folder).validations())


@pytest.mark.parametrize(
    "kind", ["pad", "noise", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("best_fit", "by_label", "chat"))]
)
def test_an_interrupted_run_goes_on_with_the_losses_of_an_unbroken_one(workshop: Workshop, kind: str) -> None:
    broken = workshop.spec(kind, f"{kind}-broken")
    assert train_until(broken, 3).kind == "interrupted"
    assert len(losses(run_folder(broken))) < STEPS
    assert Session(broken).train().kind == "finished"
    assert losses(run_folder(broken)) == losses(workshop.run(kind))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "cleaned"])
@pytest.mark.parametrize("step", [0, STEPS - 1])
def test_the_documents_of_a_step_stand_in_the_files(workshop: Workshop, kind: str, step: int) -> None:
    stream, data = workshop.stream(kind)
    found = documents_of(workshop.run(kind), step, texts=True)
    weights = BatchStream(stream.sources, stream.order, stream.sequence_length, stream.steps).batch(step).weights
    tokens = sum(document["tokens"] for document in found)
    assert tokens == weights.sum() if kind != "chat" else tokens > weights.sum() > 0
    for document in found:
        assert document["in_file"] == "same"
        record = json.loads(Path(document["file"]).read_text().splitlines()[document["row"] - 1])
        whole = record.get("text") or data.tokenizer.decode(render(record["messages"], data.tokenizer)[0].tolist())
        assert document["texts"]
        assert all(text.removesuffix("<|endoftext|>") in whole and text for text in document["texts"])


def test_text_that_a_step_changed_is_said_to_be_cleaned(workshop: Workshop) -> None:
    said = Counter[str]()
    rows = [json.loads(line)["text"] for line in workshop.ragged.read_text().splitlines()]
    for step in range(STEPS):
        for document in documents_of(workshop.run("cleaned"), step, texts=True):
            said[document["in_file"]] += 1
            parts = [text.removesuffix("<|endoftext|>") for text in document["texts"]]
            stands = all(part in rows[document["row"] - 1] for part in parts)
            assert document["in_file"] == ("same" if stands else "cleaned")
            assert all(part in rows[document["row"] - 1].replace("  \n", "\n") for part in parts)
    assert min(said["same"], said["cleaned"]) >= 5


def test_a_file_that_is_gone_or_shorter_cannot_be_compared(workshop: Workshop) -> None:
    moved = write_corpus(workshop.home / "moved.jsonl", documents=30, seed=3)
    parts = spec_data("moved", moved, workshop.home / "runs", budget={"steps": 2, "batch": 64})
    spec = RunSpec.model_validate(parts)
    Session(spec).train()
    lines = moved.read_text().splitlines(keepends=True)
    moved.write_text(lines[0])
    said = {document["in_file"] for document in documents_of(run_folder(spec), 0, texts=True) if document["row"] > 1}
    assert said == {"the row is gone"}
    moved.rename(workshop.home / "elsewhere")
    said = {document["in_file"] for document in documents_of(run_folder(spec), 0, texts=True)}
    assert all(text.startswith("not compared: ") and "moved.jsonl" in text for text in said)


def test_best_fit_cuts_no_document_that_fits_a_row(workshop: Workshop) -> None:
    stream, data = workshop.stream("best_fit")
    rows, store = stream.sources["words"], data.train["words"]
    assert isinstance(rows, BestFitRows)
    spans = rows.spans(np.arange(rows.count))
    real = spans.document != PADDING
    assert np.bincount(spans.document[real], spans.length[real]).sum() == store.tokens  # every token once
    start, stop = store.extents(np.arange(store.documents))
    pieces = np.bincount(spans.document[real], minlength=store.documents)
    assert (pieces == -(-(stop - start) // CONTEXT)).all()  # as few pieces as can be
    assert np.count_nonzero(pieces > 1) > 20
    plan = json.loads((workshop.run("best_fit") / "plan.json").read_text())["decisions"]
    assert "% padding" in next(decision for decision in plan if decision["key"] == "data.packing")["value"]["words"]


def test_padded_rows_hold_one_document_and_are_trimmed_to_the_longest(workshop: Workshop) -> None:
    stream, data = workshop.stream("pad")
    rows = stream.sources["words"]
    assert isinstance(rows, PadRows)
    _, first = np.unique(rows.spans(np.arange(rows.count)).document, return_index=True)
    assert len(first) - 1 == data.train["words"].documents < rows.count  # long ones are split
    widths, spreads = set(), []
    for step in range(STEPS):
        batch = stream.batch(step)
        lengths = rows.row_lengths(batch.sequences)
        assert not batch.documents.any()
        assert batch.tokens.shape[1] == -(-int(lengths.max()) // 4) * 4
        assert batch.weights.sum(axis=1).tolist() == lengths.tolist()
        widths.add(batch.tokens.shape[1])
        spreads.append(int(lengths.max() - lengths.min()))
    # Rows of a step are of one bucket of four: alike in length, where shuffled rows are not.
    draw = np.random.default_rng(0)
    shuffled = [np.ptp(rows.row_lengths(draw.integers(0, rows.count, ROWS))) for _ in range(200)]
    assert np.mean(spreads) < 0.4 * np.mean(shuffled)
    assert len(widths) > 1


def _by_group(stream: BatchStream, measure: np.ndarray, groups: int) -> list[np.ndarray]:
    """The measures of the rows of the first epoch, in the order they are read, cut into so many."""
    rows = next(iter(stream.sources.values()))
    _, sequences, *_ = stream.order.resolve(np.arange(rows.count))
    assert sorted(sequences.tolist()) == list(range(rows.count))
    return np.split(measure[sequences], [rows.count * k // groups for k in range(1, groups)])


def _row_means(rows: Any, values: np.ndarray) -> np.ndarray:
    """By a loop over the columns: the mean over a row's tokens of the value of the token's document."""
    spans = rows.spans(np.arange(rows.count))
    total, count = np.zeros(rows.count), np.zeros(rows.count)
    for row, length, document in zip(spans.row, spans.length, spans.document, strict=True):
        if document != PADDING:
            total[row] += length * values[document]
            count[row] += length
    return total / count


def _rising(groups: list[np.ndarray]) -> None:
    assert all(before.max() <= after.min() + 1e-6 for before, after in pairwise(groups))
    assert any((np.diff(group) < 0).any() for group in groups)  # shuffled inside


def test_a_curriculum_by_length_goes_from_short_documents_to_long_ones(workshop: Workshop) -> None:
    stream, data = workshop.stream("by_length")
    rows, store = stream.sources["words"], data.train["words"]
    start, stop = store.extents(np.arange(store.documents))
    _rising(_by_group(stream, _row_means(rows, stop - start), 4))
    plan = (workshop.run("by_length") / "plan.json").read_text()
    assert "the curriculum by length takes a whole epoch" in plan


def test_a_curriculum_by_label_goes_by_what_the_users_function_said(workshop: Workshop) -> None:
    stream, data = workshop.stream("by_label")
    rows, store = stream.sources["words"], data.train["words"]
    texts = [json.loads(line)["text"].split() for line in workshop.words.read_text().splitlines()]
    expected = [
        texts[row - 1].count("steel") / len(texts[row - 1])
        for row in (store.origin_of_document(i).row for i in range(store.documents))
    ]
    scores = store.scores(np.arange(store.documents))
    assert scores.tolist() == pytest.approx(expected, abs=1e-6)  # labels have six places
    _rising(_by_group(stream, _row_means(rows, scores), 4))


def test_noise_is_on_the_inputs_and_the_targets_are_true(workshop: Workshop) -> None:
    stream, data = workshop.stream("noise")
    plain = BatchStream(stream.sources, stream.order, CONTEXT, stream.steps)
    mask = data.tokenizer.special["<mask>"]
    masked = deleted = changed = columns = 0
    for step in range(STEPS):
        noisy, true = stream.batch(step), plain.batch(step)
        assert noisy.weights.sum(axis=1).tolist() == true.weights.sum(axis=1).tolist()
        for row in range(ROWS):
            left = noisy.targets[row][: np.flatnonzero(noisy.weights[row])[-1] + 1].tolist()
            assert _is_subsequence(left, true.targets[row].tolist())
            deleted += CONTEXT - len(left)
        masked += int((noisy.tokens == mask).sum())
        changed += int((noisy.tokens != true.tokens).sum())
        columns += ROWS * CONTEXT
    assert 0.05 < masked / columns < 0.25 and 0.04 < deleted / columns < 0.16 and changed > masked


def _is_subsequence(part: list[int], whole: list[int]) -> bool:
    rest: Iterator[int] = iter(whole)
    return all(token in rest for token in part)


def test_mix_auto_gives_each_domain_its_target_share(workshop: Workshop) -> None:
    folder = workshop.run("mix_auto")
    wanted = target_shares({"web", "code"})
    settings = json.loads((folder / "settings.json").read_text())["mixtures"]
    [(start, mixture)] = settings
    shares = {name: count / mixture["block"] for name, count in zip(mixture["names"], mixture["counts"], strict=True)}
    assert start == 0
    assert shares["web"] == pytest.approx(wanted["web"], rel=0.01)
    assert shares["github"] == pytest.approx(wanted["code"], rel=0.01)
    stream, _ = workshop.stream("mix_auto")
    read = Counter(stream.names[k] for step in range(STEPS) for k in stream.batch(step).sources.tolist())
    assert abs(read["web"] - wanted["web"] * STEPS * ROWS) <= 3
    assert "its name contains 'github'" in (folder / "plan.json").read_text()


def test_a_capped_source_is_read_once_and_then_left_to_the_other(workshop: Workshop) -> None:
    stream, _ = workshop.stream("capped")
    few = stream.sources["few"].count
    assert 3 < few < STEPS * ROWS / 2
    read = [
        (stream.names[source], sequence)
        for step in range(STEPS)
        for batch in [stream.batch(step)]
        for source, sequence in zip(batch.sources.tolist(), batch.sequences.tolist(), strict=True)
    ]
    of_few = [(place, sequence) for place, (name, sequence) in enumerate(read) if name == "few"]
    assert sorted(sequence for _, sequence in of_few) == list(range(few))
    assert of_few[-1][0] < STEPS * ROWS - 5  # the run goes on without it
    assert "data.sources.few.max_epochs" in (workshop.run("capped") / "plan.json").read_text()


def test_only_what_the_assistant_says_is_weighted(workshop: Workshop) -> None:
    stream, data = workshop.stream("chat")
    assert isinstance(data, Prepared)
    rows, store = stream.sources["talks"], data.train["talks"]
    assert isinstance(rows, PadRows)
    talks = [json.loads(line)["messages"] for line in workshop.talks.read_text().splitlines()]
    sequences = np.arange(rows.count)
    block, owners = rows.assemble(sequences), rows.spans(sequences)
    assert block.weights is not None
    found: dict[int, tuple[list[int], list[int]]] = {}
    for row, column, length, document in zip(owners.row, owners.column, owners.length, owners.document, strict=True):
        cells = slice(column, column + length)
        if document == PADDING:
            assert not block.weights[row, cells].any()
            continue
        ids, mask = found.setdefault(int(document), ([], []))
        ids += block.targets[row, cells].tolist()
        mask += block.weights[row, cells].astype(int).tolist()
    assert len(found) == store.documents > 30
    for document, (ids, mask) in found.items():
        messages = talks[store.origin_of_document(document).row - 1]
        wanted_ids, wanted_mask = render(messages, data.tokenizer)
        assert ids == [*wanted_ids.tolist(), data.tokenizer.eos_id]
        assert mask == [*wanted_mask.tolist(), 0]
        learnt = data.tokenizer.decode([token for token, kept in zip(ids, mask, strict=True) if kept])
        said = [turn for turn in messages if turn["role"] == "assistant" and turn.get("weight", 1)]
        assert learnt.replace("<|im_end|>", "") == "".join(turn["content"] for turn in said)
    for step in range(STEPS):  # what the loss is divided by
        assert stream.step_count(step) == stream.batch(step).weights.sum()


def test_a_phase_changes_the_source(workshop: Workshop) -> None:
    stream, _ = workshop.stream("phase")

    def names(batch: Batch) -> set[str]:
        return {stream.names[k] for k in batch.sources.tolist()}

    assert [names(stream.batch(step)) for step in range(STEPS)] == [{"words"}] * 6 + [{"few"}] * 4
    reopened = [event["step"] for event in Run(workshop.run("phase")).events("guard_reopened")]
    assert reopened == [6]
