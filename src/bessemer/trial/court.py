"""The trial of a suspicious step, within a time budget: experiments in the order of what they tell for their cost.

Whatever happens in here, the job goes on as if nothing had: its state is put back, and an experiment that fails is
named in the report instead of ending the run. Several processes hold a trial together: each works out its share of
every pass, all of them know its numbers, and whether there is time for another is the first one's word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bessemer.data.own_stream import NOT_REPLAYABLE, ForwardStream
from bessemer.errors import UserError
from bessemer.plan.decide import HALF
from bessemer.train.job import Job
from bessemer.trial.attribute import accuse
from bessemer.trial.case import Earlier, Scene, Trial
from bessemer.trial.changes import what_changed
from bessemer.trial.experiments import Hearing, documents, earlier_weights, in_fp32, look_inside, other_batches, repeat
from bessemer.trial.measure import QUIET, Apart, Yardstick, kept_aside, put_back
from bessemer.trial.retrial import rate_jumps, replays
from bessemer.trial.verdict import Evidence, decide

Decode = Callable[[list[int]], str]


def hold_trial(
    job: Job,
    scene: Scene,
    earlier: Sequence[Earlier],
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
    if isinstance(job.stream, ForwardStream):
        raise UserError(f"a trial reads steps again, and the data is {NOT_REPLAYABLE}")
    began = time.monotonic()
    yard = Yardstick.of(scene)
    evidence = Evidence(yard.excess(scene.loss, scene.grad_norm), yard.limit)
    states = sorted((s for s in earlier if s.step < scene.step), key=lambda s: -s.step)
    with kept_aside(job) as kept:
        hearing = Hearing(job, scene, states, kept, began + budget_s, yard, evidence, alike_from)
        _attempt(hearing, "repeat", repeat, passes=0)
        _attempt(hearing, "other batches", other_batches)
        evidence.lr_jump = max(rate_jumps(hearing).values(), default=1.0)
        if evidence.observed > QUIET and not evidence.transient and evidence.repeat is not None:
            _question(hearing)
        evidence.left_out = bool(hearing.left_out)
    verdict, confidence, reason = decide(evidence)
    convicted = hearing.proven if evidence.convicted or evidence.normal(evidence.without) else []
    accused = accuse(hearing.accused, convicted, hearing.total_loss, hearing.shares, decode)
    return Trial(
        verdict=verdict,
        confidence=round(min(1.0, confidence), 3),
        reason="; ".join(dict.fromkeys([reason, *hearing.remarks])),
        state_healthy=evidence.state_healthy,
        accused=accused,
        experiments=hearing.experiments,
        layers=hearing.layers,
        changes=what_changed(job, scene, events),
        spread=hearing.spread,
        began_at=hearing.began_at,
        seconds=job.world.agree(round(time.monotonic() - began, 3)),  # what trials may take counts by it
        cut_short=hearing.left_out,
    )


def gathered_in_half(job: Job) -> bool:
    """Whether no pass can have weights in fp32, though they are kept so: FSDP rounds them on their way."""
    divided = job.world.divided
    return divided and job.device.type == "cuda" and job.plan.precision in HALF


def _question(h: Hearing) -> None:
    """What is asked when the step is abnormal again. Each answer decides which questions are left."""
    e = h.evidence
    if gathered_in_half(h.job):
        h.left_out.append("fp32: divided layers are gathered in bf16")
    elif h.job.plan.precision != "fp32":
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


def _attempt(h: Hearing, name: str, experiment: Callable[[Hearing], None], passes: int = 1) -> None:
    if not h.room(passes) and passes:
        h.left_out.append(name)
        return
    try:
        experiment(h)
    except Apart:
        raise
    except Exception as error:  # a trial must not take down the run that it is about
        h.left_out.append(f"{name}: {type(error).__name__}: {error}")
        put_back(h.job, h.kept)
