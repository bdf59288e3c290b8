"""The learning rate against hand values and torch's own schedulers."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from bessemer.errors import UserError
from bessemer.plan.decide import sketch_run
from bessemer.plan.schedule import Schedule, ScheduleSketch, run_schedule
from bessemer.spec.schedule import ScheduleSpec, schedule_problems
from bessemer.spec.schema import RunSpec

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


STORED = {
    "cosine": [
        "0x1.d35d847cf0906p-14", "0x1.d35d847cf0906p-12", "0x1.98f1d3ed527e5p-11", "0x1.98f1d3ed527e5p-11",
        "0x1.475c2651d1d71p-11", "0x1.ca4472f10d6dcp-13", "0x1.4727dcbddb984p-14", "0x1.4727dcbddb984p-14",
    ],
    "linear": [
        "0x1.d35d847cf0906p-14", "0x1.d35d847cf0906p-12", "0x1.98f1d3ed527e5p-11", "0x1.98f1d3ed527e5p-11",
        "0x1.261555ff484b9p-11", "0x1.2b292d12fb0f3p-12", "0x1.4727dcbddb984p-14", "0x1.4727dcbddb984p-14",
    ],
    "constant": [
        "0x1.d35d847cf0906p-14", "0x1.d35d847cf0906p-12", "0x1.98f1d3ed527e5p-11", "0x1.98f1d3ed527e5p-11",
        "0x1.98f1d3ed527e5p-11", "0x1.98f1d3ed527e5p-11", "0x1.98f1d3ed527e5p-11", "0x1.98f1d3ed527e5p-11",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", STORED)
def test_the_first_three_kinds_keep_their_values_bit_for_bit(kind):
    schedule = Schedule(7.8e-4, 7, 306, kind, 0.1)
    assert [schedule.lr(step).hex() for step in (0, 3, 6, 7, 100, 217, 305, 400)] == STORED[kind]


def of(kind, total=101, warmup=10, steps=None, **written):
    """The schedule of a spec with peak 1; `steps` is the run's length."""
    spec = ScheduleSpec.model_validate({"kind": kind, **written})
    return run_schedule(spec, ScheduleSketch(1.0, warmup, steps or total, ((0, 4),), 8))


def values(schedule, *steps):
    return pytest.approx([schedule.lr(step) for step in steps], rel=1e-12, abs=1e-15)


def test_corners_of_wsd():
    for shape, half in {"linear": 0.5, "sqrt": 1 - math.sqrt(0.5), "cosine": 0.5, "power": 0.25}.items():
        schedule = of("wsd", decay=0.2, decay_shape=shape, floor=0.0)  # the decay begins at step 80 and ends at 100
        assert [1.0, 1.0, 1.0, half, 0.0, 0.0] == values(schedule, 9, 10, 80, 90, 100, 5000), shape
    assert values(of("wsd", decay=20, power=2.0, decay_shape="power", floor=0.0), 90, 98) == [0.25, 0.01]
    assert values(of("wsd", decay=20, decay_shape="exponential", floor=0.01), 90, 100) == [0.1, 0.01]
    assert values(of("wsd", decay="640 tokens"), 80, 90) == [1.0, 0.55]  # 20 steps of 4 sequences of 8 tokens


