"""Simulates a planned run many times for `bessemer plan simulate`: spread of its finish and cost, and what-ifs.

A run is a series of stretches of steps between saves. Failures and preemptions throw it back to its last save; then it
restarts, or waits for a node. Slow nodes delay all others. The length of a step comes from step.py. With uniform rates
and no slow nodes, the mean over many runs equals the formula of cost_model/goodput.py. The simulation adds the spread,
spare nodes that run out, and saves that are not written yet when a node fails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import Any

from bessemer.errors import UserError
from bessemer.observe.figure import svg_file
from bessemer.plan.cost_model.cost import CHECKPOINT_BYTES, REQUEUE_S, Cost
from bessemer.plan.cost_model.goodput import Reliability, goodput
from bessemer.plan.search.proposal import Proposal
from bessemer.plan.simulate.step import (
    NORMAL,
    SimulatedStep,
    planned_step,
    simulate_planned_step,
    step_seconds,
    timeline,
    timeline_lines,
)
from bessemer.spec.quantity import human_count, parse_duration

MOST_GPUS = 100_000
FEWEST_RUNS, MOST_RUNS = 8, 400
EVENTS = 30_000  # interruptions in all runs of a plan
LEAST_SHARE = 0.1  # goodput below which a run is not simulated
# Llama 3 405B: 289 of 419 interruptions were failures of parts of a node, which has to be replaced; the others were
# software, switches and cables, maintenance and dependencies.
EXCHANGED = 289 / 419
# MegaScale 2024: about 0.5 % of the machines took some 10 % longer for the same forward compute.
SLOW_NODES, SLOW_BY = 0.005, 0.10
# Llama 3 405B: storage with 2 TB/s for some 2,000 nodes.
WRITE_BYTES_S = 1e9
HOPELESS = 10.0  # expected interruptions per restart and stretch of work: one in 20,000 stretches completes
MOST_S = 100 * 365 * 86_400.0  # a run that takes longer counts as never finishing


@dataclass(frozen=True)
class FailureRates:
    """Rates and spreads of failures and delays. Spreads are standard deviations of logarithms; they keep the means."""

    reliability: Reliability = field(default_factory=Reliability)
    jitter: float = 0.01  # of the compute of a pass between GPUs: a guess, no published number
    slow_nodes: float = SLOW_NODES
    slow_by: float = SLOW_BY
    rate_spread: float = 0.4  # between clusters: 90 % have 2.5 to 9.4 failures in 1,000 node-days; published 2.3 to 6.5
    restart_spread: float = 0.5  # a guess: MegaScale under 15 minutes, OLMo Hybrid 4, with a mean of 39
    exchanged: float = EXCHANGED
    repair_s: float = 86_400.0  # until a replaced node is back: a guess
    spares: int | None = None  # spare nodes; None: enough that a run hardly ever waits
    write_bytes_s: float = WRITE_BYTES_S  # of a node to storage

    def uniform(self) -> FailureRates:
        """The same failure rates without spreads, slow nodes or waiting."""
        return replace(self, jitter=0.0, slow_nodes=0.0, rate_spread=0.0, restart_spread=0.0, exchanged=0.0)

    def spare_nodes(self, nodes: int) -> int:
        """The mean number of nodes under repair plus three standard deviations."""
        if self.spares is not None:
            return self.spares
        mean = nodes * self.reliability.failures_per_node_day / 86_400 * self.exchanged * self.repair_s
        return math.ceil(mean + 3 * math.sqrt(mean))


@dataclass(frozen=True)
class SimulatedJob:
    """A run to simulate. `work_s` is the time of its steps without slow nodes and interruptions, `drag` the factor with
    a slow node. A save stalls the run, counts once it is written, and delays concurrent steps by `writing_s` because
    they share links."""

    nodes: int
    work_s: float
    every_s: float  # of work between saves
    drag: float = 1.0
    write_s: float = 0.0
    writing_s: float = 0.0


@dataclass(frozen=True)
class SimulatedRun:
    """One simulated run: total seconds, and the seconds lost by cause."""

    wall_s: float
    failures: int = 0
    preemptions: int = 0
    saving_s: float = 0.0
    redone_s: float = 0.0
    restarting_s: float = 0.0
    waiting_s: float = 0.0  # for a node, if no spare is left
    slow_s: float = 0.0


def simulate_run(job: SimulatedJob, rates: FailureRates, random: Random, rank: float | None = None) -> SimulatedRun:
    """One run to its end; a century counts as never. `rank` is the quantile of the cluster's failure rate, from 0
    (best) to 1; drawn at random if None."""
    reliability, nodes = rates.reliability, job.nodes
    normal = NORMAL.inv_cdf(rank) if rank is not None else random.gauss(0, 1)
    failing = nodes * reliability.failures_per_node_day / 86_400 * _log_normal(normal, rates.rate_spread)
    rate = failing + nodes * reliability.preemptions_per_node_hour / 3600
    pool = _NodePool(nodes, rates, random)
    stall = reliability.save_stall_s + job.writing_s
    every, stretch = job.every_s, job.every_s + stall
    if rate * (stretch + reliability.restart_s + reliability.requeue_s) > HOPELESS:
        return SimulatedRun(math.inf)
    left, now = job.work_s, 0.0
    failures = preemptions = 0
    redone = restarting = waiting = saving = slowed = 0.0
    while now < MOST_S:
        drag = job.drag if pool.slow else 1.0
        saves = max(1, math.ceil(left * drag / every - 1e-9))
        remaining = left * drag + saves * stall
        until = _next_interruption(rate, random)
        if until >= remaining:
            return SimulatedRun(
                now + remaining, failures, preemptions, saving + saves * stall, redone, restarting, waiting,
                slowed + left * (drag - 1),
            )  # fmt: skip
        saved = min(int(max(0.0, until - job.write_s) / stretch), saves - 1)
        left -= saved * every / drag
        slowed += saved * every * (1 - 1 / drag)
        saving += saved * stall
        redone += until - saved * stretch
        now += until
        failed = random.random() * rate < failing
        failures, preemptions = failures + failed, preemptions + (not failed)
        wait = pool.replace_node(now) if failed else 0.0
        mean_restart_s = reliability.restart_s + (0.0 if failed else reliability.requeue_s)
        restart_s = _restart_seconds(mean_restart_s, rates.restart_spread, rate, random)
        waiting, restarting, now = waiting + wait, restarting + restart_s, now + wait + restart_s
    return SimulatedRun(math.inf, failures, preemptions, saving, redone, restarting, waiting, slowed)


class _NodePool:
    """Counts slow nodes and nodes under repair."""

    def __init__(self, nodes: int, rates: FailureRates, random: Random) -> None:
        self.nodes, self.rates, self.random = nodes, rates, random
        self.spares = rates.spare_nodes(nodes)
        self.away: list[float] = []  # times at which nodes return from repair
        self.slow = 0
        # Geometric gaps between slow nodes: one draw per slow node instead of one per node.
        scale = math.log1p(-rates.slow_nodes) if rates.slow_nodes > 0 else 0.0
        at = self._gap(scale) if scale else nodes
        while at < nodes:
            self.slow += 1
            at += 1 + self._gap(scale)

    def _gap(self, scale: float) -> int:
        return int(math.log(1 - self.random.random()) / scale)

    def replace_node(self, now: float) -> float:
        """Seconds until the job has all its nodes again after a failure."""
        rates, random = self.rates, self.random
        if random.random() >= rates.exchanged:
            return 0.0
        self.slow -= random.random() * self.nodes < self.slow
        self.slow += random.random() < rates.slow_nodes
        while self.away and self.away[0] <= now:
            heappop(self.away)
        heappush(self.away, now + rates.repair_s)
        return heappop(self.away) - now if len(self.away) > self.spares else 0.0


def _next_interruption(rate: float, random: Random) -> float:
    """Seconds to the next interruption."""
    return -math.log(1 - random.random()) / rate if rate > 0 else math.inf


def _log_normal(normal: float, spread: float) -> float:
    """A log-normal value with a mean of 1, from a normal draw."""
    return math.exp(spread * (normal - spread / 2)) if spread else 1.0


def _restart_seconds(mean_s: float, spread: float, rate: float, random: Random) -> float:
    """Seconds until a restart succeeds; it may be interrupted too."""
    spent = 0.0
    while spent < MOST_S:
        needed = mean_s * (_log_normal(random.gauss(0, 1), spread) if spread else 1)
        until = _next_interruption(rate, random)
        if until >= needed:
            return spent + needed
        spent += until
    return spent


@dataclass(frozen=True)
class Spread:
    """The 10th, 50th and 90th percentile of runs."""

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
    """Linear interpolation; each value is the middle of its own interval."""
    place = min(max(share * len(ranked) - 0.5, 0.0), len(ranked) - 1.0)
    low, high = ranked[math.floor(place)], ranked[math.ceil(place)]
    return low + (high - low) * (place % 1) if math.isfinite(high) else high


@dataclass(frozen=True)
class SimulatedOutcome:
    """The outcome of the plan, or of a what-if. `change` is the median change of wall time over the same runs."""

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
    rates: FailureRates
    seed: int
    offer: Cost | None  # whose price counts
    plan: SimulatedOutcome
    failures: Spread
    shares: dict[str, float]  # of the wall time, averaged over runs
    with_error: SimulatedOutcome  # including the error of the step time
    what_ifs: tuple[SimulatedOutcome, ...]


def simulate(proposal: Proposal, rates: FailureRates | None = None, seed: int = 0) -> Simulation:
    """Simulate the plan. Takes about a second for 100,000 GPUs."""
    cluster = proposal.goal.cluster
    if cluster.count > MOST_GPUS:
        raise UserError(f"plan simulate: {cluster.count:,} GPUs: write at most {MOST_GPUS:,}")
    offers = sorted(proposal.costs, key=lambda cost: cost.price.term == "spot")  # on demand first
    offer = offers[0] if offers else None
    rates = _at_offer(rates or FailureRates(), offer)
    step = simulate_planned_step(proposal, rates.jitter, rates.slow_by, seed)
    job = _make_job(proposal, rates, step)
    runs = _simulate_runs(job, rates, seed, _run_count(job, rates))
    plan_runs = list(runs.values())
    plan = _outcome("as planned", plan_runs, offer)
    what_ifs = []
    for name, other_job, other_chances, other_offer in _what_ifs(proposal, rates, step, job, offer):
        changed = _simulate_runs(other_job, other_chances, seed, len(runs))
        ratios = [run.wall_s / runs[number].wall_s for number, run in changed.items()]
        change = _quantile(sorted(ratios), 0.5) - 1 if math.isfinite(plan.wall_s.p50) else 0.0
        what_ifs.append(replace(_outcome(name, list(changed.values()), other_offer), change=change))
    return Simulation(
        proposal, step, job, rates, seed, offer, plan,
        failures=Spread.of([float(run.failures + run.preemptions) for run in plan_runs]),
        shares=_time_shares(plan_runs),
        with_error=_with_error(plan_runs, proposal.error, offer, seed),
        what_ifs=tuple(what_ifs),
    )  # fmt: skip


def _at_offer(rates: FailureRates, offer: Cost | None) -> FailureRates:
    """The rates with the preemptions of that offer."""
    preemptions = offer.price.preemptions_per_hour if offer else 0.0
    if not preemptions:
        return rates
    reliability = replace(rates.reliability, preemptions_per_node_hour=preemptions, requeue_s=REQUEUE_S)
    return replace(rates, reliability=reliability)


def _make_job(proposal: Proposal, rates: FailureRates, step: SimulatedStep) -> SimulatedJob:
    """The run in steps of the slowest column, with the plan's save interval."""
    best, cluster = proposal.best, proposal.goal.cluster
    nodes = cluster.nodes
    every = _save_interval(proposal, step) or goodput(nodes, rates.reliability).save_every_s
    writers = max(1, nodes // best.layout.dp_replicate)
    rate = rates.write_bytes_s
    write = CHECKPOINT_BYTES * proposal.shape.parameters / (writers * rate)
    writing = 0.0
    if nodes > 1:
        left = max(0.1, 1 - rate / cluster.network_bandwidth)
        writing = write * max(0.0, step_seconds(planned_step(proposal, left)) / step.events_s - 1)
    work = proposal.seconds * step.slowest_s / step.planned_s
    return SimulatedJob(nodes, work, max(every, write), step.slow_node_s / step.slowest_s, write, writing)


def _save_interval(proposal: Proposal, step: SimulatedStep) -> float:
    """Seconds between saves that the spec sets; 0: auto."""
    setting = proposal.request.spec.checkpoint.every
    if setting == "auto":
        return 0.0
    return parse_duration(setting) if isinstance(setting, str) else setting * step.slowest_s


def _run_count(job: SimulatedJob, rates: FailureRates) -> int:
    """Number of simulated runs: fewer if they are interrupted more often."""
    expected = goodput(job.nodes, rates.reliability, job.every_s).interruptions(job.work_s)
    return max(FEWEST_RUNS, min(MOST_RUNS, int(EVENTS / max(1.0, expected))))


def _simulate_runs(job: SimulatedJob, rates: FailureRates, seed: int, runs: int) -> dict[int, SimulatedRun]:
    """Runs by number. The cluster's failure rate dominates their spread, so the runs take its quantiles in equal steps.
    Jobs with far more interruptions than the plan skip some runs. Jobs with almost no goodput are not simulated."""
    expected = goodput(job.nodes, rates.reliability, job.every_s)
    if expected.share < LEAST_SHARE:
        return dict.fromkeys(range(runs), SimulatedRun(math.inf))
    step = math.ceil(expected.interruptions(job.work_s) * runs / (4 * EVENTS)) or 1
    numbers = range(runs)[step // 2 :: step] or range(runs // 2, runs // 2 + 1)
    return {n: simulate_run(job, rates, Random(seed * 1_000_003 + n), (n + 0.5) / runs) for n in numbers}


def _usd_for(offer: Cost, wall_s: float) -> float:
    """Everything but the preparation of data is paid by the hour."""
    once = offer.parts.get("data", 0.0)
    return once + (offer.usd - once) * wall_s / offer.wall_s


def _outcome(name: str, runs: list[SimulatedRun], offer: Cost | None) -> SimulatedOutcome:
    walls = [run.wall_s for run in runs]
    usd = Spread.of([_usd_for(offer, wall) for wall in walls]) if offer else None
    return SimulatedOutcome(name, len(runs), Spread.of(walls), usd)


def _with_error(runs: list[SimulatedRun], error: float, offer: Cost | None, seed: int) -> SimulatedOutcome:
    """Every run five times, with a random error of the step time of that mean size."""
    random = Random(seed)
    deviation = error * math.sqrt(math.pi / 2)  # of a normal error with that mean absolute value
    varied = [SimulatedRun(run.wall_s * max(0.2, random.gauss(1, deviation))) for run in runs for _ in range(5)]
    return _outcome("with the error of the step time", varied, offer)


def _time_shares(runs: list[SimulatedRun]) -> dict[str, float]:
    total = sum(run.wall_s for run in runs)
    if not math.isfinite(total):
        return {}
    names = ("saving", "redone", "restarting", "waiting", "slow")
    lost = {name: sum(getattr(run, f"{name}_s") for run in runs) / total for name in names}
    return {"kept": 1 - sum(lost.values()), **lost}


def _what_ifs(
    proposal: Proposal, rates: FailureRates, step: SimulatedStep, job: SimulatedJob, offer: Cost | None
) -> list[tuple[str, SimulatedJob, FailureRates, Cost | None]]:
    """The same runs with one thing changed."""
    cluster, reliability = proposal.goal.cluster, rates.reliability
    more_failures = replace(reliability, failures_per_node_day=2 * reliability.failures_per_node_day)
    fast_restarts = replace(reliability, restart_s=reliability.restart_s / 2)
    cases: list[tuple[str, SimulatedJob, FailureRates, Cost | None]] = [
        ("failures twice as often", job, replace(rates, reliability=more_failures), offer),
        (f"no spare nodes, repairs of {rates.repair_s / 3600:.0f} h", job, replace(rates, spares=0), offer),
        ("saves four times as far apart", replace(job, every_s=4 * job.every_s), rates, offer),
        ("restarts twice as fast", job, replace(rates, reliability=fast_restarts), offer),
        ("no slow nodes", job, replace(rates, slow_nodes=0.0), offer),
    ]
    if cluster.nodes > 1:
        longer = step_seconds(planned_step(proposal, 0.5)) / step.events_s
        slower = replace(job, work_s=job.work_s * longer, writing_s=2 * job.writing_s)
        cases.append(("the network half as fast", slower, rates, offer))
    spot = next((cost for cost in proposal.costs if cost.price.term == "spot"), None)
    if spot and spot is not offer:
        price = spot.price
        preempted = _at_offer(rates, spot)
        every = _save_interval(proposal, step) or goodput(job.nodes, preempted.reliability).save_every_s
        name = f"spot at ${price.usd_hour:.2f} ({price.provider} {price.region})"
        cases.append((name, replace(job, every_s=max(every, job.write_s)), preempted, spot))
    return cases


def simulation_json(simulation: Simulation) -> dict[str, Any]:
    def to_json(outcome: SimulatedOutcome) -> dict[str, Any]:
        usd = outcome.usd.to_json() if outcome.usd else None
        return {"name": outcome.name, "runs": outcome.runs, "finish_s": outcome.wall_s.to_json(), "usd": usd}

    step, offer = simulation.step, simulation.offer
    return {
        **to_json(simulation.plan),
        "seed": simulation.seed,
        "price": f"{offer.price.provider} {offer.price.region} {offer.price.term}" if offer else None,
        "with_error": to_json(simulation.with_error) | {"mean_absolute_error": simulation.proposal.error},
        "interruptions": simulation.failures.to_json(), "shares": simulation.shares,
        "step": {
            "planned_s": step.planned_s, "events_s": step.events_s, "slowest_s": step.slowest_s,
            "slow_node_s": step.slow_node_s, "columns": step.columns, "gpus_in_lockstep": step.peers,
            "stages": step.step.stages, "micro_batches": step.step.batches, "shares": step.shares,
            "contended_s": step.trace.contended_s,
        },
        "save_every_s": simulation.job.every_s, "save_written_s": simulation.job.write_s,
        "spare_nodes": simulation.rates.spare_nodes(simulation.job.nodes),
        "what_ifs": [
            to_json(what_if) | {"change": what_if.change if math.isfinite(what_if.change) else None}
            for what_if in simulation.what_ifs
        ],
    }  # fmt: skip


def simulation_lines(simulation: Simulation) -> list[str]:
    step, plan, job, offer = simulation.step, simulation.plan, simulation.job, simulation.offer
    lines = [f"  runs    {plan.runs} simulated, seed {simulation.seed}"]
    gpus = simulation.proposal.goal.cluster.count
    lines.append(
        f"  a step  {step.events_s:.2f} s simulated ({step.events_s / step.planned_s - 1:+.1%} of the plan's), "
        f"{step.slowest_s:.2f} s for the slowest of {gpus:,} GPUs, {step.slow_node_s:.2f} s with a slow node"
    )
    lines.append("          " + ", ".join(f"{name} {share:.1%}" for name, share in step.shares.items() if share > 5e-4))
    lines += [f"          {line}" for line in timeline_lines(step.trace, step.shown, step.step.batches)]
    lines.append(
        f"  finish  {_days(plan.wall_s)} by chance; {_days(simulation.with_error.wall_s)} with the step time's error"
    )
    if offer and plan.usd and simulation.with_error.usd:
        where = f"{offer.price.provider} {offer.price.region}, {offer.price.term.replace('_', ' ')}"
        lines.append(
            f"  cost    {_usd(plan.usd)} by chance; {_usd(simulation.with_error.usd)} with that error ({where})"
        )
    shares = ", ".join(f"{name} {share:.1%}" for name, share in simulation.shares.items() if share > 5e-4)
    failures = simulation.failures
    lines.append(f"  lost    {failures.p10:,.0f} to {failures.p90:,.0f} interruptions; of the time {shares or 'all'}")
    spares = simulation.rates.spare_nodes(job.nodes)
    lines.append(
        f"          {spares} spare nodes, saves every {job.every_s / 60:,.0f} min, written in {job.write_s:,.0f} s"
    )
    for what_if in simulation.what_ifs:
        money = f"  p50 ${what_if.usd.p50:,.0f}" if what_if.usd and math.isfinite(what_if.usd.p50) else ""
        change = f"{what_if.change:+.1%}" if math.isfinite(what_if.change) else "never"
        lines.append(f"  what if {what_if.name:<40} {_days(what_if.wall_s)} ({change}){money}")
    return lines


def _days(spread: Spread) -> str:
    words = [f"{value / 86_400:,.1f}" if math.isfinite(value) else "never" for value in vars(spread).values()]
    return "p10 {} p50 {} p90 {} days".format(*words)


def _usd(spread: Spread) -> str:
    words = [f"${value:,.0f}" if math.isfinite(value) else "without end" for value in vars(spread).values()]
    return "p10 {} p50 {} p90 {}".format(*words)


def step_svg(simulation: Simulation) -> str:
    """The timeline of one step as a drawing."""
    step, goal = simulation.step, simulation.proposal.goal
    title = f"One step of {human_count(simulation.proposal.shape.parameters)} parameters on {goal.cluster}"
    parts = ", ".join(f"{name} {share:.1%}" for name, share in step.shares.items() if share > 5e-4)
    drawn = (
        f"{step.shown} of {step.step.batches} micro-batches drawn" if step.shown < step.step.batches else "all drawn"
    )
    caption = f"{step.events_s:.3g} s: {parts} ({simulation.proposal.best.name()}; {drawn})"
    return svg_file(timeline(step.trace, title, caption).svg()) + "\n"


def run_simulation(proposal: Proposal, seed: int = 0, path: Path | None = None) -> Simulation:
    """Simulate the plan, and write a picture of its step to `path`."""
    if path and path.suffix.lower() != ".svg":
        raise UserError(f"--picture {path}: the picture is SVG: write {path.with_suffix('.svg')}")
    simulation = simulate(proposal, seed=seed)
    if path:
        try:
            path.write_text(step_svg(simulation))
        except OSError as error:
            raise UserError(f"--picture {path}: cannot be written ({error.strerror}): write another path") from None
    return simulation
