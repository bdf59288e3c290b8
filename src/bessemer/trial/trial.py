"""Runs the trial of a suspicious step within a time budget: experiments in the order of information per cost, and last
the replays from an earlier state, as recorded and with one change.

A trial leaves no trace: the job's state is restored, and an experiment that fails is named in the report instead of
ending the run. All ranks run it together, each its share of every pass; rank 0 decides whether time is left.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bessemer.data.stream.user_dataset import NOT_REPLAYABLE, IterableStream
from bessemer.errors import UserError
from bessemer.plan.decide import HALF
from bessemer.train.engine import Engine
from bessemer.train.job import Job
from bessemer.trial.attribute import describe_accused, document_parts, list_changes
from bessemer.trial.case import CORRUPT, LR_JUMP, EarlierState, Evidence, StepScene, Trial, decide
from bessemer.trial.experiments import (
    TrialContext,
    accuse_documents,
    inspect_layers,
    repeat,
    try_documents,
    try_earlier_weights,
    try_fp32,
    try_other_batches,
)
from bessemer.trial.measure import (
    QUIET,
    RankPassError,
    Yardstick,
    global_batches,
    local_state,
    measure,
    preserve_state,
    restore_state,
)
from bessemer.trial.replay import (
    Difference,
    Record,
    ReplayedStep,
    excess_over_spread,
    first_divergent_step,
    replay_to,
    tensor_differences,
)

Decode = Callable[[list[int]], str]


def run_trial(
    job: Job,
    scene: StepScene,
    earlier: Sequence[EarlierState],
    budget_s: float,
    events: Sequence[Mapping[str, Any]] = (),
    decode: Decode | None = None,
    alike_from: int = 0,
) -> Trial:
    """Find out why the step was abnormal. The job's weights are those that it was judged with, before and after.

    Takes about `budget_s`: the first repeat always runs, and a started experiment is finished. `decode` turns token ids
    into text for the excerpts. Steps before `alike_from` ran on other ranks or devices, which round sums differently.
    """
    if isinstance(job.data.stream, IterableStream):
        raise UserError(f"a trial repeats steps, and the data is {NOT_REPLAYABLE}")
    began = time.monotonic()
    yardstick = Yardstick.of(scene)
    evidence = Evidence(yardstick.excess(scene.loss, scene.grad_norm), yardstick.limit)
    states = sorted((s for s in earlier if s.step < scene.step), key=lambda s: -s.step)
    with preserve_state(job) as saved:
        ctx = TrialContext(job, scene, states, saved, began + budget_s, yardstick, evidence, alike_from)
        _run(ctx, "repeat", repeat, passes=0)
        _run(ctx, "other batches", try_other_batches)
        evidence.lr_jump = max(lr_jumps(ctx).values(), default=1.0)
        if evidence.observed > QUIET and not evidence.transient and evidence.repeat is not None:
            run_abnormal_experiments(ctx)
        evidence.left_out = bool(ctx.skipped)
    verdict, confidence, reason = decide(evidence)
    convicted = ctx.convictable if evidence.convicted or evidence.normal(evidence.without) else []
    accused = describe_accused(ctx.accused, convicted, ctx.total_loss, ctx.shares, decode)
    return Trial(
        verdict=verdict, confidence=round(min(1.0, confidence), 3),
        reason="; ".join(dict.fromkeys([reason, *ctx.remarks])), state_healthy=evidence.state_healthy,
        accused=accused, experiments=ctx.experiments, layers=ctx.layers, changes=list_changes(job, scene, events),
        spread=ctx.spread, began_at=ctx.began_at, cut_short=ctx.skipped,
        seconds=job.world.agree(round(time.monotonic() - began, 3)),  # the budget of trials counts it
    )  # fmt: skip


def gathered_in_half(engine: Engine) -> bool:
    """Whether no pass can use fp32 weights: FSDP gathers them in half precision."""
    return engine.world.divided and engine.device.type == "cuda" and engine.plan.precision in HALF


def run_abnormal_experiments(ctx: TrialContext) -> None:
    """When the repeated step is abnormal too. Each result decides which experiments are left."""
    e = ctx.evidence
    if gathered_in_half(ctx.engine):
        ctx.skipped.append("fp32: sharded layers are gathered in bf16")
    elif ctx.engine.plan.precision != "fp32":
        _run(ctx, "fp32", try_fp32)
    _run(ctx, "layers", inspect_layers, passes=3)
    if e.numerical:
        return
    if not e.damaged:
        _run(ctx, "documents", try_documents)
        if ctx.earlier:
            _run(ctx, "earlier weights", try_earlier_weights, passes=3)
    guilty = e.abnormal(e.earlier) and e.normal(e.without)
    if not guilty and ctx.earlier:
        _run(ctx, "replay", replays, passes=3)
    elif not guilty:
        ctx.skipped.append("replay: no earlier state")


def _run(ctx: TrialContext, name: str, experiment: Callable[[TrialContext], None], passes: int = 1) -> None:
    if not ctx.has_time(passes) and passes:
        ctx.skipped.append(name)
        return
    try:
        experiment(ctx)
    except RankPassError:
        raise
    except Exception as error:  # a trial must not end the run that it examines
        ctx.skipped.append(f"{name}: {type(error).__name__}: {error}")
        restore_state(ctx.engine, ctx.saved)


REPLAY_COST = 1.3  # of a replayed step, in passes
MOST_VETOES = 3  # in a replay: more are not one bad step
SUSPICIOUS = 0.5  # share of the limit: the step that did the damage was accepted
LOWER_LR = 0.1  # factor


def usual_lr(ctx: TrialContext) -> Callable[[Record], float]:
    """The learning rate that a step should have had: the schedule's, unless that itself jumps; never above the recorded
    one."""
    recorded = [float(record["lr"]) for record in ctx.scene.history if record.get("lr")]
    middle = statistics.median(recorded) if recorded else ctx.scene.lr

    def rate(record: Record) -> float:
        planned = ctx.job.lr(int(record["step"]))
        return min(float(record["lr"]), middle if planned > LR_JUMP * middle else planned)

    return rate


def lr_jumps(ctx: TrialContext) -> dict[int, float]:
    """Steps whose recorded learning rate was above the usual one, with the factor."""
    rate = usual_lr(ctx)
    factors = {
        int(record["step"]): float(record["lr"]) / rate(record)
        for record in ctx.scene.history
        if record.get("lr") and not record.get("veto")
    }
    return {step: factor for step, factor in factors.items() if factor > 1.05}


def replays(ctx: TrialContext) -> None:
    """Replay to the judged step. If the weights differ, they were corrupted. If not, replays with one change show what
    would have avoided the damage."""
    state = _replay_start(ctx)
    if state is None:
        return
    try:
        state.load()
        path = replay_to(ctx.job, ctx.scene.step, ctx.scene.history, state.step)
        differences = tensor_differences(ctx.saved, ctx.engine.state(), ctx.engine.world)
        question = f"Does a replay from step {state.step} lead to the judged weights?"
        detail = _describe_differences(differences) if differences else "bit for bit the judged weights"
        ctx.evidence.replay = ctx.record("replay", question, measure(ctx.engine, ctx.scene.batches), detail)
        ctx.evidence.corrupt = _measure_corruption(ctx, state, path, differences) if differences else 0.0
        if ctx.evidence.corrupt is None or ctx.evidence.corrupt > CORRUPT or not ctx.evidence.damaged:
            return
        _planned_lr(ctx, state)
        if not ctx.evidence.normal(ctx.evidence.planned_lr):
            _without_outliers(ctx, state)
        if not ctx.evidence.normal(ctx.evidence.planned_lr) and not ctx.evidence.normal(ctx.evidence.vetoed):
            _lower_lr(ctx, state, path)
    finally:
        restore_state(ctx.engine, ctx.saved)


def _replay_start(ctx: TrialContext) -> EarlierState | None:
    """The newest healthy earlier state that the time left allows to replay from."""
    for state in ctx.earlier:
        if not ctx.has_time(REPLAY_COST * (ctx.scene.step - state.step) + 3):
            ctx.skipped.append(f"replay from step {state.step}")
            return None
        state.load()
        usual = [measure(ctx.engine, batches) for batches in ctx.references[:1]]
        restore_state(ctx.engine, ctx.saved)
        if not usual or ctx.yardstick.excess_of(usual[0]) <= max(ctx.yardstick.limit, 0.5):
            return state
    ctx.skipped.append("replay: no healthy earlier state")
    return None


def _measure_corruption(
    ctx: TrialContext, state: EarlierState, path: Sequence[ReplayedStep], differences: dict[str, Difference]
) -> float | None:
    """How far the weights differ from replayed ones, in units of the spread between two replays. If the run rounded
    differently, the spread is unknown: then weights that are damaged where replayed ones are not count as corrupted."""
    if state.step < ctx.alike_from:
        corrupt = ctx.evidence.damaged and ctx.evidence.normal(ctx.evidence.replay)
        if corrupt:
            ctx.began_at = ctx.scene.step - 1
        return math.inf if corrupt else 0.0
    if not ctx.has_time(REPLAY_COST * len(path)):
        ctx.skipped.append("second replay")
        return None
    first = {name: tensor.detach().to("cpu", copy=True) for name, tensor in local_state(ctx.engine).items()}
    state.load()
    second = replay_to(ctx.job, ctx.scene.step, ctx.scene.history, state.step)
    ratios = excess_over_spread(differences, tensor_differences(first, ctx.engine.state(), ctx.engine.world))
    worst = max(ratios.values())
    if worst > CORRUPT:
        guilty = {name: gap for name, gap in differences.items() if ratios[name] > CORRUPT}
        ctx.remarks.append(_describe_differences(guilty))
        divergent = first_divergent_step(ctx.scene.history, path, second)
        ctx.began_at = ctx.scene.step - 1 if divergent is None else divergent
    return worst


def _describe_differences(differences: dict[str, Difference]) -> str:
    words = [
        f"{name.partition('.')[2]} ({gap.elements} of {gap.of} elements, largest change {gap.largest:.3g})"
        for name, gap in list(differences.items())[:3]
    ]
    more = f" and {len(differences) - 3} other tensors" if len(differences) > 3 else ""
    return "differ: " + ", ".join(words) + more


def _changed_replay(
    ctx: TrialContext,
    state: EarlierState,
    name: str,
    question: str,
    lr: Callable[[Record], float] | None = None,
    veto: Callable[[int, float, float], bool] | None = None,
) -> float | None:
    """A replay with one change, and the excess of the judged batch after it."""
    if not ctx.has_time(REPLAY_COST * (ctx.scene.step - state.step) + 1):
        ctx.skipped.append(name)
        return None
    state.load()
    replay_to(ctx.job, ctx.scene.step, ctx.scene.history, state.step, lr, veto)
    return ctx.record(name, question, measure(ctx.engine, ctx.scene.batches), f"from step {state.step}")


def _planned_lr(ctx: TrialContext, state: EarlierState) -> None:
    jumps = {step: factor for step, factor in lr_jumps(ctx).items() if step >= state.step}
    if not jumps:
        return
    question = "Is the step normal after a replay with the usual learning rates?"
    ctx.evidence.planned_lr = _changed_replay(ctx, state, "planned lr", question, lr=usual_lr(ctx))
    if ctx.evidence.normal(ctx.evidence.planned_lr):
        ctx.began_at = min(jumps)
        ctx.remarks.append(f"that of step {ctx.began_at} was {jumps[ctx.began_at]:.3g} times the usual")


def _without_outliers(ctx: TrialContext, state: EarlierState) -> None:
    """A replay that vetoes outliers which the run accepted; the documents of the first one are examined."""
    vetoed: list[int] = []

    def veto(step: int, loss: float, norm: float) -> bool:
        if ctx.yardstick.excess(loss, norm) <= SUSPICIOUS * ctx.yardstick.limit:
            return False
        vetoed.append(step)
        if len(vetoed) == 1 and ctx.has_time(8):
            batches = global_batches(ctx.engine, ctx.stream, step)
            measured = measure(ctx.engine, batches)
            usual = [(batch, measure(ctx.engine, batch)) for batch in ctx.references[:2]]
            parts = [part for batch, result in usual for part in document_parts(ctx.stream, batch, result.nll)]
            ctx.accused, excess = accuse_documents(ctx, batches, measured, parts, f"step {step}")
            ctx.evidence.convicted = ctx.evidence.normal(excess)
        return True

    question = "Is the step normal after a replay that leaves out the outliers on the way?"
    excess = _changed_replay(ctx, state, "without the outliers", question, veto=veto)
    # Vetoes up to the last step only freeze the weights: that stops a slow divergence, but does not explain it.
    resumed = bool(vetoed) and (ctx.evidence.convicted or vetoed[-1] < ctx.scene.step - 1)
    if resumed and len(vetoed) <= MOST_VETOES:
        ctx.evidence.vetoed = excess
    if ctx.evidence.normal(ctx.evidence.vetoed):
        ctx.began_at = vetoed[0]
    else:
        ctx.accused, ctx.evidence.convicted = [], False


def _lower_lr(ctx: TrialContext, state: EarlierState, path: Sequence[ReplayedStep]) -> None:
    question = f"Is the step normal after a replay with {LOWER_LR} of the learning rates?"
    ctx.evidence.lower_lr = _changed_replay(
        ctx, state, "lower lr", question, lambda record: LOWER_LR * float(record["lr"])
    )
    if ctx.evidence.normal(ctx.evidence.lower_lr):
        bad = [step.step for step in path if ctx.yardstick.excess(step.loss, step.grad_norm) > ctx.yardstick.limit]
        ctx.began_at = max(state.step, min(bad, default=ctx.scene.step) - 1)
