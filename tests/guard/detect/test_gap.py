"""Speed and memory beside the plan: told once when the gap opens, with the reason, and again only after it closed."""

from dataclasses import replace

from bessemer.guard.detectors import Detectors
from bessemer.guard.machine import PLAN_REARM, WINDOW, PlanGapDetector
from bessemer.plan.actual import WARM_UP, HostLoad
from bessemer.plan.expect import ExpectedRun
from bessemer.spec.guard import GuardSpec

EXPECTED = ExpectedRun(
    step_s=1.0, tokens_per_s=100.0, mfu=0.4, time_s=1000.0, memory_bytes=10**9, error=0.05, memory_error=0.05,
    basis="", base_s=1.0, estimated_bytes=10**9, flops=1e12, total_steps=1000,
)  # fmt: skip


def records(count, seconds, first=0, wait=0.0, memory=10**9):
    step = {"step_s": seconds, "data_wait_s": wait, "tokens_per_s": 100 / seconds, "mfu": 0.4, "memory_bytes": memory}
    return [{"step": first + i, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "veto": None, **step} for i in range(count)]


def test_the_first_steps_are_not_compared():
    gap = PlanGapDetector(EXPECTED, HostLoad)
    told = [gap.step(record) for record in records(WARM_UP, 60.0) + records(10 * WINDOW, 1.02)]
    assert not any(told)


def test_a_gap_is_told_once_with_its_reason_and_again_after_it_closed():
    looks = []
    gap = PlanGapDetector(EXPECTED, lambda: looks.append(1) or HostLoad(others_busy=0.6))
    slow, good = records(3 * WINDOW, 1.4), records(PLAN_REARM * WINDOW, 1.0)
    told = [alarm for record in records(WARM_UP, 1.0) + slow + good + slow for alarm in gap.step(record)]
    assert [alarm.kind for alarm in told] == ["plan_speed", "plan_speed"] and len(looks) == 2
    assert told[0].severity == "note" and "40% slower than planned" in told[0].finding.symptom
    assert told[0].finding.evidence["reason"] == "other load"


def test_memory_beyond_the_plan_is_told_of_too():
    gap = PlanGapDetector(EXPECTED, HostLoad)
    told = [alarm for record in records(WARM_UP + WINDOW, 1.0, memory=2 * 10**9) for alarm in gap.step(record)]
    assert [alarm.kind for alarm in told] == ["plan_memory"] and "100% more memory" in told[0].finding.symptom


def test_without_a_prediction_nothing_is_told():
    nothing = replace(EXPECTED, step_s=None, error=None, memory_bytes=None)
    gap = PlanGapDetector(nothing, HostLoad)
    assert not any(gap.step(record) for record in records(WARM_UP + WINDOW, 9.0))


def test_the_watch_passes_it_on_and_saves_none_of_it():
    watch = Detectors(GuardSpec(), None, 1000)
    before = watch.state()
    watch.plan_gap = PlanGapDetector(EXPECTED, HostLoad)
    assert watch.state() == before
    waiting = records(WARM_UP + WINDOW, 2.0, wait=0.9)
    found = [alarm for record in waiting for alarm in watch.step(record)]
    assert "data wait" in next(alarm for alarm in found if alarm.kind == "plan_speed").finding.symptom


def test_a_run_that_is_faster_than_planned_raises_no_alarm():
    gap = PlanGapDetector(EXPECTED, HostLoad)
    assert not [alarm for record in records(WARM_UP + 4 * WINDOW, 0.2) for alarm in gap.step(record)]
