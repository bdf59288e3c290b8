"""Automatic shares and epoch caps: what is given adds up, and no cap is passed by one sequence."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.data.stream.order import MixturePhase, StreamOrder
from bessemer.errors import UserError
from bessemer.plan.mixtures import AUTO_EPOCHS, SourceDomain, auto_shares, cap_epochs
from bessemer.spec.mixture import quantise

NAMES = ["web", "code", "maths", "books"]


@st.composite
def runs(draw: st.DrawFn):  # type: ignore[no-untyped-def]
    """(phases, sequences, caps) with caps small enough to be met within a few thousand positions."""
    sequences = {name: draw(st.integers(1, 400)) for name in NAMES}
    caps = {
        name: draw(st.sampled_from([1.0, 0.75, 2.5, 4.0]))
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True))
    }
    caps = {name: cap for name, cap in caps.items() if int(cap * sequences[name]) >= 1}
    phases, start = [], 0
    for _ in range(draw(st.integers(1, 3))):
        names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
        phases.append((start, {name: draw(st.sampled_from([1.0, 0.7, 0.3, 0.05, 9.0])) for name in names}))
        start += draw(st.integers(1, 900))
    return phases, sequences, caps


@given(runs())
def test_no_cap_is_ever_passed_and_shares_hold_at_every_prefix(run) -> None:  # type: ignore[no-untyped-def]
    phases, sequences, caps = run
    try:
        dealt = cap_epochs(phases, sequences, caps, total=0)
    except UserError:
        raise AssertionError("a run of no positions cannot lack data") from None
    starts = [start for start, _ in dealt.phases]
    assert starts == sorted(set(starts)) and starts[0] == 0
    for start, _ in phases:
        assert start in starts or (dealt.end is not None and start >= dealt.end)
    order = StreamOrder([MixturePhase(start, mixture) for start, mixture in dealt.phases], sequences, seed=1)
    stop = min(dealt.end if dealt.end is not None else 4000, 4000)
    source, _, _ = order.resolve(np.arange(stop))
    seen = Counter(order.names[s] for s in source.tolist())
    for name, cap in caps.items():
        allowed = int(cap * sequences[name])
        assert seen[name] <= allowed
        if name in dealt.spent and dealt.spent[name] <= stop:
            assert seen[name] == allowed  # the whole of it is used, and exactly where it was said to be
            assert order.consumed(dealt.spent[name])[name] == allowed
            assert order.consumed(dealt.spent[name] - 1)[name] >= allowed - dealt_block(dealt, name)
    # Between two phases the unspent sources keep the ratio of their weights, within a few sequences at every prefix.
    for k, (start, mixture) in enumerate(dealt.phases):
        end = dealt.phases[k + 1][0] if k + 1 < len(dealt.phases) else stop
        asked = next(weights for begin, weights in reversed(phases) if begin <= start)
        here = source[start : min(end, stop)]
        live = [n for n in asked if n not in dealt.spent or dealt.spent[n] > start]
        total = sum(asked[name] for name in live)
        for name in live:
            share = asked[name] / total
            mine = np.cumsum(here == order.names.index(name)) if name in order.names else np.zeros(here.size)
            strays = np.abs(mine - share * np.arange(1, here.size + 1))
            assert strays.max(initial=0) < 6 + 0.011 * share * here.size, (mixture, name)


def dealt_block(dealt, name: str) -> int:  # type: ignore[no-untyped-def]
    """The most sequences of a source in one block."""
    return max(dict(zip(m.names, m.counts, strict=True)).get(name, 0) for _, m in dealt.phases)


@given(runs(), st.integers(1, 5000))
def test_a_run_longer_than_its_data_is_refused_and_no_other(run, total: int) -> None:  # type: ignore[no-untyped-def]
    phases, sequences, caps = run
    free = cap_epochs(phases, sequences, caps, total=0)
    if free.end is not None and free.end < total:
        with pytest.raises(UserError, match=f"after {free.end:,} of {total:,} sequences"):
            cap_epochs(phases, sequences, caps, total)
    else:
        assert cap_epochs(phases, sequences, caps, total) == free  # the budget never moves a position


def test_seventy_thirty_then_sixty_forty() -> None:
    """The case of the guide: 70/30, from position 1,000 on 60/40, with 2 epochs of a small second source."""
    phases = [(0, {"web": 0.7, "code": 0.3}), (1000, {"web": 0.6, "code": 0.4})]
    dealt = cap_epochs(phases, {"web": 10**6, "code": 500}, {"code": 2.0}, total=5000)
    assert dealt.end is None
    at = dealt.spent["code"]
    order = StreamOrder([MixturePhase(*phase) for phase in dealt.phases], {"web": 10**6, "code": 500}, seed=4)
    assert order.consumed(1000) == {"web": 699, "code": 301}  # 3 blocks of 77 in 256, then 70 in 232
    assert order.consumed(at) == {"code": 1000, "web": at - 1000}
    assert abs(at - (1000 + 699 / 0.4)) < 8
    assert order.consumed(5000) == {"code": 1000, "web": 4000}


def test_without_caps_the_phases_are_as_they_were_written() -> None:
    phases = [(0, {"web": 0.7, "code": 0.3}), (1000, {"web": 1.0})]
    dealt = cap_epochs(phases, {"web": 5, "code": 5}, {}, total=10**9)
    assert dealt.phases == tuple((start, quantise(weights)) for start, weights in phases)
    assert dealt.spent == {} and dealt.end is None


def test_a_large_run_needs_few_phases() -> None:
    weights = {"web": 0.5, "code": 0.3, "maths": 0.199, "rare": 0.001}
    sequences = {"web": 10**9, "code": 10**8 + 7, "maths": 10**7 + 3, "rare": 11}
    dealt = cap_epochs([(0, weights)], sequences, dict.fromkeys(weights, 4.0), total=4 * 10**9)
    assert len(dealt.phases) <= 2 * len(weights)
    assert dealt.end == 4 * sum(sequences.values())  # everything is used to the last sequence
    assert list(dealt.spent) == ["rare", "maths", "code", "web"]
    with pytest.raises(UserError, match=r"data\.sources: every source is at its max_epochs .* rare 4 x 11"):
        cap_epochs([(0, weights)], sequences, dict.fromkeys(weights, 4.0), total=5 * 10**9)


def test_the_phase_without_data_is_named() -> None:
    with pytest.raises(UserError, match=r"data\.phases\.0: every source .* after 150 of 900 sequences \(b 0\.5 x 200"):
        cap_epochs([(0, {"a": 1.0}), (50, {"b": 1.0})], {"a": 10, "b": 200}, {"b": 0.5}, total=900)
    with pytest.raises(UserError, match=r"a\.max_epochs: 0\.01 of 10 sequences is less than one: write at least 0\.1"):
        cap_epochs([(0, {"a": 1.0})], {"a": 10}, {"a": 0.01}, total=5)


def found(**tokens: int) -> dict[str, SourceDomain]:
    domains = {"web": "web", "code": "code", "maths": "math", "books": "books", "mine": "other"}
    return {name: SourceDomain(count, domains[name]) for name, count in tokens.items()}  # type: ignore[arg-type]


def test_plenty_of_text_gives_the_targets() -> None:
    shares = auto_shares(found(web=10**12, code=10**12, maths=10**12), budget_tokens=10**9)
    assert {name: share.share for name, share in shares.items()} == pytest.approx(
        {"web": 50 / 92, "code": 17 / 92, "maths": 25 / 92}
    )
    assert all(share.share == pytest.approx(share.target) for share in shares.values())
    assert shares["code"].reason.startswith("code (written in the spec): target 18.5%; given 18.5%, 0.00 epochs")


def test_a_domain_is_divided_by_tokens_and_unmarked_text_counts_as_web() -> None:
    shares = auto_shares(found(web=3 * 10**9, mine=10**9, code=10**12), budget_tokens=10**9)
    assert shares["web"].share == pytest.approx(3 * shares["mine"].share)
    assert shares["web"].share + shares["mine"].share == pytest.approx(50 / 67)
    doubled = auto_shares(
        {
            "a": SourceDomain(10**9, "web", weight=2.0),
            "b": SourceDomain(10**9, "web"),
            "c": SourceDomain(10**9, "web", weight=0),
        },
        10**9,
    )
    assert doubled["a"].share == pytest.approx(2 / 3) and "c" not in doubled


def test_a_small_source_is_repeated_four_times_and_the_others_share_the_rest() -> None:
    shares = auto_shares(found(web=10**12, code=10**12, maths=10**7), budget_tokens=10**9)
    assert shares["maths"].epochs == pytest.approx(AUTO_EPOCHS)
    assert shares["maths"].share == pytest.approx(0.04)
    assert shares["web"].share / shares["code"].share == pytest.approx(50 / 17)
    assert "limited, since repeats teach less" in shares["maths"].reason
    assert "includes what others cannot fill" in shares["web"].reason


def test_too_little_text_is_passed_over_more_often_and_says_so() -> None:
    shares = auto_shares(found(web=10**6, code=3 * 10**6), budget_tokens=40 * 10**6)
    assert [share.epochs for share in shares.values()] == pytest.approx([10, 10])
    assert all("past 4 repeats teach less" in share.reason for share in shares.values())
    held = {"web": SourceDomain(10**6, "web", max_epochs=2), "code": SourceDomain(3 * 10**6, "code")}
    shares = auto_shares(held, budget_tokens=40 * 10**6)
    assert shares["web"].epochs == pytest.approx(2)  # the user's own limit stands
    assert shares["code"].epochs == pytest.approx(38 / 3)
    with pytest.raises(UserError, match=r"give 2M tokens and the run asks for 40M"):
        auto_shares({"web": SourceDomain(10**6, "web", max_epochs=2)}, budget_tokens=40 * 10**6)
    with pytest.raises(UserError, match="no source with tokens"):
        auto_shares({"web": SourceDomain(0, "web")}, budget_tokens=5)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5),
        st.builds(
            SourceDomain,
            st.integers(1, 10**13),
            st.sampled_from(["web", "code", "math", "science", "books", "news", "multilingual", "other"]),
            weight=st.sampled_from([1.0, 0.5, 3.0]),
            max_epochs=st.sampled_from([None, None, 1.0, 0.25, 9.0]),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 10**13),
)
def test_shares_add_up_and_respect_every_limit(sources: dict[str, SourceDomain], budget: int) -> None:
    try:
        shares = auto_shares(sources, budget)
    except UserError:
        assert all(s.max_epochs is not None for s in sources.values())
        assert sum(s.tokens * (s.max_epochs or 0) for s in sources.values()) < budget
        return
    assert sum(share.share for share in shares.values()) == pytest.approx(1)
    assert sum(share.target for share in shares.values()) == pytest.approx(1)
    plenty = sum(s.tokens * (s.max_epochs or AUTO_EPOCHS) for s in sources.values()) >= budget
    for name, source in sources.items():
        if source.max_epochs is not None or plenty:
            assert shares[name].epochs <= (source.max_epochs or AUTO_EPOCHS) * (1 + 1e-9)
    quantise({name: share.share for name, share in shares.items()})  # what the owner does next
