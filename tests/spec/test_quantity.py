"""Quantities as people write them: the right number, or a refusal that says what to write."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.spec.quantity import (
    LARGEST,
    format_value,
    human_bytes,
    human_count,
    human_time,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_interval,
    parse_number,
    parse_share,
    parse_span,
    span_steps,
)

PARSERS = [parse_count, parse_bytes, parse_share, parse_duration, parse_number, parse_span, parse_interval]
anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.from_regex(r"[-+.,_0-9eE]{0,8} ?(%|[kmgtbKMGTB]i?|tokens|steps|min|h|s)?", fullmatch=True),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.sampled_from([10**5000, -(10**5000), "9" * 5000, "1e999999999", "1e99", 1e308]),
)


@given(anything, st.sampled_from(PARSERS))
def test_every_input_is_a_number_or_a_refusal_of_one_line(value: Any, parse: Callable[[Any], Any]) -> None:
    refusal = ""
    try:
        result = parse(value)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith("expected ")
        assert "\n" not in refusal and len(refusal) < 250
    else:
        assert isinstance(result, (int, float, str)) and not isinstance(result, bool)
        assert isinstance(result, str) or (math.isfinite(result) and result >= 0)
        # What was understood is understood again; a time needs its unit for that.
        assert parse(f"{result} s" if parse is parse_duration else result) == result


@pytest.mark.parametrize(
    ("written", "count"),
    [
        (4096, 4096),
        (0, 0),
        ("20M", 20_000_000),
        ("20m", 20_000_000),
        ("256K tokens", 256_000),
        ("64Ki", 65_536),
        ("1.5Mi", 1_572_864),
        ("1B", 10**9),
        ("1G", 10**9),
        ("2 T", 2 * 10**12),
        (1e9, 10**9),
        ("1e9", 10**9),
        ("2.3M", 2_300_000),  # 2.3 * 1e6 is 2299999.9999999995 in floats
        ("4.35K", 4350),
        (".5K", 500),
        ("1_000_000", 1_000_000),
        ("1,000,000", 1_000_000),
        (2**53 + 1, 2**53 + 1),
        ("5 tokens", 5),
        ("5tok", 5),
        (LARGEST, LARGEST),
    ],
)
def test_counts(written: Any, count: int) -> None:
    assert parse_count(written) == count


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("1,5M", "expected a number of tokens"),  # 1.5M or 15M?
        ("1000 steps", "the unit is steps, not tokens"),
        ("1.0005K", "whole number"),
        (0.5, "whole number"),
        (-1, "got -1"),
        (True, "got true"),
        (None, "got nothing"),
        ("", "got ''"),
        ("20 MB", "expected"),
        (math.nan, "got nan"),
        (math.inf, "got inf"),
        (LARGEST + 1, "expected"),
        ("1e19", "at most 1,000,000,000,000,000,000"),
        ([1], r"got \[1\]"),
    ],
)
def test_what_is_no_count_of_tokens(written: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_count(written)


def test_a_bound_is_said() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        parse_count("0 steps", "steps", least=1)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("64MB", 64_000_000),
        ("64 MiB", 64 * 2**20),
        ("1GiB", 2**30),
        ("100", 100),
        (1, 1),
        ("100 bytes", 100),
        ("1.5k", 1500),
    ],
)
def test_bytes(written: Any, size: int) -> None:
    assert parse_bytes(written) == size


@pytest.mark.parametrize("written", [-5, 0, "0 MB", "64Mytes", "5 tokens", "1e19", None])
def test_what_is_no_size(written: Any) -> None:
    with pytest.raises(ValueError, match="64MB or 1GiB"):
        parse_bytes(written)


@pytest.mark.parametrize(
    ("written", "share"),
    [("2%", 0.02), ("0.02", 0.02), (0.02, 0.02), (0, 0.0), (1, 1.0), ("100%", 1.0), ("2.5 %", 0.025), (1e-5, 1e-5)],
)
def test_shares(written: Any, share: float) -> None:
    assert parse_share(written) == share


@pytest.mark.parametrize("written", ["101%", 1.01, -0.1, "half", True])
def test_what_is_no_share(written: Any) -> None:
    with pytest.raises(ValueError, match=r"2% or 0\.02"):
        parse_share(written)


def test_a_percentage_without_its_sign_is_told_what_to_write() -> None:
    with pytest.raises(ValueError, match="for 2 percent write 2%"):
        parse_share(2)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("90s", 90),
        ("10 min", 600),
        ("10m", 600),
        ("10 minutes", 600),
        ("1.5h", 5400),
        ("1h 30m", 5400),
        ("1h30min", 5400),
        ("2 days, 1 hour", 2 * 86400 + 3600),
        ("0s", 0),
        ("0.25 s", 0.25),
        ("1 sec", 1),
        ("3hrs", 10_800),
    ],
)
def test_durations(written: str, seconds: float) -> None:
    assert parse_duration(written) == seconds


@pytest.mark.parametrize(
    "written", ["500 ms", "10M", 600, "600", "h", "", "10 min.", "1e99 s", "5 weeks", "-1 s", "1,5 h"]
)
def test_what_is_no_duration(written: Any) -> None:
    with pytest.raises(ValueError, match="90s, 10 min or 2h"):
        parse_duration(written)


@given(st.floats(0, 1e9))
def test_seconds_survive_being_written_down(seconds: float) -> None:
    assert parse_duration(f"{seconds} s") == seconds


@pytest.mark.parametrize(("written", "number"), [(3e-4, 3e-4), (1, 1.0)])
def test_numbers(written: Any, number: float) -> None:
    assert parse_number(written) == number


@pytest.mark.parametrize("written", [0, -1e-4, math.nan, math.inf, True, "high", None])
def test_what_is_no_number_above_zero(written: Any) -> None:
    with pytest.raises(ValueError, match="such as 3e-4"):
        parse_number(written)


def test_a_number_in_quotes_is_told_to_drop_them() -> None:
    with pytest.raises(ValueError, match="remove the quotes"):
        parse_number("3e-4")


@pytest.mark.parametrize(
    ("written", "span", "steps"),
    [
        ("2%", 0.02, 20),
        (0.02, 0.02, 20),
        ("100%", 1.0, 1000),
        (1.0, 1.0, 1000),
        (1, 1, 1),
        ("1 step", 1, 1),
        (200, 200, 200),
        ("2K steps", 2000, 2000),
        (1e3, 1000, 1000),
        ("1M tokens", "1000000 tokens", 100),
        ("10,001 tokens", "10001 tokens", 2),  # a part of a step is a step
        (0, 0, 0),
    ],
)
def test_spans(written: Any, span: int | float | str, steps: int) -> None:
    parsed = parse_span(written)
    assert parsed == span and type(parsed) is type(span)
    assert span_steps(parsed, total_steps=1000, tokens_per_step=10_000) == steps


@pytest.mark.parametrize("written", [-0.5, 1.5, "0.5", "10 min", "5 rows", "200%", None, True])
def test_what_is_no_span(written: Any) -> None:
    with pytest.raises(ValueError, match=r"2% or 0.02|2%, 2000 steps or 500M tokens"):
        parse_span(written)


@pytest.mark.parametrize(
    ("written", "interval"),
    [("500 steps", 500), (500, 500), ("10K", 10_000), ("10M", 10_000_000), ("10m", "600.0 s"), ("10 min", "600.0 s")],
)
def test_intervals(written: Any, interval: int | str) -> None:
    assert parse_interval(written) == interval
    assert parse_interval(interval) == interval


@pytest.mark.parametrize("written", [0, "0 s", "0 steps", "5 tokens", "often", None, True, 1.5])
def test_what_is_no_interval(written: Any) -> None:
    with pytest.raises(ValueError, match="500 steps or 10 min"):
        parse_interval(written)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (9999, "9,999"),
        (10_000, "10K"),
        (999.5, "1K"),
        (999_499, "999K"),
        (999_500, "1M"),
        (1_300_000, "1.3M"),
        (6_738_415_616, "6.74B"),
        (1.5e12, "1.5T"),
        (5e15, "5,000T"),
        (0.25, "0.25"),
        (-1_300_000, "-1.3M"),
    ],
)
def test_human_count(value: float, text: str) -> None:
    assert human_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_999, "1 MB"), (31_500_000, "31.5 MB"), (2.5e15, "2,500 TB")],
)
def test_human_bytes(value: float, text: str) -> None:
    assert human_bytes(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (112, "1m 52s"),
        (3600, "1h 00m"),
        (86_399, "23h 59m"),
        (90_000, "1d 01h"),
        (-3, "0s"),
        (math.nan, "?"),
        (math.inf, "?"),
    ],
)
def test_human_time(seconds: float, text: str) -> None:
    assert human_time(seconds) == text


@given(st.floats(allow_nan=False))
def test_human_words_never_use_an_exponent(value: float) -> None:
    if abs(value) >= 0.001:
        assert "e" not in human_count(value) and "e+" not in human_bytes(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (None, "nothing"), ("a\nb", r"'a\nb'"), ({"a": None}, '{"a": null}'), (2.5, "2.5")],
)
def test_values_are_shown_as_they_stand_in_yaml(value: Any, text: str) -> None:
    assert format_value(value) == text


def test_a_long_value_is_cut() -> None:
    assert len(format_value("x" * 10_000)) == 64
