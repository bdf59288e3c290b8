"""The probing step of several processes: the one with the least room decides for all. Memory is told by a gauge of the
test's own, a row's worth for each row, since a CPU has no peak that is one process's."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint  # before the fork, once for all

from bessemer.plan.decision import Plan
from bessemer.run.directory import Run
from bessemer.session import build, session
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Job
from bessemer.train.memory import fit as room
from bessemer.train.objective import Pretrain

Ranks = Callable[..., list[Any]]
ROW = 1 << 20


class Gauge(room.MemoryGauge):
    """Room for so many rows in each process."""

    def __init__(self, job: Job, rows: list[int]) -> None:
        self.job, self.rows = job, rows[job.world.rank]
        self.gradients = 4 * sum(parameter.numel() for parameter in job.engine.optimizer.parameters)

    def limit(self) -> int:
        return self.gradients + self.rows * ROW + ROW // 2

    def start(self) -> None: ...

    def peak(self) -> int:
        share = self.job.plan.batch_rows[0][1] // self.job.world.layout.dp
        return self.gradients * (self.job.plan.micro_rows < share) + self.job.plan.micro_rows * ROW

    def standing(self) -> int:
        return 0


def spec_of(folder: Path, name: str, **parallel: int) -> RunSpec:
    corpus = folder / "words.jsonl"
    if not corpus.exists():
        draw = random.Random(0)
        lines = (json.dumps({"text": " ".join(draw.choices(["ore", "coke", "slag", "heat"], k=60))}) for _ in range(60))
        corpus.write_text("\n".join(lines) + "\n")
    return RunSpec.model_validate({
        "name": name, "runs": str(folder / "runs"), "precision": "fp32", "tokenizer": {"vocab": 300},
        "model": {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64},
        "data": {"sources": {"words": {"path": [str(corpus)]}}, "context": 32, "validation": 0},
        "budget": {"steps": 4, "batch": 16 * 32}, "optimizer": {"lr": 0.01},
        "parallel": {"device": "cpu", "threads": 1, **parallel},
    })  # fmt: skip


def probed(spec: RunSpec, rows: list[int], full: bool) -> tuple[int, list[Any]]:
    """Train after a probing step; micro-batch and where it comes from. If `full`, a pass of more rows really fails."""

    def fit(job: Job, plan: Plan, resumed: bool) -> int | None:
        gauge, plain = Gauge(job, rows), Pretrain.loss

        def loss(self: Pretrain, model: Any, feed: Any, count: float) -> Any:
            terms = plain(self, model, feed, count)
            if full and len(feed.tokens_BT) > gauge.rows:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return terms

        Pretrain.loss = loss  # type: ignore[method-assign]
        found = room.fit(job, plan, resumed, gauge)
        decided.append((job.plan.micro_rows, plan.decisions[room.ROWS].source))
        return found

    decided: list[Any] = []
    build.fit = fit  # type: ignore[assignment]
    assert session.train(spec).kind == "finished"
    return decided[0]


@pytest.mark.parametrize(
    ("parallel", "full"),
    [
        ({"dp_replicate": 2}, True),
        pytest.param({"dp_replicate": 2}, False, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2}, False, marks=pytest.mark.slow),
    ],
)
def test_the_process_with_the_least_room_decides_for_all(
    ranks: Ranks, tmp_path: Path, parallel: dict[str, int], full: bool
) -> None:
    """Replicas are probed as planned, and one that runs out lowers all; where processes meet in a pass, by one row."""
    spec = spec_of(tmp_path, "probed", **parallel)
    assert ranks(2, probed, spec, [8, 2], full) == [(2, "measured"), (2, "measured")]
    run = Run.existing(session.run_folder(spec))
    eased = [event["reason"] for event in run.events("out_of_memory")]
    assert bool(eased) == full and all(reason.startswith("probing: ") for reason in eased)
    plain = spec_of(tmp_path, "plain", **parallel)
    ranks(2, lambda: session.train(plain).kind)
    losses = [[record["loss"] for record in Run.existing(session.run_folder(one)).metrics()] for one in (spec, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
