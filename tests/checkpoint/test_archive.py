"""Packed checkpoints come back bit for bit, equal tensors are stored once, and damage is named."""

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bessemer.checkpoint.archive import Codec, TensorArchive, decode, encode, pack, unpack
from bessemer.checkpoint.manifest import DamagedCheckpoint, verify
from bessemer.checkpoint.store import CheckpointStore
from bessemer.checkpoint.tensors import SavedTensors
from bessemer.errors import UserError

State = dict[str, Tensor]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.complex128]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_bits(folder: Path, state: State) -> None:
    found = dict(SavedTensors(folder))
    assert set(found) == set(state)
    for name, tensor in state.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


@given(
    st.sampled_from(DTYPES), st.sampled_from(["zstd", "zlib", "none"]), st.integers(0, 40), st.binary(), st.booleans()
)
def test_any_bit_pattern_comes_back(dtype: torch.dtype, codec: Codec, count: int, seed: bytes, delta: bool) -> None:
    """Random bits are every kind of number: NaN with payloads, infinities, subnormals, negative zeros."""
    draw = np.random.default_rng(list(seed))
    item = dtype.itemsize
    raw, base = (draw.integers(0, 256, count * item, dtype=np.uint8).tobytes() for _ in range(2))
    before = base if delta else None
    assert decode(encode(raw, before, item, codec), before, item, codec) == raw


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1), st.floats(-1e-3, 1e-3))
def test_weights_near_each_other_come_back(values: list[float], step: float) -> None:
    old = torch.tensor(values)
    new = (old + step).bfloat16()
    for a, b in ((bits(old), bits(old + step)), (bits(old.bfloat16()), bits(new))):
        item = len(a) // len(values)
        assert decode(encode(b, a, item, "zstd"), a, item, "zstd") == b


def saved(checkpoint_store: CheckpointStore, state: State, manifest: Any) -> Path:
    return checkpoint_store.save(state, manifest)


@pytest.mark.parametrize("codec", ["zstd", "zlib", "none"])
def test_a_packed_checkpoint_comes_back_bit_for_bit(
    checkpoint_store: CheckpointStore,
    state_of: Callable[..., State],
    manifest_of: Callable[..., Any],
    tmp_path: Path,
    codec: Codec,
) -> None:
    original = saved(checkpoint_store, state_of(1), manifest_of(30, 2.5))
    packed = pack(original, tmp_path / "store", "a", codec=codec)
    assert packed.errors == {"model": 0.0, "optimizer": 0.0, "guard": 0.0, "transposed": 0.0}
    assert (packed.tensors, packed.already_there, packed.as_difference) == (6, 0, 0)
    assert packed.bytes_before == sum(f.stat().st_size for f in original.iterdir() if f.name != "manifest.json")
    stored = sum(f.stat().st_size for f in (tmp_path / "store").rglob("*") if f.is_file())
    assert packed.bytes_written == stored
    back = unpack(tmp_path / "store", "a", tmp_path / "back")
    assert_same_bits(back, state_of(1))
    before, after = verify(original), verify(back)
    assert (after.step, after.segments, after.progress, after.validation_loss, after.time) == (
        before.step, before.segments, before.progress, before.validation_loss, before.time
    )  # fmt: skip


def test_equal_tensors_are_stored_once(
    checkpoint_store: CheckpointStore, state_of: Callable[..., State], manifest_of: Callable[..., Any], tmp_path: Path
) -> None:
    first = pack(saved(checkpoint_store, state_of(1), manifest_of(1)), tmp_path / "store", "a")
    changed = {**state_of(1), "model.norm": state_of(2)["model.norm"]}
    second = pack(saved(checkpoint_store, changed, manifest_of(2)), tmp_path / "store", "b")
    assert (second.tensors, second.already_there) == (6, 5)
    assert second.bytes_written < first.bytes_written
    assert len([f for f in (tmp_path / "store" / "objects").rglob("*") if f.is_file()]) == 7
    assert_same_bits(unpack(tmp_path / "store", "b", tmp_path / "back"), changed)


