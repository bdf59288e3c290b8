"""Recipes of pre-training beside published numbers: Chinchilla's law, learning rates, batches, warm-ups."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.plan.recipe import pretraining as recipe
from bessemer.spec.published import published_batch, published_rate


def test_the_corrected_fit_restores_about_twenty_tokens_a_parameter() -> None:
    answer = recipe.model_for_compute(5.76e23)
    assert answer.basis == "established"
    assert answer.value.parameters == pytest.approx(70e9, rel=0.1)  # Chinchilla itself: 70B on 1.4T
    assert 17 < answer.value.tokens_per_parameter < 22
    assert 15e12 / recipe.optimal_tokens(8e9) == pytest.approx(93, rel=0.05)  # Llama 3 8B is over-trained


@pytest.mark.parametrize(
    ("parameters", "tokens"),
    [(400e6, 8.0e9), (1e9, 20.2e9), (10e9, 205.1e9), (67e9, 1.5e12), (175e9, 3.7e12), (1e12, 21.2e12)],
)
def test_near_the_paper_s_own_table_for_approach_one(parameters: float, tokens: float) -> None:
    assert recipe.optimal_tokens(parameters) == pytest.approx(tokens, rel=0.25)


@given(st.floats(1e7, 1e13))
def test_the_optimum_is_one(parameters: float) -> None:
    tokens = recipe.optimal_tokens(parameters)
    best = recipe.predicted_loss(parameters, tokens)
    for factor in (0.7, 0.9, 1.1, 1.4):  # the same compute, divided otherwise
        assert recipe.predicted_loss(parameters * factor, tokens / factor) >= best
    assert recipe.optimal_parameters(6 * parameters * tokens) == pytest.approx(parameters, rel=1e-6)


@pytest.mark.parametrize(
    ("parameters", "tokens", "low", "high"),
    [(125e6, 2.5e9, 6e-4, 2.5e-3), (1e9, 20e9, 3e-4, 1.2e-3), (7e9, 2e12, 2.5e-4, 1.2e-3), (70e9, 1e12, 1e-4, 2.1e-4),
     (405e9, 15e12, 7e-5, 1.3e-4)],
)  # fmt: skip
def test_rates_lie_where_models_were_trained(parameters: float, tokens: float, low: float, high: float) -> None:
    answer = recipe.learning_rate(parameters, tokens)
    assert low <= answer.value <= high
    assert all(law.name in answer.reason for law in recipe.rate_laws(parameters, tokens))
    assert answer.basis in ("established", "empirical at this scale")


def test_the_laws_as_printed() -> None:
    by_name = {law.name: law.value for law in recipe.rate_laws(1e9, 1e11)}
    assert by_name[recipe.DEEPSEEK] == pytest.approx(0.3118 * 6e20**-0.125)
    assert by_name[recipe.STEP_LAW] == pytest.approx(1.79 * 1e9**-0.713 * 1e11**0.307)
    batches = {law.name: law.value for law in recipe.batch_laws(1e9, 1e11)}
    assert batches[recipe.STEP_LAW] == pytest.approx(0.58 * 1e11**0.571)


def test_published_settings_of_known_models() -> None:
    assert published_rate(70e9) == pytest.approx(1.5e-4) and published_rate(6.7e9) == pytest.approx(3e-4)
    assert published_rate(405e9) == pytest.approx(8e-5) and published_rate(1e12) == pytest.approx(8e-5)
    assert published_batch(70e9) == pytest.approx(4e6) and published_batch(1e6) == pytest.approx(0.5e6)


@given(st.floats(1e6, 1e13), st.floats(1e6, 1e14))
def test_answers_stay_in_bounds(parameters: float, tokens: float) -> None:
    rate, batch = recipe.learning_rate(parameters, tokens), recipe.batch_tokens(parameters, tokens)
    assert recipe.LIMITS_LR[0] <= rate.value <= recipe.LIMITS_LR[1]
    assert 1 <= batch.value <= max(1, tokens / 100 + 1)


def test_the_rate_follows_the_root_of_the_batch() -> None:
    assert recipe.rate_for_batch(3e-4, 1e6, 4e6).value == pytest.approx(6e-4)
    assert recipe.rate_for_batch(3e-4, 1e6, 64e6).basis == "open question"


def test_warmup() -> None:
    assert [recipe.warmup_steps(steps).value for steps in (1, 100, 1000, 50_000, 10**6)] == [1, 10, 40, 1000, 2000]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_nonsense_is_one_line(bad: float) -> None:
    for ask in (recipe.tokens_for_model, recipe.model_for_compute, recipe.vocabulary):
        with pytest.raises(UserError) as caught:
            ask(bad)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="parameters"):
        recipe.learning_rate(bad, 1e9)
    with pytest.raises(UserError, match="tokens"):
        recipe.batch_tokens(1e9, bad)
    with pytest.raises(UserError, match="steps"):
        recipe.warmup_steps(0)
