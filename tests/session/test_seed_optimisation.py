"""Conversations about optimisation, asked of the commands: AdamW with SAM, a loss that oscillates, warm-up."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.guard.detect.conftest import falling, make, norms, replay

from bessemer.cli import main
from bessemer.run.directory import Run
from bessemer.session.session import run_folder
from bessemer.spec.load import dump_spec
from bessemer.spec.schema import RunSpec

Make = Callable[..., RunSpec]
pytestmark = pytest.mark.usefixtures("one_probe")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str, str]]:
    def run(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["bessemer", *arguments])
        with pytest.raises(SystemExit) as left:
            main.run()
        printed = capsys.readouterr()
        return left.value.code or 0, printed.out, printed.err

    return run


@pytest.mark.parametrize("adaptive", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_optimizer_that_combines_adamw_with_sam(make_spec: Make, adaptive: bool, tmp_path: Path, call: Any) -> None:
    """Two keys. `bessemer train` trains with them, and a run that is continued goes on bit for bit."""
    sam = {"name": "adamw", "sam": 0.5 if adaptive else 0.05, "sam_adaptive": adaptive}
    schedule = {"length": 16, "warmup": 2}
    unbroken = make_spec("unbroken", optimizer=sam, schedule=schedule, budget={"steps": 16})
    half = make_spec("half", optimizer=sam, schedule=schedule, budget={"steps": 8})
    for spec in (half, half.model_copy(update={"budget": unbroken.budget}), unbroken):
        (tmp_path / "spec.yaml").write_text(dump_spec(spec))
        code, _, err = call("train", str(tmp_path / "spec.yaml"), "--plain")
        assert code == 0, err
    once, continued = ([r["loss"] for r in Run(run_folder(s)).metrics()] for s in (unbroken, half))
    assert continued == once and len(once) == 16 and once[-1] < once[0] - 0.5


def test_the_loss_starts_oscillating() -> None:
    """The alarm names period and swing, and the cause to look at; a calm run has none."""
    rng = np.random.default_rng(0)
    steps, onset, period = 2_600, 2_000, 12.5
    loss = falling(steps) * (1 + 0.02 * rng.standard_normal(steps))
    calm = make(rng, loss.copy(), norms(rng, steps))
    assert not [alarm for alarm in replay(calm) if alarm.kind == "oscillation"]
    wave = np.sin(2 * np.pi * np.arange(steps) / period) * (np.arange(steps) >= onset)
    shaken = make(rng, loss * (1 + 0.12 * wave), norms(rng, steps))
    [alarm] = [alarm for alarm in replay(shaken) if alarm.kind == "oscillation"][:1]
    assert onset < alarm.step < onset + 400
    assert alarm.finding.evidence["period"] == pytest.approx(period, rel=0.05)
    assert 0.15 < alarm.finding.evidence["swing"] < 0.3  # from trough to crest it is 0.24 of the loss
    assert "edge of stability" in alarm.finding.cause and "lower optimizer.lr" in alarm.finding.fix


def spec_file(folder: Path, schedule: dict[str, Any], steps: int = 12_000) -> Path:
    (folder / "words.jsonl").write_text('{"text": "steel"}\n')
    path = folder / "my-run.yaml"
    data = {
        "model": {"width": 32, "layers": 2, "heads": 2}, "optimizer": {"lr": 3e-4}, "schedule": schedule,
        "data": {"sources": {"words": str(folder / "words.jsonl")}, "context": 64},
        "budget": {"steps": steps, "batch": 1024},
    }  # fmt: skip
    path.write_text(json.dumps(data))
    return path


def test_a_cosine_with_warmup_has_the_right_numbers_at_its_corners(tmp_path: Path, call: Any) -> None:
    """Never zero at the first step, the peak after the warm-up, the floor at the end, and no rise past it."""
    path = spec_file(tmp_path, {"kind": "cosine", "warmup": 1000, "floor": "10%"})
    code, out, _ = call("spec", "show", str(path), "--plot", "--json")
    numbers = json.loads(out)
    rates = dict(zip(numbers["steps"], numbers["lr"], strict=True))
    assert code == 0 and rates[0] == pytest.approx(3e-4 / 1000) and rates[0] > 0
    assert max(rates.values()) == pytest.approx(3e-4, rel=1e-3) and rates[11_999] == pytest.approx(3e-5)
    step = max(s for s in rates if s < 6000)
    progress = (step - 1000) / (11_999 - 1000)
    assert rates[step] == pytest.approx(3e-5 + 2.7e-4 * 0.5 * (1 + math.cos(math.pi * progress)))
    path = spec_file(tmp_path, {"kind": "cosine", "warmup": 1000, "floor": "10%", "length": 10_000})
    numbers = json.loads(call("spec", "show", str(path), "--plot", "--json")[1])
    past = [rate for s, rate in zip(numbers["steps"], numbers["lr"], strict=True) if s >= 10_000]
    assert past == pytest.approx([3e-5] * len(past)) and len(past) > 10


def test_a_warmup_of_the_whole_run_is_refused_instead_of_divided_by(tmp_path: Path, call: Any) -> None:
    path = spec_file(tmp_path, {"kind": "cosine", "warmup": 500}, steps=500)
    code, _, err = call("spec", "check", str(path))
    assert code == 2 and "schedule.warmup: 500 steps are the whole run of 500: write 2%" in err


def test_an_oscillating_run_is_calmed_by_decaying_from_now_on(tmp_path: Path, call: Any) -> None:
    """One segment: the rate falls from where it is, without a jump."""
    schedule = {"kind": "constant", "warmup": 1000, "segments": [{"from_step": 10_000, "to": "0%", "shape": "linear"}]}
    numbers = json.loads(call("spec", "show", str(spec_file(tmp_path, schedule)), "--plot", "--json")[1])
    rates = dict(zip(numbers["steps"], numbers["lr"], strict=True))
    before, after = max(s for s in rates if s < 10_000), min(s for s in rates if s > 10_000)
    assert rates[before] == pytest.approx(3e-4) and rates[11_999] == pytest.approx(0, abs=1e-12)
    assert rates[after] == pytest.approx(3e-4 * (1 - (after - 10_000) / 1999))
