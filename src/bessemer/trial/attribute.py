"""Attributes an anomaly to documents, by their shares of the loss and of the gradient, and lists what changed in the
steps before it: data, learning rate, batch size, spec, machine, restarts.

A group's share of the gradient is its projection on the total: <g_group, g> / |g|^2. Shares add up, so one pass over
one half of a group gives both halves, and only groups with more than their share of tokens are divided further.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from bessemer.run.journal import to_number as as_number
from bessemer.train.engine import Engine
from bessemer.train.job import Job
from bessemer.trial.case import AccusedDocument, StepScene
from bessemer.trial.measure import run_pass, sum_shards

OUTLIER_SIGMA = 5.0  # robust deviations of a document's loss; and above twice the 90 % quantile of normal batches
LEAST_TOKENS = 4  # of a document
HEAVY_GRADIENT = 3.0  # times the gradient of the same number of normal tokens
LONGEST_PERIOD = 16
MOST_PASSES = 24
EXCERPT_CHARS = 400  # characters
MOST_EXCERPTS = 32


@dataclass(eq=False)
class DocumentPart:
    """A document's tokens in a step."""

    source: str
    origin: Origin
    locations: list[tuple[int, int, int]] = field(default_factory=list)  # micro-batch, row, number in the row
    ids: list[int] = field(default_factory=list)  # target tokens, with or without weight
    tokens: int = 0  # with weight
    loss: float = 0.0  # sum of the finite losses
    nonfinite: int = 0
    losses: list[float] = field(default_factory=list)  # of the tokens with weight
    counted_ids: list[int] = field(default_factory=list)  # these tokens' ids

    @property
    def mean_loss(self) -> float:
        return math.inf if self.nonfinite else self.loss / max(1, self.tokens)


def document_parts(
    stream: BatchStream | IterableStream, batches: Sequence[Batch], nll: Sequence[npt.NDArray[np.float64]]
) -> list[DocumentPart]:
    """Every document of some micro-batches with its token losses, in batch order."""
    parts: dict[tuple[int, str, int, int], DocumentPart] = {}
    for k, (batch, nll_RT) in enumerate(zip(batches, nll, strict=True)):
        for row, number, origin in stream.locate(batch):
            source = int(batch.sources[row])
            key = (source, origin.file, origin.row, origin.document)
            part = parts.setdefault(key, DocumentPart(stream.names[source], origin))
            mask = batch.documents[row] == number
            counts = mask & (batch.weights[row] > 0)
            counted = nll_RT[row][counts]
            part.losses.extend(counted.tolist())
            part.counted_ids.extend(batch.targets[row][counts].tolist())
            finite = np.isfinite(counted)
            part.locations.append((k, row, number))
            part.ids.extend(batch.targets[row][mask].tolist())
            part.tokens += counted.size
            part.loss += float(counted[finite].sum())
            part.nonfinite += int((~finite).sum())
    return [part for part in parts.values() if part.tokens]


def reweight(batches: Sequence[Batch], parts: Iterable[DocumentPart], only: bool) -> list[Batch]:
    """The batches with only these documents, or without them: all others get weight zero, as banned ones do. Rows
    without weight are dropped, so that a group costs no more than its rows."""
    chosen = [np.zeros(batch.weights.shape, np.bool_) for batch in batches]
    for part in parts:
        for k, row, number in part.locations:
            chosen[k][row] |= batches[k].documents[row] == number
    result = []
    for batch, mask in zip(batches, chosen, strict=True):
        weights = np.where(mask == only, batch.weights, np.float32(0))
        rows = np.flatnonzero(weights.any(axis=1))
        if rows.size:
            result.append(replace(batch.select(rows), weights=weights[rows]))
    return result


def find_loss_outliers(
    parts: Sequence[DocumentPart], normal: Sequence[DocumentPart], low: bool = False
) -> list[DocumentPart]:
    """Documents whose loss is far above those of normal batches at the same weights, largest excess first. With `low`,
    far below. Deviations are scaled by the square root of the length: a few odd tokens are no odd document."""
    nonfinite = [part for part in parts if part.nonfinite]
    references = [part for part in normal if not part.nonfinite]
    if not references or nonfinite:
        return nonfinite
    centre = sum(part.loss for part in references) / sum(part.tokens for part in references)
    sign = -1 if low else 1

    def deviation(part: DocumentPart) -> float:
        return sign * (part.mean_loss - centre) * math.sqrt(part.tokens)

    usual = np.array([deviation(part) for part in references])
    scale = max(1.4826 * float(np.median(np.abs(usual - np.median(usual)))), 0.02 * centre, 1e-9)
    # A quantile, not the maximum: a long bad document may be in those batches too.
    limit = max(OUTLIER_SIGMA * scale, 2 * float(np.quantile(usual, 0.9)))
    out = [part for part in parts if part.tokens >= LEAST_TOKENS and deviation(part) > limit]
    return sorted(out, key=lambda part: -sign * (part.loss - part.tokens * centre))


