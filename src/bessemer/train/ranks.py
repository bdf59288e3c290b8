"""What the processes of a run tell of themselves: what each holds, at the start; how each keeps up, every few steps.

The numbers ride on words that the hosts exchange anyway, each process's in a place of its own, and come back as a sum.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from bessemer.observe.ranks import KINDS, holdings_table, spans
from bessemer.parallel.holdings import gather_holdings, held_here
from bessemer.parallel.world import World
from bessemer.plan.decision import Plan
from bessemer.run.directory import LAYOUT
from bessemer.spec.quantity import human_bytes
from bessemer.train.job import Job

# Of each process: work of its own in a step, what it waited for, and in a pipeline what it stood idle between stages.
NUMBERS = ("own_s", "data_wait_s", "memory_bytes", "bubble_s")


def in_own_place(world: World, numbers: list[float]) -> list[float]:
    """A list for all processes with this one's numbers in it, to be added up."""
    places = [0.0] * (world.size * len(numbers))
    places[world.rank * len(numbers) : (world.rank + 1) * len(numbers)] = numbers
    return places


def by_rank(places: list[float]) -> dict[str, list[float]]:
    """For each of NUMBERS a list in the order of ranks."""
    digits = {"memory_bytes": None}  # whole numbers
    return {
        name: [round(number, digits.get(name, 5)) for number in places[i :: len(NUMBERS)]]
        for i, name in enumerate(NUMBERS)
    }


def balance(own_s: list[float]) -> float | None:
    """The slowest against the mean: 1 where all have the same to do. None before anything was measured."""
    return round(max(own_s) * len(own_s) / sum(own_s), 4) if sum(own_s) > 0 else None


def tell_holdings(job: Job, plan: Plan) -> list[str]:
    """Into layout.json and the plan; a large weight that stayed whole is an event. The lines of a table, for the log.
    All processes take part."""
    world = job.world
    if world.size == 1 or job.spec.parallel.engine != "torch":  # another engine's state is not ours to count
        return []
    averages = job.ema.state() if job.ema else None
    found = gather_holdings(world, held_here(world, job.model.named_parameters(), job.optimizer.state(), averages))
    job.run.write_file(LAYOUT, json.dumps({"layout": asdict(world.layout), "ranks": found}, indent=1))
    most = max(found, key=lambda each: int(each["bytes"]))
    sizes = {kind: most[kind]["divided"]["bytes"] + most[kind]["whole"]["bytes"] for kind in KINDS}
    value = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in sizes.items() if size)
    plan.add("parallel.held", value, f"in rank {most['rank']}, which holds most; all of them are in {LAYOUT}", "found")
    whole: dict[str, list[int]] = {}
    for each in found:
        for words in each["left_whole"]:
            whole.setdefault(words, []).append(each["rank"])
    for words, ranks in whole.items():
        fix = "parallel.dp_shard above 1 divides every weight"
        job.event("left_whole", reason=f"{words}, in ranks {spans(ranks)}: {fix}", ranks=ranks)
    return holdings_table(found)


def rank_record(step: int, ranks: dict[str, list[float]]) -> dict[str, Any]:
    """A line of metrics/ranks.jsonl."""
    return {"step": step, "balance": balance(ranks["own_s"]), **ranks}
