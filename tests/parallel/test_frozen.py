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
from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.schema import RunSpec

Ranks, Spec = Callable[..., list[Any]], Callable[..., RunSpec]
LAYOUTS = {"shards": {"dp_shard": 2}, "stages": {"pp": 2}, "replicas": {"dp_replicate": 2}}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "shards" else pytest.mark.slow) for name in LAYOUTS]
)
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


LOWER, PARTS, UPPER = ["embedding", "blocks.0-1"], ["embedding", "*.ffn.*"], ["blocks.2-3", "norm"]
FROZEN = [(LOWER, "1f1b")]
FROZEN += [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in ((PARTS, "1f1b"), (UPPER, "1f1b"), (LOWER, "interleaved"), (LOWER, "zero_bubble"))
]


@pytest.mark.parametrize(("freeze", "schedule"), FROZEN, ids=str)
def test_stages_train_what_one_process_trains(ranks: Ranks, tiny_spec: Spec, freeze: list[str], schedule: str) -> None:
    def spec_of(name: str, **parallel: Any) -> RunSpec:
        return tiny_spec(
            name, budget={"steps": 6, "batch": 256, "micro_batch": 2}, optimizer={"lr": 0.01, "freeze": freeze},
            model={"width": 32, "layers": 4, "heads": 2, "kv_heads": 1, "ffn": 64},
            parallel={"device": "cpu", "threads": 1, **parallel},
        )  # fmt: skip

    one = spec_of("one")
    two = spec_of("two", pp=2, pipeline={"schedule": schedule})
    assert ranks(1, lambda: train(one).kind) == ["finished"]
    assert ranks(2, lambda: train(two).kind) == ["finished"] * 2
    steps, expected = (list(Run(run_folder(spec)).metrics()) for spec in (two, one))
    for key in ("loss", "grad_norm"):
        assert [s[key] for s in steps] == pytest.approx([s[key] for s in expected], rel=1e-5)
    weights, reference = (
        SavedTensors(CheckpointStore(run_folder(spec) / "checkpoints").committed()[-1][0], "model.")
        for spec in (two, one)
    )
    assert set(weights) == set(reference)
    assert all(torch.allclose(weights[name], reference[name], rtol=1e-3, atol=1e-5) for name in reference)
    plans = (Plan.from_json((run_folder(spec) / "plan.json").read_text()) for spec in (two, one))
    assert len({plan.decisions["optimizer.freeze"] for plan in plans}) == 1


def test_a_pattern_that_matches_nothing_in_any_stage_is_refused(ranks: Ranks, tiny_spec: Spec) -> None:
    spec = tiny_spec("none", optimizer={"freeze": ["blocks.7"]}, parallel={"device": "cpu", "threads": 1, "pp": 2})

    def refusal() -> str:
        with pytest.raises((UserError, SystemExit)) as error:
            train(spec)
        return str(error.value)

    message, status = ranks(2, refusal)  # only rank 0 writes the message
    assert "'blocks.7' matches nothing: there are embedding, blocks.0 to blocks.1, norm" in message and status == "2"
