"""One training step: gradients, verdict and update on the device; then its numbers on the host: read, record, react.

`loop.py` goes from step to step and reads the numbers of one while the next runs on the device.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from bessemer.data.stream.batches import Batch
from bessemer.guard.alarm import Alarm
from bessemer.guard.judge import ACCEPT, REASONS
from bessemer.guard.layer_stats import LayerSample
from bessemer.plan.batch_ramp import split_noise
from bessemer.train.compile import compute_in
from bessemer.train.device import ScalarTransfer
from bessemer.train.engine import PassHooks, PassResult
from bessemer.train.job import Incident, Job, Recorder
from bessemer.train.lowp import OVERFLOW
from bessemer.train.memory.fit import out_of_memory, shrink_micro_batch, split
from bessemer.train.rank_report import DocumentLosses, balance, by_document, rank_documents, rank_record

SAMPLE_ROWS = 2  # sequences of a layer sample
GUARD, METRIC, COUNT = "guard.", "sum.", "count."  # prefixes of the scalars of the verdict and of the metrics


@dataclass
class StepResult:
    """A step whose numbers are still on the device."""

    step: int
    tokens: int
    losses: PassResult
    batches: list[Batch]
    wait_s: float  # for the data
    read: float = 0.0  # tokens that are not padding, over all ranks; `tokens` are those in the loss
    step_s: float = 0.0
    memory_bytes: int = 0
    clocks: tuple[float, float] = (0.0, 0.0)  # wall and monotonic
    rank_stats: dict[str, list[Any]] | None = None  # every few steps, with several ranks
    lr: float = 0.0
    clip: float = 0.0
    scalars: ScalarTransfer | None = None
    layer_sample: LayerSample | None = None
    small_batch: SmallBatch | None = None


@dataclass(frozen=True)
class SmallBatch:
    """The first micro-batch of a step, from whose gradient the noise scale is estimated."""

    tokens: float
    step_tokens: float
    norm: torch.Tensor  # of its share of the step's gradient, times the loss scale


class StepHooks(PassHooks):
    """Between micro-batches of a training step: look for a signal, show progress, mark phases."""

    def __init__(self, job: Job, step: int, tokens: int) -> None:
        self.job, self.step, self.tokens = job, step, tokens
        self.first_norm: torch.Tensor | None = None

    def span(self, name: str) -> AbstractContextManager[None]:
        return self.job.span(name)

    def before_micro_batch(self) -> None:
        self.job.check_interrupt()

    def after_micro_batch(self, done: int, total: int) -> None:
        self.job.recorder.view.micro_batch(self.step, done, total, self.tokens)
        if done == 1 and total > 1 and measures_noise(self.job, self.step):
            self.job.engine.optimizer.drop_held_gradients()
            self.first_norm = self.job.engine.optimizer.grad_norm()


def measures_noise(job: Job, step: int) -> bool:
    """Whether a step measures the noise scale: only one process has whole gradients of a micro-batch."""
    every, optimizer = job.spec.observe.noise_every, job.engine.optimizer
    return bool(every and step % every == 0 and job.world.mesh is None and optimizer.rejects_before_update)


def compute_step(job: Job, step: int, batches: list[Batch], wait_s: float) -> StepResult:
    """Losses and gradients of a step; nothing is updated yet."""
    engine, view = job.engine, job.recorder.view
    if job.faults:
        job.faults.before_step(job, step)
    with job.span("data"):
        inputs = engine.inputs(batches)
    predicted = job.data.stream.step_count(step)
    count, read = engine.token_count(inputs, predicted), sum(part.read for part in inputs)
    tokens = int(predicted if predicted is not None and count and not engine.objective.counts_tokens else count)
    view.micro_batch(step, 0, len(inputs), tokens)
    if step == job.start_step and engine.is_compiled:
        view.activity("compiling, with the first micro-batch")
    scale = engine.loss_scale.scale if engine.loss_scale else None
    engine.optimizer.at_step(step)
    hooks, small_tokens = StepHooks(job, step, tokens), inputs[0].count
    losses = engine.compute_gradients(inputs, count, scale=scale, hooks=hooks)
    if job.faults:
        job.faults.after_backward(job, step)
    result = StepResult(step, tokens, losses, batches, wait_s, read)
    if hooks.first_norm is not None and 0 < small_tokens < count:
        result.small_batch = SmallBatch(small_tokens, count, hooks.first_norm)
    return result


def attempt_step(job: Job, step: int, batches: list[Batch], wait_s: float) -> StepResult | str:
    """`compute_step`, in smaller micro-batches where memory runs out. Returns the reason where even that fails. Raises
    Abandoned when a signal arrives."""
    while True:
        try:
            return compute_step(job, step, split(batches, job.plan.micro_rows), wait_s)
        except RuntimeError as error:
            # One of several ranks must not retry alone: it ends, and the launcher restarts all of them.
            if not out_of_memory(error) or job.world.size > 1 or not job.engine.optimizer.whole:
                raise
            message = str(error).split("\n")[0]
        # Outside of `except`, whose traceback keeps the failed pass in memory.
        if reason := shrink_micro_batch(job, step, message):
            return reason


def judge_and_update(job: Job, result: StepResult, sample_layers: bool) -> None:
    """Judge the step, and update unless it is vetoed; no host sync where the optimizer allows."""
    engine, guard, losses, step = job.engine, job.guard, result.losses, result.step
    loss_scale, device = engine.loss_scale, engine.device
    norm = engine.reduce(losses, rows=sum(len(batch.tokens) for batch in result.batches))
    norm = norm if loss_scale is None else norm / loss_scale.scale
    result.clip, result.lr = job.clip(step), job.lr(step)
    if job.faults:
        result.lr = job.faults.lr(step, result.lr)
    names = engine.objective.metrics
    scalars = {"loss": losses.loss, "grad_norm": norm}
    for name, (total, count) in zip(names, losses.metrics_M2, strict=True):
        scalars |= {METRIC + name: total, COUNT + name: count}
    if engine.spec.guard.enabled and result.tokens:
        judged = engine.objective.judged.name
        if judged == "loss":
            verdict = guard.judge.judge(losses.loss, norm, torch.cat(losses.row_sums, 1))
        else:
            total, count = losses.metrics_M2[names.index(judged)]
            verdict = guard.judge.judge(total / count, norm)
        scalars |= {GUARD + name: value for name, value in verdict.scalars.items()}
        # An update inside the backward pass can no longer be withheld, and averages follow it.
        before = engine.optimizer.rejects_before_update
        reject = verdict.reject.to(device) if before else torch.zeros((), device=device)
    else:
        reject = torch.zeros((), device=device) if result.tokens else torch.ones((), device=device)
    if sample_layers:
        guard.layer_stats.record_gradients(1.0 if loss_scale is None else loss_scale.scale)
    if engine.sam:
        raw = norm if loss_scale is None else norm * loss_scale.scale
        second = engine.sharpen(result.batches, job.data.stream.step_count(step), raw)
        norm = second if loss_scale is None else second / loss_scale.scale
        reject = torch.maximum(reject, (~norm.isfinite()).float())
    if engine.optimizer.curvature_due(step):
        engine.follow_curvature(result.batches, job.data.stream.step_count(step), step, reject)
    # Before the scale is updated in place.
    scale = None if loss_scale is None else loss_scale.scale
    divisor, share = engine.optimizer.clip(norm, result.clip, scale, reject, step)
    divisor = divisor.clone() if loss_scale is not None else divisor
    if share is not None:
        scalars["clipped_share"] = share
    if loss_scale is not None:
        scalars["loss_scale"] = loss_scale.scale
    if small := result.small_batch:
        scalars["small_norm"] = small.norm if scale is None else small.norm / scale
    result.scalars = ScalarTransfer(scalars)  # before the scale is updated in place
    if loss_scale is not None:
        reject = torch.maximum(reject, loss_scale.update(norm))
    with job.span("optimizer"):
        engine.update(result.lr, reject, divisor)
    if sample_layers:
        guard.layer_stats.record_updates()
        inputs = engine.objective.feed(result.batches[0].part(0, SAMPLE_ROWS), device)
        with compute_in(engine.plan.precision, device):
            sample = guard.layer_stats.sample(engine.model, inputs.tokens_BT, inputs.attention_mask, **inputs.more)
        result.layer_sample = sample


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a step on the host."""

    loss: float
    grad_norm: float
    metrics: dict[str, float]  # of the objective, by name
    loss_scale: float | None
    verdict: dict[str, float]  # empty if the step was not judged
    code: int  # of the verdict; an fp16 overflow is accepted
    overflow: bool
    clipped: bool
    clipped_share: float | None  # of tensors or values, with other clipping than by the global norm
    vetoed: bool  # before its update
    small_norm: float | None = None  # of the first micro-batch's share of the gradient

    @property
    def statistics(self) -> dict[str, float]:
        """The verdict's numbers for events and reports."""
        flags = ("code", "reopened", "suspect")
        return {key: round(value, 4) for key, value in self.verdict.items() if key not in flags}


