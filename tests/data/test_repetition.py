"""Rows of one short pattern are found, whatever the pattern, and other text is not taken for one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.data.repetition import mostly_repeated, repeated_rows
from bessemer.data.stream import Batch

LENGTH = 64


def batch_of(*rows, weights=None):
    """A batch whose targets are these rows."""
    targets = np.array(rows, np.int64)
    ones = np.ones(targets.shape, np.float32) if weights is None else np.array(weights, np.float32)
    zeros = np.zeros(len(rows), np.int64)
    return Batch(np.roll(targets, 1, 1), targets, ones, np.zeros(targets.shape, np.int32), zeros, zeros, zeros)


def text(seed=0, length=LENGTH, vocab=500):
    return np.random.default_rng(seed).integers(0, vocab, length)


def repeated(pattern, length=LENGTH):
    return np.resize(np.array(pattern), length)


def by_hand(row, counted):
    """Some period up to 8 at which 95 % of the counted tokens equal the one before it, 32 of them at least."""
    for period in range(1, 9):
        at = [i for i in range(period, len(row)) if counted[i]]
        equal = sum(row[i] == row[i - period] for i in at)
        if equal >= max(0.95 * len(at), 32):
            return True
    return False


@given(
    pattern=st.lists(st.integers(0, 499), min_size=1, max_size=12),
    length=st.integers(64, 128),
    noise=st.floats(0, 0.2),
    masked=st.floats(0, 0.9),
    seed=st.integers(0, 1000),
)
def test_rows_are_found_as_by_hand(pattern, length, noise, masked, seed):
    rng = np.random.default_rng(seed)
    row = np.where(rng.random(length) < noise, rng.integers(0, 500, length), repeated(pattern, length))
    counted = rng.random(length) >= masked
    found = repeated_rows(batch_of(row, weights=[counted]))
    assert found.tolist() == [by_hand(row.tolist(), counted.tolist())]


@pytest.mark.parametrize("period", [1, 2, 5, 8])
def test_a_short_pattern_is_found_and_a_longer_one_is_not(period):
    rows = [repeated(range(period)), repeated(range(9)), text()]
    assert repeated_rows(batch_of(*rows)).tolist() == [True, False, False]


def test_a_long_row_is_judged_by_its_middle():
    row = text(1, 4096)
    row[1700:2400] = repeated([3, 1, 4], 700)
    assert repeated_rows(batch_of(row)).tolist() == [True]
    row = repeated([3, 1, 4], 4096)
    row[1700:2400] = text(2, 700)
    assert repeated_rows(batch_of(row)).tolist() == [False]


def test_padding_and_banned_documents_are_no_pattern():
    row = repeated([0], LENGTH)
    nothing = np.zeros((1, LENGTH))
    assert repeated_rows(batch_of(row, weights=nothing)).tolist() == [False]
    short = nothing.copy()
    short[0, :10] = 1  # a document of ten tokens and padding
    assert repeated_rows(batch_of(row, weights=short)).tolist() == [False]


def test_rows_too_short_to_tell_are_left_alone():
    assert repeated_rows(batch_of(repeated([1], 63))).tolist() == [False]
    assert repeated_rows(batch_of(repeated([1], 64))).tolist() == [True]


@pytest.mark.parametrize(
    ("bad", "rows", "share", "found"),
    [
        (1, 4, 0.25, False),  # one is nothing unusual
        (2, 8, 0.25, True),
        (2, 9, 0.25, False),
        (2, 8, 0.5, False),
        (4, 8, 0.5, True),
        (8, 8, 1.0, True),
        (2, 64, 0.0, True),
    ],
)
def test_a_step_is_a_pattern_from_two_rows_and_a_share_on(bad, rows, share, found):
    step = [repeated([7, 9]) if i < bad else text(i) for i in range(rows)]
    order = np.random.default_rng(0).permutation(rows)
    step = [step[i] for i in order]
    assert mostly_repeated([batch_of(*step)], share) == found
    half = rows // 2
    assert mostly_repeated([batch_of(*step[:half]), batch_of(*step[half:])], share) == found, "however it is cut"
