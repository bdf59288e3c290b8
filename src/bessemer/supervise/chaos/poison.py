"""A data stream in which some rows are poisoned: by position, so that replay and rollback read the poison again.

The poisoned documents lie in real files with rows, which is where a verdict must lead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bessemer.data.rows import Ints
from bessemer.data.steps import Steps
from bessemer.data.store import Origin
from bessemer.data.stream import Bans, Batch, BatchStream, DocumentShare
from bessemer.data.tokenizer import Tokenizer
from bessemer.supervise.chaos.fault import Fault

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

    def replace(self, steps: Steps | None = None, banned: Bans | None = None) -> PoisonedStream:
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
