"""What would change a plan most: twice the GPUs, the next generation of them, eight bits, each planned in full; and how
many times faster than one GPU it is.

The model that a budget is best spent on, and its tokens: the law of compute at what the money buys.

Wishes of money and time: for a budget, a deadline or both, the GPUs, their number and where to rent them, the best
first and why the others lost.

For every GPU type about the fewest that meet the deadline are taken: more of them cost the same or more, since
efficiency only falls with their number. A type whose price at the ceiling of its peak is too high is not searched.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from bessemer.errors import UserError
from bessemer.plan.cost_model.cost import Cost, PriceList, load_prices
from bessemer.plan.hardware import Cluster, Gpu, find_gpu, gpus, parse_cluster, resized
from bessemer.plan.recipe.fine_tuning import RecipeAnswer
from bessemer.plan.recipe.tokens import Allocation, model_for_compute, optimal_tokens
from bessemer.plan.request import USUAL_CONTEXT, PlanRequest, tokens_of
from bessemer.plan.search.proposal import Proposal, affordable, propose_for
from bessemer.plan.search.search import FixedDegrees, search
from bessemer.spec.quantity import human_count, human_time, parse_duration

NEXT = {"pascal": "V100-32GB", "volta": "A100-80GB", "turing": "A100-80GB", "ampere": "H100", "ada": "H100",
        "hopper": "B200"}  # fmt: skip


def levers(proposal: Proposal) -> list[tuple[str, Proposal]]:
    """Other plans for the same tokens, the fastest first. What does not fit, or would need what is settled to change,
    is left out."""
    asked, cluster = proposal.asked, proposal.given
    ways: list[tuple[str, PlanRequest, Cluster]] = [("twice the GPUs", asked, resized(cluster, 2 * cluster.count))]
    if newer := NEXT.get(cluster.gpu.generation.lower()):
        ways.append((f"{cluster.count} x {newer}", asked, _newer(cluster, find_gpu(newer))))
    if cluster.count == 1 and "fp8" in cluster.gpu.peaks and proposal.wish.precision == "bf16":
        spec = asked.spec.model_copy(update={"precision": "fp8"})
        ways.append(("precision fp8", replace(asked, spec=spec), cluster))
    found = []
    for name, other, where in ways:
        try:
            found.append((name, propose_for(other, where)))
        except UserError:  # the settled degrees or rows do not suit it, or it does not fit
            continue
    sooner = [item for item in found if item[1].wall_s < proposal.wall_s or item[1].wish.precision == "fp8"]
    return sorted(sooner, key=lambda item: item[1].wall_s)


def _newer(cluster: Cluster, gpu: Gpu) -> Cluster:
    """As many in as many nodes; their usual network, unless another was written."""
    usual = cluster.network_bandwidth == cluster.gpu.network_bandwidth
    rate, name = (
        (gpu.network_bandwidth, gpu.network_name) if usual else (cluster.network_bandwidth, cluster.network_name)
    )
    return Cluster(gpu, cluster.count, cluster.per_node, rate, name)


def speed_up(proposal: Proposal) -> float | None:
    """How many times one GPU's speed; None where one cannot hold the model."""
    cluster = proposal.wish.cluster
    alone = replace(proposal.wish, cluster=replace(cluster, count=1, per_node=1), kept=FixedDegrees())
    found = search(alone)
    return proposal.best.tokens_per_s / found.best.tokens_per_s if found.ranked else None


def lever_lines(proposal: Proposal) -> list[str]:
    shown, count = [], proposal.wish.cluster.count
    if count > 1 and (times := speed_up(proposal)):
        shown.append(
            f"  scale   {times:,.3g} times one {proposal.wish.cluster.gpu.name}, {times / count:.0%} of {count}"
        )
    for name, other in levers(proposal):
        money = ""
        if other.costs and proposal.costs:
            money = f", from ${other.costs[0].usd:,.0f} instead of ${proposal.costs[0].usd:,.0f}"
        shown.append(f"  change  {name}: {human_time(other.wall_s)} instead of {human_time(proposal.wall_s)}{money}")
    return shown


