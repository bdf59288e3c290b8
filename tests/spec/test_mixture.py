"""Weights become counts: every source present, every share close, the block no larger than that needs."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.spec.mixture import MAX_BLOCK, Mixture, apportion, quantise

weights = st.dictionaries(st.text(min_size=1, max_size=4), st.floats(1e-7, 1e7), min_size=1, max_size=12)


def worst_error(mixture: Mixture, asked: dict[str, float]) -> float:
    total = math.fsum(asked.values())
    return max(abs(mixture.shares[name] / (weight / total) - 1) for name, weight in asked.items())


@given(weights)
def test_every_source_is_present_and_close(asked: dict[str, float]) -> None:
    mixture = quantise(asked)
    assert mixture.names == tuple(asked)
    assert min(mixture.counts) >= 1
    assert sum(mixture.counts) == mixture.block
    assert mixture.block.bit_count() == 1
    assert mixture.block == MAX_BLOCK or worst_error(mixture, asked) <= 0.01 + 1e-9


@given(weights)
def test_counts_are_within_one_of_the_quota_unless_tiny_sources_are_lifted(asked: dict[str, float]) -> None:
    mixture = quantise(asked)
    total = math.fsum(asked.values())
    quotas = [weight / total * mixture.block for weight in asked.values()]
    if min(quotas) >= 1:
        assert all(abs(count - quota) < 1 + 1e-6 for count, quota in zip(mixture.counts, quotas, strict=True))


@given(weights, st.randoms(use_true_random=False), st.sampled_from([0.5, 4.0, 1024.0]))
def test_order_and_scale_of_the_weights_do_not_matter(
    asked: dict[str, float], shuffler: random.Random, scale: float
) -> None:
    names = list(asked)
    shuffler.shuffle(names)
    mixture, other = quantise(asked), quantise({name: asked[name] * scale for name in names})
    assert other.shares == mixture.shares and other.block == mixture.block


@pytest.mark.parametrize(
    ("asked", "counts"),
    [
        ({"only": 0.3}, (1,)),
        ({"a": 1, "b": 1}, (1, 1)),
        ({"a": 3, "b": 1}, (3, 1)),
        ({"a": 0.7, "b": 0.3}, (179, 77)),  # 128 would give 90 and 38, which is 1.04 % short of 0.3
        ({"a": 1, "b": 1, "c": 1}, (86, 85, 85)),  # what remains goes by name
        ({"c": 1, "b": 1, "a": 1}, (85, 85, 86)),
    ],
)
def test_smallest_block(asked: dict[str, float], counts: tuple[int, ...]) -> None:
    assert quantise(asked).counts == counts


def test_a_share_too_small_for_any_block_gets_one() -> None:
    mixture = quantise({"web": 1.0, "rare": 1e-9, "rarer": 1e-300})
    assert mixture.block == MAX_BLOCK
    assert mixture.counts == (MAX_BLOCK - 2, 1, 1)


def test_lifting_tiny_sources_scales_the_others_in_proportion() -> None:
    tiny = {f"tiny{k}": 1e-9 for k in range(1024)}
    mixture = quantise({"a": 2.0, "b": 1.0, **tiny})
    assert mixture.counts[:2] == (43_008, 21_504)  # 65,536 - 1,024, two to one


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf])
def test_a_weight_that_is_no_positive_number_is_refused_by_name(weight: float) -> None:
    with pytest.raises(UserError, match="'code'"):
        quantise({"web": 1.0, "code": weight})


def test_no_sources() -> None:
    with pytest.raises(UserError, match="no sources"):
        quantise({})


@pytest.mark.parametrize(("counts", "block"), [((1, 1), 4), ((0, 2), 2), ((2,), 2)])
def test_a_mixture_that_does_not_add_up_is_refused(counts: tuple[int, ...], block: int) -> None:
    with pytest.raises(ValueError):
        Mixture(("a", "b"), counts, block)


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(1, 900), st.none() | st.integers(0, 400))),
    st.integers(0, 3000),
)
def test_sharing_out_obeys_limits_and_otherwise_largest_remainders(
    asked: dict[str, tuple[int, int | None]], total: int
) -> None:
    counts = {name: count for name, (count, _) in asked.items()}
    limits = {name: limit for name, (_, limit) in asked.items() if limit is not None}
    dealt = apportion(counts, total, limits)
    assert all(0 < dealt[name] <= limits.get(name, total) for name in dealt)
    given = sum(dealt.values())
    assert given <= total
    assert given == total or all(dealt.get(name, 0) == limits.get(name) for name in counts)
    free = [name for name in counts if dealt.get(name, 0) != limits.get(name)]
    for name in free:  # those below their limits stand in the ratio of their counts, to within one sequence
        for other in free:
            ratio = counts[name] / counts[other]
            assert abs(dealt.get(name, 0) - ratio * dealt.get(other, 0)) < 1 + ratio + 1e-9


def test_sharing_out_by_hand() -> None:
    assert apportion({"a": 2, "b": 1, "c": 1}, 10, {}) == {"a": 5, "b": 3, "c": 2}
    assert apportion({"a": 2, "b": 1, "c": 1}, 10, {"a": 1}) == {"a": 1, "b": 5, "c": 4}
    assert apportion({"a": 13, "b": 7}, 4, {"a": 2}) == {"a": 2, "b": 2}  # its quota is 2.6
    assert apportion({"a": 99, "b": 1}, 10, {"a": 0}) == {"b": 10}
    assert apportion({"a": 99, "b": 1}, 10, {}) == {"a": 10}
    assert apportion({"a": 1, "b": 1}, 10, {"a": 2, "b": 3}) == {"a": 2, "b": 3}
