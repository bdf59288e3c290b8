"""Checkpoints packed small: a store of tensors by the hash of their bytes, compressed, optionally as differences.

    STORE/NAME.json            one packed checkpoint: its manifest, and each tensor's type, shape and hash
    STORE/objects/ab/abcdef..  one tensor: a line of JSON (how it is packed), then the packed bytes

An object's name is the SHA-256 of the tensor's bytes, so equal tensors are stored once and every read proves itself.

How a tensor's bytes are made small, without loss: difference of bit patterns, byte planes, then a compressor.

Neighbouring checkpoints differ in the last bits of most numbers. Their bit patterns, read as integers and subtracted,
give small numbers of either sign (folded to 0, -1, 1, -2, ... as 0, 1, 2, 3); laid out plane by plane (all first bytes,
all second bytes, ...) the zeros lie together. fp32 weights one step apart: 58 % of their size (61 % with exclusive-or,
88 % without a difference), ten steps apart 70 %. Bits, not numbers: NaN payloads and negative zeros come back exactly.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bessemer.checkpoint.manifest import DamagedCheckpoint, Manifest, verify
from bessemer.checkpoint.store import CheckpointStore
from bessemer.checkpoint.tensors import SavedTensors
from bessemer.errors import UserError
from bessemer.storage import write_atomic

_HASH = re.compile(r"^[0-9a-f]{64}$")
_SAMPLE = 1 << 20  # bytes of a tensor that tell whether a difference pays
_MAX_CHAIN = 16  # a difference of a difference of ...: each link is one more read, and one more object that may be lost


@dataclass
class PackResult:
    """What packing a checkpoint came to. `errors` are the largest |read back - saved| of each group of tensors."""

    name: str
    bytes_before: int
    bytes_written: int = 0
    tensors: int = 0
    already_there: int = 0
    as_difference: int = 0
    errors: dict[str, float] = field(default_factory=dict)


class TensorArchive:
    """Tensors' bytes by hash. Objects are written whole and never changed, so any number of writers may share one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        if not _HASH.match(key):
            raise DamagedCheckpoint(f"{self.folder}: {key!r} is not the name of an object")
        return self.folder / "objects" / key[:2] / key

    def put(self, raw: bytes, item_bytes: int, codec: Codec, base: str | None) -> tuple[str, int, bool]:
        """The object's name, the bytes written (0 if it was there), and whether as a difference. It was read back."""
        key = hashlib.sha256(raw).hexdigest()
        path = self.path(key)
        if path.exists():
            try:
                self.get(key)
                return key, 0, False
            except DamagedCheckpoint:  # a bad disk, or a crash while its file system was full: write it again
                path.unlink()
        about: dict[str, Any] = {"codec": codec, "item_bytes": item_bytes, "base": None, "chain": 0}
        earlier = None
        if base is not None and (chain := self._read(base)[0]["chain"] + 1) <= _MAX_CHAIN:
            earlier = self.get(base)
            sizes = [len(encode(raw[:_SAMPLE], part, item_bytes, codec)) for part in (earlier[:_SAMPLE], None)]
            if sizes[0] < sizes[1]:  # moments may differ too much between saves for it to pay
                about |= {"base": base, "chain": chain}
            else:
                earlier = None
        payload = encode(raw, earlier, item_bytes, codec)
        content = json.dumps(about).encode() + b"\n" + payload
        write_atomic(path, content, parents=True)
        self.get(key)
        return key, len(content), about["base"] is not None

    def get(self, key: str, links: int = _MAX_CHAIN) -> bytes:
        """The tensor's bytes, proved by their hash. `links` ends a crafted chain that goes round in circles."""
        about, payload = self._read(key)
        if about["base"] and not links:
            raise DamagedCheckpoint(f"{self.path(key)}: its chain of differences has no end")
        base = self.get(about["base"], links - 1) if about["base"] else None
        try:
            raw = decode(payload, base, about["item_bytes"], about["codec"])
        except (ValueError, TypeError) as error:
            raise DamagedCheckpoint(f"{self.path(key)}: cannot be unpacked: {error}") from None
        if hashlib.sha256(raw).hexdigest() != key:
            raise DamagedCheckpoint(f"{self.path(key)}: its content differs from what was packed (hash mismatch)")
        return raw

    def _read(self, key: str) -> tuple[dict[str, Any], bytes]:
        path = self.path(key)
        try:
            line, _, payload = path.read_bytes().partition(b"\n")
            about = json.loads(line)
            if {"codec", "item_bytes", "base", "chain"} - set(about):
                raise ValueError("its first line does not say how it is packed")
            return about, payload
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{path}: missing") from None
        except (ValueError, TypeError) as error:
            raise DamagedCheckpoint(f"{path}: unreadable: {error}") from None

    def index(self, name: str) -> dict[str, Any]:
        """What was packed under a name."""
        path = self.folder / f"{name}.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("sha256") != _index_hash(found):
                raise DamagedCheckpoint(f"{path}: its content differs from what was packed (hash mismatch)")
            return found
        except FileNotFoundError:
            there = ", ".join(sorted(file.stem for file in self.folder.glob("*.json"))) or "nothing"
            raise UserError(f"{self.folder}: nothing packed as {name!r}; there is {there}") from None
        except (ValueError, KeyError, AttributeError) as error:
            raise DamagedCheckpoint(f"{path}: unreadable: {error}") from None

    def write_index(self, name: str, index: dict[str, Any]) -> int:
        text = json.dumps({**index, "sha256": _index_hash(index)}, indent=1)
        write_atomic(self.folder / f"{name}.json", text)
        return len(text)


