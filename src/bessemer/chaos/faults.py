"""The kinds of faults: what each does, how it must be noticed, and which verdict it deserves.

A remote tier that fails: the local disk under a URL of its own, with requests that break now and then.

A data stream in which some rows are poisoned: by position, so that replay and rollback read the poison again.

The poisoned documents lie in real files with rows, which is where a verdict must lead.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

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
    """`signs` are the events that count as detection, up to `within` steps after the fault; `verdicts` those that are
    right, none where no trial is due. `restarts`: the process dies of it."""

    about: str
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
    """One fault of one run: at which step, and the numbers that make it differ from the next."""

    kind: str
    step: int
    seed: int
    details: dict[str, Any] = field(default_factory=dict)


def parse_kinds(text: str) -> list[str]:
    """`all`, or kinds with commas between; a prefix such as `poison` stands for all that begin with it."""
    if text == "all":
        return list(KINDS)
    found: list[str] = []
    for word in text.split(","):
        matches = [kind for kind in KINDS if kind == word or kind.startswith(f"{word}-")]
        if not matches:
            raise UserError(f"--faults {word!r}: there is no such fault; there are {', '.join(KINDS)}, or all")
        found += matches
    return list(dict.fromkeys(found))


def lay_out(kinds: Sequence[str], count: int, first: int, apart: int, last: int, seed: int) -> list[list[Fault]]:
    """`count` faults over as many runs as it takes, every kind as often as the others, `apart` steps between two in a
    run, at most one in a run that ends the process."""
    rng = random.Random(seed)
    wanted = [kinds[i % len(kinds)] for i in range(count)]
    rng.shuffle(wanted)
    runs: list[list[Fault]] = []
    slots = list(range(first, last, apart))
    if not slots:
        raise UserError(f"the run is too short for faults: {last} steps, the first fault at {first}")
    # Those that restart a run are spread over the runs first, the others fill up.
    deadly = [kind for kind in wanted if KINDS[kind].restarts]
    others = [kind for kind in wanted if not KINDS[kind].restarts]
    while deadly or others:
        chosen = [deadly.pop()] if deadly else []
        chosen += [others.pop() for _ in range(min(len(slots) - len(chosen), len(others)))]
        rng.shuffle(chosen)
        steps = sorted(rng.sample(slots, len(chosen)))
        runs.append(
            [
                Fault(kind, step + rng.randrange(apart // 3), rng.randrange(2**31))
                for kind, step in zip(chosen, steps, strict=True)
            ]
        )
    return runs


PROTOCOL = "flaky"
BREAKS = 0.3  # of the requests


class FlakyFiles(LocalFileSystem):
    """While `failing`, three of ten requests that move data raise, before or after they had an effect."""

    protocol = PROTOCOL
    failing: ClassVar[bool] = False
    broken: ClassVar[int] = 0
    _dice: ClassVar[random.Random] = random.Random(0)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        text = str(path)
        return super()._strip_protocol(text.removeprefix(f"{PROTOCOL}://"))

    def _maybe(self) -> None:
        if FlakyFiles.failing and self._dice.random() < BREAKS:
            FlakyFiles.broken += 1
            raise OSError("the storage did not answer")

    def put_file(self, *args: Any, **kwargs: Any) -> Any:
        self._maybe()
        result = super().put_file(*args, **kwargs)
        self._maybe()
        return result

    def get_file(self, *args: Any, **kwargs: Any) -> Any:
        self._maybe()
        return super().get_file(*args, **kwargs)

    def ls(self, *args: Any, **kwargs: Any) -> Any:
        self._maybe()
        return super().ls(*args, **kwargs)


def register() -> None:
    fsspec.register_implementation(PROTOCOL, FlakyFiles, clobber=True)


if TYPE_CHECKING:
    from collections.abc import Iterable

FIRST_DOCUMENT = 10**12  # numbers of poisoned documents, beyond those of any store


@dataclass(frozen=True)
class Poison:
    """One row: its tokens and targets, and where the document is."""

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
    """As BatchStream, with `poison` at some positions."""

    poison: dict[int, Poison]

    @classmethod
    def of(cls, stream: BatchStream, poison: dict[int, Poison]) -> PoisonedStream:
        made = cls(stream.sources, stream.order, stream.sequence_length, stream.steps, stream.banned, stream.transforms)
        made.poison = poison
        return made

    def replace(self, steps: StepPositions | None = None, banned: Bans | None = None) -> PoisonedStream:
        return PoisonedStream.of(super().replace(steps, banned), self.poison)

    def _banned_at(self, position: int, source: int) -> bool:
        since = self.banned.get((self.names[source], self.poison[position].origin.document))
        return since is not None and position >= since

    def _assemble(self, positions: Ints) -> Batch:
        batch = super()._assemble(positions)
        for row, position in enumerate(positions.tolist()):
            if found := self.poison.get(position):
                batch.tokens[row], batch.targets[row] = found.tokens, found.targets
                batch.documents[row] = 0
                batch.weights[row] = 0.0 if self._banned_at(position, int(batch.sources[row])) else 1.0
        return batch

    def step_count(self, step: int) -> float:
        positions = self.rows(step).tolist()
        if not any(position in self.poison for position in positions):
            return super().step_count(step)
        return float(self._assemble(self.rows(step)).weights.sum(dtype=np.float64))

    def locate(self, batch: Batch) -> list[tuple[int, int, Origin]]:
        bad = {row: self.poison[p] for row, p in enumerate(batch.positions.tolist()) if p in self.poison}
        kept = [entry for entry in super().locate(batch) if entry[0] not in bad]
        return sorted([*kept, *((row, 0, found.origin) for row, found in bad.items())], key=lambda entry: entry[:2])

    def origins(self, step: int) -> list[DocumentShare]:
        shares = []
        bad = [position for position in self.rows(step).tolist() if position in self.poison]
        for share in super().origins(step):
            rows = [row for row in share.rows if row not in bad]
            if rows:
                shares.append(share)
        sources = dict(zip(self.rows(step).tolist(), self._resolve(self.rows(step))[0].tolist(), strict=True))
        for position in bad:
            origin = self.poison[position].origin
            shares.append(
                DocumentShare(
                    self.names[sources[position]], origin.file, origin.row, origin.document_id,
                    self.sequence_length, [position], origin.document,
                )
            )  # fmt: skip
        return sorted(shares, key=lambda share: -share.tokens)


def make_poison(stream: BatchStream, faults: Iterable[Fault], tokenizer: Tokenizer, folder: Path) -> dict[int, Poison]:
    """Half of the rows of each faulty step, as documents in files under `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[int, Poison] = {}
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
                # Repeated, where a tokenizer makes so little of the text.
                ids = np.resize(np.array(tokenizer.encode(text), np.int64), length + 1)
                tokens, targets = ids[:length], ids[1 : length + 1]
            number = len(texts)
            texts.append(text)
            document = FIRST_DOCUMENT + len(found)
            origin = Origin(str(path.resolve()), number, f"{fault.kind}-{fault.step}-{number}", document, 0, length)
            found[position] = Poison(tokens, targets, origin)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return found
