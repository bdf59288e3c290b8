"""The verdict against the documented rule written in plain Python, and what a veto may and may not do."""

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bessemer.guard.judge import ACCEPT, GRAD_OUTLIER, LOSS_OUTLIER, NONFINITE, Judge
from bessemer.spec.schema import GuardSpec

CPU = torch.device("cpu")


def judge_of(**settings_):
    return Judge(GuardSpec(**settings_), CPU)


def say(judge, loss, grad=1.0):
    verdict = judge.judge(torch.tensor(float(loss)), torch.tensor(float(grad)))
    assert verdict.reject.dtype == torch.float32 and verdict.reject.shape == ()
    numbers = verdict.read()
    assert float(verdict.reject) == float(numbers["code"] != ACCEPT)
    return numbers


def filled(steps=200, level=4.0, noise=0.2, seed=0, **settings_):
    """A judge that has seen a plateau: loss N(level, noise), gradient norm exp(N(0, 0.3))."""
    judge, rng = judge_of(**settings_), np.random.default_rng(seed)
    for loss, grad in zip(rng.normal(level, noise, steps), np.exp(rng.normal(0, 0.3, steps)), strict=True):
        assert say(judge, loss, grad)["code"] == ACCEPT
    return judge


def held(judge):
    """The window's losses, oldest first."""
    count, size = int(judge.count), judge.spec.window
    row = judge.window_2N[0]
    return [float(row[i % size]) for i in range(max(0, count - size), count)]


@dataclass
class Plain:
    """The rule as the module's opening states it, over lists of Python floats."""

    spec: GuardSpec
    values: deque = field(default_factory=deque)
    streak: int = 0
    accepted: int = 0

    @staticmethod
    def median(values):
        return sorted(values)[(len(values) - 1) // 2]

    def judge(self, loss, grad):
        """(code, reopened, [(z, centre) of the loss and of the log gradient norm])."""
        value = (np.float32(loss), np.log(np.maximum(np.float32(grad), np.float32(1e-30))))
        if not (math.isfinite(loss) and math.isfinite(grad)):
            self.streak += 1
            return NONFINITE, False, []
        statistics = [self.statistics(k, float(value[k])) for k in (0, 1)] if len(self.values) >= 2 else []
        limits = (self.spec.loss_sigma, self.spec.grad_sigma)
        outlier = [z > limit for (z, _), limit in zip(statistics, limits, strict=False)]
        ready = self.accepted >= self.spec.warmup
        code = LOSS_OUTLIER if outlier[:1] == [True] else GRAD_OUTLIER if outlier[1:] == [True] else ACCEPT
        code = code if ready else ACCEPT
        reopened = code != ACCEPT and self.streak >= self.spec.max_vetoes
        if reopened:
            self.values.clear()
            self.accepted, code = 0, ACCEPT
        if code == ACCEPT:
            self.values.append((float(value[0]), float(value[1])))
            while len(self.values) > self.spec.window:
                self.values.popleft()
            self.accepted, self.streak = self.accepted + 1, 0
        else:
            self.streak += 1
        return code, reopened, statistics

    def statistics(self, k, value):
        values = [pair[k] for pair in self.values]  # oldest first
        n = len(values)
        newer = (n + 1) // 2
        center = self.median(values[n - newer :])
        slope = (center - self.median(values[: n - newer])) / max(n / 2, 1)
        # The newer median lies in the middle of the newer half, n / 4 steps back.
        line = [center + slope * (n / 4 - age) for age in range(n - 1, -1, -1)]
        deviation = 1.4826 * self.median([abs(v - at) for v, at in zip(values, line, strict=True)])
        floor = 0.02 * abs(center) if k == 0 else 0.25
        return (value - center) / max(deviation, floor), center


def mixed_steps(rng, count):
    """A noisy, drifting loss and gradient norm with spikes, dips, constants and what is not finite among them."""
    drift = rng.normal(4, 2) + np.linspace(0, rng.normal(0, 2), count)
    losses = np.abs(drift + rng.choice([0.0, 0.01, 0.3]) * rng.standard_t(3, count)) + 0.5
    grads = np.exp(rng.normal(0, rng.choice([0.0, 0.1, 0.6]), count))
    odd = rng.random((2, count)) < rng.choice([0.0, 0.05, 0.3])
    losses[odd[0]] = rng.choice([np.nan, np.inf, -np.inf, 60.0, 60.0, 60.0, 0.5, 1e30], odd[0].sum())
    grads[odd[1]] = rng.choice([np.nan, np.inf, 1e-3, 30.0, 1e6, 1e6, 0.0], odd[1].sum())
    return list(zip(losses.tolist(), grads.tolist(), strict=True))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 90),
    window=st.integers(16, 24),
    warmup=st.integers(8, 40),
    max_vetoes=st.integers(1, 4),
)
def test_verdicts_follow_the_documented_rule_over_any_rotation(seed, count, window, warmup, max_vetoes):
    steps = mixed_steps(np.random.default_rng(seed), count)
    spec = GuardSpec(window=window, warmup=warmup, max_vetoes=max_vetoes)
    judge, plain = Judge(spec, CPU), Plain(spec)
    for loss, grad in steps:
        found = say(judge, loss, grad)
        code, reopened, statistics = plain.judge(loss, grad)
        # Within rounding of the threshold either verdict is right, and the two would part ways.
        limits = (spec.loss_sigma, spec.grad_sigma)
        assume(all(abs(z - limit) > 0.01 for (z, _), limit in zip(statistics, limits, strict=False)))
        for (z, center), name in zip(statistics, ("loss", "grad"), strict=False):
            assert found[f"{name}_z"] == pytest.approx(z, rel=2e-3, abs=2e-3)
            there = center if name == "loss" else math.exp(center)
            assert found[f"{name}_center"] == pytest.approx(there, rel=1e-5, abs=1e-6)
        assert (found["code"], bool(found["reopened"]), found["streak"]) == (code, reopened, plain.streak)
        assert held(judge) == pytest.approx([pair[0] for pair in plain.values])
        assert int(judge.count) == plain.accepted


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["loss", "grad"])
@pytest.mark.parametrize("steps", [0, 1, 200])
def test_what_is_not_finite_is_vetoed_from_the_first_step_on(bad, which, steps):
    judge = filled(steps)
    before = {name: tensor.clone() for name, tensor in judge.state().items()}
    found = say(judge, bad if which == "loss" else 4.0, bad if which == "grad" else 1.0)
    assert found["code"] == NONFINITE
    assert torch.equal(judge.window_2N.nan_to_num(-1), before["window"].nan_to_num(-1))
    assert judge.count == before["count"] and judge.streak == 1