def read_step(job: Job, result: StepResult) -> StepNumbers:
    """Wait for the step's scalars."""
    assert result.scalars is not None
    scalars = result.scalars.read()
    verdict = {key.removeprefix(GUARD): value for key, value in scalars.items() if key.startswith(GUARD)}
    loss, norm, loss_scale = scalars["loss"], scalars["grad_norm"], scalars.get("loss_scale")
    names = job.engine.objective.metrics
    metrics = {name: round(scalars[METRIC + name] / max(1.0, scalars[COUNT + name]), 5) for name in names}
    code = int(verdict.get("code", ACCEPT))
    overflow = loss_scale is not None and not math.isfinite(norm)
    if overflow and math.isfinite(loss):  # this is how the loss scale is found: no incident
        code = ACCEPT
    before, share = job.engine.optimizer.rejects_before_update, scalars.get("clipped_share")
    return StepNumbers(
        loss, norm, metrics, loss_scale, verdict, code, overflow,
        clipped=before and math.isfinite(norm) and (norm > result.clip if share is None else share > 0),
        clipped_share=share, vetoed=before and code != ACCEPT, small_norm=scalars.get("small_norm"),
    )  # fmt: skip


def record_step(job: Job, result: StepResult, numbers: StepNumbers) -> dict[str, Any]:
    """Write the step into the run's files, show it, and write the guard's events about it; the record."""
    recorder, guard, progress = job.recorder, job.guard, job.recorder.progress
    progress.tokens += result.tokens
    progress.elapsed_s += result.step_s
    progress.vetoes += numbers.vetoed
    progress.clipped += numbers.clipped
    record = step_record(job, result, numbers)
    if result.rank_stats:
        recorder.run.rank_record(rank_record(result.step, result.rank_stats))
    recorder.run.step(record)
    recorder.report_write_error()
    recorder.view.step(record)
    recorder.history.append(record)
    guard.recovery_checks = [check for check in guard.recovery_checks if not check.step(record)]
    record_verdict(job, result, numbers)
    return record


