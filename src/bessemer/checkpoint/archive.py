"""Packed checkpoints: an archive of tensors by content hash, compressed, optionally as differences.

    STORE/NAME.json            one packed checkpoint: its manifest, and each tensor's dtype, shape and hash
    STORE/objects/ab/abcdef..  one tensor: a line of JSON (how it is packed), then the packed bytes

An object's name is the SHA-256 of the tensor's bytes, so equal tensors are stored once and every read is verified.

Compression is lossless: difference of bit patterns, byte planes, then a compressor. Neighbouring checkpoints differ in
the last bits of most numbers. Their bit patterns, subtracted as integers, give small numbers of either sign
(zigzag-encoded: 0, -1, 1, -2, ... as 0, 1, 2, 3); plane by plane (all first bytes, all second bytes, ...) the zeros are
contiguous. fp32 weights one step apart take 58 % of their size (61 % with exclusive-or, 88 % without a difference), ten
steps apart 70 %. NaN payloads and negative zeros are preserved.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bessemer.checkpoint.manifest import DamagedCheckpoint, Manifest, to_json, verify
from bessemer.checkpoint.rounding import Rounding, is_exact, keep_changes, restore, round_tensor
from bessemer.checkpoint.store import CheckpointStore
from bessemer.checkpoint.tensors import SavedTensors
from bessemer.errors import UserError
from bessemer.storage import write_atomic

_HASH = re.compile(r"^[0-9a-f]{64}$")
_SAMPLE = 1 << 20  # bytes of a tensor that decide whether a difference is smaller
_MAX_CHAIN = 16  # differences of differences: each link is one more read and one more object that may be lost


@dataclass
class PackResult:
    """The result of packing a checkpoint. `errors` are the largest |read back - saved| per group of tensors."""

    name: str
    bytes_before: int
    bytes_written: int = 0
    tensors: int = 0
    already_there: int = 0
    as_difference: int = 0
    compared: int = 0  # numbers that a threshold applied to, and how many of them changed beyond it
    changed: int = 0
    errors: dict[str, float] = field(default_factory=dict)


class TensorArchive:
    """Tensor bytes by hash. Objects are written atomically and never changed, so any number of writers may share an
    archive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        if not _HASH.match(key):
            raise DamagedCheckpoint(f"{self.folder}: {key!r} is not an object name")
        return self.folder / "objects" / key[:2] / key

    def put(self, raw: bytes, item_bytes: int, codec: Codec, base: str | None) -> tuple[str, int, bool]:
        """The object's name, the bytes written (0 if it existed), and whether as a difference. Reads the object
        back."""
        key = hashlib.sha256(raw).hexdigest()
        path = self.path(key)
        if path.exists():
            try:
                self.get(key)
                return key, 0, False
            except DamagedCheckpoint:  # a bad disk or a crash: write it again
                path.unlink()
        header: dict[str, Any] = {"codec": codec, "item_bytes": item_bytes, "base": None, "chain": 0}
        earlier = None
        if base is not None and (chain := self._read(base)[0]["chain"] + 1) <= _MAX_CHAIN:
            earlier = self.get(base)
            sizes = [len(encode(raw[:_SAMPLE], part, item_bytes, codec)) for part in (earlier[:_SAMPLE], None)]
            if sizes[0] < sizes[1]:  # moments may differ too much between saves
                header |= {"base": base, "chain": chain}
            else:
                earlier = None
        payload = encode(raw, earlier, item_bytes, codec)
        content = json.dumps(header).encode() + b"\n" + payload
        write_atomic(path, content, parents=True)
        self.get(key)
        return key, len(content), header["base"] is not None

    def get(self, key: str, links: int = _MAX_CHAIN) -> bytes:
        """The tensor's bytes, verified by their hash. `links` ends a crafted circular chain."""
        header, payload = self._read(key)
        if header["base"] and not links:
            raise DamagedCheckpoint(f"{self.path(key)}: its chain of differences is circular or too long")
        base = self.get(header["base"], links - 1) if header["base"] else None
        try:
            raw = decode(payload, base, header["item_bytes"], header["codec"])
        except (ValueError, TypeError) as error:
            raise DamagedCheckpoint(f"{self.path(key)}: cannot be unpacked: {error}") from None
        if hashlib.sha256(raw).hexdigest() != key:
            raise DamagedCheckpoint(f"{self.path(key)}: its content differs from what was packed (hash mismatch)")
        return raw

    def _read(self, key: str) -> tuple[dict[str, Any], bytes]:
        path = self.path(key)
        try:
            line, _, payload = path.read_bytes().partition(b"\n")
            header = json.loads(line)
            if {"codec", "item_bytes", "base", "chain"} - set(header):
                raise ValueError("its header is incomplete")
            return header, payload
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{path}: missing") from None
        except (ValueError, TypeError) as error:
            raise DamagedCheckpoint(f"{path}: unreadable: {error}") from None

    def index(self, name: str) -> dict[str, Any]:
        """The index of a packed checkpoint."""
        path = self.folder / f"{name}.json"
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            if index.pop("sha256") != _index_hash(index):
                raise DamagedCheckpoint(f"{path}: its content differs from what was packed (hash mismatch)")
            return index
        except FileNotFoundError:
            packed = ", ".join(sorted(file.stem for file in self.folder.glob("*.json"))) or "nothing"
            raise UserError(f"{self.folder}: nothing is packed as {name!r}; there is {packed}") from None
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


