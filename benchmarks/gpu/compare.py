"""Bessemer beside its peers on the same GPU, one process after another, in one command; a table and a dated file.

    python benchmarks/gpu/compare.py --models 1b 3b --systems bessemer torchtitan liger
    python benchmarks/gpu/compare.py --models 1b --systems bessemer bessemer:memory.activations=selective torchtitan
    python benchmarks/gpu/compare.py --models 1b 3b --systems bessemer torchtitan --precision fp8

A system may be followed by settings: `bessemer:KEY=VALUE,KEY=VALUE` (keys of a spec; `precision` for all of them).
Every second round goes through the systems backwards. Ratios are to the first peer, of medians over the rounds.
"""

from __future__ import annotations

import statistics
from typing import Any

from child import Results, add_length, options_for

PEERS = ("torchtitan", "liger", "native", "hf")  # the first that was measured is what ratios are to


TITLES = ["model", "system", "precision", "tokens/s", "MFU", "peak GiB", "first step s", "ratio"]


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each model and system, medians over the rounds."""
    rows = []
    for model in dict.fromkeys(found["model"] for found in results):
        groups: dict[str, list[dict[str, Any]]] = {}
        for found in results:
            if found["model"] == model:
                groups.setdefault(found["asked"], []).append(found)
        good = {key: [found for found in group if "error" not in found] for key, group in groups.items()}
        rates = {key: statistics.median(f["tokens_per_s"] for f in group) for key, group in good.items() if group}
        beside = next((rates[peer] for peer in PEERS if peer in rates), None)
        for key, group in good.items():
            if not group:
                rows.append([model, key, "", groups[key][0]["error"]])
                continue
            mfu, peak_gib = statistics.median(f["mfu"] for f in group), max(f["peak_gib"] for f in group)
            speed = [f"{rates[key]:,.0f}", f"{mfu:.1%}", f"{peak_gib:.1f}", f"{group[0]['first_step_s']:.0f}"]
            ratio = f"{rates[key] / beside:.3f}" if beside else ""
            rows.append([model, key, group[0]["precision"], *speed, ratio])
    return rows


def main() -> None:
    parser = options_for("speed", __doc__)
    parser.add_argument("--models", nargs="+", default=["1b", "3b"])
    parser.add_argument("--systems", nargs="+", default=["bessemer", "torchtitan", "liger"])
    parser.add_argument("--rounds", type=int, default=1)
    add_length(parser)
    options = parser.parse_args()
    results = Results(options)
    cases = [(model, system) for model in options.models for system in options.systems]
    print(
        f"{options.rounds} rounds of {len(cases)} measurements, {options.warmup} + {options.steps} steps each",
        flush=True,
    )
    for number in range(options.rounds):
        for model, system in cases[:: -1 if number % 2 else 1]:
            name, _, settings = system.partition(":")
            results.measure(
                {"asked": system, "round": number}, system=name, model=model, precision=options.precision,
                warmup=options.warmup, steps=options.steps, set=settings.split(",") if settings else [],
            )  # fmt: skip
    results.conclude(TITLES, table(results.found))


if __name__ == "__main__":
    main()
