"""What the guard costs: the real loop with the guard on and off, in turns, in one run.

    python benchmarks/guard_overhead.py --device cuda --model 1B --rows 8 --context 2048

On means all of it: the judge, the detectors, looks inside the model, copies of the state in memory and the check for
repeated patterns. The copies are reported by themselves too, since they are taken every 32 steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bessemer.plan.decide import Interval
from bessemer.session.session import Session
from bessemer.spec.schema import RunSpec
from bessemer.train.device import synchronize
from bessemer.train.job import Job, Outcome
from bessemer.train.loop import train_loop
from bessemer.train.memory.snapshots import MemorySnapshots


class NoSaves:
    """Takes the place of the disk."""

    store: Any = None

    def save(self, job: Job, step: int, validation_loss: float | None) -> str:
        return "none"

    def poll(self, job: Job) -> None: ...
    def confirm(self, job: Job, done: int) -> None: ...

    def wait(self, job: Job, uploads: bool = False) -> bool:
        return True

    def interval_s(self, job: Job) -> float | None:
        return None


class Timed(Session):
    """A session whose loop runs in blocks, with the guard on and off in turns."""

    def __init__(self, spec: RunSpec, rounds: int, block: int) -> None:
        super().__init__(spec)
        self.rounds, self.block = rounds, block
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.copy_s: list[float] = []

    def _loop(self, job: Job) -> Outcome:
        job.saver, job.data.evaluator.parts = NoSaves(), {}  # type: ignore[assignment]
        never = Interval(None, None)
        copies = job.guard.snapshots or MemorySnapshots()
        for number in range(2 * (self.rounds + 1)):
            on = number % 2 == 0
            job.spec.guard.enabled, job.guard.snapshots = on, copies if on else None
            first, last = number * self.block, (number + 1) * self.block
            job.start_step = first
            job.engine.plan = dataclasses.replace(job.plan, total_steps=last, evaluate=never, save=never)
            synchronize(job.engine.device)
            began = time.perf_counter()
            train_loop(job)
            synchronize(job.engine.device)
            if number >= 2:  # the first of each warms up
                self.seconds[on].append((time.perf_counter() - began) / self.block)
        for _ in range(3):
            synchronize(job.engine.device)
            began = time.perf_counter()
            copies.take(job, 10**6)
            synchronize(job.engine.device)
            self.copy_s.append(time.perf_counter() - began)
        return Outcome("finished", "measured", last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="1M")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=32, help="steps with the guard on, then off")
    parser.add_argument("--out", help="write the result here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spec = RunSpec.model_validate(
            {
                "name": "guard", "runs": folder, "model": options.model, "tokenizer": {"vocab": 4096},
                "data": {
                    "context": options.context, "validation": 0, "cross_documents": True,
                    "sources": {"code": {"path": str(Path(__file__).parents[1] / "src"), "format": "source"}},
                },
                "budget": {
                    "steps": 2 * (options.rounds + 1) * options.block, "batch": options.rows * options.context,
                    "micro_batch": options.rows,
                },
                "optimizer": {"lr": 1e-4}, "parallel": {"device": options.device},
            }
        )  # fmt: skip
        timed = Timed(spec, options.rounds, options.block)
        timed.train()
    off, on = (statistics.median(timed.seconds[key]) for key in (False, True))
    cuda = options.device == "cuda"
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {platform.processor()}",
        "torch": torch.__version__, "model": options.model, "rows": options.rows, "context": options.context,
        "steps_each": options.rounds * options.block, "step_off_s": round(off, 6), "step_on_s": round(on, 6),
        "overhead": round(on / off - 1, 5), "off_s": [round(s, 6) for s in timed.seconds[False]],
        "on_s": [round(s, 6) for s in timed.seconds[True]], "copy_s": round(statistics.median(timed.copy_s), 5),
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
