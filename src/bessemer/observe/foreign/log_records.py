"""What logs print without a step: the dictionaries of Hugging Face's Trainer, and progress bars with metrics.

Trainer prints `{'loss': 2.31, 'epoch': 0.16}` beside a bar `12/500 [`. tqdm draws the bar again after it printed the
dictionary, so the next bar has the step. Where no bar is in the file, or standard output was buffered, steps follow
from the epochs.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field

from bessemer.observe.foreign.builder import RunBuilder
from bessemer.observe.foreign.log_shapes import COLON_PAIRS, DICT_PAIRS
from bessemer.observe.foreign.names import SUMMARY_KEY
from bessemer.observe.foreign.text import UNITS, read_number

DICT_MARKERS = (b"{'loss'", b"{'eval_", b"'epoch'", b"'learning_rate'", b"'train_runtime'")
# Bars without a description are Trainer's own; those of `datasets` have one.
TRAINER_BAR = re.compile(r"(?:^|[}\]])\s*\d+%\|[^|]*\|\s*(\d+)/(\d+) \[")
BAR = re.compile(r"(?P<text>[A-Z][\w \[\]/]*?):?\s+\d+%\|[^|]*\|\s*(?P<n>\d+)/(?P<total>\d+) \[(?P<tail>[^\]]*)")
RICH_BAR = re.compile(r"(?P<text>Epoch \d+)/\d+\s[^\d]*\s(?P<n>\d+)/(?P<total>\d+) +[\d:-]+ • [\d:-]+ (?P<tail>.*)")
SWIFT_STEP = re.compile(r"'global_step/max_steps': '(\d+)/(\d+)'")


@dataclass
class TrainerRecords:
    """Collects printed dictionaries and gives them steps at the end."""

    rows: list[tuple[int, dict[str, float], int | None]] = field(default_factory=list)  # line, numbers, step
    totals: dict[int, int] = field(default_factory=dict)  # bars by their total, with the newest count of each
    train_total: int | None = None
    waiting: list[int] = field(default_factory=list)  # rows that wait for the next bar

    def bar(self, line: str) -> None:
        """Note the newest bar of a line."""
        for count, total in TRAINER_BAR.findall(line):
            self.totals[int(total)] = int(count)
            if self.train_total is None or self.train_total == int(total):
                for i in self.waiting:
                    number, row, _ = self.rows[i]
                    self.rows[i] = (number, row, int(count))
                self.waiting = []

    def add(self, number: int, line: str) -> bool:
        """Read the dictionary in a line; False if there is none."""
        start = line.find("{'")
        numbers = {key: read_number(text) for key, text, _ in DICT_PAIRS(line, max(0, start))}
        if start < 0 or not any(key in numbers for key in ("epoch", "loss", "learning_rate", SUMMARY_KEY)):
            return False
        if SUMMARY_KEY in numbers:
            return True
        swift = SWIFT_STEP.search(line)
        if swift:
            self.train_total = int(swift[2])
        elif self.train_total is None and "loss" in numbers and self.totals:
            self.train_total = max(self.totals)
        step = int(swift[1]) if swift else self.totals.get(self.train_total or -1)
        self.rows.append((number, numbers, step))
        if not swift:
            self.waiting.append(len(self.rows) - 1)
        return True

    def finish(self, builder: RunBuilder) -> None:
        """Add all rows, each at its step."""
        builder.total_steps = self.train_total
        steps = self._steps(builder)
        for (number, numbers, _), step in zip(self.rows, steps, strict=True):
            builder.add_row(step, numbers, number)

    def _steps(self, builder: RunBuilder) -> list[int]:
        training = [step for _, numbers, step in self.rows if "loss" in numbers]
        repeats = sum(a == b for a, b in itertools.pairwise(training))
        if training and None not in training and repeats <= len(training) // 10:
            return [step or 0 for _, _, step in self.rows]
        epochs = [numbers.get("epoch", 0.0) for _, numbers, _ in self.rows]
        last = max(epochs, default=0.0)
        if self.train_total and last > 0:
            builder.note("steps follow from the printed epochs, because the log has no progress bars in order")
            per_epoch = self.train_total / max(1, round(last + 0.49))
            return [round(epoch * per_epoch) for epoch in epochs]
        builder.note("the log has no steps: the records of training are counted instead")
        steps, count = [], 0
        for _, numbers, _ in self.rows:
            count += "loss" in numbers
            steps.append(count)
        return steps


def parse_bar(line: str) -> tuple[str, int, dict[str, float], int] | None:
    """Format, step, metrics and steps of an epoch of a progress bar that carries metrics: Lightning's or OpenRLHF's."""
    match = BAR.search(line) or RICH_BAR.search(line)
    if match is None:
        return None
    numbers = {key: read_number(text) * UNITS.get(unit, 1.0) for key, text, unit in COLON_PAIRS(match["tail"], 0)}
    numbers.pop("v_num", None)
    epoch = re.search(r"(\d+)(/\d+)?", match["text"])
    if not numbers or epoch is None:
        return None
    before = int(epoch[1]) - (1 if epoch[2] else 0)
    total = int(match["total"])
    format = "lightning" if re.match(r"Epoch \d+$", match["text"]) else "openrlhf"
    return format, before * total + int(match["n"]), numbers, total
