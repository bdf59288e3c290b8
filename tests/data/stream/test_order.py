"""The order against a slow reference that walks the stream position by position, in Python integers."""

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data.stream.order import CurriculumRanking, MixturePhase, StreamOrder, chain, mix, name_key, permute
from bessemer.errors import UserError
from bessemer.spec.mixture import Mixture, quantise

WORD = 2**64 - 1


def slow_mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


def slow_chain(first: int, *parts: int) -> int:
    key = slow_mix(first)
    for part in parts:
        key = slow_mix(key ^ part)
    return key


def slow_name(name: str) -> int:
    raw = name.encode()
    return slow_chain(len(raw), *(int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)))


def slow_permute(index: int, n: int, key: int) -> int:
    if n < 256:
        return sorted(range(n), key=lambda item: slow_mix(key ^ item))[index]
    bits = (n - 1).bit_length()
    low_bits = bits // 2
    while True:
        high, low = index >> low_bits, index % 2**low_bits
        for turn in range(8):
            if turn % 2 == 0:
                high ^= slow_mix(((low << 3) | turn) ^ key) % 2 ** (bits - low_bits)
            else:
                low ^= slow_mix(((high << 3) | turn) ^ key) % 2**low_bits
        index = (high << low_bits) | low
        if index < n:
            return index


