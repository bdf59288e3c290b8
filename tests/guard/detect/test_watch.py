"""How the watch behaves: once per trouble, what was rejected stays out, the past can be forgotten and resumed."""

import json
import math

import numpy as np
import pytest

from bessemer.guard.alarm import ADVICE, debounce, make_alarm, median, robust_std, robust_std_around_line, theil_sen
from bessemer.guard.detectors import Detectors
from bessemer.spec.guard import DetectSpec, GuardSpec


def record(step, loss=2.0, norm=0.5, **more):
    return {
        "step": step, "loss": loss, "grad_norm": norm, "lr": 1e-3, "veto": None, "step_s": 0.4, "tokens_per_s": 1e4,
        "data_wait_s": 0.0, "memory_bytes": 1e9, **more,
    }  # fmt: skip


def run(watch, losses, start=0, **more):
    """The alarms of steps with these losses."""
    return [alarm for step, loss in enumerate(losses, start) for alarm in watch.step(record(step, float(loss), **more))]


def noisy(level, count, seed=0):
    return level * (1 + 0.02 * np.random.default_rng(seed).standard_normal(count))


@pytest.fixture
def watch():
    """It has seen 640 good steps."""
    made = Detectors(GuardSpec(), None, 100_000)
    assert run(made, noisy(2.0, 640)) == []
    return made


def kinds(alarms):
    return [(alarm.kind, alarm.severity) for alarm in alarms]


def test_an_alarm_comes_once_and_again_after_the_trouble_was_over(watch):
    risen = run(watch, noisy(2.3, 400, 1), 640)
    assert kinds(risen) == [("divergence", "warning")]
    assert risen[0].step < 640 + 128
    evidence = risen[0].finding.evidence
    assert evidence["rise"] == pytest.approx(0.15, abs=0.02) and abs(evidence["since_step"] - 640) < 48
    assert run(watch, noisy(2.0, 640, 2), 1040) == []
    assert kinds(run(watch, noisy(2.3, 200, 3), 1680)) == [("divergence", "warning")]


def test_a_large_rise_asks_for_a_rollback_and_only_once(watch):
    assert kinds(run(watch, noisy(2.8, 400, 1), 640)) == [("divergence", "rollback")]


def test_a_rise_that_grows_is_reported_again_when_it_asks_for_more(watch):
    found = run(watch, noisy(np.linspace(2.0, 3.0, 800), 800, 1), 640)
    assert kinds(found) == [("divergence", "warning"), ("divergence", "rollback")]


def test_rejected_steps_never_enter_the_reference(watch):
    """A thousand vetoed steps at twice the loss: the next accepted ones are as usual, and a rise is still one."""
    run(watch, noisy(4.0, 1000, 1), 640, veto="loss outlier")
    assert run(watch, noisy(2.0, 64, 2), 1640) == []
    assert kinds(run(watch, noisy(2.3, 200, 3), 1704)) == [("divergence", "warning")]


def test_an_explosion_that_is_vetoed_step_by_step_is_one(watch):
    found = [a for step in range(640, 690) for a in watch.step(record(step, norm=50.0, veto="gradient-norm outlier"))]
    assert ("gradient_exploding", "warning") in kinds(found)


def test_gradients_that_shrink_with_the_loss_are_no_fault(watch):
    for step in range(640, 1000):
        assert not any(a.kind == "gradient_vanishing" for a in watch.step(record(step, loss=0.01, norm=1e-3)))


def test_a_raised_loss_is_the_new_normal_in_the_end(watch):
    run(watch, noisy(2.4, 3000, 1), 640)
    assert len(watch.divergence.held) < 8
    assert kinds(run(watch, noisy(2.75, 200, 2), 3640)) == [("divergence", "warning")]


def test_after_a_known_change_the_past_is_no_reference(watch):
    watch.reopen("the data mixture changes")
    assert run(watch, noisy(3.0, 640, 1), 640) == []


