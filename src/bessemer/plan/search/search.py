"""Searches the layouts of a cluster for the fastest that fits in memory, and explains why the others lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd
from typing import Literal

from bessemer.plan.cost_model.memory import Passes, RankNeeds, rank_needs
from bessemer.plan.cost_model.operators import constants, step_work
from bessemer.plan.cost_model.step_time import StepSetup, StepTime, micro_batches, padded_rows, step_time
from bessemer.plan.hardware import Cluster
from bessemer.plan.search.layout import Layout
from bessemer.spec.optimizer import ParameterBytes
from bessemer.spec.quantity import human_bytes
from bessemer.spec.shape import ModelShape

USABLE = 0.94  # of a device's memory; the rest is a reserve
LONG = 16_384  # tokens of a row from which context parallelism is tried
MOST_ROWS = 64  # of a micro-batch
Mode = Literal["none", "selective", "full"]
MODES: tuple[Mode, ...] = ("none", "selective", "full")
PARTS = {
    "compute": "computing", "tp": "exchanges inside layers", "dp": "gathering weights and adding up gradients",
    "pp": "passing between stages", "bubble": "stages that wait", "optimizer": "updates", "stall": "the host",
}  # fmt: skip


@dataclass(frozen=True)
class FixedDegrees:
    """Settings of the user that the search does not change. None: open."""

    dp_replicate: int | None = None
    dp_shard: int | None = None
    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    ep: int | None = None
    micro_rows: int | None = None
    activations: Mode | None = None
    stages: int | None = None  # pipeline stages per process


@dataclass(frozen=True)
class SearchGoal:
    """The model, the cluster and the batch. The search decides the rest."""

    shape: ModelShape
    cluster: Cluster
    context: int
    rows: int  # of a step
    parameter_bytes: ParameterBytes
    precision: str = "bf16"
    fixed: FixedDegrees = FixedDegrees()


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    micro_rows: int
    micro_batches: int  # of each process in a step, with padding
    activations: Mode
    virtual: int  # pipeline stages per process
    needs: RankNeeds
    time: StepTime
    tokens_per_s: float
    mfu: float

    @property
    def padded_rows(self) -> int:
        """Rows that a step computes: those of the batch, padded until they divide evenly."""
        return self.micro_batches * self.micro_rows * self.layout.dp

    def name(self) -> str:
        """The degrees above one, the micro-batch and the recomputation."""
        degrees = {key: getattr(self.layout, key) for key in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")}
        parts = [f"{key} {degree}" for key, degree in degrees.items() if degree > 1] or ["one GPU"]
        parts += [f"micro-batch {self.micro_rows}", f"recompute {self.activations}"]
        return ", ".join(parts + ([f"{self.virtual} stages each"] if self.virtual > 1 else []))


@dataclass(frozen=True)
class SearchResult:
    """The best candidate of each layout, fastest first, and those that do not fit, smallest first."""

    ranked: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        return self.ranked[0]


def search(goal: SearchGoal) -> SearchResult:
    """Tries every layout of the cluster with its best micro-batch, recomputation and stages. `ranked` is empty if
    nothing fits.

    The set of layouts does not depend on the rows of a step, and no layout gets faster with more rows: a run of more
    tokens never ends sooner. proposal.py decides whether to leave GPUs idle.
    """
    limit = USABLE * goal.cluster.gpu.memory_bytes
    ranked, too_large = [], []
    for layout in layouts(goal):
        fitting: Candidate | None = None
        smallest: Candidate | None = None
        for candidate in _candidates(goal, layout, limit):
            if candidate.needs.total > limit:
                smallest = min(smallest or candidate, candidate, key=lambda c: c.needs.total)
            elif fitting is None or candidate.tokens_per_s > fitting.tokens_per_s:
                fitting = candidate
        if fitting:
            ranked.append(fitting)
        elif smallest:
            too_large.append(smallest)
    ranked.sort(key=lambda candidate: -candidate.tokens_per_s)
    too_large.sort(key=lambda candidate: candidate.needs.total)
    return SearchResult(tuple(ranked), tuple(too_large))


def least_seconds_per_token(goal: SearchGoal) -> float:
    """Compute time per token on one GPU in the largest micro-batch. n GPUs never need less than 1/n of it."""
    setup = StepSetup(step_work(goal.shape), Layout(), MOST_ROWS, MOST_ROWS, goal.context, goal.precision)
    time = step_time(setup, replace(goal.cluster, count=1, per_node=1))
    return time.compute_s / (MOST_ROWS * goal.context)


def layouts(goal: SearchGoal) -> Iterator[Layout]:
    """Layouts that divide the model evenly. Tensor parallelism stays inside a node: between nodes it never pays off."""
    shape, cluster, fixed = goal.shape, goal.cluster, goal.fixed
    divisible = gcd(shape.heads, shape.kv_heads, shape.ffn or shape.heads)
    special = bool(shape.moe or shape.mamba or shape.mla) or shape.decoder_layers > 0
    for tp in _choices(fixed.tp, _divisors(cluster.per_node)):
        if divisible % tp or (tp > 1 and special) or cluster.count % tp:
            continue
        for cp in _choices(fixed.cp, _divisors(cluster.count // tp)):
            columns = goal.context % (cp * tp) == 0 and (shape.heads // tp) % cp == 0 and not special
            short = fixed.cp is None and (goal.context // cp < LONG // 4 or goal.context < LONG)
            if (cp > 1 and (not columns or short)) or cluster.count % (tp * cp):
                continue
            for pp in _choices(fixed.pp, _divisors(cluster.count // (tp * cp))):
                if pp > shape.layers or (pp > 1 and shape.decoder_layers) or cluster.count % (tp * cp * pp):
                    continue
                yield from _data_parallel_layouts(goal, tp, cp, pp)


def _data_parallel_layouts(goal: SearchGoal, tp: int, cp: int, pp: int) -> Iterator[Layout]:
    cluster, moe, fixed = goal.cluster, goal.shape.moe, goal.fixed
    dp = cluster.count // (tp * cp * pp)
    inside = max(1, cluster.per_node // (tp * cp))
    for shard in _choices(fixed.dp_shard, sorted({1, min(dp, inside), min(dp, inside * 8), dp})):
        if dp % shard or fixed.dp_replicate not in (None, dp // shard):
            continue
        layout = Layout(dp // shard, shard, tp=tp, cp=cp, pp=pp)
        if layout.dp_replicate % 2 == 0 and dp // 2 >= goal.rows:
            continue  # half of the replicas have no row: half of the cluster is as fast
        if fixed.ep in (None, 1):
            yield layout
        if moe and shard > 1 and moe.experts % shard == 0 and cp == 1 and fixed.ep in (None, shard):
            yield replace(layout, ep=shard)


def _choices(setting: int | None, usual: Iterable[int]) -> Iterable[int]:
    return usual if setting is None else (setting,)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _candidates(goal: SearchGoal, layout: Layout, limit: float) -> Iterator[Candidate]:
    """Micro-batches from one row up for each mode of recomputation, until one no longer fits. A micro-batch that fits
    with less recomputation is not tried with more, which is slower."""
    stages, fitting_rows = _stages(goal, layout), 0  # rows that fit with less recomputation
    for mode in _modes(goal):
        for rows in _micro_rows(goal, layout):
            if rows <= fitting_rows:
                continue
            candidates = [_candidate(goal, layout, rows, mode, virtual) for virtual in stages]
            yield from candidates
            fits = [candidate.needs.total <= limit for candidate in candidates]
            if not any(fits):
                break
            fitting_rows = rows if all(fits) else fitting_rows


def _stages(goal: SearchGoal, layout: Layout) -> list[int]:
    """Choices of pipeline stages per process."""
    if layout.pp == 1:
        return [1]
    return [n for n in _choices(goal.fixed.stages, (1, 2, 4)) if layout.pp * n <= goal.shape.layers]


def _modes(goal: SearchGoal) -> Iterable[Mode]:
    """Modes of recomputation, fastest first."""
    return MODES if goal.fixed.activations is None else (goal.fixed.activations,)


def _micro_rows(goal: SearchGoal, layout: Layout) -> list[int]:
    share = -(-goal.rows // layout.dp)
    return list(_choices(goal.fixed.micro_rows, (n for n in (1, 2, 4, 8, 16, 32, MOST_ROWS) if n < 2 * share)))


def can_beat(goal: SearchGoal, tokens_per_s: float) -> bool:
    """Whether some layout that fits is faster than this rate. Cheaper than a search: it estimates memory only for fast
    candidates and stops at the first that fits."""
    limit = USABLE * goal.cluster.gpu.memory_bytes
    row_s = goal.context * least_seconds_per_token(goal) * goal.cluster.slower
    launch_s = constants().habits["compiled"].launch_s * step_work(goal.shape).depth * goal.cluster.slower
    most_s = goal.rows * goal.context / tokens_per_s
    for layout in layouts(goal):
        for rows, virtual in product(_micro_rows(goal, layout), _stages(goal, layout)):
            batches = micro_batches(goal.rows, layout, rows, virtual)
            inner = layout.tp * layout.cp
            if batches / layout.pp * max(rows * row_s / inner, launch_s) >= most_s:
                continue  # too slow by compute or by kernel launches alone
            for mode in _modes(goal):
                if goal.rows * goal.context <= tokens_per_s * _time(goal, layout, rows, mode, virtual).total_s:
                    break  # more recomputation is slower still
                if _needs(goal, layout, rows, mode, virtual).total <= limit:
                    return True
    return False


def _needs(goal: SearchGoal, layout: Layout, rows: int, mode: Mode, virtual: int) -> RankNeeds:
    shape, batches = goal.shape, micro_batches(goal.rows, layout, rows, virtual)
    dense = layout.tp == 1 and not (shape.moe or shape.mamba)
    passes = Passes(goal.context, rows, goal.precision, mode, dense, "cuda", several=batches > 1)
    return rank_needs(shape, layout, goal.parameter_bytes, passes, batches, virtual)


def _time(goal: SearchGoal, layout: Layout, rows: int, mode: Mode, virtual: int) -> StepTime:
    setup = StepSetup(
        step_work(goal.shape), layout, rows, padded_rows(goal.rows, layout, rows, virtual), goal.context,
        goal.precision, mode, virtual=virtual, sequence_parallel=layout.tp > 1,
    )  # fmt: skip
    return step_time(setup, goal.cluster)


def _candidate(goal: SearchGoal, layout: Layout, rows: int, mode: Mode, virtual: int) -> Candidate:
    batches = micro_batches(goal.rows, layout, rows, virtual)
    needs, time = _needs(goal, layout, rows, mode, virtual), _time(goal, layout, rows, mode, virtual)
    rate = goal.rows * goal.context / time.total_s
    half = "bf16" if goal.precision.startswith("fp8") else goal.precision
    peak = goal.cluster.count * goal.cluster.gpu.peak(half)
    mfu = rate * _flops_per_token(goal.shape, goal.context) / peak
    return Candidate(layout, rows, batches, mode, virtual, needs, time, rate, mfu)


@lru_cache(maxsize=64)
def _flops_per_token(shape: ModelShape, context: int) -> int:
    return shape.flops_per_token(context)


def explain_loss(best: Candidate, other: Candidate, goal: SearchGoal) -> str:
    """Why `other` loses to `best`."""
    limit = USABLE * goal.cluster.gpu.memory_bytes
    if other.needs.total > limit:
        return f"does not fit: {human_bytes(other.needs.total)} of {human_bytes(int(limit))} ({other.needs.words()})"
    slower = other.time.total_s / best.time.total_s - 1
    lost = {key: seconds - best.time.parts[key] for key, seconds in other.time.parts.items()}
    worst = max(lost, key=lambda key: lost[key])
    share = lost[worst] / best.time.total_s
    return f"{slower:.1%} slower: {PARTS[worst]} takes {share:+.1%} of a step more"


def explain_no_fit(goal: SearchGoal, result: SearchResult) -> str:
    """What the smallest layout needs, and how many GPUs would hold the model."""
    gpu = goal.cluster.gpu
    least = result.too_large[0]
    need, have = least.needs.total, USABLE * gpu.memory_bytes
    states = int(goal.parameter_bytes.device * goal.shape.parameters)
    gpus = max(-(-states // int(0.6 * have)), goal.cluster.count + 1)
    return (
        f"nothing fits: the leanest layout ({least.name()}) needs {human_bytes(need)} of {human_bytes(int(have))} on "
        f"each {gpu.name}. Weights, gradients and moments alone are {human_bytes(states)}: about {gpus} GPUs hold them "
        "with room to work; or use a lighter optimizer (memory.moments: 8bit), or an adapter"
    )