def test_what_is_not_finite_is_never_accepted_however_long_it_lasts():
    judge = filled(max_vetoes=2)
    assert [say(judge, float("nan"))["code"] for _ in range(20)] == [NONFINITE] * 20
    assert say(judge, 4.0)["code"] == ACCEPT
    assert int(judge.streak) == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_spike_of_ten_sigma_is_vetoed_and_never_enters_the_window(seed):
    noise = 0.2
    judge = filled(seed=seed, noise=noise)
    before = held(judge)
    found = say(judge, 4.0 + 10 * noise)
    assert found["code"] == LOSS_OUTLIER and found["loss_z"] > 8
    assert held(judge) == before and int(judge.count) == 200
    assert say(judge, 4.0 + 3 * noise)["code"] == ACCEPT
    assert held(judge)[-1] == pytest.approx(4.0 + 3 * noise)


def test_a_gradient_spike_is_vetoed_by_name():
    judge = filled()
    assert say(judge, 4.0, math.exp(0.3 * 15))["code"] == GRAD_OUTLIER
    assert say(judge, 40.0, math.exp(0.3 * 15))["code"] == LOSS_OUTLIER


@pytest.mark.parametrize(("loss", "grad"), [(0.0, 1.0), (4.0, 0.0), (-50.0, 1e-30), (1e-3, 1e-9)])
def test_low_values_are_no_outliers(loss, grad):
    assert say(filled(), loss, grad)["code"] == ACCEPT


def test_nothing_finite_is_vetoed_before_the_warm_up_is_over():
    judge = judge_of(warmup=32)
    for step in range(32):
        assert say(judge, 4.0 if step != 20 else 1e30, 1.0 if step != 10 else 1e30)["code"] == ACCEPT
    assert say(judge, 1e30)["code"] == LOSS_OUTLIER


def test_spikes_do_not_widen_the_scale_they_are_judged_by():
    """One step in ten is a spike: the window holds none of them, so the last is judged like the first."""
    judge, rng = filled(), np.random.default_rng(1)
    for step in range(300):
        spike = step % 10 == 0
        found = say(judge, 8.0 if spike else rng.normal(4, 0.2), 1.0)
        assert (found["code"] == LOSS_OUTLIER) == spike, step
    assert max(held(judge)) < 5


