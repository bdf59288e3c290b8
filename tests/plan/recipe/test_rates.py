"""Learning rates, batches and warm-ups beside those of published runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.plan.recipe import rates
from bessemer.spec.published import published_batch, published_rate


@pytest.mark.parametrize(
    ("parameters", "tokens", "low", "high"),
    [(125e6, 2.5e9, 6e-4, 2.5e-3), (1e9, 20e9, 3e-4, 1.2e-3), (7e9, 2e12, 2.5e-4, 1.2e-3), (70e9, 1e12, 1e-4, 2.1e-4),
     (405e9, 15e12, 7e-5, 1.3e-4)],
)  # fmt: skip
def test_rates_lie_where_models_were_trained(parameters: float, tokens: float, low: float, high: float) -> None:
    found = rates.learning_rate(parameters, tokens)
    assert low <= found.value <= high
    assert all(law.name in found.reason for law in rates.rate_laws(parameters, tokens))
    assert found.basis in ("established", "empirical at this scale")


def test_the_laws_as_printed() -> None:
    by_name = {law.name: law.value for law in rates.rate_laws(1e9, 1e11)}
    assert by_name[rates.DEEPSEEK] == pytest.approx(0.3118 * 6e20**-0.125)
    assert by_name[rates.STEP_LAW] == pytest.approx(1.79 * 1e9**-0.713 * 1e11**0.307)
    batches = {law.name: law.value for law in rates.batch_laws(1e9, 1e11)}
    assert batches[rates.STEP_LAW] == pytest.approx(0.58 * 1e11**0.571)


def test_published_settings_of_known_models() -> None:
    assert published_rate(70e9) == pytest.approx(1.5e-4) and published_rate(6.7e9) == pytest.approx(3e-4)
    assert published_rate(405e9) == pytest.approx(8e-5) and published_rate(1e12) == pytest.approx(8e-5)
    assert published_batch(70e9) == pytest.approx(4e6) and published_batch(1e6) == pytest.approx(0.5e6)


@given(st.floats(1e6, 1e13), st.floats(1e6, 1e14))
def test_answers_stay_in_bounds(parameters: float, tokens: float) -> None:
    rate, batch = rates.learning_rate(parameters, tokens), rates.batch_tokens(parameters, tokens)
    assert rates.LIMITS_LR[0] <= rate.value <= rates.LIMITS_LR[1]
    assert 1 <= batch.value <= max(1, tokens / 100 + 1)


@given(st.floats(1e3, 1e8), st.floats(0.05, 4))
def test_noise_scale_trades_text_for_steps(noise: float, waste: float) -> None:
    batch = rates.batch_from_noise(noise, waste).value
    text, steps = 1 + batch / noise, 1 + noise / batch
    assert (text - 1) * (steps - 1) == pytest.approx(1, rel=1e-6)  # McCandlish et al., equation 2.11
    assert text == pytest.approx(1 + waste, rel=0.02)


def test_the_rate_follows_the_root_of_the_batch() -> None:
    assert rates.rate_for_batch(3e-4, 1e6, 4e6).value == pytest.approx(6e-4)
    assert rates.rate_for_batch(3e-4, 1e6, 64e6).basis == "open question"


def test_warmup() -> None:
    assert [rates.warmup_steps(steps).value for steps in (1, 100, 1000, 50_000, 10**6)] == [1, 10, 40, 1000, 2000]


def test_nonsense_is_one_line() -> None:
    with pytest.raises(UserError, match="parameters"):
        rates.learning_rate(-1, 1e9)
    with pytest.raises(UserError, match="tokens"):
        rates.batch_tokens(1e9, 0)
    with pytest.raises(UserError, match="noise"):
        rates.batch_from_noise(float("nan"))
    with pytest.raises(UserError, match="steps"):
        rates.warmup_steps(0)
