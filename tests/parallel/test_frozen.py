"""Frozen weights of several processes: each rank reads its shards from the base, on any layout."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint  # before the fork, once for all

from bessemer.checkpoint.base import FrozenBase
from bessemer.checkpoint.manifest import read_manifest
from bessemer.checkpoint.store import CheckpointStore
from bessemer.checkpoint.tensors import SavedTensors
from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.schema import RunSpec

Ranks, Spec = Callable[..., list[Any]], Callable[..., RunSpec]
LAYOUTS = {"shards": {"dp_shard": 2}, "stages": {"pp": 2}, "replicas": {"dp_replicate": 2}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumes_on_its_layout_and_on_another(ranks: Ranks, tiny_spec: Spec, layout: str) -> None:
    def spec_of(name: str, steps: int, degrees: dict[str, int], **more: Any) -> RunSpec:
        return tiny_spec(
            name, budget={"steps": steps, "batch": 256, "micro_batch": 2}, checkpoint={"every": "4 steps"},
            parallel={"device": "cpu", "threads": 1, **degrees}, **more,
        )  # fmt: skip

    def newest(spec: RunSpec) -> Any:
        return CheckpointStore(run_folder(spec) / "checkpoints").committed()[-1][0]

    first = spec_of("first", 4, {})
    assert ranks(1, lambda: train(first).kind) == ["finished"]
    more = {"start_from": str(newest(first)), "optimizer": {"lr": 0.01, "freeze": ["*.ffn.*"]}}
    whole, broken = (spec_of(name, 12, LAYOUTS[layout], **more) for name in ("whole", "broken"))
    short = spec_of("broken", 8, LAYOUTS[layout], **more)
    for spec in (whole, short, broken):
        assert ranks(2, lambda spec=spec: train(spec).kind) == ["finished"] * 2
    losses = [[record["loss"] for record in Run(run_folder(spec)).metrics()] for spec in (whole, broken)]
    assert losses[0] == losses[1] and len(losses[0]) == 12
    before, after = SavedTensors(newest(first), "model."), SavedTensors(newest(broken), "model.")
    base = FrozenBase.of(read_manifest(newest(broken)))
    assert base and set(base.tensors) == {name for name in before if ".ffn." in name}
    assert not [name for name in after._entries if name in base.tensors] and set(after) == set(before)
    assert {name for name in before if torch.equal(before[name], after[name])} == set(base.tensors)
    assert ranks(1, lambda: train(spec_of("broken", 14, {}, **more)).kind) == ["finished"]
    assert FrozenBase.of(read_manifest(newest(broken))) == base
