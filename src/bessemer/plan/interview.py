"""The few questions that a plan needs, asked in turn where nothing was said. Each has a default, and an answer that
makes no sense is asked for again with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bessemer.errors import UserError
from bessemer.plan.hardware import parse_cluster
from bessemer.plan.request import ask
from bessemer.plan.search.budget import parse_limits
from bessemer.spec.quantity import parse_count

Prompt = Callable[[str, str], str]  # question and default -> answer
Tell = Callable[[str], None]
TRIES = 5


@dataclass(frozen=True)
class InterviewAnswers:
    """As the options of the command line have them."""

    model: str | None = None
    tokens: str | None = None
    gpus: str | None = None
    budget: str | None = None
    deadline: str | None = None


def interview(known: InterviewAnswers, prompt: Prompt, tell: Tell) -> InterviewAnswers:
    """What is missing, asked for."""
    model, tokens, gpus, budget, deadline = known.model, known.tokens, known.gpus, known.budget, known.deadline
    if model is None:
        model = _until_right("Size of the model (such as 1B, 7B, llama-7b)", "7B", ask, prompt, tell)
    if tokens is None:
        text = _until_right("Tokens to train on (auto: as many as suit it)", "auto", _check_tokens, prompt, tell)
        tokens = None if text == "auto" else text
    if gpus is None and budget is None and deadline is None:
        gpus = _until_right(
            "GPUs (such as 8xA100-80GB; any: let the budget decide)", "8xH100", _check_gpus, prompt, tell
        )
        if gpus == "any":
            gpus = None
            budget = _until_right("Budget in dollars", "50k", lambda text: parse_limits(text, None), prompt, tell)
            deadline = _until_right("Deadline", "30d", lambda text: parse_limits(None, text), prompt, tell)
    return InterviewAnswers(model, tokens, gpus, budget, deadline)


def _check_tokens(text: str) -> object:
    try:
        return text if text == "auto" else parse_count(text, least=1)
    except ValueError as fault:
        raise UserError(f"tokens {text}: {fault}") from None


def _check_gpus(text: str) -> object:
    return text if text == "any" else parse_cluster(text)


def _until_right(question: str, default: str, check: Callable[[str], object], prompt: Prompt, tell: Tell) -> str:
    for _ in range(TRIES):
        text = prompt(question, default).strip() or default
        try:
            check(text)
        except UserError as fault:
            tell(str(fault))
        else:
            return text
    raise UserError(f"{question}: no answer that makes sense in {TRIES} tries: write it as an option instead")
