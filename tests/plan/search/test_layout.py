"""Which layout a run gets: what the spec asks for, and what is decided where it leaves it open."""

from dataclasses import replace
from typing import Any

import pytest

from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.plan.search.layout import REPLICATE, SHARD, Layout, check_processes, decide_layout
from bessemer.spec.quantity import human_bytes
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import PRESETS, Moe

H200 = Machine("cuda", "NVIDIA H200", 150 * 10**9, 8, {"fp32": 1.0, "bf16": 2.0})


def decided(size: int, preset: str = "1B", **parallel: Any) -> tuple[Layout, Plan]:
    spec = RunSpec.model_validate(
        {"name": "x", "model": "1M", "data": {"sources": {"a": "x"}}, "parallel": parallel, "precision": "bf16"}
    )
    plan = Plan()
    return decide_layout(spec, replace(PRESETS[preset], vocab=32_000), 4096, H200, size, plan), plan


def test_one_process_is_not_divided_and_nothing_is_said() -> None:
    layout, plan = decided(1)
    assert layout == Layout(1, 1) and layout.dp == 1 and not plan.decisions


def test_what_fits_is_replicated_and_what_does_not_is_divided() -> None:
    small, plan = decided(8)
    assert small == Layout(8, 1) and "each device holds them whole" in plan.decisions[REPLICATE].reason
    large, plan = decided(8, "8B")
    assert large == Layout(1, 8) and "divided among all devices" in plan.decisions[SHARD].reason
    assert large.dp == 8


def test_frozen_parameters_have_no_gradients_and_moments_to_divide() -> None:
    def layout(freeze: list[str]) -> tuple[Layout, str]:
        spec = RunSpec.model_validate({
            "name": "x", "model": "1M", "data": {"sources": {"a": "x"}}, "precision": "bf16",
            "optimizer": {"freeze": freeze},
        })  # fmt: skip
        plan = Plan()
        result = decide_layout(spec, replace(PRESETS["3B"], vocab=32_000), 4096, H200, 8, plan)
        return result, plan.decisions[SHARD].reason

    full, _ = layout([])
    part, reason = layout(["embedding", "blocks.*"])
    # 6 bytes of a frozen parameter, 18 of one that trains
    parameters, head = replace(PRESETS["3B"], vocab=32_000).parameters, 0 if PRESETS["3B"].tied else 32_000 * 2560
    assert full == Layout(1, 8) and part == Layout(8, 1) and parameters * 18 > 0.25 * H200.memory_bytes
    assert human_bytes(6 * parameters + 12 * head) in reason


def test_what_is_left_open_takes_what_is_left() -> None:
    assert decided(8, dp_replicate=2)[0] == Layout(2, 4)
    assert decided(8, dp_shard=8)[0] == Layout(1, 8)
    assert decided(8, dp_replicate=4, dp_shard=2)[0] == Layout(4, 2)


def test_degrees_that_do_not_fill_the_processes_are_refused_with_one_that_does() -> None:
    with pytest.raises(UserError, match=r"dp_replicate 2 x dp_shard 3 needs 6 processes, and there are 8: write "):
        decided(8, dp_replicate=2, dp_shard=3)
    with pytest.raises(UserError, match=r"dp_shard 4 needs 4 processes, and there are 6: write parallel.dp_shard: 6"):
        decided(6, dp_shard=4)
    with pytest.raises(UserError, match=r"there are 1: write parallel.dp_shard: 1, or leave"):
        decided(1, dp_shard=2)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"precision": "fp8"}, "precision: fp8: for one process"),
        ({"memory": {"update": "in_backward"}}, "memory.update"),
    ],
    ids=str,
)
def test_what_would_be_another_run_is_refused(more: dict[str, Any], words: str) -> None:
    spec = RunSpec.model_validate({"name": "x", "model": "1M", "data": {"sources": {"a": "x"}}} | more)
    with pytest.raises(UserError, match=words):
        decide_layout(spec, replace(PRESETS["1B"], vocab=32_000), 4096, H200, 8, Plan())
    assert decide_layout(
        RunSpec.model_validate({"name": "x", "model": "1M", "data": {"sources": {"a": "x"}}} | more | {"parallel": {}}),
        replace(PRESETS["1B"], vocab=32_000), 4096, H200, 1, Plan(),
    ) == Layout()  # fmt: skip


MOE = Moe(experts=8, top_k=2, ffn=64)


def of(size: int, context: int = 4096, shape: dict[str, Any] | None = None, **parallel: Any) -> Layout:
    spec = RunSpec.model_validate(
        {"name": "x", "model": "1M", "data": {"sources": {"a": "x"}}, "parallel": parallel, "precision": "bf16"}
    )
    chosen = replace(PRESETS["1B"], vocab=32_000, heads=32, kv_heads=8, ffn=8192, layers=16, **(shape or {}))
    return decide_layout(spec, chosen, context, H200, size, Plan())


