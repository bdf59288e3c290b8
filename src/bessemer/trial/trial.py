"""The trial of a suspicious step, within a time budget: experiments in the order of what they tell for their cost.

Whatever happens in here, the job goes on as if nothing had: its state is put back, and an experiment that fails is
named in the report instead of ending the run. Several processes hold a trial together: each works out its share of
every pass, all of them know its numbers, and whether there is time for another is the first one's word.

The last experiments of a trial: the steps from an earlier state to the judged one again, as recorded and changed.
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
from bessemer.trial.attribute import accuse, parts_of, what_changed
from bessemer.trial.case import CORRUPT, LR_JUMP, EarlierState, Evidence, StepScene, Trial, decide
from bessemer.trial.experiments import (
    TrialContext,
    accuse_documents,
    documents,
    earlier_weights,
    in_fp32,
    look_inside,
    other_batches,
    repeat,
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
from bessemer.trial.replay import Difference, Record, ReplayedStep, beyond_spread, differences, first_unlike, replay_to

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
    """Find out why the step was abnormal. The job's weights are those that it was judged with, now and afterwards.

    Takes about `budget_s`: the first repeat is always made, and a step that has begun is finished. `decode` turns
    token ids into text for the excerpts. Steps before `alike_from` were computed by other processes or devices, whose
    sums are rounded otherwise.
    """
    if isinstance(job.data.stream, IterableStream):
        raise UserError(f"a trial reads steps again, and the data is {NOT_REPLAYABLE}")
    began = time.monotonic()
    yard = Yardstick.of(scene)
    evidence = Evidence(yard.excess(scene.loss, scene.grad_norm), yard.limit)
    states = sorted((s for s in earlier if s.step < scene.step), key=lambda s: -s.step)
    with preserve_state(job) as saved:
        context = TrialContext(job, scene, states, saved, began + budget_s, yard, evidence, alike_from)
        _attempt(context, "repeat", repeat, passes=0)
        _attempt(context, "other batches", other_batches)
        evidence.lr_jump = max(rate_jumps(context).values(), default=1.0)
        if evidence.observed > QUIET and not evidence.transient and evidence.repeat is not None:
            _question(context)
        evidence.left_out = bool(context.left_out)
    verdict, confidence, reason = decide(evidence)
    convicted = context.proven if evidence.convicted or evidence.normal(evidence.without) else []
    accused = accuse(context.accused, convicted, context.total_loss, context.shares, decode)
    return Trial(
        verdict=verdict,
        confidence=round(min(1.0, confidence), 3),
        reason="; ".join(dict.fromkeys([reason, *context.remarks])),
        state_healthy=evidence.state_healthy,
        accused=accused,
        experiments=context.experiments,
        layers=context.layers,
        changes=what_changed(job, scene, events),
        spread=context.spread,
        began_at=context.began_at,
        seconds=job.world.agree(round(time.monotonic() - began, 3)),  # what trials may take counts by it
        cut_short=context.left_out,
    )


def gathered_in_half(engine: Engine) -> bool:
    """Whether no pass can have weights in fp32, though they are kept so: FSDP rounds them on their way."""
    return engine.world.divided and engine.device.type == "cuda" and engine.plan.precision in HALF


def _question(h: TrialContext) -> None:
    """What is asked when the step is abnormal again. Each answer decides which questions are left."""
    e = h.evidence
    if gathered_in_half(h.engine):
        h.left_out.append("fp32: divided layers are gathered in bf16")
    elif h.engine.plan.precision != "fp32":
        _attempt(h, "fp32", in_fp32)
    _attempt(h, "layers", look_inside, passes=3)
    if e.numerical:
        return
    if not e.damaged:
        _attempt(h, "documents", documents)
        if h.earlier:
            _attempt(h, "earlier weights", earlier_weights, passes=3)
    guilty = e.abnormal(e.earlier) and e.normal(e.without)
    if not guilty and h.earlier:
        _attempt(h, "replay", replays, passes=3)
    elif not guilty:
        h.left_out.append("replay: no earlier state")


def _attempt(h: TrialContext, name: str, experiment: Callable[[TrialContext], None], passes: int = 1) -> None:
    if not h.room(passes) and passes:
        h.left_out.append(name)
        return
    try:
        experiment(h)
    except RankPassError:
        raise
    except Exception as error:  # a trial must not take down the run that it is about
        h.left_out.append(f"{name}: {type(error).__name__}: {error}")
        restore_state(h.engine, h.saved)


COST = 1.3  # of a replayed step, in passes
MOST_VETOES = 3  # on the way: more are no single bad step
SUSPICIOUS = 0.5  # of the line: what did damage had been accepted
LOWER = 0.1


def usual_rate(h: TrialContext) -> Callable[[Record], float]:
    """The learning rate that a step should have had: the schedule's, unless that itself jumps; never a higher one."""
    known = [float(record["lr"]) for record in h.scene.history if record.get("lr")]
    middle = statistics.median(known) if known else h.scene.lr

    def rate(record: Record) -> float:
        planned = h.job.lr(int(record["step"]))
        return min(float(record["lr"]), middle if planned > LR_JUMP * middle else planned)

    return rate


