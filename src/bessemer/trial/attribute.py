"""Which documents a step's trouble comes from: shares of the loss, which are free, and of the gradient, by groups.

A share of the gradient is its projection on the whole: <g_group, g> / |g|^2. Shares add up, so a group is halved by one
pass over the rows of one half, and only groups that have more than their tokens would give them are looked into.

What changed in the steps before an anomaly: data, learning rate, batch size, spec, machine, restarts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bessemer.data.store.token_store import Origin
from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.parallel.shard import local
from bessemer.run.journal import number as as_number
from bessemer.train.engine import Engine
from bessemer.train.job import Job
from bessemer.trial.case import AccusedDocument, StepScene
from bessemer.trial.measure import run_pass, sum_of_parts

STANDS_OUT = 5.0  # robust deviations of a document's loss; and twice what one in ten of normal batches has
FEW = 4  # tokens: fewer say nothing of a document
HEAVY = 3.0  # times the gradient of as many normal tokens
LONGEST_PERIOD = 16
MOST_PASSES = 24
EXCERPT = 400  # characters
MOST_EXCERPTS = 32


@dataclass(eq=False)
class DocumentPart:
    """A document's part in a step."""

    source: str
    origin: Origin
    places: list[tuple[int, int, int]] = field(default_factory=list)  # micro-batch, row, number in the row
    ids: list[int] = field(default_factory=list)  # its target tokens, weighted or not
    tokens: int = 0  # that count
    loss: float = 0.0  # sum over the finite ones
    nonfinite: int = 0
    losses: list[float] = field(default_factory=list)  # of the tokens that count
    learnt: list[int] = field(default_factory=list)  # these tokens

    @property
    def mean_loss(self) -> float:
        return math.inf if self.nonfinite else self.loss / max(1, self.tokens)


def parts_of(
    stream: BatchStream | IterableStream, batches: Sequence[Batch], nll: Sequence[npt.NDArray[np.float64]]
) -> list[DocumentPart]:
    """Every document of some micro-batches with its tokens' losses, in the order of the batches."""
    found: dict[tuple[int, str, int, int], DocumentPart] = {}
    for k, (batch, nll_RT) in enumerate(zip(batches, nll, strict=True)):
        for row, number, origin in stream.locate(batch):
            source = int(batch.sources[row])
            key = (source, origin.file, origin.row, origin.document)
            part = found.setdefault(key, DocumentPart(stream.names[source], origin))
            here = batch.documents[row] == number
            counts = here & (batch.weights[row] > 0)
            counted = nll_RT[row][counts]
            part.losses.extend(counted.tolist())
            part.learnt.extend(batch.targets[row][counts].tolist())
            finite = np.isfinite(counted)
            part.places.append((k, row, number))
            part.ids.extend(batch.targets[row][here].tolist())
            part.tokens += counted.size
            part.loss += float(counted[finite].sum())
            part.nonfinite += int((~finite).sum())
    return [part for part in found.values() if part.tokens]


def weigh(batches: Sequence[Batch], parts: Iterable[DocumentPart], only: bool) -> list[Batch]:
    """The batches with only these documents, or without them: the others weigh nothing, as banned ones do. Rows in
    which nothing counts are left out, so that a group costs no more than its rows."""
    chosen = [np.zeros(batch.weights.shape, np.bool_) for batch in batches]
    for part in parts:
        for k, row, number in part.places:
            chosen[k][row] |= batches[k].documents[row] == number
    result = []
    for batch, mask in zip(batches, chosen, strict=True):
        weights = np.where(mask == only, batch.weights, np.float32(0))
        rows = np.flatnonzero(weights.any(axis=1))
        if rows.size:
            result.append(Batch(**{**{n: array[rows] for n, array in vars(batch).items()}, "weights": weights[rows]}))
    return result


def stand_out(parts: Sequence[DocumentPart], normal: Sequence[DocumentPart], low: bool = False) -> list[DocumentPart]:
    """The documents whose loss hardly any of normal batches (at the same weights) comes near, most loss first.

    Deviations grow with the root of a document's length, so that three strange words do not make a strange document.
    """
    strange = [part for part in parts if part.nonfinite]
    known = [part for part in normal if not part.nonfinite]
    if not known or strange:
        return strange
    centre = sum(part.loss for part in known) / sum(part.tokens for part in known)
    sign = -1 if low else 1

    def deviation(part: DocumentPart) -> float:
        return sign * (part.mean_loss - centre) * math.sqrt(part.tokens)

    usual = np.array([deviation(part) for part in known])
    scale = max(1.4826 * float(np.median(np.abs(usual - np.median(usual)))), 0.02 * centre, 1e-9)
    # Not their largest: a document of several rows may lie in those batches too.
    line = max(STANDS_OUT * scale, 2 * float(np.quantile(usual, 0.9)))
    out = [part for part in parts if part.tokens >= FEW and deviation(part) > line]
    return sorted(out, key=lambda part: -sign * (part.loss - part.tokens * centre))


