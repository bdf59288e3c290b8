"""Forecasts of curves whose law is known, of a run's folder, on the live line and in `bessemer runs`."""

import json
import math
import random
import sys
from pathlib import Path

import pytest
import yaml

from bessemer.cli import main
from bessemer.errors import UserError
from bessemer.observe.view import LineView
from bessemer.plan import run_forecast
from bessemer.plan.decision import Plan
from bessemer.plan.forecast import Annealing, forecast
from bessemer.plan.run_forecast import LiveForecast, forecast_run, schedule_of
from bessemer.plan.schedule import Schedule
from bessemer.run.directory import Run, RunWriter, list_runs

STEPS, WARMUP, PEAK = 4000, 100, 1e-3
SCHEDULES = {
    "cosine": Schedule(PEAK, WARMUP, STEPS, "cosine", 0.1),
    "wsd": Schedule(PEAK, WARMUP, STEPS, "wsd", 0.0, decay=800),
    "constant": Schedule(PEAK, WARMUP, STEPS, "constant"),
}


def by_the_law(schedule: Schedule, floor: float = 2.5, scale: float = 14.0, drop: float = 0.13) -> list[float]:
    """The loss of every step by the definition: sums over all steps, rates as they are."""
    rates = [schedule.lr(step) for step in range(STEPS)]
    falls = [(k, rates[k - 1] - rates[k]) for k in range(1, STEPS) if rates[k] < rates[k - 1]]
    sums, total = [], 0.0
    for rate in rates:
        total += rate
        sums.append(total)
    losses = []
    for step in range(STEPS):
        free = 0.0
        if step == STEPS - 1 or step % 40 == 0:  # the others lie between
            for k, fall in falls[:: max(1, len(falls) // 400)]:
                if k <= step:
                    x = 2.07 * max(rates[k], 0.02 * PEAK) ** -0.64 * (sums[step] - sums[k - 1])
                    free += fall * (1 - (1 + x) ** -0.59) * max(1, len(falls) // 400)
            last = free
        losses.append(floor + scale * (sums[step] / PEAK) ** -0.45 - drop / PEAK * last)
    return losses


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("seen", [0.3, 0.6])
def test_a_curve_by_the_law_is_forecast_from_a_part_of_it(kind: str, seen: float) -> None:
    schedule, draw = SCHEDULES[kind], random.Random(0)
    losses = by_the_law(schedule)
    part = [(step, loss + draw.gauss(0, 0.03)) for step, loss in enumerate(losses[: int(seen * STEPS)])]
    result = forecast(part, schedule.lr, STEPS, WARMUP)
    assert result is not None
    assert result.final == pytest.approx(losses[-1], rel=0.01)
    assert result.low < losses[-1] < result.high and result.seen == seen
    assert result.high - result.low < 0.1 * losses[-1]


def test_the_schedule_decides_what_a_curve_will_become() -> None:
    """The first 30 % of a constant rate and of WSD are the same; the last part of WSD sets loss free."""
    part = list(enumerate(by_the_law(SCHEDULES["constant"])[:1200]))
    finals = {}
    for kind in ("constant", "wsd"):
        result = forecast(part, SCHEDULES[kind].lr, STEPS, WARMUP)
        assert result is not None
        finals[kind] = result.final
    assert 0.05 < finals["constant"] - finals["wsd"] < 0.2


def test_the_annealing_of_coarse_knots_is_that_of_every_step() -> None:
    schedule = SCHEDULES["wsd"]
    summed = sum(schedule.lr(step) for step in range(3600)) / PEAK
    assert Annealing.of(schedule.lr, STEPS).at(3599)[0] == pytest.approx(summed, rel=0.01)
    assert Annealing.of(schedule.lr, STEPS).at(3000)[1] == 0 < Annealing.of(schedule.lr, STEPS).at(3990)[1] < 1


def test_too_few_steps_and_the_end_have_no_forecast() -> None:
    schedule = SCHEDULES["cosine"]
    assert forecast([], schedule.lr, STEPS) is None
    assert forecast([(step, 5.0) for step in range(110)], schedule.lr, STEPS, WARMUP) is None
    assert forecast([(step, 5.0) for step in range(STEPS)], schedule.lr, STEPS, WARMUP) is not None
    assert forecast([(step, math.nan) for step in range(900)], schedule.lr, STEPS, WARMUP) is None


def write_run(folder: Path, steps: int, state: str | None = None, **spec: object) -> Run:
    schedule = SCHEDULES["wsd"]
    losses = by_the_law(schedule)
    with RunWriter(folder) as run:
        spec = {
            "model": {"width": 32, "layers": 2, "heads": 2}, "data": {"sources": {"a": "a.jsonl"}, "context": 64},
            "schedule": {"kind": "wsd", "floor": "0%", "decay": 800}, "budget": {"steps": STEPS, "batch": 512}, **spec,
        }  # fmt: skip
        run.write_file("spec.yaml", yaml.safe_dump(spec))
        plan = Plan()
        for key, value in {"optimizer.lr": PEAK, "schedule.warmup": WARMUP, "steps": STEPS, "epochs": 0.5}.items():
            plan.add_requested(key, value)
        run.write_file("plan.json", plan.to_json())
        run.event("started", total_steps=STEPS, parameters=100_000)
        for step in range(steps):
            veto = "loss" if step == 1000 else None
            loss = 90.0 if veto else losses[step]
            run.step({"step": step, "loss": loss, "tokens": 512 * (step + 1), "veto": veto})
        if state:
            run.event(state, step=steps, reason="")
    return Run(folder)


def test_a_run_is_forecast_with_the_schedule_of_its_plan(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1200)
    schedule, total = schedule_of(run)
    assert total == STEPS and [schedule.lr(s) for s in (0, 50, 2000, 3999)] == [
        SCHEDULES["wsd"].lr(s) for s in (0, 50, 2000, 3999)
    ]
    result = forecast_run(run)
    final = by_the_law(SCHEDULES["wsd"])[-1]
    assert result.forecast.final == pytest.approx(final, rel=0.01)
    assert result.longer < result.forecast.final > result.larger
    assert (result.tokens, result.parameters, result.final) == (512 * STEPS, 100_000, None)
    assert result.advice in ("train longer", "larger model")
    assert result.lines()[0].startswith("forecast      final loss 2.")


def test_twice_the_tokens_is_the_law_of_a_schedule_twice_as_long(tmp_path: Path) -> None:
    """The law here: 2.5 + 14 S^-0.45 less the annealing, which a longer run has too."""
    result = forecast_run(write_run(tmp_path / "run", 3000))
    work = sum(SCHEDULES["wsd"].lr(step) for step in range(STEPS)) / PEAK
    gain = 14 * (work**-0.45 - (2 * work) ** -0.45)
    assert result.forecast.final - result.longer == pytest.approx(gain, rel=0.15)


def test_repeated_data_asks_for_more_data(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1200)
    plan = Plan.from_json((run.folder / "plan.json").read_text())
    plan.add_requested("epochs", 3.0)
    (run.folder / "plan.json").write_text(plan.to_json())
    result = forecast_run(run)
    assert result.advice == "more data" and any("repeat the data 6.0 times" in line for line in result.lines())


def test_the_command_and_its_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["bessemer", "plan", "forecast", *arguments])
        with pytest.raises(SystemExit) as left:
            main.run()
        printed = capsys.readouterr()
        return left.value.code or 0, printed.out, printed.err

    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "over", STEPS, "finished")
    code, _, err = call("over")
    assert code == 2 and "the run is over: write --at 30%" in err and err.count("\n") == 1
    code, out, _ = call("over", "--at", "30%", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["loss_of_the_run"] == pytest.approx(facts["final"], rel=0.02)
    assert "ended with" in call("over", "--at", "30%")[1]
    assert "expected a share" in call("over", "--at", "often")[2]
    write_run(tmp_path / "young", 120)
    assert "120 steps after a warm-up of 100 are too few" in call("young")[2]
    write_run(tmp_path / "sft", 120, objective="sft", data={"sources": {"a": "a.jsonl"}})
    assert "only pretrain is forecast" in call("sft")[2]
    assert "not a run" in call("nowhere")[2]


def test_a_live_run_shows_it_on_its_line_and_in_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "runs" / "live", 1100)
    monkeypatch.setattr(run_forecast, "EVERY_S", 0.0)
    live = LiveForecast(run, *schedule_of(run))
    assert len(live.bins) <= run_forecast.BINS + 80
    view = LineView(line_every_s=0.0)
    view.forecaster = live.add
    record = {
        "step": 1100, "loss": 3.1, "veto": None, "clipped": False, "lr": PEAK, "grad_norm": 1.0, "memory_bytes": 1,
        "step_s": 0.1, "tokens_per_s": 5000.0, "mfu": 0.1, "data_wait_s": 0.0,
    }  # fmt: skip
    view.step(record)
    shown = capsys.readouterr().out
    final = forecast_run(run).forecast.final
    assert f"forecast {live.text}" in shown and float(live.text.split()[0]) == pytest.approx(final, rel=0.003)
    [summary] = list_runs(tmp_path / "runs")
    assert summary.forecast is not None and summary.forecast["low"] < final < summary.forecast["high"]
    monkeypatch.setattr(sys, "argv", ["bessemer", "runs", str(tmp_path / "runs")])
    with pytest.raises(SystemExit):
        main.run()
    assert live.text in capsys.readouterr().out


def test_a_damaged_forecast_file_is_no_forecast(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "live", 5)
    for text in ("{", '{"final": 1}', "[]"):
        (run.folder / "forecast.json").write_text(text)
        assert list_runs(tmp_path / "runs")[0].forecast is None


def test_objectives_without_a_law_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only pretrain"):
        schedule_of(write_run(tmp_path / "run", 5, objective="sft"))
