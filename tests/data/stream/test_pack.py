"""Best-fit packing gives the bins of a plain implementation, every token once, and rows that keep documents apart."""

from __future__ import annotations

import json
import os
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data.store.token_store import TokenStore
from bessemer.data.store.writer import StoreWriter
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.data.stream.packing import BestFitRows, best_fit, open_best_fit, pack
from bessemer.data.stream.rows import PADDING, Rows
from bessemer.errors import UserError
from bessemer.spec.mixture import quantise

EOS = 0
T = 16


def plain_best_fit(lengths: list[int], capacity: int) -> tuple[list[int], list[int]]:
    """One item at a time: (items in the order they are placed, bin of each)."""
    order = sorted(range(len(lengths)), key=lambda item: -lengths[item])
    free: list[int] = []
    since: list[int] = []  # when the bin got the space it has
    bins = []
    for clock, item in enumerate(order):
        fitting = [(free[b], since[b], b) for b in range(len(free)) if free[b] >= lengths[item]]
        if not fitting:
            free.append(capacity)
            since.append(clock)
        chosen = min(fitting)[2] if fitting else len(free) - 1
        free[chosen] -= lengths[item]
        since[chosen] = clock
        bins.append(chosen)
    return order, bins


def write_store(
    prefix: Path, lengths: list[int], first: int = 0, mask: bool = False, vocab: int = 60_000
) -> TokenStore:
    """Tokens are numbered from `first` + 1 on, so that one tells where it stood; each document ends with EOS."""
    token = first
    random = np.random.default_rng(first)
    with StoreWriter(prefix, vocab, "tokenizer") as writer:
        for row, length in enumerate(lengths):
            tokens = np.append(token + 1 + np.arange(length - 1), EOS)
            writer.add(tokens, "/corpus.jsonl", row, row, length, mask=random.integers(0, 2, length) if mask else None)
            token += length
    return TokenStore(prefix)


@given(st.integers(1, 24).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=60))))
@settings(max_examples=200)
def test_the_bins_are_those_of_a_plain_implementation(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    order, bins = best_fit(np.array(lengths, np.int64), capacity)
    assert (order.tolist(), bins.tolist()) == plain_best_fit(lengths, capacity)


@pytest.mark.parametrize(("capacity", "shape"), [(2048, 6.3), (70_000, 8.0)])
def test_large_bins_too(capacity: int, shape: float) -> None:
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(shape, 1.2, 400).astype(np.int64), 1, capacity)
    order, bins = best_fit(lengths, capacity)
    assert (order.tolist(), bins.tolist()) == plain_best_fit(lengths.tolist(), capacity)


