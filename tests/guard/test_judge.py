"""The verdict against the documented rule written in plain Python, and what a veto may and may not do."""

import math
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bessemer.guard.judge import ACCEPT, GRAD_OUTLIER, LOSS_OUTLIER, NONFINITE, Judge
from bessemer.spec.guard import GuardSpec

CPU = torch.device("cpu")


def judge_of(**settings_):
    return Judge(GuardSpec(**settings_), CPU)


def say(judge, loss, grad=1.0, rows=None):
    verdict = judge.judge(torch.tensor(float(loss)), torch.tensor(float(grad)), rows)
    assert verdict.reject.dtype == torch.float32 and verdict.reject.shape == ()
    numbers = verdict.read()
    assert float(verdict.reject) == float(numbers["code"] != ACCEPT)
    return numbers


def filled(steps=200, level=4.0, noise=0.2, seed=0, **settings_):
    """A judge that has seen a plateau: loss N(level, noise), gradient norm exp(N(0, 0.3))."""
    return deepcopy(_filled(steps, level, noise, seed, **settings_))


@cache
def _filled(steps, level, noise, seed, **settings_):
    judge, rng = judge_of(**settings_), np.random.default_rng(seed)
    for loss, grad in zip(rng.normal(level, noise, steps), np.exp(rng.normal(0, 0.3, steps)), strict=True):
        assert say(judge, loss, grad)["code"] == ACCEPT
    return judge


def held(judge):
    """The window's losses, oldest first."""
    count, size = int(judge.count), judge.spec.window
    row = judge.window_3N[0]
    return [float(row[i % size]) for i in range(max(0, count - size), count)]


