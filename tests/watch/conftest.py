"""Run folders as training writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from bessemer.run.directory import Run, RunWriter

MARKUP = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> & more"


def write_run(runs: Path, name: str, steps: int = 60, offset: float = 0.0) -> Run:
    """A finished run with a veto and its report, evaluations, ranks and answers."""
    with RunWriter(runs / name) as run:
        run.write_file("spec.yaml", f"name: {name}\noptimizer:\n  lr: {0.01 + offset}\n")
        decision = {"key": "optimizer.lr", "value": 0.01 + offset, "reason": MARKUP, "source": "rule", "basis": ""}
        run.write_file("plan.json", json.dumps({"decisions": [decision]}))
        run.event("started", step=0, total_steps=steps)
        for step in range(steps):
            loss = math.nan if step == 30 else 2 + offset + math.exp(-step / 20)
            veto = "not finite" if step == 30 else None
            run.step(
                {"step": step, "loss": loss, "grad_norm": 1.0, "lr": 1e-3, "veto": veto, "clipped": False,
                 "tokens": 128 * (step + 1), "tokens_per_s": 1000.0, "mfu": 0.3, "step_s": 0.5, "data_wait_s": 0.001,
                 "memory_bytes": 1 << 30}
            )  # fmt: skip
            if step % 10 == 9:
                run.validation({"step": step + 1, "loss": loss + 0.1, "per_source": {"words": loss}})
                run.rank_record({"step": step, "balance": 1.1, "own_s": [0.4, 0.5], "data_wait_s": [0.0, 0.1],
                                 "memory_bytes": [1, 2], "bubble_s": [0.0, 0.0]})  # fmt: skip
                dead = [0.0, math.nan if step == 29 else step / 60]
                run.layer_record({"step": step, "grad_norm": {"embedding": 0.5, "blocks.0": 10.0 ** (step // 10)},
                                  "dead": {f"blocks.{i}": share for i, share in enumerate(dead)}})  # fmt: skip
                run.system_record({"step": step, "time": 1e9 + step, "cpu_busy_share": 0.5, "ram_bytes": 1 << 33,
                                   "gpu_power_w": 690.0, "gpu_temperature_c": 60, "gpu_busy_share": 1.0,
                                   "gpu_throttle": 4, "disk_read_bytes_per_s": 5 << 20})  # fmt: skip
        run.event("veto", step=30, reason="not finite", loss=math.nan, grad_norm=math.nan,
                  statistics={}, documents=[])  # fmt: skip
        (run.folder / "reports" / "anomaly-000030.html").write_text(f"<!doctype html><title>30</title><p>{MARKUP}")
        run.event("report", step=30, file="anomaly-000030.md", reason="not finite")
        (run.folder / "rollouts").mkdir()
        sample = {"prompt": "Say", "answer": MARKUP, "reward": 0.5}
        (run.folder / "rollouts" / "round-00000000.jsonl").write_text(json.dumps(sample) + "\n")
        run.event("finished", step=steps, reason="the budget is spent")
    return Run(runs / name)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs, and a secret beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "runs"
    write_run(folder, "first")
    write_run(folder, "second run", offset=0.01)
    (tmp_path / "secret").mkdir()
    for name in ("events.jsonl", "spec.yaml"):
        (tmp_path / "secret" / name).write_text("secret\n")
    return folder


@pytest.fixture
def new_run(runs: Path) -> Callable[..., Run]:
    return lambda name, **options: write_run(runs, name, **options)
