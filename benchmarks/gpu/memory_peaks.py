"""What training takes on the card, beside what the planner says it takes: some forty configurations, several at a time.

    python benchmarks/gpu/memory_peaks.py
    python benchmarks/gpu/memory_peaks.py --only 124m --card 100
    python benchmarks/gpu/memory_peaks.py --missing     # from the table that planner_memory.py --collect keeps

Each configuration is `bessemer train` for three steps in a process of its own; what counts is the allocator's peak,
which processes beside it do not change. As many run at once as fit by the estimate. Rates say nothing here.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from child import Results, options_for
from models import Case
from ours import corpus

sys.path.insert(0, str(Path(__file__).parent.parent))
from planner_memory import estimated_gib, read_peaks

STOCHASTIC, EIGHT = "memory.weights=stochastic", "memory.moments=8bit"
# model, context, rows, settings
SWEEP: list[tuple[str, int, int, str]] = [
    ("124m", 1024, 64, ""),
    ("124m", 1024, 64, "memory.weights=fp32"),
    ("124m", 512, 32, "memory.activations=none"),
    ("124m", 512, 64, "memory.activations=selective"),
    ("124m", 1024, 32, "memory.activations=full"),
    ("124m", 4096, 8, "memory.activations=0.5"),
    ("124m", 32768, 1, "memory.activations=none"),
    ("124m", 2048, 16, "optimizer.name=muon"),
    ("124m", 2048, 16, "optimizer.name=lion"),
    ("124m", 2048, 16, "optimizer.name=adafactor"),
    ("124m", 2048, 16, "optimizer.name=sgd,compile=off"),
    ("124m", 1024, 16, "compile=off,memory.activations=none"),
    ("124m", 1024, 16, "compile=off,memory.activations=selective"),
    ("124m", 1024, 16, "compile=off,memory.activations=full"),
    ("124m", 1024, 32, "precision=fp8"),
    ("124m", 1024, 16, "precision=fp16"),
    ("124m", 1024, 16, "precision=fp32"),
    ("124m", 1024, 16, "budget.batch=65536"),
    ("1b", 512, 16, "memory.activations=none"),
    ("1b", 4096, 2, "memory.activations=none"),
    ("1b", 4096, 4, "memory.activations=selective"),
    ("1b", 4096, 4, "memory.activations=full"),
    ("1b", 4096, 4, "memory.activations=0.7"),
    ("1b", 4096, 4, "memory.activations=0.3"),
    ("1b", 32768, 1, "memory.activations=full"),
    ("1b", 32768, 1, "memory.activations=selective"),
    ("1b", 2048, 4, "precision=fp8"),
    ("1b", 2048, 4, "precision=fp8,memory.activations=full"),
    ("1b", 2048, 4, "optimizer.name=muon"),
    ("1b", 2048, 4, "optimizer.name=adafactor"),
    ("1b", 2048, 4, f"optimizer.name=lion,{STOCHASTIC}"),
    ("1b", 2048, 4, f"{STOCHASTIC},{EIGHT}"),
    ("1b", 2048, 4, "memory.moments=bf16"),
    ("1b", 2048, 2, "compile=off,memory.activations=none"),
    ("1b", 2048, 2, "budget.batch=16384"),
    ("3b", 4096, 1, "memory.activations=selective"),
    ("3b", 2048, 2, f"memory.activations=full,{STOCHASTIC},{EIGHT}"),
    ("3b", 1024, 4, f"memory.activations=none,{STOCHASTIC}"),
    ("3b", 2048, 2, "precision=fp8,memory.activations=selective"),
    ("8b", 2048, 1, f"memory.activations=full,{STOCHASTIC},{EIGHT}"),
    ("8b", 4096, 1, f"memory.activations=selective,{STOCHASTIC},memory.moments=bf16"),
    ("8b", 16384, 1, f"memory.activations=full,{STOCHASTIC},{EIGHT}"),
    ("8b", 2048, 1, f"memory.activations=full,{STOCHASTIC},{EIGHT},memory.update=in_backward"),
]  # fmt: skip
BESIDE_GIB = 2.5  # of a process, which the allocator does not see, and for an estimate that is wrong


class Card:
    """Room that processes take and give back; the first to ask is the first to have it."""

    def __init__(self, gib: float) -> None:
        self.free, self.turn = gib, threading.Condition()

    def take(self, gib: float) -> None:
        with self.turn:
            self.turn.wait_for(lambda: self.free >= gib)
            self.free -= gib

    def give(self, gib: float) -> None:
        with self.turn:
            self.free += gib
            self.turn.notify_all()


def estimated(case: Case) -> float:
    """What the planner says of the same configuration."""
    row = {**asdict(case.model), "precision": case.precision, "settings": " ".join(case.settings)}
    return estimated_gib(row)


def main() -> None:
    parser = options_for("memory-peaks", __doc__)
    parser.add_argument("--only", default="", help="configurations whose words contain this")
    parser.add_argument("--missing", action="store_true", help="those that were never measured")
    parser.add_argument("--card", type=float, default=120.0, help="GiB that may be filled")
    parser.add_argument("--at-once", type=int, default=6)
    options = parser.parse_args()
    results, card = Results(options), Card(options.card)
    sweep = [one for one in SWEEP if options.only in " ".join(map(str, one))]
    known = {(row["model"], int(row["context"]), int(row["rows"]), row["settings"]) for row in read_peaks()}
    if options.missing:
        sweep = [one for one in sweep if (*one[:3], one[3].replace(",", " ")) not in known]
    cases = []
    for name, context, rows, settings in sweep:
        asked = {"system": "bessemer", "model": name, "context": context, "rows": rows, "precision": "bf16",
                 "warmup": 1, "steps": 2, "set": ["guard.copies=off", *filter(None, settings.split(","))]}  # fmt: skip
        case = Case.of(SimpleNamespace(**asked, layers=None, folder=str(options.folder)))
        corpus(case.model, 3, Path(case.folder) / "corpus")  # before two processes write the same
        cases.append((asked, estimated(case)))
    print(f"{len(cases)} configurations, {options.at_once} at a time", flush=True)

    def one(asked: dict[str, Any], estimate: float) -> None:
        room = min(estimate + BESIDE_GIB, options.card)
        card.take(room)
        try:
            results.measure({"estimated_gib": round(estimate, 2)}, **asked)
        finally:
            card.give(room)

    with ThreadPoolExecutor(options.at_once) as pool:
        for done in [pool.submit(one, *case) for case in sorted(cases, key=lambda case: -case[1])]:
            done.result()
    good = [found for found in results.found if "error" not in found]
    errors = [found["estimated_gib"] / found["peak_gib"] - 1 for found in good]
    mean = sum(map(abs, errors)) / len(errors)
    results.head |= {"mean_absolute_error": round(mean, 4), "worst": round(max(errors, key=abs), 4)}
    results.write()
    print(
        f"{len(good)} of {len(cases)} measured; the estimate is off by {mean:.1%}, at most {results.head['worst']:+.1%}"
    )


if __name__ == "__main__":
    main()
