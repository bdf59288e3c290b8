"""Which layout a run gets: what the spec asks for, and what is decided where it leaves it open."""

from dataclasses import replace
from typing import Any

import pytest

from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.plan.layout import REPLICATE, SHARD, Layout, decide_layout
from bessemer.plan.machine import Machine
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import PRESETS

H200 = Machine("cuda", "NVIDIA H200", 150 * 10**9, 8, {"fp32": 1.0, "bf16": 2.0})


def decided(size: int, preset: str = "1B", **parallel: Any) -> tuple[Layout, Plan]:
    spec = RunSpec.model_validate(
        {"name": "x", "model": "1M", "data": {"sources": {"a": "x"}}, "parallel": parallel, "precision": "bf16"}
    )
    plan = Plan()
    return decide_layout(spec, replace(PRESETS[preset], vocab=32_000), H200, size, plan), plan


def test_one_process_is_not_divided_and_nothing_is_said() -> None:
    layout, plan = decided(1)
    assert layout == Layout(1, 1) and layout.dp == 1 and not plan.decisions


def test_what_fits_is_replicated_and_what_does_not_is_divided() -> None:
    small, plan = decided(8)
    assert small == Layout(8, 1) and "each device holds them whole" in plan.decisions[REPLICATE].reason
    large, plan = decided(8, "8B")
    assert large == Layout(1, 8) and "divided among all devices" in plan.decisions[SHARD].reason
    assert large.dp == 8


def test_what_is_left_open_takes_what_is_left() -> None:
    assert decided(8, dp_replicate=2)[0] == Layout(2, 4)
    assert decided(8, dp_shard=8)[0] == Layout(1, 8)
    assert decided(8, dp_replicate=4, dp_shard=2)[0] == Layout(4, 2)


def test_degrees_that_do_not_fill_the_processes_are_refused_with_one_that_does() -> None:
    with pytest.raises(UserError, match=r"dp_replicate 2 x dp_shard 3 needs 6 processes, and there are 8: write "):
        decided(8, dp_replicate=2, dp_shard=3)
    with pytest.raises(UserError, match=r"dp_shard 4 needs 4 processes, and there are 6: write parallel.dp_shard: 6"):
        decided(6, dp_shard=4)
    with pytest.raises(UserError, match=r"there are 1: write parallel.dp_shard: 1, or auto"):
        decided(1, dp_shard=2)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"memory": {"moments": "8bit"}}, "memory: weights, moments"),
        ({"precision": "fp8"}, "precision: fp8"),
        ({"optimizer": {"name": "muon"}, "parallel": {"dp_shard": 8}}, "optimizer.name: muon"),
    ],
    ids=str,
)
def test_what_would_be_another_run_is_refused(more: dict[str, Any], words: str) -> None:
    spec = RunSpec.model_validate({"name": "x", "model": "1M", "data": {"sources": {"a": "x"}}} | more)
    with pytest.raises(UserError, match=f"{words}.*for one process in this version"):
        decide_layout(spec, replace(PRESETS["1B"], vocab=32_000), H200, 8, Plan())
    assert decide_layout(
        RunSpec.model_validate({"name": "x", "model": "1M", "data": {"sources": {"a": "x"}}} | more | {"parallel": {}}),
        replace(PRESETS["1B"], vocab=32_000), H200, 1, Plan(),
    ) == Layout()  # fmt: skip
