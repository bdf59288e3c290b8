"""Draws, results, rungs and refusals of a sweep, and one that is killed."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.sweep.conftest import RANGES, Write, pretend

from bessemer.errors import UserError
from bessemer.run.directory import Run, list_runs
from bessemer.spec.load import load_spec
from bessemer.spec.sweep import SweepSpec
from bessemer.sweep.record import TRIALS, Trials
from bessemer.sweep.report import closing_lines, table_rows, to_json
from bessemer.sweep.run import Sweep, run_sweep
from bessemer.sweep.space import Result, draw, is_integer


def run(sweep: Sweep, train: Any = pretend) -> tuple[Trials, list[str]]:
    lines: list[str] = []
    trials, code = run_sweep(sweep, lines.append, train)
    assert code == 0
    return trials, lines


def told(trials: Trials) -> list[Any]:
    return [(t.name, t.values, t.state, t.value) for t in trials.trials]


@pytest.mark.slow
def test_tpe_comes_nearer_to_the_best_rate_than_chance() -> None:
    """The mean distance from the best rate, in decades, over the second half of 30 trials and two seeds."""
    pytest.importorskip("optuna")
    distances = {}
    for strategy in ("tpe", "random"):
        found = []
        for seed in range(2):
            sweep = SweepSpec.model_validate({"parameters": RANGES, "strategy": strategy, "trials": 30, "seed": seed})
            results: list[Result] = []
            for number in range(30):
                values = draw(sweep, number, results)
                distance = abs(math.log10(values["optimizer.lr"] / 0.01))
                results.append(Result(values, None if values["optimizer.lr"] > 0.05 else 2 + distance**2))
                found += [distance] if number >= 15 else []
        distances[strategy] = sum(found) / len(found)
    assert distances["tpe"] < 0.7 * distances["random"]


def test_the_best_spec_is_written_and_what_mattered_is_named(write: Write) -> None:
    sweep = write(trials=12)
    trials, _ = run(sweep)
    best = trials.ranked(1.0)[0]
    assert best.value == min(t.value for t in trials.trials if t.value is not None)
    spec = load_spec(sweep.folder / "best.yaml")
    assert (spec.name, spec.sweep, spec.runs) == ("tuned-best", None, "runs")
    assert spec.optimizer.lr == best.values["optimizer.lr"] and spec.model.layers == best.values["model.layers"]
    facts = to_json(sweep, trials)
    assert next(iter(facts["importance"])) == "optimizer.lr" and sum(facts["importance"].values()) == pytest.approx(1)
    assert any(t.state == "diverged" for t in trials.trials), "rates above 0.03 do"
    text = "\n".join(closing_lines(sweep, trials))
    assert "mattered  optimizer.lr" in text and "diverged" in text
    rows = table_rows(sweep, trials)
    assert rows[1][:3] == ["1", best.name, f"{best.value:.4f}"] and len(rows) == 13


def test_trials_are_ordinary_runs(write: Write) -> None:
    sweep = write(trials=3)
    run(sweep)
    assert {s.name: s.state for s in list_runs(sweep.folder)} == dict.fromkeys(
        ("trial-001", "trial-002", "trial-003"), "finished"
    )


def test_a_grid_takes_every_combination_once(write: Write) -> None:
    ranges = {"optimizer.lr": {"min": 0.001, "max": 0.01, "log": True, "points": 3}, "schedule.warmup": ["1%", 5]}
    sweep = write(ranges=ranges, strategy="grid")
    trials, _ = run(sweep)
    rates, warmups = (0.001, 0.00316228, 0.01), ("1%", "5")
    assert [tuple(t.values.values()) for t in trials.trials] == [(r, w) for r in rates for w in warmups]
    assert load_spec(sweep.folder / "specs" / "trial-002.yaml").schedule.warmup == 5
    assert any("optimizer.lr is at an end" in line for line in closing_lines(sweep, trials))


def test_whole_numbers_are_drawn_where_the_key_wants_them(write: Write) -> None:
    sweep = write(trials=6, strategy="random")
    parameters = sweep.sweep.parameters
    assert is_integer("model.layers", parameters["model.layers"])
    assert not is_integer("optimizer.weight_decay", parameters["optimizer.weight_decay"])
    trials, _ = run(sweep)
    decays = [t.values["optimizer.weight_decay"] for t in trials.trials]
    assert len({t.values["model.layers"] for t in trials.trials}) > 2 and len(set(decays)) == 6


def test_asha_runs_the_best_third_again_three_times_as_long(write: Write) -> None:
    sweep = write(trials=9, strategy="asha")
    trials, _ = run(sweep)
    lengths = [Run(sweep.folder / t.name) for t in trials.trials]
    steps = [next(run.events("started"))["total_steps"] for run in lengths]
    assert [steps.count(n) for n in (10, 30, 90)] == [9, 3, 1]
    best = trials.ranked(1.0)[0]
    assert (best.rung, steps[trials.trials.index(best)]) == (2, 90)
    short = sorted((t for t in trials.at_rung(0) if t.value is not None), key=lambda t: t.value or 0)
    # A configuration is promoted before all others have run: among the best so far, not of all.
    assert best.number in [t.number for t in short[:3]]


def killed(sweep: Sweep, after: int) -> None:
    """A process that runs the sweep until a SIGKILL in the middle of trial `after`."""
    code = (
        "import sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from tests.sweep.conftest import pretend; from bessemer.sweep.run import open_sweep, run_sweep\n"
        "def slow(path, output):\n"
        f"    time.sleep(600 if path.stem.startswith('trial-{after:03d}') else 0)\n"
        "    return pretend(path, output)\n"
        "run_sweep(open_sweep(Path(sys.argv[2]), ()), print, slow)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(Path(__file__).parents[2]), str(sweep.path)])
    try:
        begun = f'"trial": {after - 1},'
        give_up = time.monotonic() + 60
        path = sweep.folder / TRIALS
        while not (path.exists() and begun in path.read_text()):
            assert child.poll() is None and time.monotonic() < give_up
            time.sleep(0.02)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()


@pytest.mark.parametrize(
    ("strategy", "parallel"),
    [("tpe", 1), ("tpe", 3), *(pytest.param("asha", n, marks=pytest.mark.slow) for n in (1, 3))],
)
def test_a_killed_sweep_ends_like_one_that_was_not(write: Write, strategy: str, parallel: int) -> None:
    """With several trials at a time too, whichever of them end first."""
    unbroken, _ = run(write("unbroken", strategy=strategy, trials=10, parallel=parallel))
    sweep = write("broken", strategy=strategy, trials=10, parallel=parallel)
    killed(sweep, 8)
    assert len(Trials.read(sweep.folder).trials) >= 8
    with (sweep.folder / TRIALS).open("ab") as file:
        file.write(b'{"trial": 7, "sta')  # a line that the kill has torn
    trials, lines = run(sweep)
    assert lines[0].startswith("sweep  continuing")
    assert told(trials) == told(unbroken) == told(Trials.read(sweep.folder))
    best = (sweep.folder / "best.yaml").read_text()
    assert best.replace("broken", "unbroken") == (Path("runs/unbroken/best.yaml")).read_text()


def test_trials_of_a_round_run_beside_each_other(write: Write) -> None:
    """Each waits for the other to begin. What ends first changes no draw."""
    meeting = threading.Barrier(2, timeout=60)

    def together(path: Path, output: Path) -> int:
        meeting.wait()
        time.sleep(0.05 * (path.stem == "trial-001"))
        return pretend(path, output)

    trials, _ = run(write(trials=6, parallel=2), together)
    ends = [json.loads(line) for line in (trials.folder / TRIALS).read_text().splitlines()]
    assert [record["trial"] for record in ends if "state" in record][:2] == [1, 0]
    assert told(trials) == told(run(write("other", trials=6, parallel=2))[0])


def test_a_trial_can_be_a_launched_job(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command waits for its job; changing where trials run changes no sweep."""
    commands = []

    class Child(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: Any) -> None:
            commands.append(command)
            pretend(Path(command[5]), Path(command[5]).with_suffix(".log"))
            super().__init__([sys.executable, "-c", ""], **options)

    monkeypatch.setattr("bessemer.sweep.run.subprocess.Popen", Child)
    trials, code = run_sweep(write(trials=2, parallel=2, launch="--on slurm --gpus 8"), print)
    assert code == 0 and len(trials.ranked(1.0)) >= 1
    assert (
        sorted(command[2:5] + command[6:] for command in commands)
        == [["bessemer", "launch", "submit", "--on", "slurm", "--gpus", "8", "--wait"]] * 2
    )
    run(write(trials=4, parallel=2))


