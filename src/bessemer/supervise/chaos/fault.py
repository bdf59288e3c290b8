"""The kinds of faults: what each does, how it must be noticed, and which verdict it deserves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bessemer.errors import UserError


@dataclass(frozen=True)
class Kind:
    """`signs` are the events that count as detection, up to `within` steps after the fault; `verdicts` those that are
    right, none where no trial is due. `restarts`: the process dies of it."""

    about: str
    signs: tuple[str, ...]
    within: int = 8
    verdicts: tuple[str, ...] = ()
    restarts: bool = False


STEP = ("veto", "rollback")
KINDS: dict[str, Kind] = {
    "poison-random": Kind("documents of random bytes", STEP, 4, ("data",)),
    "poison-repeat": Kind("documents of one short pattern repeated", STEP, 4, ("data",)),
    "poison-labels": Kind("documents whose targets are shuffled", STEP, 4, ("data",)),
    "lr-jump": Kind("the learning rate jumps for a step", (*STEP, "alarm:learning_rate"), 16, ("learning rate",)),
    "nan": Kind("NaN in the output of a layer", STEP, 1, ("hardware",)),
    "inf": Kind("Inf in the output of a layer", STEP, 1, ("hardware",)),
    "overflow": Kind("a layer overflows in bf16 on one batch", STEP, 1, ("numerics",)),
    "flip-weight": Kind("a flipped exponent bit in a weight", STEP, 2, ("hardware",)),
    "flip-gradient": Kind("a flipped exponent bit in a gradient", STEP, 1, ("hardware",)),
    "hang": Kind("a step that does not end for a while", ("hang",), 2),
    "clock-jump": Kind("the wall clock jumps by an hour", ("alarm:clock_jump",), 16),
    "full-disk": Kind("the disk refuses a save", ("save_failed",), 64),
    "flaky-storage": Kind("the remote tier fails every few requests", ("uploaded:retried", "upload_failed"), 64),
    "sigkill": Kind("the process is killed", ("started",), 10**9, restarts=True),
    "sigterm": Kind("the process is asked to end", ("interrupted",), 2, restarts=True),
    "truncated-checkpoint": Kind(
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