def step_record(job: Job, result: StepResult, numbers: StepNumbers) -> dict[str, Any]:
    """A line of metrics/steps.jsonl."""
    recorder, step_s = job.recorder, result.step_s
    veto = OVERFLOW if numbers.overflow else None
    record: dict[str, Any] = {
        "step": result.step, "loss": numbers.loss, **numbers.metrics,
        "grad_norm": numbers.grad_norm, "lr": result.lr, "clip": result.clip, "clipped": numbers.clipped,
        "veto": REASONS[numbers.code] if numbers.vetoed else veto,
        "tokens": recorder.progress.tokens,
        "tokens_per_s": round(result.read / step_s, 1),
        "mfu": round(result.read * recorder.flops_per_token / step_s / recorder.peak_flops, 4),
        "step_s": round(step_s, 5), "data_wait_s": round(result.wait_s, 5), "memory_bytes": result.memory_bytes,
    }  # fmt: skip
    if numbers.clipped_share is not None:
        record["clipped_share"] = round(numbers.clipped_share, 5)
    if (small := result.small_batch) and numbers.small_norm is not None and math.isfinite(numbers.grad_norm):
        small_square = (numbers.small_norm * small.step_tokens / small.tokens) ** 2
        signal, noise = split_noise(small.tokens, small_square, small.step_tokens, numbers.grad_norm**2)
        record |= {"gradient_square": signal, "noise": noise, "step_tokens": small.step_tokens}
    if job.rollouts:
        record |= job.rollouts.numbers(result.step)
    if numbers.loss_scale is not None:
        record["loss_scale"] = numbers.loss_scale
    if result.rank_stats:
        record["rank_step_s"] = result.rank_stats["own_s"]
        record["balance"] = balance(result.rank_stats["own_s"])
        if job.engine.pipeline:
            idle_s = result.rank_stats["bubble_s"]
            record["bubble"] = round(sum(idle_s) / len(idle_s) / step_s, 4)
    return record


