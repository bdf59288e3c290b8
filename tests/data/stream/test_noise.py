"""Noise: shares as asked for, the same on every replay, targets true, every document's weight kept."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data.stream.batches import Batch
from bessemer.data.stream.noise import Noise, make_noise
from bessemer.errors import UserError
from bessemer.spec.data import NoiseSpec

VOCAB, MASK = 1000, 7


def batch(rows: int = 8, columns: int = 64, documents: np.ndarray | None = None, **changed: Any) -> Batch:
    """Tokens 100, 101, ... so that a token tells its column; targets are the next ones."""
    tokens = np.tile(100 + np.arange(columns), (rows, 1))
    whole = Batch(
        tokens=tokens,
        targets=tokens + 1,
        weights=np.ones((rows, columns), np.float32),
        documents=np.zeros((rows, columns), np.int32) if documents is None else documents,
        positions=np.arange(rows),
        sources=np.zeros(rows, np.int64),
        sequences=np.zeros(rows, np.int64),
    )
    for name, value in changed.items():
        setattr(whole, name, value)
    return whole


def test_without_noise_nothing_changes_and_a_plain_spec_gives_none() -> None:
    plain = batch()
    same = Noise(1, VOCAB)(plain)
    assert np.array_equal(same.tokens, plain.tokens) and np.array_equal(same.weights, plain.weights)
    assert make_noise(NoiseSpec(), 1, VOCAB, {}) is None


@pytest.mark.parametrize(("share", "length"), [(0.15, 3.0), (0.15, 1.0), (0.5, 10.0), (0.6, 1.0), (0.02, 8.0)])
def test_masked_spans_have_their_share_and_their_length(share: float, length: float) -> None:
    large = batch(2000, 257)
    masked = Noise(3, VOCAB, mask_spans=share, span_length=length, mask_ids=[MASK])(large).tokens == MASK
    assert not masked[:, 0].any()
    realised = masked[:, 1:]
    mean = max(length, 1 / (1 - share))
    # Neighbours are alike over about a span, so there are fewer independent draws than columns.
    assert realised.mean() == pytest.approx(share, abs=5 * np.sqrt(share * 2 * mean / realised.size))
    for column in (1, 128, 256):  # in every column, the first and the last
        assert masked[:, column].mean() == pytest.approx(share, abs=5 * np.sqrt(share / 2000))
    inner = masked[:, 1:-1]
    begins, ends = inner[:, 1:] & ~inner[:, :-1], inner[:, :-1] & ~inner[:, 1:]
    spans = (begins.sum() + ends.sum()) / 2 + (inner[:, 0].sum() + inner[:, -1].sum()) / 2
    cut = (inner[:, 0].sum() + inner[:, -1].sum()) / 2  # each row's edge cuts a span in two
    assert inner.sum() / (spans - cut) == pytest.approx(mean, rel=0.05)


def test_replaced_and_deleted_tokens_have_their_shares_beside_masks() -> None:
    large = batch(2000, 129)
    noisy = Noise(9, VOCAB, mask_spans=0.2, replace=0.1, delete=0.25, mask_ids=[MASK])(large)
    size = 2000 * 128
    rows = np.arange(2000)[:, None]
    kept = np.zeros((2000, 129), bool)
    present = noisy.weights > 0
    # A kept column's target tells which it was.
    kept[np.broadcast_to(rows, present.shape)[present], noisy.targets[present] - 101] = True
    assert kept[:, 0].all()
    assert (~kept).sum() / size == pytest.approx(0.25, abs=0.005)
    masked = present & (noisy.tokens == MASK)
    assert masked.sum() / size == pytest.approx(0.2, abs=0.01)
    replaced = present & ~masked & (noisy.tokens != noisy.targets - 1)
    assert replaced.sum() / size == pytest.approx(0.1, abs=0.005)


def test_random_tokens_are_spread_over_all_that_are_not_special() -> None:
    special = [0, 1, 7, 8, 19]
    noisy = Noise(5, 20, replace=0.9, special_ids=[*special, 400])(batch(500, 65))
    counts = np.bincount(noisy.tokens[noisy.tokens < 20], minlength=20)
    assert counts[special].tolist() == [0] * 5
    others = np.delete(counts, special)
    assert ((others - others.mean()) ** 2 / others.mean()).sum() < 14 + 6 * 28**0.5


@settings(max_examples=60)
@given(st.integers(0, 2**64), st.integers(0, 10**6), st.floats(0, 0.3), st.floats(0, 0.3), st.floats(0, 0.3))
def test_documents_keep_their_weight_and_their_first_token(
    seed: int, first: int, mask: float, replace: float, delete: float
) -> None:
    rng = np.random.default_rng(first)
    documents = np.cumsum(rng.random((6, 40)) < 0.1, axis=1).astype(np.int32)
    documents -= documents[:, :1]
    weights = (rng.random((6, 40)) < 0.8).astype(np.float32)
    weights[2], weights[3, 30:] = 0, 0  # a row of padding, and one with padding behind
    clean = batch(6, 40, documents, weights=weights, positions=first + np.arange(6))
    clean.positions[2] = -1
    noise = Noise(seed, VOCAB, mask, 3.0, replace, delete, mask_ids=[MASK])
    noisy, before = noise(clean), clean.tokens.copy()
    assert np.array_equal(clean.tokens, before)  # the given batch is left alone
    for row in range(6):
        for number in np.unique(documents[row]):
            mine, was = noisy.documents[row] == number, documents[row] == number
            assert noisy.weights[row][mine].sum() == weights[row][was].sum()
            assert noisy.tokens[row][mine][0] == clean.tokens[row][was][0]
    learnt = noisy.weights > 0
    assert np.isin(noisy.targets[learnt], clean.targets).all()
    for row in range(6):  # what weighs was a target that weighed, and they keep their order
        mine = noisy.targets[row][learnt[row]]
        assert (np.diff(mine) > 0).all() and (weights[row][mine - 101] > 0).all()
    for name in ("tokens", "targets", "weights", "documents"):
        assert getattr(noisy, name).dtype == getattr(clean, name).dtype
        assert getattr(noisy, name).shape == (6, 40)


@given(st.permutations(range(8)), st.integers(0, 2**70))
def test_noise_depends_on_seed_and_position_only(order: list[int], seed: int) -> None:
    noise = Noise(seed, VOCAB, 0.2, 3.0, 0.2, 0.2, mask_ids=[MASK, 8, 9])
    whole = noise(batch())
    moved = batch(positions=np.array(order))
    assert np.array_equal(noise(moved).tokens, whole.tokens[order])
    assert np.array_equal(noise(whole_rows(batch(), 2, 5)).tokens, whole.tokens[2:5])
    assert not np.array_equal(Noise(seed + 1, VOCAB, 0.2, 3.0, 0.2, mask_ids=[MASK])(batch()).tokens, whole.tokens)


def whole_rows(full: Batch, start: int, stop: int) -> Batch:
    return full.part(start, stop)


def test_sentinels_follow_each_other_span_by_span() -> None:
    noisy = Noise(4, VOCAB, mask_spans=0.3, span_length=4, mask_ids=[7, 8, 9])(batch(50, 64))
    for row in noisy.tokens:
        masked = row < 100
        begins = np.flatnonzero(masked & ~np.concatenate([[False], masked[:-1]]))
        assert row[begins].tolist() == [(7, 8, 9)[k % 3] for k in range(begins.size)]
        for begin in begins:  # one sentinel for a whole span
            end = begin + np.argmin(np.append(masked[begin:], False))
            assert (row[begin:end] == row[begin]).all()


def test_golden_values() -> None:
    """Past runs replay only while these hold."""
    noisy = Noise(2024, VOCAB, 0.2, 3.0, 0.1, 0.1, mask_ids=[MASK])(batch(2, 24))
    assert noisy.tokens[0].tolist() == [
        100,
        101,
        102,
        103,
        104,
        105,
        106,
        107,
        108,
        109,
        305,
        7,
        7,
        7,
        7,
        7,
        7,
        7,
        118,
        119,
        120,
        122,
        7,
        0,
    ]
    assert noisy.tokens[1].tolist() == [
        100,
        101,
        102,
        103,
        104,
        105,
        210,
        109,
        110,
        111,
        112,
        113,
        715,
        275,
        116,
        117,
        119,
        121,
        122,
        309,
        0,
        0,
        0,
        0,
    ]


def test_mistakes_are_told() -> None:
    with pytest.raises(UserError, match=r"no special token '<mask>' \(it has <eos>\)"):
        make_noise(NoiseSpec(mask_spans=0.1, mask=["<mask>"]), 1, VOCAB, {"<eos>": 0})
    with pytest.raises(UserError, match="all of the 2 tokens are special"):
        Noise(1, 2, replace=0.1, special_ids=[0, 1])
    noise = make_noise(NoiseSpec(mask_spans=0.1, mask=["<mask>"], replace=0.1), 1, VOCAB, {"<mask>": 5, "<eos>": 0})
    assert noise is not None and noise.mask_ids == (5,) and noise.special_ids == (0, 5)
    assert noise.identity["noise"]["mask_spans"] == 0.1