def slow_block(mixture: Mixture, seed: int, phase: int, block: int) -> list[str]:
    """The sources of a block in the order they are dealt."""
    block_key = slow_chain(slow_chain(seed, 1, phase), block)
    items = []
    for name, count in zip(mixture.names, mixture.counts, strict=True):
        name_word = slow_name(name)
        for r in range(count):
            u = slow_mix(block_key ^ slow_chain(name_word, r)) >> 32
            items.append(((((r << 32) | u) << 15) // count, name, r))
    return [name for _, name, _ in sorted(items)]


def slow_order(phases: list[MixturePhase], lengths: dict[str, int], seed: int) -> Iterator[tuple[str, int, int]]:
    """(source, sequence, epoch) from position 0 on; running counters where the order has closed forms."""
    taken: Counter[str] = Counter()
    seed %= 2**64
    for number, phase in enumerate(phases):
        left = phases[number + 1].start - phase.start if number + 1 < len(phases) else 10**9
        block = 0
        while left > 0:
            for name in slow_block(phase.mixture, seed, number, block)[:left]:
                epoch, index = divmod(taken[name], lengths[name])
                key = slow_chain(slow_chain(seed, 2, slow_name(name)), epoch)
                yield name, slow_permute(index, lengths[name], key), epoch
                taken[name] += 1
            left -= phase.mixture.block
            block += 1


def resolved(order: StreamOrder, positions: np.ndarray) -> list[tuple[str, int, int]]:
    source, sequence, epoch = order.resolve(positions)
    return [(order.names[s], q, e) for s, q, e in zip(source.tolist(), sequence.tolist(), epoch.tolist(), strict=True)]


NAMES = ["web", "code", "a name longer than eight bytes", "ünïcode"]


@st.composite
def definitions(draw: st.DrawFn) -> tuple[list[MixturePhase], dict[str, int], int]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    lengths = {name: draw(st.sampled_from([1, 3, 40, 255, 256, 300])) for name in names}
    phases, start = [], 0
    for _ in range(draw(st.integers(1, 3))):
        kept = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        phases.append(MixturePhase(start, quantise({name: draw(st.integers(1, 9)) for name in kept})))
        start += draw(st.integers(1, 300))
    return phases, lengths, draw(st.integers(-(2**63), 2**64))


@settings(max_examples=40)
@given(definitions())
def test_the_order_equals_the_reference(definition: tuple[list[MixturePhase], dict[str, int], int]) -> None:
    phases, lengths, seed = definition
    walk = slow_order(phases, lengths, seed)
    expected = [next(walk) for _ in range(900)]
    order = StreamOrder(phases, lengths, seed)
    assert resolved(order, np.arange(900)) == expected
    seek = np.array([899, 0, 411, 411, 77])
    assert resolved(StreamOrder(phases, lengths, seed), seek) == [expected[p] for p in seek]
    for position in (0, 1, phases[-1].start, 500, 899):
        before = Counter(name for name, _, _ in expected[:position])
        assert order.consumed(position) == {name: before[name] for name in order.names}


@given(st.integers(1, 3000), st.integers(0, WORD))
def test_permute_is_a_bijection(n: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


def test_permute_is_a_bijection_around_every_power_of_two() -> None:
    for n in [*range(1, 520), 1023, 1024, 1025, 4095, 4096, 4097]:
        assert np.array_equal(np.sort(permute(np.arange(n), n, key=n)), np.arange(n)), n


@given(st.integers(256, 2**40), st.integers(0, WORD), st.lists(st.integers(0, 2**40), max_size=20))
def test_permute_of_large_ranges_equals_the_reference(n: int, key: int, picks: list[int]) -> None:
    index = np.unique(np.array([*picks, 0, n - 1]) % n)
    moved = permute(index, n, key)
    assert moved.tolist() == [slow_permute(i, n, key) for i in index.tolist()]
    assert np.unique(moved).size == index.size
    assert moved.min() >= 0 and moved.max() < n


@pytest.mark.parametrize("n", [40, 700])
def test_permute_takes_a_key_per_index(n: int) -> None:
    index, keys = np.arange(60).reshape(3, 20) % n, np.arange(60, dtype=np.uint64).reshape(3, 20) // 7
    together = permute(index, n, keys)
    assert together.shape == index.shape
    assert together.ravel().tolist() == [
        slow_permute(i, n, k) for i, k in zip(index.ravel().tolist(), keys.ravel().tolist(), strict=True)
    ]


@pytest.mark.parametrize("n", [5, 256, 300])
def test_every_index_goes_everywhere_equally_often(n: int) -> None:
    keys = chain(0, np.arange(40 * n))
    for index in (0, n // 2, n - 1):
        counts = np.bincount(permute(np.full(keys.size, index), n, keys), minlength=n)
        chi_squared = ((counts - 40) ** 2 / 40).sum()
        assert chi_squared < n - 1 + 6 * (2 * (n - 1)) ** 0.5


def test_neighbours_do_not_stay_neighbours() -> None:
    moved = permute(np.arange(10_000), 10_000, key=1)
    assert (np.abs(np.diff(moved)) == 1).sum() < 12  # two are expected of a random permutation
    assert abs(np.corrcoef(np.arange(10_000), moved)[0, 1]) < 0.05


def test_permute_refuses_an_index_outside() -> None:
    for n in (10, 1000):
        with pytest.raises(ValueError, match="outside"):
            permute(np.array([n]), n, 0)


@pytest.mark.filterwarnings("error")
def test_arithmetic_wraps_around_without_a_warning() -> None:
    assert mix(WORD) == slow_mix(WORD)
    assert chain(WORD, WORD, 0) == slow_chain(WORD, WORD, 0)
    assert name_key("") == slow_name("")


def three_sources(lengths: dict[str, int] | None = None) -> StreamOrder:
    mixture = Mixture(("web", "code", "maths"), (48, 15, 1), 64)
    return StreamOrder([MixturePhase(0, mixture)], lengths or {"web": 1000, "code": 77, "maths": 3}, seed=5)


def test_each_sequence_comes_once_per_epoch() -> None:
    seen: dict[tuple[str, int], list[int]] = defaultdict(list)
    order = three_sources()
    for name, sequence, epoch in resolved(order, np.arange(64 * 1000)):
        seen[name, epoch].append(sequence)
    last = {name: max(epoch for other, epoch in seen if other == name) for name in order.names}
    for (name, epoch), sequences in seen.items():
        if epoch < last[name]:
            assert sorted(sequences) == list(range(order.lengths[name]))
        else:
            assert len(set(sequences)) == len(sequences)
    assert seen["web", 0] != seen["web", 1]


def test_shares_are_exact_per_block_and_close_at_every_prefix() -> None:
    source, _, _ = three_sources().resolve(np.arange(64 * 200))
    shares = np.array([15, 1, 48]) / 64  # code, maths, web
    dealt = np.cumsum(source[:, None] == np.arange(3), axis=0)
    assert np.array_equal(dealt[63::64], np.arange(1, 201)[:, None] * [15, 1, 48])
    assert np.abs(dealt - np.arange(1, dealt.shape[0] + 1)[:, None] * shares).max() < 4


def test_a_source_of_a_thousandth_keeps_its_share() -> None:
    mixture = quantise({"web": 0.9, "code": 0.099, "rare": 0.001})
    order = StreamOrder([MixturePhase(0, mixture)], {"web": 10**7, "code": 10**6, "rare": 3}, seed=1)
    source, sequence, epoch = order.resolve(np.arange(4 * mixture.block))
    rare = np.flatnonzero(source == order.names.index("rare"))
    per_block = dict(zip(mixture.names, mixture.counts, strict=True))["rare"]
    assert rare.size == 4 * per_block
    assert np.diff(rare).max() < 2 * mixture.block / per_block + 10  # never starved for long
    assert np.array_equal(epoch[rare], np.arange(rare.size) // 3)
    assert all(set(sequence[rare][k : k + 3]) == {0, 1, 2} for k in range(0, rare.size - 3, 3))
    for s, name in enumerate(order.names):
        strays = np.cumsum(source == s) - np.arange(1, source.size + 1) * mixture.shares[name]
        assert np.abs(strays).max() < 4


@pytest.mark.parametrize("counts", [(65535, 1), (40_000, 25_000, 536)])
def test_the_largest_block_equals_the_reference(counts: tuple[int, ...]) -> None:
    mixture = Mixture(("web", "code", "rare")[: len(counts)], counts, 65_536)
    order = StreamOrder([MixturePhase(0, mixture)], dict.fromkeys(mixture.names, 10**9), seed=8)
    source, _, _ = order.resolve(65_536 * 7 + np.arange(65_536))
    assert [order.names[s] for s in source.tolist()] == slow_block(mixture, 8, 0, 7)


def test_a_source_of_one_sequence_repeats_it() -> None:
    order = StreamOrder([MixturePhase(0, quantise({"a": 1, "b": 1}))], {"a": 1, "b": 500}, seed=0)
    source, sequence, epoch = order.resolve(np.arange(2000))
    assert not sequence[source == 0].any()
    assert np.array_equal(epoch[source == 0], np.arange(1000))


def test_ordinals_run_on_through_a_phase_change_inside_a_block() -> None:
    first, second = Mixture(("web", "code"), (48, 16), 64), Mixture(("code", "new"), (100, 28), 128)
    lengths = {"web": 10_000, "code": 10_000, "new": 10_000}
    phases = [MixturePhase(0, first), MixturePhase(1000, second), MixturePhase(1100, first)]
    changing = StreamOrder(phases, lengths, seed=3)
    source, sequence, epoch = changing.resolve(np.arange(5000))
    for s, name in enumerate(changing.names):
        mine = sequence[source == s]
        alone = StreamOrder([MixturePhase(0, Mixture((name,), (1,), 1))], lengths, seed=3)
        assert np.array_equal(mine, alone.resolve(np.arange(mine.size))[1])  # no gap, no repeat
    assert not epoch.any()
    unchanged = StreamOrder([MixturePhase(0, first)], lengths, seed=3).resolve(np.arange(1000))
    before = resolved(changing, np.arange(1000))
    assert [q for _, q, _ in before] == unchanged[1].tolist()


def test_far_positions_cost_no_more() -> None:
    order = three_sources()
    far = 10**15 + np.arange(5)
    source, sequence, epoch = order.resolve(far)
    assert (sequence < 1000).all() and epoch.min() > 10**11
    assert order.consumed(64 * 10**12) == {"web": 48 * 10**12, "code": 15 * 10**12, "maths": 10**12}
    assert source.shape == (5,)


def test_names_in_another_order_give_the_same_stream() -> None:
    lengths = {"b": 300, "a": 400, "unused": 0}
    one = StreamOrder([MixturePhase(0, Mixture(("a", "b"), (3, 5), 8))], lengths, seed=9)
    other = StreamOrder([MixturePhase(0, Mixture(("b", "a"), (5, 3), 8))], dict(reversed(lengths.items())), seed=9)
    assert resolved(one, np.arange(500)) == resolved(other, np.arange(500))


def test_mistakes_name_the_source() -> None:
    phases = [MixturePhase(0, Mixture(("web", "tiny"), (1, 1), 2))]
    with pytest.raises(UserError, match="'tiny' has too few tokens"):
        StreamOrder(phases, {"web": 5, "tiny": 0}, seed=0)
    with pytest.raises(UserError, match="'tiny' has no data"):
        StreamOrder(phases, {"web": 5}, seed=0)
    for starts in ([], [1], [0, 5, 5]):
        with pytest.raises(UserError, match="begin at 0"):
            StreamOrder([MixturePhase(start, phases[0].mixture) for start in starts], {"web": 5, "tiny": 5}, seed=0)
    with pytest.raises(ValueError, match="negative"):
        three_sources().resolve([-1])


def slow_ranked(index: int, ranking: CurriculumRanking, key: int) -> int:
    """The sequence at an index of an epoch, one at a time."""
    n = len(ranking.sequences)
    if ranking.run and index < n // ranking.run * ranking.run:
        run, offset = divmod(index, ranking.run)
        index = slow_permute(run, n // ranking.run, slow_chain(key, 2)) * ranking.run + offset
    groups = min(ranking.groups, n)
    group = next(k for k in range(groups) if index < n * (k + 1) // groups)
    first, stop = n * group // groups, n * (group + 1) // groups
    return int(ranking.sequences[first + slow_permute(index - first, stop - first, slow_chain(key, 1, group))])


@st.composite
def rankings(draw: st.DrawFn) -> CurriculumRanking:
    n = draw(st.sampled_from([1, 2, 40, 255, 256, 300, 700]))
    ranks = np.random.default_rng(n).permutation(n).astype(np.int32)
    return CurriculumRanking(
        ranks, draw(st.sampled_from([1, 2, 7, 300, 10**6])), "x", draw(st.sampled_from([0, 1, 3, 64]))
    )


@settings(max_examples=60)
@given(rankings(), st.integers(0, 2**63))
def test_a_ranked_order_equals_the_reference_and_is_complete(ranking: CurriculumRanking, seed: int) -> None:
    n = ranking.sequences.size
    order = StreamOrder(
        [MixturePhase(0, Mixture(("web",), (1,), 1))], {"web": n}, seed, {"web": ranking, "unused": ranking}
    )
    _, sequence, epoch = order.resolve(np.arange(2 * n))
    keys = [slow_chain(slow_chain(seed, 2, slow_name("web")), e) for e in (0, 1)]
    for e in (0, 1):
        mine = sequence[epoch == e]
        assert sorted(mine.tolist()) == list(range(n))  # each once per epoch
        picks = sorted({0, n // 3, n - 1})
        assert [mine[i] for i in picks] == [slow_ranked(i, ranking, keys[e]) for i in picks]


def test_a_curriculum_rises_group_by_group_and_shuffles_inside() -> None:
    n, groups = 1000, 8
    ranks = np.random.default_rng(0).permutation(n)
    measure = np.empty(n)
    measure[ranks] = np.arange(n)  # of each sequence
    order = StreamOrder(
        [MixturePhase(0, Mixture(("web", "code"), (1, 1), 2))],
        {"web": n, "code": 50},
        7,
        {"web": CurriculumRanking(ranks, groups, "x")},
    )
    source, sequence, epoch = order.resolve(np.arange(6 * n))
    web = source == order.names.index("web")
    for e in (0, 1, 2):
        rising = measure[sequence[web & (epoch == e)]]
        assert (rising * groups // n == np.arange(n) * groups // n).all()
        assert (np.diff(rising) < 0).sum() > n / 3  # not sorted within
    assert (sequence[web & (epoch == 0)] != sequence[web & (epoch == 1)]).any()
    plain = StreamOrder(order.phases, {"web": n, "code": 50}, 7)  # the other source is dealt as ever
    assert np.array_equal(plain.resolve(np.arange(6 * n))[1][~web], sequence[~web])


def test_length_buckets_keep_neighbours_of_one_group_and_mix_the_groups() -> None:
    n, run, groups = 1024, 32, 8
    order = StreamOrder(
        [MixturePhase(0, Mixture(("web",), (1,), 1))],
        {"web": n},
        7,
        {"web": CurriculumRanking(np.arange(n), groups, "x", run)},
    )
    _, sequence, _ = order.resolve(np.arange(n))
    bucket = (sequence // (n // groups)).reshape(-1, run)
    assert (bucket == bucket[:, :1]).all()
    assert (np.diff(bucket[:, 0]) < 0).any() and set(bucket[:4, 0]) != {0}  # not shortest first


def test_rankings_stand_in_the_identity_and_must_fit() -> None:
    phases, ranking = [MixturePhase(0, Mixture(("web",), (1,), 1))], CurriculumRanking(np.arange(5), 2, "abc", 3)
    assert StreamOrder(phases, {"web": 5}, 1).identity == {"seed": 1, "phases": [[0, {"web": 1}]]}
    assert StreamOrder(phases, {"web": 5}, 1, {"web": ranking}).identity["rankings"] == {"web": ["abc", 2, 3]}
    with pytest.raises(ValueError, match="is for 5 sequences"):
        StreamOrder(phases, {"web": 6}, 1, {"web": ranking})
    with pytest.raises(ValueError, match="at least one group"):
        CurriculumRanking(np.arange(5), 0, "abc")


def test_golden_values_of_rankings() -> None:
    """As below: past runs replay only while these hold."""
    order = StreamOrder(
        [MixturePhase(0, Mixture(("web",), (1,), 1))],
        {"web": 12},
        2024,
        {"web": CurriculumRanking(np.arange(12), 3, "x", 2)},
    )
    expected = [9, 11, 6, 5, 4, 7, 10, 8, 2, 1, 3, 0, 3, 0, 5, 4, 2, 1, 11, 10, 7, 6, 9, 8]
    assert order.resolve(np.arange(24))[1].tolist() == expected


def test_golden_values() -> None:
    """Past runs replay only while these hold. Never edit them: another order is another stream format."""
    # Published outputs of splitmix64 seeded with 0 and with 1234567.
    assert int(mix(0)) == 0xE220A8397B1DCDAF
    assert int(mix(1234567)) == 6457827717110365317
    assert int(chain(1, 2, 3)) == 0xD0734750FDE362B3
    assert int(name_key("wikipedia")) == 0x48957FBA9A411574
    assert permute(np.arange(10), 10, 42).tolist() == [3, 2, 9, 5, 8, 1, 4, 0, 7, 6]
    assert permute(np.arange(6), 1000, 42).tolist() == [959, 846, 903, 883, 526, 235]
    assert permute(np.arange(3), 10**12, 42).tolist() == [449280324190, 860281439757, 556843225914]
    phases = [
        MixturePhase(0, Mixture(("web", "code"), (11, 5), 16)),
        MixturePhase(40, Mixture(("code", "maths"), (1, 3), 4)),
    ]
    order = StreamOrder(phases, {"web": 1000, "code": 7, "maths": 3}, seed=2024)
    assert order.names == ("code", "maths", "web")
    source, sequence, epoch = order.resolve(np.r_[0:12, 36:48, 10**12 : 10**12 + 4])
    expected = [2, 0, 2, 2, 0, 2, 2, 2, 0, 0, 2, 2, 2, 2, 0, 2, 1, 0, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1]
    assert source.tolist() == expected
    expected = [392, 5, 59, 710, 3, 534, 671, 579, 4, 0, 542, 677]
    expected += [227, 644, 2, 456, 1, 3, 2, 0, 1, 2, 4, 0, 2, 0, 1, 2]
    assert sequence.tolist() == expected
    expected = [0] * 12 + [0, 0, 1, 0, 0, 1, 0, 0, 1, 1, 2, 1]
    assert epoch.tolist() == [*expected, 35714285714, 249999999990, 249999999990, 249999999990]