TRIES = 12
SMALL = 1e6  # parameters: the smallest shapes that are known


def model_for_budget(
    limits: BudgetLimits, tokens: int | None, build: Callable[[str, int], PlanRequest], where: str | None = None,
    network: str | None = None,
) -> PlanRequest:  # fmt: skip
    """The model that the law of compute asks for at what the budget buys, and its tokens. The price of a FLOP depends
    on the model, so the first guess is corrected by what it would cost."""
    assert limits.budget_usd is not None
    prices = load_prices()
    compute = max(
        limits.budget_usd
        / price.usd_hour
        * 3600
        * find_gpu(price.gpu).peak(half_precision(find_gpu(price.gpu)))
        * USUAL_MFU
        for price in prices.prices
        if price.term in ("on_demand", "spot") and is_wanted(price.gpu, where)
    )
    most, why, kept = math.inf, "", None
    for _ in range(TRIES):
        asked = _named(_allocated(compute, tokens), tokens is not None, build, why)
        ways, _lost = ways_within(asked, replace(limits, budget_usd=None), where, network, prices, most_types=2)
        if not ways:
            most, why = compute / 2, "; the deadline allows no more"
            compute /= 3
            continue
        share = ways[0].usd / limits.budget_usd
        kept = asked if share <= 1 else kept
        if 0.85 <= share <= 1 or (share < 1 and 0.96 * compute / share > most):
            return asked
        compute *= 0.96 / share
    return kept or asked


def _allocated(compute: float, tokens: int | None) -> RecipeAnswer[Allocation]:
    if tokens is None:
        return model_for_compute(compute)
    size = compute / 6 / tokens
    reason = f"what {compute:.2g} FLOPs of the budget train on {human_count(tokens)} tokens"
    return RecipeAnswer(Allocation(size, tokens, math.nan), reason, "C = 6 N D", "established")


def _named(
    answer: RecipeAnswer[Allocation], given: bool, build: Callable[[str, int], PlanRequest], why: str
) -> PlanRequest:
    """As a wish of two digits, as a person would write it; `given`: the tokens were."""
    found = answer.value
    if found.parameters < SMALL:
        raise UserError(
            f"the budget trains {human_count(found.parameters)} parameters, less than the smallest known shape of 1M: "
            "write a larger --budget"
        )
    size = f"{float(f'{found.parameters / 1e6:.2g}'):g}M"
    whole = int(float(f"{found.tokens:.3g}"))
    asked = build(size, whole)
    answers = dict(asked.answers)
    if not given:
        answers["budget.tokens"] = RecipeAnswer(whole, answer.reason + why, answer.source, answer.basis)
    return replace(asked, reason=answer.reason + why, source=answer.source, basis=answer.basis, answers=answers)


DAY = 86_400.0
PATIENCE_S = 30 * DAY  # where only a budget is given
MOST_GPUS = 16_384  # as many as anybody has trained one model on and told
CEILING = 0.8  # of the peak: no published run of this kind reached more
USUAL_MFU = 0.45  # for a first guess of how many GPUs
DEAR = 1.5  # times the best price: what cannot come below is not searched
KEPT_TYPES = 4  # GPU types that are searched in any case
MONEY = re.compile(
    r"(?:usd|\$)?\s*([0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*(?:\.[0-9]+)?)\s*([kmb])?\s*(?:usd|dollars?|\$)?", re.I
)
BYTES = 14.0  # of a parameter, at the least that training keeps without giving anything up


@dataclass(frozen=True)
class BudgetLimits:
    budget_usd: float | None
    deadline_s: float
    patience: bool = False  # the deadline is our own

    def words(self) -> str:
        told = [f"${self.budget_usd:,.0f}"] if self.budget_usd else []
        return " and ".join([*told, as_days(self.deadline_s)])


