"""Chinchilla's law against the numbers that were published for it, and what follows from it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.plan.recipe import tokens as law

SIZES = st.floats(1e7, 1e13)


def test_the_corrected_fit_restores_about_twenty_tokens_a_parameter() -> None:
    found = law.model_for_compute(5.76e23)
    assert found.basis == "established"
    assert found.value.parameters == pytest.approx(70e9, rel=0.1)  # Chinchilla itself: 70B on 1.4T
    assert 17 < found.value.tokens_per_parameter < 22


@pytest.mark.parametrize(
    ("parameters", "tokens"),
    [(400e6, 8.0e9), (1e9, 20.2e9), (10e9, 205.1e9), (67e9, 1.5e12), (175e9, 3.7e12), (1e12, 21.2e12)],
)
def test_near_the_paper_s_own_table_for_approach_one(parameters: float, tokens: float) -> None:
    assert law.optimal_tokens(parameters) == pytest.approx(tokens, rel=0.25)


def test_the_fit_of_2022_would_have_asked_for_93() -> None:
    a, b, alpha, beta = 406.4, 410.7, 0.34, 0.28
    balance = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
    parameters = balance * (5.76e23 / 6) ** (beta / (alpha + beta))
    assert 5.76e23 / 6 / parameters / parameters == pytest.approx(93, rel=0.1)


@given(SIZES)
def test_the_optimum_is_one(parameters: float) -> None:
    tokens = law.optimal_tokens(parameters)
    best = law.predicted_loss(parameters, tokens)
    for factor in (0.7, 0.9, 1.1, 1.4):  # the same compute, divided otherwise
        assert law.predicted_loss(parameters * factor, tokens / factor) >= best
    assert law.optimal_parameters(6 * parameters * tokens) == pytest.approx(parameters, rel=1e-6)


def test_serving_makes_the_model_smaller_and_its_training_longer() -> None:
    plain = law.model_for_compute(5.76e23).value
    served = [law.model_for_compute(5.76e23, tokens).value for tokens in (1e12, 1e13, 1e14)]
    sizes = [plain.parameters, *(way.parameters for way in served)]
    assert sizes == sorted(sizes, reverse=True)
    for way, tokens in zip(served, (1e12, 1e13, 1e14), strict=True):
        assert way.compute + 2 * way.parameters * tokens == pytest.approx(5.76e23, rel=1e-6)
    loss = law.predicted_loss(70e9, 1.4e12)
    cheap = law.cheapest_for_loss(loss, 2e12).value
    assert cheap.loss == pytest.approx(loss) and cheap.parameters < 70e9
    whole = 6 * cheap.parameters * cheap.tokens + 2 * cheap.parameters * 2e12
    assert whole < 6 * 70e9 * 1.4e12 + 2 * 70e9 * 2e12
    assert law.cheapest_for_loss(loss, 0.0).value.parameters == pytest.approx(70e9, rel=0.1)


def test_llama_3_8b_is_trained_about_94_times_as_long() -> None:
    assert pytest.approx(93.75) == 15e12 / (20 * 8e9)  # against the rule of 20
    assert law.overtraining(8e9, 15e12) == pytest.approx(93, rel=0.05)
    assert law.compute_overhead(70e9, 1.4e12) < 0.01 < law.compute_overhead(8e9, 15e12)


def test_repeats_are_worth_less_and_less() -> None:
    assert law.effective_tokens(1e9, 1e9) == 1e9
    four, sixteen, endless = (law.effective_tokens(1e9, epochs * 1e9) for epochs in (4, 16, 1000))
    assert four == pytest.approx(4e9, rel=0.1)  # the paper: up to four passes are as good as fresh text
    assert sixteen < 11e9 and endless == pytest.approx(16.39e9, rel=1e-3)


@given(st.floats(1e3, 1e12), st.floats(0.01, 100))
def test_effective_tokens_never_exceed_those_read(unique: float, epochs: float) -> None:
    worth = law.effective_tokens(unique, epochs * unique)
    assert 0 < worth <= epochs * unique * (1 + 1e-9)
    assert law.effective_tokens(unique, (epochs + 1) * unique) >= worth


def test_too_little_text_is_repeated_four_times_and_said() -> None:
    found = law.tokens_with_data(7e9, 20e9)
    assert found.value == 80e9 and "smaller model" in found.reason
    assert law.tokens_with_data(7e9, 1e12).value == pytest.approx(law.optimal_tokens(7e9))
    model = law.model_for_data(1e9).value
    assert law.optimal_tokens(model.parameters) == pytest.approx(law.effective_tokens(1e9, 4e9), rel=1e-3)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_nonsense_is_one_line(bad: float) -> None:
    for ask in (law.tokens_for_model, law.model_for_compute, law.model_for_data):
        with pytest.raises(UserError) as caught:
            ask(bad)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="floor"):
        law.cheapest_for_loss(1.8, 0)
    with pytest.raises(UserError, match="negative"):
        law.model_for_compute(1e20, -1)
    with pytest.raises(UserError, match="leave nothing"):
        law.model_for_compute(1e20, 1e20)
