"""One process of a run that writes down which rows it really trained on; started by torchrun as a script, or forked.

torchrun ... lineage_worker.py SPEC.yaml FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec


class Recorder:
    """Positions of each step whose gradients this process has computed, a line each, in a file for each start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read: dict[int, list[int]] = {}

    def attach(self, job: Any, tokenizer: Any) -> None:
        start = job.world.agree(len(list(self.folder.glob("start-*-rank-0.jsonl"))))
        self.folder.mkdir(exist_ok=True)
        name = f"start-{start:03d}-rank-{job.world.rank}.jsonl"
        self.file = (self.folder / name).open("a", buffering=1)
        assemble, job.faults = job.data.stream.micro_batches, self

        def micro_batches(step: int, *arguments: Any) -> Any:
            batches = assemble(step, *arguments)
            self.read[step] = [int(at) for batch in batches for at in batch.positions if at >= 0]
            return batches

        job.data.stream.micro_batches = micro_batches

    def before_step(self, job: Any, step: int) -> None: ...

    def after_backward(self, job: Any, step: int) -> None:
        self.file.write(json.dumps([step, self.read[step]]) + "\n")

    def lr(self, step: int, planned: float) -> float:
        return planned


def trained_on(folder: Path, steps: int) -> Counter[int]:
    """How often each position was trained on in the lineage that survived: of each step the last start that did it."""
    lineage: dict[int, dict[int, dict[int, list[int]]]] = {}  # step -> start -> rank -> positions
    for path in sorted(folder.glob("start-*.jsonl")):
        _, start, _, rank = path.stem.split("-")
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # it may have been killed while it wrote
                step, positions = json.loads(line)
                lineage.setdefault(step, {}).setdefault(int(start), {})[int(rank)] = positions
    assert sorted(lineage) == list(range(steps))
    survived = (starts[max(starts)] for starts in lineage.values())
    return Counter(at for ranks in survived for positions in ranks.values() for at in positions)


def train(spec: RunSpec, folder: Path) -> None:
    import torch

    from bessemer.parallel.world import leave_process_group
    from bessemer.session.session import Session

    torch.set_num_threads(1)
    outcome = Session(spec, faults=Recorder(folder)).train()
    leave_process_group()
    if outcome.kind != "finished":
        sys.exit(1)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    train(load_spec(Path(sys.argv[1])), Path(sys.argv[2]))
