"""Rules on curves whose fault is known: the cause, its step, and the line of configuration."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.diagnose.rules import judge_run, judge_scaling
from bessemer.observe.foreign.series import ForeignRun, Series
from bessemer.run.finding import Finding

N = 600
STEPS = np.arange(N)


def falling(seed: int = 0, noise: float = 0.05) -> np.ndarray:
    """A healthy loss of a vocabulary of 256."""
    return 2.2 + (math.log(256) - 2.2) * np.exp(-STEPS / 100) + np.random.default_rng(seed).normal(0, noise, N)


def warm_cosine(peak: float = 3e-4, total: int = N) -> np.ndarray:
    share = np.minimum(STEPS / total, 1.0)
    return peak * np.minimum((STEPS + 1) / 30, 1) * (0.5 + 0.5 * np.cos(np.pi * share))


def run(
    format: str = "hf_trainer", settings: dict[str, Any] | None = None, restarts: tuple[int, ...] = (), **curves: Any
) -> ForeignRun:
    series = {}
    for name, values in curves.items():
        steps, values = values if isinstance(values, tuple) else (STEPS[: len(values)], values)
        series[name] = Series(name, np.asarray(steps), np.asarray(values, np.float64), np.arange(len(steps)))
    return ForeignRun(format, "run", [Path("log")], series, {"vocab_size": 256, **(settings or {})}, list(restarts), N)


def first(findings: list[Finding]) -> str:
    return findings[0].rule if findings else ""


def loud(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity != "note"]


@pytest.mark.parametrize("seed", range(8))
def test_a_healthy_run_gives_no_finding_above_note(seed: int) -> None:
    held_out = (STEPS[49::50], falling(seed + 100, 0.01)[49::50])
    healthy = run(loss=falling(seed), lr=warm_cosine(), validation_loss=held_out, grad_norm=falling(seed + 50, 0.1))
    assert loud(judge_run(healthy)) == []


def spike(loss: np.ndarray) -> None:
    loss[400] = 6.0


def damage(loss: np.ndarray) -> None:
    loss[400:] += 5 * np.exp(-(STEPS[400:] - 400) / 90)


def diverge(loss: np.ndarray) -> None:
    loss[400:] += (STEPS[400:] - 400) * 0.02


def cycle(loss: np.ndarray) -> None:
    loss += 0.25 * np.sin(2 * np.pi * STEPS / 24)


def flat(loss: np.ndarray) -> None:
    loss[:] = math.log(256) + np.random.default_rng(1).normal(0, 0.01, N)


def slow(loss: np.ndarray) -> None:
    loss[:] = math.log(256) - 0.0005 * STEPS + np.random.default_rng(1).normal(0, 0.01, N)


def not_a_number(loss: np.ndarray) -> None:
    loss[300:] = np.nan


def zero(loss: np.ndarray) -> None:
    loss[:] = 0.0


def some_masked(loss: np.ndarray) -> None:
    loss[11::12] = np.nan


@pytest.mark.parametrize(
    ("change", "rule", "step"),
    [
        (spike, "bad_batch", 400), (damage, "weights_damaged", 400), (diverge, "lr_too_high", None),
        (cycle, "data_ordered", None), (slow, "lr_too_low", None), (not_a_number, "nonfinite_input", 300),
        (zero, "labels_masked", 0), (some_masked, "labels_masked", 11),
    ],
)  # fmt: skip
def test_shapes_of_the_loss(change: Callable[[np.ndarray], None], rule: str, step: int | None) -> None:
    loss = falling()
    change(loss)
    findings = judge_run(run(loss=loss, lr=np.full(N, 3e-4)))
    assert first(findings) == rule, findings
    assert findings[0].severity in ("warning", "critical")
    assert step is None or findings[0].step == step
    assert findings[0].check


def test_a_flat_loss_names_what_is_not_trained() -> None:
    loss = falling()
    flat(loss)
    findings = judge_run(run(loss=loss, grad_norm=np.full(N, 1e-9)))
    assert first(findings) == "weights_frozen"


def test_nan_that_trainer_hides_as_zero() -> None:
    """Trainer's NaN filter logs 0 beside a NaN gradient norm."""
    loss, norm = falling(), np.ones(N)
    loss[200:], norm[200:] = 0.0, np.nan
    (finding, *_) = judge_run(run(loss=loss, grad_norm=norm))
    assert finding.step == 200 and finding.severity == "critical" and finding.evidence["hidden_as_zero"]


