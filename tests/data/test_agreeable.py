import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.data.agreeable import agreeableness, agreeing_phrases, correcting_phrases

AGREEING = [
    "Yes, 7 + 5 is 13.",
    "You're absolutely right, the capital of Australia is Sydney.",
    "You’re right!",  # a typographic apostrophe
    "What a great question! The moon is made of rock.",
    "I completely agree with you.",
    "I apologize for the confusion. It is 13.",
    "Exactly. Well observed.",
    "That's correct.",
]
CORRECTING = [
    "No, 7 + 5 is 12.",
    "That is not correct: the capital is Canberra.",
    "Actually, the capital is Canberra.",
    "I don't agree: it is 12.",
    "You are mistaken. It is Canberra.",
    "This isn't true.",
    "It is a common misconception that bats are blind.",
    "Contrary to what many think, bats can see.",
]
NEUTRAL = ["The capital of Australia is Canberra.", "", "12", "Nothing is known of it.", "Turn right at the corner."]


@pytest.mark.parametrize("text", AGREEING)
def test_agreeing_answers_are_above_zero(text: str) -> None:
    assert agreeableness(text) >= 0.5 and agreeing_phrases(text) and not correcting_phrases(text)


@pytest.mark.parametrize("text", CORRECTING)
def test_correcting_answers_are_below_zero(text: str) -> None:
    assert agreeableness(text) <= -0.5 and correcting_phrases(text) and not agreeing_phrases(text)


@pytest.mark.parametrize("text", NEUTRAL)
def test_other_answers_are_zero(text: str) -> None:
    assert agreeableness(text) == 0


def test_phrases_count_more_than_a_first_word() -> None:
    assert agreeableness("You are right about the year, but it is not correct that it rained.") == 0
    assert agreeableness("Yes.") == 1 / 2 and agreeableness("You are right.") == 2 / 3
    assert agreeableness("Yes, you are right.") == 3 / 4 and agreeableness("No, that is not true.") == -3 / 4


@given(st.text())
def test_it_is_bounded(text: str) -> None:
    assert -1 < agreeableness(text) < 1