def _largest_error(stored: Tensor, tensor: Tensor) -> float:
    """The largest error; unchanged NaN and infinity count as none."""
    error = (stored.double() - tensor.double()).abs().nan_to_num(0.0, math.inf)
    return error.max().item() if tensor.numel() else 0.0


def _tensor(raw: bytes, dtype: str, shape: list[int]) -> Tensor:
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise DamagedCheckpoint(f"{dtype!r} is not a dtype")
    return torch.from_numpy(np.frombuffer(bytearray(raw), np.uint8)).view(torch_dtype).reshape(shape)


def pack(
    checkpoint: Path, store: Path, name: str, delta_from: str | None = None, codec: Codec = "zstd",
    rounding: Rounding = "same", threshold: float | None = None,
) -> PackResult:  # fmt: skip
    """Pack a checkpoint and read every tensor back. Exact unless `rounding` rounds weights and moments, or a
    `threshold` leaves out their small changes since `delta_from` (see `keep_changes`)."""
    if Path(name).name != name:
        raise UserError(f"{name!r}: choose a name without a slash")
    if threshold is not None and delta_from is None:
        raise UserError(f"--threshold {threshold:g}: names the changes to keep: add --delta-from NAME")
    manifest = verify(checkpoint)
    store.mkdir(parents=True, exist_ok=True)
    archive = TensorArchive(store)
    bases = PackedTensors(store, delta_from) if delta_from else None
    packed = PackResult(name, manifest.bytes)
    tensors: dict[str, dict[str, Any]] = {}
    for tensor_name, tensor in SavedTensors(checkpoint).items():
        values = tensor
        if threshold is not None and bases and not is_exact(tensor_name, tensor) and bases.is_like(tensor_name, tensor):
            values, changed = keep_changes(tensor, bases[tensor_name], threshold)
            packed.compared, packed.changed = packed.compared + tensor.numel(), packed.changed + changed
        rounded = round_tensor(tensor_name, values, rounding)
        stored = rounded.stored
        layout = {"dtype": str(stored.dtype).removeprefix("torch."), "shape": list(stored.shape)} | rounded.how
        base = bases.entries.get(tensor_name, {}) if bases else {}
        same_layout = {key: base.get(key) for key in layout} == layout
        key, written, differs = archive.put(
            _bytes(stored), stored.element_size(), codec, base["sha256"] if same_layout else None
        )
        tensors[tensor_name] = {**layout, "sha256": key, "was": str(tensor.dtype).removeprefix("torch.")}
        group = tensor_name.partition(".")[0]
        error = 0.0 if rounded.restored is tensor else _largest_error(rounded.restored, tensor)
        packed.errors[group] = max(packed.errors.get(group, 0.0), error)
        packed.tensors += 1
        packed.bytes_written += written
        packed.already_there += written == 0
        packed.as_difference += differs
    saved = to_json(replace(manifest, files={}, base={}))  # frozen tensors are packed too
    index = {"manifest": saved, "tensors": tensors, "delta_from": delta_from}
    if (store / f"{name}.json").exists() and archive.index(name)["tensors"] != tensors:
        raise UserError(f"{store / name}.json: another checkpoint has this name; choose another with --name")
    packed.bytes_written += archive.write_index(name, index)
    return packed


