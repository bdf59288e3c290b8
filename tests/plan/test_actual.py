"""Plan and run side by side: predictions, what is kept of a machine, and the reason that is given for a gap."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bessemer.plan.actual import (
    LEAST,
    WARM_UP,
    ActualRun,
    HostLoad,
    compare,
    compare_run,
    comparison_json,
    comparison_line,
    comparison_lines,
    find_gaps,
    likely_reason,
    measure_steps,
)
from bessemer.plan.cost_model.operators import step_work
from bessemer.plan.cost_model.step_time import StepSetup, step_time
from bessemer.plan.decide import Interval, TrainPlan
from bessemer.plan.decision import Plan
from bessemer.plan.expect import (
    ExpectedRun,
    RunRecord,
    RunSetup,
    append_record,
    find_correction,
    history_path,
    load_records,
    make_run_record,
    predict_run,
    record_expected,
    with_history,
)
from bessemer.plan.hardware import Cluster, Machine, ceilings_path, find_gpu, saved_ceilings
from bessemer.plan.search.layout import ONE_PROCESS
from bessemer.run.directory import Run
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import PRESETS, ModelShape, with_vocab

from .plans import plan_on

CPU = Machine("cpu", "Some CPU", 16 << 30, 2, {"fp32": 1e11, "bf16": 1e10})
GPU = Machine("cuda", "NVIDIA H200", 141 << 30, 16, {"fp32": 5e13, "bf16": 7e14})
SHAPE = with_vocab(PRESETS["125M"], 50_304)


def occasion(machine: Machine = GPU, shape: ModelShape = SHAPE, precision: str = "bf16", rows: int = 64) -> RunSetup:
    every = Interval(10, None)
    training = TrainPlan(
        context=1024, batch_rows=((0, rows),), micro_rows=16, activations="none", total_steps=100, peak_lr=1e-3,
        warmup_steps=2, precision=precision, weights="fp32",
        compile="block" if machine.device == "cuda" else "off", evaluate=every, evaluate_tokens=1, save=every,
        look=every, copy=every, mixtures=(),
    )  # fmt: skip
    spec = RunSpec.model_validate({"model": "125M", "data": {"sources": {"web": "data/"}}})
    return RunSetup(spec, shape, training, machine, ONE_PROCESS, 1, peak_flops=989e12 if machine is GPU else 1e11)


def record(step_s: float = 1.0, of: RunSetup | None = None, **more: Any) -> RunRecord:
    of = of or occasion()
    said = predict_run(of, [])
    measured = {"date": "2026-01-01", "run": "a", "step_s": step_s, "peak_bytes": 2 * said.estimated_bytes, "cause": ""}
    return replace(make_run_record(of, said, measured), **more)


def step(seconds: float = 1.0, wait: float = 0.0, tokens: int = 100, memory: int = 10**9) -> dict[str, Any]:
    rate = tokens / seconds
    return {"step_s": seconds, "data_wait_s": wait, "tokens_per_s": rate, "mfu": 0.4, "memory_bytes": memory}


EXPECTED = ExpectedRun(
    step_s=1.0, tokens_per_s=100.0, mfu=0.4, time_s=1000.0, memory_bytes=10**9, error=0.05, memory_error=0.05,
    basis="so it was measured", base_s=1.0, estimated_bytes=10**9, flops=1e12, total_steps=1000,
)  # fmt: skip
SLOW = ActualRun(32, step_s=1.5, own_s=1.5, wait_s=0.0, jumps_s=0.0, tokens_per_s=66.7, mfu=0.27, memory_bytes=10**9)


def test_a_catalogued_gpu_has_a_prediction_with_its_error() -> None:
    of = occasion()
    found = predict_run(of, [])
    gpu = find_gpu("H200")
    setup = StepSetup(step_work(SHAPE), ONE_PROCESS, 16, 64, 1024, "bf16", "none")
    time = step_time(setup, Cluster(gpu, 1, 1, gpu.network_bandwidth))
    assert found.step_s == found.base_s == time.total_s and found.error == time.error
    assert found.tokens_per_s == 64 * 1024 / time.total_s
    assert found.time_s == pytest.approx(100 * time.total_s)
    assert found.mfu == pytest.approx(SHAPE.flops_per_token(1024) * found.tokens_per_s / 989e12)
    assert found.memory_bytes == found.estimated_bytes > 18 * SHAPE.parameters
    assert ExpectedRun.from_json(found.to_json()) == found


def test_a_device_in_no_catalogue_is_not_guessed_at() -> None:
    of = occasion(CPU, precision="fp32")
    found, plan = predict_run(of, []), Plan()
    record_expected(found, plan)
    assert found.step_s is found.tokens_per_s is found.memory_bytes is found.bar is None
    assert plan.value("expected.tokens_per_s") == "unknown"
    assert "bessemer bench" in plan.decisions["expected.tokens_per_s"].reason
    assert "expected.memory" not in plan.decisions


def test_what_the_catalogue_cannot_say_is_said() -> None:
    of = occasion()
    strange = predict_run(replace(of, machine=replace(GPU, name="NVIDIA Q9")), [])
    assert strange.step_s is None and "Q9" in strange.basis and strange.memory_bytes
    deepspeed = of.spec.model_copy(update={"parallel": of.spec.parallel.model_copy(update={"engine": "deepspeed"})})
    assert "DeepSpeed" in predict_run(replace(of, spec=deepspeed), []).basis
    plain = predict_run(replace(of, training=replace(of.training, compile="off")), [])
    assert (plain.step_s or 0) > (predict_run(of, []).step_s or 1) and (plain.error or 0) > (
        predict_run(of, []).error or 0
    )


def test_a_bench_gives_a_bound_that_is_no_promise() -> None:
    of = occasion(replace(CPU, source="measured on 2026-01-01 by bessemer bench"), precision="fp32")
    found = predict_run(of, [])
    assert found.step_s == of.flops / 1e11 and found.bar is None and "at best" in found.basis
    assert find_gaps(found, replace(SLOW, step_s=100 * (found.step_s or 0)), HostLoad) == {}


def test_a_run_on_this_machine_gives_the_next_its_prediction() -> None:
    of = occasion(CPU, precision="fp32")
    found = predict_run(of, [record(800.0, of)])
    assert found.step_s == pytest.approx(800.0) and found.error == 0.15 and "1 earlier run" in found.basis
    assert found.memory_bytes == 2 * found.estimated_bytes
    twice = predict_run(replace(of, training=replace(of.training, batch_rows=((0, 128),))), [record(800.0, of)])
    assert twice.step_s == pytest.approx(1600.0)


def test_a_prediction_beyond_the_roofline_is_withheld_with_its_reason() -> None:
    of = occasion(CPU, precision="fp32")
    impossible = of.flops / 1e11 / 6.164  # a machine that was six times as fast as it is now
    found, plan = predict_run(of, [record(impossible, of)]), Plan()
    assert (found.step_s, found.tokens_per_s, found.mfu, found.time_s) == (None, None, None, None)
    assert "616% of the 100 GFLOP/s" in found.withheld and found.basis == found.withheld
    record_expected(found, plan)
    decision = plan.decisions["expected.tokens_per_s"]
    assert decision.value == "withheld" and "616%" in decision.reason
    assert "616%" in comparison_line(found, SLOW) and "tokens/s 67, MFU 27.0%, time" in comparison_line(found, SLOW)
    assert comparison_json(found, SLOW)["withheld"] == found.withheld
    assert ExpectedRun.from_json(found.to_json()) == found
    # A step that was measured just now is no guess: then the peak is wrong, and only the share of it is withheld.
    measured, plan = predict_run(of, [], measured_s=impossible), Plan()
    assert measured.step_s == impossible and measured.time_s and measured.mfu is None and measured.withheld
    record_expected(measured, plan)
    assert plan.decisions["expected.mfu"].value == "withheld"
    assert any("withheld" in line for line in comparison_lines(measured, SLOW))


def test_runs_that_no_gpu_can_have_done_do_not_correct_a_plan(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wish = ("125M", "1xH200", 10**9, 1024)
    plain = plan_on(*wish)
    one = record((predict_run(occasion(), []).step_s or 0.0) / 20)
    assert append_record(history_path("NVIDIA H200", 1, "2.11.0+cu128"), one) is None
    found = plan_on(*wish)
    assert found.best.mfu == plain.best.mfu < 1 and found.wall_s == plain.wall_s
    assert any("1 earlier run" in note and "is withheld" in note and "MFU" in note for note in found.notes)


def test_the_last_line_leaves_out_what_is_not_known() -> None:
    nothing = replace(EXPECTED, step_s=None, tokens_per_s=None, mfu=None, time_s=None, memory_bytes=None)
    assert comparison_line(nothing, SLOW) == "memory 1 GB, tokens/s 67, MFU 27.0%, time 25m 00s"
    assert comparison_line(EXPECTED, SLOW).startswith(
        "memory 1 GB (plan 1 GB), tokens/s 67 (plan 100), MFU 27.0% (plan"
    )


def test_the_catalogue_is_corrected_by_earlier_runs() -> None:
    of = occasion()
    base = predict_run(of, []).step_s or 0.0
    ratios = [1.2, 1.3, 1.25, 9.0]
    records = [record(ratio * base) for ratio in ratios]
    records[-1] = replace(records[-1], cause="other load")  # which says nothing of the machine
    found = predict_run(of, records)
    assert found.step_s == pytest.approx(1.25 * base) and found.base_s == base
    assert found.error == pytest.approx(0.05)  # they lie 4 % apart, and no correction is called better than this
    assert found.memory_bytes == 2 * found.estimated_bytes


def test_only_runs_that_resemble_count() -> None:
    one = record()
    assert find_correction([one], "bf16", 1, SHAPE.parameters, True) is not None
    for other in (("fp8", 1, SHAPE.parameters, True), ("bf16", 8, SHAPE.parameters, True),
                  ("bf16", 1, 9 * SHAPE.parameters, True), ("bf16", 1, SHAPE.parameters, False)):  # fmt: skip
        assert find_correction([one], *other) is None


def test_records_are_kept_beside_the_bench_and_read_by_the_planner(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = history_path("NVIDIA H200", 1, "2.11.0+cu128")
    assert path.parent == ceilings_path("NVIDIA H200", 1, "2.11.0+cu128").parent and not load_records(path)
    one = record(2 * (predict_run(occasion(), []).step_s or 0.0))
    assert append_record(path, one) is None and append_record(path, one) is None
    assert load_records(path) == [one, one]
    gpu = find_gpu("H200")
    assert saved_ceilings(gpu) is None  # the file is not taken for a bench
    cluster = Cluster(gpu, 1, 1, gpu.network_bandwidth)
    slower = with_history(cluster, "bf16", SHAPE.parameters)
    setup = StepSetup(step_work(SHAPE), ONE_PROCESS, 16, 64, 1024)
    plain, corrected = step_time(setup, cluster), step_time(setup, slower)
    assert corrected.total_s == pytest.approx(2 * plain.total_s) and "2 earlier runs" in corrected.basis
    wish = ("125M", "1xH200", 10**9, 1024)
    assert "2 earlier runs" in plan_on(*wish).best.time.basis
    eight = replace(cluster, count=8, per_node=8)
    assert with_history(eight, "bf16", SHAPE.parameters) == eight
    path.write_text("{}\n" + json.dumps(one.__dict__) + "\n")
    with pytest.warns(UserWarning, match="line 1"):
        assert load_records(path) == [one]


def test_a_history_that_cannot_be_written_is_told() -> None:
    assert "XDG_CACHE_HOME" in (append_record(Path("/proc/nowhere/a.runs.jsonl"), record()) or "")


def test_numbers_of_a_run_by_hand() -> None:
    assert measure_steps([step()] * (WARM_UP + LEAST - 1)) is None
    steps = [step(99.0)] * WARM_UP + [step(1.0, wait=0.25)] * 19 + [step(5.0)]
    found = measure_steps(steps)
    assert found is not None and found.steps == 20
    assert found.step_s == pytest.approx(1.2) and found.own_s == 0.75 and found.wait_s == pytest.approx(0.2375)
    assert found.jumps_s == pytest.approx(4.25 / 20) and found.tokens_per_s == pytest.approx(2000 / 24)
    rows = {row.name: row for row in compare(EXPECTED, found)}
    assert rows["tokens/s"].ratio == pytest.approx(1 / 1.2)
    assert rows["time"].actual == pytest.approx(1200) and rows["memory"].ratio == 1.0
    assert any("tokens/s" in line and "100" in line and "83" in line for line in comparison_lines(EXPECTED, found))


def test_within_the_bar_nothing_is_said() -> None:
    assert find_gaps(EXPECTED, replace(SLOW, step_s=1.09), HostLoad) == {}
    told = find_gaps(EXPECTED, replace(SLOW, step_s=1.11), HostLoad)
    assert "11% slower than planned" in told["plan_speed"].symptom


def test_faster_or_larger_than_planned_is_a_finding_too() -> None:
    told = find_gaps(EXPECTED, replace(SLOW, step_s=0.5, memory_bytes=13 * 10**8), HostLoad)
    assert "100% faster" in told["plan_speed"].symptom and "30% more memory" in told["plan_memory"].symptom
    assert told["plan_memory"].evidence["ratio"] == 1.3


@pytest.mark.parametrize(
    ("changes", "around", "reason"),
    [
        ({"wait_s": 0.3}, HostLoad(others_busy=0.9), "data wait"),
        ({"jumps_s": 0.3}, HostLoad(), "recompile"),
        ({}, HostLoad(retries=3, others_busy=0.9), "memory fragmentation"),
        ({}, HostLoad(others_busy=0.5), "other load"),
        ({}, HostLoad(others_busy=0.5, retries=0, clock=0.6), "clock"),  # a GPU's host may well be shared
        ({}, HostLoad(others_bytes=2 << 30, retries=0), "other load"),
        ({}, HostLoad(retries=0, clock=0.99, device_busy=0.4), "host"),
        ({"wait_s": 0.2}, HostLoad(others_busy=0.1, clock=1.0), ""),
    ],
)
def test_the_likely_reason(changes: dict[str, float], around: HostLoad, reason: str) -> None:
    assert likely_reason(EXPECTED, replace(SLOW, **changes), around)[0] == reason
    told = find_gaps(EXPECTED, replace(SLOW, **changes), lambda: around)["plan_speed"]
    assert told.evidence["reason"] == reason and told.cause and told.fix


def test_a_run_is_compared_from_its_folder(tmp_path: Path) -> None:
    assert compare_run(Run(tmp_path)) is None
    (tmp_path / "expected.json").write_text("{}")
    assert compare_run(Run(tmp_path)) is None
    (tmp_path / "expected.json").write_text(EXPECTED.to_json())
    (tmp_path / "metrics").mkdir()
    steps = "".join(json.dumps({"step": i, **step(2.0)}) + "\n" for i in range(40))
    (tmp_path / "metrics/steps.jsonl").write_text(steps)
    found = compare_run(Run(tmp_path))
    assert found is not None and found[0] == EXPECTED and found[1].steps == 32 and found[1].step_s == 2.0