@dataclass
class Plain:
    """The rule as the module's opening states it, over lists of Python floats."""

    spec: GuardSpec
    rows: int = 64
    values: deque = field(default_factory=deque)
    streak: int = 0
    accepted: int = 0
    vetoed: list = field(default_factory=list)  # of every judged step, whether it was vetoed while finite

    @staticmethod
    def median(values):
        return sorted(values)[(len(values) - 1) // 2]

    def judge(self, loss, grad):
        """(code, reopened, gave way, [(z, centre, scale) of the loss and of the log gradient norm])."""
        value = (np.float32(loss), np.log(np.maximum(np.float32(grad), np.float32(1e-30))))
        if not (math.isfinite(loss) and math.isfinite(grad)):
            self.streak += 1
            self.vetoed.append(False)
            return NONFINITE, False, False, []
        statistics = [self.statistics(k, float(value[k])) for k in (0, 1)] if len(self.values) >= 2 else []
        limits = (self.spec.loss_sigma, self.spec.grad_sigma)
        outlier = [z > limit for (z, _, _), limit in zip(statistics, limits, strict=False)]
        ready = self.accepted >= self.spec.warmup
        code = LOSS_OUTLIER if outlier[:1] == [True] else GRAD_OUTLIER if outlier[1:] == [True] else ACCEPT
        code = code if ready else ACCEPT
        reopened = code != ACCEPT and self.streak >= self.spec.max_vetoes
        often = sum(self.vetoed[-self.spec.window :]) >= max(1, self.spec.veto_share * self.spec.window)
        gave_way = code != ACCEPT and often and not reopened
        if reopened:
            self.values.clear()
            self.accepted = 0
        if reopened or gave_way:
            code = ACCEPT
        if code == ACCEPT:
            self.values.append((float(value[0]), float(value[1])))
            while len(self.values) > self.spec.window:
                self.values.popleft()
            self.accepted, self.streak = self.accepted + 1, 0
        else:
            self.streak += 1
        self.vetoed.append(code != ACCEPT)
        return code, reopened, gave_way, statistics

    def statistics(self, k, value):
        values = [pair[k] for pair in self.values]  # oldest first
        n = len(values)
        newer = (n + 1) // 2
        center = self.median(values[n - newer :])
        slope = (center - self.median(values[: n - newer])) / max(n / 2, 1)
        # The newer median lies in the middle of the newer half, n / 4 steps back.
        line = [center + slope * (n / 4 - age) for age in range(n - 1, -1, -1)]
        away = sorted(v - at for v, at in zip(values, line, strict=True))
        usual = 1.4826 * self.median([abs(deviation) for deviation in away])
        tail = away[int((n - 1) * 0.95)] / 1.645
        floor = max(0.01, 0.36 / self.rows) * abs(center) if k == 0 else 0.2 + 0.3 / self.rows
        scale = max(usual, tail, floor)
        return (value - center) / scale, center, scale


def mixed_steps(rng, count):
    """A noisy, drifting loss and gradient norm with spikes, dips, constants and what is not finite among them."""
    drift = rng.normal(4, 2) + np.linspace(0, rng.normal(0, 2), count)
    losses = np.abs(drift + rng.choice([0.0, 0.01, 0.3]) * rng.standard_t(3, count)) + 0.5
    grads = np.exp(rng.normal(0, rng.choice([0.0, 0.1, 0.6]), count))
    odd = rng.random((2, count)) < rng.choice([0.0, 0.05, 0.3])
    losses[odd[0]] = rng.choice([np.nan, np.inf, -np.inf, 60.0, 60.0, 60.0, 0.5, 1e30], odd[0].sum())
    grads[odd[1]] = rng.choice([np.nan, np.inf, 1e-3, 30.0, 1e6, 1e6, 0.0], odd[1].sum())
    return list(zip(losses.tolist(), grads.tolist(), strict=True))


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 90),
    window=st.integers(16, 24),
    warmup=st.integers(8, 40),
    max_vetoes=st.integers(1, 4),
    veto_share=st.sampled_from([0.0, 0.05, 0.15, 1.0]),
    rows=st.sampled_from([1, 4, 64, 1024]),
)
def test_verdicts_follow_the_documented_rule_over_any_rotation(
    seed, count, window, warmup, max_vetoes, veto_share, rows
):
    rng = np.random.default_rng(seed)
    steps = mixed_steps(rng, count)
    spec = GuardSpec(window=window, warmup=warmup, max_vetoes=max_vetoes, veto_share=veto_share)
    judge, plain = Judge(spec, CPU, rows), Plain(spec, rows)
    for loss, grad in steps:
        found = say(judge, loss, grad)
        code, reopened, gave_way, statistics = plain.judge(loss, grad)
        # Within rounding of the threshold either verdict is right, and the two would part ways.
        limits = (spec.loss_sigma, spec.grad_sigma)
        assume(all(abs(z - limit) > 0.01 for (z, _, _), limit in zip(statistics, limits, strict=False)))
        for (z, center, scale), name in zip(statistics, ("loss", "grad"), strict=False):
            assert found[f"{name}_z"] == pytest.approx(z, rel=2e-3, abs=2e-3)
            there = center if name == "loss" else math.exp(center)
            assert found[f"{name}_center"] == pytest.approx(there, rel=1e-5, abs=1e-6)
            assert found[f"{name}_scale"] == pytest.approx(scale, rel=1e-3, abs=1e-5)
        assert (found["code"], found["reopened"], found["gave_way"]) == (code, reopened, gave_way)
        assert found["streak"] == plain.streak
        assert held(judge) == pytest.approx([pair[0] for pair in plain.values])
        assert int(judge.count) == plain.accepted and int(judge.judged) == len(plain.vetoed)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["loss", "grad"])
@pytest.mark.parametrize("steps", [0, 1, 200])
def test_what_is_not_finite_is_vetoed_from_the_first_step_on(bad, which, steps):
    judge = filled(steps)
    before = {name: tensor.clone() for name, tensor in judge.state().items()}
    found = say(judge, bad if which == "loss" else 4.0, bad if which == "grad" else 1.0)
    assert found["code"] == NONFINITE
    assert torch.equal(judge.window_3N[:2].nan_to_num(-1), before["window"].nan_to_num(-1))
    assert judge.count == before["count"] and judge.streak == 1