@pytest.mark.parametrize(
    ("lengths", "most"),
    [
        (lambda random: random.lognormal(6.3, 1.1, 200_000), 0.001),  # web pages
        (lambda random: random.lognormal(7.5, 1.0, 50_000), 0.001),  # longer than a row on average
        (lambda random: random.integers(10, 30, 200_000), 0.005),
        (lambda random: random.integers(300, 900, 100_000), 0.03),  # two or three to a row, no short ones
    ],
)
def test_padding_is_small(tmp_path: Path, lengths: object, most: float) -> None:
    sizes = np.maximum(1, lengths(np.random.default_rng(0)).astype(np.int64))  # type: ignore[operator]

    class Lengths:
        fingerprint, documents, tokens = "lengths", sizes.size, int(sizes.sum())
        starts = np.cumsum([0, *sizes])

        def edges(self, first: int, stop: int) -> np.ndarray:
            return self.starts[first : stop + 1]

    index = pack(Lengths(), 2048, tmp_path / "p")  # type: ignore[arg-type]
    assert index.padding_share == pytest.approx(1 - sizes.sum() / (index.rows * 2048))
    assert index.padding_share < most


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3 * T + 2), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=3),
    mask=st.booleans(),
    block=st.sampled_from([3, 10**6]),
)
def test_every_token_is_a_target_once_in_its_document(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], cuts: list[int], mask: bool, block: int
) -> None:
    folder = tmp_path_factory.mktemp("pack")
    edges = [0, *sorted(min(cut, len(lengths)) for cut in cuts), len(lengths)]
    starts = np.cumsum([0, *lengths])
    parts = [
        write_store(folder / f"p{k}", lengths[a:b], int(starts[a]), mask) for k, (a, b) in enumerate(pairwise(edges))
    ]
    store = TokenStore([part.prefixes[0] for part in parts])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bessemer.data.stream.packing._BLOCK_PIECES", block)
        patch.setattr("bessemer.data.stream.packing._READ_DOCUMENTS", 2)
        rows = open_best_fit(store, T, folder / "pack")
    found = rows.assemble(np.arange(rows.count))
    assert isinstance(rows, Rows)
    assert found.tokens.shape == found.targets.shape == (rows.count, T)
    data, kept = store.slice(0, store.tokens), np.diff(store.targets_before(np.arange(store.tokens + 1)))
    seen = np.zeros(store.tokens, int)
    weights = np.ones((rows.count, T)) if found.weights is None else found.weights
    spans = rows.spans(np.arange(rows.count))
    for name in ("row", "column", "length", "document"):
        assert np.array_equal(getattr(spans, name), getattr(found.spans, name))
    cells = np.zeros((rows.count, T), int)
    for row, column, length, document, weight in zip(
        spans.row, spans.column, spans.length, spans.document, spans.weight, strict=True
    ):
        cells[row, column : column + length] += 1
        inputs, targets = found.tokens[row, column:][:length], found.targets[row, column:][:length]
        if document == PADDING:
            assert not inputs.any() and not targets.any() and weight == 0
            assert column + length == T
            continue
        # Where in the document this piece lies: the only place with these tokens that is a multiple of T.
        begin, end = starts[document : document + 2]
        places = [p for p in range(begin, end, T) if np.array_equal(data[p : p + length], targets)]
        place = next(p for p in places if not seen[p])
        seen[place : place + length] += 1
        assert place + length == min(end, place + T)  # a document is cut only where it does not fit
        assert inputs[0] == (data[place - 1] if place else EOS) and np.array_equal(inputs[1:], targets[:-1])
        assert np.array_equal(weights[row, column : column + length], kept[place : place + length])
        assert weight == kept[place : place + length].sum()
    assert (seen == 1).all() and (cells == 1).all()
    assert rows.index.info.padding == rows.count * T - store.tokens
    assert rows.full == (rows.index.info.padding == 0 and not store.masked)


