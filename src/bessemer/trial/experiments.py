"""The experiments of a trial: the same step under one other circumstance each. `court.py` calls them in order."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.run.journal import number
from bessemer.train.engine import Engine
from bessemer.train.job import Job
from bessemer.trial.attribute import DocumentPart, gradient_shares, heaviest, parts_of, pattern, stand_out, weigh
from bessemer.trial.case import EarlierState, Evidence, Experiment, LayerEvidence, StepScene
from bessemer.trial.examine import examine_parts, whole_document
from bessemer.trial.measure import (
    Measurement,
    Yardstick,
    compare_layers,
    damaged_weights,
    global_batches,
    mean_of,
    measure,
    restore_state,
    sample_layers,
)

REPEATS = 3
FLOOR = 1e-5  # relative: repeats are taken to differ by at least this much
OTHERS = 3


@dataclass
class TrialContext:
    """One trial in progress."""

    job: Job
    scene: StepScene
    earlier: list[EarlierState]  # newest first
    saved: dict[str, Tensor]  # weights and moments of the judged step
    deadline: float
    yard: Yardstick
    evidence: Evidence
    alike_from: int = 0  # steps from here on were computed as they are here: on as many processes, the same device
    experiments: list[Experiment] = field(default_factory=list)
    layers: list[LayerEvidence] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    pass_s: float = 0.0
    spread: float | None = None
    at_scene: Measurement | None = None
    references: list[list[Batch]] = field(default_factory=list)  # of accepted steps before
    normal_parts: list[DocumentPart] = field(default_factory=list)  # their documents, on the judged weights
    accused: list[DocumentPart] = field(default_factory=list)
    proven: list[DocumentPart] = field(default_factory=list)  # of these, those that can be convicted
    shares: dict[int, float] = field(default_factory=dict)
    total_loss: float = math.nan
    began_at: int | None = None

    @property
    def engine(self) -> Engine:
        return self.job.engine

    @property
    def stream(self) -> BatchStream | IterableStream:
        return self.job.data.stream

    def room(self, passes: float = 1.0) -> bool:
        """Whether so many passes over a step still fit into the time budget, by the clock of the first process."""
        return self.job.world.agree(time.monotonic() + passes * self.pass_s <= self.deadline)

    def note(
        self, name: str, question: str, measured: Measurement, detail: str = "", yard: Yardstick | None = None
    ) -> float:
        """Write an experiment down; its excess."""
        excess = (yard or self.yard).of_measured(measured)
        normal = excess <= self.yard.limit
        self.experiments.append(Experiment(name, question, measured.loss, measured.grad_norm, normal, detail))
        return excess


def repeat(h: TrialContext) -> None:
    """The same batch on the same weights: does the result come back?"""
    results, began = [], time.monotonic()
    for k in range(REPEATS):
        if k and not h.room():
            break
        results.append(measure(h.engine, h.scene.batches))
        h.pass_s = (time.monotonic() - began) / len(results)
    h.at_scene = results[0]
    typical = mean_of(results)
    gap, spread = 0.0, 0.0
    for key in ("loss", "grad_norm"):
        values = [getattr(result, key) for result in results]
        centre, observed = getattr(typical, key), getattr(h.scene, key)
        if math.isfinite(centre) and centre > 0:
            differ = (max(values) - min(values)) / centre
            spread = max(spread, differ)
            floor = FLOOR if key == "loss" else 10 * FLOOR
            away = abs(observed - centre) / centre / max(differ, floor)
            gap = max(gap, away if math.isfinite(away) else math.inf)
        elif math.isfinite(observed):
            gap = math.inf
    h.spread, h.evidence.gap = spread, gap
    seen = f"loss {h.scene.loss:.6g}, gradient norm {h.scene.grad_norm:.6g}"
    detail = f"{len(results)} times, spread {spread:.1e}; the step had {seen}"
    question = "Does the same batch on the same weights give the same result?"
    h.evidence.repeat = h.note("repeat", question, typical, detail)


def other_batches(h: TrialContext) -> None:
    """The same weights on accepted batches before and on those to come: is it the weights?"""
    accepted = [record for record in h.scene.history if not record.get("veto")]
    usual = [record for record in accepted if _excess_then(h, record) <= h.yard.limit] or accepted
    # Some steps apart: what did damage may be among the last, and the weights are at their best on what they saw last.
    steps = [int(record["step"]) for record in (usual[-4::-5] or usual)[:OTHERS]]
    if not steps:  # a run that was just resumed has no records at hand
        steps = list(range(h.scene.step - 4, -1, -5))[:OTHERS]
    before, after = [], []
    for step in steps:
        if h.room():
            batches = global_batches(h.engine, h.stream, step)
            before.append(measure(h.engine, batches))
            h.references.append(batches)
            h.normal_parts += parts_of(h.stream, batches, before[-1].nll)
    for step in (h.scene.step + 1, h.scene.step + 2):
        if h.room():
            after.append(measure(h.engine, global_batches(h.engine, h.stream, step)))
    if before:
        question = "Are the same weights normal on batches of accepted steps before?"
        h.note("other batches", question, mean_of(before), f"{len(before)} steps")
        h.evidence.before = statistics.median(map(h.yard.of_measured, before))
    if after:
        question = "Are the same weights normal on the batches to come?"
        h.note("other batches", question, mean_of(after), f"{len(after)} steps")
        h.evidence.after = statistics.median(map(h.yard.of_measured, after))


def _excess_then(h: TrialContext, record: dict[str, object]) -> float:
    loss, norm = number(record.get("loss")), number(record.get("grad_norm"))
    return math.inf if loss is None or norm is None else h.yard.excess(loss, norm)


def in_fp32(h: TrialContext) -> None:
    measured = measure(h.engine, h.scene.batches, precision="fp32")
    h.evidence.fp32 = h.note("fp32", "Is the step normal in fp32?", measured)


def look_inside(h: TrialContext) -> None:
    """Where the trouble starts: against a normal batch, or against earlier weights where these are damaged."""
    h.layers += damaged_weights(h.engine)
    bad = sample_layers(h.engine, h.scene.batches)
    if h.evidence.damaged and h.earlier:
        h.earlier[0].load()
        normal = sample_layers(h.engine, h.scene.batches)
        restore_state(h.engine, h.saved)
    elif h.references:
        normal = sample_layers(h.engine, h.references[0])
    else:
        return
    h.layers += compare_layers(bad, normal)


def documents(h: TrialContext) -> None:
    """Shares of loss and gradient, and the batch without the documents that stand out."""
    assert h.at_scene is not None, "the step is repeated first"
    found = accuse_documents(h, h.scene.batches, h.at_scene, h.normal_parts, "the step")
    h.accused, h.evidence.without = found


def accuse_documents(
    h: TrialContext, batches: Sequence[Batch], measured: Measurement, normal_parts: Sequence[DocumentPart], which: str
) -> tuple[list[DocumentPart], float | None]:
    """The documents of some batches that stand out, and how abnormal the batches are without those that can be
    convicted: which are unlike their source as a whole, or have more of the gradient than others."""
    parts = parts_of(h.stream, batches, measured.nll)
    h.total_loss = sum(part.loss for part in parts)
    accused = stand_out(parts, normal_parts, h.yard.low)
    heavy: list[DocumentPart] = []
    excess = _without(h, batches, accused, f"Is {which} normal without those whose loss stands out?")
    if h.evidence.normal(excess):
        if h.room(2):
            h.shares = gradient_shares(h.engine, batches, [[part] for part in accused[:8]], h.room)
        return _proven(h, batches, accused, heavy, excess, which)
    if not h.room(4):
        h.left_out.append("gradient shares")
        return accused, excess
    # Those of a repeated pattern first, then by their loss: neighbours in a halving should be alike.
    rest = [part for part in parts if part not in accused]
    rest.sort(key=lambda part: (not pattern(part.ids), -part.mean_loss))
    h.shares = gradient_shares(h.engine, batches, [accused, rest], h.room)
    growth = measured.grad_norm / h.yard.normal.grad_norm
    if heavy := heaviest(rest, h.shares, growth, sum(part.tokens for part in parts)):
        accused = [*accused, *heavy]
        excess = _without(h, batches, accused, f"Is {which} normal without those whose gradient stands out?")
    return _proven(h, batches, accused, heavy, excess, which)


def _proven(
    h: TrialContext,
    batches: Sequence[Batch],
    accused: list[DocumentPart],
    heavy: Sequence[DocumentPart],
    excess: float | None,
    which: str,
) -> tuple[list[DocumentPart], float | None]:
    """The accused, and how abnormal the batches are without those of them that can be convicted."""
    h.proven = []
    if not h.evidence.normal(excess):
        return accused, excess
    found = list(zip(accused, examine_parts(h.engine, h.stream, accused, h.scene.step), strict=True))
    h.experiments += [whole_document(part, away) for part, away in found[:8] if away]
    h.proven = [part for part, away in found if part.nonfinite or part in heavy or away is None or away.far]
    if len(h.proven) == len(accused):
        return accused, excess
    question = f"Is {which} normal without those that are unlike their source as a whole?"
    return accused, _without(h, batches, h.proven, question)


def _without(h: TrialContext, batches: Sequence[Batch], accused: Sequence[DocumentPart], question: str) -> float | None:
    rest = weigh(batches, accused, only=False) if accused else []
    if not rest or not h.room():
        return None
    detail = f"{len(accused)} documents left out"
    if words := next(filter(None, (pattern(part.ids) for part in accused)), ""):
        detail += f"; {words}"
        h.remarks.append(words)
    return h.note("without the accused", question, measure(h.engine, rest), detail)


def earlier_weights(h: TrialContext) -> None:
    """The experiment of PaLM: the same batch on other weights. States that find other batches abnormal, as the first
    steps of a run do, say nothing; of the others the one that takes the batch best counts."""
    found: list[float] = []
    for state in h.earlier[:2]:
        if not h.room(3):
            h.left_out.append(f"earlier weights of step {state.step}")
            break
        state.load()
        usual = [measure(h.engine, batches) for batches in h.references[:2]]
        yard = h.yard.centred_on(mean_of(usual)) if usual else h.yard
        if usual and h.yard.of_measured(mean_of(usual)) > max(h.yard.limit, 0.5):
            continue
        question = f"Is the batch normal on the weights of step {state.step}?"
        detail = f"{state.origin}; other batches there: loss {yard.normal.loss:.4g}"
        found.append(h.note("earlier weights", question, measure(h.engine, h.scene.batches), detail, yard))
    restore_state(h.engine, h.saved)
    if found:
        h.evidence.earlier = min(found)