def as_days(seconds: float) -> str:
    return f"{seconds / DAY:,.3g} days" if seconds >= 2 * DAY else human_time(seconds)


@dataclass(frozen=True)
class BudgetOption:
    """One kind and number of GPUs, and its offers within the deadline, cheapest first."""

    proposal: Proposal
    costs: tuple[Cost, ...]

    @property
    def name(self) -> str:
        cluster = self.proposal.wish.cluster
        return f"{cluster.count} x {cluster.gpu.name}"

    @property
    def usd(self) -> float:
        return self.costs[0].usd


@dataclass(frozen=True)
class BudgetRanking:
    """`ways` are within all limits, the cheapest first; `lost` says of every other GPU type why it is not there."""

    limits: BudgetLimits
    ways: tuple[BudgetOption, ...]
    lost: tuple[tuple[str, str], ...]

    @property
    def best(self) -> Proposal:
        return replace(self.ways[0].proposal, costs=self.ways[0].costs)

    def offers(self) -> list[tuple[BudgetOption, Cost]]:
        """All of them over all GPU types, cheapest first."""
        found = [(way, cost) for way in self.ways for cost in way.costs if self._pays(cost)]
        return sorted(found, key=lambda item: (item[1].usd, item[1].wall_s))

    def _pays(self, cost: Cost) -> bool:
        return self.limits.budget_usd is None or cost.usd <= self.limits.budget_usd


def parse_money(text: str) -> float:
    """`50000usd`, `$50k`, `1.5M` -> dollars above 0."""
    match = MONEY.fullmatch(text.strip())
    if not match:
        raise UserError(f"--budget {text}: write dollars above 0, such as 50000usd or 50k")
    usd = float(match[1].replace(",", "").replace("_", "")) * {"k": 1e3, "m": 1e6, "b": 1e9}.get(
        (match[2] or "").lower(), 1.0
    )
    if usd <= 0:
        raise UserError(f"--budget {text}: nothing trains for nothing: write dollars above 0, such as 500usd")
    return usd


def parse_limits(budget: str | None, deadline: str | None) -> BudgetLimits:
    usd = parse_money(budget) if budget is not None else None
    if deadline is None:
        return BudgetLimits(usd, PATIENCE_S, patience=True)
    try:
        seconds = parse_duration(deadline)
    except ValueError as fault:
        raise UserError(f"--deadline {deadline}: {fault}") from None
    if seconds <= 0:
        raise UserError(f"--deadline {deadline}: write a time above 0, such as 30d")
    return BudgetLimits(usd, seconds)


def fulfil(
    asked: PlanRequest, limits: BudgetLimits, where: str | None = None, network: str | None = None
) -> BudgetRanking:
    """The ranking for a model and its tokens. `where` is a cluster or a GPU type; None: all that are rented.

    Wishes that cannot be met are refused with the arithmetic and the nearest that can.
    """
    prices = load_prices()
    ways, lost = ways_within(asked, limits, where, network, prices)
    kept = [way for way in ways if affordable(way.proposal, limits.budget_usd, limits.deadline_s)]
    if not kept:
        raise UserError(_impossible(asked, limits, ways, where, network, prices))
    over = [(way.name, f"${way.usd:,.0f} at least, over the budget") for way in ways if way not in kept]
    return BudgetRanking(limits, tuple(kept), (*over, *lost))


def half_precision(gpu: Gpu) -> str:
    return next(word for word in ("bf16", "fp16", "fp32") if word in gpu.peaks)


def is_wanted(gpu: str, where: str | None) -> bool:
    return where is None or parse_cluster(where).gpu.name == gpu