def gradient_shares(
    engine: Engine, batches: Sequence[Batch], groups: Sequence[Sequence[DocumentPart]], has_time: Callable[[], bool]
) -> dict[int, float]:
    """Shares of the gradient by id() of the part, for documents with more than their share of tokens, worst first,
    within `has_time` and MOST_PASSES. Needs memory for one more gradient."""
    count = sum(batch.count for batch in batches)
    total = _gradient(engine, batches, count)
    square = _product(engine, total, total)
    additive = math.isfinite(square) and square > 0

    def share(group: Sequence[DocumentPart]) -> float:
        gradient = _gradient(engine, reweight(batches, group, only=True), count)
        if not additive:  # only find which group makes it non-finite
            bad = [float(not bool(g.isfinite().all())) for g in gradient.values()]
            return float(engine.world.sums([sum(bad)])[0] > 0)
        return _product(engine, gradient, total) / square

    order = iter(range(10**9))  # breaks ties in the heap
    heap: list[tuple[float, int, float, list[DocumentPart]]] = []

    def push(group: Sequence[DocumentPart], value: float, first: bool = False) -> None:
        surplus = math.inf if first else value - sum(part.tokens for part in group) / count
        heapq.heappush(heap, (-surplus, next(order), value, list(group)))

    for group in groups:
        if group and has_time():
            push(group, share(group), first=True)
    result: dict[int, float] = {}
    passes = len(heap)
    while heap:
        less, _, value, group = heapq.heappop(heap)
        if len(group) == 1:
            result[id(group[0])] = value
        elif less < -0.02 and passes < MOST_PASSES and has_time():
            left, right = group[: len(group) // 2], group[len(group) // 2 :]
            left_share = share(left)
            push(left, left_share)
            push(right, value - left_share if additive else share(right))
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
    """The inner product of two gradients over all shards; replicated shards count once."""
    products = {name: float(torch.sum(a[name].double() * b[name].double())) for name in a if name in b}
    return sum(sum_shards(engine, products).values())


def find_repetition(ids: Sequence[int]) -> tuple[int, float]:
    """(p, share): the period p <= 16 at which most tokens repeat the one p positions before, and the share that do."""
    tokens = np.asarray(ids)
    best = (0, 0.0)
    for period in range(1, min(LONGEST_PERIOD, tokens.size // 4) + 1):
        share = float((tokens[period:] == tokens[:-period]).mean())
        if share > best[1] + 1e-9:
            best = (period, share)
    return best


def describe_repetition(ids: Sequence[int]) -> str:
    """`one 3-token pattern repeated 85 times`, or an empty string."""
    period, share = find_repetition(ids)
    if share < 0.8 or len(ids) < 16:
        return ""
    return f"one {period}-token pattern repeated {len(ids) // period} times"


def describe_accused(
    parts: Sequence[DocumentPart],
    convicted: Sequence[DocumentPart],
    total_loss: float,
    shares: dict[int, float],
    decode: Callable[[list[int]], str] | None,
) -> list[AccusedDocument]:
    """Documents as the report lists them."""
    result, guilty = [], {id(part) for part in convicted}
    for k, part in enumerate(parts):
        excerpt = ""
        if k < MOST_EXCERPTS:  # a full shard may be accused
            ids = part.ids[: 2 * EXCERPT_CHARS]
            text = decode(ids) if decode else "tokens " + " ".join(map(str, ids))
            words = describe_repetition(part.ids)
            excerpt = f"[{words}] {text}"[:EXCERPT_CHARS] if words else text[:EXCERPT_CHARS]
        origin = part.origin
        finite = math.isfinite(total_loss) and total_loss > 0 and not part.nonfinite
        share = part.loss / total_loss if finite else None
        described = AccusedDocument(
            source=part.source, file=origin.file, row=origin.row, document_id=origin.document_id,
            document=origin.document, tokens=part.tokens, mean_loss=part.mean_loss, loss_share=share,
            grad_share=shares.get(id(part)), convicted=id(part) in guilty, excerpt=excerpt,
        )  # fmt: skip
        result.append(described)
    return result


def find_heavy_gradients(
    parts: Sequence[DocumentPart], shares: dict[int, float], growth: float, tokens: int
) -> list[DocumentPart]:
    """Documents whose share of the gradient exceeds their share of tokens, and several times what the same tokens
    contribute in a normal batch. `growth` is the gradient norm over the normal one."""

    def heavy(part: DocumentPart) -> bool:
        share, fair = shares.get(id(part), 0.0), part.tokens / tokens
        return share > max(1.1 * fair, 0.02) and share * growth > HEAVY_GRADIENT * fair

    return sorted(filter(heavy, parts), key=lambda part: -shares[id(part)])


CHANGES_WITHIN = 50
CHANGE_EVENTS = {
    "started", "spec_changed", "lock_taken", "guard_reopened", "guard_gave_way", "digits_may_differ", "rollback",
    "optimizer_fallback", "checkpoint_passed_over", "save_failed", "excluded", "alarm",
}  # fmt: skip
Event = Mapping[str, Any]


def list_changes(job: Job, scene: StepScene, events: Sequence[Event] = (), steps: int = CHANGES_WITHIN) -> list[str]:
    """One line for each change in the last `steps` steps, in order."""
    first = max(0, scene.step - steps)
    changes = [
        *_lr_changes(job, scene, first),
        *_batch_changes(job, scene, first),
        *_event_changes(events, first, scene.step),
    ]
    if isinstance(job.data.stream, BatchStream):
        changes += _data_changes(job.data.stream, scene.step, first)
    return [line for _, line in sorted(changes, key=lambda entry: entry[0])]


def _lr_changes(job: Job, scene: StepScene, first: int) -> Iterator[tuple[int, str]]:
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


def _batch_changes(job: Job, scene: StepScene, first: int) -> Iterator[tuple[int, str]]:
    steps = job.data.stream.steps
    for last, phase in pairwise(steps.batch_phases):
        if first <= phase.from_step <= scene.step:
            yield phase.from_step, f"step {phase.from_step}: batch size {last.rows} -> {phase.rows} sequences"
    for segment in steps.segments[1:]:
        if first <= segment.from_step <= scene.step:
            line = f"step {segment.from_step}: the data goes on at position {segment.position} (a skip)"
            yield segment.from_step, line


def _data_changes(stream: BatchStream, step: int, first: int) -> Iterator[tuple[int, str]]:
    """New phases, new epochs, and a mixture of sources unlike that of the steps before."""
    numbers = range(first, step + 1)
    ranges = [stream.steps.range(k) for k in numbers]
    positions = np.concatenate([np.arange(*span) for span in ranges])
    at_step = np.repeat(np.array(numbers), [stop - start for start, stop in ranges])
    sources, _, epochs = stream.order.resolve(positions)
    for k, phase in enumerate(stream.order.phases):
        steps_in = at_step[positions >= phase.start]
        if k and steps_in.size and positions[0] < phase.start:
            shares = zip(phase.mixture.names, phase.mixture.counts, strict=True)
            words = ", ".join(f"{name} {count / phase.mixture.block:.1%}" for name, count in shares)
            yield int(steps_in[0]), f"step {steps_in[0]}: data phase {k + 1} begins ({words})"
    for s, name in enumerate(stream.names):
        of_source = sources == s
        if not of_source.any():
            continue
        epoch, steps_of = epochs[of_source], at_step[of_source]
        for k in np.flatnonzero(np.diff(np.maximum.accumulate(epoch))).tolist():
            yield int(steps_of[k + 1]), f"step {steps_of[k + 1]}: epoch {epoch[k + 1] + 1} of source {name} begins"
        now, before = of_source[at_step == step], of_source[at_step < step]
        if before.size:
            usual = float(before.mean())
            noise = float(np.sqrt(max(usual * (1 - usual), 1 / before.size) / now.size))
            if abs(now.mean() - usual) > 4 * noise:
                line = f"step {step}: {now.mean():.0%} of the rows are of source {name}, {usual:.0%} before"
                yield step, line


def _event_changes(events: Sequence[Event], first: int, last: int) -> Iterator[tuple[int, str]]:
    """Events of these kinds. An event without a step belongs to the step of the events before it."""
    reached, starts = 0, [event for event in events if event.get("kind") == "started"]
    for event in events:
        reached = int(as_number(event.get("step")) or reached)
        if event.get("kind") in CHANGE_EVENTS and first <= reached <= last:
            yield reached, f"step {reached}: {_describe_event(event, starts)}"


def _describe_event(event: Event, starts: Sequence[Event]) -> str:
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
            # Nested values are measured rates, which differ at every start.
            words += "".join(
                f"; {name} {old[name]} -> {value}"
                for name, value in new.items()
                if name in old and old[name] != value and not isinstance(value, Mapping)
            )
        elif old != new:
            words += f"; {key} {old} -> {new}"
    return words
