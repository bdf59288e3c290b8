"""Reads torch.profiler's trace, splits the time of the profiled steps into parts, and derives advice.

On a GPU each moment belongs to the running kernel, or to what the host was doing if none runs. On a CPU it belongs to
the operation of the training loop's thread. Every moment counts once: the parts add up to the wall time of the steps.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bessemer.spec.quantity import human_bytes
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape, matmul_parameters

MATMUL, ATTENTION, HEAD, MEMORY = "matmul", "attention", "loss head", "memory-bound"
OPTIMIZER, GUARD, COPIES, COMMUNICATION = "optimizer", "norm and guard", "copies", "communication"
OTHER, DATA, IDLE = "other", "data wait", "idle"
PARTS = (MATMUL, ATTENTION, HEAD, MEMORY, OPTIMIZER, GUARD, COPIES, COMMUNICATION, OTHER, DATA, IDLE)

PREFIX = "bessemer."  # of the names of the loop's ranges
WINDOW = f"{PREFIX}steps"  # the range of the profiled steps
# Ranges of the loop that are one part; others are split by their kernels.
_SPANS = {"data": DATA, "judge": GUARD, "report": GUARD, "optimizer": OPTIMIZER}
_RANKS = {COMMUNICATION: 1, COPIES: 2}  # overlapped by a compute kernel they cost nothing
_HOST = 3  # overlapped by any kernel the host costs nothing
_GLOO, _IDLE = 4, 5  # gloo sends from threads of its own: it costs what the loop's thread is idle for
_IDLE_IN = f"{IDLE} in "
_FUSED = re.compile(r"^triton_|compiled", re.I)  # what torch.compile leaves in a trace

# The first match decides. Inductor names fused kernels after everything they contain. In a language model cuDNN runs
# only attention; multi_tensor kernels belong to the optimizer unless the guard launched them.
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


class TraceEvent(NamedTuple):
    """An interval of a trace, in microseconds."""

    kind: str  # host, launch or device
    name: str
    start: float
    end: float
    lane: str  # thread or stream
    correlation: int = -1  # of a launch with what it starts
    bytes: int = 0  # that a collective sends or receives


class _Frame(NamedTuple):
    """A thread's event with its context."""

    event: TraceEvent
    part: str | None
    span: str  # the enclosing range of the loop


class TraceSlice(NamedTuple):
    """A stretch of time that belongs to a part, unless a slice of lower rank overlaps it."""

    start: float
    end: float
    rank: int
    part: str
    name: str = ""
    calls: int = 1


@dataclass(frozen=True)
class Kernel:
    """A kernel, or on a CPU an operation without nested operations, over all profiled steps."""

    name: str
    part: str
    calls: int
    us: float


@dataclass(frozen=True)
class ProfiledStep:
    """Where the profiled steps' time went, in microseconds of all of them together."""

    wall: float
    parts: dict[str, float]
    idle_in: dict[str, float]  # idle time by what the host was doing
    kernels: list[Kernel]  # the most expensive first
    on_device: bool
    compiled: bool


def read_trace(path: Path) -> list[TraceEvent]:
    """The events of torch.profiler's trace that are the run's time; the others repeat it or belong to the profiler."""
    kinds = {"cpu_op": "host", "user_annotation": "host", "cuda_runtime": "launch", "cuda_driver": "launch"}
    kinds |= dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset"), "device")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return [
        TraceEvent(
            kinds[event["cat"]], event["name"], event["ts"], event["ts"] + event["dur"],
            f"{event['pid']}/{event['tid']}", event.get("args", {}).get("correlation", -1),
            _collective_bytes(event.get("args", {})),
        )
        for event in events
        if event["ph"] == "X" and event.get("cat") in kinds
    ]  # fmt: skip


# Bytes of an element, by the names that torch gives to types in the arguments of collectives.
_ELEMENT = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2}


def _collective_bytes(args: dict[str, Any]) -> int:
    """The larger of what an NCCL kernel reads and writes; 0 for other events."""
    counts = (args.get("In msg nelems"), args.get("Out msg nelems"))
    numbers = [count for count in counts if isinstance(count, int)]
    return max(numbers, default=0) * _ELEMENT.get(str(args.get("dtype")), 1)


@cache
def part_of(name: str, table: tuple[tuple[str, str], ...]) -> str | None:
    """The part that the name of a kernel or an operation belongs to."""
    return next((part for part, pattern in table if re.search(pattern, name, re.I)), None)


def _frame(event: TraceEvent, outer: _Frame | None) -> _Frame:
    """A range of the loop decides its part. Inside it the outermost operation that is more than memory-bound decides:
    a copy within attention counts as attention."""
    part, span = (outer.part, outer.span) if outer else (None, "")
    if event.name.startswith(PREFIX):
        span = event.name.removeprefix(PREFIX)
        return _Frame(event, _SPANS.get(span), span)
    if part in (None, MEMORY):
        part = part_of(event.name, OPERATIONS) or part
    return _Frame(event, part, span)