class PackedTensors(Mapping[str, Tensor]):
    """The tensors of a packed checkpoint as unpacking gives them back, each read and verified on access."""

    def __init__(self, store: Path, name: str, prefix: str = "") -> None:
        self._archive, self._prefix = TensorArchive(store), prefix
        self.entries: dict[str, dict[str, Any]] = self._archive.index(name)["tensors"]

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[self._prefix + name]
        stored = _tensor(self._archive.get(entry["sha256"]), entry["dtype"], entry["shape"])
        return restore(stored, entry).to(getattr(torch, entry["was"]))

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self.entries if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def is_like(self, name: str, tensor: Tensor) -> bool:
        """Whether there is a tensor of that name, dtype and shape."""
        entry = self.entries.get(name, {})
        size = entry.get("values_shape", entry.get("shape"))
        return size == list(tensor.shape) and entry["was"] == str(tensor.dtype).removeprefix("torch.")


def unpack(store: Path, name: str, checkpoints: Path) -> Path:
    """Write a packed checkpoint to a checkpoints folder; the result verifies. Needs memory for one checkpoint."""
    index = TensorArchive(store).index(name)
    try:
        manifest = Manifest(**index["manifest"])
    except TypeError as error:
        raise DamagedCheckpoint(f"{store / name}.json: its manifest has another version: {error}") from None
    state = dict(PackedTensors(store, name))
    target = CheckpointStore(checkpoints)
    folder = target.reserve(manifest.step, "model" if manifest.content == "model" else "step")
    target.write(folder, state, manifest)
    return folder


Codec = Literal["zstd", "zlib", "none"]


def encode(raw: bytes, base: bytes | None, item_bytes: int, codec: Codec) -> bytes:
    """Packed bytes; `base` is as long as `raw`."""
    signed, _, bits = _integer_types(item_bytes)
    data = np.frombuffer(raw, signed)
    if base is not None:
        change = data - np.frombuffer(base, signed)  # wraps around; decode reverses it
        data = (change << 1) ^ (change >> (bits - 1))
    planes = np.ascontiguousarray(data.view(np.uint8).reshape(-1, bits // 8).T).tobytes()
    if codec == "zstd":
        # Level 19 takes 100 times as long for 3 % less. Large tensors use all cores.
        threads = -1 if len(planes) > 8 << 20 else 0
        return _zstandard().ZstdCompressor(level=3, threads=threads).compress(planes)
    return zlib.compress(planes, 1) if codec == "zlib" else planes


def decode(packed: bytes, base: bytes | None, item_bytes: int, codec: Codec) -> bytes:
    """The inverse of encode. ValueError for bytes that it did not write."""
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
    signed, unsigned, bits = _integer_types(item_bytes)
    planes = np.frombuffer(packed, np.uint8).reshape(bits // 8, -1)
    data = np.ascontiguousarray(planes.T).reshape(-1).view(signed)
    if base is not None:
        folded = data.view(unsigned)
        data = np.frombuffer(base, signed) + ((folded >> 1).view(signed) ^ -(folded & 1).view(signed))
    return data.tobytes()


def _integer_types(item_bytes: int) -> tuple[np.dtype[Any], np.dtype[Any], int]:
    """The integers of an item's size; a complex number is two."""
    width = item_bytes if item_bytes < 8 else 8
    return np.dtype(f"<i{width}"), np.dtype(f"<u{width}"), 8 * width


def _zstandard():  # type: ignore[no-untyped-def]
    try:
        import zstandard
    except ImportError:
        raise UserError("zstd needs `pip install bessemer[data]`; or pass --compress zlib") from None
    return zstandard
