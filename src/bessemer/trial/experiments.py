"""The experiments of a trial: the same step with one thing changed. `trial.py` runs them in order."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.run.journal import to_number
from bessemer.train.engine import Engine
from bessemer.train.job import Job
from bessemer.trial.attribute import (
    DocumentPart,
    describe_repetition,
    document_parts,
    find_heavy_gradients,
    find_loss_outliers,
    gradient_shares,
    reweight,
)
from bessemer.trial.case import EarlierState, Evidence, Experiment, LayerEvidence, StepScene
from bessemer.trial.examine import document_experiment, examine_parts
from bessemer.trial.measure import (
    Measurement,
    Yardstick,
    compare_layers,
    damaged_weights,
    global_batches,
    mean_measurement,
    measure,
    restore_state,
    sample_layers,
)

REPEATS = 3
FLOOR = 1e-5  # relative: repeats are taken to differ by at least this much
OTHER_BATCHES = 3


@dataclass
class TrialContext:
    """A trial in progress."""

    job: Job
    scene: StepScene
    earlier: list[EarlierState]  # newest first
    saved: dict[str, Tensor]  # weights and moments of the judged step
    deadline: float
    yardstick: Yardstick
    evidence: Evidence
    alike_from: int = 0  # steps since this one ran on the same ranks and device
    experiments: list[Experiment] = field(default_factory=list)
    layers: list[LayerEvidence] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    pass_s: float = 0.0
    spread: float | None = None
    at_scene: Measurement | None = None
    references: list[list[Batch]] = field(default_factory=list)  # batches of earlier accepted steps
    normal_parts: list[DocumentPart] = field(default_factory=list)  # their documents, at the judged weights
    accused: list[DocumentPart] = field(default_factory=list)
    convictable: list[DocumentPart] = field(default_factory=list)  # accused documents with enough evidence
    shares: dict[int, float] = field(default_factory=dict)
    total_loss: float = math.nan
    began_at: int | None = None

    @property
    def engine(self) -> Engine:
        return self.job.engine

    @property
    def stream(self) -> BatchStream | IterableStream:
        return self.job.data.stream

    def has_time(self, passes: float = 1.0) -> bool:
        """Whether the time budget allows this many passes over a step, by rank 0's clock."""
        return self.job.world.agree(time.monotonic() + passes * self.pass_s <= self.deadline)

    def record(
        self, name: str, question: str, measured: Measurement, detail: str = "", yardstick: Yardstick | None = None
    ) -> float:
        """Add an experiment to the report; its excess."""
        excess = (yardstick or self.yardstick).excess_of(measured)
        normal = excess <= self.yardstick.limit
        self.experiments.append(Experiment(name, question, measured.loss, measured.grad_norm, normal, detail))
        return excess


def repeat(ctx: TrialContext) -> None:
    """The same batch at the same weights: is the result reproducible?"""
    results, began = [], time.monotonic()
    for k in range(REPEATS):
        if k and not ctx.has_time():
            break
        results.append(measure(ctx.engine, ctx.scene.batches))
        ctx.pass_s = (time.monotonic() - began) / len(results)
    ctx.at_scene = results[0]
    typical = mean_measurement(results)
    gap, spread = 0.0, 0.0
    for key in ("loss", "grad_norm"):
        values = [getattr(result, key) for result in results]
        centre, observed = getattr(typical, key), getattr(ctx.scene, key)
        if math.isfinite(centre) and centre > 0:
            differ = (max(values) - min(values)) / centre
            spread = max(spread, differ)
            floor = FLOOR if key == "loss" else 10 * FLOOR
            deviation = abs(observed - centre) / centre / max(differ, floor)
            gap = max(gap, deviation if math.isfinite(deviation) else math.inf)
        elif math.isfinite(observed):
            gap = math.inf
    ctx.spread, ctx.evidence.gap = spread, gap
    seen = f"loss {ctx.scene.loss:.6g}, gradient norm {ctx.scene.grad_norm:.6g}"
    detail = f"{len(results)} times, spread {spread:.1e}; the step had {seen}"
    question = "Does the same batch on the same weights give the same result?"
    ctx.evidence.repeat = ctx.record("repeat", question, typical, detail)


