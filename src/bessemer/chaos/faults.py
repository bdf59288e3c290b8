"""The faults of `bessemer chaos`: what each does, how it must be detected, and which verdict is right. Also the flaky
remote storage and the poisoned data stream that some of them need.

Rows are poisoned by position, so that replay and rollback read the poison again. Poisoned documents are rows of real
files, to which a verdict must lead.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from bessemer.data.store.token_store import Origin
from bessemer.data.stream.batches import Bans, Batch, BatchStream, DocumentShare
from bessemer.data.stream.order import StepPositions
from bessemer.data.stream.rows import Ints
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError


@dataclass(frozen=True)
class FaultKind:
    """`signs` are the events that count as detection, up to `within` steps after the fault. `verdicts` are the right
    ones, none if no trial is due. `restarts`: the fault ends the process."""

    description: str
    signs: tuple[str, ...]
    within: int = 8
    verdicts: tuple[str, ...] = ()
    restarts: bool = False


STEP = ("veto", "rollback")
KINDS: dict[str, FaultKind] = {
    "poison-random": FaultKind("documents of random bytes", STEP, 4, ("data",)),
    "poison-repeat": FaultKind("documents of one short pattern repeated", STEP, 4, ("data",)),
    "poison-labels": FaultKind("documents whose targets are shuffled", STEP, 4, ("data",)),
    "lr-jump": FaultKind("the learning rate jumps for a step", (*STEP, "alarm:learning_rate"), 16, ("learning rate",)),
    "nan": FaultKind("NaN in the output of a layer", STEP, 1, ("hardware",)),
    "inf": FaultKind("Inf in the output of a layer", STEP, 1, ("hardware",)),
    "overflow": FaultKind("a layer overflows in bf16 on one batch", STEP, 1, ("numerics",)),
    "flip-weight": FaultKind("a flipped exponent bit in a weight", STEP, 2, ("hardware",)),
    "flip-gradient": FaultKind("a flipped exponent bit in a gradient", STEP, 1, ("hardware",)),
    "hang": FaultKind("a step that does not end for a while", ("hang",), 2),
    "clock-jump": FaultKind("the wall clock jumps by an hour", ("alarm:clock_jump",), 16),
    "full-disk": FaultKind("the disk refuses a save", ("save_failed",), 64),
    "flaky-storage": FaultKind("the remote tier fails every few requests", ("uploaded:retried", "upload_failed"), 64),
    "sigkill": FaultKind("the process is killed", ("started",), 10**9, restarts=True),
    "sigterm": FaultKind("the process is asked to end", ("interrupted",), 2, restarts=True),
    "truncated-checkpoint": FaultKind(
        "the newest checkpoint loses its end, then the process is killed", ("checkpoint_passed_over", "fetched"), 10**9,
        restarts=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One fault of one run; `seed` varies it."""

    kind: str
    step: int
    seed: int
    details: dict[str, Any] = field(default_factory=dict)


def parse_kinds(text: str) -> list[str]:
    """`all`, or a comma-separated list; a prefix such as `poison` selects all kinds that begin with it."""
    if text == "all":
        return list(KINDS)
    selected: list[str] = []
    for word in text.split(","):
        matches = [kind for kind in KINDS if kind == word or kind.startswith(f"{word}-")]
        if not matches:
            raise UserError(f"--faults {word!r}: there is no such fault; there are {', '.join(KINDS)}, or all")
        selected += matches
    return list(dict.fromkeys(selected))


