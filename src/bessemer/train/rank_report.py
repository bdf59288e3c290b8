"""What ranks and hosts report about themselves: memory held by each rank at the start, times of each rank every few
steps, and the load of the host while a run is slower than planned; and which documents made the loss of a step.
"""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import asdict
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.observe.format import MEMORY_KINDS, format_ranks, rank_memory_table
from bessemer.parallel.shard import gather_rank_memory, local_rank_memory
from bessemer.parallel.world import World
from bessemer.plan.actual import HostLoad
from bessemer.plan.cost_model.memory import CONTEXT
from bessemer.plan.decision import Plan
from bessemer.run.directory import LAYOUT
from bessemer.spec.quantity import human_bytes
from bessemer.train.engine import Engine
from bessemer.train.job import Recorder
from bessemer.train.readings import RANK_READINGS

# Of each rank: time of its own work, wait for data, memory, in a pipeline the idle time between stages, and readings.
RANK_STATS = ("own_s", "data_wait_s", "memory_bytes", "bubble_s", *RANK_READINGS)


def in_own_slot(world: World, numbers: list[float]) -> list[float]:
    """A list with a slot for every rank and this rank's numbers in its slot, to be summed over ranks."""
    slots = [0.0] * (world.size * len(numbers))
    slots[world.rank * len(numbers) : (world.rank + 1) * len(numbers)] = numbers
    return slots


def by_rank(slots: list[float]) -> dict[str, list[Any]]:
    """A list over ranks for each of RANK_STATS; without readings that no rank has, and None where one has none."""
    digits = {"memory_bytes": None}  # an int
    columns = {key: slots[i :: len(RANK_STATS)] for i, key in enumerate(RANK_STATS)}
    return {
        key: [None if math.isnan(number) else round(number, digits.get(key, 5)) for number in column]
        for key, column in columns.items()
        if not all(map(math.isnan, column))
    }


def balance(own_s: list[float]) -> float | None:
    """The slowest rank's time over the mean; 1 is balanced. None before anything was measured."""
    return round(max(own_s) * len(own_s) / sum(own_s), 4) if sum(own_s) > 0 else None


def report_rank_memory(engine: Engine, recorder: Recorder, plan: Plan) -> list[str]:
    """Write the memory of each rank to layout.json and the plan; a large weight that is not sharded is an event. Called
    by all ranks; returns a table for the log."""
    world = engine.world
    if world.size == 1 or engine.spec.parallel.engine != "torch":  # DeepSpeed holds its state elsewhere
        return []
    averages = engine.ema.state() if engine.ema else None
    by_rank = gather_rank_memory(
        world, local_rank_memory(world, engine.model.named_parameters(), engine.optimizer.state(), averages)
    )
    recorder.run.write_file(LAYOUT, json.dumps({"layout": asdict(world.layout), "ranks": by_rank}, indent=1))
    most = max(by_rank, key=lambda each: int(each["bytes"]))
    sizes = {kind: most[kind]["divided"]["bytes"] + most[kind]["whole"]["bytes"] for kind in MEMORY_KINDS}
    value = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in sizes.items() if size)
    plan.add("parallel.held", value, f"in rank {most['rank']}, which holds most; all of them are in {LAYOUT}", "found")
    totals: dict[str, list[int]] = {}
    for each in by_rank:
        for words in each["left_whole"]:
            totals.setdefault(words, []).append(each["rank"])
    for words, ranks in totals.items():
        fix = "parallel.dp_shard above 1 divides every weight"
        recorder.event("left_whole", reason=f"{words}, in ranks {format_ranks(ranks)}: {fix}", ranks=ranks)
    return rank_memory_table(by_rank)


def rank_record(step: int, ranks: dict[str, list[Any]]) -> dict[str, Any]:
    """A line of metrics/ranks.jsonl."""
    return {"step": step, "balance": balance(ranks["own_s"]), **ranks}


class HostLoadProbe:
    """Measures the load of the host and the device when called; processor times are those since the last call."""

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
    """CPU seconds of this process and its children."""
    this = psutil.Process()
    total = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has ended meanwhile
            continue
        total += times.user + times.system
    return total


def _host_clock() -> float | None:
    """CPU clock as a share of its maximum; many virtual machines do not report it."""
    try:
        frequency = psutil.cpu_freq()
    except (OSError, RuntimeError):
        return None
    return frequency.current / frequency.max if frequency and frequency.max else None


def _device_state(device: torch.device) -> tuple[float | None, float | None]:
    """Clock as a share of its maximum, and utilisation, from nvidia-smi; takes about a tenth of a second."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    fields = "clocks.sm,clocks.max.sm,utilization.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-i", f"GPU-{uuid}"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        clock, highest, busy = (float(word) for word in output.split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, None
    return clock / highest, busy / 100


DocumentLosses = dict[tuple[str, str, int], dict[str, Any]]  # by file, document id and row


def by_document(
    stream: BatchStream | IterableStream,
    batches: list[Batch],
    losses: list[Tensor],
    columns: slice | np.ndarray = slice(None),
) -> DocumentLosses:
    """Tokens and loss of each document in some micro-batches, and how many of its losses are not finite. `columns` are
    those of the batches that the losses belong to."""
    result: DocumentLosses = {}
    for batch, loss in zip(batches, losses, strict=True):
        nll_RT = np.asarray(loss.float().cpu(), dtype=np.float64)
        for row, number, origin in stream.locate(batch):
            mask = ((batch.documents[row] == number) & (batch.weights[row] > 0))[columns]
            values = nll_RT[row][mask]
            entry = result.setdefault(
                (origin.file, origin.document_id, origin.row), {"tokens": 0, "loss": 0.0, "nonfinite": 0}
            )
            entry["tokens"] += int(mask.sum())
            entry["loss"] += float(values[np.isfinite(values)].sum())
            entry["nonfinite"] += int((~np.isfinite(values)).sum())
    return result


def rank_documents(parts: list[DocumentLosses], most: int = 8) -> list[dict[str, Any]]:
    """The documents of a step over all ranks with their share of its loss, largest first. Documents with non-finite
    losses come before the others, with the number of such tokens; shares are of the finite loss."""
    sums: DocumentLosses = {}
    for part in parts:
        for key, entry in part.items():
            total_entry = sums.setdefault(key, dict.fromkeys(entry, 0))
            for name, value in entry.items():
                total_entry[name] += value
    total = sum(entry["loss"] for entry in sums.values())
    worst = sorted(sums.items(), key=lambda item: (-item[1]["nonfinite"], -item[1]["loss"]))[:most]
    return [
        {
            "file": file, "row": row, "document": document, "tokens": entry["tokens"],
            "mean_loss": round(entry["loss"] / max(1, entry["tokens"]), 4),
            "share": round(entry["loss"] / total, 4) if total else None,
            **({"nonfinite": entry["nonfinite"]} if entry["nonfinite"] else {}),
        }
        for (file, document, row), entry in worst
    ]  # fmt: skip
