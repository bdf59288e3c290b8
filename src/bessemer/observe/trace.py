"""A profiler's Chrome trace, and what each moment of the profiled steps was spent on.

On a GPU a moment belongs to the kernel that runs; where none does, to what the host was doing. On a CPU it belongs to
the operation of the loop's own thread. Every moment counts once, so the parts add up to the wall time of the steps.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

MATMUL, ATTENTION, HEAD, MEMORY = "matmul", "attention", "loss head", "memory-bound"
OPTIMIZER, GUARD, COPIES, COMMUNICATION = "optimizer", "norm and guard", "copies", "communication"
OTHER, DATA, IDLE = "other", "data wait", "idle"
PARTS = (MATMUL, ATTENTION, HEAD, MEMORY, OPTIMIZER, GUARD, COPIES, COMMUNICATION, OTHER, DATA, IDLE)

PREFIX = "bessemer."  # how the loop's own ranges are named
WINDOW = f"{PREFIX}steps"  # the range of the profiled steps
_SPANS = {"data": DATA, "judge": GUARD, "report": GUARD, "optimizer": OPTIMIZER}  # of the others, the kernels tell
_RANKS = {COMMUNICATION: 1, COPIES: 2}  # beside a kernel that computes they cost nothing
_HOST = 3  # nor does the host beside any kernel
_IDLE_IN = f"{IDLE} in "
_FUSED = re.compile(r"^triton_|compiled", re.I)  # what torch.compile leaves in a trace

# The first that matches. Inductor's fused kernels are named after all that went into them. cuDNN does nothing but
# attention in a language model; multi_tensor kernels are the optimizer's unless the guard launched them.
KERNELS = (
    (COMMUNICATION, r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"),
    (COPIES, r"^mem(cpy|set)"),
    (HEAD, r"cross_?entropy|nll_loss"),
    (MEMORY, r"^triton_(poi|red|per|for)_"),
    (GUARD, r"lpnorm"),
    (OPTIMIZER, r"multi_tensor|fused_?adam"),
    (ATTENTION, r"flash|fmha|sdpa|attention|cudnn"),
    (MATMUL, r"nvjet|gemm|gemv|cutlass|cublas|xmma|wmma|split_?k|triton_(tem|mm|bmm)_|scaled_mm|grouped_mm"),
    (MEMORY, r"^triton_|at::native|cub::|elementwise|reduce|norm|softmax|copy|index|embedding|rope|cast"),
)
OPERATIONS = (
    (COMMUNICATION, r"^(c10d::|nccl:|gloo:)"),
    (HEAD, r"cross_?entropy|nll_loss"),
    (OPTIMIZER, r"^optimizer\.step"),
    (ATTENTION, r"::_?(scaled_dot_product_\w+_attention|(flash|efficient|cudnn)_attention|flex_attention)"),
    (MATMUL, r"::_?(addmm|mm|bmm|baddbmm|mv|addmv|scaled_mm|grouped_mm|mkl_linear|linear_pointwise)$"),
    (MEMORY, r"^aten::|^bessemer::|compiled"),
)


class Event(NamedTuple):
    """An interval of a trace, in microseconds."""

    kind: str  # host, launch or device
    name: str
    start: float
    end: float
    lane: str  # thread or stream
    correlation: int = -1  # of a launch with what it starts


class _Frame(NamedTuple):
    """A thread's event with what surrounds it."""

    event: Event
    part: str | None
    span: str  # the loop's range that it is in


class Slice(NamedTuple):
    """A stretch of time that belongs to a part, unless something of lower rank runs beside it."""

    start: float
    end: float
    rank: int
    part: str
    name: str = ""
    calls: int = 1


@dataclass(frozen=True)
class Kernel:
    """A kernel, or on a CPU an operation without those inside it, over all profiled steps."""

    name: str
    part: str
    calls: int
    us: float


@dataclass(frozen=True)
class StepTime:
    """Where the profiled steps' time went, in microseconds of all of them together."""

    wall: float
    parts: dict[str, float]
    idle_in: dict[str, float]  # idle time by what the host was doing
    kernels: list[Kernel]  # the most expensive first
    on_device: bool
    compiled: bool


def read_trace(path: Path) -> list[Event]:
    """What of torch.profiler's trace is the run's time: other events repeat that, or are the profiler's own."""
    kinds = {"cpu_op": "host", "user_annotation": "host", "cuda_runtime": "launch", "cuda_driver": "launch"}
    kinds |= dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset"), "device")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found = json.load(file)["traceEvents"]
    return [
        Event(
            kinds[event["cat"]], event["name"], event["ts"], event["ts"] + event["dur"],
            f"{event['pid']}/{event['tid']}", event.get("args", {}).get("correlation", -1),
        )
        for event in found
        if event["ph"] == "X" and event.get("cat") in kinds
    ]  # fmt: skip