def test_after_a_rollback_the_same_trouble_is_reported_again(watch):
    assert kinds(run(watch, noisy(2.8, 200, 1), 640)) == [("divergence", "rollback")]
    watch.reopen("rollback")
    assert run(watch, noisy(2.0, 160, 2), 640) == []
    assert kinds(run(watch, noisy(2.8, 200, 3), 800)) == [("divergence", "rollback")]


def test_nothing_is_said_of_the_first_steps():
    watch = Detectors(GuardSpec(), None, 1000)
    assert run(watch, [*noisy(2.0, 60), 15.0, *noisy(4.0, 60)]) == []


def test_a_not_finite_step_is_reported_at_once_and_a_streak_asks_for_a_rollback():
    watch = Detectors(GuardSpec(max_vetoes=5), None, 1000)
    bad = [math.nan, math.inf, math.nan, math.nan, math.nan, math.nan]
    found = run(watch, [2.0, *bad])
    assert [(a.step, a.severity) for a in found] == [(1, "warning"), (5, "rollback")]
    assert found[0].finding.evidence["which"] == ["loss"]


def test_an_overflow_is_how_fp16_finds_its_scale():
    watch = Detectors(GuardSpec(), None, 1000)
    assert watch.step(record(0, norm=math.inf, loss_scale=65536.0)) == []
    assert watch.step(record(1, loss=math.nan, loss_scale=65536.0)) != []


@pytest.mark.parametrize(
    ("lr", "more", "severity"),
    [
        (1e-3, {"lr_planned": 1e-3}, None),
        (1.1e-3, {"lr_planned": 1e-3}, "warning"),
        (1e-2, {"lr_planned": 1e-3}, "rollback"),
        (5e-4, {"lr_planned": 5e-4}, None),
        (2e-3, {}, None),  # as in the second step of a warm-up
        (1e-4, {}, None),
        (5e-3, {}, "warning"),
    ],
)
def test_the_learning_rate_is_held_against_its_plan(lr, more, severity):
    watch = Detectors(GuardSpec(), None, 1000)
    watch.step(record(0))
    found = watch.step(record(1) | {"lr": lr} | more)
    assert [a.severity for a in found if a.kind == "learning_rate"] == ([severity] if severity else [])


def test_a_clock_that_jumps_is_noted_and_a_slow_step_is_not():
    watch = Detectors(GuardSpec(), None, 1000)
    clocks = [(1000.0, 5.0), (1001.0, 6.0), (1900.0, 905.0), (5501.0, 906.0), (5502.0, 907.0), (1903.0, 908.0)]
    found = [
        (step, a.finding.evidence["seconds"]) for step, c in enumerate(clocks) for a in watch.step(record(step), c)
    ]
    assert found == [(3, pytest.approx(3600)), (5, pytest.approx(-3600))]


def test_a_clock_of_another_process_is_no_jump():
    first, second = Detectors(GuardSpec(), None, 1000), Detectors(GuardSpec(), None, 1000)
    first.step(record(0), (1000.0, 900.0))
    second.load(first.state())
    assert second.step(record(1), (1001.0, 3.0)) == []


def test_a_resumed_watch_says_what_an_uninterrupted_one_says(families, play):
    """State is JSON, taken in the middle of a block, and a fault follows."""
    trace = families[0](np.random.default_rng(3), 2400)
    trace.loss[1800:] *= 1.4
    trace.norm[2000:] *= 30
    records = list(trace.records())
    whole, first, second = (Detectors(GuardSpec(), 2**36, 2400) for _ in range(3))
    expected = [a for r in records for a in whole.step(r)]
    found = [a for r in records[:1813] for a in first.step(r)]
    second.load(json.loads(json.dumps(first.state(), allow_nan=False)))
    found += [a for r in records[1813:] for a in second.step(r)]
    assert found == expected and {a.kind for a in found} >= {"divergence", "gradient_exploding"}
    assert second.state() == whole.state()


