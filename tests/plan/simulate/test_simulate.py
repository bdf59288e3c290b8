"""Steps and runs played by events: equal to the formulas where there is one, and right in direction where there is
none."""

import json
import math
import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bessemer.cli.main import app
from bessemer.errors import UserError
from bessemer.observe.figure import TIMELINE_LEFT, TIMELINE_WIDTH, svg_file
from bessemer.plan.cost_model.goodput import Reliability, goodput
from bessemer.plan.search.proposal import Proposal
from bessemer.plan.simulate import step as timeline
from bessemer.plan.simulate.run import (
    FailureRates,
    SimulatedJob,
    Simulation,
    Spread,
    run_simulation,
    simulate,
    simulate_run,
    simulation_json,
    simulation_lines,
    step_svg,
)
from bessemer.plan.simulate.step import (
    AGREES,
    PipelinePass,
    Step,
    StepTrace,
    best_setup,
    simulate_step,
    slowest_factor,
    split_step,
    step_seconds,
)

from ..plans import plan_on

DAY = 86_400.0
EVEN = FailureRates().uniform()


@cache
def proposal(model: str = "13b", gpus: str = "64xH100", tokens: int = 10**12, batch: int | None = None) -> Proposal:
    return plan_on(model, gpus, tokens, 4096, batch)


@cache
def played(gpus: str = "512xH100") -> Simulation:
    return simulate(proposal("70b", gpus, 2 * 10**12))


def pipeline(stages: int, batches: int, virtual: int = 1, **more: float) -> Step:
    return Step(stages, virtual, batches, PipelinePass(1 / virtual), PipelinePass(2 / virtual), **more)


# One step.


@given(st.integers(1, 10), st.integers(1, 40))
def test_the_bubble_of_1f1b_is_the_textbooks(p: int, m: int) -> None:
    trace = simulate_step(pipeline(p, m))
    assert trace.total_s == pytest.approx(3 * (m + p - 1))
    assert trace.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@given(st.integers(2, 8), st.integers(1, 4), st.integers(2, 4))
def test_interleaving_divides_the_bubble(p: int, rounds: int, v: int) -> None:
    m = rounds * p
    trace = simulate_step(pipeline(p, m, v))
    assert trace.total_s == pytest.approx(3 * m + 3 * (p - 1) / v)
    assert trace.bubble == pytest.approx((p - 1) / v / (m + (p - 1) / v))


@settings(max_examples=40)
@given(st.integers(1, 7), st.integers(1, 20), st.integers(1, 3), st.integers(0, 99))
def test_every_pass_runs_once_after_what_it_needs_and_alone_on_its_stage(p: int, m: int, v: int, seed: int) -> None:
    random = Random(seed)
    step = pipeline(p, m, v if p > 1 else 1, hop_s=0.1, reduce_s=0.7, update_s=0.2)
    trace = simulate_step(step, noise=lambda: random.uniform(0.5, 1.5), record=True)
    passes = Counter(
        (span.stage, span.kind, span.batch) for span in trace.spans if span.kind in ("forward", "backward")
    )
    assert set(passes.values()) == {step.virtual} and sum(passes.values()) == step.passes
    for stage in range(p):
        mine = sorted((span.start, span.end) for span in trace.spans if span.stage == stage and span.batch >= 0)
        assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(mine))
    spans = {(s.kind, s.stage, s.batch): s for s in trace.spans if s.batch >= 0}
    for stage in range(1, p if v == 1 else 0):
        for batch in range(m):
            before, after = spans["forward", stage - 1, batch], spans["forward", stage, batch]
            assert after.start >= before.end + 0.1 - 1e-9, "a hop later"
            before, after = spans["backward", stage, batch], spans["backward", stage - 1, batch]
            assert after.start >= before.end + 0.1 - 1e-9
    assert all(span.end <= trace.pipeline_s + 1e-9 for span in spans.values())
    assert trace.total_s >= trace.pipeline_s + 0.7 + 0.2 - 1e-9


@pytest.mark.parametrize(
    "wish",
    [
        pytest.param(("13b", "64xH100"), marks=pytest.mark.slow),
        pytest.param(("70b", "256xA100-80GB"), marks=pytest.mark.slow),
        ("405b", "4096xH100"),
    ],
    ids=lambda wish: wish[0],
)
def test_without_noise_events_equal_steptime(wish: tuple[str, str]) -> None:
    """Exactly with one stage; within AGREES with several. Every layout that fits, the slow ones with them."""
    found = proposal(*wish)
    kinds: Counter[bool] = Counter()
    for candidate in found.result.ranked[::2]:
        one = replace(found, result=replace(found.result, ranked=(candidate,)))
        step, known = split_step(best_setup(one), found.goal.cluster)
        assert known.total_s == pytest.approx(candidate.time.total_s)
        assert step_seconds(step) == pytest.approx(known.total_s, rel=AGREES if step.stages > 1 else 1e-9), (
            candidate.name()
        )
        kinds[step.stages > 1] += 1
    assert kinds[True] > 3