def rate_jumps(h: TrialContext) -> dict[int, float]:
    """Updates whose recorded learning rate was above the usual one, and how many times."""
    rate = usual_rate(h)
    found = {
        int(record["step"]): float(record["lr"]) / rate(record)
        for record in h.scene.history
        if record.get("lr") and not record.get("veto")
    }
    return {step: factor for step, factor in found.items() if factor > 1.05}


def replays(h: TrialContext) -> None:
    """Replay to the judged step. Other weights: corrupted. The same: which change would have avoided the damage?"""
    state = _starting_point(h)
    if state is None:
        return
    try:
        state.load()
        path = replay_to(h.job, h.scene.step, h.scene.history, state.step)
        found = differences(h.saved, h.engine.state(), h.engine.world)
        question = f"Does a replay from step {state.step} lead to the judged weights?"
        detail = _told(found) if found else "bit for bit the judged weights"
        h.evidence.replay = h.note("replay", question, measure(h.engine, h.scene.batches), detail)
        h.evidence.corrupt = _corruption(h, state, path, found) if found else 0.0
        # What could have avoided damage is a question only where there is some.
        if h.evidence.corrupt is None or h.evidence.corrupt > CORRUPT or not h.evidence.damaged:
            return
        _planned_lr(h, state)
        if not h.evidence.normal(h.evidence.planned_lr):
            _without_outliers(h, state)
        if not h.evidence.normal(h.evidence.planned_lr) and not h.evidence.normal(h.evidence.vetoed):
            _lower_lr(h, state, path)
    finally:
        restore_state(h.engine, h.saved)


def _starting_point(h: TrialContext) -> EarlierState | None:
    """The newest earlier state that is healthy itself and near enough for the time left."""
    for state in h.earlier:
        if not h.room(COST * (h.scene.step - state.step) + 3):
            h.left_out.append(f"replay from step {state.step}")
            return None
        state.load()
        usual = [measure(h.engine, batches) for batches in h.references[:1]]
        restore_state(h.engine, h.saved)
        if not usual or h.yard.of_measured(usual[0]) <= max(h.yard.limit, 0.5):
            return state
    h.left_out.append("replay: no healthy earlier state")
    return None


def _corruption(
    h: TrialContext, state: EarlierState, path: Sequence[ReplayedStep], found: dict[str, Difference]
) -> float | None:
    """How far beyond the device's spread the weights differ; the spread is that of a second replay. Where the run was
    rounded otherwise no spread is known: then weights are another's that are damaged where replayed ones are not."""
    if state.step < h.alike_from:
        corrupt = h.evidence.damaged and h.evidence.normal(h.evidence.replay)
        if corrupt:
            h.began_at = h.scene.step - 1
        return math.inf if corrupt else 0.0
    if not h.room(COST * len(path)):
        h.left_out.append("second replay")
        return None
    first = {name: tensor.detach().to("cpu", copy=True) for name, tensor in local_state(h.engine).items()}
    state.load()
    again = replay_to(h.job, h.scene.step, h.scene.history, state.step)
    ratios = beyond_spread(found, differences(first, h.engine.state(), h.engine.world))
    worst = max(ratios.values())
    if worst > CORRUPT:
        guilty = {name: gap for name, gap in found.items() if ratios[name] > CORRUPT}
        h.remarks.append(_told(guilty))
        unlike = first_unlike(h.scene.history, path, again)
        h.began_at = h.scene.step - 1 if unlike is None else unlike
    return worst


