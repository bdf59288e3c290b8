"""ds_config.json under DeepSpeed's own configuration class, its rates under DeepSpeed's own schedules."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.errors import UserError
from bessemer.launch.emit import RunToEmit, emit, render, write_files
from bessemer.launch.emit.feed import open_emitted
from bessemer.run.directory import Run
from bessemer.session.session import train
from bessemer.spec.schema import RunSpec

os.environ.setdefault("DS_ACCELERATOR", "cpu")
Resolve = Callable[..., RunToEmit]


def config_of(run: RunToEmit) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(render("deepspeed", run).files["ds_config.json"])
    return found


def parsed(config: dict[str, Any], ranks: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed")
    # The class asks a process group for its size, which here is only a number.
    monkeypatch.setattr(module.dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    return module.DeepSpeedConfig(config)


@pytest.mark.parametrize("shard", [1, 4])
def test_deepspeed_reads_every_number(resolved: Resolve, shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = resolved(parallel={"dp_shard": shard}, memory={"offload_optimizer": True}, precision="bf16")
    found = parsed(config_of(run), run.ranks, monkeypatch)
    assert (found.train_batch_size, found.train_micro_batch_size_per_gpu) == (8, 2)
    assert found.gradient_accumulation_steps == 4 // shard
    assert found.gradient_clipping == 1.0
    assert found.bfloat16_config.enabled and not found.float16_config.enabled
    assert found.optimizer_name == "adamw"
    assert found.optimizer_params["betas"] == [0.9, 0.95]
    assert found.scheduler_name == "WarmupCosineLR"
    zero = found.zero_config
    assert zero.stage == (3 if shard > 1 else 1)
    assert zero.offload_optimizer.device == "cpu"
    if shard > 1:
        assert (zero.reduce_bucket_size, zero.prefetch_bucket_size, zero.param_persistence_threshold) == (
            1024,
            921,
            320,
        )


@pytest.mark.parametrize(("zero", "offload"), [(2, "none"), (2, "cpu"), (3, "cpu"), (3, "nvme")])
def test_what_is_asked_of_the_engine_is_written(resolved: Resolve, zero: int, offload: str) -> None:
    folder = {"folder": "/fast"} if offload == "nvme" else {}
    asked = {"engine": "deepspeed", "deepspeed": {"zero": zero, "offload": offload, **folder}}
    made = render("deepspeed", resolved(parallel=asked, processes=2))
    found = json.loads(made.files["ds_config.json"])["zero_optimization"]
    assert found["stage"] == zero
    place = {"device": offload, "pin_memory": False} | ({"nvme_path": "/fast"} if offload == "nvme" else {})
    assert found.get("offload_optimizer") == (place if offload != "none" else None)
    assert found.get("offload_param") == (place if zero == 3 and offload != "none" else None)
    assert not any(note.startswith(("parallel.engine", "parallel.deepspeed")) for note in made.notes)


def test_fp16_carries_the_loss_scale(resolved: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = parsed(config_of(resolved(precision="fp16", loss_scale=1024.0)), 1, monkeypatch)
    assert (fixed.float16_config.enabled, fixed.float16_config.loss_scale) == (True, 1024.0)
    dynamic = parsed(config_of(resolved(precision="fp16")), 1, monkeypatch)
    assert dynamic.float16_config.loss_scale == 0


@pytest.mark.parametrize("kind", ["cosine", "constant", "linear"])
def test_rates_after_the_warmup_are_ours(resolved: Resolve, kind: str) -> None:
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules", reason="deepspeed is not installed")
    run = resolved(schedule={"kind": kind, "floor": 0.0 if kind == "linear" else 0.1})
    asked = config_of(run)["scheduler"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=run.plan.peak_lr)
    schedule = getattr(schedules, asked["type"])(optimizer, **asked["params"])
    rates = []
    for _ in range(run.plan.total_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        schedule.step()
    ours = [run.schedule.lr(step) for step in range(run.plan.total_steps)]
    begin = run.plan.warmup_steps + 1
    lag = 1 if kind == "linear" else 0  # WarmupDecayLR counts one later
    assert rates[begin + lag :] == pytest.approx(ours[begin : len(ours) - lag], rel=0.01 if lag else 1e-9, abs=1e-9)
    assert any("schedule.warmup" in note for note in render("deepspeed", run).notes)


def test_a_batch_that_cannot_be_dealt_is_refused(resolved: Resolve) -> None:
    with pytest.raises(UserError, match=r"budget.batch: 8 sequences .* 3 data-parallel ranks: write budget.batch: 288"):
        render("deepspeed", resolved(processes=3))


def test_the_script_accumulates_as_often_as_the_config_says(tiny: Callable[..., RunSpec], tmp_path: Path) -> None:
    """Five rows a rank fall into no micro-batches of four, and a later batch size is not there."""
    changes = [{"from_step": 10, "batch": 640}]
    spec = tiny(budget={"batch": 320, "micro_batch": 4, "batch_changes": changes})
    made = emit("deepspeed", spec, tmp_path, processes=2)
    write_files(made, tmp_path)
    config, run = json.loads(made.files["ds_config.json"]), open_emitted(tmp_path)
    for step in (0, 15):
        batches = run.micro_batches(step, 1, 2, "cpu", config["train_micro_batch_size_per_gpu"])
        assert len(batches) == config["gradient_accumulation_steps"] == 5
    assert any(note.startswith("budget.batch_changes:") for note in made.notes)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(480)  # DeepSpeed builds a kernel when it is first used
def test_two_processes_have_the_losses_of_one_bessemer(
    tiny: Callable[..., RunSpec], place: Path, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    spec = tiny(name="deep", schedule={"kind": "constant", "warmup": 1}, checkpoint={"every": 20})
    made = emit("deepspeed", spec, tmp_path / "out", processes=2)
    # Without a schedule the rate is the peak's from the start on, as ours is after one step of warm-up.
    config = json.loads(made.files["ds_config.json"])
    del config["scheduler"]
    made.files["ds_config.json"] = json.dumps(config)
    write_files(made, tmp_path / "out")
    assert train(spec).kind == "finished"
    ours = [record["loss"] for record in Run.existing(place / "runs" / "deep").metrics()]
    launch = made.command.replace("python ", f"{sys.executable} ", 1)
    launch = launch.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(launch, shell=True, capture_output=True, text=True, env=environment, timeout=460)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = [json.loads(line)["loss"] for line in (tmp_path / "out" / "losses.jsonl").read_text().splitlines()]
    assert len(ours) == len(theirs) == 20
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4