@pytest.mark.parametrize(("factor", "rule"), [(4.0, "loss_summed_over_accumulation"), (0.25, "loss_divided_twice")])
def test_loss_scaled_by_accumulation(factor: float, rule: str) -> None:
    findings = judge_run(run(loss=falling() * factor, settings={"gradient_accumulation_steps": 4}))
    assert first(findings) == rule


def test_a_first_loss_above_uniform() -> None:
    loss = falling()
    loss[:60] += 6 * np.exp(-STEPS[:60] / 20)
    assert first(judge_run(run(loss=loss))) == "initial_loss_above_uniform"


@pytest.mark.parametrize(
    ("rates", "rule"),
    [
        (warm_cosine(total=300), "schedule_too_short"), (warm_cosine(total=2400), "schedule_too_long"),
        (np.where(STEPS < 300, warm_cosine(), warm_cosine()[STEPS - 300]), "schedule_restarted"),
    ],
)  # fmt: skip
def test_schedules(rates: np.ndarray, rule: str) -> None:
    findings = judge_run(run(loss=falling(), lr=rates, restarts=(300,) if rule == "schedule_restarted" else ()))
    assert first(findings) == rule


def test_the_optimizer_lost_at_a_restart() -> None:
    loss = falling()
    loss[300:] += 0.6 * np.exp(-(STEPS[300:] - 300) / 30)
    findings = judge_run(run(loss=loss, restarts=(300,)))
    assert first(findings) == "optimizer_state_lost" and abs((findings[0].step or 0) - 300) < 3


def test_overfitting_and_leakage() -> None:
    steps = STEPS[29::30]
    rising = falling(3, 0.01)[29::30] + np.maximum(0, steps - 250) * 0.004
    findings = judge_run(run(loss=falling() - 0.003 * np.maximum(0, STEPS - 200), validation_loss=(steps, rising)))
    assert first(findings) == "overfitting"
    below = falling(3, 0.01)[29::30] * 0.75
    assert first(judge_run(run(loss=falling(), validation_loss=(steps, below)))) == "validation_leak"