def test_more_trials_continue_a_finished_sweep_and_another_spec_is_refused(write: Write) -> None:
    first, _ = run(write(trials=4))
    more, _ = run(write(trials=6))
    assert told(more)[:4] == told(first) and len(more.trials) == 6
    with pytest.raises(UserError, match="holds a sweep of another spec"):
        run(write(trials=6, seed=1))


def test_an_interrupted_trial_ends_the_sweep_with_its_code(write: Write) -> None:
    from bessemer.run.directory import RunWriter

    def interrupted(path: Path, output: Path) -> int:
        with RunWriter(Path("runs/tuned") / path.stem) as run:
            run.event("started")
            run.event("interrupted", step=1, reason="SIGTERM")
        return 143

    trials, code = run_sweep(write(trials=3), print, interrupted)
    assert code == 143 and trials.begun == [trials.trials[0]]
    assert len(run(write(trials=3))[0].ranked(1.0)) >= 1


def test_failed_trials_are_named_and_all_failed_is_an_error(write: Write) -> None:
    def failing(path: Path, output: Path) -> int:
        output.write_text("out of memory\n")
        return 1

    sweep = write(trials=2)
    trials, code = run_sweep(sweep, print, failing)
    assert code == 1 and not (sweep.folder / "best.yaml").exists()
    assert "failed    2 of 2, such as trial-001: out of memory" in closing_lines(sweep, trials)