def test_what_is_not_finite_is_never_accepted_however_long_it_lasts():
    judge = filled(max_vetoes=2)
    assert [say(judge, float("nan"))["code"] for _ in range(20)] == [NONFINITE] * 20
    assert say(judge, 4.0)["code"] == ACCEPT
    assert int(judge.streak) == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_spike_of_fifteen_sigma_is_vetoed_and_never_enters_the_window(seed):
    noise = 0.2
    judge = filled(seed=seed, noise=noise)
    before = held(judge)
    found = say(judge, 4.0 + 15 * noise)
    assert found["code"] == LOSS_OUTLIER and found["loss_z"] > 10
    assert held(judge) == before and int(judge.count) == 200
    assert say(judge, 4.0 + 3 * noise)["code"] == ACCEPT
    assert held(judge)[-1] == pytest.approx(4.0 + 3 * noise)


def test_a_gradient_spike_is_vetoed_by_name():
    judge = filled()
    assert say(judge, 4.0, math.exp(0.3 * 18))["code"] == GRAD_OUTLIER
    assert say(judge, 40.0, math.exp(0.3 * 18))["code"] == LOSS_OUTLIER


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
    judge, rng = filled(veto_share=0.2), np.random.default_rng(1)
    for step in range(300):
        spike = step % 10 == 0
        found = say(judge, 8.0 if spike else rng.normal(4, 0.2), 1.0)
        assert (found["code"] == LOSS_OUTLIER) == spike, step
    assert max(held(judge)) < 5


