"""A spec with a sweep, and a stand-in for `bessemer train`: an ordinary run folder whose loss is a known function of
the spec, so that hundreds of trials take a second. `test_train.py` trains."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bessemer.run.directory import RunWriter
from bessemer.sweep.run import Sweep, open_sweep

RANGES = {
    "optimizer.lr": {"min": 1e-4, "max": 1e-1, "log": True},
    "optimizer.weight_decay": {"min": 0, "max": 1},
    "schedule.kind": ["cosine", "wsd", "linear"],
    "model.layers": {"min": 1, "max": 6},
}


def loss_of(spec: dict[str, Any]) -> float:
    """Least at lr 0.01 and without weight decay; longer runs are better. Too high a rate diverges."""
    optimizer, steps = spec["optimizer"], spec["budget"]["steps"]
    if (lr := optimizer.get("lr", 0.01)) in ("auto", None) or lr > 0.03:
        return math.nan
    decay = 0.1 * optimizer.get("weight_decay", 0.0)
    return 2 + math.log10(lr / 0.01) ** 2 + decay + 0.001 * (spec["schedule"]["kind"] != "wsd") + 3 / steps


def pretend(path: Path, output: Path) -> int:
    """What `bessemer train` leaves behind."""
    spec = yaml.load(path.read_text(), yaml.CSafeLoader)
    folder = Path(spec["runs"]) / spec["name"]
    with RunWriter(folder) as run:
        run.event("started", total_steps=spec["budget"]["steps"])
        run.step({"step": 0, "loss": 5.0, "veto": None})
        run.validation({"step": 1, "loss": loss_of(spec), "accuracy": 0.5})
        run.event("finished", step=1, reason="done")
    output.write_text("done\n")
    return 0


Write = Callable[..., Sweep]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a spec with a sweep and opens it, in an empty folder."""
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.jsonl").write_text(json.dumps({"text": "steel"}) + "\n")

    def make(name: str = "tuned", ranges: dict[str, Any] | None = None, **sweep: Any) -> Sweep:
        data = {
            "name": name, "model": {"width": 32, "layers": 2, "heads": 2},
            "data": {"sources": {"words": "words.jsonl"}}, "budget": {"steps": 90}, "sweep": {"parameters": ranges or RANGES, **sweep},
        }  # fmt: skip
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(data))
        return open_sweep(path, ())

    return make
