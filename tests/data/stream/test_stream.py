"""Batches are the same for every world and from any start; documents and origins are as a scan finds them."""

import json
from collections import defaultdict
from collections.abc import Sequence
from copy import copy as shallow_copy
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.order import BatchPhase, MixturePhase, Segment, StepPositions, StreamOrder
from bessemer.data.stream.rows import PADDING, ConcatRows, RowBlock, Spans, Transform, sequence_count
from bessemer.errors import UserError
from bessemer.spec.mixture import quantise

T = 16
WORLDS = [1, 2, 3, 4, 8]


@dataclass(frozen=True)
class Origin:
    file: str
    row: int
    document_id: str
    document: int
    start: int
    stop: int


class Store:
    """Documents in memory. Token values are unique, so a token tells where it came from; `mask` says what counts."""

    cache = None

    def __init__(self, name: str, lengths: list[int], first_token: int = 0, mask: np.ndarray | None = None) -> None:
        self.name, self.fingerprint = name, f"{name}-{lengths}"
        self.starts = np.cumsum([0, *lengths])
        self.tokens, self.documents = int(self.starts[-1]), len(lengths)
        self.data = (first_token + np.arange(self.tokens)).astype(np.uint32)
        self.mask, self.masked, self.fields = mask, mask is not None, {}
        self.gathers = 0

    def gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        self.gathers += 1
        return self.data[starts[:, None] + np.arange(length)]

    def runs(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        self.gathers += 1
        pieces = [self.data[s : s + n] for s, n in zip(starts, lengths, strict=True)]
        return np.concatenate([*pieces, np.empty(0, np.uint32)])

    def weights(self, starts: np.ndarray, length: int) -> np.ndarray | None:
        if self.mask is None:
            return None
        return self.mask[starts[:, None] + np.arange(length)].astype(np.float32)

    def targets_before(self, positions: np.ndarray) -> np.ndarray:
        mask = np.ones(self.tokens) if self.mask is None else self.mask
        return np.cumsum([0, *mask])[positions].astype(np.int64)

    def document_of(self, positions: np.ndarray) -> np.ndarray:
        assert positions.min(initial=0) >= 0 and positions.max(initial=0) < self.tokens
        return np.searchsorted(self.starts, positions, side="right") - 1

    def documents_in(self, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, ...]:
        first, last = self.document_of(starts), self.document_of(starts + lengths - 1)
        inner = [self.starts[a + 1 : b + 1] for a, b in zip(first, last, strict=True)]
        return first, last - first, np.concatenate([*inner, np.empty(0, np.int64)])

    def extents(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.starts[documents], self.starts[documents + 1]

    def edges(self, first: int, stop: int) -> np.ndarray:
        return self.starts[first : stop + 1]

    def origin(self, position: int) -> Origin:
        return self.origin_of_document(int(self.document_of(np.array([position]))[0]))

    def origin_of_document(self, k: int) -> Origin:
        start, stop = int(self.starts[k]), int(self.starts[k + 1])
        return Origin(f"{self.name}.jsonl", 10 + k, f"{self.name}/{k}", k, start, stop)


def make(
    lengths: dict[str, list[int]],
    rows: int | list[BatchPhase] = 6,
    segments: list[Segment] | None = None,
    banned: frozenset[tuple[str, int]] = frozenset(),
    seed: int = 3,
    length: int = T,
    masked: frozenset[str] = frozenset(),
    transforms: Sequence[Transform] = (),
) -> BatchStream:
    stores = {
        name: Store(name, sizes, k * 10**6, np.arange(sum(sizes)) % 3 // 2 if name in masked else None)
        for k, (name, sizes) in enumerate(lengths.items())
    }
    phases = [
        MixturePhase(0, quantise({name: k + 1 for k, name in enumerate(stores)})),
        MixturePhase(37, quantise(dict.fromkeys(stores, 1.0))),
    ]
    order = StreamOrder(phases, {name: sequence_count(store.tokens, length) for name, store in stores.items()}, seed)
    steps = StepPositions([BatchPhase(0, rows)] if isinstance(rows, int) else rows, segments or [Segment(0, 0)])
    return BatchStream(stores, order, length, steps, banned, transforms)


def example(**settings: object) -> BatchStream:
    rng = np.random.default_rng(0)
    lengths = {
        "web": rng.integers(1, 40, 60).tolist(),
        "code": rng.integers(30, 90, 20).tolist(),
        "one": [9, T - 8],  # a single sequence
        "lines": [2] * 30,
    }
    return make(lengths, **settings)


def same(one: Batch, other: Batch) -> bool:
    return all(np.array_equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(Batch))


def joined(batches: list[Batch]) -> Batch:
    """The batches' rows in one, without padding."""
    arrays = {
        f.name: np.concatenate([getattr(batch, f.name) for batch in batches])
        for f in fields(Batch)
        if f.name != "fields"
    }
    return Batch(**{name: array[arrays["positions"] >= 0] for name, array in arrays.items()})


def targets_by_scan(stream: BatchStream, batch: Batch) -> list[list[tuple[str, Origin]]]:
    """(source, origin) of every target of every real row, one token at a time."""
    return [
        [
            (
                stream.names[source],
                stream.sources[stream.names[source]].store.origin(int(sequence) * stream.sequence_length + t + 1),
            )
            for t in range(stream.sequence_length)
        ]
        for source, sequence in zip(batch.sources, batch.sequences, strict=True)
    ]


documents = st.lists(st.integers(1, 50), min_size=1, max_size=30).filter(lambda sizes: sum(sizes) > T)


@settings(max_examples=40)
@given(
    st.dictionaries(st.sampled_from(["web", "code", "maths"]), documents, min_size=1),
    st.integers(0, 40),
    st.sampled_from([1, 2, 3, 7, 16]),
)
def test_a_batch_is_what_a_plain_scan_gives(lengths: dict[str, list[int]], step: int, length: int) -> None:
    stream = make(lengths, length=length)
    batch = stream.batch(step)
    source, sequence, _ = stream.order.resolve(batch.positions)
    assert batch.sources.tolist() == source.tolist()
    assert batch.sequences.tolist() == sequence.tolist()
    expected_locate = []
    for row, scan in enumerate(targets_by_scan(stream, batch)):
        data = stream.sources[stream.names[source[row]]].store.data[sequence[row] * length :][: length + 1]
        assert np.array_equal(batch.tokens[row], data[:-1])
        assert np.array_equal(batch.targets[row], data[1:])
        order_of_documents = list(dict.fromkeys(scan))
        assert batch.documents[row].tolist() == [order_of_documents.index(target) for target in scan]
        expected_locate += [(row, number, origin) for number, (_, origin) in enumerate(order_of_documents)]
    assert stream.locate(batch) == expected_locate
    assert batch.single_document == (len(expected_locate) == 6)
    assert (batch.tokens.dtype, batch.targets.dtype) == (np.int64, np.int64)
    assert (batch.weights.dtype, batch.documents.dtype) == (np.float32, np.int32)


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(["web", "code", "maths"]), documents, min_size=1), st.integers(0, 40))
def test_origins_are_what_a_plain_scan_gives(lengths: dict[str, list[int]], step: int) -> None:
    stream = make(lengths)
    batch = stream.batch(step)
    tokens: dict[tuple[str, Origin], int] = defaultdict(int)
    rows: dict[tuple[str, Origin], set[int]] = defaultdict(set)
    for position, scan in zip(batch.positions.tolist(), targets_by_scan(stream, batch), strict=True):
        for target in scan:
            tokens[target] += 1
            rows[target].add(position)
    shares = stream.origins(step)
    found = {(s.source, s.file, s.row, s.document_id, s.document, s.tokens, tuple(s.rows)) for s in shares}
    assert found == {
        (source, o.file, o.row, o.document_id, o.document, count, tuple(sorted(rows[source, o])))
        for (source, o), count in tokens.items()
    }
    assert len(shares) == len(tokens)
    assert [s.tokens for s in shares] == sorted(tokens.values(), reverse=True)


def test_the_eos_of_a_document_opens_the_next_as_an_input() -> None:
    stream = make({"web": [5, 5, 7]}, rows=1)
    batch = stream.batch(0)  # the only sequence: tokens 0 to 15, targets 1 to 16
    assert batch.documents[0].tolist() == [0] * 4 + [1] * 5 + [2] * 7
    assert not batch.single_document
    assert make({"web": [1, T]}, rows=1).batch(0).single_document  # the boundary lies before the first target


@given(st.integers(0, 60), st.sampled_from([1, 5, 6, 7, 16]))
def test_every_world_size_gives_the_same_global_batch(step: int, rows: int) -> None:
    stream = example(rows=rows)
    whole = stream.batch(step)
    for world in WORLDS:
        ranks = [stream.batch(step, rank, world) for rank in range(world)]
        assert {batch.tokens.shape for batch in ranks} == {(-(-rows // world), T)}
        assert same(joined(ranks), whole)
        assert sum(batch.count for batch in ranks) == stream.step_count(step) == rows * T


@given(st.integers(0, 60), st.sampled_from(WORLDS), st.integers(1, 9))
def test_micro_batches_have_one_shape_and_one_number(step: int, world: int, micro_rows: int) -> None:
    stream = example(rows=11)
    per_rank = [stream.micro_batches(step, micro_rows, rank, world) for rank in range(world)]
    share = -(-11 // world)
    assert {len(batches) for batches in per_rank} == {-(-share // micro_rows)}
    every = [batch for batches in per_rank for batch in batches]
    assert {batch.tokens.shape for batch in every} == {(micro_rows, T)}
    assert same(joined(every), stream.batch(step))
    for batch in every:
        padding = batch.positions < 0
        assert not batch.weights[padding].any() and not batch.tokens[padding].any()
        assert (batch.sources[padding] == -1).all() and (batch.sequences[padding] == -1).all()
        assert batch.weights[~padding].all()
        assert {row for row, _, _ in stream.locate(batch)} == set(np.flatnonzero(~padding).tolist())


def test_rows_that_divide_are_not_padded() -> None:
    batches = example(rows=12).micro_batches(0, 3, 1, 2)
    assert len(batches) == 2 and all((batch.positions >= 0).all() for batch in batches)


def test_a_random_step_equals_the_step_reached_from_the_start() -> None:
    ramp = [BatchPhase(0, 3), BatchPhase(40, 5), BatchPhase(90, 64)]
    segments = [Segment(0, 0), Segment(70, 5000)]
    walked = example(rows=ramp, segments=segments)
    reached = [walked.batch(step) for step in range(200)]
    for step in (150, 0, 39, 40, 199, 70, 69):
        assert same(example(rows=ramp, segments=segments).batch(step), reached[step])


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), max_size=4),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10**6)), max_size=4),
)
def test_steps_are_closed_form(ramp: list[tuple[int, int]], skips: list[tuple[int, int]]) -> None:
    phases, segments = [BatchPhase(0, 4)], [Segment(0, 0)]
    for gap, rows in ramp:
        phases.append(BatchPhase(phases[-1].from_step + gap, rows))
    for gap, position in skips:
        segments.append(Segment(segments[-1].from_step + gap, position))
    steps = StepPositions(phases, segments)
    position, rows = 0, 0
    for step in range(150):
        position = next((s.position for s in reversed(segments) if s.from_step == step), position + rows)
        rows = next((p.rows for p in reversed(phases) if p.from_step <= step), 0)
        assert (steps.position(step), steps.rows(step)) == (position, rows)
        assert steps.range(step) == (position, position + rows)


def test_a_skip_moves_what_follows_and_nothing_before() -> None:
    steps = StepPositions([BatchPhase(0, 4)])
    skipped = steps.skip(10, steps.position(15))
    assert [skipped.position(step) for step in (9, 10, 11)] == [36, 60, 64]
    again = skipped.skip(8, 100)  # a rollback past the first one undoes it
    assert again.segments == (Segment(0, 0), Segment(8, 100))
    entries = json.loads(json.dumps([segment.to_json() for segment in again.segments]))
    assert tuple(Segment.from_json(entry) for entry in entries) == again.segments


def test_steps_refuse_nonsense() -> None:
    for phases in ([], [BatchPhase(1, 4)], [BatchPhase(0, 4), BatchPhase(0, 4)], [BatchPhase(0, 0)]):
        with pytest.raises(UserError):
            StepPositions(phases)
    with pytest.raises(ValueError, match="rising"):
        StepPositions([BatchPhase(0, 4)], [Segment(0, 0), Segment(5, 1), Segment(3, 1)])
    with pytest.raises(ValueError, match="negative"):
        StepPositions([BatchPhase(0, 4)]).position(-1)
    with pytest.raises(ValueError, match="outside a world"):
        example().rows(0, 2, 2)


@given(st.sets(st.tuples(st.sampled_from(["web", "code", "lines"]), st.integers(0, 20))), st.integers(0, 30))
def test_banned_documents_weigh_nothing_and_keep_their_place(banned: set[tuple[str, int]], step: int) -> None:
    stream, plain = example(banned=frozenset(banned)), example()
    batch, unbanned = stream.batch(step), plain.batch(step)
    expected = [
        [0.0 if (source, origin.document) in banned else 1.0 for source, origin in scan]
        for scan in targets_by_scan(stream, batch)
    ]
    assert batch.weights.tolist() == expected
    assert stream.step_count(step) == batch.count == np.sum(expected)
    assert np.array_equal(batch.tokens, unbanned.tokens) and np.array_equal(batch.documents, unbanned.documents)
    assert stream.fingerprint == plain.fingerprint
    assert sum(b.count for b in stream.micro_batches(step, 4, 1, 2)) == stream.batch(step, 1, 2).count


documents = st.tuples(st.sampled_from(["web", "code", "lines"]), st.integers(0, 20))


@given(st.dictionaries(documents, st.integers(0, 200)), st.integers(0, 30))
def test_a_ban_holds_from_its_position_on_and_changes_nothing_before(
    banned: dict[tuple[str, int], int], step: int
) -> None:
    """A document that is convicted at step 400 was trained on at step 100, and a replay of step 100 must show it."""
    stream = example().replace(banned=banned)
    batch = stream.batch(step)
    expected = [
        [0.0 if position >= banned.get((source, origin.document), 10**9) else 1.0 for source, origin in scan]
        for position, scan in zip(batch.positions.tolist(), targets_by_scan(stream, batch), strict=True)
    ]
    assert batch.weights.tolist() == expected
    assert stream.step_count(step) == batch.count == np.sum(expected)
    parts = [part for rank in range(3) for part in stream.micro_batches(step, 2, rank, 3)]
    assert sum(part.count for part in parts) == batch.count
    assert stream.fingerprint == example().fingerprint


def test_a_ban_leaves_every_step_before_it_as_it_was() -> None:
    plain = example()
    position = plain.steps.position(12)
    banned = {(name, document): position for name in plain.names for document in range(1000)}
    stream = plain.replace(banned=banned)
    assert all(same(stream.batch(step), plain.batch(step)) for step in range(12))
    assert all(stream.step_count(step) == 0 for step in range(12, 20))


def test_bans_are_kept_by_name_and_survive_another_replace() -> None:
    stream = example().replace(banned={("web", 3): 40, ("code", 0): 7})
    again = stream.replace(steps=stream.steps.skip(4, 600))
    assert again.banned == {("web", 3): 40, ("code", 0): 7}
    assert again.replace(banned={("web", 3)}).banned == {("web", 3): 0}
    assert again.replace(banned={}).banned == {}


@given(
    st.sets(st.sampled_from(["web", "code", "one", "lines"])),
    st.sets(st.tuples(st.sampled_from(["web", "code"]), st.integers(0, 20))),
    st.integers(0, 30),
)
def test_a_mask_is_of_the_targets_and_counts_exactly(masked: set[str], banned: set[tuple[str, int]], step: int) -> None:
    stream = example(masked=frozenset(masked), banned=frozenset(banned))
    batch = stream.batch(step)
    expected = []
    for source, sequence in zip(batch.sources, batch.sequences, strict=True):
        name = stream.names[source]
        store = stream.sources[name].store
        places = sequence * T + 1 + np.arange(T)
        kept = np.ones(T) if store.mask is None else store.mask[places]
        expected.append(kept * [(name, int(d)) not in banned for d in store.document_of(places)])
    assert np.array_equal(batch.weights, expected)
    assert stream.step_count(step) == batch.count == np.sum(expected)
    assert np.array_equal(batch.tokens, example().batch(step).tokens)
    assert sum(b.count for b in stream.micro_batches(step, 4, 1, 2)) == stream.batch(step, 1, 2).count


def test_padding_behind_a_document_shares_its_number() -> None:
    """Rows: document, padding; padding, document; document, document, padding; padding alone; document."""
    column = np.array([0, 5, 0, 5, 0, 3, 7, 0, 0])
    document = np.array([4, PADDING, PADDING, 4, 4, 5, PADDING, PADDING, 9])
    row = np.array([0, 0, 1, 1, 2, 2, 2, 3, 4])
    spans = Spans(row, column, np.ones(9, int), document, np.ones(9, int))
    assert spans.number.tolist() == [0, 0, 0, 1, 0, 1, 1, 0, 0]


class Shift:
    """A transform: adds to every token."""

    def __init__(self, by: int) -> None:
        self.by = by
        self.identity = {f"shift {by}": by} if by else {}

    def __call__(self, batch: Batch) -> Batch:
        assert batch.tokens.shape[0] in (2, 6)
        return replace(batch, tokens=2 * batch.tokens + self.by)


def test_transforms_change_every_micro_batch_in_turn() -> None:
    plain, changed = example(), example(transforms=[Shift(1), Shift(10)])
    for made, expected in (
        ([changed.batch(3)], [plain.batch(3)]),
        (changed.micro_batches(3, 2), plain.micro_batches(3, 2)),
    ):
        for one, other in zip(made, expected, strict=True):
            assert np.array_equal(one.tokens, 4 * other.tokens + 12)
            assert np.array_equal(one.targets, other.targets)
    assert changed.locate(changed.batch(3)) == plain.locate(plain.batch(3))
    again = changed.replace(banned={("web", 3)})
    assert np.array_equal(again.batch(3).tokens, changed.batch(3).tokens)
    assert again.fingerprint == changed.fingerprint
    assert changed.identity == {**plain.identity, "shift 1": 1, "shift 10": 10}
    assert example(transforms=[Shift(0)]).fingerprint == plain.fingerprint


def test_sources_may_be_packed_each_in_its_own_way() -> None:
    class Reversed(ConcatRows):
        packing = "reversed"

        def spans(self, sequences: np.ndarray) -> Spans:
            return super().spans(self.count - 1 - sequences)

        def assemble(self, sequences: np.ndarray) -> RowBlock:
            return super().assemble(self.count - 1 - sequences)

    plain = example()
    sources = {**plain.sources, "web": Reversed(plain.sources["web"].store, T)}
    mixed = BatchStream(sources, plain.order, T, plain.steps)
    assert mixed.identity["packing"] == {"code": "concat", "lines": "concat", "one": "concat", "web": "reversed"}
    assert mixed.fingerprint != plain.fingerprint
    web = mixed.names.index("web")
    for step in range(5):
        batch, other = mixed.batch(step), plain.batch(step)
        rows = batch.sources != web
        assert np.array_equal(batch.tokens[rows], other.tokens[rows])
        for row in np.flatnonzero(~rows):
            start = (sources["web"].count - 1 - batch.sequences[row]) * T
            assert np.array_equal(batch.tokens[row], sources["web"].store.data[start : start + T])
    with pytest.raises(ValueError, match="'web', which has"):
        BatchStream({**sources, "web": ConcatRows(sources["web"].store, T + 1)}, plain.order, T, plain.steps)


def test_remote_rows_of_a_rank_are_prefetched() -> None:
    stream = example()
    stream.prefetch(3)  # nothing to do for local stores
    requested = []

    class Remote(ConcatRows):
        def prefetch(self, sequences: np.ndarray) -> None:
            requested.extend(sequences.tolist())

    remote = shallow_copy(stream.sources["web"].store)
    remote.cache = object()
    sources = {**stream.sources, "web": Remote(remote, T)}
    batch = stream.batch(3, 1, 2)
    BatchStream(sources, stream.order, T, stream.steps).prefetch(3, 1, 2)
    assert requested == batch.sequences[batch.sources == stream.names.index("web")].tolist()


def test_the_count_of_a_step_reads_no_tokens() -> None:
    stream = example(banned=frozenset({("web", 1)}), masked=frozenset({"code"}))
    stream.step_count(3), stream.origins(3)
    assert sum(rows.store.gathers for rows in stream.sources.values()) == 0


def test_the_fingerprint_covers_what_decides_the_tokens_and_nothing_else() -> None:
    one = example()
    assert len(one.fingerprint) == 64 and int(one.fingerprint, 16)
    assert example().fingerprint == one.fingerprint
    assert example(rows=9, segments=[Segment(0, 50)]).fingerprint == one.fingerprint
    assert one.replace(steps=StepPositions([BatchPhase(0, 2)])).fingerprint == one.fingerprint
    others = [example(seed=4), example(length=T - 1)]
    lengths = {name: np.diff(rows.store.starts).tolist() for name, rows in one.sources.items()}
    others += [make({**lengths, "web": [7, *lengths["web"]]}), make(dict(reversed(lengths.items())))]
    assert one.fingerprint not in {other.fingerprint for other in others}
    golden = make({"web": [20, 30], "code": [50]}, seed=1)
    assert golden.fingerprint == "3ca56826a981687ad391e1ec786d808344b4d17ee00b2a75f9e2b245e7955739"


def test_a_replaced_stream_reads_by_its_own_steps() -> None:
    stream = example()
    moved = stream.replace(steps=stream.steps.skip(4, 600), banned={("web", 3)})
    assert same(stream.batch(3), example().batch(3))
    assert moved.rows(4).tolist() == list(range(600, 606))
    assert moved.banned == {("web", 3): 0} and moved.replace().banned == moved.banned


def test_a_store_of_another_size_is_refused() -> None:
    stream = example()
    with pytest.raises(ValueError, match="'one'"):
        BatchStream({**stream.sources, "one": Store("one", [100])}, stream.order, T, stream.steps)


def test_batches_that_are_kept_are_not_overwritten() -> None:
    """Their memory is used again, but not before they are gone."""
    rng = np.random.default_rng(0)
    stream = make({"web": rng.integers(1, 900, 200).tolist()}, rows=64, length=512)
    kept = [stream.batch(step) for step in range(3)] + stream.micro_batches(3, 16)[1:2]
    copies = [[array.copy() for array in vars(batch).values()] for batch in kept]
    for step in range(4, 12):
        stream.batch(step)
        stream.micro_batches(step, 16)
    for batch, copy in zip(kept, copies, strict=True):
        assert all(np.array_equal(*pair) for pair in zip(vars(batch).values(), copy, strict=True))
