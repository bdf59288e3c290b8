"""SIGKILL at random moments: the same command again, and the run is as if nothing had happened."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bessemer.run.directory import Run
from bessemer.session.session import train
from bessemer.spec.load import dump_spec, load_spec
from bessemer.spec.schema import RunSpec

from .conftest import WORDS, spec_data
from .trl_reference import write_folder

STEPS = 600


def start(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bessemer", "train", str(path), "--plain"]
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup ignore it, and children inherit that
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    finally:
        signal.signal(signal.SIGHUP, ignored)


def write_spec(make_spec: Callable[..., RunSpec], folder: Path, name: str, steps: int = STEPS) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(dump_spec(make_spec(name, budget={"steps": steps, "batch": 256}, checkpoint={"every": 20})))
    return path


def losses(run: Run) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in run.metrics()]


def kill_at_random(path: Path, run: Run, kills: int, least: int = -20) -> list[int]:
    """Starts the run and kills it, several times: after `least` to `least` + 40 further steps, from -20 also in the
    start. Returns the number of its steps after each kill."""
    draw, killed_at = random.Random(kills), []
    for _ in range(kills):
        process = start(path)
        # Some kills fall into the start, some into steps, saves and evaluations.
        began, already = time.monotonic(), len(losses(run)) if run.steps_path.exists() else 0
        steps = draw.randint(0, 40)
        while process.poll() is None and time.monotonic() - began < 60:
            if (
                run.steps_path.exists()
                and len(losses(run)) >= already + least + steps
                and time.monotonic() - began > 2.5
            ):
                break
            time.sleep(0.05)
        time.sleep(draw.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before the kill"
        killed_at.append(len(losses(run)) if run.steps_path.exists() else 0)
    return killed_at


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.timeout(400)
def test_killed_runs_resume_with_every_step_once_and_the_same_losses(
    make_spec: Callable[..., RunSpec], tmp_path: Path, kills: int
) -> None:
    whole, broken = Run(tmp_path / "runs" / "whole"), Run(tmp_path / "runs" / "broken")
    length = 60 * kills  # a kill comes within 40 steps of the last
    assert train(load_spec(write_spec(make_spec, tmp_path, "whole", length))).kind == "finished"
    path = write_spec(make_spec, tmp_path, "broken", length)
    killed_at = kill_at_random(path, broken, kills)
    assert train(load_spec(path)).kind == "finished"
    print("killed after steps", killed_at)
    assert [step for step, _ in losses(broken)] == list(range(length))
    assert losses(broken) == losses(whole)


FINE_TUNING: dict[str, dict[str, Any]] = {
    "sft": {"sft": {"neftune": 5.0}, "optimizer": {"lr": 1e-3}},
    "lora": {
        "adapter": {"kind": "lora", "rank": 4, "alpha": 8, "dropout": 0.1, "lr_ratio": 4},
        "optimizer": {"lr": 1e-2},
    },
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", FINE_TUNING)
def test_killed_fine_tuning_resumes_with_the_same_losses(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("transformers")
    rows = [
        {"messages": [
            {"role": "user", "content": f"{WORDS[i % 16]} {i}?"},
            {"role": "assistant", "content": " ".join(WORDS[(i + k) % 16] for k in range(1 + i % 7))},
        ]}
        for i in range(150)
    ]  # fmt: skip
    corpus = tmp_path / "talks.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = write_folder(tmp_path / "model", corpus.read_text().splitlines())
    specs = []
    for name in ("whole", "broken"):
        parts = spec_data(
            name, corpus, tmp_path / "runs", budget={"steps": 160, "batch": 512, "micro_batch": 2},
            checkpoint={"every": 20}, data={"context": 64}, objective="sft",
        )  # fmt: skip
        specs.append(
            RunSpec.model_validate(parts | {"model": {"hf": str(model)}, "tokenizer": {}, **FINE_TUNING[kind]})
        )
    whole, path = specs[0], tmp_path / "broken.yaml"
    path.write_text(dump_spec(specs[1]))
    assert train(whole).kind == "finished"
    broken = Run(tmp_path / "runs" / "broken")
    print("killed after steps", kill_at_random(path, broken, 2, least=5))
    assert train(load_spec(path)).kind == "finished"
    expected, actual = (
        [
            [record[name] for name in ("step", "loss", "grad_norm", "accuracy", "lr", "tokens")]
            for record in run.metrics()
        ]
        for run in (Run(tmp_path / "runs" / "whole"), broken)
    )
    assert actual == expected and len(expected) == 160


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)]
)
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(
    make_spec: Callable[..., RunSpec], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    path = write_spec(make_spec, tmp_path, "polite")
    run = Run(tmp_path / "runs" / "polite")
    process = start(path)
    while process.poll() is None and not (run.steps_path.exists() and losses(run)):
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate()
    assert process.returncode == code, output
    assert f"continue with: bessemer train {path}" in output
    done = len(losses(run))
    saved = list(run.events("saved"))[-1]
    assert saved["step"] == done
    assert run.state == "interrupted"
