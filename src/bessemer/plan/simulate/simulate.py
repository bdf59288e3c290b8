"""`bessemer plan --simulate`: a planned run played many times, for the spread of its finish and its cost, and for what
would change it.

Two scales. One step is played event by event (plan/simulate/events.py) for one column of stages; its slowest sister
among thousands follows from the spread of a column. The run is then played with steps of that length
(plan/simulate/events.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from statistics import NormalDist, fmean, pstdev

from bessemer.errors import UserError
from bessemer.plan.cost_model.cost import CHECKPOINT_BYTES, REQUEUE_S, Cost
from bessemer.plan.cost_model.goodput import goodput
from bessemer.plan.cost_model.operators import work_of
from bessemer.plan.cost_model.step_time import StepSetup
from bessemer.plan.hardware import Cluster
from bessemer.plan.search.proposal import Proposal
from bessemer.plan.simulate.events import (
    FailureRates,
    Kind,
    SimulatedJob,
    SimulatedRun,
    Step,
    StepTrace,
    length,
    play,
    play_run,
    shorter,
    step_of,
)
from bessemer.spec.quantity import parse_duration

MOST_GPUS = 100_000
FEWEST, MOST_RUNS = 8, 400
EVENTS = 30_000  # interruptions of all runs of a plan
LEAST_SHARE = 0.1  # of the time that must be kept for a run to be worth playing
COLUMN_PASSES, COLUMN_PLAYS = 1500, 200  # of the noisy columns
PICTURE_PASSES = 1200
NORMAL = NormalDist()
NEVER = math.inf


@dataclass(frozen=True)
class SimulatedStep:
    """Seconds of a step: as steptime sums it up, as events without noise, as the slowest of all columns, and that with
    a slow node among them. `trace` is for the picture, perhaps of fewer micro-batches."""

    step: Step
    columns: int
    peers: int  # GPUs that end every pass together
    planned_s: float
    events_s: float
    slowest_s: float
    slow_node_s: float
    shares: dict[str, float]  # of `events_s`, mean over the stages
    trace: StepTrace
    shown: int  # micro-batches of the trace


@dataclass(frozen=True)
class Spread:
    """Of a hundred runs ten end below p10, fifty below p50, ninety below p90."""

    p10: float
    p50: float
    p90: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        ranked = sorted(values)
        return Spread(*(_quantile(ranked, share) for share in (0.1, 0.5, 0.9)))

    def to_json(self) -> dict[str, float | None]:
        return {name: value if math.isfinite(value) else None for name, value in vars(self).items()}


def _quantile(ranked: list[float], share: float) -> float:
    """Each value stands in the middle of its own share of all."""
    place = min(max(share * len(ranked) - 0.5, 0.0), len(ranked) - 1.0)
    low, high = ranked[math.floor(place)], ranked[math.ceil(place)]
    return low + (high - low) * (place % 1) if math.isfinite(high) else high


@dataclass(frozen=True)
class Outcome:
    """Of the plan, or of the same with one thing changed; `change` is that of the same runs, the middle of them."""

    name: str
    runs: int
    wall_s: Spread
    usd: Spread | None
    change: float = 0.0


@dataclass(frozen=True)
class Simulation:
    proposal: Proposal
    step: SimulatedStep
    job: SimulatedJob
    chances: FailureRates
    seed: int
    offer: Cost | None  # whose price is taken
    plan: Outcome
    failures: Spread
    shares: dict[str, float]  # of the wall time, mean over the runs
    with_error: Outcome  # and the step time's own error
    what_ifs: tuple[Outcome, ...]


def simulate(proposal: Proposal, chances: FailureRates | None = None, seed: int = 0) -> Simulation:
    """Play the plan. Costs about a second for 100,000 GPUs."""
    cluster = proposal.wish.cluster
    if cluster.count > MOST_GPUS:
        most = f"up to {MOST_GPUS:,} GPUs are simulated"
        raise UserError(f"--simulate: {most}, not {cluster.count:,}: write fewer, or leave --simulate out")
    offers = sorted(proposal.costs, key=lambda cost: cost.price.term == "spot")  # the cheapest of each first
    offer = offers[0] if offers else None
    chances = _at_offer(chances or FailureRates(), offer)
    step = play_step(planned_step(proposal), proposal, chances, seed)
    job = _job(proposal, cluster, chances, step)
    runs = _play(job, chances, seed, _runs(job, chances))
    played = list(runs.values())
    plan = _outcome("as planned", played, offer)
    what_ifs = []
    for name, other, luck, at in _what_ifs(proposal, chances, step, job, offer):
        changed = _play(other, luck, seed, len(runs))
        ratios = [one.wall_s / runs[run].wall_s for run, one in changed.items()]
        change = _quantile(sorted(ratios), 0.5) - 1 if math.isfinite(plan.wall_s.p50) else 0.0
        what_ifs.append(replace(_outcome(name, list(changed.values()), at), change=change))
    return Simulation(
        proposal, step, job, chances, seed, offer, plan,
        failures=Spread.of([float(one.failures + one.preemptions) for one in played]),
        shares=_shares(played),
        with_error=_with_error(played, proposal.error, offer, seed),
        what_ifs=tuple(what_ifs),
    )  # fmt: skip


def setup_of(proposal: Proposal) -> StepSetup:
    """The configuration that the search found best, to be timed again."""
    wish, best = proposal.wish, proposal.best
    return StepSetup(
        work_of(wish.shape), best.layout, best.micro_rows, best.padded_rows, wish.context, wish.precision,
        best.activations, virtual=best.virtual, sequence_parallel=best.layout.tp > 1,
    )  # fmt: skip


def planned_step(proposal: Proposal, network: float = 1.0) -> Step:
    """The plan's step in parts, perhaps with so many times the network. A plan may hold corrections that this machine's
    runs have taught; they stretch every part alike."""
    setup, cluster = setup_of(proposal), proposal.wish.cluster
    step, known = step_of(setup, cluster)
    factor = proposal.best.time.total_s / known.total_s
    if network != 1.0:
        step, _ = step_of(setup, replace(cluster, network_bandwidth=cluster.network_bandwidth * network))
    return step.times(factor)


def play_step(step: Step, proposal: Proposal, chances: FailureRates, seed: int = 0) -> SimulatedStep:
    """Without noise, as the slowest column has it, with a slow node, and as a trace."""
    layout = proposal.best.layout
    # Shards without stages gather every layer together, so they end every pass together; replicas meet once a step.
    together = layout.dp_shard if layout.pp == 1 else 1
    peers = layout.tp * layout.cp * together
    columns = layout.dp // together
    quiet = length(step)
    slowest = quiet * slowest_of(step, columns, peers, chances.jitter, seed)
    # Where it hurts most: the last stage has the head too, and the others some slack.
    drag = length(step, (step.stages - 1, chances.slow_by)) / quiet
    few = shorter(step, PICTURE_PASSES)
    trace = play(few, record=True)
    shares = _parts(step, few, trace, quiet)
    return SimulatedStep(
        step, columns, peers, proposal.best.time.total_s, quiet, slowest, slowest * drag, shares, trace, few.batches
    )  # fmt: skip


def slowest_of(step: Step, columns: int, peers: int, jitter: float, seed: int = 0) -> float:
    """How many times as long a step takes when the computing of every GPU's every pass varies. Of `peers` each pass
    waits for the slowest; of `columns` the step does: mean and spread of one column give the mean of the largest of
    many (Blom 1958, normal order statistics)."""
    if jitter <= 0:
        return 1.0
    random = Random(seed)

    def noise() -> float:
        draw = random.random() or 0.5
        return max(0.0, 1 + jitter * NORMAL.inv_cdf(min(draw ** (1 / peers), 1 - 1e-12)))

    few = shorter(step, COLUMN_PASSES)
    plays = max(6, min(COLUMN_PLAYS, 10 * COLUMN_PASSES // few.passes))
    found = [play(few, noise).total_s for _ in range(plays)]
    # Spreads of sums grow with the root of their length.
    spread = pstdev(found) * math.sqrt(few.batches / step.batches)
    furthest = NORMAL.inv_cdf((columns - 0.375) / (columns + 0.25))
    return (fmean(found) + spread * furthest) / play(few).total_s


def _parts(step: Step, few: Step, trace: StepTrace, seconds: float) -> dict[str, float]:
    """Shares of a step by what they go to, from the spans of one with fewer micro-batches."""
    groups: dict[str, tuple[Kind, ...]] = {
        "compute": ("forward", "backward", "update"), "exchanges": ("exchange",), "hops": ("hop",),
        "weights and gradients": ("data", "reduce"), "host": ("host",),
    }  # fmt: skip
    sums = dict.fromkeys(groups, 0.0)
    for span in trace.spans:
        weight = step.batches / few.batches if span.batch >= 0 else 1.0
        name = next(name for name, kinds in groups.items() if span.kind in kinds)
        sums[name] += weight * (span.end - span.start) / (step.stages * seconds)
    return {**sums, "bubble": max(0.0, 1 - sum(sums.values()))}


def _at_offer(chances: FailureRates, offer: Cost | None) -> FailureRates:
    """Machines of that offer, which may be preempted."""
    often = offer.price.preemptions_per_hour if offer else 0.0
    if not often:
        return chances
    sure = replace(chances.reliability, preemptions_per_node_hour=often, requeue_s=REQUEUE_S)
    return replace(chances, reliability=sure)


def _job(proposal: Proposal, cluster: Cluster, chances: FailureRates, step: SimulatedStep) -> SimulatedJob:
    """The run in steps of the slowest column, with saves as often as the plan has them."""
    best, nodes = proposal.best, cluster.nodes
    every = _every_s(proposal, step) or goodput(nodes, chances.reliability).save_every_s
    writers = max(1, nodes // best.layout.dp_replicate)
    rate = chances.write_bytes_s
    write = CHECKPOINT_BYTES * proposal.shape.parameters / (writers * rate)
    writing = 0.0
    if nodes > 1:
        left = max(0.1, 1 - rate / cluster.network_bandwidth)
        writing = write * max(0.0, length(planned_step(proposal, left)) / step.events_s - 1)
    work = proposal.seconds * step.slowest_s / step.planned_s
    return SimulatedJob(nodes, work, max(every, write), step.slow_node_s / step.slowest_s, write, writing)


def _every_s(proposal: Proposal, step: SimulatedStep) -> float:
    """Seconds between saves that a spec asks for; 0: auto."""
    asked = proposal.asked.spec.checkpoint.every
    if asked == "auto":
        return 0.0
    return parse_duration(asked) if isinstance(asked, str) else asked * step.slowest_s


def _runs(job: SimulatedJob, chances: FailureRates) -> int:
    """How many are played of the plan: the fewer, the more often they are interrupted."""
    expected = goodput(job.nodes, chances.reliability, job.every_s).interruptions(job.work_s)
    return max(FEWEST, min(MOST_RUNS, int(EVENTS / max(1.0, expected))))


def _play(job: SimulatedJob, chances: FailureRates, seed: int, runs: int) -> dict[int, SimulatedRun]:
    """Runs by their number. How good the cluster is decides most of their spread, so they take that in equal steps from
    good to bad; what is interrupted far more often than the plan leaves some out. What hardly moves is not played."""
    expected = goodput(job.nodes, chances.reliability, job.every_s)
    if expected.share < LEAST_SHARE:
        return dict.fromkeys(range(runs), SimulatedRun(NEVER))
    step = math.ceil(expected.interruptions(job.work_s) * runs / (4 * EVENTS)) or 1
    taken = range(runs)[step // 2 :: step] or range(runs // 2, runs // 2 + 1)
    return {run: play_run(job, chances, Random(seed * 1_000_003 + run), (run + 0.5) / runs) for run in taken}


def _money(offer: Cost, wall_s: float) -> float:
    """All but the preparation of data is paid by the hour."""
    once = offer.parts.get("data", 0.0)
    return once + (offer.usd - once) * wall_s / offer.wall_s


def _outcome(name: str, played: list[SimulatedRun], offer: Cost | None) -> Outcome:
    walls = [one.wall_s for one in played]
    usd = Spread.of([_money(offer, wall) for wall in walls]) if offer else None
    return Outcome(name, len(played), Spread.of(walls), usd)


def _with_error(played: list[SimulatedRun], error: float, offer: Cost | None, seed: int) -> Outcome:
    """Every run five times, with steps off by an error of that mean size."""
    random = Random(seed)
    deviation = error * math.sqrt(math.pi / 2)  # of a normal error with that mean absolute value
    walls = [SimulatedRun(one.wall_s * max(0.2, random.gauss(1, deviation))) for one in played for _ in range(5)]
    return _outcome("with the error of the step time", walls, offer)


def _shares(played: list[SimulatedRun]) -> dict[str, float]:
    whole = sum(one.wall_s for one in played)
    if not math.isfinite(whole):
        return {}
    names = ("saving", "redone", "restarting", "waiting", "slow")
    lost = {name: sum(getattr(one, f"{name}_s") for one in played) / whole for name in names}
    return {"kept": 1 - sum(lost.values()), **lost}


def _what_ifs(
    proposal: Proposal, chances: FailureRates, step: SimulatedStep, job: SimulatedJob, offer: Cost | None
) -> list[tuple[str, SimulatedJob, FailureRates, Cost | None]]:
    """The same runs with one thing changed."""
    cluster, sure = proposal.wish.cluster, chances.reliability
    often = replace(sure, failures_per_node_day=2 * sure.failures_per_node_day)
    cases: list[tuple[str, SimulatedJob, FailureRates, Cost | None]] = [
        ("failures twice as often", job, replace(chances, reliability=often), offer),
        (f"no spare nodes, repairs of {chances.repair_s / 3600:.0f} h", job, replace(chances, spares=0), offer),
        ("saves four times as far apart", replace(job, every_s=4 * job.every_s), chances, offer),
        (
            "restarts twice as fast",
            job,
            replace(chances, reliability=replace(sure, restart_s=sure.restart_s / 2)),
            offer,
        ),
        ("no slow nodes", job, replace(chances, slow_nodes=0.0), offer),
    ]
    if cluster.nodes > 1:
        longer = length(planned_step(proposal, 0.5)) / step.events_s
        slower = replace(job, work_s=job.work_s * longer, writing_s=2 * job.writing_s)
        cases.append(("the network half as fast", slower, chances, offer))
    spot = next((cost for cost in proposal.costs if cost.price.term == "spot"), None)
    if spot and spot is not offer:
        price = spot.price
        taken = _at_offer(chances, spot)
        every = _every_s(proposal, step) or goodput(job.nodes, taken.reliability).save_every_s
        name = f"spot at ${price.usd_hour:.2f} ({price.provider} {price.region})"
        cases.append((name, replace(job, every_s=max(every, job.write_s)), taken, spot))
    return cases