@cache
def part_of(name: str, table: tuple[tuple[str, str], ...]) -> str | None:
    """What a kernel's or an operation's name says of it."""
    return next((part for part, pattern in table if re.search(pattern, name, re.I)), None)


def _frame(event: Event, outer: _Frame | None) -> _Frame:
    """A range of the loop says what it is. Inside, the outermost operation does that is more than memory-bound: a copy
    within attention is attention."""
    part, span = (outer.part, outer.span) if outer else (None, "")
    if event.name.startswith(PREFIX):
        span = event.name.removeprefix(PREFIX)
        return _Frame(event, _SPANS.get(span), span)
    if part in (None, MEMORY):
        part = part_of(event.name, OPERATIONS) or part
    return _Frame(event, part, span)


def _innermost(events: Iterable[Event]) -> Iterator[tuple[float, float, _Frame]]:
    """One thread's time cut into what was innermost. Each event comes out once without length, as it begins."""
    stack: list[_Frame] = []
    cursor = 0.0
    for event in [*sorted(events, key=lambda event: (event.start, -event.end)), None]:
        while stack and (event is None or stack[-1].event.end <= event.start):
            end = stack[-1].event.end
            if end > cursor:
                yield cursor, end, stack[-1]
                cursor = end
            stack.pop()
        if event is not None:
            if stack and event.start > cursor:
                yield cursor, event.start, stack[-1]
            cursor = event.start
            stack.append(_frame(event, stack[-1] if stack else None))
            yield cursor, cursor, stack[-1]


def split(slices: Iterable[Slice], start: float, end: float) -> dict[str, float]:
    """The time from start to end by part, each moment once; what no slice covers is idle."""
    edges = []
    for piece in slices:
        key = piece.rank, piece.part
        edges += [(piece.start, 1, key), (piece.end, -1, key)]
    active: Counter[tuple[int, str]] = Counter()
    spent: dict[str, float] = defaultdict(float)
    cursor = start
    for time, change, key in sorted(edges):
        now = min(max(time, start), end)
        if now > cursor:
            _, part = min((key for key, count in active.items() if count > 0), default=(0, IDLE))
            spent[part] += now - cursor
            cursor = now
        active[key] += change
    spent[IDLE] += end - cursor
    return spent


def _on_device(events: Iterable[Event], threads: Iterable[list[Event]]) -> list[Slice]:
    """Kernels and copies. What launched them tells those apart that look alike: a product of the loss head, a norm of
    the guard. The backward pass launches from a thread of its own."""
    launched = {
        frame.event.correlation: frame.part
        for thread in threads
        for _, _, frame in _innermost(thread)
        if frame.event.kind == "launch"
    }
    slices = []
    for event in events:
        context = launched.get(event.correlation)
        named = context if context in (HEAD, OPTIMIZER, GUARD) else part_of(event.name, KERNELS)
        part = named or context or OTHER
        slices.append(Slice(event.start, event.end, _RANKS.get(part, 0), part, event.name))
    return slices


def step_time(events: list[Event]) -> StepTime:
    """Where the time inside the range WINDOW went."""
    window = next(event for event in events if event.name == WINDOW)
    threads: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind != "device":
            threads[event.lane].append(event)
    slices = _on_device((event for event in events if event.kind == "device"), threads.values())
    on_device = bool(slices)
    told = (DATA, GUARD) if on_device else PARTS  # as what the host's time counts where nothing else runs
    for start, end, frame in _innermost(threads[window.lane]):
        part = frame.part if frame.part and frame.part in told else _IDLE_IN + frame.span
        slices.append(Slice(start, end, _HOST, part, "" if on_device else frame.event.name, int(start == end)))
    spent = split(slices, window.start, window.end)
    idle = {part.removeprefix(_IDLE_IN): us for part, us in spent.items() if part.startswith(_IDLE_IN)}
    parts = {part: spent[part] for part in PARTS} | {IDLE: spent[IDLE] + sum(idle.values())}
    kernels = _kernels(piece for piece in slices if window.start <= piece.start < window.end)
    compiled = any(kernel.part == MEMORY and _FUSED.search(kernel.name) for kernel in kernels)
    return StepTime(window.end - window.start, parts, idle, kernels, on_device, compiled)


def _kernels(slices: Iterable[Slice]) -> list[Kernel]:
    """The same name may work for several parts. Idle time is no kernel's."""
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for piece in slices:
        if piece.name and piece.part in PARTS:
            of_name = found[piece.name, piece.part]
            of_name[0] += piece.calls
            of_name[1] += piece.end - piece.start
    kernels = [Kernel(name, part, int(calls), us) for (name, part), (calls, us) in found.items()]
    return sorted(kernels, key=lambda kernel: -kernel.us)