@pytest.mark.parametrize(("p", "v"), [(1, 1), (4, 1), (4, 2)])
def test_long_steps_continue_their_rhythm(p: int, v: int) -> None:
    step = pipeline(p, 2400, v, head_s=0.4, hop_s=0.05, reduce_s=1.0, update_s=0.3)
    assert step_seconds(step) == pytest.approx(simulate_step(step).total_s, rel=1e-3)


def test_hops_and_reductions_share_a_link() -> None:
    free = pipeline(4, 8, hop_s=0.1)
    busy = replace(free, reduce_s=5.0)
    assert simulate_step(free).contended_s == 0
    assert simulate_step(busy).contended_s > 0
    assert simulate_step(busy).total_s > simulate_step(free).total_s + 5.0, "more than the reduction alone"


def test_a_slow_stage_holds_up_all_of_them() -> None:
    assert simulate_step(pipeline(1, 8), slow=(0, 0.1)).total_s == pytest.approx(8 * 3.1)
    step = pipeline(4, 32)
    quiet, slow = simulate_step(step).total_s, simulate_step(step, slow=(2, 0.1)).total_s
    assert slow - quiet == pytest.approx(32 * 0.1, abs=0.11), "every micro-batch, but for what the fill hides"


def test_the_slowest_of_many_columns_needs_no_playing_of_all() -> None:
    """Against the mean of the largest of 200 columns that are played."""
    step = pipeline(2, 8)
    random = Random(1)
    columns = [simulate_step(step, noise=lambda: random.gauss(1, 0.02)).total_s for _ in range(200 * 20)]
    largest = fmean(max(columns[i : i + 200]) for i in range(0, len(columns), 200))
    quiet = simulate_step(step).total_s
    assert slowest_factor(step, 200, 1, 0.02) == pytest.approx(largest / quiet, abs=0.004)
    assert slowest_factor(step, 1, 1, 0.0) == 1.0
    more = [slowest_factor(step, columns, 8, 0.02) for columns in (1, 10, 1000, 10_000)]
    assert more == sorted(more) and slowest_factor(step, 1, 64, 0.02) > slowest_factor(step, 1, 1, 0.02)


# A whole run.


def test_a_run_that_nothing_befalls() -> None:
    luck = replace(EVEN, reliability=Reliability(failures_per_node_day=0, save_stall_s=10))
    found = simulate_run(SimulatedJob(8, 10_000, 1000), luck, Random(0))
    assert (found.wall_s, found.saving_s, found.failures) == (10_100, 100, 0)


@pytest.mark.parametrize(
    ("nodes", "days", "sure"),
    [
        (64, 200, Reliability(6.5e-3)),
        (2048, 40, Reliability()),
        (12_288, 6, Reliability()),
        (16, 20, Reliability(preemptions_per_node_hour=0.05, requeue_s=900)),
    ],
)
def test_the_mean_of_even_runs_is_goodputs_formula(nodes: int, days: float, sure: Reliability) -> None:
    expected = goodput(nodes, sure)
    luck = replace(EVEN, reliability=sure)
    job = SimulatedJob(nodes, days * DAY, expected.save_every_s)
    found = [simulate_run(job, luck, Random(run)) for run in range(60)]
    wall = fmean(one.wall_s for one in found)
    assert job.work_s / wall == pytest.approx(expected.share, rel=0.015)
    assert fmean(one.saving_s for one in found) / wall == pytest.approx(expected.saves, rel=0.03)
    assert fmean(one.redone_s for one in found) / wall == pytest.approx(expected.redone, rel=0.1)


@settings(max_examples=40)
@given(st.integers(1, 4000), st.floats(1, 30), st.floats(60, 5000), st.integers(0, 10**6), st.integers(0, 20))
def test_every_second_of_a_run_is_accounted_for(nodes: int, days: float, every: float, seed: int, spares: int) -> None:
    luck = replace(FailureRates(), spares=spares, slow_nodes=0.05)
    job = SimulatedJob(nodes, days * DAY, every, drag=1.05, write_s=20, writing_s=1)
    one = simulate_run(job, luck, Random(seed))
    parts = one.saving_s + one.redone_s + one.restarting_s + one.waiting_s + one.slow_s
    assert one.wall_s == pytest.approx(job.work_s + parts)
    assert min(vars(one).values()) >= 0


