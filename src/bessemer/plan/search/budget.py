"""Searches GPU types, counts and offers for a budget, a deadline or both; and what would change a plan most.

For each GPU type the search takes about the fewest GPUs that meet the deadline: more cost the same or more, since
efficiency falls with their number. It skips types that are too expensive even at 80 % of their peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from bessemer.errors import UserError
from bessemer.plan.cost_model.cost import Cost, PriceList, load_prices
from bessemer.plan.decision import RecipeAnswer
from bessemer.plan.hardware import Cluster, Gpu, find_gpu, gpu_catalogue, parse_cluster, resize
from bessemer.plan.recipe.pretraining import Allocation, model_for_compute, optimal_tokens
from bessemer.plan.request import (
    DAY,
    DEFAULT_CONTEXT,
    DEFAULT_DEADLINE_S,
    BudgetLimits,
    PlanRequest,
    in_days,
    spec_tokens,
)
from bessemer.plan.search.proposal import Proposal, affordable, propose
from bessemer.plan.search.search import FixedDegrees, search
from bessemer.spec.quantity import human_count, human_time

NEXT_GENERATION = {"pascal": "V100-32GB", "volta": "A100-80GB", "turing": "A100-80GB", "ampere": "H100", "ada": "H100",
        "hopper": "B200"}  # fmt: skip
TRIES = 12
SMALLEST_MODEL = 1e6  # parameters
MOST_GPUS = 16_384  # the largest published training job
CEILING = 0.8  # of the peak: no published run of this kind reached more
USUAL_MFU = 0.45  # for a first guess of how many GPUs
TOO_EXPENSIVE = 1.5  # times the best price: types that cannot come below are not searched
ALWAYS_SEARCHED = 4  # GPU types
LEAST_BYTES = 14.0  # per parameter, without memory-saving settings


def alternatives(proposal: Proposal) -> list[tuple[str, Proposal]]:
    """Plans with twice the GPUs, the next GPU generation and fp8, fastest first; only those that are possible and
    finish sooner."""
    request, cluster = proposal.request, proposal.available
    changes: list[tuple[str, PlanRequest, Cluster]] = [("twice the GPUs", request, resize(cluster, 2 * cluster.count))]
    if newer := NEXT_GENERATION.get(cluster.gpu.generation.lower()):
        gpu = find_gpu(newer)
        usual = cluster.network_bandwidth == cluster.gpu.network_bandwidth
        network = gpu if usual else cluster
        changed = Cluster(gpu, cluster.count, cluster.per_node, network.network_bandwidth, network.network_name)
        changes.append((f"{cluster.count} x {newer}", request, changed))
    if cluster.count == 1 and "fp8" in cluster.gpu.peaks and proposal.goal.precision == "bf16":
        spec = request.spec.model_copy(update={"precision": "fp8"})
        changes.append(("precision fp8", replace(request, spec=spec), cluster))
    plans = []
    for name, other, place in changes:
        try:
            plans.append((name, propose(other, place)))
        except UserError:  # the fixed degrees or rows do not divide it, or it does not fit
            continue
    sooner = [item for item in plans if item[1].wall_s < proposal.wall_s or item[1].goal.precision == "fp8"]
    return sorted(sooner, key=lambda item: item[1].wall_s)


def speed_up(proposal: Proposal) -> float | None:
    """Speed relative to one GPU; None if one cannot hold the model."""
    cluster = proposal.goal.cluster
    alone = search(replace(proposal.goal, cluster=replace(cluster, count=1, per_node=1), fixed=FixedDegrees()))
    return proposal.best.tokens_per_s / alone.best.tokens_per_s if alone.ranked else None


def alternative_lines(proposal: Proposal) -> list[str]:
    lines, cluster = [], proposal.goal.cluster
    if cluster.count > 1 and (times := speed_up(proposal)):
        lines.append(
            f"  scale   {times:,.3g} times one {cluster.gpu.name}, {times / cluster.count:.0%} of {cluster.count}"
        )
    for name, other in alternatives(proposal):
        money = ""
        if other.costs and proposal.costs:
            money = f", from ${other.costs[0].usd:,.0f} instead of ${proposal.costs[0].usd:,.0f}"
        lines.append(f"  change  {name}: {human_time(other.wall_s)} instead of {human_time(proposal.wall_s)}{money}")
    return lines


def choose_model(
    limits: BudgetLimits, tokens: int | None, build: Callable[[str, int], PlanRequest], where: str | None = None,
    network: str | None = None,
) -> PlanRequest:  # fmt: skip
    """The compute-optimal model and tokens for what the budget buys. The price of a FLOP depends on the model, so the
    first guess is corrected by its cost."""
    assert limits.budget_usd is not None
    prices = load_prices()
    compute = max(
        limits.budget_usd
        / price.usd_hour
        * 3600
        * find_gpu(price.gpu).peak(half_precision(find_gpu(price.gpu)))
        * USUAL_MFU
        for price in prices.prices
        if price.term in ("on_demand", "spot") and _is_searched(price.gpu, where)
    )
    most, why, affordable_request = math.inf, "", None
    for _ in range(TRIES):
        request = _rounded_request(_allocate(compute, tokens), tokens is not None, build, why)
        options, _ = options_within(request, replace(limits, budget_usd=None), where, network, prices, most_types=2)
        if not options:
            most, why = compute / 2, "; the deadline allows no more"
            compute /= 3
            continue
        share = options[0].usd / limits.budget_usd
        affordable_request = request if share <= 1 else affordable_request
        if 0.85 <= share <= 1 or (share < 1 and 0.96 * compute / share > most):
            return request
        compute *= 0.96 / share
    return affordable_request or request


def _allocate(compute: float, tokens: int | None) -> RecipeAnswer[Allocation]:
    if tokens is None:
        return model_for_compute(compute)
    size = compute / 6 / tokens
    reason = f"what {compute:.2g} FLOPs of the budget train on {human_count(tokens)} tokens"
    return RecipeAnswer(Allocation(size, tokens, math.nan), reason, "C = 6 N D", "established")


def _rounded_request(
    answer: RecipeAnswer[Allocation], tokens_given: bool, build: Callable[[str, int], PlanRequest], why: str
) -> PlanRequest:
    """A request with the model size rounded to two digits and the tokens to three."""
    allocation = answer.value
    if allocation.parameters < SMALLEST_MODEL:
        raise UserError(
            f"the budget trains {human_count(allocation.parameters)} parameters, less than the smallest known shape of "
            "1M: write a larger --budget"
        )
    size = f"{float(f'{allocation.parameters / 1e6:.2g}'):g}M"
    tokens = int(float(f"{allocation.tokens:.3g}"))
    request = build(size, tokens)
    answers = dict(request.answers)
    if not tokens_given:
        answers["budget.tokens"] = RecipeAnswer(tokens, answer.reason + why, answer.source, answer.basis)
    return replace(request, reason=answer.reason + why, source=answer.source, basis=answer.basis, answers=answers)


@dataclass(frozen=True)
class BudgetOption:
    """A GPU type and count, with its offers within the deadline, cheapest first."""

    proposal: Proposal
    costs: tuple[Cost, ...]

    @property
    def name(self) -> str:
        cluster = self.proposal.goal.cluster
        return f"{cluster.count} x {cluster.gpu.name}"

    @property
    def usd(self) -> float:
        return self.costs[0].usd


@dataclass(frozen=True)
class BudgetRanking:
    """`options` are within all limits, cheapest first; `lost` says for every other GPU type why it is not among
    them."""

    limits: BudgetLimits
    options: tuple[BudgetOption, ...]
    lost: tuple[tuple[str, str], ...]

    @property
    def best(self) -> Proposal:
        return replace(self.options[0].proposal, costs=self.options[0].costs)

    def offers(self) -> list[tuple[BudgetOption, Cost]]:
        """The offers of all options within the budget, cheapest first."""
        budget = self.limits.budget_usd
        offers = [(option, cost) for option in self.options for cost in option.costs]
        paid = [item for item in offers if budget is None or item[1].usd <= budget]
        return sorted(paid, key=lambda item: (item[1].usd, item[1].wall_s))


def search_budget(
    request: PlanRequest, limits: BudgetLimits, where: str | None = None, network: str | None = None
) -> BudgetRanking:
    """The ranking for a model and its tokens. `where` is a cluster or a GPU type; None: all that are rented.

    Impossible limits are refused with the arithmetic and the nearest possible ones.
    """
    prices = load_prices()
    options, lost = options_within(request, limits, where, network, prices)
    within = [option for option in options if affordable(option.proposal, limits.budget_usd, limits.deadline_s)]
    if not within:
        raise UserError(_explain_impossible(request, limits, options, where, network, prices))
    over = [
        (option.name, f"${option.usd:,.0f} at least, over the budget") for option in options if option not in within
    ]
    return BudgetRanking(limits, tuple(within), (*over, *lost))


def half_precision(gpu: Gpu) -> str:
    return next(word for word in ("bf16", "fp16", "fp32") if word in gpu.peaks)


def _is_searched(gpu: str, where: str | None) -> bool:
    return where is None or parse_cluster(where).gpu.name == gpu


def options_within(
    request: PlanRequest, limits: BudgetLimits, where: str | None, network: str | None,
    prices: PriceList, most_types: int = 0,
) -> tuple[list[BudgetOption], list[tuple[str, str]]]:  # fmt: skip
    """An option for each GPU type, cheapest first, and why the other types have none."""
    if where is not None and not _is_gpu_type(where):
        return [_option_of_cluster(propose(request, parse_cluster(where, network)), limits.deadline_s)], []
    compute = request.shape.flops_per_token(_context(request)) * _tokens(request)
    rented = [
        gpu for gpu in gpu_catalogue().values() if _is_searched(gpu.name, where) and _cheapest(gpu, prices) < math.inf
    ]
    if where is not None and not rented:
        raise UserError(
            f"--gpus {where}: no provider in the price list rents it: use `plan run`, or add your own price"
        )
    bounds = sorted(
        (compute / (_peak(gpu, request) * CEILING) / 3600 * _cheapest(gpu, prices), gpu.name) for gpu in rented
    )
    options: list[BudgetOption] = []
    lost: list[tuple[str, str]] = []
    for i, (bound, name) in enumerate(bounds):
        expensive = options and bound > TOO_EXPENSIVE * min(o.usd for o in options) and i >= ALWAYS_SEARCHED
        over = limits.budget_usd is not None and bound > limits.budget_usd and bool(options)
        if expensive or over or (most_types and len(options) >= most_types):
            lost.append((name, f"${bound:,.0f} even at {CEILING:.0%} of its peak" + ", over the budget" * over))
            continue
        option, why = _fewest_gpus(request, find_gpu(name), compute, limits.deadline_s, network, prices)
        if option:
            options.append(option)
        else:
            lost.append((name, why))
    return sorted(options, key=lambda option: (option.usd, option.costs[0].wall_s)), lost


def _option_of_cluster(proposal: Proposal, deadline_s: float) -> BudgetOption:
    """The option of a cluster that the user named with its number of GPUs."""
    if costs := affordable(proposal, None, deadline_s):
        return BudgetOption(proposal, tuple(costs))
    days = proposal.wall_s / DAY
    cluster = proposal.goal.cluster
    if not proposal.costs:
        raise UserError(
            f"no provider in the price list rents {cluster.count} x {cluster.gpu.name}: write another number"
        )
    raise UserError(
        f"{cluster} take {days:,.1f} days for {human_count(proposal.tokens)} tokens at {proposal.best.mfu:.0%} MFU, "
        f"the deadline is {in_days(deadline_s)}: nearest: --deadline {math.ceil(days)}d, about "
        f"{math.ceil(cluster.count * days * DAY / deadline_s)} GPUs, or --tokens "
        f"{human_count(proposal.tokens * deadline_s / proposal.wall_s)}"
    )


def _fewest_gpus(
    request: PlanRequest, gpu: Gpu, compute: float, deadline_s: float, network: str | None, prices: PriceList
) -> tuple[BudgetOption | None, str]:  # fmt: skip
    """About the smallest number of this type that meets the deadline, in powers of two."""
    least = compute / (_peak(gpu, request) * USUAL_MFU * deadline_s)
    states = LEAST_BYTES * request.shape.parameters / gpu.memory_bytes
    count = 1 << max(0, math.ceil(math.log2(max(1.0, least, states))))
    largest = max(price.most or MOST_GPUS for price in prices.find(gpu=gpu.name))
    if count > largest:
        fewest = f"{count:,} at least are needed"
        return None, f"{fewest}, and {largest} are rented together" if largest < MOST_GPUS else fewest
    why = ""
    while count <= largest:
        try:
            proposal = propose(request, parse_cluster(f"{count} x {gpu.name}", network))
        except UserError as error:
            if str(error).startswith(("parallel.", "budget.", "memory.")):
                raise  # this key has to change, whatever the GPUs
            why = f"{str(error).split(': write')[0].split(': the leanest')[0]} on {count:,}"
            if not why.startswith("nothing fits"):
                break  # too many for the rows of a step, or no such units
            count *= 2
            continue
        if costs := affordable(proposal, None, deadline_s):
            return BudgetOption(proposal, tuple(costs)), ""
        why = f"{count:,} take {human_time(proposal.wall_s)}"
        if proposal.goal.cluster.count < count:
            return None, f"{why}, and more GPUs would be idle"
        if proposal.wall_s <= deadline_s:
            why = f"offers of {count:,} lose too much time to preemptions"
        count *= 1 << max(1, math.ceil(math.log2(proposal.wall_s / deadline_s)))
    return None, why


def _tokens(request: PlanRequest) -> float:
    return spec_tokens(request.spec, _context(request)) or optimal_tokens(request.shape.parameters)


def _context(request: PlanRequest) -> int:
    context = request.spec.data.context
    return DEFAULT_CONTEXT if context == "auto" else context


def _peak(gpu: Gpu, request: PlanRequest) -> float:
    """Peak in the requested precision, if the GPU supports it."""
    precision = request.spec.precision.split("_")[0]
    return gpu.peaks.get(precision, gpu.peak(half_precision(gpu)))


def _cheapest(gpu: Gpu, prices: PriceList) -> float:
    return min(
        (p.usd_hour for p in prices.prices if p.gpu == gpu.name and p.term in ("on_demand", "spot")), default=math.inf
    )


def _is_gpu_type(where: str) -> bool:
    """Whether it names a GPU without a number."""
    try:
        find_gpu(where)
    except UserError:
        return False
    return True


def _explain_impossible(
    request: PlanRequest, limits: BudgetLimits, options: list[BudgetOption], where: str | None, network: str | None,
    prices: PriceList,
) -> str:  # fmt: skip
    size, tokens = request.shape.parameters, _tokens(request)
    work = f"{human_count(size)} parameters on {human_count(tokens)} tokens are {6 * size * tokens:.2g} FLOPs"
    if not options:
        longer: list[BudgetOption] = []
        deadline_s = limits.deadline_s
        while not longer and deadline_s <= max(limits.deadline_s, DEFAULT_DEADLINE_S):
            deadline_s *= 100
            longer, _ = options_within(request, BudgetLimits(None, deadline_s), where, network, prices, most_types=3)
        if not longer:
            return (
                f"{work}: no GPU that is rented trains them in {in_days(limits.deadline_s)}, nor in "
                f"{in_days(deadline_s)}: write fewer --tokens, or a smaller --model"
            )
        fastest = min(longer, key=lambda option: option.costs[0].wall_s)
        days = math.ceil(fastest.costs[0].wall_s / DAY)
        return (
            f"{work}: no {MOST_GPUS:,} GPUs of any type do that in {in_days(limits.deadline_s)}; nearest: "
            f"--deadline {days}d with {fastest.name}, ${fastest.usd:,.0f}, or fewer --tokens"
        )
    assert limits.budget_usd is not None
    best = options[0]
    cost, mfu = best.costs[0], best.proposal.best.mfu
    hours = best.proposal.seconds * best.proposal.goal.cluster.count / 3600
    fewer = human_count(float(f"{0.95 * tokens * limits.budget_usd / best.usd:.2g}"))
    nearest = [f"--budget {math.ceil(best.usd / 100) * 100}usd"]
    fewest = best.proposal.goal.context * 1000
    if tokens * limits.budget_usd / best.usd > fewest:
        nearest.append(f"--tokens {fewer}")
    if not limits.default_deadline:
        slow, _ = options_within(
            request, BudgetLimits(None, 20 * limits.deadline_s), where, network, prices, most_types=3
        )
        paid = [option for option in slow if option.usd <= limits.budget_usd]
        if paid:
            nearest.append(
                f"--deadline {math.ceil(paid[0].costs[0].days)}d with {paid[0].name} for ${paid[0].usd:,.0f}"
            )
    return (
        f"{work}, or {hours:,.0f} hours of {best.proposal.goal.cluster.gpu.name} at {mfu:.0%} of its peak; "
        f"the cheapest option within {in_days(limits.deadline_s)} is {best.name} at {cost.price.provider} "
        f"({cost.price.region}, {cost.price.term.replace('_', ' ')}): ${best.usd:,.0f} in {cost.days:,.1f} days, "
        f"{best.usd / limits.budget_usd:.2g} times the budget; nearest: {', or '.join(nearest)}"
    )
