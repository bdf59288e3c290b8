"""A Hugging Face model folder, written one tensor at a time: a 70B model passes through the memory of its largest one.

All goes to a folder beside the target, which takes the target's name when it is complete and on the disk: a kill
leaves `NAME.partial-HOST-PID` without a config.json, never half a model under its name.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from bessemer.errors import UserError
from bessemer.model.families.folder import DTYPES, INDEX, SINGLE, told
from bessemer.storage import commit_folder, sync_path

Planned = tuple[str, tuple[int, ...], torch.dtype]
Plan = Sequence[Planned]
Tensors = Iterable[tuple[str, Tensor]]
Files = Mapping[str, Mapping[str, Any] | str | Path]


def write_folder(
    path: Path, plan: Plan, tensors: Tensors, files: Files, shard_bytes: int = 5_000_000_000, overwrite: bool = False
) -> None:
    """Write the planned tensors, taken one by one in the plan's order, and the other files by name.

    A file is JSON, text, or a path to copy, such as those of `Folder.tokenizer_files`. The same input gives the same
    bytes. On an exception, also one of `tensors`, nothing remains.
    """
    target = path.resolve()  # where a link leads
    _check_target(target, overwrite)
    shards = _divide(plan, shard_bytes)
    names, total_bytes = {name: file for file, items in shards.items() for name, _, _ in items}, sum(map(_bytes, plan))
    assert len(names) == len(plan) and "config.json" in files
    if len(shards) > 1:
        files = {INDEX: {"metadata": {"total_size": total_bytes}, "weight_map": names}} | dict(files)
    partial = target.with_name(f"{target.name}.partial-{socket.gethostname()}-{os.getpid()}")
    with told(target, "written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(target.parent).free) < total_bytes:
            short = f"needs {total_bytes / 1e9:.1f} GB, the disk has {free / 1e9:.1f}"
            raise UserError(f"{target}: {short}; free some or name another place")
        shutil.rmtree(partial, ignore_errors=True)  # in containers every process may have the same number
        partial.mkdir()
    try:
        source = iter(tensors)
        for file, items in shards.items():
            _write_shard(partial / file, items, source)
        if (more := next(source, None)) is not None:
            raise ValueError(f"{more[0]} is not in the plan")
        with told(target, "written"):
            for name in sorted(files, key=lambda name: (name == "config.json", name)):
                _write(partial / name, files[name])
            commit_folder(partial, target, overwrite=overwrite)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # not there any more when all went well


def _write_shard(path: Path, items: Plan, source: Iterator[tuple[str, Tensor]]) -> None:
    header, starts = _header(items)
    with path.open("wb") as out:
        out.write(header)
        for item in items:  # nothing here keeps a tensor while the next one is made
            _write_tensor(out, starts[item[0]], item, *next(source, ("nothing", torch.empty(0))))
    sync_path(path)


def _write_tensor(out: BinaryIO, start: int, planned: Planned, name: str, tensor: Tensor) -> None:
    if (name, tuple(tensor.shape), tensor.dtype) != planned:
        raise ValueError(f"planned {planned}, given {name}, {tuple(tensor.shape)}, {tensor.dtype}")
    with told(Path(out.name), "written"):
        out.seek(start)
        out.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _check_target(path: Path, overwrite: bool) -> None:
    if path.exists() and (not path.is_dir() or path.is_mount()):
        raise UserError(f"{path}: is {'a mount point' if path.is_dir() else 'a file'}; name a folder inside one")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise UserError(f"{path}: is not empty; name another folder, or ask to overwrite it")
        if not (path / "config.json").exists():  # a slip would delete somebody's work
            raise UserError(f"{path}: is not empty and not a model, so it is not overwritten; name another folder")


def _bytes(item: Planned) -> int:
    return math.prod(item[1]) * item[2].itemsize


def _divide(plan: Plan, shard_bytes: int) -> dict[str, list[Planned]]:
    """Shards by file name: in the plan's order, each as full as it gets; a tensor larger than one has its own."""
    shards: list[list[Planned]] = []
    room = -1
    for item in plan:
        if _bytes(item) > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(item)
        room -= _bytes(item)
    pattern = "model-{:05}-of-{:05}.safetensors" if len(shards) > 1 else SINGLE
    return {pattern.format(number, len(shards)): items for number, items in enumerate(shards, start=1)}


def _header(items: Plan) -> tuple[bytes, dict[str, int]]:
    """A file's first bytes, and where each tensor begins: larger items first, so that all are aligned when mapped."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    kinds, end = {dtype: kind for kind, dtype in DTYPES.items()}, 0
    for name, shape, dtype in sorted(items, key=lambda item: -item[2].itemsize):
        begin, end = end, end + _bytes((name, shape, dtype))
        header[name] = {"dtype": kinds[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    starts = {name: 8 + len(raw) + header[name]["data_offsets"][0] for name, _, _ in items}
    return len(raw).to_bytes(8, "little") + raw, starts


def _write(path: Path, content: Mapping[str, Any] | str | Path) -> None:
    if isinstance(content, Mapping):
        content = json.dumps(content, indent=2, sort_keys=True) + "\n"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content.read_bytes())
    sync_path(path)
