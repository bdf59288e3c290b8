"""What the processes of a run tell of themselves: what each holds, at the start; how each keeps up, every few steps.

The numbers ride on words that the hosts exchange anyway, each process's in a place of its own, and come back as a sum.

What the machine says of itself while a run is slower than planned: load of others, clocks, memory, utilisation.

Which documents made the loss of a step: from the per-token losses that the step itself computed.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.observe.format import KINDS, holdings_table, spans
from bessemer.parallel.rank_memory import gather_holdings, held_here
from bessemer.parallel.world import World
from bessemer.plan.actual import HostLoad
from bessemer.plan.cost_model.rank_memory import CONTEXT
from bessemer.plan.decision import Plan
from bessemer.run.directory import LAYOUT
from bessemer.spec.quantity import human_bytes
from bessemer.train.engine import Engine
from bessemer.train.job import Recorder

# Of each process: work of its own in a step, what it waited for, and in a pipeline what it stood idle between stages.
NUMBERS = ("own_s", "data_wait_s", "memory_bytes", "bubble_s")


def in_own_slot(world: World, numbers: list[float]) -> list[float]:
    """A list with a slot for every rank and this rank's numbers in its slot, to be summed over ranks."""
    slots = [0.0] * (world.size * len(numbers))
    slots[world.rank * len(numbers) : (world.rank + 1) * len(numbers)] = numbers
    return slots


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


def report_rank_memory(engine: Engine, recorder: Recorder, plan: Plan) -> list[str]:
    """Into layout.json and the plan; a large weight that stayed whole is an event. The lines of a table, for the log.
    All processes take part."""
    world = engine.world
    if world.size == 1 or engine.spec.parallel.engine != "torch":  # another engine's state is not ours to count
        return []
    averages = engine.ema.state() if engine.ema else None
    found = gather_holdings(
        world, held_here(world, engine.model.named_parameters(), engine.optimizer.state(), averages)
    )
    recorder.run.write_file(LAYOUT, json.dumps({"layout": asdict(world.layout), "ranks": found}, indent=1))
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
        recorder.event("left_whole", reason=f"{words}, in ranks {spans(ranks)}: {fix}", ranks=ranks)
    return holdings_table(found)


def rank_record(step: int, ranks: dict[str, list[float]]) -> dict[str, Any]:
    """A line of metrics/ranks.jsonl."""
    return {"step": step, "balance": balance(ranks["own_s"]), **ranks}


class HostLoadProbe:
    """Looks when it is called; processor times are those since the call before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._own_s = _own_seconds()
        self._all = psutil.cpu_times()

    def __call__(self) -> HostLoad:
        own_s, now = _own_seconds(), psutil.cpu_times()
        passed = sum(now) - sum(self._all)  # of all cores together
        busy = passed - sum(getattr(now, key, 0.0) - getattr(self._all, key, 0.0) for key in ("idle", "iowait"))
        others = max(0.0, busy - (own_s - self._own_s)) / passed if passed > 0 else None
        self._own_s, self._all = own_s, now
        if self.device.type != "cuda":
            return HostLoad(others_busy=others, clock=_host_clock())
        stats = torch.cuda.memory_stats(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        strange = total - free - torch.cuda.memory_reserved(self.device) - CONTEXT
        clock, used = _device_state(self.device)
        return HostLoad(others, clock, used, max(0, strange), int(stats.get("num_alloc_retries", 0)))


def _own_seconds() -> float:
    """Of this process and those it has started."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has ended meanwhile
            continue
        total += times.user + times.system
    return total


def _host_clock() -> float | None:
    """Of the highest; many virtual machines do not say."""
    try:
        found = psutil.cpu_freq()
    except (OSError, RuntimeError):
        return None
    return found.current / found.max if found and found.max else None


def _device_state(device: torch.device) -> tuple[float | None, float | None]:
    """Clock as a share of its highest, and utilisation, as NVIDIA's tool says; it takes about a tenth of a second."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    asked = "clocks.sm,clocks.max.sm,utilization.gpu"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader,nounits", "-i", f"GPU-{uuid}"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        now, most, busy = (float(word) for word in said.split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, None
    return now / most, busy / 100


DocumentLosses = dict[tuple[str, str, int], dict[str, Any]]


def blame(
    stream: BatchStream | IterableStream, batches: list[Batch], losses: list[Tensor], most: int = 8
) -> list[dict[str, Any]]:
    """The documents of a step with their share of its loss, largest first: file, row, tokens, mean loss, share."""
    return ranked([by_document(stream, batches, losses)], most)


def by_document(
    stream: BatchStream | IterableStream,
    batches: list[Batch],
    losses: list[Tensor],
    columns: slice | np.ndarray = slice(None),
) -> DocumentLosses:
    """Tokens and loss of each document in some micro-batches, and how many of its losses are not finite. `columns` says
    which of the batches' the losses are of."""
    found: DocumentLosses = {}
    for batch, loss in zip(batches, losses, strict=True):
        nll_RT = np.asarray(loss.float().cpu(), dtype=np.float64)
        for row, number, origin in stream.locate(batch):
            inside = ((batch.documents[row] == number) & (batch.weights[row] > 0))[columns]
            values = nll_RT[row][inside]
            entry = found.setdefault(
                (origin.file, origin.document_id, origin.row), {"tokens": 0, "loss": 0.0, "nonfinite": 0}
            )
            entry["tokens"] += int(inside.sum())
            entry["loss"] += float(values[np.isfinite(values)].sum())
            entry["nonfinite"] += int((~np.isfinite(values)).sum())
    return found


def ranked(parts: list[DocumentLosses], most: int = 8) -> list[dict[str, Any]]:
    """What several processes found, together. Documents with non-finite losses come first, with the number of such
    tokens; shares are of the finite loss."""
    found: DocumentLosses = {}
    for part in parts:
        for key, entry in part.items():
            whole = found.setdefault(key, dict.fromkeys(entry, 0))
            for name, value in entry.items():
                whole[name] += value
    total = sum(entry["loss"] for entry in found.values())
    best = sorted(found.items(), key=lambda item: (-item[1]["nonfinite"], -item[1]["loss"]))[:most]
    return [
        {
            "file": file,
            "row": row,
            "document": document,
            "tokens": entry["tokens"],
            "mean_loss": round(entry["loss"] / max(1, entry["tokens"]), 4),
            "share": round(entry["loss"] / total, 4) if total else None,
            **({"nonfinite": entry["nonfinite"]} if entry["nonfinite"] else {}),
        }
        for (file, document, row), entry in best
    ]