def _index_hash(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index).encode()).hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _largest(stored: Tensor, tensor: Tensor) -> float:
    """The largest error; NaN and infinity that stayed what they were are none."""
    error = (stored.double() - tensor.double()).abs().nan_to_num(0.0, math.inf)
    return error.max().item() if tensor.numel() else 0.0


def _tensor(raw: bytes, dtype: str, shape: list[int]) -> Tensor:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise DamagedCheckpoint(f"{dtype!r} is not a tensor's type")
    return torch.from_numpy(np.frombuffer(bytearray(raw), np.uint8)).view(kind).reshape(shape)


def pack(
    checkpoint: Path, store: Path, name: str, delta_from: str | None = None, codec: Codec = "zstd", bf16: bool = False
) -> PackResult:
    """Pack a checkpoint and read every tensor back. Exact, but for `bf16`, which rounds weights and moments."""
    if Path(name).name != name:
        raise UserError(f"{name!r}: give it a plain name, without a slash")
    manifest = verify(checkpoint)
    store.mkdir(parents=True, exist_ok=True)
    place = TensorArchive(store)
    bases: Mapping[str, Any] = place.index(delta_from)["tensors"] if delta_from else {}
    packed = PackResult(name, manifest.bytes)
    tensors: dict[str, dict[str, Any]] = {}
    for tensor_name, tensor in SavedTensors(checkpoint).items():
        group = tensor_name.partition(".")[0]
        wide = tensor.is_floating_point() and tensor.element_size() > 2
        # Counts stay exact, and so does what moves by thousandths.
        exact = tensor.ndim == 0 or tensor_name.endswith("choice_bias") or group not in ("model", "optimizer")
        rounded = bf16 and wide and not exact
        stored = tensor.bfloat16() if rounded else tensor
        about = {"dtype": str(stored.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        base = bases.get(tensor_name, {})
        same_kind = {key: base.get(key) for key in about} == about
        key, written, differs = place.put(
            _bytes(stored), stored.element_size(), codec, base["sha256"] if same_kind else None
        )
        tensors[tensor_name] = {**about, "sha256": key, "was": str(tensor.dtype).removeprefix("torch.")}
        packed.errors[group] = max(packed.errors.get(group, 0.0), _largest(stored, tensor) if rounded else 0.0)
        packed.tensors += 1
        packed.bytes_written += written
        packed.already_there += written == 0
        packed.as_difference += differs
    kept = {**asdict(replace(manifest, files={})), "format": manifest.format}
    index = {"manifest": json.loads(json.dumps(kept)), "tensors": tensors, "delta_from": delta_from}
    if (store / f"{name}.json").exists() and place.index(name)["tensors"] != tensors:
        raise UserError(f"{store / name}.json: another checkpoint is packed under this name; choose one with --name")
    packed.bytes_written += place.write_index(name, index)
    return packed


def unpack(store: Path, name: str, shelf: Path) -> Path:
    """Write a packed checkpoint to a shelf; the folder verifies. Costs memory for one checkpoint."""
    place = TensorArchive(store)
    index = place.index(name)
    try:
        manifest = Manifest(**index["manifest"])
    except TypeError as error:
        raise DamagedCheckpoint(f"{store / name}.json: its manifest is of another version: {error}") from None
    state = {}
    for tensor_name, about in index["tensors"].items():
        tensor = _tensor(place.get(about["sha256"]), about["dtype"], about["shape"])
        state[tensor_name] = tensor.to(getattr(torch, about["was"]))
    target = CheckpointStore(shelf)
    folder = target.reserve(manifest.step, "model" if manifest.content == "model" else "step")
    target.write(folder, state, manifest)
    return folder


Codec = Literal["zstd", "zlib", "none"]


def encode(raw: bytes, base: bytes | None, item_bytes: int, codec: Codec) -> bytes:
    """Packed bytes; `base` is as long as `raw`."""
    signed, _, bits = _kinds(item_bytes)
    data = np.frombuffer(raw, signed)
    if base is not None:
        change = data - np.frombuffer(base, signed)  # wraps around, and back again in decode
        data = (change << 1) ^ (change >> (bits - 1))
    planes = np.ascontiguousarray(data.view(np.uint8).reshape(-1, bits // 8).T).tobytes()
    if codec == "zstd":
        # Level 19 takes 100 times as long for 3 % less. Large tensors use all cores.
        threads = -1 if len(planes) > 8 << 20 else 0
        return _zstandard().ZstdCompressor(level=3, threads=threads).compress(planes)
    return zlib.compress(planes, 1) if codec == "zlib" else planes


def decode(packed: bytes, base: bytes | None, item_bytes: int, codec: Codec) -> bytes:
    """The inverse of encode. ValueError where the bytes are not what it wrote."""
    if codec == "zstd":
        zstandard = _zstandard()
        try:
            packed = zstandard.ZstdDecompressor().decompress(packed)
        except zstandard.ZstdError as error:
            raise ValueError(error) from None
    elif codec == "zlib":
        try:
            packed = zlib.decompress(packed)
        except zlib.error as error:
            raise ValueError(error) from None
    elif codec != "none":
        raise ValueError(f"unknown compression {codec!r}")
    signed, unsigned, bits = _kinds(item_bytes)
    planes = np.frombuffer(packed, np.uint8).reshape(bits // 8, -1)
    data = np.ascontiguousarray(planes.T).reshape(-1).view(signed)
    if base is not None:
        folded = data.view(unsigned)
        data = np.frombuffer(base, signed) + ((folded >> 1).view(signed) ^ -(folded & 1).view(signed))
    return data.tobytes()


def _kinds(item_bytes: int) -> tuple[np.dtype[Any], np.dtype[Any], int]:
    """The integers of an item's size; complex numbers are two."""
    width = item_bytes if item_bytes < 8 else 8
    return np.dtype(f"<i{width}"), np.dtype(f"<u{width}"), 8 * width


def _zstandard():  # type: ignore[no-untyped-def]
    try:
        import zstandard
    except ImportError:
        raise UserError("zstd needs `pip install bessemer[data]`; --compress zlib needs nothing") from None
    return zstandard