def test_corners_of_the_other_kinds():
    assert values(of("polynomial", floor=0.0), 10, 55, 100) == [1.0, 0.25, 0.0]
    assert values(of("polynomial", floor=0.0, power=1.5), 10, 55) == [1.0, 0.5**1.5]
    assert values(of("exponential", floor=0.01), 10, 55, 100) == [1.0, 0.1, 0.01]
    steps = of("step", every=20, factor=0.5, floor=0.1)
    assert values(steps, 10, 29, 30, 49, 50, 4000) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.1]
    root = of("inverse_sqrt", floor=0.0)
    assert values(root, 10, 20, 40) == [1.0, 2**-0.5, 0.5]  # sqrt(warm-up / step): Noam's
    assert values(of("inverse_sqrt", floor=0.0, timescale=30), 10, 100) == [1.0, 0.5]
    triangles = of("cyclical", warmup=0, cycles=2, floor=0.2)
    assert values(triangles, 0, 12.5, 25, 50, 75, 100) == [0.2, 0.6, 1.0, 0.2, 1.0, 0.2]
    restarts = of("cosine", warmup=0, cycles=2, floor=0.0)
    assert values(restarts, 0, 25, 50, 75, 100) == [1.0, 0.5, 1.0, 0.5, 0.0]
    assert restarts.changes() == {50: "the learning rate restarts at its peak"}


def test_warm_ups_end_at_the_peak():
    for shape, half in {"linear": 0.5, "cosine": 0.5, "exponential": 0.1, "polynomial": 0.25}.items():
        schedule = of("constant", warmup_shape=shape)
        assert [half, 1.0, 1.0] == values(schedule, 4, 9, 10), shape
        assert all(0 < schedule.lr(step) < schedule.lr(step + 1) for step in range(9)), shape


def test_one_cycle_equals_torch():
    def make(optimizer):
        return OneCycleLR(optimizer, max_lr=1.0, total_steps=100, pct_start=0.3)

    ours = of("one_cycle", total=100, warmup=30, floor=4e-6)
    assert [ours.lr(step) for step in range(100)] == pytest.approx([*rates_of_torch(make, 99, 1.0), 4e-06], rel=1e-9)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (of("polynomial", warmup=0, floor=0.0, power=1.5), lambda o: PolynomialLR(o, 100, 1.5)),
        (of("exponential", warmup=0, floor=0.01), lambda o: ExponentialLR(o, 0.01**0.01)),
        (of("step", warmup=0, every=15, factor=0.3, floor=0.0), lambda o: StepLR(o, 15, 0.3)),
        (of("cosine", warmup=0, cycles=4, floor=0.1), lambda o: CosineAnnealingWarmRestarts(o, 25, eta_min=0.1)),
        (
            of("cyclical", warmup=0, cycles=2, floor=0.1),
            lambda o: CyclicLR(o, 0.1, 1.0, step_size_up=25, cycle_momentum=False),
        ),
    ],
    ids=["polynomial", "exponential", "step", "restarts", "cyclical"],
)
def test_equals_torch_s_schedulers(ours, theirs):
    assert [ours.lr(step) for step in range(100)] == pytest.approx(rates_of_torch(theirs, 100, 1.0), rel=1e-9)


CONTINUOUS = [
    {"kind": kind, "floor": 0.05} for kind in ("cosine", "linear", "constant", "polynomial", "exponential", "one_cycle")
] + [
    {"kind": "inverse_sqrt", "timescale": 300}, {"kind": "cyclical", "floor": 0.05},
    *({"kind": "wsd", "decay_shape": shape, "floor": 0.05} for shape in ("linear", "cosine", "exponential", "power")),
    {"kind": "cosine", "segments": [{"from_step": 500, "to": 1.0, "length": 100}, {"from_step": 700, "to": 0.0}]},
    {"kind": "linear", "warmup_shape": "cosine", "segments": [{"from_step": 300}, {"from_step": 700, "to": "0%"}]},
]  # fmt: skip


@pytest.mark.parametrize("written", CONTINUOUS, ids=lambda w: "-".join(map(str, w.values()))[:40])
def test_no_step_jumps_where_nothing_should(written):
    schedule = of(total=1001, warmup=0 if written["kind"] == "cyclical" else 300, **written)
    rates = [schedule.lr(step) for step in range(1010)]
    assert max(abs(b - a) for a, b in pairwise(rates)) < 0.016


