"""Packs that lose a little: 8 bits, and changes below a threshold left out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bessemer.checkpoint.archive import PackedTensors, pack, unpack
from bessemer.checkpoint.rounding import BLOCK, keep_changes, round_tensor
from bessemer.checkpoint.store import CheckpointStore
from bessemer.checkpoint.tensors import SavedTensors
from bessemer.errors import UserError


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=300))
def test_8_bits_are_within_half_a_step(values: list[float]) -> None:
    tensor = torch.tensor(values)
    rounded = round_tensor("model.w", tensor, "int8")
    for at in range(0, len(values), BLOCK):
        before, after = tensor[at : at + BLOCK].double(), rounded.restored[at : at + BLOCK].double()
        step = float(before.abs().max()) / 127
        assert float((before - after).abs().max()) <= 0.5001 * step + 1e-36
    assert rounded.stored.numel() == len(values) + 4 * -(-len(values) // BLOCK)


@given(st.lists(st.floats(0, 1e20), min_size=1, max_size=200))
def test_second_moments_keep_their_sign_and_never_become_zero(values: list[float]) -> None:
    moment = torch.tensor(values)
    restored = round_tensor("optimizer.w.exp_avg_sq", moment, "int8").restored
    largest = moment.max()
    assert (restored >= 0).all() and (restored[moment == 0] == 0).all()
    assert (restored[moment > 1e-30] > 0).all()
    torch.testing.assert_close(restored.max(), largest, rtol=1e-5, atol=1e-37)


def test_what_8_bits_leave_alone() -> None:
    for name, tensor in {
        "optimizer.step": torch.tensor(1001.0),
        "guard.window": torch.randn(9),
        "model.half": torch.randn(9).half(),
        "model.experts.choice_bias": torch.randn(9),
        "model.nan": torch.tensor([1.001, float("nan")]),
        "model.count": torch.arange(9),
    }.items():
        assert round_tensor(name, tensor, "int8").stored is tensor, name


def test_an_8_bit_pack_comes_back(
    checkpoint_store: CheckpointStore, manifest_of: Callable[..., Any], tmp_path: Path
) -> None:
    state = {
        "model.w": torch.randn(300, 7), "model.norm": torch.ones(7).bfloat16(), "guard.count": torch.tensor(2**53),
        "optimizer.w.exp_avg_sq": torch.rand(300, 7, dtype=torch.float64).square(),
    }  # fmt: skip
    packed = pack(checkpoint_store.save(state, manifest_of(1)), tmp_path / "store", "a", rounding="int8")
    back = dict(SavedTensors(unpack(tmp_path / "store", "a", tmp_path / "back")))
    assert {name: (t.dtype, t.shape) for name, t in back.items()} == {n: (t.dtype, t.shape) for n, t in state.items()}
    for name, group in (("model.w", "model"), ("optimizer.w.exp_avg_sq", "optimizer")):
        assert float((back[name] - state[name]).abs().max()) == pytest.approx(packed.errors[group], rel=1e-6)
        assert 0 < packed.errors[group] < 0.02
    assert torch.equal(back["model.norm"], state["model.norm"]) and back["guard.count"] == 2**53
    exact = pack(tmp_path / "checkpoints" / "step-00000001.a1", tmp_path / "exact", "a")
    assert packed.bytes_written < 0.3 * exact.bytes_written


def test_only_changes_beyond_a_threshold_are_packed(
    checkpoint_store: CheckpointStore, manifest_of: Callable[..., Any], tmp_path: Path
) -> None:
    """One number in fifty moves by a tenth, the others by a millionth."""
    draw = torch.Generator().manual_seed(0)
    before = torch.randn(20_000, generator=draw)
    moved = torch.rand(20_000, generator=draw) < 0.02
    after = before + torch.where(moved, 0.1, 1e-6 * torch.randn(20_000, generator=draw))
    store = tmp_path / "store"
    whole = pack(checkpoint_store.save({"model.w": before, "guard.step": torch.tensor(1)}, manifest_of(1)), store, "a")
    folder = checkpoint_store.save({"model.w": after, "guard.step": torch.tensor(2)}, manifest_of(2))
    exact = pack(folder, tmp_path / "exact", "b")
    sparse = pack(folder, store, "b", "a", threshold=1e-3)
    assert (sparse.compared, sparse.changed) == (20_000, int(moved.sum()))
    assert sparse.bytes_written < 0.15 * whole.bytes_written and exact.bytes_written > 0.8 * whole.bytes_written
    back = dict(SavedTensors(unpack(store, "b", tmp_path / "back")))
    assert torch.equal(back["model.w"], torch.where(moved, after, before)) and back["guard.step"] == 2
    assert sparse.errors["model"] == float((back["model.w"].double() - after.double()).abs().max()) < 1e-5
    assert torch.equal(PackedTensors(store, "b", "model.")["w"], back["model.w"])
    with pytest.raises(UserError, match="add --delta-from"):
        pack(folder, store, "c", threshold=1e-3)


def test_a_pack_of_changes_may_follow_an_8_bit_one(
    checkpoint_store: CheckpointStore, manifest_of: Callable[..., Any], tmp_path: Path
) -> None:
    """Changes are against what unpacking gives, so the errors of the first are not added to."""
    before = torch.randn(5_000)
    after = before + 0.5 * (torch.arange(5_000) % 10 == 0)
    pack(checkpoint_store.save({"model.w": before}, manifest_of(1)), tmp_path / "store", "a", rounding="int8")
    pack(checkpoint_store.save({"model.w": after}, manifest_of(2)), tmp_path / "store", "b", "a", threshold=0.1)
    back = PackedTensors(tmp_path / "store", "b")["model.w"]
    assert float((back - after).abs().max()) < 0.02 and torch.equal(back[::10], after[::10])


def test_nan_is_a_change() -> None:
    base, tensor = torch.ones(4), torch.tensor([1.0, float("nan"), float("inf"), 1.0001])
    kept, changed = keep_changes(tensor, base, 0.01)
    assert changed == 2 and kept[1].isnan() and kept[2].isinf() and kept[[0, 3]].tolist() == [1.0, 1.0]
