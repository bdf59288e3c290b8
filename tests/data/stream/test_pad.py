"""Padded rows against a plain walk over the documents; what trimming removes counts nowhere."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data.store.shard import Origin
from bessemer.data.store.token_store import TokenStore
from bessemer.data.store.writer import StoreWriter
from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.curriculum import rank_rows
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.data.stream.rows import PADDING, Ints, PadRows, Rows, Side, Trim
from bessemer.spec.mixture import Mixture

EOS = 9


class Store:
    """Documents in memory; every one ends with EOS, and tokens are unique otherwise. `kept` is the mask."""

    cache = None

    def __init__(self, lengths: list[int], kept: list[bool] | None = None) -> None:
        self.starts = np.cumsum([0, *lengths]).astype(np.int64)
        self.tokens, self.documents = int(self.starts[-1]), len(lengths)
        self.data = 100 + np.arange(self.tokens)
        self.data[self.starts[1:] - 1] = EOS
        self.masked, self.fields = kept is not None, {}
        self.kept = np.resize(np.array(kept if kept else [True]), self.tokens).astype(np.float32)
        self.fingerprint = f"{lengths}"

    def gather(self, starts: Ints, length: int) -> Ints:
        assert starts.min(initial=0) >= 0 and (starts + length).max(initial=0) <= self.tokens
        return self.data[starts[:, None] + np.arange(length)]

    def copy_runs(self, starts: Ints, lengths: Ints, out: np.ndarray, at: Ints, spill: bool = False) -> None:
        for start, length, cell in zip(starts, lengths, at, strict=True):
            out[cell : cell + length] = self.data[start : start + length]

    def copy_weights(self, starts: Ints, lengths: Ints, out: np.ndarray, at: Ints, spill: bool = False) -> None:
        for start, length, cell in zip(starts, lengths, at, strict=True):
            out[cell : cell + length] = self.kept[start : start + length]

    def targets_before(self, positions: Ints) -> Ints:
        return np.concatenate([[0], np.cumsum(self.kept)])[positions].astype(np.int64)

    def extents(self, documents: Ints) -> tuple[Ints, Ints]:
        return self.starts[documents], self.starts[documents + 1]

    def edges(self, first: int, stop: int) -> Ints:
        return self.starts[first : stop + 1]

    def origin_of_document(self, document: int) -> Origin:
        start, stop = self.starts[document : document + 2].tolist()
        return Origin("a.jsonl", document + 1, f"id{document}", document, start, stop)


def walked(store: Store, length: int, long: str) -> list[tuple[int, list[int], list[int], list[float]]]:
    """(document, inputs, targets, weights) of every row, one document after another."""
    rows = []
    for document in range(store.documents):
        a, b = store.starts[document : document + 2].tolist()
        inputs, targets = [EOS, *store.data[a : b - 1].tolist()], store.data[a:b].tolist()
        weights = store.kept[a:b].tolist()
        stop = len(targets) if long == "split" else 1
        for at in range(0, stop, length):
            cut = slice(at, at + length)
            rows.append((document, inputs[cut], targets[cut], weights[cut]))
    return rows


stores = st.tuples(
    st.lists(st.integers(1, 30), min_size=1, max_size=25), st.none() | st.lists(st.booleans(), min_size=1, max_size=9)
).map(lambda made: Store(*made))
sides = st.sampled_from(["right", "left"])


@settings(max_examples=120)
@given(stores, st.sampled_from([1, 2, 5, 8, 40]), st.sampled_from(["split", "truncate"]), sides, st.randoms())
def test_rows_are_what_a_walk_over_the_documents_gives(store, length, long, side, shuffler) -> None:  # type: ignore[no-untyped-def]
    rows, expected = PadRows(store, length, long, side), walked(store, length, long)
    assert isinstance(rows, Rows)
    assert rows.count == len(expected)
    picks = [shuffler.randrange(rows.count) for _ in range(12)]
    sequences = np.array(picks)
    block, spans = rows.assemble(sequences), rows.spans(sequences)
    assert rows.row_lengths(sequences).tolist() == [len(expected[k][1]) for k in picks]
    for r, k in enumerate(picks):
        document, inputs, targets, weights = expected[k]
        pad = length - len(inputs)
        cells = slice(0, len(inputs)) if side == "right" else slice(pad, length)
        empty = slice(len(inputs), length) if side == "right" else slice(0, pad)
        assert block.tokens[r, cells].tolist() == inputs
        assert block.targets[r, cells].tolist() == targets
        assert not block.tokens[r, empty].any() and not block.targets[r, empty].any()
        if block.weights is not None:
            assert block.weights[r, cells].tolist() == weights and not block.weights[r, empty].any()
        mine = np.flatnonzero(spans.row == r)
        assert spans.length[mine].sum() == length  # spans cover the row
        real = mine[spans.document[mine] != PADDING]
        assert spans.document[real].tolist() == [document]
        assert (spans.column[real[0]], spans.length[real[0]]) == (cells.start, len(inputs))
        assert spans.weight[mine].sum() == sum(weights)
    assert all(np.array_equal(getattr(spans, f.name), getattr(block.spans, f.name)) for f in fields(spans))
    one = rows.assemble(sequences[3:4])  # the same row in any company
    assert np.array_equal(one.tokens[0], block.tokens[3])


def make_stream(store: Store, length: int, side: Side, transforms: tuple = ()) -> BatchStream:
    rows = PadRows(store, length, "split", side)
    order = StreamOrder([MixturePhase(0, Mixture(("talk",), (1,), 1))], {"talk": rows.count}, 3)
    return BatchStream({"talk": rows}, order, length, StepPositions([BatchPhase(0, 6)]), transforms=transforms)


@settings(max_examples=60)
@given(stores, sides, st.integers(0, 9), st.sampled_from([1, 4, 8]), st.sampled_from([4, 5]))
def test_trimming_keeps_all_that_counts(store: Store, side: Side, step: int, multiple: int, micro: int) -> None:
    plain = make_stream(store, 24, side)
    trimmed = make_stream(store, 24, side, (Trim(multiple, side),))
    assert plain.fingerprint == trimmed.fingerprint
    total = 0.0
    for whole, cut in zip(plain.micro_batches(step, micro), trimmed.micro_batches(step, micro), strict=True):
        width = cut.tokens.shape[1]
        assert width % multiple == 0 or width == 24
        total += cut.count
        assert cut.count == whole.count
        for name in ("tokens", "targets", "weights", "documents"):
            array = getattr(whole, name)
            assert np.array_equal(getattr(cut, name), array[:, :width] if side == "right" else array[:, -width:])
        rows = plain.sources["talk"]
        real = cut.sequences >= 0
        longest = rows.row_lengths(cut.sequences[real]).max(initial=0)  # type: ignore[attr-defined]
        assert width <= max(multiple, -(-longest // multiple) * multiple)
        if side == "left":  # every real token is still there, also those whose targets do not count
            assert width >= longest
    assert total == trimmed.step_count(step)


def test_rows_of_a_real_store_hold_every_target_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with StoreWriter(tmp_path / "talk", 1000, "tokenizer") as writer:
        for k in range(60):
            tokens, mask = rng.integers(1, 1000, rng.integers(1, 50)), None
            tokens[-1] = 0
            mask = (rng.random(tokens.size) < 0.6).astype(np.uint8)
            writer.add(tokens, "a.jsonl", k + 1, k, 1, mask=mask)
    store = TokenStore(tmp_path / "talk")
    for side in ("right", "left"):
        rows = PadRows(store, 16, "split", side)
        block = rows.assemble(np.arange(rows.count))
        assert block.weights is not None
        real = np.repeat(block.spans.document != PADDING, block.spans.length).reshape(block.targets.shape)
        assert np.array_equal(block.targets[real], store.slice(0, store.tokens))
        assert block.weights.sum() == block.spans.weight.sum() == store.targets_before(np.array([store.tokens]))[0]
        rows.prefetch(np.arange(3))  # nothing to do for a local store


class Remote(Store):
    cache = object()

    def prefetch(self, starts: Ints, lengths: Ints) -> None:
        self.expected = list(zip(starts.tolist(), lengths.tolist(), strict=True))


def test_remote_tokens_are_prefetched() -> None:
    store = Remote([5, 20, 3])
    PadRows(store, 8).prefetch(np.array([0, 2, 4]))
    assert store.expected == [(0, 6), (12, 9), (24, 4)]  # with the input before each row


def test_attention_stays_inside_the_document() -> None:
    store = Store([3, 30, 2, 9])
    right = make_stream(store, 8, "right").batch(0)
    assert right.single_document  # padding behind a document needs no mask: causal attention never looks there
    left = make_stream(store, 8, "left").batch(0)
    for row in range(6):
        length = 8 - int((left.weights[row] == 0).sum())
        numbers = left.documents[row].tolist()
        assert numbers == ([0] * 8 if length == 8 else [0] * (8 - length) + [1] * length)


def test_a_row_of_only_padding_is_trimmed_with_the_others() -> None:
    empty = np.zeros((2, 8))
    batch = Batch(
        empty.astype(np.int64), empty.astype(np.int64), empty.astype(np.float32), empty.astype(np.int32),
        np.full(2, -1), np.full(2, -1), np.full(2, -1),
    )  # fmt: skip
    for side in ("right", "left"):
        assert Trim(4, side).__call__(batch).tokens.shape == (2, 4)


def test_trimming_at_the_left_spares_documents_that_count() -> None:
    documents = np.array([[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 1]], np.int32)
    weights = np.ones((2, 8), np.float32)
    weights[0, :4] = 0
    cells = np.arange(16).reshape(2, 8)
    batch = Batch(cells, cells, weights, documents, np.arange(2), np.zeros(2, np.int64), np.arange(2))
    assert Trim(1, "left")(batch).tokens.shape == (2, 8)  # the second row's first document has targets
    weights[1, :5] = 0
    assert np.array_equal(Trim(1, "left")(batch).tokens, cells[:, 4:])


def test_buckets_pad_less_and_lose_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    lengths = np.random.default_rng(0).lognormal(3, 1, 4000).astype(int).clip(1, 200).tolist()
    rows = PadRows(Store(lengths), 128)
    phases, count = [MixturePhase(0, Mixture(("talk",), (1,), 1))], {"talk": rows.count}
    folder = tmp_path_factory.mktemp("ranking")

    def share(buckets: int) -> float:
        ranking = rank_rows(rows, "length", rows.row_lengths, folder, buckets, run=32)
        order = StreamOrder(phases, count, 5, {"talk": ranking} if buckets > 1 else None)
        _, sequence, _ = order.resolve(np.arange(rows.count))
        assert sorted(sequence.tolist()) == list(range(rows.count))
        widths = rows.row_lengths(sequence[: rows.count // 8 * 8]).reshape(-1, 8)
        widest = np.minimum(-(-widths.max(axis=1) // 8) * 8, 128)
        return float(1 - widths.sum() / (8 * widest.sum()))

    shares = [share(buckets) for buckets in (1, 8, 32)]
    assert shares[0] > 0.5 > 0.3 > shares[1] > shares[2]
