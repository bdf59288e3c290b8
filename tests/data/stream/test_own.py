"""A user's datasets: a map-style one replays as any source does; an iterable goes forwards and says what it cannot."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.order import BatchPhase, MixturePhase, Segment, StepPositions, StreamOrder
from bessemer.data.stream.rows import PADDING, Rows
from bessemer.data.stream.user_dataset import IterableStream, UserDatasetRows, is_map_style
from bessemer.errors import UserError
from bessemer.spec.mixture import Mixture

EOS, T = 0, 8


class Letters:
    """A tokenizer of one id per character."""

    eos_id, vocab_size, fingerprint = EOS, 256, "letters"

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[ord(letter) for letter in text] for text in texts]


class Listed:
    """A map-style dataset that counts how often it is asked."""

    def __init__(self, items: list[Any], fingerprint: Any = None) -> None:
        self.items, self.asked = items, 0
        if fingerprint is not None:
            self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return self.items[index]


def expected_row(item: Any) -> tuple[list[int], list[int], list[float]]:
    """(inputs, targets, weights) of an item, by the words of the docstring."""
    if isinstance(item, str):
        ids, counts = [EOS, *map(ord, item), EOS], [1.0] * (len(item) + 2)
    elif isinstance(item, dict):
        ids, counts = list(item["tokens"]), [float(bool(c)) for c in item["mask"]]
    else:
        ids, counts = list(item), [1.0] * len(item)
    ids, counts = ids[: T + 1], counts[: T + 1]
    return ids[:-1], ids[1:], counts[1:]


ids = st.lists(st.integers(0, 255), max_size=12)
masked = st.lists(st.tuples(st.integers(0, 255), st.booleans()), max_size=12).map(
    lambda pairs: {"tokens": [token for token, _ in pairs], "mask": [keep for _, keep in pairs]}
)
items = st.lists(st.text("abc", max_size=12) | ids | ids.map(np.array) | masked, min_size=1, max_size=20)


@settings(max_examples=80)
@given(items, st.randoms())
def test_a_row_is_one_item(listed: list[Any], shuffler: Any) -> None:
    rows = UserDatasetRows(
        Listed([np.array(i, np.int64) if isinstance(i, np.ndarray) else i for i in listed]), Letters(), T
    )
    assert isinstance(rows, Rows) and rows.count == len(listed)
    picks = [shuffler.randrange(len(listed)) for _ in range(9)]
    block = rows.assemble(np.array(picks))
    assert block.weights is not None
    for r, k in enumerate(picks):
        inputs, targets, weights = expected_row(listed[k])
        assert block.tokens[r].tolist() == inputs + [0] * (T - len(inputs))
        assert block.targets[r].tolist() == targets + [0] * (T - len(inputs))
        assert block.weights[r].tolist() == weights + [0.0] * (T - len(inputs))
        mine = np.flatnonzero(block.spans.row == r)
        assert block.spans.length[mine].sum() == T
        assert block.spans.weight[mine].sum() == sum(weights)
        assert [d for d in block.spans.document[mine] if d != PADDING] == ([k] if inputs else [])
    assert (block.tokens.dtype, block.weights.dtype) == (np.int64, np.float32)


def map_stream(dataset: Any, transforms: tuple = ()) -> BatchStream:
    rows = UserDatasetRows(dataset, Letters(), T)
    order = StreamOrder([MixturePhase(0, Mixture(("own",), (1,), 1))], {"own": rows.count}, 3)
    return BatchStream({"own": rows}, order, T, StepPositions([BatchPhase(0, 4)]))


def test_any_step_of_a_map_style_dataset_replays_and_is_found_again() -> None:
    texts = [f"text {k}" for k in range(30)]
    walked = map_stream(Listed(texts))
    reached = [walked.batch(step) for step in range(12)]
    again = map_stream(Listed(texts)).batch(7)
    assert np.array_equal(again.tokens, reached[7].tokens)
    assert walked.step_count(7) == reached[7].count
    for share in walked.origins(7):
        assert share.file == "dataset Listed" and texts[share.document][:3] == "tex"
        assert (share.row, share.document_id) == (share.document + 1, f"item {share.document}")


def test_items_are_read_once_while_they_are_at_hand() -> None:
    dataset = Listed([f"text {k}" for k in range(30)], "v1")
    rows = UserDatasetRows(dataset, Letters(), T)
    assert dataset.asked == 0
    rows.assemble(np.array([3, 4, 3]))
    rows.spans(np.array([4, 3]))
    assert dataset.asked == 2


def test_the_fingerprint_is_the_datasets_own_or_of_a_sample() -> None:
    texts = [f"text {k}" for k in range(500)]
    one = UserDatasetRows(Listed(texts), Letters(), T)
    assert one.fingerprint == UserDatasetRows(Listed(list(texts)), Letters(), T).fingerprint
    assert one.fingerprint != UserDatasetRows(Listed(texts[:-1]), Letters(), T).fingerprint
    assert one.fingerprint != UserDatasetRows(Listed(["other", *texts[1:]]), Letters(), T).fingerprint
    own = [UserDatasetRows(Listed(texts, given), Letters(), T).fingerprint for given in ("a", "b", lambda: "a")]
    assert own[0] == own[2] != own[1]


class Failing(Listed):
    def __getitem__(self, index: int) -> Any:
        raise KeyError(index)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Listed([]), "its length is 0"),
        (Listed([1.5]), r"\[0\]: a float of float64 in 0 dimensions; return a text"),
        (Listed([[[1, 2]]]), "in 2 dimensions"),
        (Listed([[1.0]]), "of float64 in 1 dim"),
        (Listed([{"input_ids": [1]}]), "a mapping with 'input_ids'"),
        (Listed([[5, 256]]), "token id 256 lies outside the vocabulary of 256"),
        (Listed([[-1]]), "token id -1"),
        (Listed([{"tokens": [1, 2], "mask": [1]}]), "2 tokens and a mask of 1"),
        (Failing(["x"]), r"dataset Failing\[0\] failed: KeyError: 0"),
    ],
)
def test_a_wrong_item_is_told(dataset: Listed, message: str) -> None:
    with pytest.raises(UserError, match=message):
        UserDatasetRows(dataset, Letters(), T)


def test_kinds_of_datasets() -> None:
    assert is_map_style(Listed([])) and is_map_style(["a"])
    assert not is_map_style(iter(["a"])) and not is_map_style(Passes([]))


class Passes:
    """Can be iterated again and again."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Remembers(Passes):
    """Knows where it is."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.items):
            self.at += 1
            yield self.items[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def forward(dataset: Any, rows: int = 3, segments: tuple = (Segment(0, 0),)) -> IterableStream:
    return IterableStream(dataset, Letters(), T, StepPositions([BatchPhase(0, rows)], segments))


def flat(listed: list[Any]) -> tuple[list[int], list[float], list[int]]:
    """(ids, weights, items) of one pass, items end to end."""
    tokens: list[int] = []
    counts: list[float] = []
    owners: list[int] = []
    for k, item in enumerate(listed):
        mine = [*map(ord, item)] if isinstance(item, str) else list(item["tokens"] if isinstance(item, dict) else item)
        weights = [float(c) for c in item["mask"]] if isinstance(item, dict) else [1.0] * len(mine)
        if isinstance(item, str) or not mine or mine[-1] != EOS:
            mine, weights = [*mine, EOS], [*weights, 1.0]
        tokens += mine
        counts += weights
        owners += [k] * len(mine)
    return tokens, counts, owners


@settings(max_examples=60)
@given(items, st.integers(1, 4), st.integers(1, 3))
def test_an_iterable_is_laid_end_to_end(listed: list[Any], rows: int, world: int) -> None:
    stream = forward(Passes(listed), rows)
    tokens, counts, owners = flat(listed)
    needed = 6 * rows * T + 1
    passes = -(-needed // len(tokens))
    tokens, counts = [EOS, *tokens * passes], [1.0, *counts * passes]
    owners = [-1] + [k * len(listed) + owner for k in range(passes) for owner in owners]
    for step in range(6):
        count = stream.step_count(step)
        ranks = [stream.micro_batches(step, 2, rank, world) for rank in range(world)]
        every = [batch for batches in ranks for batch in batches]
        assert sum(batch.count for batch in every) == count
        for batch in every:
            for r, position in enumerate(batch.positions.tolist()):
                if position < 0:
                    assert not batch.weights[r].any()
                    continue
                at = position * T
                assert batch.tokens[r].tolist() == tokens[at : at + T]
                assert batch.targets[r].tolist() == tokens[at + 1 : at + T + 1]
                assert batch.weights[r].tolist() == counts[at + 1 : at + T + 1]
                mine = owners[at + 1 : at + T + 1]
                numbers = list(dict.fromkeys(mine))
                assert batch.documents[r].tolist() == [numbers.index(owner) for owner in mine]
                located = [(n, o.document) for row, n, o in stream.locate(batch) if row == r]
                assert located == list(enumerate(numbers))
    assert sum(share.tokens for share in stream.origins(5)) == rows * T


def test_what_has_passed_is_refused() -> None:
    stream = forward(Passes(["some text here"]))
    for step in range(20):
        stream.batch(step)
    stream.batch(15)  # the latest steps are at hand
    with pytest.raises(UserError, match=r"step 2 \(row 6 of the data\) has passed; not replayable"):
        stream.batch(2)
    assert stream.locate(forward(Passes(["a"])).batch(0)) == []
    with pytest.raises(UserError, match="checkpoint of step 7 has no state of the iterable"):
        forward(Passes(["a"])).resume(7, None)
    assert stream.state(20) is None
    stream.resume(0, None)


def test_a_skip_reads_on_behind_it() -> None:
    text = ["".join(chr(65 + k % 26) for k in range(500))]
    plain, skipping = forward(Passes(text)), forward(Passes(text))
    expected = [plain.batch(step) for step in range(12)]
    for step in range(3):
        skipping.batch(step)
    moved = skipping.replace(StepPositions([BatchPhase(0, 3)], [Segment(0, 0), Segment(2, 30)]))
    assert moved.fingerprint == skipping.fingerprint
    assert np.array_equal(moved.batch(2).tokens, expected[10].tokens)


@given(st.integers(0, 12), st.integers(0, 3), items)
@example(1, 0, [""] * 16)  # saved when a pass has given its last item and not yet said so
def test_an_iterable_with_a_state_resumes_exactly(at: int, ahead: int, listed: list[Any]) -> None:
    whole = forward(Remembers(listed))
    expected = [whole.batch(step) for step in range(at + 4)]
    stream = forward(Remembers(listed))
    for step in range(at + ahead):  # a prefetch reads on while the step is saved
        stream.batch(step)
    state = stream.state(at)
    assert state is not None
    again = forward(Remembers(listed))
    again.resume(at, json.loads(state))
    for step in range(at, at + 4):
        one, other = again.batch(step), expected[step]
        assert same(one, other)
        assert again.locate(one) == whole.locate(other)


def same(one: Batch, other: Batch) -> bool:
    return all(np.array_equal(array, getattr(other, name)) for name, array in vars(one).items())


@pytest.mark.parametrize("count", [1, 15, 16, 17, 32])
def test_a_pass_may_end_anywhere(count: int) -> None:
    """Items are read by sixteen."""
    listed = [f"{k:02d}" for k in range(count)]
    stream = forward(Passes(listed))
    tokens = [EOS, *flat(listed)[0] * 200]
    for step in range(12):
        found = stream.batch(step)
        for r, position in enumerate(found.positions.tolist()):
            assert found.targets[r].tolist() == tokens[position * T + 1 : position * T + T + 1]


def test_an_iterable_that_ends_or_cannot_go_on_is_told() -> None:
    once = forward(iter(["some text"] * 10))
    for step in range(4):
        once.batch(step)
    with pytest.raises(UserError, match=r"ended after 10 items \(12 rows of 8\): lower the budget"):
        once.batch(4)
    with pytest.raises(UserError, match="ended after 0 items"):
        forward(Passes([])).batch(0)
    with pytest.raises(UserError, match="has no load_state_dict"):
        forward(Passes(["a"])).resume(3, "{}")

    class Odd(Remembers):
        def state_dict(self) -> Any:
            return {"at": {1, 2}}

    with pytest.raises(UserError, match="what JSON cannot"):
        forward(Odd(["a"])).batch(0)
    with pytest.raises(UserError, match="dataset Passes item 1: a float"):
        forward(Passes(["a", 1.5])).batch(0)
