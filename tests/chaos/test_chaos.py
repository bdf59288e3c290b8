"""Fault injection: faults are laid out fairly and happen once, poison leads back to real files, a campaign adds up."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bessemer.chaos import faults as flaky
from bessemer.chaos.campaign import assess
from bessemer.chaos.faults import FIRST_DOCUMENT, KINDS, Fault, PoisonedStream, make_poison, parse_kinds, plan_faults
from bessemer.chaos.inject import LR_FACTOR, Injector, flip_bit
from bessemer.data.store.token_store import TokenStore
from bessemer.data.store.writer import StoreWriter
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.data.stream.rows import sequence_count
from bessemer.errors import UserError
from bessemer.run.directory import RunWriter
from bessemer.spec.mixture import quantise

LENGTH, ROWS, VOCAB = 16, 6, 300
LETTERS: Any = SimpleNamespace(
    encode=lambda text: [ord(letter) % VOCAB for letter in text], decode=lambda ids: " ".join(map(str, ids))
)


def test_all_means_all_and_a_prefix_its_kinds() -> None:
    assert parse_kinds("all") == list(KINDS)
    assert parse_kinds("poison,nan,poison-random") == ["poison-random", "poison-repeat", "poison-labels", "nan"]
    assert parse_kinds("flip") == ["flip-weight", "flip-gradient"]


@pytest.mark.parametrize("text", ["", "nan,", "na", "poison-", "NAN", "nan inf"])
def test_a_kind_that_does_not_exist_is_refused_with_those_that_do(text: str) -> None:
    with pytest.raises(UserError, match="there is no such fault; there are poison-random"):
        parse_kinds(text)


@given(
    kinds=st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=16, unique=True),
    count=st.integers(1, 60),
    slots=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_faults_are_laid_out_fairly_and_apart(kinds: list[str], count: int, slots: int, seed: int) -> None:
    first, apart = 100, 64
    last = first + apart * slots
    runs = plan_faults(kinds, count, first, apart, last, seed)
    assert runs == plan_faults(kinds, count, first, apart, last, seed)
    found = Counter(fault.kind for run in runs for fault in run)
    assert sum(found.values()) == count
    assert max(found[kind] for kind in kinds) - min(found[kind] for kind in kinds) <= 1
    for run in runs:
        steps = [fault.step for fault in run]
        assert run and all(first <= step < last for step in steps)
        assert all(after - before >= apart - apart // 3 for before, after in pairwise(steps))
        assert sum(KINDS[fault.kind].restarts for fault in run) <= 1
    # A run is full before another is begun for faults that do not end it.
    deadly = sum(found[kind] for kind in kinds if KINDS[kind].restarts)
    assert len(runs) == max(deadly, -(-count // slots))


def test_a_run_too_short_for_faults_is_refused() -> None:
    with pytest.raises(UserError, match="too short"):
        plan_faults(["nan"], 4, 100, 64, 100, 0)


@pytest.fixture
def stream(tmp_path: Path) -> BatchStream:
    rng = np.random.default_rng(0)
    with StoreWriter(tmp_path / "store", VOCAB, "tokenizer") as writer:
        for row, length in enumerate([5, 40, 17, 90] * 8):
            writer.add(rng.integers(1, VOCAB, length), "real.jsonl", row, row, length)
    store = TokenStore(tmp_path / "store")
    order = StreamOrder([MixturePhase(0, quantise({"a": 1.0}))], {"a": sequence_count(store.tokens, LENGTH)}, seed=1)
    return BatchStream({"a": store}, order, LENGTH, StepPositions([BatchPhase(0, ROWS)]))


POISONS = [Fault("poison-random", 3, 1), Fault("poison-repeat", 5, 2), Fault("poison-labels", 7, 3)]


@pytest.fixture
def poisoned(stream: BatchStream, tmp_path: Path) -> PoisonedStream:
    return PoisonedStream.of(stream, make_poison(stream, POISONS, LETTERS, tmp_path / "poison"))


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("tokens", "targets", "weights"))


def test_half_of_a_step_is_poisoned_and_the_rest_is_as_it_was(stream: BatchStream, poisoned: PoisonedStream) -> None:
    assert poisoned.fingerprint == stream.fingerprint, "a resume must not refuse it"
    for step in range(10):
        ours, clean = poisoned.batch(step), stream.batch(step)
        differ = (ours.targets != clean.targets).any(axis=1)
        assert differ.tolist() == [step in (3, 5, 7) and row < ROWS // 2 for row in range(ROWS)]
        assert poisoned.step_count(step) == ours.count == ROWS * LENGTH


def test_poison_is_a_pure_function_of_the_position(stream: BatchStream, poisoned: PoisonedStream) -> None:
    assert same(poisoned.batch(3), poisoned.batch(3))
    halves = [part for rank in range(2) for part in poisoned.micro_batches(3, 3, rank, 2)]
    assert np.array_equal(np.concatenate([part.tokens for part in halves]), poisoned.batch(3).tokens)
    # A rollback that skips ahead reads the same positions at other steps.
    moved = poisoned.replace(poisoned.steps.skip(1, poisoned.steps.position(5)))
    assert isinstance(moved, PoisonedStream)
    assert same(moved.batch(1), poisoned.batch(5)) and same(moved.batch(3), poisoned.batch(7))


def test_every_poisoned_row_leads_to_a_row_of_a_real_file(poisoned: PoisonedStream) -> None:
    for fault in POISONS:
        batch = poisoned.batch(fault.step)
        bad = [entry for entry in poisoned.locate(batch) if entry[2].document >= FIRST_DOCUMENT]
        assert [(row, column) for row, column, _ in bad] == [(row, 0) for row in range(ROWS // 2)]
        for row, _, origin in bad:
            text = json.loads(Path(origin.file).read_text().splitlines()[origin.row])["text"]
            if fault.kind == "poison-labels":
                assert text == LETTERS.decode(batch.targets[row].tolist())
            else:
                assert LETTERS.encode(text)[1 : LENGTH + 1] == batch.targets[row].tolist()
        named = {share.document for share in poisoned.origins(fault.step) if share.document >= FIRST_DOCUMENT}
        assert named == {origin.document for _, _, origin in bad}
    assert len({(p.origin.file, p.origin.row) for p in poisoned.poison.values()}) == 3 * (ROWS // 2)
    clean = [entry for entry in poisoned.locate(poisoned.batch(4)) if entry[2].document >= FIRST_DOCUMENT]
    assert clean == []


def test_wrong_labels_are_the_right_ones_in_another_order(stream: BatchStream, poisoned: PoisonedStream) -> None:
    ours, clean = poisoned.batch(7), stream.batch(7)
    assert np.array_equal(ours.tokens, clean.tokens)
    assert np.array_equal(np.sort(ours.targets, axis=1), np.sort(clean.targets, axis=1))


def test_a_banned_poison_weighs_nothing_from_its_position_on(poisoned: PoisonedStream) -> None:
    first = int(poisoned.rows(3)[0])
    document = poisoned.poison[first].origin.document
    banned = poisoned.replace(banned={("a", document): first})
    assert banned.batch(3).weights.sum(axis=1).tolist() == [0.0] + [LENGTH] * (ROWS - 1)
    assert banned.step_count(3) == (ROWS - 1) * LENGTH
    later = poisoned.replace(banned={("a", document): first + 1})
    assert same(later.batch(3), poisoned.batch(3))


def test_a_text_that_is_few_tokens_still_fills_its_row(stream: BatchStream, tmp_path: Path) -> None:
    greedy: Any = SimpleNamespace(encode=lambda text: [7, 8, 9])
    found = make_poison(stream, POISONS[:2], greedy, tmp_path / "poison")
    assert {poison.tokens.shape for poison in found.values()} == {(LENGTH,)}
    assert {poison.targets.shape for poison in found.values()} == {(LENGTH,)}


@given(st.integers(0, 10**6))
def test_a_flip_changes_one_bit_of_one_element(seed: int) -> None:
    tensors = [torch.linspace(-1, 1, 12).view(3, 4), torch.full((5,), 0.02)]
    before = torch.cat([tensor.flatten() for tensor in tensors])
    flip_bit(tensors, torch.Generator().manual_seed(seed))
    after = torch.cat([tensor.flatten() for tensor in tensors])
    changed = before.view(torch.int32) ^ after.view(torch.int32)
    assert sorted(changed.tolist()) == [0] * 16 + [1 << 30]


def test_a_fault_happens_once_even_if_the_process_is_started_again(tmp_path: Path) -> None:
    faults = [Fault("lr-jump", 5, 0), Fault("lr-jump", 9, 0)]
    first, job = Injector(faults, tmp_path), SimpleNamespace()
    rates = []
    for step in (4, 5, 5, 6):  # step 5 is come to twice, after a rollback
        first.before_step(job, step)
        rates.append(first.lr(step, 1.0))
    assert rates == [1.0, LR_FACTOR, 1.0, 1.0]
    again = Injector(faults, tmp_path)
    for step in (5, 9):
        again.before_step(job, step)
        rates.append(again.lr(step, 1.0))
    assert rates[4:] == [1.0, LR_FACTOR]
    assert [json.loads(line)["step"] for line in (tmp_path / "chaos.jsonl").read_text().splitlines()] == [5, 9]


def test_flaky_storage_fails_only_while_it_is_told_to(tmp_path: Path) -> None:
    flaky.register_flaky_storage()
    files = fsspec.filesystem(flaky.PROTOCOL)
    (tmp_path / "a").write_text("x")

    def broken() -> int:
        found = 0
        for i in range(60):
            try:
                files.put_file(str(tmp_path / "a"), f"flaky://{tmp_path}/b{i}")
            except OSError:
                found += 1
        return found

    assert broken() == 0
    flaky.FlakyFiles.failing = True
    try:
        assert 10 < broken() < 55  # half of the calls: three of ten before, and three of ten after
    finally:
        flaky.FlakyFiles.failing = False
    assert broken() == 0 and (tmp_path / "b59").read_text() == "x"


def test_what_became_of_a_fault_is_read_from_the_run_s_events(tmp_path: Path) -> None:
    faults = [Fault("nan", 20, 0), Fault("flip-weight", 90, 0), Fault("sigkill", 150, 0)]
    with RunWriter(tmp_path / "run") as run:
        for step in range(200):
            run.step({"step": step})
        times = {}
        run.event("veto", step=3)  # not of any fault
        for fault in faults:
            times[fault.step] = run.event("marker")["time"]
            if fault.kind == "nan":
                run.event("veto", step=20)
                run.event("trial", step=20, verdict="hardware", confidence=0.9)
            elif fault.kind == "flip-weight":
                run.event("veto", step=91)
                run.event("trial", step=91, verdict="data", confidence=0.9)
                run.event("rollback", step=91, to_step=64)
            else:
                run.event("started", step=150, resumed_from="step-00000150.a1")
        run.event("finished", step=200)
        lines = [json.dumps({"step": f.step, "kind": f.kind, "time": times[f.step] - 1e-3}) for f in faults]
        (run.folder / "chaos.jsonl").write_text("\n".join(lines) + "\n")
        nan, flip, kill = assess(run, faults)
    assert (nan.detected_at, nan.sign, nan.verdict, nan.right) == (20, "veto", "hardware", True)
    assert (flip.detected_at, flip.verdict, flip.right, flip.cost_steps) == (91, "data", False, 1 + 91 - 64)
    assert "rolled back to 64" in flip.action
    assert (kill.detected_at, kill.right, kill.action) == (150, None, "restarted")
    assert nan.recovered and flip.recovered and kill.recovered


def test_a_fault_that_nobody_noticed_is_told_as_such(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as run:
        run.step({"step": 0})
        run.event("failed", step=1)
        (run.folder / "chaos.jsonl").write_text(json.dumps({"step": 20, "kind": "nan", "time": 0.0}) + "\n")
        (row,) = assess(run, [Fault("nan", 20, 0)])
    assert (row.detected_at, row.right, row.recovered) == (None, False, False)