def _innermost(events: Iterable[TraceEvent]) -> Iterator[tuple[float, float, _Frame]]:
    """One thread's time split by the innermost event. Each event is also yielded with zero length at its start."""
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


def split(slices: Iterable[TraceSlice], start: float, end: float) -> dict[str, float]:
    """The time from start to end by part. Each moment counts once; time that no slice covers is idle."""
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


def _on_device(events: Iterable[TraceEvent], threads: Iterable[list[TraceEvent]]) -> list[TraceSlice]:
    """Kernels and copies. The launching operation distinguishes kernels with equal names: a matmul of the loss head, a
    norm of the guard. The backward pass launches from its own thread."""
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
        slices.append(TraceSlice(event.start, event.end, _RANKS.get(part, 0), part, event.name))
    return slices


def step_time(events: list[TraceEvent]) -> ProfiledStep:
    """Where the time inside the range WINDOW went."""
    window = next(event for event in events if event.name == WINDOW)
    threads: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event.kind != "device":
            threads[event.lane].append(event)
    slices = _on_device((event for event in events if event.kind == "device"), threads.values())
    on_device = bool(slices)
    host_parts = (DATA, GUARD) if on_device else PARTS  # other host time is idle if nothing else runs
    for start, end, frame in _innermost(threads[window.lane]):
        known = frame.part is not None and frame.part in host_parts
        part, rank = (str(frame.part), _HOST) if known else (_IDLE_IN + frame.span, _IDLE)
        if part == GUARD and frame.event.name.startswith(PREFIX):  # no operation: Python, or a wait for other ranks
            rank = _IDLE
        slices.append(TraceSlice(start, end, rank, part, "" if on_device else frame.event.name, int(start == end)))
    gloo = (event for event in events if event.name.startswith("gloo:") and event.lane != window.lane)
    slices += [TraceSlice(event.start, event.end, _GLOO, COMMUNICATION, event.name) for event in gloo]
    spent = split(slices, window.start, window.end)
    idle = {part.removeprefix(_IDLE_IN): us for part, us in spent.items() if part.startswith(_IDLE_IN)}
    parts = {part: spent[part] for part in PARTS} | {IDLE: spent[IDLE] + sum(idle.values())}
    kernels = _kernels(piece for piece in slices if window.start <= piece.start < window.end)
    compiled = any(kernel.part == MEMORY and _FUSED.search(kernel.name) for kernel in kernels)
    return ProfiledStep(window.end - window.start, parts, idle, kernels, on_device, compiled)