def record_verdict(job: Job, result: StepResult, numbers: StepNumbers) -> None:
    """Events of the guard about a step: a veto with its documents, a window that was reopened, outliers accepted."""
    event, spec = job.recorder.event, job.spec.guard
    if numbers.code != ACCEPT:
        reason = REASONS[numbers.code]
        event(
            "veto" if numbers.vetoed else "judged_late", step=result.step,
            reason=reason if numbers.vetoed else f"{reason}, after its update",
            loss=numbers.loss, grad_norm=numbers.grad_norm, statistics=numbers.statistics,
            documents=rank_documents(job.world.gather(local_document_losses(job, result))),
        )  # fmt: skip
    if numbers.verdict.get("reopened"):
        reason = f"{spec.max_vetoes} vetoes in a row: taken for a lasting change, the window starts anew"
        event("guard_reopened", step=result.step, loss=numbers.loss, reason=reason)
    if numbers.verdict.get("gave_way"):
        reason = f"{spec.veto_share:.0%} of the last {spec.window} steps were vetoed: such steps belong to the data"
        event("guard_gave_way", step=result.step, loss=numbers.loss, reason=reason)


def local_document_losses(job: Job, result: StepResult) -> DocumentLosses:
    """Only one rank of each replica group reports losses; context-parallel ranks each report their own columns."""
    if not job.world.reports_losses:
        return {}
    columns = job.engine.objective.columns
    part = columns.part(job.plan.context).numpy() if columns else slice(None)
    return by_document(job.data.stream, result.batches, result.losses.token_losses, part)


def react_to_step(job: Job, result: StepResult, numbers: StepNumbers, record: dict[str, Any]) -> Incident | None:
    """Raise alarms about a recorded step; an incident if the run must not simply go on."""
    alarms = raise_alarms(job, result, numbers, record) if job.spec.guard.enabled else []
    urgent = next((alarm for alarm in alarms if alarm.severity in ("rollback", "stop")), None)
    statistics = numbers.statistics
    if numbers.vetoed or urgent:
        return Incident(
            result.step, REASONS[numbers.code] if numbers.vetoed or not urgent else urgent.finding.symptom,
            urgent.severity if urgent else "veto", record, statistics, result.batches, urgent,
        )  # fmt: skip
    examine = job.guard.examine
    if numbers.verdict.get("suspect") and examine and (trial := examine(result, statistics)):
        symptom = "documents unlike the rest of their source"
        return Incident(result.step, symptom, "suspect", record, statistics, result.batches, trial=trial)
    return None


def raise_alarms(job: Job, result: StepResult, numbers: StepNumbers, record: dict[str, Any]) -> list[Alarm]:
    """Run the detectors on a step; each alarm is an event."""
    guard = job.guard
    alarms = guard.replica_check.compare(result.step, guard.detectors.hosts) if guard.replica_check else []
    if result.tokens:
        norm = max(record["grad_norm"], job.engine.objective.judged.least_norm)
        alarms += guard.detectors.step({**record, "grad_norm": norm, "lr_planned": job.lr(result.step)}, result.clocks)
    searching = numbers.overflow and math.isfinite(numbers.loss)  # for the loss scale: its layers are no alarm
    if result.tokens and result.layer_sample and not searching:
        sample = result.layer_sample.read()
        job.recorder.run.layer_record(layer_record(result.step, sample))
        alarms += guard.detectors.check_layers(result.step, sample)
    if job.recorder.readings:
        alarms += job.recorder.readings.alarms(result.step, result.rank_stats, result.clocks[1])
    for alarm in alarms:
        record_alarm(job.recorder, alarm)
    return alarms


def layer_record(step: int, sample: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics/layers.jsonl: each quantity by layer, in four digits."""
    record: dict[str, Any] = {"step": step}
    for layer, values in sample["layers"].items():
        for quantity, value in values.items():
            record.setdefault(quantity, {})[layer] = float(f"{value:.4g}")
    return record


def record_alarm(recorder: Recorder, alarm: Alarm) -> None:
    finding = alarm.finding
    recorder.event(
        "alarm", step=alarm.step, alarm=alarm.kind, severity=alarm.severity, reason=finding.symptom,
        evidence=finding.evidence, cause=finding.cause, confidence=finding.confidence, fix=finding.fix,
    )  # fmt: skip


def report_step(job: Job, result: StepResult) -> Incident | None:
    """Read, record, react."""
    numbers = read_step(job, result)
    record = record_step(job, result, numbers)
    return react_to_step(job, result, numbers, record)
