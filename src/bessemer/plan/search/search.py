"""The layouts that fit a cluster, the fastest of them, and why each of the others lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd
from typing import Literal

from bessemer.plan.cost_model.memory import Passes
from bessemer.plan.cost_model.operators import constants, work_of
from bessemer.plan.cost_model.rank_memory import RankNeeds, rank_needs
from bessemer.plan.cost_model.step_time import StepSetup, StepTime, micro_batches, padded_rows, step_time
from bessemer.plan.hardware import Cluster
from bessemer.plan.search.layout import Layout
from bessemer.spec.optimizer import ParameterBytes
from bessemer.spec.quantity import human_bytes
from bessemer.spec.shape import ModelShape

USABLE = 0.94  # of a device's memory: the rest is for what nobody foresees
LONG = 16_384  # tokens of a row from which on sharing its columns is worth a look
MOST_ROWS = 64  # of a micro-batch
Mode = Literal["none", "selective", "full"]
MODES: tuple[Mode, ...] = ("none", "selective", "full")
PARTS = {
    "compute": "computing", "tp": "exchanges inside layers", "dp": "gathering weights and adding up gradients",
    "pp": "passing between stages", "bubble": "stages that wait", "optimizer": "updates", "stall": "the host",
}  # fmt: skip


@dataclass(frozen=True)
class FixedDegrees:
    """What somebody has settled already, and the search leaves as it is. None: open."""

    dp_replicate: int | None = None
    dp_shard: int | None = None
    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    ep: int | None = None
    micro_rows: int | None = None
    activations: Mode | None = None
    stages: int | None = None  # of a pipeline, in each process


@dataclass(frozen=True)
class SearchGoal:
    """What is to be trained on what; the search decides the rest."""

    shape: ModelShape
    cluster: Cluster
    context: int
    rows: int  # of a step
    each: ParameterBytes
    precision: str = "bf16"
    kept: FixedDegrees = FixedDegrees()


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    micro_rows: int
    micro_batches: int  # of each process in a step, padding with them
    activations: Mode
    virtual: int
    needs: RankNeeds
    time: StepTime
    tokens_per_s: float
    mfu: float

    @property
    def padded_rows(self) -> int:
        """Rows that a step computes; more than those of the batch where these do not divide evenly."""
        return self.micro_batches * self.micro_rows * self.layout.dp

    def name(self) -> str:
        """The degrees above one, and how it is run."""
        degrees = {key: getattr(self.layout, key) for key in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")}
        words = [f"{key} {degree}" for key, degree in degrees.items() if degree > 1] or ["one GPU"]
        words += [f"micro-batch {self.micro_rows}", f"recompute {self.activations}"]
        return ", ".join(words + ([f"{self.virtual} stages each"] if self.virtual > 1 else []))


@dataclass(frozen=True)
class SearchResult:
    """The best of each layout, fastest first; what did not fit, nearest first; how many were looked at."""

    ranked: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    looked_at: int

    @property
    def best(self) -> Candidate:
        return self.ranked[0]


def search(wish: SearchGoal) -> SearchResult:
    """Every layout of the cluster, each with the micro-batch, recomputation and stages that serve it best. Where none
    fits, `ranked` is empty.

    Which layouts there are does not depend on the rows of a step, and none gets faster with more rows: a run of more
    tokens never ends sooner. What follows from more GPUs is proposal.py's concern, which may leave some idle.
    """
    limit = USABLE * wish.cluster.gpu.memory_bytes
    ranked, too_large, looked_at = [], [], 0
    for layout in layouts(wish):
        fitting: Candidate | None = None
        smallest: Candidate | None = None
        for candidate in _ways(wish, layout, limit):
            looked_at += 1
            if candidate.needs.total > limit:
                smallest = min(smallest or candidate, candidate, key=lambda one: one.needs.total)
            elif fitting is None or candidate.tokens_per_s > fitting.tokens_per_s:
                fitting = candidate
        if fitting:
            ranked.append(fitting)
        elif smallest:
            too_large.append(smallest)
    ranked.sort(key=lambda one: -one.tokens_per_s)
    too_large.sort(key=lambda one: one.needs.total)
    return SearchResult(tuple(ranked), tuple(too_large), looked_at)


def least_seconds_per_token(wish: SearchGoal) -> float:
    """On one GPU, if it did nothing but compute, in the largest micro-batch: n of them never need less than an n-th."""
    setup = StepSetup(work_of(wish.shape), Layout(), MOST_ROWS, MOST_ROWS, wish.context, wish.precision)
    time = step_time(setup, replace(wish.cluster, count=1, per_node=1))
    return time.compute_s / (MOST_ROWS * wish.context)


def layouts(wish: SearchGoal) -> Iterator[Layout]:
    """Those that divide the model evenly, with tensors shared inside a node: no exchange inside a layer pays beyond."""
    shape, cluster, kept = wish.shape, wish.cluster, wish.kept
    whole = gcd(shape.heads, shape.kv_heads, shape.ffn or shape.heads)
    special = bool(shape.moe or shape.mamba or shape.mla) or shape.decoder_layers > 0
    for tp in _open(kept.tp, _divisors(cluster.per_node)):
        if whole % tp or (tp > 1 and special) or cluster.count % tp:
            continue
        for cp in _open(kept.cp, _divisors(cluster.count // tp)):
            columns = wish.context % (cp * tp) == 0 and (shape.heads // tp) % cp == 0 and not special
            short = kept.cp is None and (wish.context // cp < LONG // 4 or wish.context < LONG)
            if (cp > 1 and (not columns or short)) or cluster.count % (tp * cp):
                continue
            for pp in _open(kept.pp, _divisors(cluster.count // (tp * cp))):
                if pp > shape.layers or (pp > 1 and shape.decoder_layers) or cluster.count % (tp * cp * pp):
                    continue
                yield from _rows_among(wish, tp, cp, pp)


def _rows_among(wish: SearchGoal, tp: int, cp: int, pp: int) -> Iterator[Layout]:
    cluster, moe, kept = wish.cluster, wish.shape.moe, wish.kept
    dp = cluster.count // (tp * cp * pp)
    inside = max(1, cluster.per_node // (tp * cp))
    for shard in _open(kept.dp_shard, sorted({1, min(dp, inside), min(dp, inside * 8), dp})):
        if dp % shard or kept.dp_replicate not in (None, dp // shard):
            continue
        layout = Layout(dp // shard, shard, tp=tp, cp=cp, pp=pp)
        if layout.dp_replicate % 2 == 0 and dp // 2 >= wish.rows:
            continue  # half of the replicas have no row: half of the cluster is as fast
        if kept.ep in (None, 1):
            yield layout
        if moe and shard > 1 and moe.experts % shard == 0 and cp == 1 and kept.ep in (None, shard):
            yield replace(layout, ep=shard)


def _open(kept: int | None, usual: Iterable[int]) -> Iterable[int]:
    return usual if kept is None else (kept,)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _ways(wish: SearchGoal, layout: Layout, limit: float) -> Iterator[Candidate]:
    """Micro-batches from one row up for each mode of recomputation, until one no longer fits. What fits as it is is not
    tried with more computed again, which only costs."""
    stages, easy = _stages(wish, layout), 0  # easy: rows that fit with less computed again
    for how in _modes(wish):
        for rows in _micro_rows(wish, layout):
            if rows <= easy:
                continue
            found = [_candidate(wish, layout, rows, how, virtual) for virtual in stages]
            yield from found
            fitting = [candidate.needs.total <= limit for candidate in found]
            if not any(fitting):
                break
            easy = rows if all(fitting) else easy


def _stages(wish: SearchGoal, layout: Layout) -> list[int]:
    """Of a pipeline, in each process."""
    if layout.pp == 1:
        return [1]
    return [n for n in _open(wish.kept.stages, (1, 2, 4)) if layout.pp * n <= wish.shape.layers]


def _modes(wish: SearchGoal) -> Iterable[Mode]:
    """Of recomputation, the fastest first."""
    return MODES if wish.kept.activations is None else (wish.kept.activations,)


def _micro_rows(wish: SearchGoal, layout: Layout) -> list[int]:
    share = -(-wish.rows // layout.dp)
    return list(_open(wish.kept.micro_rows, (n for n in (1, 2, 4, 8, 16, 32, MOST_ROWS) if n < 2 * share)))


def can_beat(wish: SearchGoal, tokens_per_s: float) -> bool:
    """Whether a layout that fits is faster than that. Cheaper than a search: memory is counted only for the fast ones,
    and the first of them will do."""
    limit = USABLE * wish.cluster.gpu.memory_bytes
    row_s = wish.context * least_seconds_per_token(wish) * wish.cluster.slower
    launch_s = constants().habits["compiled"].launch_s * work_of(wish.shape).depth * wish.cluster.slower
    most_s = wish.rows * wish.context / tokens_per_s
    for layout in layouts(wish):
        for rows, virtual in product(_micro_rows(wish, layout), _stages(wish, layout)):
            batches = micro_batches(wish.rows, layout, rows, virtual)
            inner = layout.tp * layout.cp
            if batches / layout.pp * max(rows * row_s / inner, launch_s) >= most_s:
                continue  # by computing alone, or by what the host needs to start it
            for how in _modes(wish):
                if wish.rows * wish.context <= tokens_per_s * _time(wish, layout, rows, how, virtual).total_s:
                    break  # what computes more again is slower still
                if _needs(wish, layout, rows, how, virtual).total <= limit:
                    return True
    return False


def _needs(wish: SearchGoal, layout: Layout, rows: int, how: Mode, virtual: int) -> RankNeeds:
    shape, batches = wish.shape, micro_batches(wish.rows, layout, rows, virtual)
    dense = layout.tp == 1 and not (shape.moe or shape.mamba)
    passes = Passes(wish.context, rows, wish.precision, how, dense, "cuda", several=batches > 1)
    return rank_needs(shape, layout, wish.each, passes, batches, virtual)


def _time(wish: SearchGoal, layout: Layout, rows: int, how: Mode, virtual: int) -> StepTime:
    setup = StepSetup(
        work_of(wish.shape), layout, rows, padded_rows(wish.rows, layout, rows, virtual), wish.context, wish.precision,
        how, virtual=virtual, sequence_parallel=layout.tp > 1,
    )  # fmt: skip
    return step_time(setup, wish.cluster)


def _candidate(wish: SearchGoal, layout: Layout, rows: int, how: Mode, virtual: int) -> Candidate:
    batches = micro_batches(wish.rows, layout, rows, virtual)
    needs, time = _needs(wish, layout, rows, how, virtual), _time(wish, layout, rows, how, virtual)
    rate = wish.rows * wish.context / time.total_s
    half = "bf16" if wish.precision.startswith("fp8") else wish.precision
    peak = wish.cluster.count * wish.cluster.gpu.peak(half)
    mfu = rate * _flops_per_token(wish.shape, wish.context) / peak
    return Candidate(layout, rows, batches, how, virtual, needs, time, rate, mfu)


@lru_cache(maxsize=64)
def _flops_per_token(shape: ModelShape, context: int) -> int:
    return shape.flops_per_token(context)


def why(best: Candidate, other: Candidate, wish: SearchGoal) -> str:
    """In what `other` loses to `best`."""
    limit = USABLE * wish.cluster.gpu.memory_bytes
    if other.needs.total > limit:
        return f"does not fit: {human_bytes(other.needs.total)} of {human_bytes(int(limit))} ({other.needs.words()})"
    slower = other.time.total_s / best.time.total_s - 1
    lost = {key: seconds - best.time.parts[key] for key, seconds in other.time.parts.items()}
    worst = max(lost, key=lambda key: lost[key])
    share = lost[worst] / best.time.total_s
    return f"{slower:.1%} slower: {PARTS[worst]} takes {share:+.1%} of a step more"


def nearest(wish: SearchGoal, found: SearchResult) -> str:
    """What would make an impossible wish possible, in numbers."""
    gpu = wish.cluster.gpu
    least = found.too_large[0]
    need, have = least.needs.total, USABLE * gpu.memory_bytes
    states = int(wish.each.device * wish.shape.parameters)
    gpus = max(-(-states // int(0.6 * have)), wish.cluster.count + 1)
    return (
        f"nothing fits: the leanest layout ({least.name()}) needs {human_bytes(need)} of {human_bytes(int(have))} on "
        f"each {gpu.name}. Weights, gradients and moments alone are {human_bytes(states)}: about {gpus} GPUs hold them "
        "with room to work, or a lighter optimizer (memory.moments: 8bit), or an adapter"
    )