def test_the_same_rows_in_any_company(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", np.random.default_rng(0).integers(1, 40, 90).tolist(), mask=True)
    rows = open_best_fit(store, T, tmp_path / "pack")
    whole = rows.assemble(np.arange(rows.count))
    some = np.array([5, 0, 5, rows.count - 1])
    found = rows.assemble(some)
    assert np.array_equal(found.tokens, whole.tokens[some]) and np.array_equal(found.targets, whole.targets[some])
    assert whole.weights is not None and np.array_equal(found.weights, whole.weights[some])
    nothing = rows.assemble(np.array([], np.int64))
    assert nothing.tokens.shape == (0, T) and nothing.spans.row.size == 0


def stream_of(rows: BestFitRows, banned: frozenset[tuple[str, int]] = frozenset()) -> BatchStream:
    order = StreamOrder([MixturePhase(0, quantise({"a": 1.0}))], {"a": rows.count}, 1)
    return BatchStream({"a": rows}, order, T, StepPositions([BatchPhase(0, 5)]), banned)


@pytest.mark.parametrize("mask", [False, True])
def test_a_stream_over_packed_rows(tmp_path: Path, mask: bool) -> None:
    store = write_store(tmp_path / "s", np.random.default_rng(0).integers(1, 40, 90).tolist(), mask=mask)
    rows = open_best_fit(store, T, tmp_path / "pack")
    banned = frozenset({("a", 3), ("a", 11), ("a", 50)})
    stream, plain = stream_of(rows, banned), stream_of(rows)
    assert stream.fingerprint == plain.fingerprint
    assert stream.identity["packing"] == "best_fit"
    for step in range(20):
        batch, free = stream.batch(step), plain.batch(step)
        assert stream.step_count(step) == batch.count and plain.step_count(step) == free.count
        spans = rows.spans(batch.sequences)
        real = spans.document != PADDING
        assert sum(share.tokens for share in stream.origins(step)) == spans.length[real].sum()
        located = stream.locate(batch)
        assert [origin.document for _, _, origin in located] == spans.document[real].tolist()
        for row, number, origin in located:
            inside = batch.documents[row] == number
            assert set(batch.targets[row][inside]) <= {EOS, *store.slice(origin.start, origin.stop).tolist()}
            if ("a", origin.document) in banned:
                assert not batch.weights[row][inside].any()
    # One epoch reads every row once.
    seen = np.concatenate([stream.batch(step).sequences for step in range(-(-rows.count // 5))])[: rows.count]
    assert sorted(seen.tolist()) == list(range(rows.count))


def test_padding_behind_a_single_document_needs_no_mask(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [T - 1, T - 1, T - 1])
    batch = stream_of(open_best_fit(store, T, tmp_path / "pack")).batch(0)
    assert batch.single_document
    assert batch.weights.tolist() == [[1.0] * (T - 1) + [0.0]] * 5


def test_an_index_is_kept_while_it_is_of_this_store(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 90).tolist()
    store = write_store(tmp_path / "s", lengths)
    first = open_best_fit(store, T, tmp_path / "pack")
    made = (tmp_path / "pack.pieces").stat().st_mtime_ns

    def again(store: TokenStore, length: int = T) -> BestFitRows:
        return open_best_fit(store, length, tmp_path / "pack")

    assert again(store).fingerprint == first.fingerprint
    assert (tmp_path / "pack.pieces").stat().st_mtime_ns == made
    assert again(store, T + 1).length == T + 1  # another T
    assert again(store).fingerprint == first.fingerprint  # and back: the same bytes
    other = write_store(tmp_path / "o", lengths[::-1])
    assert again(other).fingerprint != first.fingerprint
    for damage in ("pieces", "rows", "json", "chunks"):
        again(store)
        os.truncate(tmp_path / f"pack.{damage}", 5)
        assert again(store).fingerprint == first.fingerprint
    assert sorted(path.name for path in tmp_path.glob("pack*")) == [
        "pack.chunks",
        "pack.json",
        "pack.pieces",
        "pack.rows",
    ]
    about = json.loads((tmp_path / "pack.json").read_text())
    assert about["store"] == store.fingerprint and about["rows"] == first.count


@pytest.mark.parametrize("suffix", ["pieces", "rows", "json"])
def test_a_changed_index_is_never_read(tmp_path: Path, suffix: str) -> None:
    """Refused by name when the damaged place is read, or computed again."""
    store = write_store(tmp_path / "s", np.random.default_rng(0).integers(1, 40, 90).tolist())
    expected = open_best_fit(store, T, tmp_path / "pack")
    rows = np.arange(expected.count)
    tokens = expected.assemble(rows).tokens.tolist()
    path = tmp_path / f"pack.{suffix}"
    whole = path.read_bytes()
    for at in range(0, len(whole), 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        refusal = None
        try:
            assert open_best_fit(store, T, tmp_path / "pack").assemble(rows).tokens.tolist() == tokens
        except UserError as error:
            refusal = str(error)
        assert refusal is None or (f"{path}: bytes 0 to" in refusal and "computed again" in refusal)


def test_processes_that_pack_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", np.random.default_rng(0).integers(1, 40, 200).tolist())
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(open_best_fit(store, T, tmp_path / "pack").fingerprint))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1


def test_an_empty_store_has_no_rows(tmp_path: Path) -> None:
    rows = open_best_fit(write_store(tmp_path / "s", []), T, tmp_path / "pack")
    assert rows.count == 0 and rows.index.padding_share == 0


def test_a_context_too_long_to_pack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.context 8,388,608"):
        pack(write_store(tmp_path / "s", [3]), 1 << 23, tmp_path / "pack")