def ways_within(
    asked: PlanRequest, limits: BudgetLimits, where: str | None, network: str | None,
    prices: PriceList, most_types: int = 0,
) -> tuple[list[BudgetOption], list[tuple[str, str]]]:  # fmt: skip
    """A way for each GPU type, cheapest first, and why there is none for the others."""
    if where is not None and not _type_alone(where):
        proposal = propose_for(asked, parse_cluster(where, network))
        return _counted(proposal, limits.deadline_s)
    compute = asked.shape.flops_per_token(_context(asked)) * _tokens(asked)
    rented = [gpu for gpu in gpus().values() if is_wanted(gpu.name, where) and _cheapest(gpu, prices) < math.inf]
    if where is not None and not rented:
        raise UserError(f"--gpus {where}: nobody in the price list rents it: leave --budget out, or add your own price")
    bounds = sorted(
        (compute / (_peak(gpu, asked) * CEILING) / 3600 * _cheapest(gpu, prices), gpu.name) for gpu in rented
    )
    found: list[BudgetOption] = []
    lost: list[tuple[str, str]] = []
    for i, (bound, name) in enumerate(bounds):
        dear = found and bound > DEAR * min(way.usd for way in found) and i >= KEPT_TYPES
        over = limits.budget_usd is not None and bound > limits.budget_usd and bool(found)
        if dear or over or (most_types and len(found) >= most_types):
            lost.append((name, f"${bound:,.0f} even at {CEILING:.0%} of its peak" + ", over the budget" * over))
            continue
        way, why = _fewest(asked, find_gpu(name), compute, limits.deadline_s, network, prices)
        if way:
            found.append(way)
        else:
            lost.append((name, why))
    return sorted(found, key=lambda way: (way.usd, way.costs[0].wall_s)), lost


def _counted(proposal: Proposal, deadline_s: float) -> tuple[list[BudgetOption], list[tuple[str, str]]]:
    """Of a cluster that was named with its number."""
    costs = affordable(proposal, None, deadline_s)
    if costs:
        return [BudgetOption(proposal, tuple(costs))], []
    days = proposal.wall_s / DAY
    cluster = proposal.wish.cluster
    if not proposal.costs:
        raise UserError(f"nobody in the price list rents {cluster.count} x {cluster.gpu.name}: take another number")
    raise UserError(
        f"{cluster} take {days:,.1f} days for {human_count(proposal.tokens)} tokens at {proposal.best.mfu:.0%} MFU, "
        f"the deadline is {as_days(deadline_s)}: nearest: --deadline {math.ceil(days)}d, about "
        f"{math.ceil(cluster.count * days * DAY / deadline_s)} GPUs, or --tokens "
        f"{human_count(proposal.tokens * deadline_s / proposal.wall_s)}"
    )


def _fewest(
    asked: PlanRequest, gpu: Gpu, compute: float, deadline_s: float, network: str | None, prices: PriceList
) -> tuple[BudgetOption | None, str]:  # fmt: skip
    """About the smallest number of this type that meets the deadline, in powers of two."""
    least = compute / (_peak(gpu, asked) * USUAL_MFU * deadline_s)
    states = BYTES * asked.shape.parameters / gpu.memory_bytes
    count = 1 << max(0, math.ceil(math.log2(max(1.0, least, states))))
    joined = max(price.most or MOST_GPUS for price in prices.find(gpu=gpu.name))
    if count > joined:
        fewest = f"{count:,} at least are needed"
        return None, f"{fewest}, and {joined} are rented together" if joined < MOST_GPUS else fewest
    why = ""
    while count <= joined:
        try:
            proposal = propose_for(asked, parse_cluster(f"{count} x {gpu.name}", network))
        except UserError as fault:
            if str(fault).startswith(("parallel.", "budget.", "memory.")):
                raise  # whatever the GPUs, this key has to change
            why = f"{str(fault).split(': write')[0].split(': the leanest')[0]} on {count:,}"
            if not why.startswith("nothing fits"):
                break  # too many for the rows of a step, or no such units
            count *= 2
            continue
        if costs := affordable(proposal, None, deadline_s):
            return BudgetOption(proposal, tuple(costs)), ""
        why = f"{count:,} take {human_time(proposal.wall_s)}"
        if proposal.wish.cluster.count < count:
            return None, f"{why}, and more would be idle"
        if proposal.wall_s <= deadline_s:
            why = f"offers of {count:,} lose too much time to preemptions"
        count *= 1 << max(1, math.ceil(math.log2(proposal.wall_s / deadline_s)))
    return None, why


