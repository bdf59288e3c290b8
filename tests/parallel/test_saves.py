"""Saves of several processes behind the loop's back: the checkpoint that a save at once would have made, one commit,
and a disk that fails for one of them fails the save for all."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint  # before the fork, once for all

from bessemer.checkpoint import dcp as checked_writer
from bessemer.checkpoint.background import Staging, state_bytes
from bessemer.checkpoint.manifest import verify
from bessemer.checkpoint.tensors import SavedTensors
from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.schema import RunSpec

Ranks, Spec = Callable[..., list[Any]], Callable[..., RunSpec]
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "two shards": (2, {"dp_shard": 2}),
    "two replicas": (2, {"dp_replicate": 2}),
    "two by two": (4, {"dp_replicate": 2, "dp_shard": 2}),
}


@pytest.fixture
def spec_of(tiny_spec: Spec) -> Spec:
    def make(name: str, layout: str, steps: int = 8, behind: bool = True) -> RunSpec:
        return tiny_spec(
            name, budget={"steps": steps, "batch": 256, "micro_batch": 2}, optimizer={"lr": 0.01, "ema": 0.9},
            checkpoint={"every": "4 steps", "asynchronous": behind, "keep_last": 8},
            parallel={"device": "cpu", "threads": 1, **LAYOUTS[layout][1]},
        )  # fmt: skip

    return make


def run_on(ranks: Ranks, layout: str, spec: RunSpec, before: Callable[[], None] = lambda: None) -> Run:
    def work() -> str:
        before()
        return train(spec).kind

    assert set(ranks(LAYOUTS[layout][0], work)) == {"finished"}
    return Run.existing(run_folder(spec))


def checkpoint(run: Run, step: int) -> Path:
    return run.checkpoints / f"step-{step:08d}.a1"


@pytest.mark.parametrize(
    "layout", ["two shards", *(pytest.param(name, marks=pytest.mark.slow) for name in ("two replicas", "two by two"))]
)
def test_a_save_behind_is_the_save_at_once_and_is_continued(ranks: Ranks, spec_of: Spec, layout: str) -> None:
    at_once = run_on(ranks, layout, spec_of("at-once", layout, 12, behind=False))
    behind = run_on(ranks, layout, spec_of("behind", layout))
    for step in (4, 8):
        files = [verify(checkpoint(run, step)).files for run in (behind, at_once)]
        for found_there in files:
            del found_there[".metadata"], found_there["run.zip"]  # names and times
        assert files[0] == files[1] and len(files[0]) == LAYOUTS[layout][0]  # with their hashes
        found, wanted = (SavedTensors(checkpoint(run, step)) for run in (behind, at_once))
        assert set(found) == set(wanted) and len(wanted) > 20
        assert all(torch.equal(found[name].nan_to_num(), wanted[name].nan_to_num()) for name in wanted)
    assert [event["step"] for event in behind.events("saved")] == [4, 8]
    continued = run_on(ranks, layout, spec_of("behind", layout, 12))
    first, second = ([record["loss"] for record in run.metrics()] for run in (at_once, continued))
    assert first == second and len(first) == 12


@pytest.mark.slow
def test_a_disk_that_fails_for_one_process_fails_the_save_for_all_and_the_run_goes_on(
    ranks: Ranks, spec_of: Spec
) -> None:
    def full() -> None:
        import torch.distributed as dist

        real = checked_writer._HashedFiles.create_stream

        def create_stream(self: Any, path: Any, mode: str) -> Any:
            if dist.get_rank() == 1 and "step-00000004" in str(path):
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return real(self, path, mode)

        checked_writer._HashedFiles.create_stream = create_stream  # type: ignore[method-assign]

    run = run_on(ranks, "two shards", spec_of("full", "two shards"), full)
    (failed,) = run.events("save_failed")
    assert failed["step"] == 4 and "No space left" in failed["reason"]
    assert not checkpoint(run, 4).exists() and verify(checkpoint(run, 8)).step == 8
    whole = run_on(ranks, "two shards", spec_of("whole", "two shards"))
    assert [r["loss"] for r in run.metrics()] == [r["loss"] for r in whole.metrics()]


@pytest.mark.slow
def test_one_process_without_room_for_a_copy_makes_all_save_at_once(ranks: Ranks, spec_of: Spec) -> None:
    def no_room() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:

            def copy(self: Any, state: Any) -> Any:
                raise RuntimeError("[enforce fail] can't allocate memory")

            Staging.copy = copy  # type: ignore[method-assign]

    run = run_on(ranks, "two shards", spec_of("tight", "two shards"), no_room)
    saved = list(run.events("saved"))
    assert [event["step"] for event in saved] == [4, 8]
    assert all(event["stall_s"] >= event["seconds"] - 1e-3 for event in saved)  # it stood in the loop's way


def test_a_copy_of_a_divided_tensor_is_a_part_of_the_same_whole(ranks: Ranks) -> None:
    def copied() -> tuple[bool, int]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        whole = distribute_tensor(torch.arange(12.0).view(6, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
        staging = Staging()
        copy = staging.copy({"x": whole})["x"]
        whole.to_local().zero_()
        full = copy.full_tensor()  # type: ignore[attr-defined]
        again = staging.copy({"x": whole})["x"]
        same = bool(torch.equal(full, torch.arange(12.0).view(6, 2)))
        return same and again is copy and not bool(again.to_local().any()), state_bytes({"x": whole})  # type: ignore[attr-defined]

    assert ranks(2, copied) == [(True, 24), (True, 24)]
