"""Which checkpoints stay: the rules of the spec, and the few that no rule may delete. The shelf does the deleting."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bessemer.spec.checkpoint import CheckpointSpec


@dataclass(frozen=True)
class Entry:
    """A checkpoint as retention sees it."""

    name: str
    step: int
    attempt: int
    time: float
    bytes: int
    validation_loss: float | None = None
    confirmed: bool = False


def best_of(entries: Sequence[Entry]) -> Entry | None:
    """The lowest validation loss, the earliest of equals; a loss that is not a number is no score."""
    scored = [
        (entry.validation_loss, entry)
        for entry in entries
        if entry.validation_loss is not None and math.isfinite(entry.validation_loss)
    ]
    return min(scored, key=lambda pair: pair[0])[1] if scored else None


def keep(
    entries: Sequence[Entry],
    rules: CheckpointSpec,
    newest: str,
    now: float,
    protected: Collection[str] = (),
    confirming: bool = False,
) -> set[str]:
    """Names of the checkpoints that stay, of `entries` in any order. `newest` is the one just saved.

    Never deleted: the newest, the newest confirmed, the best where the spec asks for it, and the `protected` (tagged,
    or being uploaded). While the guard is `confirming`, the oldest unconfirmed one since then stays too: it is the next
    to be confirmed, and without it frequent saves would push every candidate out before its time.

    Checkpoints of later steps than the newest go: the run went on from before them, so they are damaged or abandoned.
    """
    order = sorted(entries, key=lambda entry: (entry.step, entry.attempt))
    end = next((i for i, entry in enumerate(order) if entry.name == newest), None)
    if end is None:  # a listing that lags behind: nothing is decided on it
        return {entry.name for entry in order}
    past = order[: end + 1]
    must = {newest} | {entry.name for entry in order if entry.name in protected}
    confirmed = [i for i, entry in enumerate(past) if entry.confirmed]
    if confirmed:
        must.add(past[confirmed[-1]].name)
    if confirming:
        since = confirmed[-1] + 1 if confirmed else 0
        must |= {entry.name for entry in past[since : since + 1]}
    if rules.keep_best and (best := best_of(past)):
        must.add(best.name)
    wanted = must | {entry.name for entry in past[-rules.keep_last :]}
    if rules.keep_every and not rules.archive_model_only:
        wanted |= _first_of_each(past, rules.keep_every)
    if rules.keep_age:
        wanted |= {entry.name for entry in past if now - entry.time <= rules.keep_age}
    if rules.keep_bytes:
        total = sum(entry.bytes for entry in order if entry.name in wanted)
        for entry in past:  # the oldest go first
            if total > rules.keep_bytes and entry.name in wanted - must:
                wanted.remove(entry.name)
                total -= entry.bytes
    return wanted


def _first_of_each(past: Sequence[Entry], every: int) -> set[str]:
    """The last attempt at the first step saved in each `every` steps; saves need not fall on its multiples."""
    first: dict[int, Entry] = {}
    for entry in past:
        stretch = entry.step // every
        if stretch and (stretch not in first or first[stretch].step == entry.step):
            first[stretch] = entry
    return {entry.name for entry in first.values()}