def test_what_tensors_columns_and_stages_leave_is_for_rows() -> None:
    assert of(16, tp=2, pp=2) == Layout(4, 1, tp=2, pp=2)
    assert of(16, tp=2, cp=2, dp_shard=4) == Layout(1, 4, tp=2, cp=2)
    layout = of(16, tp=2, cp=2, pp=2, dp_shard=2)
    assert (layout.size, layout.dp, layout.held) == (16, 2, 16)
    assert of(8, shape={"moe": MOE}, ep=4) == Layout(2, 4, ep=4)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tp": 3, "size": 3}, r"parallel.tp: 3 does not divide 32 heads, 8 key-value heads .* 1, or 2, 4 or 8 on a"),
        ({"tp": 2, "shape": {"moe": MOE}}, r"parallel.tp: a model with experts \(use ep\)"),
        ({"tp": 2, "shape": {"positions": "alibi"}}, r"parallel.tp: a model with alibi positions"),
        ({"tp": 2, "shape": {"qk_norm": "full"}}, r"parallel.tp: a model with a norm over all heads"),
        ({"cp": 3, "size": 3, "context": 4095}, r"parallel.cp: 3 does not divide 32 heads .* write 1"),
        ({"cp": 64, "size": 64}, r"parallel.cp: 64 does not divide .* write 2, 4, 8, 16 or 32"),
        ({"cp": 2, "shape": {"moe": MOE}}, r"parallel.cp: rows are not divided with experts"),
        ({"pp": 32, "size": 32}, r"parallel.pp: 32 stages need as many layers, and the model has 16"),
        ({"pp": 8, "size": 8, "pipeline": {"schedule": "interleaved", "stages": 4}}, r"parallel.pp: 32 stages"),
        ({"ep": 2}, r"parallel.ep: the model has no experts"),
        ({"ep": 3, "size": 3, "shape": {"moe": MOE}}, r"parallel.ep: 3 does not divide 8 experts: .* 2, 4 or 8"),
        ({"ep": 2, "dp_shard": 4, "size": 4, "shape": {"moe": MOE}}, r"write ep: 4, or dp_shard: 2"),
        ({"ep": 2, "shape": {"moe": replace(MOE, capacity=1.25)}}, r"remove model.moe.capacity"),
    ],
    ids=str,
)
def test_what_cannot_be_divided_so_is_refused_with_what_can(more: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        of(**{"size": 2, **more})


@pytest.mark.parametrize(
    ("size", "parallel", "words"),
    [
        (4, {"tp": 4}, "parallel.tp: 4 does not divide 6 heads"),
        (8, {"pp": 8}, "parallel.pp: 8 stages need as many layers, and the model has 5"),
        (4, {"cp": 4}, "parallel.cp: 4 does not divide 6 heads"),
        (2, {"ep": 2, "dp_shard": 2}, "parallel.ep: the model has no experts"),
        (8, {"dp_shard": 3}, "dp_shard 3 needs 3 processes, and there are 8"),
        (2, {"dp_shard": 2, "replicas": {"compress": "bf16"}}, "parallel.replicas.compress: for full replicas"),
    ],
)
def test_layouts_are_refused_before_data_is_read(size: int, parallel: dict[str, Any], words: str) -> None:
    model = {"width": 96, "heads": 6, "kv_heads": 6, "layers": 5, "ffn": 240}
    data = {"sources": {"a": "not/there"}}
    spec = RunSpec.model_validate({"name": "x", "model": model, "data": data, "parallel": parallel})
    with pytest.raises(UserError, match=words):
        check_processes(spec, None, size)
    spec = spec.model_copy(update={"parallel": type(spec.parallel)()})
    check_processes(spec, None, size)


@pytest.mark.parametrize(
    ("size", "parallel", "words"),
    [
        (8, {"tp": 3}, r"inner units: write 2, 4 or 8$"),
        (8, {"tp": 3, "dp_shard": 2}, r"inner units: write 2 or 4$"),
        (16, {"tp": 3, "pp": 2}, r"inner units: write 2, 4 or 8$"),
        (7, {"tp": 3}, r"inner units: write 1, or 2, 4, 8, 16 or 32 on a multiple of as many processes$"),
        (12, {"cp": 3}, r"does not divide 32 heads of a process: write 2 or 4, or parallel.context: ring$"),
        (6, {"tp": 4}, r"there are 6: write parallel.tp: 2$"),
        (8, {"tp": 4, "dp_shard": 1, "dp_replicate": 1}, r"there are 8: leave dp_replicate or dp_shard auto$"),
    ],
)
def test_only_degrees_that_the_processes_can_do_are_suggested(size: int, parallel: dict[str, Any], words: str) -> None:
    model = {"width": 512, "heads": 32, "kv_heads": 32, "layers": 4, "ffn": 1024}
    spec = RunSpec.model_validate(
        {"name": "x", "model": model, "data": {"sources": {"a": "not/there"}}, "parallel": parallel}
    )
    with pytest.raises(UserError, match=words):
        check_processes(spec, None, size)