@pytest.mark.parametrize("max_vetoes", [1, 3, 5])
def test_a_lasting_jump_is_vetoed_so_often_and_then_becomes_the_reference(max_vetoes):
    judge, rng = filled(max_vetoes=max_vetoes), np.random.default_rng(2)
    found = [say(judge, rng.normal(7, 0.2), 1.0) for _ in range(300)]
    assert [entry["code"] for entry in found] == [LOSS_OUTLIER] * max_vetoes + [ACCEPT] * (300 - max_vetoes)
    assert [entry["reopened"] for entry in found] == [0.0] * max_vetoes + [1.0] + [0.0] * (299 - max_vetoes)
    assert [entry["streak"] for entry in found[: max_vetoes + 1]] == [*range(1, max_vetoes + 1), 0]
    assert min(held(judge)) > 6
    assert say(judge, 10.0)["code"] == LOSS_OUTLIER


def test_the_window_restarts_with_the_accepted_value_alone():
    judge = filled(max_vetoes=2)
    for _ in range(3):
        say(judge, 9.0)
    assert held(judge) == [9.0] and int(judge.count) == 1
    assert int(judge.window_2N.isfinite().sum()) == 2


def test_one_good_step_between_starts_the_streak_anew():
    judge = filled(max_vetoes=3)
    for _ in range(40):
        assert [say(judge, 9.0)["code"] for _ in range(3)] == [LOSS_OUTLIER] * 3
        assert say(judge, 4.0)["code"] == ACCEPT


def test_reopen_forgets_the_window_and_warms_up_again():
    judge = filled(warmup=32)
    assert say(judge, 9.0)["code"] == LOSS_OUTLIER
    judge.reopen()
    assert held(judge) == [] and bool(judge.window_2N.isnan().all())
    assert [say(judge, 9.0 + 0.01 * (k % 3))["code"] for k in range(32)] == [ACCEPT] * 32
    assert say(judge, 4.0)["code"] == ACCEPT  # a fall is no outlier
    assert say(judge, 14.0)["code"] == LOSS_OUTLIER


def test_a_falling_loss_is_no_noise():
    """Without the line through the halves, the fall of early training would hide a spike of twice the loss."""
    judge = judge_of()
    for step in range(128):
        say(judge, 8.0 - 0.03 * step + 0.01 * (-1) ** step)
    assert say(judge, 8.0)["code"] == LOSS_OUTLIER


@given(at=st.integers(0, 60), seed=st.integers(0, 5))
@settings(max_examples=10)
def test_a_saved_judge_goes_on_identically(at, seed):
    rng = np.random.default_rng(seed)
    values = np.where(rng.random(100) < 0.1, 30.0, rng.normal(4, 0.1, 100))
    spec = GuardSpec(window=16, warmup=8, max_vetoes=2)
    unbroken, first = Judge(spec, CPU), Judge(spec, CPU)
    for value in values[:at]:
        say(unbroken, value)
        say(first, value)
    saved = {name: tensor.clone() for name, tensor in first.state().items()}
    assert {name: tensor.dtype for name, tensor in saved.items()} == {
        "window": torch.float32,
        "count": torch.int64,
        "streak": torch.float32,
    }
    resumed = Judge(spec, CPU)
    resumed.load(saved)
    for value in values[at:]:
        assert repr(say(resumed, value)) == repr(say(unbroken, value))  # as text, where NaN equals NaN


def test_a_judgement_never_waits_for_the_host(monkeypatch):
    judge = filled()

    def refuse(*_, **__):
        raise AssertionError("a tensor was read on the host")

    loss, grad = torch.tensor(50.0), torch.tensor(1.0)
    with monkeypatch.context() as patch:
        for name in (
            "item",
            "__bool__",
            "__float__",
            "__int__",
            "__index__",
            "tolist",
            "numpy",
            "cpu",
            "nonzero",
        ):
            patch.setattr(torch.Tensor, name, refuse)
        with pytest.raises(AssertionError):
            bool(loss > grad)
        verdicts = [judge.judge(loss, grad) for _ in range(8)]
        judge.reopen()
        verdicts.append(judge.judge(loss, grad))
    assert [int(verdict.read()["code"]) for verdict in verdicts] == [LOSS_OUTLIER] * 5 + [ACCEPT] * 4


def test_the_judge_keeps_no_graph():
    judge = judge_of()
    loss = torch.tensor(3.0, requires_grad=True) * 2
    verdict = judge.judge(loss, loss * 1.0)
    assert not verdict.reject.requires_grad and not any(t.requires_grad for t in judge.state().values())