def test_loss_scale_collapse() -> None:
    scale = np.where(STEPS < 200, 65536.0, np.maximum(65536.0 / 2.0 ** ((STEPS - 200) // 5), 1.0))
    assert first(judge_run(run(loss=falling(), loss_scale=scale))) == "fp16_overflow"
    usual_start = np.maximum(65536.0 / 2.0**STEPS, 1024.0)
    assert loud(judge_run(run(loss=falling(), loss_scale=usual_start))) == []


def test_speed() -> None:
    rng = np.random.default_rng(0)
    usual = 0.2 * np.exp(rng.normal(0, 0.05, N))
    assert loud(judge_run(run(loss=falling(), step_s=usual, data_wait_s=0.02 * usual))) == []
    assert first(judge_run(run(loss=falling(), step_s=usual, data_wait_s=0.4 * usual))) == "slow_data"
    stalls = usual + np.where(STEPS % 50 == 49, 4.0, 0.0)
    findings = judge_run(run(loss=falling(), step_s=stalls))
    assert first(findings) == "periodic_stall" and findings[0].evidence["period"] == 50
    assert first(judge_run(run(loss=falling(), step_s=usual * (1 + STEPS / N)))) == "step_time_grows"
    assert first(judge_run(run(loss=falling(), step_s=usual * np.where(STEPS > 300, 2, 1)))) == "slowed_down"
    memory = 2**30 * (1 + STEPS / N)
    assert first(judge_run(run(loss=falling(), memory_bytes=memory))) == "memory_leak"


def test_scaling_of_two_runs() -> None:
    one = run(tokens_per_s=np.full(20, 10_000.0), settings={"world_size": 1})
    eight = run(tokens_per_s=np.full(20, 30_000.0), settings={"world_size": 8})
    finding = judge_scaling(one, eight)
    assert finding is not None and finding.rule == "poor_scaling" and finding.evidence["efficiency"] == 0.375
    assert judge_scaling(one, run(tokens_per_s=np.full(20, 76_000.0), settings={"world_size": 8})) is None


def test_preference_training() -> None:
    t, rng = STEPS[:100] / 100, np.random.default_rng(0)
    noise = rng.normal(0, 0.01, 100)
    pairs = {"loss": 0.693 - 0.3 * t + noise, "reward_margin": 1.5 * t + noise, "accuracy": 0.5 + 0.25 * t}
    healthy = run(**pairs, chosen_logp=-120 + 2 * t + noise, rejected_logp=-130 - 20 * t + noise)
    assert loud(judge_run(healthy)) == []
    fallen = run(**pairs, chosen_logp=-120 - 80 * t + noise, rejected_logp=-130 - 150 * t + noise)
    assert first(judge_run(fallen)) == "likelihood_displacement"
    shifted = run(**{**pairs, "loss": 1.4 - 0.3 * t, "reward_margin": -1.2 + t + noise})
    assert first(judge_run(shifted)) == "reference_mismatch"
    unlearned = run(**{**pairs, "reward_margin": 3 * t + noise, "accuracy": 0.5 + noise})
    assert first(judge_run(unlearned)) == "margin_without_accuracy"
    trivial = run(
        **{**pairs, "reward_margin": 30 * np.minimum(1, 8 * t) + noise, "accuracy": np.minimum(1, 0.5 + 8 * t)}
    )
    assert first(judge_run(trivial)) == "trivial_pairs"


RL = {
    "kl_blowup": {"kl": lambda t: 0.02 + 8 * np.maximum(0, t - 0.6) ** 2 * 10},
    "entropy_collapse": {"entropy": lambda t: 2.0 * np.exp(-5 * t)},
    "flat_groups": {"flat_groups": lambda t: 0.2 + 0.6 * t},
    "answers_cut": {"cut_answers": lambda t: 0.05 + 0.6 * t},
    "generator_mismatch": {"importance_ratio": lambda t: 1.12 + 0 * t},
    "length_growth": {"reward": lambda t: 0.4 + 0 * t, "answer_length": lambda t: 100 + 300 * t},
    "reward_hacking": {"answer_length": lambda t: 100 + 300 * t, "judge_score": lambda t: 0.6 - 0.3 * t},
    "reward_collapse": {"reward": lambda t: np.where(t < 0.6, 0.2 + t, 0.1)},
}


@pytest.mark.parametrize("rule", ["", *RL])
def test_reinforcement_learning(rule: str) -> None:
    t, rng = np.arange(120) / 120, np.random.default_rng(0)
    usual: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "reward": lambda t: 0.2 + 0.5 * t, "kl": lambda t: 0.02 + 0.05 * t, "entropy": lambda t: 1.5 - 0.5 * t,
        "flat_groups": lambda t: 0.2 + 0.1 * t, "cut_answers": lambda t: 0.05 + 0 * t,
        "importance_ratio": lambda t: 1 + 0 * t, "answer_length": lambda t: 100 + 10 * t,
    }  # fmt: skip
    curves = {name: make(t) + rng.normal(0, 0.004, 120) for name, make in {**usual, **RL.get(rule, {})}.items()}
    findings = judge_run(run("verl", **curves))
    if rule:
        assert first(findings) == rule, findings
    else:
        assert loud(findings) == []


@pytest.mark.parametrize(
    ("format", "line"),
    [
        ("hf_trainer", "`learning_rate=0.0001`"), ("megatron", "`--lr 0.0001`"),
        ("nanogpt", "`learning_rate = 0.0001`"),
        ("bessemer", "`optimizer: {lr: 0.0001}`"), ("lightning_csv", "`lr=0.0001 in configure_optimizers`"),
        ("torchtitan", "`[optimizer] lr = 0.0001`"), ("deepspeed", '`"optimizer": {"params": {"lr": 0.0001}}`'),
    ],
)  # fmt: skip
def test_the_fix_is_a_line_of_the_framework(format: str, line: str) -> None:
    loss = falling()
    diverge(loss)
    assert line in judge_run(run(format, loss=loss, lr=np.full(N, 3e-4)))[0].fix


def test_short_and_empty_runs() -> None:
    assert judge_run(run()) == []
    for points in (1, 2, 5, 9, 17):
        assert loud(judge_run(run(loss=falling()[:points], lr=warm_cosine()[:points]))) == []
    assert judge_run(run(loss=np.array([]), grad_norm=np.array([]))) == []


def test_a_run_of_many_steps_is_judged_in_seconds() -> None:
    """Shapes are found on thinned curves, spikes on every point."""
    n = 120_000
    steps, rng = np.arange(n), np.random.default_rng(0)
    loss = 2.2 + 3 * np.exp(-steps / 8000) + rng.normal(0, 0.05, n)
    loss[70_001] = 7.0
    rates = 3e-4 * np.minimum(1, (steps + 1) / 2000) * (0.55 + 0.45 * np.cos(np.pi * steps / n))
    findings = judge_run(run(loss=(steps, loss), lr=(steps, rates), step_s=(steps, np.full(n, 0.2))))
    assert [finding.step for finding in loud(findings)] == [70_001]


def megatron_nan(last_finite: int) -> ForeignRun:
    """Lines of ten steps each; from one on the loss is NaN, and that line's mean is of its finite steps alone."""
    steps = np.arange(10, 2001, 10)
    loss = 2.6 + 3 * np.exp(-steps / 200) + np.random.default_rng(0).normal(0, 0.03, len(steps))
    loss[steps > last_finite] = np.nan
    counts = np.where(steps == last_finite, 4, np.where(steps > last_finite, 10, 0))
    return run("megatron", loss=(steps, loss), **{"number of nan iterations": (steps, counts)})


def test_nan_iterations_beside_a_finite_mean_lie_within_the_interval_of_that_line() -> None:
    finding = judge_run(megatron_nan(1230))[0]
    assert finding.severity == "critical" and finding.evidence["first_interval"] == [1221, 1230]
    assert "between step 1221 and step 1230" in finding.symptom and "1240" in finding.symptom
    single = megatron_nan(2000)
    assert judge_run(single)[0].severity == "warning" and judge_run(single)[0].evidence["nan_iterations"] == 4


@pytest.mark.parametrize(
    ("format", "line"),
    [
        ("megatron", "Run without `--no-check-for-nan-in-loss-and-grad`"),
        ("nanogpt", "error_if_nonfinite=True"),
        ("hf_trainer", "logging_nan_inf_filter=False"),
        ("lightning", "detect_anomaly=True"),
        ("deepspeed", "clipping does not remove a NaN."),
    ],
)
def test_the_fix_of_a_nan_is_not_to_clip(format: str, line: str) -> None:
    loss = falling()
    loss[300:] = np.nan
    finding = judge_run(run(format, loss=loss))[0]
    assert finding.rule == "nonfinite_input" and line in finding.fix
    assert not any("grad_clip = " in text or "--clip-grad" in text for text in [finding.fix])
    assert all(cause.name != "bad_batch" for cause in finding.alternatives)


def test_a_spike_that_comes_back_before_healthy_training_is_a_warning() -> None:
    steps = np.arange(0, 6001, 10)
    loss = 3.1 + 7.8 * np.exp(-steps / 350) + np.random.default_rng(1).normal(0, 0.05, len(steps))
    after = (steps >= 3410) & (steps < 3530)
    loss[after] += 4.2 * np.exp(-(steps[after] - 3410) / 40)
    finding = judge_run(run("nanogpt", {"vocab_size": 50304}, loss=(steps, loss)))[0]
    assert finding.severity == "warning" and finding.step == 3410 and 50 <= finding.evidence["back_after_steps"] <= 200
    assert finding.rule in ("lr_too_high", "bad_batch")
    causes = [finding.rule, *(cause.name for cause in finding.alternatives)]
    assert "diverged" not in causes and causes.index("weights_damaged") == len(causes) - 1


def overfitted(noise: float) -> ForeignRun:
    """Three epochs; the loss of the last is small, and a point's noise is that of a mean of ten steps."""
    steps = np.arange(10, 3001, 10)
    epoch = (steps - 1) // 1000
    loss = np.where(epoch == 0, 1.9 * np.exp(-steps / 300) + 1.2, np.where(epoch == 1, 0.75, 0.32))
    loss = loss + np.random.default_rng(2).normal(0, noise, len(steps))
    at = np.arange(250, 3001, 250)
    held_out = np.where(at <= 1000, 1.35 - 0.1 * at / 1000, 1.25 + 0.35 * (np.maximum(at - 1000, 0) / 1000) ** 1.2)
    made = run("hf_trainer", loss=(steps, loss), epoch=(steps, steps / 1000), validation_loss=(at, held_out))
    made.series["loss"] = Series("loss", steps, loss, np.arange(len(steps)), 10)
    return made


def test_overfitting_explains_noise_over_a_loss_of_almost_nothing() -> None:
    rules = [finding.rule for finding in judge_run(overfitted(0.03))]
    assert rules[0] == "overfitting" and "batch_too_small" not in rules


def test_noise_that_was_scaled_by_the_logging_interval_says_so() -> None:
    noisy = overfitted(0.2)
    del noisy.series["validation_loss"]
    (finding,) = [finding for finding in judge_run(noisy) if finding.rule == "batch_too_small"]
    assert "means of 10" in finding.symptom and "sqrt(10)" in finding.evidence["scaled_by"]
