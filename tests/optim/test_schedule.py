"""The learning rate against hand values and torch's own schedulers."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

from bessemer.optim.choose import Schedule

schedules = st.builds(
    Schedule,
    peak=st.floats(1e-6, 1),
    warmup=st.integers(0, 50),
    total=st.integers(1, 200),
    kind=st.sampled_from(["cosine", "linear", "constant"]),
    floor=st.floats(0, 1),
)


def rates_of_torch(make, steps, peak):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_hand_values():
    cosine = Schedule(peak=1.0, warmup=4, total=13, kind="cosine", floor=0.1)
    assert [cosine.lr(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert cosine.lr(6) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert cosine.lr(8) == pytest.approx(0.55)
    assert cosine.lr(10) == pytest.approx(0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2)
    assert cosine.lr(12) == pytest.approx(0.1)
    linear = Schedule(peak=2.0, warmup=2, total=7, kind="linear", floor=0.0)
    assert [linear.lr(step) for step in range(7)] == pytest.approx([1.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0])
    constant = Schedule(peak=3.0, warmup=2, total=7, kind="constant", floor=0.1)
    assert [constant.lr(step) for step in (0, 1, 2, 6, 900)] == [1.5, 3.0, 3.0, 3.0, 3.0]


@pytest.mark.parametrize("warmup", [2, 10])
@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_equals_torch_with_a_warm_up(kind, warmup):
    peak, total, floor = 3e-3, 60, 0.1

    def make(optimizer):
        first = LinearLR(optimizer, start_factor=1 / warmup, end_factor=1.0, total_iters=warmup - 1)
        length = total - 1 - warmup
        if kind == "cosine":
            second = CosineAnnealingLR(optimizer, T_max=length, eta_min=floor * peak)
        else:
            second = LinearLR(optimizer, start_factor=1.0, end_factor=floor, total_iters=length)
        return SequentialLR(optimizer, [first, second], milestones=[warmup])

    schedule = Schedule(peak, warmup, total, kind, floor)
    assert [schedule.lr(step) for step in range(total)] == pytest.approx(rates_of_torch(make, total, peak), rel=1e-9)


def test_drives_torch_as_a_lambda():
    schedule = Schedule(peak=5e-4, warmup=5, total=40)
    rates = rates_of_torch(lambda optimizer: LambdaLR(optimizer, lambda step: schedule.lr(step) / 5e-4), 40, 5e-4)
    assert rates == pytest.approx([schedule.lr(step) for step in range(40)], rel=1e-12)


@given(schedule=schedules)
def test_it_starts_above_zero_and_stays_between_floor_and_peak(schedule):
    rates = [schedule.lr(step) for step in range(schedule.total + schedule.warmup + 5)]
    low = schedule.peak * schedule.floor
    assert rates[0] > 0
    assert all(rate <= schedule.peak * (1 + 1e-12) for rate in rates)
    assert all(rate >= low * (1 - 1e-12) for rate in rates[schedule.warmup :])
    assert all(b >= a for a, b in pairwise(rates[: schedule.warmup]))
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(rates[schedule.warmup :]))


@given(schedule=schedules.filter(lambda s: s.kind != "constant"), beyond=st.integers(0, 10**9))
def test_the_floor_is_kept_past_the_end(schedule, beyond):
    end = max(schedule.total, schedule.warmup + 2)
    assert schedule.lr(end + beyond) == pytest.approx(schedule.peak * schedule.floor, rel=1e-12)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("warmup", "total"), [(1, 1), (5, 5), (5, 3), (0, 1), (4, 5)])
def test_no_room_for_a_decay_divides_by_nothing(kind, warmup, total):
    schedule = Schedule(1.0, warmup, total, kind, 0.1)
    rates = [schedule.lr(step) for step in range(total)]
    assert rates == [(step + 1) / warmup if step < warmup else 1.0 for step in range(total)]