def test_without_spares_every_exchange_waits_for_a_repair() -> None:
    luck = replace(EVEN, exchanged=1.0, repair_s=5000.0)
    job = SimulatedJob(500, 20 * DAY, 1000)
    none, some, enough = (simulate_run(job, replace(luck, spares=n), Random(3)) for n in (0, 1, 50))
    assert none.waiting_s == pytest.approx(none.failures * 5000.0) and none.failures > 20
    assert none.waiting_s > some.waiting_s > enough.waiting_s == 0
    mean = 2048 * 5.25e-3 * 289 / 419
    assert FailureRates().spare_nodes(2048) == math.ceil(mean + 3 * math.sqrt(mean)) == 16


def test_a_save_counts_once_it_is_written() -> None:
    job = SimulatedJob(1000, 10 * DAY, 600)
    at_once, late = (simulate_run(replace(job, write_s=s), EVEN, Random(5)) for s in (0.0, 500.0))
    assert late.redone_s > at_once.redone_s + 100 * at_once.failures


def test_slow_nodes_drag_until_they_are_exchanged() -> None:
    calm = Reliability(failures_per_node_day=0, save_stall_s=0)
    job = SimulatedJob(1000, 10 * DAY, 3600, drag=1.05)
    sure = simulate_run(job, replace(EVEN, reliability=calm, slow_nodes=0.5), Random(0))
    assert sure.wall_s == pytest.approx(1.05 * job.work_s)
    some = [
        simulate_run(replace(job, nodes=100), replace(EVEN, reliability=calm, slow_nodes=0.005), Random(n))
        for n in range(400)
    ]
    assert fmean(one.slow_s > 0 for one in some) == pytest.approx(1 - 0.995**100, abs=0.07)


def test_a_run_that_cannot_finish_says_never() -> None:
    luck = replace(EVEN, reliability=Reliability(failures_per_node_day=2000, restart_s=3600))
    assert simulate_run(SimulatedJob(1000, DAY, 60), luck, Random(0)).wall_s == math.inf


# Whole plans.


def test_spreads_are_in_order_and_the_plan_lies_within() -> None:
    found, plan = played(), proposal("70b", "512xH100", 2 * 10**12)
    wall, error = found.plan.wall_s, found.with_error.wall_s
    assert error.p10 < wall.p10 < wall.p50 < wall.p90 < error.p90
    assert error.p10 < plan.wall_s < error.p90 and wall.p50 == pytest.approx(plan.wall_s, rel=0.06)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert sum(found.step.shares.values()) == pytest.approx(1)
    assert found.offer and found.plan.usd
    by_the_hour = found.offer.price.usd_hour * 512 / 3600
    assert found.plan.usd.p90 - found.plan.usd.p10 == pytest.approx((wall.p90 - wall.p10) * by_the_hour, rel=0.05)
    assert found.step.planned_s == plan.best.time.total_s <= found.step.slowest_s * (1 + AGREES)


def test_what_ifs_change_what_they_should() -> None:
    changes = {one.name: one.change for one in played("4096xH100").what_ifs}
    for name in ("failures twice as often", "no spare nodes, repairs of 24 h", "saves four times as far apart"):
        assert changes[name] > 0.001, name
    assert changes["the network half as fast"] > 0.01
    assert changes["restarts twice as fast"] < 0 > changes["no slow nodes"]
    assert "the network half as fast" not in {one.name for one in simulate(proposal("7b", "8xA100-80GB")).what_ifs}


def test_even_chances_leave_the_sum_of_the_steps() -> None:
    none = replace(EVEN, reliability=Reliability(failures_per_node_day=0, save_stall_s=0))
    plan = proposal("7b", "8xA100-80GB")
    found = simulate(plan, none)
    assert list(vars(found.plan.wall_s).values()) == pytest.approx([plan.seconds] * 3)


def test_the_same_seed_is_the_same_run() -> None:
    plan = proposal("13b", "64xH100")
    first, second, other = simulate(plan), simulate(plan), simulate(plan, seed=1)
    assert simulation_json(first) == simulation_json(second) and first.plan.wall_s != other.plan.wall_s


def test_spot_machines_are_taken_away() -> None:
    found = simulate(proposal("7b", "8xA100-80GB"))
    spot = next(one for one in found.what_ifs if one.name.startswith("spot"))
    assert spot.change > 0.005 and spot.usd and found.plan.usd and spot.usd.p50 < found.plan.usd.p50
    assert found.offer and found.offer.price.term == "on_demand"


