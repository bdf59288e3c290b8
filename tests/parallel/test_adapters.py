"""Adapters on several ranks: the losses of one process, and checkpoints that any layout resumes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint  # before the fork, once for all

from bessemer.checkpoint.store import CheckpointStore
from bessemer.checkpoint.tensors import SavedTensors
from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.schema import RunSpec

Ranks, Spec = Callable[..., list[Any]], Callable[..., RunSpec]
SLOW = [
    ("lora", {"dp_replicate": 2}), ("qlora", {"dp_replicate": 2}), ("dora", {"dp_shard": 2}),
    ("pissa", {"dp_shard": 2}), ("ia3", {"dp_shard": 2}), ("prompt", {"dp_shard": 2}), ("prefix", {"dp_shard": 2}),
    ("qlora", {"dp_shard": 2}), ("qlora", {"dp_shard": 4}), ("qlora", {"dp_replicate": 2, "dp_shard": 2}),
]  # fmt: skip
CASES = [("lora", {"dp_shard": 2}), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize(("kind", "degrees"), CASES, ids=str)
def test_ranks_train_what_one_trains(ranks: Ranks, tiny_spec: Spec, kind: str, degrees: dict[str, int]) -> None:
    def spec_of(name: str, steps: int, layout: dict[str, int], **more: Any) -> RunSpec:
        return tiny_spec(
            name, budget={"steps": steps, "batch": 256, "micro_batch": 2}, checkpoint={"every": "4 steps"},
            parallel={"device": "cpu", "threads": 1, **layout}, **more,
        )  # fmt: skip

    def newest(spec: RunSpec) -> Any:
        return CheckpointStore(run_folder(spec) / "checkpoints").committed()[-1][0]

    base = spec_of("base", 4, {})
    assert ranks(1, lambda: train(base).kind) == ["finished"]
    size, settings = math.prod(degrees.values()), {"rank": 3, "alpha": 6, "modules_to_save": ["embedding"]}
    settings = {
        "ia3": {"modules_to_save": ["embedding"]},
        "prompt": {"virtual_tokens": 5},
        "prefix": {"virtual_tokens": 5},
    }.get(kind, settings)
    adapter = {"kind": kind, **settings}
    more = {"start_from": str(newest(base)), "optimizer": {"lr": 0.01}, "adapter": adapter}
    one, two = spec_of("one", 8, {}, **more), spec_of("two", 8, degrees, **more)
    assert ranks(1, lambda: train(one).kind) == ["finished"]
    for spec in (spec_of("two", 4, degrees, **more), two):  # stops and resumes
        assert ranks(size, lambda spec=spec: train(spec).kind) == ["finished"] * size
    records = [list(Run(run_folder(spec)).metrics()) for spec in (one, two)]
    for key in ("loss", "grad_norm"):
        first, second = ([record[key] for record in each] for each in records)
        assert second == pytest.approx(first, rel=1e-4)
    saved = [SavedTensors(newest(spec), "model.") for spec in (one, two)]
    assert set(saved[0]._entries) == set(saved[1]._entries) and "embedding.weight" not in saved[1]._entries
    assert all(name.rpartition(".")[2] != "weight" for name in saved[1]._entries)
    for name in saved[0]._entries:
        assert torch.allclose(saved[0][name], saved[1][name], atol=2e-4), name
    assert ranks(1, lambda: train(spec_of("two", 10, {}, **more)).kind) == ["finished"]
