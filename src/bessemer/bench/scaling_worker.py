"""One process of a measurement of `bessemer bench scaling`: some steps of a run, timed and thrown away.

They are timed twice: as they are, and among processes that send nothing to each other. The second time computes the
same on whatever lies in memory instead of what others would have sent; the difference is what communication costs.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bessemer.errors import UserError
from bessemer.parallel.world import World, join, part
from bessemer.plan.decision import Plan
from bessemer.run.directory import RunReader, RunWriter
from bessemer.session.data import Data
from bessemer.session.profile import Unsaved
from bessemer.session.session import Session
from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import memory_in_use, pick_device, synchronize
from bessemer.train.job import Interrupt, Job, Outcome
from bessemer.train.loop import train_loop

Word = TypeVar("Word")
WARMUP = 4  # steps before: buckets, kernels, allocations
TIMED, SILENT, FAULT = "timed.json", "silent", "fault"  # what a worker leaves in its folder
DONE = "timed"


class SilentView(World):
    """Processes that send nothing: each takes its own word for everyone's."""

    @property
    def main(self) -> bool:
        return True  # each has a folder of its own

    def agree(self, word: Word) -> Word:
        return word

    def gather(self, word: Word, saving: bool = False) -> list[Word]:
        return [word] * self.size

    def sums(self, numbers: Any) -> list[float]:
        return list(numbers)

    def wait(self) -> None: ...

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        yield


def join_silently(device: torch.device) -> SilentView:
    """torch's fake process group has every collective and carries out none."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    warnings.filterwarnings("ignore", message="Set timeout is now only supported")  # where nothing waits
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    return SilentView(rank, size, device)


@dataclass
class Stopwatch:
    """Lets WARMUP steps pass, times `steps`, then ends the loop; the loop calls it as it calls a profiler."""

    device: torch.device
    steps: int
    ends_s: list[float] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """On a CPU the median, since others may use it too; a GPU is not waited for between steps."""
        if self.device.type == "cuda":
            return (self.ends_s[-1] - self.ends_s[WARMUP - 1]) / self.steps
        return statistics.median(b - a for a, b in pairwise(self.ends_s[WARMUP - 1 :]))

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, interrupt: Interrupt) -> None:
        if len(self.ends_s) + 1 in (WARMUP, WARMUP + self.steps):
            synchronize(self.device)
        self.ends_s.append(time.perf_counter())
        if len(self.ends_s) == WARMUP + self.steps:
            interrupt.signal = DONE


class ScalingSession(Session):
    """A start of the spec in a folder of its own that ends after the timed steps. `vocab` is the model's where the
    tokenizer has fewer tokens."""

    def __init__(self, spec: RunSpec, folder: Path, steps: int, vocab: int | None = None, silent: bool = False) -> None:
        super().__init__(spec)
        self.folder, self.steps, self.vocab, self.silent = folder, steps, vocab, silent
        self.found: dict[str, Any] = {}

    def train(self) -> Outcome:
        device = pick_device(self.spec.parallel)
        patience = timedelta(seconds=self.spec.parallel.patience)
        self.world = join_silently(device) if self.silent else join(device, patience)
        with self.world.first_alone():
            run = (RunWriter if self.world.main else RunReader)(self.folder)
        with run, self.view.following(run):
            return self._train(run)

    def _prepare(self, plan: Plan) -> tuple[Data, ModelShape, int]:
        prepared, shape, context = super()._prepare(plan)
        return prepared, replace(shape, vocab=max(shape.vocab, self.vocab or 0)), context

    def _loop(self, job: Job) -> Outcome:
        job.saver, job.guard.snapshots = Unsaved(job.saver.shelf, ""), None
        job.data.evaluator.parts.clear()
        job.recorder.profiler = watch = Stopwatch(job.engine.device, self.steps)
        outcome = train_loop(job)
        rows = job.data.stream.steps.rows(0)
        self.found = {
            "step_s": watch.step_s, "tokens": rows * job.plan.context, "parameters": job.engine.model.shape.parameters,
            "micro_rows": job.plan.micro_rows, "precision": job.plan.precision,
            "memory_bytes": max(job.world.gather(memory_in_use(job.engine.device))),
        }  # fmt: skip
        return outcome


def measure(request: dict[str, Any], folder: Path) -> None:
    """Both timings; what is found goes to files in `folder`. With experts divided among processes there is no second
    one: how much is sent where would not be known."""
    rank, size = (int(os.environ.get(key, default)) for key, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    spec, steps, vocab = load_spec(folder / "spec.yaml"), request["steps"], request["vocab"]
    session = ScalingSession(spec, folder / "run", steps, vocab)
    session.train()
    part()
    if rank == 0:
        (folder / TIMED).write_text(json.dumps(session.found))
    del session
    gc.collect()
    if size > 1 and spec.parallel.ep == 1:
        quiet = ScalingSession(spec, folder / f"{SILENT}-{rank}", steps, vocab, silent=True)
        quiet.train()
        part()
        (folder / f"{SILENT}-{rank}.json").write_text(json.dumps(quiet.found))


def main(folder: Path) -> None:
    """A refused layout is a finding; anything else ends the process."""
    try:
        measure(json.loads((folder / "request.json").read_text()), folder)
    except SystemExit:  # rank 0 writes why
        return
    except BaseException as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        (folder / f"{FAULT}-{os.environ.get('RANK', '0')}.txt").write_text(words[0])
        if not isinstance(error, UserError):
            traceback.print_exc()
            raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
