"""Mathematical answers: which are equal, and what is extracted from a solution."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.align.rewards.math_answers import equal_answers, extract_answer, parse_answer

EQUAL = [
    ("1/2", "0.5"), (r"\frac{1}{2}", r"\dfrac12"), (r"50\%", "0.5"), ("50%", "50"), ("1,234.50", "1234.5"),
    ("$1,000", "1000"), (r"\$1{,}000", "1000"), (r"12\text{ cm}", "12 cm"), ("12 cm", "12"), ("x = 3", "3"),
    (r"3 \cdot 10^{-2}", "0.03"), (r"-1\frac{1}{2}", "-3/2"), ("1 1/2", "1.5"), ("(1, 2)", "(1,2)"),
    (r"(1/2, 3)", r"(0.5, \frac{6}{2})"), (r"\left(\frac{1}{2}, 2\right)", "(0.5, 2)"), (r"2\sqrt{3}", r"2 \sqrt{3}"),
    (r"90^\circ", "90°"), ("90 degrees", r"90^{\circ}"), (r"\boxed{7}", "7"), ("1e-05", "0.00001"), ("**72**", "72"),
    ("18.", "18"), ("5 m^2", "5 m²"), (r"\sqrt{16}", "4"), ("2^{10}", "1024"), ("10 dollars", r"\$10"), ("−5", "-5"),
    ("[0, 1)", "[0,1)"), ("x+1", "x + 1"), ("Paris", "paris"), ("-(3)", "-3"), (r"3\times4", "12"), (".5", "1/2"),
    (r"1\,000", "1000"), ("3 apples", "3"),
]  # fmt: skip
DIFFERENT = [
    ("1/3", "0.333"), ("2x", "2"), ("2 pi", "2"), ("5 cm", "5 m"), ("(1, 2)", "(2, 1)"), ("(0, 1)", "[0, 1]"),
    ("0.5", "5"), ("50%", "5"), ("3i", "3"), ("", ""), ("1 2", "12"), ("x", "y"), ("1,23", "123"), ("12", "1 2"),
    (r"\frac{1}{0}", "0"), ("(1, 2)", "(1, 2, 3)"), ("(" * 300 + "1" + ")" * 300, "1"), ("9^9^9^9^9", "1"), ("-2", "2"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), EQUAL)
def test_equal(first: str, second: str) -> None:
    assert equal_answers(first, second) and equal_answers(second, first)


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_different(first: str, second: str) -> None:
    assert not equal_answers(first, second) and not equal_answers(second, first)


def test_extract() -> None:
    cases = {
        r"So \boxed{1} and \boxed{\frac{3}{4}} ok": r"\frac{3}{4}", "reason 5\n#### 72": "72",
        "The answer is 5. Bye": "5",
        "the final answer is: $12$. Bye": "$12$", "we get 3 and then 1,234 apples.": "1,234", "nothing": None,
        "Answer: 42": "42", "it is 3/4 of it": "3/4", "range 5-3": "3", "so -3": "-3", r"\boxed{1": "1", "": None,
    }  # fmt: skip
    assert {text: extract_answer(text) for text in cases} == cases


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**6), st.integers(1, 50))
def test_fractions_are_exact(numerator: int, denominator: int, factor: int) -> None:
    exact = Fraction(numerator, denominator)
    for text in (f"{numerator}/{denominator}", rf"\frac{{{numerator * factor}}}{{{denominator * factor}}}"):
        assert parse_answer(text).value == exact
    assert not equal_answers(f"{numerator}/{denominator}", f"{numerator * factor + 1}/{denominator * factor}")
    assert equal_answers(f"{numerator:,}", str(numerator))


@given(st.text("0123456789+-*/^(){}\\frac sqrt.,%$", max_size=120))
def test_any_text_is_read_or_refused(text: str) -> None:
    parse_answer(text)
    extract_answer(text)
