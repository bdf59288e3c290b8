"""For how long does a save hold up training, synchronous against asynchronous?

    python benchmarks/save_stall.py --parameters 100M --device cpu
    python benchmarks/save_stall.py --parameters 1B --device cuda --save

The state is that of AdamW in fp32: weights and two moments. It is saved by the code that runs use, with its hashes,
fsync and reading back; matrix products stand for the training. `stall_s` is how long the loop stood still in `save`,
`total_s` how long until the checkpoint was committed, `lost_s` what the save cost the training in all: the stall, and
by how much the steps beside the writing were slower. The first save of each kind is not counted: it makes the memory
of the copy (`first_stall_s`). The folder needs room for two checkpoints of 12 bytes a parameter.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from bessemer.checkpoint.store import CheckpointStore
from bessemer.parallel.world import World
from bessemer.spec.quantity import parse_count
from bessemer.spec.schema import CheckpointSpec
from bessemer.train.job import Progress
from bessemer.train.saver import CheckpointSaver

LARGEST_TENSOR = 64_000_000  # elements: an embedding of a model of this size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", default="100M")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--saves", type=int, default=3, help="of each kind, beside the first")
    parser.add_argument("--folder", default=None, help="where to save (default: a temporary folder)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-save-stall-DEVICE.json")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    load = os.getloadavg()[0]  # other work on the machine
    state = make_state(parse_count(arguments.parameters), device)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        kinds = {
            name: measure(Path(folder) / name, state, device, name == "asynchronous", arguments.saves)
            for name in ("synchronous", "asynchronous")
        }
    cuda = device.type == "cuda"
    report = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "load_before": round(load, 1),
        "parameters": arguments.parameters,
        **kinds,
    }
    print(json.dumps(report, indent=1))
    if arguments.save:
        name = f"{report['date']}-save-stall-{device.type}.json"
        (Path(__file__).parent / "results" / name).write_text(json.dumps(report, indent=1) + "\n")


def make_state(parameters: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Weights and two moments, in tensors of at most LARGEST_TENSOR elements."""
    sizes = [LARGEST_TENSOR] * (parameters // LARGEST_TENSOR) + [parameters % LARGEST_TENSOR]
    return {
        f"{part}.{number}": torch.randn(size, device=device)
        for part in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
        for number, size in enumerate(sizes)
        if size
    }


class Training:
    """Steps of matrix products, about 20 ms each."""

    def __init__(self, device: torch.device) -> None:
        side = 8192 if device.type == "cuda" else 512
        self.device, self.x = device, torch.randn(side, side, device=device)
        self.repeats = 1
        while (taken_s := min(self.step() for _ in range(3))) < 0.02:
            self.repeats = max(self.repeats + 1, round(self.repeats * 0.02 / taken_s))
        self.step_s = median(self.step() for _ in range(50))

    def step(self) -> float:
        began_s = time.perf_counter()
        for _ in range(self.repeats):
            self.x @ self.x
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_s


def fake_job(state: dict[str, torch.Tensor], device: torch.device, asynchronous: bool) -> Any:
    """As much of a job as a saver asks for."""
    rules = CheckpointSpec(asynchronous=asynchronous, keep_last=1)
    events: list[dict[str, Any]] = []
    stream = SimpleNamespace(fingerprint="", identity={}, steps=SimpleNamespace(segments=[], batch_phases=[]))
    run = SimpleNamespace(sync=lambda: None, unwritten="", snapshot=lambda: SimpleNamespace(pack=lambda: b""))
    return SimpleNamespace(
        world=World(), spec=SimpleNamespace(checkpoint=rules, guard=SimpleNamespace(enabled=False)),
        engine=SimpleNamespace(device=device), data=SimpleNamespace(stream=stream),
        recorder=SimpleNamespace(
            run=run, progress=Progress(), event=lambda kind, **more: events.append({"kind": kind, **more})
        ),
        state=lambda: state, guard_state=dict, events=events,
    )  # fmt: skip


def measure(
    folder: Path, state: dict[str, torch.Tensor], device: torch.device, asynchronous: bool, saves: int
) -> dict[str, Any]:
    training, job = Training(device), fake_job(state, device, asynchronous)
    saver, lost = CheckpointSaver(CheckpointStore(folder), ""), []
    for number in range(saves + 1):
        began_s, steps = time.perf_counter(), 0
        saver.save(job, number, None)
        while len(job.events) <= number:  # until it is committed and told
            training.step()
            saver.poll(job)
            steps += 1
        lost.append(time.perf_counter() - began_s - steps * training.step_s)
    assert all(event["kind"] == "saved" for event in job.events), job.events
    first, *counted = job.events
    total_s = median(event["seconds"] for event in counted)
    return {
        "stall_s": median(event["stall_s"] for event in counted),
        "first_stall_s": first["stall_s"],
        "total_s": total_s,
        "lost_s": round(median(lost[1:]), 3),
        "bytes": first["bytes"],
        "GB_per_s": round(first["bytes"] / total_s / 1e9, 3),
    }


if __name__ == "__main__":
    main()
