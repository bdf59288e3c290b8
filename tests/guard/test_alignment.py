"""Each detector of preference and reinforcement runs has a planted case and a clean one."""

import numpy as np
import pytest

from bessemer.guard.alarm import ADVICE
from bessemer.guard.alignment import ALIGNMENT_ALARMS
from bessemer.guard.detectors import Detectors
from bessemer.guard.trends import SPAN
from bessemer.spec.guard import AlignmentSpec, GuardSpec

from .bandit import Answers, Bandit, train

STEP = {
    "loss": 0.0, "grad_norm": 1.0, "lr": 1e-3, "veto": None, "step_s": 1.0, "tokens_per_s": 1.0, "data_wait_s": 0.0,
    "memory_bytes": 1,
}  # fmt: skip


def kinds(outcome):
    return {alarm.kind for alarm in outcome.alarms}


def play(columns, objective="grpo", spec=None, noise=0.01, **more):
    """All alarms of a run whose metrics are these columns, with a little noise."""
    detectors = Detectors(spec or GuardSpec(), None, 10**6, objective=objective, **more)
    rng, alarms = np.random.default_rng(0), []
    for step in range(len(next(iter(columns.values())))):
        values = {name: float(column[step] + noise * rng.standard_normal()) for name, column in columns.items()}
        alarms += detectors.step({"step": step, **STEP, **values})
    return alarms


def test_every_alarm_has_a_cause_and_a_fix():
    assert all(len(ADVICE[kind].split("; ")) == 2 for kind in ALIGNMENT_ALARMS)


def test_kl_that_buys_nothing_is_a_runaway():
    spec = GuardSpec(alignment=AlignmentSpec(kl_limit=0.05))
    outcome = train(Bandit(0, Answers.noise, lr=0.15, texts=False), 120, spec)
    alarm = next(alarm for alarm in outcome.alarms if alarm.kind == "kl_runaway")
    assert alarm.severity == "warning" and "the reward has not risen" in alarm.finding.symptom
    assert "kl_runaway" not in kinds(train(Bandit(0, Answers.honest, texts=False), 80, spec)), (
        "the reward rises with it"
    )


def test_entropy_that_collapses_before_the_task_is_solved():
    outcome = train(Bandit(1, Answers.noise, lr=0.5, fillers=0.0, texts=False), 120)
    assert "entropy_collapse" in kinds(outcome)
    solved = train(Bandit(1, Answers.correct, lr=0.15, fillers=0.0, easy=0.5, texts=False), 120)
    assert solved.true_quality[-1] > 0.95 and "entropy_collapse" not in kinds(solved)


def test_answers_that_grow_without_more_reward():
    outcome = train(Bandit(2, Answers.noise, push=0.03, texts=False), 100)
    assert "length_drift" in kinds(outcome) and "reward_hacking" not in kinds(outcome)
    t = np.arange(160.0)
    growing = {"answer_tokens": 100 + 2 * t}
    assert {alarm.kind for alarm in play(growing | {"reward": 0 * t})} == {"length_drift"}
    assert play(growing | {"reward": 0.01 * t}) == [], "paid for by the reward"


def test_answers_that_do_not_end():
    outcome = train(Bandit(2, Answers.noise, push=0.08, texts=False), 110)
    alarm = next(alarm for alarm in outcome.alarms if alarm.kind == "format_collapse")
    assert "answers without an end" in alarm.finding.symptom


def test_repetition_and_a_format_reward_that_falls():
    t = np.arange(120.0)
    healthy = {"reward": 1 + 0.01 * t, "reward_format": 0.9 + 0 * t, "repetition": 0.05 + 0 * t}
    assert play(healthy) == []
    (alarm,) = play(healthy | {"reward_format": np.where(t < 60, 0.9, 0.1)})
    assert alarm.kind == "format_collapse" and "reward_format fell from 0.9" in alarm.finding.symptom
    (alarm,) = play({"reward": 1 + 0 * t, "repetition": np.where(t < 60, 0.05, 0.4)})
    assert alarm.finding.evidence["repetition"]["now"] == pytest.approx(0.4, abs=0.02)
    assert alarm.finding.evidence["healthy_step"] in range(50, 72)


def test_groups_with_equal_rewards_and_whether_the_task_is_solved():
    (alarm,) = train(Bandit(0, Answers.never, texts=False), 40).alarms
    assert (alarm.kind, alarm.severity) == ("equal_groups", "note")
    solved = train(Bandit(1, Answers.correct, lr=0.15, easy=0.5, texts=False), 120)
    assert "the task is solved" in next(a for a in solved.alarms if a.kind == "equal_groups").finding.symptom
    assert "equal_groups" not in kinds(train(Bandit(0, Answers.honest, texts=False), 40))


def test_the_level_of_a_reward_model_that_drifts():
    t = np.arange(160.0)
    learned = {"accuracy": 0.7 + 0 * t, "margin": 1 + 0 * t}
    drifts = learned | {"chosen_reward": 0.5 + 0.06 * t, "rejected_reward": -0.5 + 0.06 * t}
    (alarm,) = play(drifts, "reward")
    assert alarm.kind == "reward_drift" and "the accuracy stayed at 69.8%" in alarm.finding.symptom
    assert play(learned | {"chosen_reward": 0.5 + 0 * t, "rejected_reward": -0.5 + 0 * t}, "reward") == []
    better = learned | {"margin": 1 + 0.05 * t, "chosen_reward": 0.03 * t, "rejected_reward": -0.02 * t}
    assert play(better, "reward") == []


