"""Makes a plan: model, tokens and GPUs in; layout, batch, learning rate, memory, days and money out, with reasons.

Reads no data and no devices. What a run measures on its own machine later takes precedence.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.adapter_choice import choose_adapter
from bessemer.plan.cost_model.cost import (
    Cost,
    Work,
    explain_impossible,
    load_prices,
    preparation_hours,
    rank_offers,
    storage_bytes,
)
from bessemer.plan.cost_model.goodput import SAVE_STALL_S, Goodput, goodput
from bessemer.plan.cost_model.memory import CONTEXT, FRAGMENTS, Passes, estimate_memory, reserve_memory
from bessemer.plan.decide import (
    decide_batch,
    decide_context,
    decide_lr,
    decide_tokens,
    decide_warmup,
    decide_weights,
    with_weights,
)
from bessemer.plan.decision import EMPIRICAL, Plan, RecipeAnswer
from bessemer.plan.expect import most_mfu, with_history
from bessemer.plan.hardware import (
    Cluster,
    Gpu,
    Machine,
    saved_ceilings,
    usable_subclusters,
    with_ceilings,
    without_measurements,
)
from bessemer.plan.recipe.pretraining import batch_tokens, tokens_for_model
from bessemer.plan.request import DEGREES, PlanRequest, fixed_degrees, log_estimate, spec_tokens
from bessemer.plan.rollouts import log_rl
from bessemer.plan.search.layout import Layout, check_layout
from bessemer.plan.search.search import (
    USABLE,
    Candidate,
    FixedDegrees,
    SearchGoal,
    SearchResult,
    can_beat,
    explain_no_fit,
    least_seconds_per_token,
    search,
)
from bessemer.spec.optimizer import LOW_MEMORY_OPTIMIZERS, MemorySpec
from bessemer.spec.quantity import human_bytes, human_count, human_time
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.spec.trained import parameter_bytes

# By rising cost (docs/gpu.md); each includes all before it. With the last, 70B trained on one H200.
MEMORY_FALLBACKS: tuple[dict[str, Any], ...] = (
    {"memory.weights": "kahan", "memory.activations": "full"},
    {"memory.moments": "8bit"},
    {"memory.weights": "stochastic"},
    {"memory.offload_optimizer": True},
    {"memory.update": "in_backward"},
    {"memory.offload_activations": True, "optimizer.name": "lion"},
)
EDGE = 0.97  # of the memory: 70.6B parameters trained at 0.956 of an H200
WORTH_A_NOTE = 0.05  # share of the compute that padding loses
RAREST_SAVE_S = 3600.0  # Young's optimum on one node is five hours, of which a failure would lose half


def memory_fallbacks(
    spec: RunSpec, shape: ModelShape, context: int, precision: str, usable: float, capacity: int
) -> str:
    """The first memory settings with which one GPU holds the model, as spec keys. Empty if none do, if weights cannot
    be kept in bf16, or for mixtures of experts, which are untested. A plan fills `usable` of the `capacity` bytes; the
    last settings may exceed it, and the text says so."""
    if (
        precision not in ("bf16", "fp8")
        or spec.optimizer.name not in LOW_MEMORY_OPTIMIZERS
        or shape.wrapped
        or shape.moe
    ):
        return ""
    keys: dict[str, Any] = {}
    for more in MEMORY_FALLBACKS:
        keys |= more
        smaller = _with_settings(spec, keys)
        at_once = smaller.memory.update == "in_backward"
        need = estimate_memory(
            smaller, shape, Passes(context, 1, precision, "full", compiled=True, several=not at_once)
        )
        fits = need.total * (1 + FRAGMENTS) + CONTEXT <= usable
        if not fits and (more is not MEMORY_FALLBACKS[-1] or need.total > EDGE * capacity):
            continue
        written = keys | ({"budget.batch": context} if at_once else {})  # a step is one micro-batch
        settings = ", ".join(f"{key}: {'true' if value is True else value}" for key, value in written.items())
        host = int(parameter_bytes(smaller, shape, precision).host * shape.parameters)
        notes = [f"{human_bytes(need.total)} for one row of {context:,} tokens"]
        notes += [f"{human_bytes(host)} on the host"] * bool(host)
        notes += ["no step can be vetoed"] * at_once
        notes += ["at the edge"] * (not fits)
        return f"This one GPU holds it with {settings} ({'; '.join(notes)})"
    return ""


def _with_settings(spec: RunSpec, keys: dict[str, Any]) -> RunSpec:
    memory = {key.removeprefix("memory."): value for key, value in keys.items() if key.startswith("memory.")}
    name = keys.get("optimizer.name", spec.optimizer.name)
    return spec.model_copy(
        update={
            "memory": MemorySpec.model_validate(memory),
            "optimizer": spec.optimizer.model_copy(update={"name": name}),
        }
    )


@dataclass(frozen=True)
class Proposal:
    """A plan. `result` has the best layout first, `costs` the cheapest offer first (empty if nobody rents such GPUs).
    `notes` are its limitations."""

    request: PlanRequest
    tokens: int
    goal: SearchGoal
    result: SearchResult
    plan: Plan
    seconds: float  # of training, if nothing fails
    wall_s: float  # with failures
    costs: tuple[Cost, ...]
    available: Cluster  # of which `goal.cluster` is used
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> ModelShape:
        return self.request.shape

    @property
    def best(self) -> Candidate:
        return self.result.best

    @property
    def error(self) -> float:
        return self.best.time.error


def propose(request: PlanRequest, cluster: Cluster) -> Proposal:
    """The plan. It keeps the settings of the request. What is impossible is refused with the arithmetic and the nearest
    possible request."""
    cluster = with_ceilings(cluster, saved_ceilings(cluster.gpu))
    spec, shape, plan = request.spec, request.shape, Plan()
    plan.add("model", f"{human_count(shape.parameters)} parameters", request.reason, request.source, request.basis)
    for key, answer in request.answers.items():
        plan.add_answer(key, answer)
    precision = _decide_precision(plan, spec, cluster.gpu)
    cluster = _beside_other_models(request, cluster, precision, plan)
    context = decide_context(spec, shape, plan)
    log_rl(spec, shape, context, plan)
    machine = Machine("cuda", cluster.gpu.name, int(cluster.gpu.memory_bytes), 1)
    chosen = choose_adapter(spec.model_copy(update={"precision": precision}), shape, context, machine, plan, None,
                            cluster.count)  # fmt: skip
    spec = spec.model_copy(update={"adapter": chosen.adapter})
    request = replace(request, spec=spec)
    tokens = _decide_tokens(plan, request, context)
    if request.sources:
        documents = sum(size.documents for size in request.sources.values())
        mean = sum(size.tokens for size in request.sources.values()) / documents if documents else 0.0
        rows = decide_batch(spec, shape, context, tokens, plan, document_tokens=mean)
    else:
        rows = _decide_rows(plan, spec, shape, tokens, context)
    fixed = fixed_degrees(spec)
    _check_degrees(spec, shape, fixed, context, cluster.count)
    state_bytes = parameter_bytes(spec, shape, precision)
    goal = SearchGoal(shape, cluster, context, rows, state_bytes, precision, fixed)
    option, notes = _fastest_option(spec, goal, tokens)
    spec, goal, result, available = option.spec, option.goal, option.result, cluster
    cluster = goal.cluster
    _decide_weights(plan, request.spec, shape, cluster, precision)
    _add_layout(plan, goal, result)
    steps = -(-tokens // (rows * context))
    plan.add("steps", steps, f"{human_count(tokens)} tokens in batches of {rows * context:,}", "counted")
    decide_lr(spec, shape, tokens, rows * context, plan)
    decide_warmup(spec, steps, rows * context, plan)
    if spec.checkpoint.every != "auto":
        plan.add_requested("checkpoint.every", spec.checkpoint.every)
    else:
        plan.add(
            "checkpoint.every", human_time(min(option.goodput.save_every_s, RAREST_SAVE_S)),
            f"failures come about every {human_time(option.goodput.mtti_s)} on {_nodes(cluster)}, a save stalls for "
            f"{SAVE_STALL_S:.0f} s; an hour at most", "Young 1974", "established",
        )  # fmt: skip
    work = Work(cluster.gpu.name, cluster.count, option.seconds, shape.parameters, tokens, cluster.per_node)
    costs = rank_offers(work, load_prices(), storage_bytes(shape.parameters, tokens), preparation_hours(tokens))
    if request.from_options:
        plan = _without_spec(plan)
    request = replace(request, spec=spec)
    return Proposal(request, tokens, goal, result, plan, option.seconds, option.wall_s, tuple(costs), available, notes)


@dataclass(frozen=True)
class _Option:
    """The run on some of the GPUs, with the rest idle."""

    spec: RunSpec
    goal: SearchGoal
    result: SearchResult
    seconds: float
    goodput: Goodput
    notes: tuple[str, ...]

    @property
    def wall_s(self) -> float:
        return self.goodput.wall_s(self.seconds)


def _fastest_option(spec: RunSpec, full_goal: SearchGoal, tokens: int) -> tuple[_Option, tuple[str, ...]]:
    """The run on the number of GPUs that finishes first, and why the others are idle. Tries all GPUs and every
    subcluster (`usable_subclusters`) that could finish earlier."""
    least_s = tokens * least_seconds_per_token(full_goal)
    on_all = best = None
    refusal: UserError | None = None
    for part in usable_subclusters(full_goal.cluster, _fixed_layout(full_goal.fixed).size):
        if best and least_s / part.count >= best.wall_s:
            break
        part_spec, goal = _goal_on(part, spec, full_goal)
        part_goodput = goodput(part.nodes)
        if best and not can_beat(goal, tokens / (best.wall_s * part_goodput.share)):
            continue
        try:
            goal, result, notes = _search(part_spec, goal)
        except UserError as error:
            refusal = refusal or error
            continue
        option = _Option(part_spec, goal, result, tokens / result.best.tokens_per_s, part_goodput, notes)
        if part.count == full_goal.cluster.count:
            on_all = option
        if best is None or option.wall_s < best.wall_s:
            best = option
    if best is None:
        raise refusal or UserError(_explain_no_layout(full_goal))
    return best, (
        *_idle_notes(full_goal.cluster, best, on_all, refusal),
        *_padding_notes(best.goal, best.result.best),
        *best.notes,
    )


def _goal_on(part: Cluster, spec: RunSpec, full_goal: SearchGoal) -> tuple[RunSpec, SearchGoal]:
    """The same run on a subcluster, which decides how weights are fixed and which earlier runs correct the times."""
    spec = _decide_weights(Plan(), spec, full_goal.shape, part, full_goal.precision)
    state_bytes = parameter_bytes(spec, full_goal.shape, full_goal.precision)
    cluster = with_history(part, full_goal.precision, full_goal.shape.parameters)
    return spec, replace(full_goal, cluster=cluster, parameter_bytes=state_bytes)


def _search(spec: RunSpec, goal: SearchGoal) -> tuple[SearchGoal, SearchResult, tuple[str, ...]]:
    """The search, repeated with data sheets if wrong measurements lead to a prediction above the roofline."""
    result, withheld = search(goal), ""
    if result.ranked and (mfu := max(c.mfu for c in result.ranked)) > most_mfu(goal.precision):
        goal = replace(goal, cluster=without_measurements(cluster := goal.cluster))
        source = cluster.slower_source or cluster.source
        withheld = f"the prediction by {source} is withheld, since {mfu:.0%} MFU is more than {cluster.gpu.name} can do"
        result = search(goal)
    if not result.ranked:
        raise UserError(_explain_no_fit(goal, result, spec) if result.too_large else _explain_no_layout(goal))
    result, notes = _keep_runnable(spec, goal, result)
    return goal, result, ((f"{withheld}: data sheets are used", *notes) if withheld else notes)


def _idle_notes(cluster: Cluster, best: _Option, on_all: _Option | None, refusal: UserError | None) -> tuple[str, ...]:
    """Why some GPUs are not used; empty if all are."""
    used = best.goal.cluster.count
    if used == cluster.count:
        return ()
    times = human_time(best.wall_s), human_time(on_all.wall_s if on_all else math.inf)
    if on_all:
        later = "no sooner" if times[0] == times[1] else f"after {times[1]} instead of {times[0]}"
        reason = f"the run would end {later} on all of them"
    else:
        reason = str(refusal or "the degrees that are set do not divide all of them")
    return (f"{used} of {cluster.count} GPUs are used, {cluster.count - used} are idle: {reason}",)


def _padding_notes(goal: SearchGoal, best: Candidate) -> tuple[str, ...]:
    """The loss if the rows of a step do not divide evenly and the padding matters."""
    lost = 1 - goal.rows / best.padded_rows
    if lost < WORTH_A_NOTE:
        return ()
    even = best.padded_rows * goal.context
    return (
        f"{goal.rows} rows of a step are padded to {best.padded_rows} so that {best.layout.dp} processes get the same "
        f"number of micro-batches of {best.micro_rows}: {lost:.0%} of the compute is lost; budget.batch: {even} "
        "loses none",
    )


def check_rate(proposal: Proposal, wanted: float) -> None:
    """Refuse a throughput that these GPUs cannot reach, with the arithmetic and what would reach it."""
    gpu, count, rate = proposal.available.gpu, proposal.available.count, proposal.best.tokens_per_s
    if error := explain_impossible(proposal.shape.parameters, wanted, count, gpu, proposal.goal.precision):
        raise UserError(f"{error}; nearest: --tokens-per-second {rate:.0f}, which this plan gives")
    if wanted > rate * (1 + proposal.error):
        gpus = -(-wanted * proposal.goal.cluster.count // rate)
        raise UserError(
            f"{human_count(wanted)} tokens/s: {proposal.goal.cluster} give {human_count(rate)} "
            f"({proposal.best.mfu:.0%} MFU, {proposal.error:.0%} off on average); nearest: --tokens-per-second "
            f"{rate:.0f}, or about {gpus:.0f} such GPUs"
        )


def _without_spec(plan: Plan) -> Plan:
    """The same plan with reasons that do not mention a spec, which does not exist yet."""
    return Plan({
        d.key: replace(d, reason="as asked") if d.source == "asked" and d.key != "model" else d
        for d in plan.decisions.values()
    })  # fmt: skip


def _nodes(cluster: Cluster) -> str:
    return "one node" if cluster.nodes == 1 else f"{cluster.nodes} nodes"


def _decide_precision(plan: Plan, spec: RunSpec, gpu: Gpu) -> str:
    if spec.precision != "auto":
        gpu.peak(spec.precision)  # refuses a precision that the GPU does not support
        return str(plan.add_requested("precision", spec.precision))
    value = next(word for word in ("bf16", "fp16", "fp32") if word in gpu.peaks)
    reason = f"the fastest of {gpu.name} that needs no scales"
    if value == "fp16":
        reason = f"{gpu.name} has no bf16 units: fp16, with the loss scaled"
    return str(plan.add("precision", value, reason, "data sheet", "established"))


def _decide_tokens(plan: Plan, request: PlanRequest, context: int) -> int:
    budget = request.spec.budget
    if request.sources:  # the length is a number of passes over the data
        log_estimate(request, plan)
        corpus_tokens = sum(size.tokens for size in request.sources.values())
        return decide_tokens(request.spec, request.shape, corpus_tokens, plan) or context
    tokens = spec_tokens(request.spec, context)
    if tokens is None:
        answer = tokens_for_model(request.shape.parameters)
        rounded = int(float(f"{answer.value:.3g}"))  # more than three digits would suggest false precision
        return int(plan.add_answer("budget.tokens", RecipeAnswer(rounded, answer.reason, answer.source, answer.basis)))
    if tokens < context:
        raise UserError(f"--tokens {tokens}: fewer than a row of {context}: write more, such as 1B")
    if budget.steps is not None:
        plan.add_requested("budget.steps", budget.steps)
    elif "budget.tokens" not in request.answers:
        plan.add_requested("budget.tokens", tokens)
    return tokens


def _decide_rows(plan: Plan, spec: RunSpec, shape: ModelShape, tokens: int, context: int) -> int:
    """Rows of a step."""
    batch = spec.budget.batch
    if batch != "auto":
        if batch < context:
            raise UserError(f"budget.batch: {batch} is fewer tokens than a row of {context}: write {context} or more")
        rows = round(batch / context)
        plan.add_requested("budget.batch", rows * context)
        return rows
    answer = batch_tokens(shape.parameters, tokens)
    rows = even_rows(answer.value / context)
    plan.add("budget.batch", rows * context, answer.reason, answer.source, answer.basis)
    return rows


def even_rows(rows: float) -> int:
    """Rows that divide well: 4 to 7 times a power of two. Twice the number gives at most twice the rows, so a run of
    twice the tokens, whose batch is at most twice as large, never has fewer steps."""
    if rows <= 4:
        return max(1, math.ceil(rows))
    power = 2 ** (math.floor(math.log2(rows)) - 2)
    return round(rows / power) * power


def _decide_weights(plan: Plan, spec: RunSpec, shape: ModelShape, cluster: Cluster, precision: str) -> RunSpec:
    """The spec with its weights as training keeps them: in fp32 if they are sharded."""
    if cluster.count > 1 or spec.memory.weights != "auto":
        return spec
    machine = Machine("cuda", cluster.gpu.name, cluster.gpu.memory_bytes, 1)
    return with_weights(spec, decide_weights(spec, shape, machine, precision, plan))


def _beside_other_models(request: PlanRequest, cluster: Cluster, precision: str, plan: Plan) -> Cluster:
    """The cluster with the memory that further models leave on each GPU, if each holds them whole."""
    machine = Machine("cuda", cluster.gpu.name, int(cluster.gpu.memory_bytes), 1)
    spec = request.spec.model_copy(update={"precision": precision})
    left = reserve_memory(spec, request.others, machine, 1, plan).memory_bytes
    return replace(cluster, gpu=replace(cluster.gpu, memory_bytes=left)) if request.others else cluster


def _fixed_layout(fixed: FixedDegrees) -> Layout:
    """The degrees that are set, 1 for the others."""
    layout = Layout(**{key: int(getattr(fixed, key) or 1) for key in DEGREES})
    return replace(layout, dp_shard=layout.ep) if fixed.ep and fixed.dp_shard is None else layout


def _check_degrees(spec: RunSpec, shape: ModelShape, fixed: FixedDegrees, context: int, count: int) -> None:
    """Refuse degrees that do not divide the model or the cluster, before the search tries in vain."""
    layout = _fixed_layout(fixed)
    check_layout(spec, shape, layout, context, count)
    if layout.size > count:
        words = " x ".join(f"{key} {getattr(layout, key)}" for key in DEGREES if getattr(layout, key) > 1)
        raise UserError(f"parallel: {words} needs {layout.size} GPUs, and there are {count}: write lower degrees")


def _keep_runnable(spec: RunSpec, goal: SearchGoal, result: SearchResult) -> tuple[SearchResult, tuple[str, ...]]:
    """Only the layouts that `bessemer train` supports; all of them, with a note, if it supports none."""
    runnable, refusal = [], ""
    for candidate in result.ranked:
        try:
            run = spec.model_copy(update={"precision": goal.precision})
            check_layout(run, goal.shape, candidate.layout, goal.context)
            runnable.append(candidate)
        except UserError as error:
            refusal = refusal or str(error)
    if runnable:
        return replace(result, ranked=tuple(runnable)), ()
    return result, (f"bessemer train does not support this layout yet: {refusal}",)


def _explain_no_fit(goal: SearchGoal, result: SearchResult, spec: RunSpec) -> str:
    text, gpu = explain_no_fit(goal, result), goal.cluster.gpu
    if goal.cluster.count > 1:
        return text
    usable, capacity = USABLE * gpu.memory_bytes, int(gpu.memory_bytes)
    fallback = memory_fallbacks(spec, goal.shape, goal.context, goal.precision, usable, capacity)
    return f"{text}. {fallback}" if fallback else text


def _explain_no_layout(goal: SearchGoal) -> str:
    degrees = " x ".join(f"{key} {degree}" for key in DEGREES if (degree := getattr(goal.fixed, key)) is not None)
    return f"parallel: no layout of {goal.cluster.count} GPUs has {degrees or 'such degrees'}: leave one of them open"


def _add_layout(plan: Plan, goal: SearchGoal, result: SearchResult) -> None:
    best, fixed = result.best, goal.fixed
    source = f"search, step times {best.time.error:.0%} off on average"
    reason_layout = f"the fastest of {len(result.ranked)} layouts that fit, {len(result.too_large)} do not"
    for key, value in asdict(best.layout).items():
        if getattr(fixed, key) is not None:
            plan.add_requested(f"parallel.{key}", value)
        elif value > 1 or key == "dp_shard":
            plan.add(f"parallel.{key}", value, reason_layout, source, EMPIRICAL)
    if best.layout.pp > 1 and fixed.stages is None:
        kind = {"schedule": "interleaved", "stages": best.virtual} if best.virtual > 1 else {"schedule": "1f1b"}
        plan.add("parallel.pipeline", kind, "the smallest bubble that fits", source, EMPIRICAL)
    if fixed.micro_rows:
        plan.add_requested("budget.micro_batch", fixed.micro_rows)
    else:
        reason = f"{best.micro_batches} passes of each process make a step"
        plan.add("budget.micro_batch", best.micro_rows, reason, source, EMPIRICAL)
    if fixed.activations:
        plan.add_requested("memory.activations", fixed.activations)
    else:
        reason = "the least recomputation that fits"
        plan.add("memory.activations", best.activations, reason, source, EMPIRICAL)


def affordable(proposal: Proposal, budget_usd: float | None, deadline_s: float | None) -> list[Cost]:
    """The offers within both limits, cheapest first."""
    within = [cost for cost in proposal.costs if deadline_s is None or cost.wall_s <= deadline_s]
    return [cost for cost in within if budget_usd is None or cost.usd <= budget_usd]