def drifting(step: int) -> State:
    """Weights that move a little at each step, with NaN and bf16 among them."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2000, generator=generator)
    for _ in range(step):
        weights = weights + 1e-6 * torch.randn(2000, generator=generator)
    weights[5] = float("nan")
    return {"model.weight": weights, "model.half": weights.bfloat16(), "guard.step": torch.tensor(step)}


def test_differences_are_smaller_and_chain(
    checkpoint_store: CheckpointStore, manifest_of: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bessemer.checkpoint.archive._MAX_CHAIN", 3)
    store = tmp_path / "store"
    whole = pack(saved(checkpoint_store, drifting(0), manifest_of(0)), store, "s0")
    for step in range(1, 7):
        folder = saved(checkpoint_store, drifting(step), manifest_of(step))
        packed = pack(folder, store, f"s{step}", delta_from=f"s{step - 1}")
        if step == 1:
            assert packed.as_difference == 2 and packed.bytes_written < 0.7 * whole.bytes_written
    archive = TensorArchive(store)
    digests = [archive.index(f"s{step}")["tensors"]["model.weight"]["sha256"] for step in range(7)]
    chains = [archive._read(digest)[0]["chain"] for digest in digests]
    assert chains == [0, 1, 2, 3, 0, 1, 2]  # a chain has an end: then a whole one is stored
    for step in (0, 3, 4, 6):
        assert_same_bits(unpack(store, f"s{step}", tmp_path / f"back{step}"), drifting(step))


def test_a_base_of_another_shape_is_no_base(
    checkpoint_store: CheckpointStore, manifest_of: Callable[..., Any], tmp_path: Path
) -> None:
    pack(saved(checkpoint_store, {"model.w": torch.ones(4)}, manifest_of(1)), tmp_path, "a")
    for step, other in ((2, torch.ones(5)), (3, torch.ones(4).double()), (4, torch.full((2, 2), 2.0))):
        packed = pack(
            saved(checkpoint_store, {"model.w": other}, manifest_of(step)), tmp_path, f"b{step}", delta_from="a"
        )
        assert packed.as_difference == 0
        assert_same_bits(unpack(tmp_path, f"b{step}", tmp_path / f"back{step}"), {"model.w": other})


def test_bf16_rounds_and_says_by_how_much(
    checkpoint_store: CheckpointStore, manifest_of: Callable[..., Any], tmp_path: Path
) -> None:
    weights = torch.tensor([1.0, 1.00390625, -3.015625, 0.0])  # the second lies halfway between two bf16 numbers
    state = {"model.w": weights, "optimizer.step": torch.tensor(1001.0), "guard.window": torch.tensor([1001.0])}
    packed = pack(saved(checkpoint_store, state, manifest_of(1)), tmp_path / "store", "a", rounding="bf16")
    expected = (weights.bfloat16().double() - weights.double()).abs().max().item()
    assert packed.errors == {"model": expected, "optimizer": 0.0, "guard": 0.0} and expected > 0
    back = dict(SavedTensors(unpack(tmp_path / "store", "a", tmp_path / "back")))
    assert back["model.w"].dtype == torch.float32
    assert torch.equal(back["model.w"], weights.bfloat16().float())
    assert back["optimizer.step"] == 1001 and back["guard.window"] == 1001


def test_bf16_of_what_is_not_finite_and_of_what_is_narrow(
    checkpoint_store: CheckpointStore, manifest_of: Callable[..., Any], tmp_path: Path
) -> None:
    wide = torch.tensor([float("nan"), float("inf"), 1.0, 1.001])
    state = {"model.w": wide, "model.half": torch.tensor([1.001], dtype=torch.float16)}
    packed = pack(saved(checkpoint_store, state, manifest_of(1)), tmp_path / "store", "a", rounding="bf16")
    assert packed.errors["model"] == pytest.approx(1e-3, rel=1e-3)  # not hidden by the NaN
    back = dict(SavedTensors(unpack(tmp_path / "store", "a", tmp_path / "back")))
    assert torch.equal(back["model.half"], state["model.half"])  # bf16 would save nothing
    assert back["model.w"].isnan()[0] and back["model.w"][1] == float("inf")


def test_damage_is_named(
    checkpoint_store: CheckpointStore, state_of: Callable[..., State], manifest_of: Callable[..., Any], tmp_path: Path
) -> None:
    folder = saved(checkpoint_store, state_of(1), manifest_of(1))
    pack(folder, tmp_path / "store", "a")
    key = TensorArchive(tmp_path / "store").index("a")["tensors"]["model.weight"]["sha256"]
    path = TensorArchive(tmp_path / "store").path(key)
    sound = path.read_bytes()
    for bad in (sound[:-3], sound[:-1] + bytes([sound[-1] ^ 1]), b"{}\n", b"", b"[]\n" + sound):
        path.write_bytes(bad)
        with pytest.raises(DamagedCheckpoint, match=key):
            unpack(tmp_path / "store", "a", tmp_path / "back")
    assert pack(folder, tmp_path / "store", "a").already_there == 5  # packing again mends it
    assert path.read_bytes() == sound
    path.unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{key}: missing"):
        unpack(tmp_path / "store", "a", tmp_path / "back")
    index = tmp_path / "store" / "a.json"
    index.write_text(index.read_text().replace('"step": 1', '"step": 2'))
    with pytest.raises(DamagedCheckpoint, match=r"a\.json: its content differs"):
        unpack(tmp_path / "store", "a", tmp_path / "back")
    assert list(CheckpointStore(tmp_path / "back").folder.iterdir()) == []


def test_a_crafted_object_cannot_send_the_reader_in_circles_or_out_of_the_store(tmp_path: Path) -> None:
    key = "ab" * 32
    path = TensorArchive(tmp_path).path(key)
    path.parent.mkdir(parents=True)
    path.write_text(f'{{"codec": "none", "item_bytes": 1, "base": "{key}", "chain": 3}}\n')
    with pytest.raises(DamagedCheckpoint, match="chain of differences"):
        TensorArchive(tmp_path).get(key)
    with pytest.raises(DamagedCheckpoint, match="not an object name"):
        TensorArchive(tmp_path).get("../../etc/passwd")


def test_mistakes_are_told(
    checkpoint_store: CheckpointStore, state_of: Callable[..., State], manifest_of: Callable[..., Any], tmp_path: Path
) -> None:
    folder = saved(checkpoint_store, state_of(1), manifest_of(1))
    pack(folder, tmp_path / "store", "a")
    with pytest.raises(UserError, match="nothing is packed as 'b'; there is a"):
        unpack(tmp_path / "store", "b", tmp_path / "back")
    with pytest.raises(UserError, match="nothing is packed as 'b'"):
        pack(folder, tmp_path / "store", "c", delta_from="b")
    with pytest.raises(UserError, match="without a slash"):
        pack(folder, tmp_path / "store", "../a")
    with pytest.raises(UserError, match="another checkpoint has this name"):
        pack(saved(checkpoint_store, state_of(2), manifest_of(2)), tmp_path / "store", "a")
    next(folder.glob("*.distcp")).unlink()
    with pytest.raises(DamagedCheckpoint, match="missing"):
        pack(folder, tmp_path / "store", "d")


def test_without_zstandard_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "zstandard":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install bessemer\[data\]"):
        encode(b"1234", None, 4, "zstd")
    assert decode(encode(b"1234", None, 4, "zlib"), None, 4, "zlib") == b"1234"
