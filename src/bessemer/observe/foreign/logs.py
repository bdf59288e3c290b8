"""Plain logs of training: the framework is recognised by the shape of its lines.

The file is read in blocks, once: the work grows with its size, the memory with the points only, 24 bytes each. A line
with 12 metrics takes about 60 µs on a busy core, any other about 5 µs, so 1 GB takes one to three minutes. A log of no
known framework is read to its end first, at about 5 µs a line, before it is refused or read as plain text.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

from bessemer.errors import UserError
from bessemer.observe.foreign.builder import RunBuilder, StepCounter
from bessemer.observe.foreign.log_records import DICT_MARKERS, TrainerRecords, parse_bar
from bessemer.observe.foreign.log_shapes import (
    ANY_EPOCH,
    COMPANIONS,
    OVERFLOW,
    SETTING,
    SHAPES,
    Shape,
    parse_any,
    parse_shape,
)
from bessemer.observe.foreign.series import ForeignRun
from bessemer.observe.foreign.tables import COUNTED_ON
from bessemer.observe.foreign.text import lines_of
from bessemer.run.journal import to_number

ANY_HINT = re.compile(rb"tep|iter|oss|batch|\{'|it/s|s/it")  # matches in every line with metrics
ENOUGH = 20  # lines of one framework after which a log counts as recognised
RANK = re.compile(rb"^\s*\[?(?:rank ?|default)?(\d+)\]?: |\[[Rr]ank[ _-]?(\d+)\]")
RANK_STARTS = frozenset(bytes([code]) for code in b" \t\v\f[rd0123456789")  # of a line that begins with a rank
SKIPPED, NAN_COUNT = "number of skipped iterations", "number of nan iterations"
LOG_FORMATS = tuple(dict.fromkeys([*(shape.format for shape in SHAPES), "hf_log", "lightning", "openrlhf", "text_log"]))


def log_format(path: Path) -> str | None:
    """The framework that wrote a log: the one whose lines are the most. None if no line has a step and a metric."""
    counts: Counter[str] = Counter()
    for _, line in lines_of(path):
        format = _format_of_line(line)
        if format:
            counts[format] += 1
            if counts[format] >= ENOUGH and format not in ("text_log", *COMPANIONS):
                break
    named = Counter({format: count for format, count in counts.items() if format not in ("text_log", *COMPANIONS)})
    if named and 10 * named.most_common(1)[0][1] >= counts["text_log"]:
        return named.most_common(1)[0][0]
    if counts["text_log"]:  # DeepSpeed prints no loss, so scripts do
        return "text_log"
    return counts.most_common(1)[0][0] if counts else None


def _format_of_line(line: bytes) -> str | None:
    if ANY_HINT.search(line) is None:
        return None
    for shape in SHAPES:
        if shape.may_match(line) and shape.step.search(line.decode("utf-8", "replace")):
            return shape.format
    if any(marker in line for marker in DICT_MARKERS):
        return "hf_log" if TrainerRecords().add(0, line.decode("utf-8", "replace")) else None
    if b"it/s" in line or b"s/it" in line:
        bar = parse_bar(line.decode("utf-8", "replace"))
        return bar[0] if bar else None
    if b"loss" in line.lower() and parse_any(line.decode("utf-8", "replace")):
        return "text_log"
    return None


def read_log(path: Path, format: str | None = None) -> list[ForeignRun]:
    """The run of a log. `format` is what `log_format` recognised."""
    format = format or log_format(path)
    if format is None:
        raise UserError(f"{path}: no line with a step and a loss; looked for the lines of {', '.join(LOG_FORMATS)}")
    reader = _LogReader(path, format)
    for number, line in lines_of(path):
        reader.line(number, line)
    return [reader.finish()]


class _LogReader:
    def __init__(self, path: Path, format: str) -> None:
        self.path, self.format = path, format
        self.shapes = [shape for shape in SHAPES if shape.format in (format, *COMPANIONS)]
        means = format == "hf_log" or any(shape.means for shape in self.shapes if shape.format == format)
        self.builder = RunBuilder(format, path.stem, means=means, increments=[SKIPPED])
        self.records = TrainerRecords()
        self.counter = StepCounter()
        self.rank: bytes | None = None  # of the process whose lines are read
        self.last_step, self.overflows = 0, 0
        self.block: tuple[int, re.Pattern[str]] | None = None
        self.repeated: dict[str, float] = {}
        self.loss_key: str | None = None

    def line(self, number: int, line: bytes) -> None:
        if self.block and self._block_line(number, line):
            return
        for shape in self.shapes:
            if not shape.may_match(line) or not self._is_first_rank(line):
                continue
            if self._shape_line(number, shape, line.decode("utf-8", "replace")):
                return
        if self.format == "hf_log":
            self._trainer_line(number, line)
        elif self.format in ("lightning", "openrlhf"):
            if b"it/s" in line or b"s/it" in line:
                self._bar_line(number, line.decode("utf-8", "replace"))
        elif self.format == "text_log" and b"loss" in line.lower() and self._is_first_rank(line):
            self._any_line(number, line.decode("utf-8", "replace"))
        if b" ..." in line and (match := SETTING.match(line.decode("utf-8", "replace"))):
            text = match[2].strip()
            value = to_number(text)
            self.builder.settings.setdefault(match[1], text if value is None else value)
        elif b"OVERFLOW" in line and (match := OVERFLOW.search(line.decode("utf-8", "replace"))):
            self.overflows += 1
            self.builder.add("loss_scale", self.last_step + self.overflows, float(match[1]), number)

    def _any_line(self, number: int, line: str) -> None:
        row = parse_any(line)
        if row:
            step, numbers, total = row
            match = ANY_EPOCH.search(line)
            step = self.counter(float(match[1]) if match else None, step, total)
            self._add(number, step, numbers, None if self.counter.counts_on else total)

    def _is_first_rank(self, line: bytes) -> bool:
        """Several ranks may print the same step; the first that printed one is read."""
        if line[:1] not in RANK_STARTS and b"ank" not in line:
            return True
        match = RANK.search(line)
        if match is None:
            return True
        rank = match[1] or match[2]
        self.rank = self.rank or rank
        return rank == self.rank

    def _shape_line(self, number: int, shape: Shape, line: str) -> bool:
        row = parse_shape(shape, line)
        if row is None:
            return False
        step, numbers, total = row
        if shape.block:
            self.block = (step, shape.block)
            self.builder.total_steps = total or self.builder.total_steps
            return True
        if shape.repeats:
            numbers = {key: value for key, value in numbers.items() if self._is_new(key, value)}
        if shape.format == "megatron" and SKIPPED in numbers:
            self._missing_loss(step, numbers)
        self._add(number, step, numbers, total)
        return True

    def _is_new(self, key: str, value: float) -> bool:
        """Whether a validation metric differs from the one that was printed last: bars repeat it at every step."""
        if not key.lower().startswith(("val", "eval", "test")):
            return True
        is_new = self.repeated.get(key) != value
        self.repeated[key] = value
        return is_new

    def _missing_loss(self, step: int, numbers: dict[str, float]) -> None:
        """Megatron leaves out a loss that is not a number: without one, unless all steps were skipped, it was NaN."""
        loss = next((key for key in numbers if key.endswith("loss")), None)
        if loss:
            self.loss_key = loss
        elif numbers.get(NAN_COUNT) or numbers[SKIPPED] < max(1, step - self.last_step):
            numbers[self.loss_key or "lm loss"] = math.nan
            self.builder.note("Megatron prints no loss where it is NaN: such steps have the value NaN")

    def _add(self, number: int, step: int, numbers: dict[str, float], total: int | None = None) -> None:
        self.builder.add_row(step, numbers, number)
        self.builder.total_steps = total or self.builder.total_steps
        self.last_step, self.overflows = step, 0

    def _block_line(self, number: int, line: bytes) -> bool:
        assert self.block
        step, pattern = self.block
        match = pattern.match(line.decode("utf-8", "replace"))
        if match is None:
            self.block = None
            return False
        self.builder.add(match[1], step, float(match[2].replace(",", "")), number)
        return True

    def _trainer_line(self, number: int, line: bytes) -> None:
        if b"%|" in line:
            self.records.bar(line.decode("utf-8", "replace"))
        if any(marker in line for marker in DICT_MARKERS):
            self.records.add(number, line.decode("utf-8", "replace"))

    def _bar_line(self, number: int, line: str) -> None:
        bar = parse_bar(line)
        if bar:
            numbers = {key: value for key, value in bar[2].items() if self._is_new(key, value)}
            self._add(number, bar[1], numbers)

    def finish(self) -> ForeignRun:
        if self.format == "hf_log":
            self.records.finish(self.builder)
        if self.counter.counts_on:
            self.builder.total_steps = None
            self.builder.note(COUNTED_ON)
        if self.format == "nanochat":
            self.builder.note("nanochat prints an exponential moving average of the loss")
        if self.format == "torchtitan":
            self.builder.note("tps and memory are of one device")
        return self.builder.finish([self.path])