def _tokens(asked: PlanRequest) -> float:
    return tokens_of(asked.spec, _context(asked)) or optimal_tokens(asked.shape.parameters)


def _context(asked: PlanRequest) -> int:
    context = asked.spec.data.context
    return USUAL_CONTEXT if context == "auto" else context


def _peak(gpu: Gpu, asked: PlanRequest) -> float:
    """In the precision that is asked for, where the device has it."""
    word = asked.spec.precision.split("_")[0]
    return gpu.peaks.get(word, gpu.peak(half_precision(gpu)))


def _cheapest(gpu: Gpu, prices: PriceList) -> float:
    return min(
        (p.usd_hour for p in prices.prices if p.gpu == gpu.name and p.term in ("on_demand", "spot")), default=math.inf
    )


def _type_alone(where: str) -> bool:
    """Whether a GPU is named without a number."""
    try:
        find_gpu(where)
    except UserError:
        return False
    return True


def _impossible(
    asked: PlanRequest,
    limits: BudgetLimits,
    ways: list[BudgetOption],
    where: str | None,
    network: str | None,
    prices: PriceList,
) -> str:
    size, tokens = asked.shape.parameters, _tokens(asked)
    told = f"{human_count(size)} parameters on {human_count(tokens)} tokens are {6 * size * tokens:.2g} FLOPs"
    if not ways:
        longer: list[BudgetOption] = []
        deadline_s = limits.deadline_s
        while not longer and deadline_s <= max(limits.deadline_s, PATIENCE_S):
            deadline_s *= 100
            longer, _ = ways_within(asked, BudgetLimits(None, deadline_s), where, network, prices, most_types=3)
        if not longer:
            return (
                f"{told}: no GPU that is rented trains them in {as_days(limits.deadline_s)}, nor in "
                f"{as_days(deadline_s)}: write fewer --tokens, or a smaller --model"
            )
        fastest = min(longer, key=lambda way: way.costs[0].wall_s)
        days = math.ceil(fastest.costs[0].wall_s / DAY)
        return (
            f"{told}: no {MOST_GPUS:,} GPUs of any type do that in {as_days(limits.deadline_s)}; nearest: "
            f"--deadline {days}d with {fastest.name}, ${fastest.usd:,.0f}, or fewer --tokens"
        )
    assert limits.budget_usd is not None
    best = ways[0]
    cost, mfu = best.costs[0], best.proposal.best.mfu
    hours = best.proposal.seconds * best.proposal.wish.cluster.count / 3600
    fewer = human_count(float(f"{0.95 * tokens * limits.budget_usd / best.usd:.2g}"))
    nearest = [f"--budget {math.ceil(best.usd / 100) * 100}usd"]
    fewest = best.proposal.wish.context * 1000
    if tokens * limits.budget_usd / best.usd > fewest:
        nearest.append(f"--tokens {fewer}")
    if not limits.patience:
        slow, _ = ways_within(asked, BudgetLimits(None, 20 * limits.deadline_s), where, network, prices, most_types=3)
        paid = [way for way in slow if way.usd <= limits.budget_usd]
        if paid:
            nearest.append(
                f"--deadline {math.ceil(paid[0].costs[0].days)}d with {paid[0].name} for ${paid[0].usd:,.0f}"
            )
    return (
        f"{told}, or {hours:,.0f} hours of {best.proposal.wish.cluster.gpu.name} at {mfu:.0%} of its peak; "
        f"the cheapest way within {as_days(limits.deadline_s)} is {best.name} at {cost.price.provider} "
        f"({cost.price.region}, {cost.price.term.replace('_', ' ')}): ${best.usd:,.0f} in {cost.days:,.1f} days, "
        f"{best.usd / limits.budget_usd:.2g} times the budget; nearest: {', or '.join(nearest)}"
    )
