"""What one GPU can give up so that a model fits that does not fit as it is planned.

A whole plan from a wish: model, tokens and GPUs in; layout, batch, rates, memory, days and money out, each with why.

Nothing here reads data or devices: what a run measures on its own machine comes later, and takes precedence.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.cost_model.cost import Cost, Work, impossible, load_prices, preparation_of, rank, storage_of
from bessemer.plan.cost_model.goodput import SAVE_STALL_S, Goodput, goodput
from bessemer.plan.cost_model.memory import Passes, estimate
from bessemer.plan.cost_model.rank_memory import CONTEXT, FRAGMENTS
from bessemer.plan.decide import decide_context, decide_lr, decide_warmup, decide_weights, keeping
from bessemer.plan.decision import EMPIRICAL, Plan
from bessemer.plan.expect import most_mfu, with_history
from bessemer.plan.hardware import (
    Cluster,
    Gpu,
    Machine,
    catalogued,
    kept_ceilings,
    parse_cluster,
    usable_parts,
    with_ceilings,
)
from bessemer.plan.recipe.fine_tuning import RecipeAnswer
from bessemer.plan.recipe.rates import batch_tokens
from bessemer.plan.recipe.tokens import tokens_for_model
from bessemer.plan.request import DEGREES, PlanRequest, ask, kept_by, tokens_of
from bessemer.plan.search.layout import Layout, check_layout
from bessemer.plan.search.search import (
    USABLE,
    Candidate,
    FixedDegrees,
    SearchGoal,
    SearchResult,
    can_beat,
    least_seconds_per_token,
    nearest,
    search,
)
from bessemer.spec.optimizer import LEAN, MemorySpec, optimizer_bytes
from bessemer.spec.quantity import human_bytes, human_count, human_time
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

# In the order of what each costs (docs/gpu.md), every one with all before it. The last is how 70B trained on an H200.
RUNGS: tuple[dict[str, Any], ...] = (
    {"memory.weights": "kahan", "memory.activations": "full"},
    {"memory.moments": "8bit"},
    {"memory.weights": "stochastic"},
    {"memory.offload_optimizer": True},
    {"memory.update": "in_backward"},
    {"memory.offload_activations": True, "optimizer.name": "lion"},
)
EDGE = 0.97  # of the memory: 70.6B parameters trained at 0.956 of an H200


def lighter(spec: RunSpec, shape: ModelShape, context: int, precision: str, usable: float, whole: int) -> str:
    """The first rung that fits, as keys of a spec; nothing where none does, weights cannot be kept in bf16, or there
    are experts, which nobody has trained this way. `usable` is what a plan fills of the `whole`; the last rung may go
    further, and says so."""
    if precision not in ("bf16", "fp8") or spec.optimizer.name not in LEAN or shape.wrapped or shape.moe:
        return ""
    keys: dict[str, Any] = {}
    for rung in RUNGS:
        keys |= rung
        leaner = _with(spec, keys)
        at_once = leaner.memory.update == "in_backward"
        need = estimate(leaner, shape, Passes(context, 1, precision, "full", compiled=True, several=not at_once))
        fits = need.total * (1 + FRAGMENTS) + CONTEXT <= usable
        if not fits and (rung is not RUNGS[-1] or need.total > EDGE * whole):
            continue
        written = keys | ({"budget.batch": context} if at_once else {})  # a step is one micro-batch
        said = ", ".join(f"{key}: {'true' if value is True else value}" for key, value in written.items())
        host = int(optimizer_bytes(leaner.optimizer, leaner.memory, precision).host * shape.parameters)
        notes = [f"{human_bytes(need.total)} for one row of {context:,} tokens"]
        notes += [f"{human_bytes(host)} on the host"] * bool(host)
        notes += ["no step can be vetoed"] * at_once
        notes += ["at the edge"] * (not fits)
        return f"This one GPU holds it with {said} ({'; '.join(notes)})"
    return ""


def _with(spec: RunSpec, keys: dict[str, Any]) -> RunSpec:
    memory = {key.removeprefix("memory."): value for key, value in keys.items() if key.startswith("memory.")}
    name = keys.get("optimizer.name", spec.optimizer.name)
    return spec.model_copy(
        update={
            "memory": MemorySpec.model_validate(memory),
            "optimizer": spec.optimizer.model_copy(update={"name": name}),
        }
    )


WORTH_A_NOTE = 0.05  # of the computing that padding loses
RAREST_SAVE_S = 3600.0  # Young's optimum on one node is five hours: nobody wants to lose half of that


@dataclass(frozen=True)
class Proposal:
    """`found` has the best layout first. Money is cheapest first; empty where nobody rents such GPUs. `notes` are what
    a reader should know before believing it."""

    asked: PlanRequest
    tokens: int
    wish: SearchGoal
    found: SearchResult
    plan: Plan
    seconds: float  # of training, if nothing fails
    wall_s: float  # with failures
    costs: tuple[Cost, ...]
    given: Cluster  # of which `wish.cluster` is used
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> ModelShape:
        return self.asked.shape

    @property
    def best(self) -> Candidate:
        return self.found.best

    @property
    def error(self) -> float:
        return self.best.time.error


def propose(
    model: str, gpus: str, tokens: int | None = None, context: int | None = None, batch: int | None = None,
    precision: str = "auto", network: str | None = None,
) -> Proposal:  # fmt: skip
    """The plan for a line of wishes."""
    cluster = parse_cluster(gpus, network)
    return propose_for(ask(model, tokens, context, batch, precision), cluster)


def propose_for(asked: PlanRequest, cluster: Cluster) -> Proposal:
    """The plan. What is settled is kept; impossible wishes are refused with the arithmetic and the nearest possible
    one."""
    cluster = with_ceilings(cluster, kept_ceilings(cluster.gpu))
    spec, shape, plan = asked.spec, asked.shape, Plan()
    plan.add("model", f"{human_count(shape.parameters)} parameters", asked.reason, asked.source, asked.basis)
    for key, answer in asked.answers.items():
        _answer(plan, key, answer)
    precision = _precision(plan, spec, cluster.gpu)
    context = decide_context(spec, shape, plan)
    tokens = _tokens(plan, asked, context)
    rows = _rows(plan, spec, shape, tokens, context)
    kept = kept_by(spec)
    _check_degrees(spec, shape, kept, context, cluster.count)
    wish = SearchGoal(
        shape, cluster, context, rows, optimizer_bytes(spec.optimizer, spec.memory, precision), precision, kept
    )
    option, notes = _earliest(spec, wish, tokens)
    spec, wish, found, given = option.spec, option.wish, option.found, cluster
    cluster = wish.cluster
    _weights(plan, asked.spec, shape, cluster, precision)
    _explain(plan, wish, found, spec)
    steps = -(-tokens // (rows * context))
    plan.add("steps", steps, f"{human_count(tokens)} tokens in batches of {rows * context:,}", "counted")
    _rates(plan, spec, wish, tokens, steps)
    if spec.checkpoint.every != "auto":
        plan.asked("checkpoint.every", spec.checkpoint.every)
    else:
        plan.add(
            "checkpoint.every", human_time(min(option.goodput.save_every_s, RAREST_SAVE_S)),
            f"failures come about every {human_time(option.goodput.mtti_s)} on {_nodes(cluster)}, a save stalls for "
            f"{SAVE_STALL_S:.0f} s; an hour at most", "Young 1974", "established",
        )  # fmt: skip
    work = Work(cluster.gpu.name, cluster.count, option.seconds, shape.parameters, tokens, cluster.per_node)
    costs = rank(
        {cluster.gpu.name: work}, load_prices(), storage=storage_of(shape.parameters, tokens),
        preparation=preparation_of(tokens),
    )  # fmt: skip
    if asked.from_words:
        plan = _said(plan)
    asked = replace(asked, spec=spec)
    return Proposal(asked, tokens, wish, found, plan, option.seconds, option.wall_s, tuple(costs), given, notes)


@dataclass(frozen=True)
class _Option:
    """The run on some of the GPUs, the rest idle."""

    spec: RunSpec
    wish: SearchGoal
    found: SearchResult
    seconds: float
    goodput: Goodput
    notes: tuple[str, ...]

    @property
    def wall_s(self) -> float:
        return self.goodput.wall_s(self.seconds)


def _earliest(spec: RunSpec, whole: SearchGoal, tokens: int) -> tuple[_Option, tuple[str, ...]]:
    """The run on as many of the GPUs as finish it first, and why the others are idle. All of them are tried, and every
    part (`usable_parts`) that could finish earlier."""
    least_s = tokens * least_seconds_per_token(whole)
    first = best = None
    refusal: UserError | None = None
    for part in usable_parts(whole.cluster, _settled(whole.kept).size):
        if best and least_s / part.count >= best.wall_s:
            break
        part_spec, wish = _on(part, spec, whole)
        kept = goodput(part.nodes)
        if best and not can_beat(wish, tokens / (best.wall_s * kept.share)):
            continue
        try:
            wish, found, notes = _found(part_spec, wish)
        except UserError as fault:
            refusal = refusal or fault
            continue
        option = _Option(part_spec, wish, found, tokens / found.best.tokens_per_s, kept, notes)
        if part.count == whole.cluster.count:
            first = option
        if best is None or option.wall_s < best.wall_s:
            best = option
    if best is None:
        raise refusal or UserError(_no_layout(whole))
    return best, (*_idle(whole.cluster, best, first, refusal), *_padding(best.wish, best.found.best), *best.notes)


def _on(part: Cluster, spec: RunSpec, whole: SearchGoal) -> tuple[RunSpec, SearchGoal]:
    """The same run on a part of the cluster: how weights are kept depends on it, and what earlier runs on it taught."""
    spec = _weights(Plan(), spec, whole.shape, part, whole.precision)
    each = optimizer_bytes(spec.optimizer, spec.memory, whole.precision)
    return spec, replace(whole, cluster=with_history(part, whole.precision, whole.shape.parameters), each=each)


def _found(spec: RunSpec, wish: SearchGoal) -> tuple[SearchGoal, SearchResult, tuple[str, ...]]:
    """What the search finds. A prediction beyond the roofline, which wrong measurements lead to, is not believed."""
    found, withheld = search(wish), ""
    if found.ranked and (mfu := max(one.mfu for one in found.ranked)) > most_mfu(wish.precision):
        wish = replace(wish, cluster=catalogued(cluster := wish.cluster))
        source = cluster.slower_source or cluster.source
        withheld = f"the prediction by {source} is withheld, since {mfu:.0%} MFU is more than {cluster.gpu.name} can do"
        found = search(wish)
    if not found.ranked:
        raise UserError(_nothing_fits(wish, found, spec) if found.too_large else _no_layout(wish))
    found, notes = _runnable(spec, wish, found)
    return wish, found, ((f"{withheld}: data sheets are used", *notes) if withheld else notes)


def _idle(cluster: Cluster, best: _Option, whole: _Option | None, refusal: UserError | None) -> tuple[str, ...]:
    """Why some GPUs are not used; nothing where all are."""
    used = best.wish.cluster.count
    if used == cluster.count:
        return ()
    times = human_time(best.wall_s), human_time(whole.wall_s if whole else math.inf)
    if whole:
        later = "no sooner" if times[0] == times[1] else f"after {times[1]} instead of {times[0]}"
        reason = f"the run would end {later} on all of them"
    else:
        reason = str(refusal or "the degrees that are written do not divide all of them")
    return (f"{used} of {cluster.count} GPUs are used, {cluster.count - used} are idle: {reason}",)


def _padding(wish: SearchGoal, best: Candidate) -> tuple[str, ...]:
    """What is lost because the rows of a step do not divide evenly, where it is worth a word."""
    lost = 1 - wish.rows / best.padded_rows
    if lost < WORTH_A_NOTE:
        return ()
    even = best.padded_rows * wish.context
    return (
        f"{wish.rows} rows of a step are padded to {best.padded_rows} so that {best.layout.dp} processes get equally "
        f"many micro-batches of {best.micro_rows}: {lost:.0%} of the computing is lost; --batch {even} loses none",
    )


def check_rate(proposal: Proposal, wanted: float) -> None:
    """Refuse a wished-for throughput that these machines cannot give, with the arithmetic and what would."""
    gpu, count, given = proposal.given.gpu, proposal.given.count, proposal.best.tokens_per_s
    if fault := impossible(proposal.shape.parameters, wanted, count, gpu, proposal.wish.precision):
        raise UserError(f"{fault}; nearest: --tokens-per-second {given:.0f}, which this plan gives")
    if wanted > given * (1 + proposal.error):
        more = -(-wanted * proposal.wish.cluster.count // given)
        raise UserError(
            f"{human_count(wanted)} tokens/s: {proposal.wish.cluster} give {human_count(given)} "
            f"({proposal.best.mfu:.0%} MFU, {proposal.error:.0%} off on average); nearest: --tokens-per-second "
            f"{given:.0f}, or about {more:.0f} such GPUs"
        )


def _said(plan: Plan) -> Plan:
    """The same, where there is no spec that anything could be written in."""
    words = {d.key: replace(d, reason="as asked") if d.source == "asked" and d.key != "model" else d
             for d in plan.decisions.values()}  # fmt: skip
    return Plan(words)


def _nodes(cluster: Cluster) -> str:
    return "one node" if cluster.nodes == 1 else f"{cluster.nodes} nodes"


def _answer(plan: Plan, key: str, answer: RecipeAnswer[Any]) -> Any:
    return plan.add(key, answer.value, answer.reason, answer.source, answer.basis)


def _precision(plan: Plan, spec: RunSpec, gpu: Gpu) -> str:
    if spec.precision != "auto":
        gpu.peak(spec.precision)  # refused where the device has no such units
        return str(plan.asked("precision", spec.precision))
    value = next(word for word in ("bf16", "fp16", "fp32") if word in gpu.peaks)
    reason = f"the fastest of {gpu.name} that needs no scales"
    if value == "fp16":
        reason = f"{gpu.name} has no bf16 units: fp16, with the loss scaled"
    return str(plan.add("precision", value, reason, "data sheet", "established"))


def _tokens(plan: Plan, asked: PlanRequest, context: int) -> int:
    budget, shape = asked.spec.budget, asked.shape
    tokens = tokens_of(asked.spec, context)
    if tokens is None:
        return int(_answer(plan, "budget.tokens", _rounded(tokens_for_model(shape.parameters))))
    if tokens < context:
        raise UserError(f"--tokens {tokens}: fewer than a row of {context}: write more, such as 1B")
    if budget.steps is not None:
        plan.asked("budget.steps", budget.steps)
    elif "budget.tokens" not in asked.answers:
        plan.asked("budget.tokens", tokens)
    return tokens


def _rounded(answer: RecipeAnswer[float]) -> RecipeAnswer[int]:
    """The same with a whole number of three digits: more would be a pretence."""
    return RecipeAnswer(int(float(f"{answer.value:.3g}")), answer.reason, answer.source, answer.basis)


def _rows(plan: Plan, spec: RunSpec, shape: ModelShape, tokens: int, context: int) -> int:
    """Rows of a step, a multiple of a power of two that shares out well."""
    batch = spec.budget.batch
    if batch != "auto":
        if batch < context:
            raise UserError(f"--batch {batch}: fewer tokens than a row of {context}: write {context} or more")
        rows = round(batch / context)
        plan.asked("budget.batch", rows * context)
        return rows
    answer = batch_tokens(shape.parameters, tokens)
    rows = even_rows(answer.value / context)
    plan.add("budget.batch", rows * context, answer.reason, answer.source, answer.basis)
    return rows


def even_rows(rows: float) -> int:
    """Whole rows that share out well: 4 to 7 times a power of two. Twice the number gives at most twice the rows, so a
    run of twice the tokens, whose batch is at most twice as large, has no fewer steps."""
    if rows <= 4:
        return max(1, math.ceil(rows))
    power = 2 ** (math.floor(math.log2(rows)) - 2)
    return round(rows / power) * power


def _weights(plan: Plan, spec: RunSpec, shape: ModelShape, cluster: Cluster, precision: str) -> RunSpec:
    """As training would keep them: where weights are divided, in fp32."""
    if cluster.count > 1 or spec.memory.weights != "auto":
        return spec
    machine = Machine("cuda", cluster.gpu.name, cluster.gpu.memory_bytes, 1)
    return keeping(spec, decide_weights(spec, shape, machine, precision, plan))


def _settled(kept: FixedDegrees) -> Layout:
    """The degrees that are written, 1 for the others."""
    held = Layout(**{key: int(getattr(kept, key) or 1) for key in DEGREES})
    return replace(held, dp_shard=held.ep) if kept.ep and kept.dp_shard is None else held


def _check_degrees(spec: RunSpec, shape: ModelShape, kept: FixedDegrees, context: int, count: int) -> None:
    """Degrees that are settled must divide the model and fit the cluster; told before the search looks in vain."""
    held = _settled(kept)
    check_layout(spec, shape, held, context, count)
    if held.size > count:
        words = " x ".join(f"{key} {getattr(held, key)}" for key in DEGREES if getattr(held, key) > 1)
        raise UserError(f"parallel: {words} needs {held.size} GPUs, and there are {count}: write lower degrees")


def _runnable(spec: RunSpec, wish: SearchGoal, found: SearchResult) -> tuple[SearchResult, tuple[str, ...]]:
    """Those layouts that `bessemer train` takes; all of them, with a note, where it takes none."""
    fits, refused = [], ""
    for one in found.ranked:
        try:
            check_layout(spec.model_copy(update={"precision": wish.precision}), wish.shape, one.layout, wish.context)
            fits.append(one)
        except UserError as fault:
            refused = refused or str(fault)
    if fits:
        return replace(found, ranked=tuple(fits)), ()
    return found, (f"bessemer train does not take this layout yet: {refused}",)


def _nothing_fits(wish: SearchGoal, found: SearchResult, spec: RunSpec) -> str:
    told, gpu = nearest(wish, found), wish.cluster.gpu
    if wish.cluster.count > 1:
        return told
    usable, whole = USABLE * gpu.memory_bytes, int(gpu.memory_bytes)
    way = lighter(spec, wish.shape, wish.context, wish.precision, usable, whole)
    return f"{told}. {way}" if way else told


def _no_layout(wish: SearchGoal) -> str:
    written = " x ".join(f"{key} {degree}" for key in DEGREES if (degree := getattr(wish.kept, key)) is not None)
    return f"parallel: no layout of {wish.cluster.count} GPUs has {written or 'such degrees'}: leave one of them open"


def _explain(plan: Plan, wish: SearchGoal, found: SearchResult, spec: RunSpec) -> None:
    best, kept = found.best, wish.kept
    source = f"search, step times {best.time.error:.0%} off on average"
    ways = f"the fastest of {len(found.ranked)} layouts that fit, {len(found.too_large)} do not"
    for key, value in asdict(best.layout).items():
        if getattr(kept, key) is not None:
            plan.asked(f"parallel.{key}", value)
        elif value > 1 or key == "dp_shard":
            plan.add(f"parallel.{key}", value, ways, source, EMPIRICAL)
    if best.layout.pp > 1 and kept.stages is None:
        kind = {"schedule": "interleaved", "stages": best.virtual} if best.virtual > 1 else {"schedule": "1f1b"}
        plan.add("parallel.pipeline", kind, "the smallest bubble that fits", source, EMPIRICAL)
    if kept.micro_rows:
        plan.asked("budget.micro_batch", kept.micro_rows)
    else:
        reason = f"{best.micro_batches} passes of each process make a step"
        plan.add("budget.micro_batch", best.micro_rows, reason, source, EMPIRICAL)
    if kept.activations:
        plan.asked("memory.activations", kept.activations)
    else:
        reason = "the least that is computed again for the rest to fit"
        plan.add("memory.activations", best.activations, reason, source, EMPIRICAL)


def _rates(plan: Plan, spec: RunSpec, wish: SearchGoal, tokens: int, steps: int) -> None:
    batch = wish.rows * wish.context
    decide_lr(spec, wish.shape, tokens, batch, plan)
    decide_warmup(spec, steps, batch, plan)


def affordable(proposal: Proposal, budget_usd: float | None, deadline_s: float | None) -> list[Cost]:
    """The offers within both limits, cheapest first."""
    found = proposal.costs
    within = [cost for cost in found if deadline_s is None or cost.wall_s <= deadline_s]
    return [cost for cost in within if budget_usd is None or cost.usd <= budget_usd]