def preferences(similar, steps=120):
    """DPO of a log-linear policy over 50 answers: gradient ascent on pairs, their chosen answers' log-probabilities and
    margins. With `similar` the rejected answers have more of what the chosen ones have."""
    rng, beta = np.random.default_rng(0), 0.1
    features_AF = rng.standard_normal((50, 24))
    chosen, rejected = np.arange(10), np.arange(10, 20)
    if similar:
        features_AF[rejected] = 2 * features_AF[chosen] + 0.2 * rng.standard_normal((10, 24))
    weights_F, curves = np.zeros(24), {"chosen_shift": [], "margin": [], "chosen_reward": [], "rejected_reward": []}
    for _ in range(steps):
        scores_A = features_AF @ weights_F
        logp_A = scores_A - np.log(np.exp(scores_A).sum()) + np.log(50)
        margin = beta * (logp_A[chosen] - logp_A[rejected])
        for name, value in (
            ("chosen_shift", logp_A[chosen]), ("margin", margin), ("chosen_reward", beta * logp_A[chosen]),
            ("rejected_reward", beta * logp_A[rejected]),
        ):  # fmt: skip
            curves[name].append(value.mean())
        push = beta / (1 + np.exp(margin))
        weights_F = weights_F + 0.6 * push @ (features_AF[chosen] - features_AF[rejected]) / 2
    return {name: np.array(values) for name, values in curves.items()}


def test_chosen_answers_that_get_less_likely_while_the_margin_grows():
    displaced = preferences(similar=True)
    assert displaced["chosen_shift"][-1] < -1 and displaced["margin"][-1] > displaced["margin"][0]
    (alarm,) = play(displaced, "dpo", noise=1e-3)
    assert alarm.kind == "likelihood_displacement" and "nats" in alarm.finding.symptom
    healthy = preferences(similar=False)
    assert healthy["chosen_shift"][-1] < -1, "usual in DPO, and a small part of the margin"
    assert play(healthy, "dpo", noise=1e-3) == []


def validations(detectors, scores, name, training=None):
    alarms = []
    for i, score in enumerate(scores):
        for step in range(20 * i, 20 * (i + 1)):
            values = {"accuracy": 0.5 + step / 1000, "reward": step / 100}
            detectors.step({"step": step, **STEP, **values})
        alarms += detectors.validation({"step": 20 * (i + 1), "loss": 1.0, name: score, "per_source": {}})
    return alarms


def test_a_held_out_score_past_its_best_names_the_best_step():
    rising = [0.5, 0.6, 0.7, 0.75, 0.8, 0.81, 0.8, 0.81]
    assert validations(Detectors(GuardSpec(), None, 1000, objective="dpo"), rising, "accuracy") == []
    past = [0.5, 0.6, 0.7, 0.8, 0.76, 0.74, 0.7]
    (alarm,) = validations(Detectors(GuardSpec(), None, 1000, objective="dpo"), past, "accuracy")
    assert (alarm.kind, alarm.step, alarm.finding.evidence["best_step"]) == ("over_optimisation", 140, 80)
    assert "was best after step 80" in alarm.finding.symptom
    (alarm,) = validations(Detectors(GuardSpec(), None, 1000, objective="grpo"), past, "reward")
    assert alarm.kind == "over_optimisation"
    assert validations(Detectors(GuardSpec(), None, 1000, objective="pretrain"), past, "accuracy") == []


def test_a_judge_that_only_validations_know_is_hacking():
    spec = GuardSpec(alignment=AlignmentSpec(judge=["quality"]))
    past = [0.5, 0.6, 0.7, 0.8, 0.76, 0.74, 0.7]
    (alarm,) = validations(Detectors(spec, None, 1000, objective="grpo"), past, "reward_quality")
    assert (alarm.kind, alarm.severity) == ("reward_hacking", "stop")


def test_the_best_validation_is_by_accuracy_reward_or_judge():
    record = {"loss": 2.0, "accuracy": 0.8, "reward": 1.5, "reward_quality": 0.4}
    for objective, judges, score in (
        ("pretrain", (), 2.0), ("dpo", (), -0.8), ("grpo", (), -1.5), ("grpo", ("reward_quality",), -0.4),
    ):  # fmt: skip
        detectors = Detectors(GuardSpec(), None, 1000, objective=objective, judges=judges)
        assert detectors.alignment.score(record) == score


def test_the_loss_of_a_policy_gradient_is_not_judged():
    t = np.arange(600.0)
    loss = np.where(t < 300, -0.02, 0.5)
    assert play({"loss": loss, "reward": 0 * t}) == []
    assert "divergence" in {alarm.kind for alarm in play({"loss": loss}, "pretrain")}


def test_a_rollback_cuts_the_past_and_a_known_change_does_not():
    detectors = Detectors(GuardSpec(), None, 1000, objective="grpo")
    for step in range(4 * SPAN):
        detectors.step({"step": step, **STEP, "reward": 0.0})
    detectors.reopen("the batch size changes")
    assert len(detectors.alignment.blocks) == 4
    detectors.step({"step": 2 * SPAN, **STEP, "reward": 0.0})
    assert [block["end"] for block in detectors.alignment.blocks] == [SPAN - 1, 2 * SPAN - 1]


def test_a_stopped_run_that_is_started_again_is_stopped_again():
    t = np.arange(200.0)
    spec = GuardSpec(alignment=AlignmentSpec(format="stop"))
    alarms = play({"reward": 1 + 0 * t, "repetition": np.where(t < 60, 0.05, 0.4)}, spec=spec)
    assert len(alarms) > 3 and {alarm.severity for alarm in alarms} == {"stop"}


def test_metrics_may_be_missing_not_finite_or_of_vetoed_steps():
    detectors = Detectors(GuardSpec(), None, 1000, objective="grpo")
    for step in range(60):
        record = {"step": step, **STEP, "reward": float("nan") if step % 3 else 1.0}
        assert detectors.step(record | ({"veto": "loss outlier"} if step % 5 == 0 else {})) == []
