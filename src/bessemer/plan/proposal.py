"""A whole plan from a wish: model, tokens and GPUs in; layout, batch, rates, memory, days and money out, each with why.

Nothing here reads data or devices: what a run measures on its own machine comes later, and takes precedence.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.asked import DEGREES, Asked, ask, kept_by, tokens_of
from bessemer.plan.cost import Cost, Work, impossible, preparation_of, rank, storage_of
from bessemer.plan.decide import decide_context, decide_lr, decide_warmup, decide_weights, keeping
from bessemer.plan.decision import EMPIRICAL, Plan
from bessemer.plan.goodput import SAVE_STALL_S, goodput
from bessemer.plan.hardware import Cluster, Gpu, kept_ceilings, parse_cluster, with_ceilings
from bessemer.plan.history import with_history
from bessemer.plan.layout import Layout, check_layout
from bessemer.plan.lighter import lighter
from bessemer.plan.machine import Machine
from bessemer.plan.prices import load_prices
from bessemer.plan.recipe.answer import Answer
from bessemer.plan.recipe.rates import batch_tokens
from bessemer.plan.recipe.tokens import tokens_for_model
from bessemer.plan.search import USABLE, Candidate, Found, Wish, nearest, search
from bessemer.spec.memory import optimizer_bytes
from bessemer.spec.quantity import human_count, human_time
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

RAREST_SAVE_S = 3600.0  # Young's optimum on one node is five hours: nobody wants to lose half of that


@dataclass(frozen=True)
class Proposal:
    """`found` has the best layout first. Money is cheapest first; empty where nobody rents such GPUs. `notes` are what
    a reader should know before believing it."""

    asked: Asked
    tokens: int
    wish: Wish
    found: Found
    plan: Plan
    seconds: float  # of training, if nothing fails
    wall_s: float  # with failures
    costs: tuple[Cost, ...]
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


def propose_for(asked: Asked, cluster: Cluster) -> Proposal:
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
    spec = _weights(plan, spec, shape, cluster, precision)
    each = optimizer_bytes(spec.optimizer, spec.memory, precision)
    cluster = with_history(cluster, precision, shape.parameters)
    wish = Wish(shape, cluster, context, rows, each, precision, kept_by(spec))
    _check_degrees(wish, spec)
    found = search(wish)
    if not found.ranked:
        raise UserError(_nothing_fits(wish, found, spec) if found.too_large else _no_layout(wish))
    found, notes = _runnable(spec, wish, found)
    _explain(plan, wish, found, spec)
    steps = -(-tokens // (rows * context))
    plan.add("steps", steps, f"{human_count(tokens)} tokens in batches of {rows * context:,}", "counted")
    _rates(plan, spec, wish, tokens, steps)
    seconds = tokens / found.best.tokens_per_s
    kept = goodput(cluster.nodes)
    if spec.checkpoint.every != "auto":
        plan.asked("checkpoint.every", spec.checkpoint.every)
    else:
        plan.add(
            "checkpoint.every", human_time(min(kept.save_every_s, RAREST_SAVE_S)),
            f"failures come about every {human_time(kept.mtti_s)} on {_nodes(cluster)}, a save stalls for "
            f"{SAVE_STALL_S:.0f} s; an hour at most", "Young 1974", "established",
        )  # fmt: skip
    work = Work(cluster.gpu.name, cluster.count, seconds, shape.parameters, tokens, cluster.per_node)
    costs = rank(
        {cluster.gpu.name: work}, load_prices(), storage=storage_of(shape.parameters, tokens),
        preparation=preparation_of(tokens),
    )  # fmt: skip
    if asked.from_words:
        plan = _said(plan)
    asked = replace(asked, spec=spec)
    return Proposal(asked, tokens, wish, found, plan, seconds, kept.wall_s(seconds), tuple(costs), notes)


def check_rate(proposal: Proposal, wanted: float) -> None:
    """Refuse a wished-for throughput that these machines cannot give, with the arithmetic and what would."""
    gpu, count, given = proposal.wish.cluster.gpu, proposal.wish.cluster.count, proposal.best.tokens_per_s
    if fault := impossible(proposal.shape.parameters, wanted, count, gpu, proposal.wish.precision):
        raise UserError(f"{fault}; nearest: --tokens-per-second {given:.0f}, which this plan gives")
    if wanted > given * (1 + proposal.error):
        more = -(-wanted * count // given)
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


def _answer(plan: Plan, key: str, answer: Answer[Any]) -> Any:
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


def _tokens(plan: Plan, asked: Asked, context: int) -> int:
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


def _rounded(answer: Answer[float]) -> Answer[int]:
    """The same with a whole number of three digits: more would be a pretence."""
    return Answer(int(float(f"{answer.value:.3g}")), answer.reason, answer.source, answer.basis)


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
    rows = max(1, round(answer.value / context))
    power = 1 << max(0, rows.bit_length() - 3)
    rows = max(1, round(rows / power) * power)
    plan.add("budget.batch", rows * context, answer.reason, answer.source, answer.basis)
    return rows


def _weights(plan: Plan, spec: RunSpec, shape: ModelShape, cluster: Cluster, precision: str) -> RunSpec:
    """As training would keep them: where weights are divided, in fp32."""
    if cluster.count > 1 or spec.memory.weights != "auto":
        return spec
    machine = Machine("cuda", cluster.gpu.name, cluster.gpu.memory_bytes, 1)
    return keeping(spec, decide_weights(spec, shape, machine, precision, plan))


def _check_degrees(wish: Wish, spec: RunSpec) -> None:
    """Degrees that are settled must divide the model and the cluster; told before the search looks in vain."""
    degrees = {key: int(getattr(wish.kept, key) or 1) for key in DEGREES}
    held = Layout(**degrees)
    if wish.kept.ep and wish.kept.dp_shard is None:
        held = replace(held, dp_shard=held.ep)
    check_layout(spec, wish.shape, held, wish.context)
    if wish.cluster.count % held.size:
        words = " x ".join(f"{key} {degree}" for key, degree in degrees.items() if degree > 1)
        fits = ", ".join(str(n) for n in range(2, 65) if wish.cluster.count % n == 0) or "1"
        raise UserError(
            f"parallel: {words} does not divide {wish.cluster.count} GPUs: write degrees whose product is one of {fits}"
        )


def _runnable(spec: RunSpec, wish: Wish, found: Found) -> tuple[Found, tuple[str, ...]]:
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


def _nothing_fits(wish: Wish, found: Found, spec: RunSpec) -> str:
    told, gpu = nearest(wish, found), wish.cluster.gpu
    if wish.cluster.count > 1:
        return told
    usable, whole = USABLE * gpu.memory_bytes, int(gpu.memory_bytes)
    way = lighter(spec, wish.shape, wish.context, wish.precision, usable, whole)
    return f"{told}. {way}" if way else told


def _no_layout(wish: Wish) -> str:
    count, rows, kept = wish.cluster.count, wish.rows, wish.kept
    if kept.micro_rows and rows % kept.micro_rows:
        return f"budget.micro_batch: {kept.micro_rows} does not divide the {rows} rows of a step: write 1, 2 or 4"
    return (
        f"no layout shares {rows} rows of a step among {count} GPUs: write --batch {count * wish.context} or a multiple"
    )


def _explain(plan: Plan, wish: Wish, found: Found, spec: RunSpec) -> None:
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
    batches = wish.rows // (best.layout.dp * best.micro_rows)
    if kept.micro_rows:
        plan.asked("budget.micro_batch", kept.micro_rows)
    else:
        reason = f"{batches} passes of each process make a step"
        plan.add("budget.micro_batch", best.micro_rows, reason, source, EMPIRICAL)
    if kept.activations:
        plan.asked("memory.activations", kept.activations)
    else:
        reason = "the least that is computed again for the rest to fit"
        plan.add("memory.activations", best.activations, reason, source, EMPIRICAL)


def _rates(plan: Plan, spec: RunSpec, wish: Wish, tokens: int, steps: int) -> None:
    batch = wish.rows * wish.context
    decide_lr(spec, wish.shape, tokens, batch, plan)
    decide_warmup(spec, steps, batch, plan)


def affordable(proposal: Proposal, budget_usd: float | None, deadline_s: float | None) -> list[Cost]:
    """The offers within both limits, cheapest first."""
    found = proposal.costs
    within = [cost for cost in found if deadline_s is None or cost.wall_s <= deadline_s]
    return [cost for cost in within if budget_usd is None or cost.usd <= budget_usd]