def try_other_batches(ctx: TrialContext) -> None:
    """Earlier and following batches at the same weights: are the weights damaged?"""
    accepted = [record for record in ctx.scene.history if not record.get("veto")]
    usual = [record for record in accepted if _excess_then(ctx, record) <= ctx.yardstick.limit] or accepted
    # Some steps apart: the last ones may have done the damage, and the weights fit best what they saw last.
    steps = [int(record["step"]) for record in (usual[-4::-5] or usual)[:OTHER_BATCHES]]
    if not steps:  # a resumed run may have no records yet
        steps = list(range(ctx.scene.step - 4, -1, -5))[:OTHER_BATCHES]
    before, after = [], []
    for step in steps:
        if ctx.has_time():
            batches = global_batches(ctx.engine, ctx.stream, step)
            before.append(measure(ctx.engine, batches))
            ctx.references.append(batches)
            ctx.normal_parts += document_parts(ctx.stream, batches, before[-1].nll)
    for step in (ctx.scene.step + 1, ctx.scene.step + 2):
        if ctx.has_time():
            after.append(measure(ctx.engine, global_batches(ctx.engine, ctx.stream, step)))
    if before:
        question = "Are the same weights normal on batches of accepted steps before?"
        ctx.record("other batches", question, mean_measurement(before), f"{len(before)} steps")
        ctx.evidence.before = statistics.median(map(ctx.yardstick.excess_of, before))
    if after:
        question = "Are the same weights normal on the batches to come?"
        ctx.record("other batches", question, mean_measurement(after), f"{len(after)} steps")
        ctx.evidence.after = statistics.median(map(ctx.yardstick.excess_of, after))


def _excess_then(ctx: TrialContext, record: dict[str, object]) -> float:
    loss, norm = to_number(record.get("loss")), to_number(record.get("grad_norm"))
    return math.inf if loss is None or norm is None else ctx.yardstick.excess(loss, norm)


def try_fp32(ctx: TrialContext) -> None:
    measured = measure(ctx.engine, ctx.scene.batches, precision="fp32")
    ctx.evidence.fp32 = ctx.record("fp32", "Is the step normal in fp32?", measured)


def inspect_layers(ctx: TrialContext) -> None:
    """Find the layers where the anomaly starts, against a normal batch, or against earlier weights if these are
    damaged."""
    ctx.layers += damaged_weights(ctx.engine)
    bad = sample_layers(ctx.engine, ctx.scene.batches)
    if ctx.evidence.damaged and ctx.earlier:
        ctx.earlier[0].load()
        normal = sample_layers(ctx.engine, ctx.scene.batches)
        restore_state(ctx.engine, ctx.saved)
    elif ctx.references:
        normal = sample_layers(ctx.engine, ctx.references[0])
    else:
        return
    ctx.layers += compare_layers(bad, normal)


def try_documents(ctx: TrialContext) -> None:
    """Documents that stand out by loss or gradient, and the batch without them."""
    assert ctx.at_scene is not None, "the step is repeated first"
    ctx.accused, ctx.evidence.without = accuse_documents(
        ctx, ctx.scene.batches, ctx.at_scene, ctx.normal_parts, "the step"
    )