def test_segments_begin_at_the_rate_that_they_find():
    written = {"segments": [{"from_step": 50, "to": 1.0, "length": 10}, {"from_step": 80, "to": 0.0, "shape": "sqrt"}]}
    schedule, before = of("linear", warmup=0, floor=0.0, **written), of("linear", warmup=0, floor=0.0)
    assert [schedule.lr(step) for step in range(51)] == [before.lr(step) for step in range(51)]
    middle = 1 - math.sqrt(0.5)
    assert [0.5, 0.75, 1.0, 1.0, 1.0, middle, 0.0] == values(schedule, 50, 55, 60, 79, 80, 90, 100)
    assert list(schedule.changes()) == [50, 80]


def test_a_finished_run_is_extended_and_its_past_stays():
    """A longer run keeps the rates of the shorter one, if the schedule's length is written down."""
    short = of("cosine", total=101)
    longer = of("cosine", steps=301, length=101, segments=[{"from_step": 101, "to": 0.5, "length": 20},
                                                           {"from_step": 121, "to": 0.0}])  # fmt: skip
    assert [longer.lr(step) for step in range(101)] == [short.lr(step) for step in range(101)]
    assert values(longer, 101, 111, 121, 300) == [0.1, 0.3, 0.5, 0.0]


def test_progress_in_tokens_follows_the_batch_size():
    sketch = ScheduleSketch(1.0, 10, 100, ((0, 1), (50, 3)), 8)
    by_tokens = run_schedule(ScheduleSpec(kind="linear", floor=0.0, unit="tokens"), sketch)
    assert values(by_tokens, 4, 9, 10, 99) == [0.5, 1.0, 1.0, 0.0]
    # 40 sequences from step 10 to 50, then 3 in each of 49 steps.
    assert values(by_tokens, 50, 60) == [1 - 40 / 187, 1 - 70 / 187]
    equal = run_schedule(ScheduleSpec(unit="tokens"), ScheduleSketch(1.0, 10, 100, ((0, 7),), 8))
    assert [of("cosine", total=100).lr(step) for step in range(100)] == values(equal, *range(100))


@pytest.mark.parametrize(
    ("written", "place", "words"),
    [
        ({"decay": "20%"}, "decay", "cosine has no decay: remove it, or write kind: wsd"),
        ({"kind": "exponential", "floor": 0.0}, "floor", "never reaches 0: write floor: 1%"),
        ({"kind": "wsd", "power": 2.0}, "power", "write decay_shape: power"),
        ({"kind": "one_cycle", "warmup_shape": "cosine"}, "warmup_shape", "one_cycle rises on a cosine"),
        ({"segments": [{"from_step": 9, "to": "0%", "shape": "exponential"}]}, "segments.0.to", "write to: 1%"),
        ({"segments": [{"from_step": 9, "length": 4}]}, "segments.0.length", "the rate is held"),
        ({"segments": [{"from_step": 9}, {"from_step": 9}]}, "segments.1.from_step", "9 is not after 9"),
    ],
)
def test_what_cannot_work_is_refused_with_its_place(written, place, words):
    problems = list(schedule_problems(ScheduleSpec.model_validate(written)))
    assert [".".join(map(str, path)) for path, _ in problems] == [place] and words in problems[0][1]


def test_a_schedule_that_ends_in_its_warm_up_is_refused():
    with pytest.raises(UserError, match=r"schedule.length: 5 steps end within the warm-up of 10"):
        of("cosine", length=5)


def test_a_spec_alone_is_sketched():
    spec = {"model": "1M", "data": {"sources": {"a": "x"}, "context": 8}, "optimizer": {"lr": 1e-3}}
    sketch, notes = sketch_run(RunSpec.model_validate({**spec, "budget": {"tokens": 6400, "batch": 64}}))
    assert (sketch.peak_lr, sketch.total_steps, notes) == (1e-3, 100, [])
    sketch, notes = sketch_run(RunSpec.model_validate({**spec, "optimizer": {}}))
    assert (sketch.peak_lr, sketch.total_steps, len(notes)) == (1.0, 1000, 2)
