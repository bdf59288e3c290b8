"""Questions in turn: few, with defaults, and asked again where an answer makes no sense."""

from collections.abc import Callable

import pytest

from bessemer.errors import UserError
from bessemer.plan.request import InterviewAnswers, ask_missing


def answers(*given: str) -> tuple[Callable[[str, str], str], list[str]]:
    asked: list[str] = []
    left = list(given)

    def prompt(question: str, default: str) -> str:
        asked.append(question)
        return left.pop(0) or default

    return prompt, asked


def test_defaults_alone_make_a_plan() -> None:
    prompt, asked = answers("", "", "")
    assert ask_missing(InterviewAnswers(), prompt, pytest.fail) == InterviewAnswers("7B", None, "8xH100")
    assert len(asked) == 3


def test_only_what_is_missing_is_asked() -> None:
    prompt, asked = answers("4xH100")
    found = ask_missing(InterviewAnswers(model="1B", tokens="20B"), prompt, pytest.fail)
    assert found == InterviewAnswers("1B", "20B", "4xH100") and len(asked) == 1


def test_a_budget_instead_of_gpus() -> None:
    prompt, _ = answers("3B", "60B", "any", "5k", "2d")
    assert ask_missing(InterviewAnswers(), prompt, pytest.fail) == InterviewAnswers("3B", "60B", None, "5k", "2d")


def test_nonsense_is_asked_for_again_with_the_reason() -> None:
    told: list[str] = []
    prompt, asked = answers("large", "1B", "-5", "20B", "8xA1000", "8xA100")
    assert ask_missing(InterviewAnswers(), prompt, told.append) == InterviewAnswers("1B", "20B", "8xA100")
    assert (
        len(asked) == 6 and ["no size found" in told[0], "tokens -5" in told[1], "catalogue" in told[2]] == [True] * 3
    )
    prompt, _ = answers(*["large"] * 9)
    with pytest.raises(UserError, match="as an option instead"):
        ask_missing(InterviewAnswers(), prompt, told.append)