def accuse_documents(
    ctx: TrialContext, batches: Sequence[Batch], measured: Measurement, normal_parts: Sequence[DocumentPart], which: str
) -> tuple[list[DocumentPart], float | None]:
    """The documents of some batches that stand out, and the excess of the batches without those that can be convicted:
    documents unlike the rest of their source, or with a disproportionate gradient."""
    parts = document_parts(ctx.stream, batches, measured.nll)
    ctx.total_loss = sum(part.loss for part in parts)
    accused = find_loss_outliers(parts, normal_parts, ctx.yardstick.low)
    heavy: list[DocumentPart] = []
    excess = _without(ctx, batches, accused, f"Is {which} normal without those whose loss stands out?")
    if ctx.evidence.normal(excess):
        if ctx.has_time(2):
            ctx.shares = gradient_shares(ctx.engine, batches, [[part] for part in accused[:8]], ctx.has_time)
        return _proven(ctx, batches, accused, heavy, excess, which)
    if not ctx.has_time(4):
        ctx.skipped.append("gradient shares")
        return accused, excess
    # Repeated patterns first, then by loss: the halving works best if neighbours are similar.
    rest = [part for part in parts if part not in accused]
    rest.sort(key=lambda part: (not describe_repetition(part.ids), -part.mean_loss))
    ctx.shares = gradient_shares(ctx.engine, batches, [accused, rest], ctx.has_time)
    growth = measured.grad_norm / ctx.yardstick.normal.grad_norm
    if heavy := find_heavy_gradients(rest, ctx.shares, growth, sum(part.tokens for part in parts)):
        accused = [*accused, *heavy]
        excess = _without(ctx, batches, accused, f"Is {which} normal without those whose gradient stands out?")
    return _proven(ctx, batches, accused, heavy, excess, which)


def _proven(
    ctx: TrialContext,
    batches: Sequence[Batch],
    accused: list[DocumentPart],
    heavy: Sequence[DocumentPart],
    excess: float | None,
    which: str,
) -> tuple[list[DocumentPart], float | None]:
    """The accused, and the excess of the batches without those that can be convicted."""
    ctx.convictable = []
    if not ctx.evidence.normal(excess):
        return accused, excess
    examined = list(zip(accused, examine_parts(ctx.engine, ctx.stream, accused, ctx.scene.step), strict=True))
    ctx.experiments += [document_experiment(part, deviation) for part, deviation in examined[:8] if deviation]
    ctx.convictable = [
        part for part, deviation in examined if part.nonfinite or part in heavy or deviation is None or deviation.is_far
    ]
    if len(ctx.convictable) == len(accused):
        return accused, excess
    question = f"Is {which} normal without those that are unlike their source as a whole?"
    return accused, _without(ctx, batches, ctx.convictable, question)


def _without(
    ctx: TrialContext, batches: Sequence[Batch], accused: Sequence[DocumentPart], question: str
) -> float | None:
    rest = reweight(batches, accused, only=False) if accused else []
    if not rest or not ctx.has_time():
        return None
    detail = f"{len(accused)} documents left out"
    if words := next(filter(None, (describe_repetition(part.ids) for part in accused)), ""):
        detail += f"; {words}"
        ctx.remarks.append(words)
    return ctx.record("without the accused", question, measure(ctx.engine, rest), detail)


def try_earlier_weights(ctx: TrialContext) -> None:
    """The same batch at earlier weights (the PaLM experiment). Skips states that are abnormal on other batches too, as
    in the first steps; the lowest excess counts."""
    excesses: list[float] = []
    for state in ctx.earlier[:2]:
        if not ctx.has_time(3):
            ctx.skipped.append(f"earlier weights of step {state.step}")
            break
        state.load()
        usual = [measure(ctx.engine, batches) for batches in ctx.references[:2]]
        yardstick = ctx.yardstick.centred_on(mean_measurement(usual)) if usual else ctx.yardstick
        if usual and ctx.yardstick.excess_of(mean_measurement(usual)) > max(ctx.yardstick.limit, 0.5):
            continue
        question = f"Is the batch normal at the weights of step {state.step}?"
        detail = f"{state.origin}; other batches there: loss {yardstick.normal.loss:.4g}"
        excesses.append(
            ctx.record("earlier weights", question, measure(ctx.engine, ctx.scene.batches), detail, yardstick)
        )
    restore_state(ctx.engine, ctx.saved)
    if excesses:
        ctx.evidence.earlier = min(excesses)
