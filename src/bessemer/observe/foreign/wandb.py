"""Files that Weights & Biases writes offline: `wandb/offline-run-*/run-ID.wandb`.

After 7 bytes of header the file has blocks of 32 KiB with records in parts: u32 checksum, u16 length, u8 type (1 all
of a record, 2 first, 3 middle, 4 last part). A record is a protocol buffer of wandb; it is decoded here, so wandb is
not needed. Reads about 50,000 numbers a second, one record in memory at a time.
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
from bessemer.observe.foreign.names import STEP_KEYS
from bessemer.observe.foreign.series import ForeignRun
from bessemer.observe.foreign.tables import flat
from bessemer.run.journal import to_number

MAGIC = b":W&B\xe1\xbe\x00"
BLOCK, HEADER = 32768, 7
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4
HISTORY, CONFIG, RUN = 2, 5, 17  # fields of wandb's Record


def is_wandb_file(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def records_of(path: Path) -> Iterator[bytes]:
    """The records of a file up to its end, or to where a writer that was killed cut it off."""
    with path.open("rb") as file:
        file.seek(len(MAGIC))
        parts: list[bytes] = []
        while True:
            left = BLOCK - file.tell() % BLOCK
            if left < HEADER:  # padding
                file.seek(left, 1)
            head = file.read(HEADER)
            if len(head) < HEADER:
                return
            _, size, part_type = struct.unpack("<IHB", head)
            data = file.read(size)
            if len(data) < size:
                return
            if part_type not in (WHOLE, FIRST, MIDDLE, LAST):
                raise UserError(f"{path}: a record of type {part_type} at byte {file.tell() - size:,}: it is damaged")
            parts = [data] if part_type in (WHOLE, FIRST) else [*parts, data]
            if part_type in (WHOLE, LAST):
                yield b"".join(parts)
                parts = []


def read_wandb_file(path: Path) -> list[ForeignRun]:
    """The run of a file. Its steps are those of a step metric, such as `train/global_step`, else W&B's own count."""
    builder = RunBuilder("wandb", path.stem.removeprefix("run-"))
    try:
        for number, record in enumerate(records_of(path), 1):
            for field, _, value in wire.fields(record):
                if field == HISTORY:
                    _add_history(builder, wire.sub(value), number)
                elif field == CONFIG:
                    builder.settings |= _config(wire.sub(value))
                elif field == RUN:
                    run = wire.message(wire.sub(value))
                    builder.settings |= _config(wire.sub(run.get(4)))
                    builder.name = wire.text(run.get(8)) or wire.text(run.get(1)) or builder.name
    except wire.WireError as error:
        raise UserError(f"{path}: not a file of wandb: {error}") from error
    return [builder.finish([path])] if builder else []


def _add_history(builder: RunBuilder, history: bytes, line: int) -> None:
    row: dict[str, float] = {}
    own_step = None
    for field, _, value in wire.fields(history):
        if field == 1 and (pair := _item(wire.sub(value))) is not None:
            key, item = pair
            for name, number in flat({key: item}) if isinstance(item, dict) else [(key, item)]:
                metric = None if isinstance(number, bool) else to_number(number)
                if metric is not None and not (name.startswith("_") and name != "_step"):
                    row[name] = metric
        elif field == 2:
            count = wire.message(wire.sub(value)).get(1, 0)
            own_step = wire.signed(count) if isinstance(count, int) else None
    steps = [row[key] for key in STEP_KEYS if key in row and abs(row[key]) < 2**53]
    step = steps[0] if steps else own_step
    if step is not None:
        builder.add_row(int(step), {key: metric for key, metric in row.items() if key not in STEP_KEYS}, line)


def _item(item: bytes) -> tuple[str, Any] | None:
    """Key and value of an item of a record: a typed value, or JSON."""
    keys: list[str] = []
    result: Any = None
    for field, _, value in wire.fields(item):
        if field in (1, 2):
            keys.append(wire.text(value))
        elif field == 5 and isinstance(value, int):
            result = wire.zigzag(value)
        elif field == 6:
            result = wire.number(value)
        elif field in (7, 8, 16):
            text = wire.text(value)
            try:
                result = text if field == 7 else json.loads(text)
            except ValueError:
                result = None
    return ("/".join(keys), result) if keys else None


def _config(config: bytes) -> dict[str, Any]:
    """Settings in a record of config, without what wandb adds about itself."""
    settings: dict[str, Any] = {}
    for field, _, value in wire.fields(config):
        pair = _item(wire.sub(value)) if field == 1 else None
        if pair and not pair[0].startswith("_"):
            nested = flat({pair[0]: pair[1]})
            settings |= {key: item for key, item in nested if isinstance(item, str | int | float | bool)}
    return settings
