"""The estimate against what torch really saves, against measured peaks, and what is decided from it."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bessemer.plan.cost_model.memory as planned
from bessemer.errors import UserError
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.transformer import build_model
from bessemer.plan.cost_model.memory import (
    ACTIVATIONS,
    ROWS,
    Passes,
    activation_bytes,
    decide_micro_batch,
    estimate_memory,
    head_bytes,
)
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import PRESETS, ModelShape, Moe
from bessemer.train.memory import tiles

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import planner_memory

GIB = 2**30
H200 = Machine("cuda", "NVIDIA H200", 150_000_000_000, 16, {"fp32": 1.0})
LLAMA = ModelShape(64, 64, 3, 4, 2, 16, 256)
SHAPES = {
    "llama": LLAMA,
    "gpt2": ModelShape(64, 64, 3, 4, 4, 16, 256, norm="layer", gated=False, activation="gelu"),
    "wide heads": ModelShape(64, 48, 4, 8, 4, 16, 128),
}


def spec_with(**changes: Any) -> RunSpec:
    data: dict[str, Any] = {"name": "x", "model": "1M", "data": {"sources": {"a": "x"}}}
    for key, value in changes.items():
        section, _, field = key.partition("__")
        data.setdefault(section, {})[field] = value
    return RunSpec.model_validate(data)


def saved_bytes(shape: ModelShape, rows: int, context: int, dtype: torch.dtype) -> int:
    """By the blocks of a real forward pass, weights and their casts apart."""
    model = build_model(shape, "cpu", 0)
    sizes = {p.numel() for p in model.parameters()}
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() // tensor.element_size() not in sizes:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda t: t),
        torch.autocast("cpu", enabled=dtype.itemsize == 2),
    ):
        x_BTW = torch.randn(rows, context, shape.width, requires_grad=True)
        place = model.attention_inputs(x_BTW, AttentionMask())
        for block in model.blocks:
            x_BTW = block(x_BTW, place)
    return sum(found.values())


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "fp32") for name in SHAPES), *(pytest.param(name, "bf16", marks=pytest.mark.slow) for name in SHAPES)],
)
def test_activations_are_what_torch_saves_within_a_tenth(name: str, precision: str) -> None:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    counted = activation_bytes(SHAPES[name], Passes(160, 5, precision, "none", compiled=False, device="cpu"))
    assert counted == pytest.approx(saved_bytes(SHAPES[name], 5, 160, dtype), rel=0.1)


def test_peaks_measured_on_an_h200() -> None:
    """124M to 70B, 512 to 32K tokens, every way to compute again, five optimizers, four precisions, 8-bit moments."""
    rows = planner_memory.read_peaks()
    errors = {tuple(row.values()): planner_memory.estimated_gib(row) / row["peak_gib"] - 1 for row in rows}
    assert len(errors) >= 48
    assert sum(map(abs, errors.values())) / len(errors) < 0.015
    assert max(map(abs, errors.values())) < 0.06, max(errors.items(), key=lambda item: abs(item[1]))


def test_a_peak_is_at_the_loss_or_behind_it_or_where_all_gradients_are() -> None:
    wide = replace(PRESETS["1B"], vocab=128_256)
    long = estimate_memory(spec_with(), wide, Passes(4096, 8, "bf16", "none", compiled=True, several=False))
    short = estimate_memory(spec_with(), wide, Passes(512, 1, "bf16", "full", compiled=True, several=False))
    assert (long.moment, short.moment) == ("at the loss", "at the end of the backward pass")
    row = Passes(131_072, 1, "bf16", "full", compiled=True, several=False)
    whole = estimate_memory(spec_with(), replace(wide, positions="alibi"), row)
    assert whole.moment == "in the last layer's backward pass"
    assert whole.workspace > whole.activations > 7 * GIB  # one layer with all it computes again, and inputs of all
    tiled = estimate_memory(spec_with(), wide, row)  # which a bias on attention's logits does not allow
    assert tiled.activations == whole.activations and tiled.workspace < 0.7 * whole.workspace
    assert (planned.LONG, planned.TILE) == (tiles.LONG, tiles.MOST)
    again = estimate_memory(spec_with(), wide, Passes(4096, 8, "bf16", "none", compiled=True, several=True))
    assert again.total - long.total == again.gradients == 4 * wide.parameters


def test_a_head_in_bf16_is_not_copied_and_one_chunk_of_it_not_summed() -> None:
    wide = replace(PRESETS["1B"], vocab=128_256)
    embedding, rows = wide.vocab * wide.width, 8192  # as many as one chunk of 2 GiB holds
    for tokens, kept, each in ((rows, 2, 2), (2 * rows, 2, 4), (rows, 4, 6), (2 * rows, 4, 6)):
        passes = Passes(tokens, 1, "bf16", "none", compiled=True)
        beside = 4 * tokens * wide.width * 2 + rows * wide.vocab * 2
        assert head_bytes(wide, passes, kept) == beside + each * embedding


def test_each_way_to_save_memory_saves_some() -> None:
    shape = replace(PRESETS["1B"], vocab=128_256)
    plain = Passes(4096, 8, "bf16", "none", compiled=True)

    def total(how: Any = "none", **memory: Any) -> int:
        changes = {f"memory__{key}": value for key, value in memory.items()}
        return estimate_memory(spec_with(**changes), shape, replace(plain, activations=how)).total

    steps = [total(how) for how in ("none", "selective", 0.5, 0.0, "full")]
    assert steps == sorted(steps, reverse=True) and len(set(steps)) == 5
    for memory in (
        {"offload_activations": True}, {"weights": "stochastic"}, {"moments": "8bit"}, {"offload_optimizer": True},
        {"update": "in_backward"},
    ):  # fmt: skip
        assert total(**memory) < steps[0] - GIB, memory
    assert total("full", offload_activations=True) < steps[-1]


def test_experts_and_state_spaces_count() -> None:
    passes = Passes(128, 4, "bf16", "none", compiled=True)
    dense, routed = LLAMA, replace(LLAMA, moe=Moe(8, 4, 256))
    assert activation_bytes(routed, passes) > 3 * activation_bytes(dense, passes)


def decided(machine: Machine = H200, shape: ModelShape | None = None, batch: int = 64, **changes: Any) -> Any:
    plan = changes.pop("plan", None) or Plan()
    shape = shape or replace(PRESETS["1B"], vocab=128_256, tied=False)
    passes = Passes(changes.pop("context", 4096), 1, "bf16", "none", compiled=True, device=machine.device)
    previous = changes.pop("previous", None)
    found = decide_micro_batch(spec_with(**changes), shape, passes, batch, machine, plan, previous)
    return found.rows, found.activations, plan


def test_as_many_rows_as_fit_and_divide_the_batch() -> None:
    rows, how, plan = decided()
    assert (rows, how) == (8, "none")
    assert (
        "it divides the batch of 64" in plan.decisions[ROWS].reason and "activations 39" in plan.decisions[ROWS].reason
    )
    assert "all of them fit" in plan.decisions[ACTIVATIONS].reason
    assert decided(batch=30)[0] == 6
    assert decided(batch=7)[0] == 7
    assert decided(batch=1024, context=128)[0] == 256  # 32,768 tokens: no device is busier with more


def test_recomputation_only_where_a_row_does_not_fit() -> None:
    eight = replace(PRESETS["8B"], vocab=128_256)
    assert decided(shape=eight, memory__moments="8bit")[1] == "none"
    rows, how, plan = decided(shape=eight)
    assert (rows, how) == (2, "full")
    assert "the least recomputation that fits" in plan.decisions[ACTIVATIONS].reason
    small = Machine("cuda", "x", 10**9, 1, {"fp32": 1.0})
    rows, how, plan = decided(small, shape=eight)
    assert (rows, how) == (1, "full") and "hardly fits in 920 MB" in plan.decisions[ROWS].reason


def test_rows_that_were_asked_for_decide_what_is_recomputed() -> None:
    assert decided(budget__micro_batch=16)[:2] == (16, "none")
    assert decided(budget__micro_batch=24)[:2] == (24, "selective")
    assert decided(budget__micro_batch=48)[:2] == (48, "full")
    assert decided(budget__micro_batch=8, memory__activations=0.5)[:2] == (8, 0.5)
    assert decided(memory__activations="full")[0] == 8
    with pytest.raises(UserError, match=r"budget.micro_batch: 65 sequences exceed the batch of 64: write 64 or less"):
        decided(budget__micro_batch=65)
    assert decided(memory__update="in_backward", batch=8)[0] == 8


def test_a_cpu_takes_a_third_and_at_most_16k_tokens() -> None:
    cpu = Machine("cpu", "x", 64 * GIB, 8, {"fp32": 1.0})
    small = replace(PRESETS["1M"], vocab=2048)
    assert decided(cpu, small, batch=1024, context=128)[0] == 128
    assert decided(cpu, small, batch=4, context=32_768)[0] == 1


def test_a_resumed_run_keeps_both() -> None:
    previous = Plan()
    previous.add(ROWS, 2, "step 7 ran out of memory with 4", "measured")
    previous.add(ACTIVATIONS, "full", "", "measured")
    rows, how, plan = decided(previous=previous)
    assert (rows, how) == (2, "full") and plan.decisions[ROWS] == previous.decisions[ROWS]
    previous.add(ROWS, 128, "", "")
    assert decided(previous=previous)[0] == 8  # more than the batch: decided anew