def plan_faults(kinds: Sequence[str], count: int, first: int, distance: int, last: int, seed: int) -> list[list[Fault]]:
    """Distributes `count` faults over runs: all kinds equally often, `distance` steps between two in a run, and at most
    one per run that ends the process."""
    rng = random.Random(seed)
    wanted = [kinds[i % len(kinds)] for i in range(count)]
    rng.shuffle(wanted)
    runs: list[list[Fault]] = []
    slots = list(range(first, last, distance))
    if not slots:
        raise UserError(f"the run is too short for faults: {last} steps, the first fault at {first}")
    # Faults that restart a run are distributed first, the others fill up.
    deadly = [kind for kind in wanted if KINDS[kind].restarts]
    others = [kind for kind in wanted if not KINDS[kind].restarts]
    while deadly or others:
        chosen = [deadly.pop()] if deadly else []
        chosen += [others.pop() for _ in range(min(len(slots) - len(chosen), len(others)))]
        rng.shuffle(chosen)
        steps = sorted(rng.sample(slots, len(chosen)))
        runs.append(
            [
                Fault(kind, step + rng.randrange(distance // 3), rng.randrange(2**31))
                for kind, step in zip(chosen, steps, strict=True)
            ]
        )
    return runs


PROTOCOL = "flaky"
FAILURE_RATE = 0.3  # of requests


class FlakyFiles(LocalFileSystem):
    """The local disk under its own URL. While `failing`, requests that move data fail at FAILURE_RATE, before or after
    they took effect."""

    protocol = PROTOCOL
    failing: ClassVar[bool] = False
    broken: ClassVar[int] = 0
    _dice: ClassVar[random.Random] = random.Random(0)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        text = str(path)
        return super()._strip_protocol(text.removeprefix(f"{PROTOCOL}://"))

    def _maybe_fail(self) -> None:
        if FlakyFiles.failing and self._dice.random() < FAILURE_RATE:
            FlakyFiles.broken += 1
            raise OSError("the storage did not answer")

    def put_file(self, *args: Any, **kwargs: Any) -> Any:
        self._maybe_fail()
        result = super().put_file(*args, **kwargs)
        self._maybe_fail()
        return result

    def get_file(self, *args: Any, **kwargs: Any) -> Any:
        self._maybe_fail()
        return super().get_file(*args, **kwargs)

    def ls(self, *args: Any, **kwargs: Any) -> Any:
        self._maybe_fail()
        return super().ls(*args, **kwargs)


def register_flaky_storage() -> None:
    fsspec.register_implementation(PROTOCOL, FlakyFiles, clobber=True)


FIRST_DOCUMENT = 10**12  # index of the first poisoned document, beyond those of any store


@dataclass(frozen=True)
class Poison:
    """One poisoned row: its tokens and targets, and the origin of its document."""

    tokens: Ints
    targets: Ints
    origin: Origin


def poison_text(kind: str, rng: np.random.Generator, size: int) -> str:
    """Text of about `size` characters."""
    if kind == "poison-repeat":
        pattern = "".join(chr(c) for c in rng.integers(33, 127, int(rng.integers(2, 6))))
        return pattern * (size // len(pattern) + 1)
    return "".join(chr(c) for c in rng.integers(32, 0x250, size))


class PoisonedStream(BatchStream):
    """A BatchStream with `poison` at some positions."""

    poison: dict[int, Poison]

    @classmethod
    def of(cls, stream: BatchStream, poison: dict[int, Poison]) -> PoisonedStream:
        copy = cls(stream.sources, stream.order, stream.sequence_length, stream.steps, stream.banned, stream.transforms)
        copy.poison = poison
        return copy

    def replace(self, steps: StepPositions | None = None, banned: Bans | None = None) -> PoisonedStream:
        return PoisonedStream.of(super().replace(steps, banned), self.poison)

    def _banned_at(self, position: int, source: int) -> bool:
        since = self.banned.get((self.names[source], self.poison[position].origin.document))
        return since is not None and position >= since

    def _assemble(self, positions: Ints) -> Batch:
        batch = super()._assemble(positions)
        for row, position in enumerate(positions.tolist()):
            if poison := self.poison.get(position):
                batch.tokens[row], batch.targets[row] = poison.tokens, poison.targets
                batch.documents[row] = 0
                batch.weights[row] = 0.0 if self._banned_at(position, int(batch.sources[row])) else 1.0
        return batch

    def step_count(self, step: int) -> float:
        positions = self.rows(step).tolist()
        if not any(position in self.poison for position in positions):
            return super().step_count(step)
        return float(self._assemble(self.rows(step)).weights.sum(dtype=np.float64))

    def locate(self, batch: Batch) -> list[tuple[int, int, Origin]]:
        poisoned = {row: self.poison[p] for row, p in enumerate(batch.positions.tolist()) if p in self.poison}
        entries = [entry for entry in super().locate(batch) if entry[0] not in poisoned]
        entries += [(row, 0, poison.origin) for row, poison in poisoned.items()]
        return sorted(entries, key=lambda entry: entry[:2])

    def origins(self, step: int) -> list[DocumentShare]:
        poisoned = [position for position in self.rows(step).tolist() if position in self.poison]
        shares = [share for share in super().origins(step) if any(row not in poisoned for row in share.rows)]
        sources = dict(zip(self.rows(step).tolist(), self._resolve(self.rows(step))[0].tolist(), strict=True))
        for position in poisoned:
            origin = self.poison[position].origin
            shares.append(
                DocumentShare(
                    self.names[sources[position]], origin.file, origin.row, origin.document_id,
                    self.sequence_length, [position], origin.document,
                )
            )  # fmt: skip
        return sorted(shares, key=lambda share: -share.tokens)


def make_poison(stream: BatchStream, faults: Iterable[Fault], tokenizer: Tokenizer, folder: Path) -> dict[int, Poison]:
    """Poisons half of the rows of each faulty step; the documents are written to files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    poison: dict[int, Poison] = {}
    for fault in faults:
        rng = np.random.default_rng(fault.seed)
        path, length = folder / f"{fault.kind}-{fault.step}.jsonl", stream.sequence_length
        texts: list[str] = []
        positions = stream.rows(fault.step)
        for position in positions[: max(1, positions.size // 2)].tolist():
            text = poison_text(fault.kind, rng, 8 * length)
            if fault.kind == "poison-labels":
                row = stream._assemble(np.array([position]))
                tokens, targets = row.tokens[0].copy(), rng.permutation(row.targets[0])
                text = tokenizer.decode(targets.tolist())
            else:
                # The text repeats if it has too few tokens.
                ids = np.resize(np.array(tokenizer.encode(text), np.int64), length + 1)
                tokens, targets = ids[:length], ids[1 : length + 1]
            number = len(texts)
            texts.append(text)
            document = FIRST_DOCUMENT + len(poison)
            origin = Origin(str(path.resolve()), number, f"{fault.kind}-{fault.step}-{number}", document, 0, length)
            poison[position] = Poison(tokens, targets, origin)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return poison