def gradient_shares(
    engine: Engine, batches: Sequence[Batch], groups: Sequence[Sequence[DocumentPart]], room: Callable[[], bool]
) -> dict[int, float]:
    """Shares of the gradient by id() of the part, for the documents that the halving reached: those with more than
    their tokens' share, worst first, within `room` and MOST_PASSES. It needs memory for one more gradient."""
    count = sum(batch.count for batch in batches)
    whole = _gradient(engine, batches, count)
    square = _product(engine, whole, whole)
    additive = math.isfinite(square) and square > 0

    def share(group: Sequence[DocumentPart]) -> float:
        gradient = _gradient(engine, weigh(batches, group, only=True), count)
        if not additive:  # then the question is only who makes it non-finite
            bad = [float(not bool(g.isfinite().all())) for g in gradient.values()]
            return float(engine.world.sums([sum(bad)])[0] > 0)
        return _product(engine, gradient, whole) / square

    order = iter(range(10**9))  # ties of the heap
    heap: list[tuple[float, int, float, list[DocumentPart]]] = []

    def push(group: Sequence[DocumentPart], value: float, first: bool = False) -> None:
        surplus = math.inf if first else value - sum(part.tokens for part in group) / count
        heapq.heappush(heap, (-surplus, next(order), value, list(group)))

    for group in groups:
        if group and room():
            push(group, share(group), first=True)
    result: dict[int, float] = {}
    passes = len(heap)
    while heap:
        less, _, value, group = heapq.heappop(heap)
        if len(group) == 1:
            result[id(group[0])] = value
        elif less < -0.02 and passes < MOST_PASSES and room():
            left, right = group[: len(group) // 2], group[len(group) // 2 :]
            found = share(left)
            push(left, found)
            push(right, value - found if additive else share(right))
            passes += 1 if additive else 2
    return result


def _gradient(engine: Engine, batches: Sequence[Batch], count: float) -> dict[str, Tensor]:
    engine.discard_gradients()
    if batches:
        run_pass(engine, batches, count)
    gradient = {name: local(p.grad) for name, p in engine.model.named_parameters() if p.grad is not None}
    engine.discard_gradients()
    return gradient


def _product(engine: Engine, a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The inner product of two gradients, of which each process holds its parts; what several hold counts once."""
    each = {name: float(torch.sum(a[name].double() * b[name].double())) for name in a if name in b}
    return sum(sum_of_parts(engine, each).values())


def repetition(ids: Sequence[int]) -> tuple[int, float]:
    """(p, share): the distance p <= 16 at which most tokens equal the one p places before, and that share of them."""
    tokens = np.asarray(ids)
    best = (0, 0.0)
    for period in range(1, min(LONGEST_PERIOD, tokens.size // 4) + 1):
        share = float((tokens[period:] == tokens[:-period]).mean())
        if share > best[1] + 1e-9:
            best = (period, share)
    return best


def pattern(ids: Sequence[int]) -> str:
    """`one 3-token pattern repeated 85 times`, or nothing."""
    period, share = repetition(ids)
    if share < 0.8 or len(ids) < 16:
        return ""
    return f"one {period}-token pattern repeated {len(ids) // period} times"


def accuse(
    parts: Sequence[DocumentPart],
    convicted: Sequence[DocumentPart],
    total_loss: float,
    shares: dict[int, float],
    decode: Callable[[list[int]], str] | None,
) -> list[AccusedDocument]:
    """What the report says of these documents."""
    result, guilty = [], {id(part) for part in convicted}
    for k, part in enumerate(parts):
        excerpt = ""
        if k < MOST_EXCERPTS:  # a whole shard may be accused
            ids = part.ids[: 2 * EXCERPT]
            text = decode(ids) if decode else "tokens " + " ".join(map(str, ids))
            words = pattern(part.ids)
            excerpt = f"[{words}] {text}"[:EXCERPT] if words else text[:EXCERPT]
        origin = part.origin
        finite = math.isfinite(total_loss) and total_loss > 0 and not part.nonfinite
        share = part.loss / total_loss if finite else None
        said = AccusedDocument(
            source=part.source, file=origin.file, row=origin.row, document_id=origin.document_id,
            document=origin.document, tokens=part.tokens, mean_loss=part.mean_loss, loss_share=share,
            grad_share=shares.get(id(part)), convicted=id(part) in guilty, excerpt=excerpt,
        )  # fmt: skip
        result.append(said)
    return result


def heaviest(parts: Sequence[DocumentPart], shares: dict[int, float], growth: float, tokens: int) -> list[DocumentPart]:
    """Documents with more of the gradient than their share of the tokens, and several times what as many tokens give on
    a normal batch. `growth` is the gradient's norm against the normal one."""

    def heavy(part: DocumentPart) -> bool:
        share, fair = shares.get(id(part), 0.0), part.tokens / tokens
        return share > max(1.1 * fair, 0.02) and share * growth > HEAVY * fair

    return sorted(filter(heavy, parts), key=lambda part: -shares[id(part)])


STEPS = 50
KINDS = {
    "started", "spec_changed", "lock_taken", "guard_reopened", "guard_gave_way", "digits_may_differ", "rollback",
    "optimizer_fallback", "checkpoint_passed_over", "save_failed", "excluded", "alarm",
}  # fmt: skip
Event = Mapping[str, Any]


def what_changed(job: Job, scene: StepScene, events: Sequence[Event] = (), steps: int = STEPS) -> list[str]:
    """One line for each change in the last `steps` steps, in their order."""
    first = max(0, scene.step - steps)
    found = [*_rates(job, scene, first), *_batches(job, scene, first), *_happened(events, first, scene.step)]
    if isinstance(job.data.stream, BatchStream):
        found += _data(job.data.stream, scene.step, first)
    return [line for _, line in sorted(found, key=lambda entry: entry[0])]


def _rates(job: Job, scene: StepScene, first: int) -> Iterator[tuple[int, str]]:
    records = [*scene.history, {"step": scene.step, "lr": scene.lr}]
    for last, record in pairwise(record for record in records if as_number(record.get("lr"))):
        step, before, rate = int(record["step"]), float(last["lr"]), float(record["lr"])
        planned = job.lr(step)
        as_planned = abs(rate / planned - 1) < 0.01
        growing = as_planned and step <= job.engine.schedule.warmup
        if step >= first and not 0.67 <= rate / before <= 1.5 and not growing:
            remark = "" if as_planned else f"; the schedule says {planned:.3g}"
            line = f"learning rate {before:.3g} -> {rate:.3g} (x{rate / before:.3g}{remark})"
            yield step, f"step {step}: {line}"


def _batches(job: Job, scene: StepScene, first: int) -> Iterator[tuple[int, str]]:
    steps = job.data.stream.steps
    for last, phase in pairwise(steps.batch_phases):
        if first <= phase.from_step <= scene.step:
            yield phase.from_step, f"step {phase.from_step}: batch size {last.rows} -> {phase.rows} sequences"
    for segment in steps.segments[1:]:
        if first <= segment.from_step <= scene.step:
            line = f"step {segment.from_step}: the data goes on at position {segment.position} (a skip)"
            yield segment.from_step, line


def _data(stream: BatchStream, step: int, first: int) -> Iterator[tuple[int, str]]:
    """Phases, new epochs, and a step whose sources are not dealt as in the steps before."""
    numbers = range(first, step + 1)
    ranges = [stream.steps.range(k) for k in numbers]
    positions = np.concatenate([np.arange(*span) for span in ranges])
    at_step = np.repeat(np.array(numbers), [stop - start for start, stop in ranges])
    sources, _, epochs = stream.order.resolve(positions)
    for k, phase in enumerate(stream.order.phases):
        inside = at_step[positions >= phase.start]
        if k and inside.size and positions[0] < phase.start:
            shares = zip(phase.mixture.names, phase.mixture.counts, strict=True)
            words = ", ".join(f"{name} {count / phase.mixture.block:.1%}" for name, count in shares)
            yield int(inside[0]), f"step {inside[0]}: data phase {k + 1} begins ({words})"
    for s, name in enumerate(stream.names):
        mine = sources == s
        if not mine.any():
            continue
        epoch, here = epochs[mine], at_step[mine]
        for k in np.flatnonzero(np.diff(np.maximum.accumulate(epoch))).tolist():
            yield int(here[k + 1]), f"step {here[k + 1]}: epoch {epoch[k + 1] + 1} of source {name} begins"
        now, before = mine[at_step == step], mine[at_step < step]
        if before.size:
            usual = float(before.mean())
            noise = float(np.sqrt(max(usual * (1 - usual), 1 / before.size) / now.size))
            if abs(now.mean() - usual) > 4 * noise:
                line = f"step {step}: {now.mean():.0%} of the rows are of source {name}, {usual:.0%} before"
                yield step, line


def _happened(events: Sequence[Event], first: int, last: int) -> Iterator[tuple[int, str]]:
    """Events of these kinds. Some have no step: they belong to the one that the events before them had reached."""
    reached, starts = 0, [event for event in events if event.get("kind") == "started"]
    for event in events:
        reached = int(as_number(event.get("step")) or reached)
        if event.get("kind") in KINDS and first <= reached <= last:
            yield reached, f"step {reached}: {_told(event, starts)}"


def _told(event: Event, starts: Sequence[Event]) -> str:
    kind = str(event["kind"])
    if kind == "spec_changed":
        changes = dict(event.get("changes") or {})
        return "the spec changed: " + "; ".join(f"{key} {old} -> {new}" for key, (old, new) in changes.items())
    if kind != "started":
        return f"{kind.replace('_', ' ')}: {event.get('reason', '')}".rstrip(": ")
    at = next(k for k, start in enumerate(starts) if start is event)
    words = f"started on {event.get('device', '?')}"
    if event.get("resumed_from"):
        words += f" from {event['resumed_from']}"
    if at == 0:
        return words
    before = starts[at - 1]
    for key in ("versions", "machine", "host"):
        old, new = before.get(key), event.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            # Measured rates differ at every start; what the machine is does not.
            words += "".join(
                f"; {name} {old[name]} -> {value}"
                for name, value in new.items()
                if name in old and old[name] != value and not isinstance(value, Mapping)
            )
        elif old != new:
            words += f"; {key} {old} -> {new}"
    return words