def test_a_state_is_a_copy(watch):
    before = watch.state()
    text = json.dumps(before)
    other = Detectors(GuardSpec(), None, 100_000)
    other.load(before)
    run(other, noisy(2.5, 200, 1), 640)
    run(watch, noisy(2.5, 200, 1), 640)
    assert json.dumps(before) == text and len(text) < 100_000


def test_a_plateau_is_noted_once_and_a_slow_fall_is_none():
    spec = GuardSpec(detect=DetectSpec(plateau_least=1600))
    flat = Detectors(spec, None, 4000)
    assert kinds(run(flat, noisy(3.0, 4000))) == [("plateau", "note")]
    falls = Detectors(spec, None, 4000)
    assert run(falls, noisy(np.linspace(3.0, 2.8, 4000), 4000)) == []
    resting = Detectors(spec, None, 4000)  # at the end of the schedule a flat loss is what one expects
    rates = np.where(np.arange(4000) < 800, 1e-3, 1e-4).tolist()
    found = [a for i, x in enumerate(noisy(3.0, 4000)) for a in resting.step(record(i, float(x)) | {"lr": rates[i]})]
    assert found == []


def validations(watch, losses, training):
    """A validation after every 64 steps at the training loss given."""
    found = []
    for number, (loss, level) in enumerate(zip(losses, training, strict=True)):
        run(watch, noisy(level, 64, number), 64 * number)
        said = {"step": 64 * (number + 1), "loss": loss, "per_source": {"a": loss, "b": 1.0}}
        found += watch.validation(said)
    return found


FALLING = [3 - 0.1 * i for i in range(14)]


@pytest.mark.parametrize(
    ("losses", "training", "at"),
    [
        ([3.2 - 0.1 * i for i in range(8)] + [2.55, 2.6, 2.65, 2.7, 2.75, 2.8], FALLING, 11),
        ([3.2 - 0.1 * i for i in range(14)], FALLING, None),
        # Training rises as well: not overfitting but divergence.
        ([3.2 - 0.1 * i for i in range(8)] + [2.55, 2.6, 2.65, 2.7, 2.75, 2.8], FALLING[:8] + [2.5] * 6, None),
        # Validation that strays up and down around a level.
        ([3.2, 2.9, 2.6, 2.62, 2.58, 2.63, 2.6, 2.57, 2.62, 2.6, 2.58, 2.61, 2.6, 2.6], FALLING, None),
    ],
    ids=["overfits", "learns", "diverges", "strays"],
)
def test_overfitting_is_validation_that_rises_while_training_falls(losses, training, at):
    found = [a for a in validations(Detectors(GuardSpec(), None, 10**6), losses, training) if a.kind == "overfitting"]
    assert [a.step for a in found] == ([64 * at] if at else [])
    if found:
        rises = found[0].finding.evidence["rise_per_source"]
        assert rises["a"] > 0.1 and rises["b"] == 0


def test_a_latch_needs_clear_evaluations_in_a_row():
    active = {}
    said = [debounce(active, "x", bad, 2) for bad in (1, 1, 0, 1, 0, 0, 1)]
    assert said == [True, False, False, False, False, False, True]


def test_every_kind_says_its_cause_and_what_to_do():
    for kind in ADVICE:
        (said,) = make_alarm(kind, 0, "note", "", 0.5)
        assert len(said.finding.cause) > 10 and len(said.finding.fix) > 10


def test_robust_statistics_against_numpy():
    rng = np.random.default_rng(0)
    for n in (7, 16, 33):
        values = rng.standard_normal(n)
        assert median(values.tolist()) == pytest.approx(np.median(values))
        mad = np.median(np.abs(values - np.median(values)))
        assert robust_std(values.tolist()) == pytest.approx(1.4826 * mad)
        assert robust_std_around_line((3 + 2 * np.arange(n)).tolist()) == pytest.approx(0, abs=1e-9)
    slope, tau = theil_sen([1.0, 3.0, 5.0, 100.0, 9.0, 11.0])
    assert slope == 2.0 and tau == pytest.approx((13 - 2) / 15)