def _kernels(slices: Iterable[TraceSlice]) -> list[Kernel]:
    """Sums by name and part: one name may occur in several parts. Idle time belongs to no kernel."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for piece in slices:
        if piece.name and piece.part in PARTS:
            calls_and_us = sums[piece.name, piece.part]
            calls_and_us[0] += piece.calls
            calls_and_us[1] += piece.end - piece.start
    kernels = [Kernel(name, part, int(calls), us) for (name, part), (calls, us) in sums.items()]
    return sorted(kernels, key=lambda kernel: -kernel.us)


TOP = 10  # kernels that are listed
ALIGNMENT = 64  # tensor cores are fastest for multiples of this


@dataclass(frozen=True)
class ProfileFacts:
    """Spec, resolved settings and measurements of the profiled run."""

    spec: RunSpec
    shape: ModelShape
    device: str
    precision: str
    context: int
    rows: int  # sequences of a step
    micro_rows: int  # and of a forward pass
    steps: int
    plain_step_s: float  # without the profiler
    flops_per_token: int
    peak_flops: float
    memory_bytes: int
    memory_limit: int
    update_bytes: int  # read and written by an update
    ceilings: dict[str, float]  # FLOP/s and B/s: matmul_bf16, attention_both_64, copy, ...


@dataclass(frozen=True)
class ProfileRow:
    """A part of the mean step. `rate` is in FLOP/s or B/s; `of_ceiling` its share of what the device does at most."""

    part: str
    ms: float
    share: float
    rate: float | None = None
    unit: str = ""
    of_ceiling: float | None = None


def attention_flops(shape: ModelShape, context: int) -> float:
    """FLOPs per token, forward and backward, counting only keys that a causal position can attend to."""
    total, value_dim = 0.0, shape.mla.value_dim if shape.mla else shape.head_dim
    for layer in range(shape.layers):
        if shape.mixer(layer) == "attention":
            most = min(context, shape.window(layer) or context)
            keys = most - most * (most - 1) / (2 * context) if shape.causal else most
            total += 7 * shape.heads * (shape.key_dim + value_dim) * keys  # backward is 2.5 times forward
    return total


def _work(facts: ProfileFacts) -> dict[str, tuple[float, str, str]]:
    """The work of a step in each part that can be counted, its unit, and the key of its ceiling."""
    shape, tokens = facts.shape, facts.rows * facts.context
    work = {OPTIMIZER: (float(facts.update_bytes), "B/s", "copy")}
    if shape.wrapped or shape.decoder_layers:
        return work
    layers = "fp8" if facts.precision.startswith("fp8") else facts.precision
    last = "bf16" if layers == "fp8" else layers
    head = shape.vocab * shape.width
    work[MATMUL] = 6.0 * (matmul_parameters(shape) - head) * tokens, "FLOP/s", f"matmul_{layers}"
    work[HEAD] = 6.0 * head * tokens, "FLOP/s", f"matmul_{last}"
    work[ATTENTION] = attention_flops(shape, facts.context) * tokens, "FLOP/s", f"attention_both_{shape.head_dim}"
    return work


def rows_of(time: ProfiledStep, facts: ProfileFacts) -> list[ProfileRow]:
    work, rows = _work(facts), []
    for part, us in ((part, us) for part, us in time.parts.items() if us):
        amount, unit, key = work.get(part, (None, "", ""))
        rate = amount * facts.steps / us * 1e6 if amount else None
        ceiling = facts.ceilings.get(key)
        near = rate / ceiling if rate and ceiling else None
        rows.append(ProfileRow(part, us / facts.steps / 1e3, us / time.wall, rate, unit, near))
    return rows


def _more_rows(facts: ProfileFacts) -> str:
    """The setting for a larger micro-batch, if memory allows it."""
    if facts.micro_rows >= facts.rows or facts.memory_bytes > 0.5 * facts.memory_limit:
        return ""
    memory = f"{human_bytes(facts.memory_bytes)} of {human_bytes(facts.memory_limit)} are in use"
    return f"budget.micro_batch: {facts.micro_rows * 2} ({memory})"


def advice(time: ProfiledStep, facts: ProfileFacts) -> list[str]:
    """Advice, ordered by the share of the step that it may save."""
    rows = {row.part: row for row in rows_of(time, facts)}
    hints = _wait_advice(time, facts, rows) + _work_advice(time, facts, rows)
    busy = sum(rows[part].share for part in (MATMUL, ATTENTION, HEAD) if part in rows)
    calm = f"nothing stands out: products, attention and the loss head take {busy:.0%} of the step"
    return [text for _, text in sorted(hints, reverse=True)] or [calm]


def _wait_advice(time: ProfiledStep, facts: ProfileFacts, rows: dict[str, ProfileRow]) -> list[tuple[float, str]]:
    hints, share = [], {part: row.share for part, row in rows.items()}
    if (wait := share.get(DATA, 0.0)) > 0.02:
        cure = "put the runs folder, which holds .data, on a faster disk"
        hints.append((wait, f"data wait is {wait:.0%} of the step: {cure}"))
    if (idle := share.get(IDLE, 0.0)) > (0.05 if time.on_device else 0.2):
        where = max(time.idle_in, key=lambda span: time.idle_in[span], default="between steps")
        who = "the GPU waits for the host for" if time.on_device else "Python takes"
        fuse = time.on_device and not time.compiled
        cure = "compile: block" if fuse else _more_rows(facts) or "a larger model or batch keeps the device busy"
        hints.append((idle, f"{who} {idle:.0%} of the step (most in {where}): {cure}"))
    if (copies := share.get(COPIES, 0.0)) > 0.03:
        text = f"copies take {copies:.0%} of the step: memory.offload_* costs that; without it, see Memcpy in the trace"
        hints.append((copies, text))
    for part, limit in ((OPTIMIZER, 0.1), (GUARD, 0.05)):
        if (taken := share.get(part, 0.0)) > limit:
            text = f"{part} takes {taken:.0%} of the step, whatever the batch: a larger budget.batch spreads it"
            hints.append((taken / 2, text))
    return hints


def _work_advice(time: ProfiledStep, facts: ProfileFacts, rows: dict[str, ProfileRow]) -> list[tuple[float, str]]:
    hints, none, shape = [], ProfileRow("", 0.0, 0.0), facts.shape
    matmul, attention, head = (rows.get(part, none) for part in (MATMUL, ATTENTION, HEAD))
    memory = rows.get(MEMORY, none).share
    faster = facts.ceilings.get("matmul_bf16", 0.0) / facts.ceilings.get(f"matmul_{facts.precision}", float("inf"))
    products = matmul.share + head.share
    if facts.precision in ("fp32", "tf32") and faster > 1.3 and products > 0.2:
        text = f"products in {facts.precision} take {products:.0%} of the step, bf16 is {faster:.1f}x as fast here"
        cure = "precision: bf16" if time.on_device else "precision: auto measures whether the step is, too"
        hints.append((products * (1 - 1 / faster), f"{text}: {cure}"))
    if (near := matmul.of_ceiling) and near < 0.6 and matmul.share > 0.2:
        sizes = {"model.width": shape.width, "model.ffn": shape.ffn, "heads x head size": shape.attention_width}
        causes = [f"{name} {size} is not a multiple of {ALIGNMENT}" for name, size in sizes.items() if size % ALIGNMENT]
        if facts.spec.memory.activations not in ("auto", "none"):
            causes.append("memory.activations repeats products, which do not count here")
        cure = ", ".join(causes) or _more_rows(facts) or "larger widths"
        text = f"matmul reaches {near:.0%} of what this device does, in {matmul.share:.0%} of the step"
        hints.append((matmul.share * (0.9 - near), f"{text}: {cure}"))
    if attention.share > 0.15 and shape.head_dim < 128 and time.on_device:
        text = f"attention takes {attention.share:.0%} of the step with heads of {shape.head_dim}"
        hints.append((attention.share * 0.3, f"{text}: half as many of {2 * shape.head_dim} cost less"))
    if head.share > 0.25:
        text = f"the loss head takes {head.share:.0%} of the step for {shape.vocab:,} tokens at width {shape.width}"
        hints.append((head.share / 2, f"{text}: a smaller tokenizer.vocab shrinks it in proportion"))
    if memory > 0.2 and time.on_device and not time.compiled:
        hints.append((memory / 2, f"memory-bound kernels take {memory:.0%} of the step: compile: block fuses them"))
    return hints


def as_json(time: ProfiledStep, facts: ProfileFacts) -> dict[str, Any]:
    """The profile as JSON, in numbers of the mean step."""
    tokens = facts.rows * facts.context
    tokens_per_s = tokens / facts.plain_step_s
    return {
        "device": facts.device, "precision": facts.precision, "steps": facts.steps, "compiled": time.compiled,
        "tokens_per_step": tokens, "step_ms": facts.plain_step_s * 1e3,
        "profiled_step_ms": time.wall / facts.steps / 1e3, "tokens_per_s": tokens_per_s,
        "mfu": tokens_per_s * facts.flops_per_token / facts.peak_flops,
        "memory_bytes": facts.memory_bytes, "memory_limit": facts.memory_limit, "ceilings": facts.ceilings,
        "parts": [asdict(row) for row in rows_of(time, facts)],
        "idle_ms": {span: us / facts.steps / 1e3 for span, us in time.idle_in.items()},
        "kernels": [
            {"name": kernel.name, "part": kernel.part, "calls": kernel.calls / facts.steps,
             "ms": kernel.us / facts.steps / 1e3}
            for kernel in time.kernels[:100]
        ],
        "advice": advice(time, facts),
    }  # fmt: skip


def as_text(profile: dict[str, Any]) -> str:
    """The JSON as text."""
    memory = f"{human_bytes(profile['memory_bytes'])} of {human_bytes(profile['memory_limit'])}"
    lines = [
        f"{profile['steps']} steps on {profile['device']} in {profile['precision']}: {profile['step_ms']:.1f} ms each "
        f"({profile['profiled_step_ms']:.1f} ms under the profiler), {profile['tokens_per_s']:,.0f} tokens/s, "
        f"{profile['mfu']:.1%} MFU, {memory} of memory",
        "",
        f"{'part':<16}{'ms':>10}{'share':>8}  rate",
    ]
    for row in profile["parts"]:
        lines.append(f"{row['part']:<16}{row['ms']:>10.2f}{row['share']:>8.1%}  {_rate(row)}".rstrip())
    lines.append(f"{'all':<16}{profile['profiled_step_ms']:>10.2f}{1:>8.1%}")
    idle = sorted(profile["idle_ms"].items(), key=lambda item: -item[1])
    lines += ["", "idle in " + ", ".join(f"{span} {ms:.2f} ms" for span, ms in idle if ms >= 0.005), ""]
    lines.append(f"{'ms':>8}{'calls':>8}  {'part':<16}kernel")
    for kernel in profile["kernels"][:TOP]:
        lines.append(f"{kernel['ms']:>8.2f}{kernel['calls']:>8.0f}  {kernel['part']:<16}{kernel['name'][:90]}")
    lines += ["", "what to do first:", *(f"{i}. {text}" for i, text in enumerate(profile["advice"], 1))]
    return "\n".join(lines) + "\n"


def _rate(row: dict[str, Any]) -> str:
    if row["rate"] is None:
        return ""
    scale, prefix = (1e12, "T") if row["rate"] >= 1e12 else (1e9, "G")
    near = f", {row['of_ceiling']:.0%} of what this device does" if row["of_ceiling"] else ""
    return f"{row['rate'] / scale:.3g} {prefix}{row['unit']}{near}"
