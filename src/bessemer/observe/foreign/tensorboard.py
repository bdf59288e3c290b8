"""TensorBoard event files, with every point: TensorBoard's own reader keeps a random sample of 10,000 a tag.

A file is a sequence of u64 length, u32 checksum, event, u32 checksum. The events are decoded here, so neither
tensorboard nor tensorflow is needed. Reads 50,000 to 100,000 scalars a second, one event in memory at a time.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.observe.foreign import wire
from bessemer.observe.foreign.builder import RunBuilder
from bessemer.observe.foreign.series import ForeignRun
from bessemer.observe.foreign.tables import flat

MARK = "tfevents"  # in the name of every event file
MOST_BYTES = 1 << 31  # of an event; a larger length is damage
SCALAR_TENSORS = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}  # data types of tensors that hold a number


def is_event_file(path: Path) -> bool:
    """Whether a file has the name and the first record of an event file."""
    if MARK not in path.name:
        return False
    with path.open("rb") as file:
        head = file.read(256)
    return len(head) >= 24 and struct.unpack_from("<Q", head)[0] < 1024 and b"brain.Event" in head


def events_of(path: Path) -> Iterator[bytes]:
    """The events of a file up to its end, or to where a writer that was killed cut it off."""
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            (size,) = struct.unpack_from("<Q", head)
            if size > MOST_BYTES:
                raise UserError(f"{path}: an event of {size:,} bytes at byte {file.tell() - 12:,}: the file is damaged")
            event = file.read(size)
            if len(event) < size or len(file.read(4)) < 4:
                return
            yield event


def read_event_files(folder: Path) -> list[ForeignRun]:
    """The run in the event files of a folder (not of its subfolders), or in one file. A later file that goes back in
    steps is a restart: its values replace the earlier ones."""
    paths = sorted(path for path in folder.iterdir() if is_event_file(path)) if folder.is_dir() else [folder]
    name = (folder if folder.is_dir() else folder.parent).resolve().name
    builder = RunBuilder("tensorboard", name)
    last_steps: dict[str, int] = {}
    for path in paths:
        try:
            _add_file(builder, path, last_steps)
        except wire.WireError as error:
            raise UserError(f"{path}: not an event file: {error}") from error
    return [builder.finish(paths)] if builder else []


def _add_file(builder: RunBuilder, path: Path, last_steps: dict[str, int]) -> None:
    earlier, is_open = dict(last_steps), True
    for event in events_of(path):
        step, summary, session = 0, b"", b""
        for number, _, value in wire.fields(event):
            if number == 2 and isinstance(value, int):
                step = wire.signed(value)
            elif number == 5:
                summary = wire.sub(value)
            elif number == 7:
                session = wire.sub(value)
        if session and wire.message(session).get(1) == 1 and earlier:  # START: later steps are written again
            builder.restart(step)
            is_open = False
        for tag, point in _scalars(builder, summary):
            if tag.endswith(" vs samples"):  # Megatron writes each metric a second time
                continue
            if tag.startswith("Train/Samples/"):
                builder.note("DeepSpeed counts samples: the steps are numbers of samples")
            if is_open and tag in earlier:
                is_open = False
                if step <= earlier[tag]:
                    builder.restart(step)
                else:
                    builder.starts.append(step)
            builder.add(tag, step, point)
            last_steps[tag] = step


def _scalars(builder: RunBuilder, summary: bytes) -> Iterator[tuple[str, float]]:
    """Tags and values of a summary's scalars. Hyper-parameters become settings."""
    for field, _, content in wire.fields(summary):
        if field != 1 or not isinstance(content, bytes):
            continue
        value = wire.message(content)
        tag = wire.text(value.get(1))
        if 2 in value:
            yield tag, wire.number(value[2])
        elif tag.endswith("/text_summary"):
            _add_text(builder, wire.sub(wire.message(wire.sub(value.get(8))).get(8)))
        elif 8 in value:
            point = _tensor_number(wire.sub(value[8]))
            if point is not None and not tag.startswith("_hparams_"):
                yield tag, point
        plugin = wire.message(wire.sub(wire.message(wire.sub(value.get(9))).get(1)))
        if wire.text(plugin.get(1)) == "hparams":
            builder.settings |= dict(_hyper_parameters(wire.sub(plugin.get(2))))


def _tensor_number(tensor: bytes) -> float | None:
    """The number in a tensor of one element."""
    content = wire.message(tensor)
    for field in (5, 6, 7, 10):  # float_val, double_val, int_val, int64_val: packed or not
        value = content.get(field)
        if isinstance(value, int):
            return float(wire.signed(value))
        if isinstance(value, bytes) and field in (5, 6) and len(value) in (4, 8):
            return wire.number(value)
    code, raw = SCALAR_TENSORS.get(int(content.get(1, 0) or 0)), wire.sub(content.get(4))  # type: ignore[arg-type]
    return float(struct.unpack(code, raw)[0]) if code and len(raw) == struct.calcsize(code) else None


def _add_text(builder: RunBuilder, text: bytes) -> None:
    """Settings that Trainer logs as JSON text."""
    try:
        content = json.loads(text)
    except ValueError:
        return  # other text, such as samples
    if isinstance(content, dict):
        builder.settings |= {key: item for key, item in flat(content) if isinstance(item, str | int | float | bool)}


def _hyper_parameters(content: bytes) -> Iterator[tuple[str, Any]]:
    session = wire.message(content).get(3)
    for number, _, entry in wire.fields(wire.sub(session)):
        if number == 1 and isinstance(entry, bytes):
            pair = wire.message(entry)
            for field, _, value in wire.fields(wire.sub(pair.get(2))):
                if field == 2:
                    yield wire.text(pair.get(1)), wire.number(value)
                elif field in (3, 4):
                    yield wire.text(pair.get(1)), wire.text(value) if field == 3 else bool(value)
