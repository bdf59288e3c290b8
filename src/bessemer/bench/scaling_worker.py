"""A worker process of `bessemer bench scaling` and `bench optimise`: times some steps of a run and discards them.

For `bench scaling` the steps are timed twice: normally, and with processes that send nothing to each other and compute
on whatever is in memory. The difference is the cost of communication.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bessemer.errors import UserError
from bessemer.parallel.world import World, join_process_group, leave_process_group
from bessemer.plan.decision import Plan
from bessemer.run.directory import RunReader, RunWriter
from bessemer.session.data import Data
from bessemer.session.inspect import DiscardingSaver
from bessemer.session.session import Session
from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import memory_in_use, pick_device, synchronize
from bessemer.train.job import Interrupt, Job, Outcome
from bessemer.train.loop import train_loop

Word = TypeVar("Word")
WARMUP = 4  # untimed steps: buckets, kernels, allocations
LEAST = 3  # timed steps, however long they take
TIMED, SILENT, FAULT = "timed.json", "silent", "fault"  # files that a worker writes
DONE = "timed"


class SilentView(World):
    """A world without communication: each process takes its own value for everyone's."""

    @property
    def main(self) -> bool:
        return True  # each process has its own folder

    def agree(self, word: Word) -> Word:
        return word

    def gather(self, word: Word, saving: bool = False) -> list[Word]:
        return [word] * self.size

    def sums(self, numbers: Any) -> list[float]:
        return list(numbers)

    def wait(self) -> None: ...

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        yield


def join_silently(device: torch.device) -> SilentView:
    """Join torch's fake process group, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    warnings.filterwarnings("ignore", message="Set timeout is now only supported")  # where nothing waits
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    return SilentView(rank, size, device)


@dataclass
class Stopwatch:
    """Skips WARMUP steps, times `steps` steps, then ends the loop, which calls it like a profiler. With `seconds` it
    times as many steps as fit, between LEAST and `steps`."""

    device: torch.device
    steps: int
    seconds: float | None = None
    world: World = field(default_factory=World)
    ends_s: list[float] = field(default_factory=list)

    @property
    def times_s(self) -> list[float]:
        return [b - a for a, b in pairwise(self.ends_s[WARMUP - 1 :])]

    @property
    def step_s(self) -> float:
        """The median on a CPU, which others may use too; the mean on a GPU, which does not synchronize every step."""
        return statistics.mean(self.times_s) if self.device.type == "cuda" else statistics.median(self.times_s)

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, interrupt: Interrupt) -> None:
        if len(self.ends_s) + 1 in (WARMUP, WARMUP + self.steps):
            synchronize(self.device)
        self.ends_s.append(time.perf_counter())
        if len(self.ends_s) == WARMUP and self.seconds is not None:
            step_s = (self.ends_s[-1] - self.ends_s[0]) / (WARMUP - 1)
            self.steps = self.world.agree(max(LEAST, min(self.steps, math.ceil(self.seconds / step_s))))
        if len(self.ends_s) == WARMUP + self.steps:
            interrupt.signal = DONE


class ScalingSession(Session):
    """A session in its own folder that ends after the timed steps. `vocab` is the model's vocabulary if the tokenizer's
    is smaller."""

    adds_to_history = False  # settings under test, in a few steps

    def __init__(
        self, spec: RunSpec, folder: Path, steps: int, vocab: int | None = None, silent: bool = False,
        seconds: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(spec)
        self.folder, self.steps, self.vocab, self.silent, self.seconds = folder, steps, vocab, silent, seconds
        self.result: dict[str, Any] = {}

    def train(self) -> Outcome:
        device = pick_device(self.spec.parallel)
        patience = timedelta(seconds=self.spec.parallel.patience)
        self.world = join_silently(device) if self.silent else join_process_group(device, patience)
        with self.world.main_process_first():
            run = (RunWriter if self.world.main else RunReader)(self.folder)
        with run, self.view.following(run):
            return self._train(run)

    def _prepare(self, plan: Plan) -> tuple[Data, ModelShape, int]:
        prepared, shape, context = super()._prepare(plan)
        return prepared, replace(shape, vocab=max(shape.vocab, self.vocab or 0)), context

    def _loop(self, job: Job) -> Outcome:
        job.saver, job.guard.snapshots = DiscardingSaver(job.saver.store, ""), None
        job.data.evaluator.parts.clear()
        job.recorder.profiler = watch = Stopwatch(job.engine.device, self.steps, self.seconds, job.world)
        outcome = train_loop(job)
        if len(watch.ends_s) < WARMUP + watch.steps:
            raise RuntimeError(outcome.reason or f"the run {outcome.kind} after {len(watch.ends_s)} steps")
        rows = job.data.stream.steps.rows(0)
        self.result = {
            "step_s": watch.step_s, "tokens": rows * job.plan.context, "parameters": job.engine.model.shape.parameters,
            "micro_rows": job.plan.micro_rows, "precision": job.plan.precision,
            "memory_bytes": max(job.world.gather(memory_in_use(job.engine.device))),
            "times_s": watch.times_s, "data_wait": _data_wait(job), "training": json.loads(job.plan.to_json()),
            "layout": asdict(job.world.layout), "decided": json.loads((self.folder / "plan.json").read_text()),
        }  # fmt: skip
        return outcome


def _data_wait(job: Job) -> float:
    """The share of the timed steps that the loop waited for batches."""
    records = [record for record in job.recorder.history if record["step"] >= WARMUP]
    return sum(record["data_wait_s"] for record in records) / (sum(record["step_s"] for record in records) or 1.0)


def measure(request: dict[str, Any], folder: Path) -> None:
    """Time the steps with and without communication, and write the results to files in `folder`. There is no second
    timing with expert parallelism, since the routing depends on communication, nor if the request has `seconds`."""
    rank, size = (int(os.environ.get(key, default)) for key, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    spec, steps, vocab = load_spec(folder / "spec.yaml"), request["steps"], request["vocab"]
    seconds = request.get("seconds")
    session = ScalingSession(spec, folder / "run", steps, vocab, seconds=seconds)
    session.train()
    leave_process_group()
    if rank == 0:
        (folder / TIMED).write_text(json.dumps(session.result))
    del session
    gc.collect()
    if size > 1 and spec.parallel.ep == 1 and seconds is None:
        silent = ScalingSession(spec, folder / f"{SILENT}-{rank}", steps, vocab, silent=True)
        silent.train()
        leave_process_group()
        (folder / f"{SILENT}-{rank}.json").write_text(json.dumps(silent.result))


def main(folder: Path) -> None:
    """A refused layout is a result; any other error ends the process."""
    try:
        measure(json.loads((folder / "request.json").read_text()), folder)
    except SystemExit:  # rank 0 writes the reason
        return
    except BaseException as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        (folder / f"{FAULT}-{os.environ.get('RANK', '0')}.txt").write_text(lines[0])
        if not isinstance(error, UserError):
            traceback.print_exc()
            raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