def test_a_mistake_in_the_spec_ends_the_first_trial_and_the_sweep(write: Write) -> None:
    def mistaken(path: Path, output: Path) -> int:
        output.write_text("words.jsonl: no rows\n")
        return 2

    sweep = write(trials=2)
    with pytest.raises(UserError, match=r"^trial-001: words.jsonl: no rows$"):
        run(sweep, mistaken)
    trials, _ = run(sweep)  # when it is mended, the same trial runs
    assert len(trials.trials) == 2


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ranges": {"optimizer.lrr": [1]}}, "unknown key; did you mean lr?"),
    ({"ranges": {"optimizer.lr": {"min": 1, "max": 0.1}}}, "sweep.parameters.optimizer.lr.max: 0.1 is not above min"),
    ({"ranges": {"optimizer.lr": {"min": 0, "max": 0.1, "log": True}}}, "begins above 0"),
    ({"ranges": {"optimizer.lr": {"min": 0.1}}}, "write a list of values, or min and max"),
    ({"ranges": {"optimizer.lr": {"min": 0.1, "max": 1000}}}, "it must be above 0 and at most 100"),
    ({"ranges": {"runs": ["a", "b"]}}, "the sweep names its runs itself"),
    ({"strategy": "grid"}, "a grid needs values, or points"),
    ({"strategy": "asha", "trials": 5}, "write trials: 9 or more"),
    ({"rungs": 3}, "tpe has no rungs"),
]


@pytest.mark.parametrize(("asks", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_work_is_refused_by_its_key(write: Write, asks: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        write(**asks)
    assert words in str(refused.value)


def test_a_metric_that_no_validation_has_is_refused_with_those_that_it_has(write: Write) -> None:
    with pytest.raises(UserError, match=r"no such number: it has loss, loss, accuracy"):
        run(write(trials=2, metric="reward"))
    trials, _ = run(write("right", trials=2, metric="accuracy", goal="maximize"))
    assert [t.value for t in trials.trials] == [0.5, 0.5]


def test_the_journal_is_one_line_for_a_draw_and_one_for_a_result(write: Write) -> None:
    sweep = write(trials=2)
    run(sweep)
    records = [json.loads(line) for line in (sweep.folder / TRIALS).read_text().splitlines()]
    assert ["values" in record for record in records] == [True, False, True, False]


def test_the_command_prints_the_table_and_says_what_is_missing(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bessemer.cli import main

    def call(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["bessemer", "sweep", *arguments])
        with pytest.raises(SystemExit) as left:
            main.run()
        printed = capsys.readouterr()
        return left.value.code or 0, printed.out, printed.err

    monkeypatch.setattr("bessemer.sweep.run.run_in_a_process", lambda launch, children, *paths: pretend(*paths))
    write(trials=3, strategy="random")
    code, out, _ = call("tuned.yaml")
    assert code == 0 and "trial 3/3" in out and out.rstrip().endswith("bessemer runs runs/tuned")
    code, out, err = call("tuned.yaml", "--json")
    assert code == 0 and len(json.loads(out)["trials"]) == 3 and "continuing" in err
    Path("plain.yaml").write_text("model: {width: 32, layers: 2, heads: 2}\ndata: {sources: {words: words.jsonl}}\n")
    code, _, err = call("plain.yaml")
    assert code == 2 and err.startswith("plain.yaml: has no sweep section: write sweep:") and err.count("\n") == 1
    code, out, _ = call("--help")
    assert code == 0 and "Example: bessemer sweep my-sweep.yaml" in " ".join(out.split())