def _told(found: dict[str, Difference]) -> str:
    words = [
        f"{name.partition('.')[2]} ({gap.elements} of {gap.of} elements, largest change {gap.largest:.3g})"
        for name, gap in list(found.items())[:3]
    ]
    more = f" and {len(found) - 3} other tensors" if len(found) > 3 else ""
    return "differ: " + ", ".join(words) + more


def _again(
    h: TrialContext,
    state: EarlierState,
    name: str,
    question: str,
    lr: Callable[[Record], float] | None = None,
    veto: Callable[[int, float, float], bool] | None = None,
) -> float | None:
    """A changed replay, and the judged batch at its end."""
    if not h.room(COST * (h.scene.step - state.step) + 1):
        h.left_out.append(name)
        return None
    state.load()
    replay_to(h.job, h.scene.step, h.scene.history, state.step, lr, veto)
    return h.note(name, question, measure(h.engine, h.scene.batches), f"from step {state.step}")


def _planned_lr(h: TrialContext, state: EarlierState) -> None:
    jumps = {step: factor for step, factor in rate_jumps(h).items() if step >= state.step}
    if not jumps:
        return
    question = "Is the step normal after a replay with the usual learning rates?"
    h.evidence.planned_lr = _again(h, state, "planned lr", question, lr=usual_rate(h))
    if h.evidence.normal(h.evidence.planned_lr):
        h.began_at = min(jumps)
        h.remarks.append(f"that of step {h.began_at} was {jumps[h.began_at]:.3g} times the usual")


def _without_outliers(h: TrialContext, state: EarlierState) -> None:
    """A replay with a guard that vetoes what the run accepted; the documents of the first such step are tried."""
    vetoed: list[int] = []

    def veto(step: int, loss: float, norm: float) -> bool:
        if h.yard.excess(loss, norm) <= SUSPICIOUS * h.yard.limit:
            return False
        vetoed.append(step)
        if len(vetoed) == 1 and h.room(8):
            batches = global_batches(h.engine, h.stream, step)
            measured = measure(h.engine, batches)
            usual = [(other, measure(h.engine, other)) for other in h.references[:2]]
            parts = [part for other, one in usual for part in parts_of(h.stream, other, one.nll)]
            h.accused, excess = accuse_documents(h, batches, measured, parts, f"step {step}")
            h.evidence.convicted = h.evidence.normal(excess)
        return True

    question = "Is the step normal after a replay that leaves out the outliers on the way?"
    excess = _again(h, state, "without the outliers", question, veto=veto)
    # Vetoes to the very end only freeze the weights: that a slow divergence was stopped says nothing of its cause.
    went_on = bool(vetoed) and (h.evidence.convicted or vetoed[-1] < h.scene.step - 1)
    if went_on and len(vetoed) <= MOST_VETOES:
        h.evidence.vetoed = excess
    if h.evidence.normal(h.evidence.vetoed):
        h.began_at = vetoed[0]
    else:
        h.accused, h.evidence.convicted = [], False


def _lower_lr(h: TrialContext, state: EarlierState, path: Sequence[ReplayedStep]) -> None:
    question = f"Is the step normal after a replay with {LOWER} of the learning rates?"
    h.evidence.lower_lr = _again(h, state, "lower lr", question, lambda record: LOWER * float(record["lr"]))
    if h.evidence.normal(h.evidence.lower_lr):
        bad = [step.step for step in path if h.yard.excess(step.loss, step.grad_norm) > h.yard.limit]
        h.began_at = max(state.step, min(bad, default=h.scene.step) - 1)