@pytest.mark.parametrize("max_vetoes", [1, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_lasting_jump_is_vetoed_so_often_and_then_becomes_the_reference(max_vetoes):
    judge, rng = filled(max_vetoes=max_vetoes), np.random.default_rng(2)
    found = [say(judge, rng.normal(7, 0.2), 1.0) for _ in range(300)]
    assert [entry["code"] for entry in found] == [LOSS_OUTLIER] * max_vetoes + [ACCEPT] * (300 - max_vetoes)
    assert [entry["reopened"] for entry in found] == [0.0] * max_vetoes + [1.0] + [0.0] * (299 - max_vetoes)
    assert [entry["streak"] for entry in found[: max_vetoes + 1]] == [*range(1, max_vetoes + 1), 0]
    assert min(held(judge)) > 6
    assert say(judge, 12.0)["code"] == LOSS_OUTLIER


def test_the_window_restarts_with_the_accepted_value_alone():
    judge = filled(max_vetoes=2)
    for _ in range(3):
        say(judge, 9.0)
    assert held(judge) == [9.0] and int(judge.count) == 1
    assert int(judge.window_3N.isfinite().sum()) == 2


def test_one_good_step_between_starts_the_streak_anew():
    judge = filled(max_vetoes=3, veto_share=1.0)
    for _ in range(40):
        assert [say(judge, 9.0)["code"] for _ in range(3)] == [LOSS_OUTLIER] * 3
        assert say(judge, 4.0)["code"] == ACCEPT


def test_reopen_forgets_the_window_and_warms_up_again():
    judge = filled(warmup=32)
    assert say(judge, 9.0)["code"] == LOSS_OUTLIER
    judge.reopen()
    assert held(judge) == [] and bool(judge.window_3N.isnan().all())
    assert [say(judge, 9.0 + 0.01 * (k % 3))["code"] for k in range(32)] == [ACCEPT] * 32
    assert say(judge, 4.0)["code"] == ACCEPT  # a fall is no outlier
    assert say(judge, 14.0)["code"] == LOSS_OUTLIER


def test_a_falling_loss_is_no_noise():
    """Without the line through the halves, the fall of early training would hide a spike of twice the loss."""
    judge = judge_of()
    for step in range(128):
        say(judge, 8.0 - 0.03 * step + 0.01 * (-1) ** step)
    assert say(judge, 8.0)["code"] == LOSS_OUTLIER


def vetoes(judge, losses):
    return [step for step, loss in enumerate(losses) if say(judge, loss)["code"] != ACCEPT]


def hard_source(steps, every=8, seed=3):
    """A plateau in which every so many steps come from a source with twice the loss."""
    losses = np.random.default_rng(seed).normal(4, 0.2, steps)
    losses[::every] += 8
    return losses


def test_outliers_that_keep_coming_are_the_data_and_are_accepted():
    judge = filled()
    losses = hard_source(400)
    # 5 % of 128 steps are 6.4: seven are vetoed, and the eighth gives way. Afterwards such steps are in the window.
    assert vetoes(judge, losses) == [0, 8, 16, 24, 32, 40, 48]
    assert sum(loss > 8 for loss in held(judge)) == 16


def test_the_step_that_gives_way_says_so_and_keeps_the_window():
    judge = filled()
    found = [say(judge, loss) for loss in hard_source(57)]
    assert [i for i, entry in enumerate(found) if entry["gave_way"]] == [56]
    assert found[56]["code"] == ACCEPT and found[56]["reopened"] == 0 and found[56]["loss_z"] > 10
    assert int(judge.count) == 200 + 50 and int(judge.streak) == 0


def test_outliers_far_apart_are_all_vetoed():
    assert vetoes(filled(), hard_source(600, every=30)) == list(range(0, 600, 30))


def test_a_share_of_one_never_gives_way_and_of_zero_after_the_first():
    assert len(vetoes(filled(veto_share=1.0), hard_source(400))) == 50
    assert vetoes(filled(veto_share=0.0), hard_source(100, every=16)) == [0]


def test_steps_that_are_not_finite_do_not_count_towards_giving_way():
    judge = filled()
    for step in range(100):
        assert say(judge, float("nan") if step % 2 else 4.0)["code"] == (NONFINITE if step % 2 else ACCEPT)
    assert say(judge, 12.0)["code"] == LOSS_OUTLIER


def test_a_pardon_forgets_the_vetoes_and_neither_the_window_nor_the_streak():
    judge = filled()
    for _ in range(20):
        assert [say(judge, 12.0)["code"] for _ in range(3)] == [LOSS_OUTLIER] * 3
        before = held(judge)
        judge.forgive_vetoes()
        assert held(judge) == before and int(judge.streak) == 3 and not judge.vetoed_N.any()
        assert say(judge, 4.0)["code"] == ACCEPT
    assert int(judge.count) == 220


@pytest.mark.parametrize("change", ["judge", "veto", "reopen", "reopened", "forgive_vetoes"])
def test_the_tensors_of_a_state_never_change_in_place(change):
    """A save in the background and a copy in memory hold them while the judge goes on."""
    judge = filled(max_vetoes=1)
    say(judge, 12.0)
    state = judge.state()
    before = {name: tensor.clone() for name, tensor in state.items()}
    if change in ("reopen", "forgive_vetoes"):
        getattr(judge, change)()
    else:
        say(judge, {"judge": 4.0, "veto": float("nan"), "reopened": 12.0}[change])
    assert all(torch.equal(state[name].nan_to_num(-1), before[name].nan_to_num(-1)) for name in state)
    after = judge.state()
    assert any(not torch.equal(after[name].nan_to_num(-1), before[name].nan_to_num(-1)) for name in state)


@pytest.mark.parametrize("rows", [1, 2, 8, 32, 512])
def test_one_odd_row_is_no_outlier_however_few_rows_a_step_has(rows):
    """Steps of exactly 2.0; in one step a row has four times the loss, in another a third of the rows (or all) ten."""
    judge = Judge(GuardSpec(), CPU, rows)
    for _ in range(128):
        say(judge, 2.0)
    assert say(judge, 2.0 + 6.0 / rows)["code"] == ACCEPT
    assert say(judge, 2.0 + 18.0 * max(1, rows // 3) / rows)["code"] == LOSS_OUTLIER


def test_another_number_of_rows_moves_the_floor():
    judge = Judge(GuardSpec(), CPU, 1)
    for _ in range(128):
        say(judge, 2.0)
    assert say(judge, 4.0)["code"] == ACCEPT
    judge.set_rows(256)
    assert say(judge, 4.0)["code"] == LOSS_OUTLIER


def test_heavy_tails_widen_the_scale_where_a_median_does_not_see_them():
    """One step in twelve is 2 above a quiet rest: the median of deviations is the floor, the upper 5 % is not."""
    judge = judge_of()
    for step in range(256):
        say(judge, 4.0 + 2.0 * (step % 12 == 0))
    found = say(judge, 8.0)
    assert found["code"] == ACCEPT and found["loss_scale"] == pytest.approx(2.0 / 1.645, rel=0.02)
    assert say(judge, 20.0)["code"] == LOSS_OUTLIER


@given(at=st.integers(0, 40), seed=st.integers(0, 5))
@settings(max_examples=8)
def test_a_saved_judge_goes_on_identically(at, seed):
    rng = np.random.default_rng(seed)
    values = np.where(rng.random(60) < 0.2, 30.0, rng.normal(4, 0.1, 60))
    spec = GuardSpec(window=16, warmup=8, max_vetoes=2)
    unbroken, first = Judge(spec, CPU), Judge(spec, CPU)
    for value in values[:at]:
        say(unbroken, value)
        say(first, value)
    saved = {name: tensor.clone() for name, tensor in first.state().items()}
    assert {name: tensor.dtype for name, tensor in saved.items()} == {
        "window": torch.float32,
        "rows": torch.float32,
        "count": torch.int64,
        "streak": torch.float32,
        "judged": torch.int64,
        "vetoed": torch.float32,
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
        for name in ("item", "__bool__", "__float__", "__int__", "__index__", "tolist", "numpy", "cpu", "nonzero"):
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


def rows_of(rng, rows=8, tokens=64, level=4.0, bad=0.0):
    """Sums of losses and weights of a step whose rows scatter by a quarter; `bad` is added to all of the first."""
    means = rng.normal(level, 0.25 * level, rows).clip(0.5)
    means[0] += bad
    return torch.tensor(np.stack([means * tokens, np.full(rows, tokens)]), dtype=torch.float32)


def loss_of(rows):
    return float(rows[0].sum() / rows[1].sum())


def row_judge(steps=200, seed=0, **settings_):
    judge, rng = Judge(GuardSpec(**settings_), CPU, 8), np.random.default_rng(seed)
    suspects = 0
    for _ in range(steps):
        rows = rows_of(rng)
        found = say(judge, loss_of(rows), rows=rows)
        assert found["code"] == ACCEPT
        suspects += found["suspect"]
    return judge, rng, suspects


@pytest.mark.parametrize("seed", range(3))
def test_one_bad_row_of_eight_makes_a_step_suspect_and_it_is_accepted_all_the_same(seed):
    judge, rng, suspects = row_judge(seed=seed)
    assert suspects <= 2
    rows = rows_of(rng, bad=8.0)
    found = say(judge, loss_of(rows), rows=rows)
    assert (found["code"], found["suspect"]) == (ACCEPT, 1) and found["row_z"] > 4 and found["loss_z"] < 10
    assert held(judge)[-1] == pytest.approx(loss_of(rows))


def test_what_is_vetoed_is_not_suspect_besides_and_nothing_is_before_the_warm_up():
    judge, rng, _ = row_judge()
    rows = rows_of(rng, bad=8.0)
    assert say(judge, 40.0, rows=rows)["suspect"] == 0 and say(judge, float("nan"), rows=rows)["suspect"] == 0
    young, rng, suspects = row_judge(steps=20)
    assert suspects == 0 and say(young, loss_of(rows), rows=rows)["suspect"] == 0


def test_rows_without_weight_are_padding_and_change_nothing():
    judge, rng, _ = row_judge()
    rows = rows_of(rng, bad=8.0)
    padded = torch.cat((rows, torch.zeros(2, 8)), 1)
    other = Judge(judge.spec, CPU, 8)
    other.load({name: tensor.clone() for name, tensor in judge.state().items()})
    assert say(judge, loss_of(rows), rows=rows) == say(other, loss_of(rows), rows=padded)


def test_a_window_saved_without_rows_judges_as_before_and_learns_them():
    judge, rng, _ = row_judge()
    saved = {name: tensor for name, tensor in judge.state().items() if name != "rows"}
    old = Judge(judge.spec, CPU, 8)
    old.load(saved)
    for step in range(40):
        rows = rows_of(rng)
        new, former = say(judge, loss_of(rows), rows=rows), say(old, loss_of(rows), rows=rows)
        same = ("code", "streak", "loss_z", "loss_center", "loss_scale", "grad_z", "grad_center", "grad_scale")
        assert [new[key] for key in same] == [former[key] for key in same]
        assert former["suspect"] == 0 or step >= 32
    rows = rows_of(rng, bad=8.0)
    assert say(old, loss_of(rows), rows=rows)["suspect"] == 1