@pytest.mark.slow
def test_a_hundred_thousand_gpus_take_seconds() -> None:
    began = time.process_time()
    plan = plan_on("405b", "100000xH100", 15 * 10**12, 8192, 102_400_000)
    found = simulate(plan)
    assert time.process_time() - began < 6.0, "3 s on a machine that does nothing else"
    assert found.job.nodes == 12_500 and 0.4 < found.shares["kept"] < 0.7, "FT-HSDP 2026: 44 % at 98K GPUs"
    with pytest.raises(UserError, match="write at most"):
        simulate(replace(plan, goal=replace(plan.goal, cluster=replace(plan.goal.cluster, count=100_008))))


def test_quantiles_stand_in_the_middle_of_their_share() -> None:
    assert Spread.of([float(n) for n in range(10)]) == Spread(0.5, 4.5, 8.5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert Spread.of([1.0, 2.0, 3.0, math.inf]).to_json() == {"p10": 1.0, "p50": 2.5, "p90": None}


# What is shown.


def drawn() -> StepTrace:
    return simulate_step(pipeline(4, 8, hop_s=0.05, reduce_s=1.0, update_s=0.5, host_s=0.1), record=True)


def test_letters_are_as_frequent_as_what_they_stand_for() -> None:
    trace = drawn()
    rows = timeline.timeline_lines(trace, 8, 8, cells=200)
    assert len(rows) == 5 and rows[-1].startswith("F forward, B backward")
    first = rows[0].split(maxsplit=2)[2]
    assert len(first) == 200 and first.startswith("F") and first[-2] == "u"
    for letter, seconds in (("F", 8.0), ("B", 16.0), ("g", 1.0), ("u", 0.5)):
        assert first.count(letter) == pytest.approx(200 * seconds / trace.total_s, abs=2)
    assert "8 of 64 micro-batches" in timeline.timeline_lines(trace, 8, 64)[-1]
    many = timeline.timeline_lines(simulate_step(pipeline(40, 4), record=True), 4, 4)
    assert len(many) == 9 and many[0].startswith("stage 0") and many[-2].startswith("stage 39")


def test_the_picture_is_svg_to_scale_without_script(tmp_path: Path) -> None:
    trace = drawn()
    text = svg_file(timeline.timeline(trace, "A <step>", "25 s & more").svg())
    root = ET.fromstring(text)
    assert "script" not in text and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    boxes = [box.attrib for box in root.iter("{http://www.w3.org/2000/svg}rect")]
    backward = [box for box in boxes if box["fill"] == timeline.STYLES["backward"].colour and float(box["height"]) > 10]
    assert len(backward) == 4 * 8
    assert {round(float(box["width"]) / TIMELINE_WIDTH * trace.total_s, 1) for box in backward} == {2.0}
    assert all(float(box["x"]) + float(box["width"]) <= TIMELINE_LEFT + TIMELINE_WIDTH + 0.1 for box in boxes[8:])
    ET.fromstring(step_svg(played()))
    with pytest.raises(UserError, match=r"write .*step\.svg"):
        run_simulation(proposal(), path=tmp_path / "step.png")
    with pytest.raises(UserError, match="cannot be written"):
        run_simulation(proposal(), path=tmp_path / "no" / "step.svg")


def test_words_and_json() -> None:
    found = played()
    text = "\n".join(simulation_lines(found))
    for word in ("p10", "p50", "p90", "what if", "stage 0", "spare nodes", "by chance"):
        assert word in text
    told = json.loads(json.dumps(simulation_json(found), allow_nan=False))
    assert told["finish_s"]["p10"] < told["finish_s"]["p90"] and told["usd"]["p50"] > 0
    assert {"planned_s", "events_s", "slowest_s"} < set(told["step"]) and len(told["what_ifs"]) >= 6


def test_a_plan_that_never_ends_is_told_so() -> None:
    hopeless = replace(FailureRates(), reliability=Reliability(failures_per_node_day=50))
    found = simulate(proposal("70b", "512xH100", 2 * 10**12), hopeless)
    assert found.plan.wall_s.p50 == math.inf and "never" in "\n".join(simulation_lines(found))
    assert json.loads(json.dumps(simulation_json(found), allow_nan=False))["finish_s"]["p50"] is None


def test_the_command(tmp_path: Path) -> None:
    options = ["--model", "7b", "--tokens", "100B", "--gpus", "8xA100-80GB", "--set", "data.context=4096"]
    words = ["plan", "simulate", *options]
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 0 and "what if" in run.output
    drawing = tmp_path / "step.svg"
    run = CliRunner().invoke(app, [*words, "--picture", str(drawing), "--json"])
    assert run.exit_code == 0 and json.loads(run.output)["simulation"]["runs"] == 400
    assert drawing.read_text().startswith("<svg")
