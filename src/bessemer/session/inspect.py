"""`bessemer inspect`: builds a model with its data and optimizer from a spec or a run, and diagnoses it.

Nothing is written into the run; from a spec, its data is prepared as training would. Everything runs in one process on
one device: inspect a smaller sibling of a model that needs several GPUs.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bessemer.checkpoint.manifest import DamagedCheckpoint
from bessemer.checkpoint.store import CheckpointStore
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.order import Segment
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.diagnose import gradients, histograms, landscape, nonfinite
from bessemer.diagnose.report import InspectedModel, InspectionReport, MicroBatchTerms, backward_step
from bessemer.errors import UserError
from bessemer.model.transformer import Decoder, build
from bessemer.optim.choose import optimizer_for
from bessemer.optim.guarded import GuardedOptimizer, clip_divisor
from bessemer.optim.schedule import Schedule
from bessemer.plan.decide import TrainPlan
from bessemer.run.directory import Run
from bessemer.run.journal import number
from bessemer.session.data import build_stream
from bessemer.session.dry_run import decide
from bessemer.session.replay import stream_of
from bessemer.session.session import existing_run
from bessemer.session.start import completed, load_source
from bessemer.spec.load import load_spec
from bessemer.spec.parallel import ParallelSpec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.compile import FP8, compute_in
from bessemer.train.device import pick_device
from bessemer.train.lowp import convert
from bessemer.train.objective import Pretrain, make_pretrain
from bessemer.train.trained import find_checkpoint


@dataclass
class Inspection:
    """A model to inspect, with `step` steps done."""

    spec: RunSpec
    plan: TrainPlan
    device: torch.device
    model: Decoder
    optimizer: GuardedOptimizer
    stream: BatchStream
    label: str
    objective: Pretrain
    step: int = 0
    run: Run | None = None

    def subject(self, micro_rows: int | None = None) -> InspectedModel:
        """The run's losses, in its micro-batches or in those of `micro_rows`."""
        objective = self.objective

        def parts(step: int, precision: str | None) -> Iterator[MicroBatchTerms]:
            micro = self.stream.micro_batches(step, micro_rows or self.plan.micro_rows)
            feeds = deque(objective.feed(batch, self.device) for batch in micro)
            count = sum(feed.count for feed in feeds)
            while feeds:
                feed = feeds.popleft()
                with compute_in(precision or self.plan.precision, self.device):
                    loss = objective.loss(self.model, feed, count).loss
                yield MicroBatchTerms(loss, feed.count / count, feed.count)

        return InspectedModel(self.model, parts)

    def steps(self, batches: int) -> list[int]:
        """The next steps of the run, or its last ones at its end."""
        first = max(0, min(self.step, self.plan.total_steps - batches))
        return list(range(first, first + batches))

    def update(self, lr: float) -> None:
        """Runs the optimizer's step with gradients clipped as in the run."""
        divisor = clip_divisor(self.optimizer.grad_norm(), self.spec.optimizer.clip)
        self.optimizer.step(lr, torch.zeros((), device=self.device), divisor)


def _assemble(
    spec: RunSpec,
    plan: TrainPlan,
    shape: ModelShape,
    stream: BatchStream,
    tokenizer: Tokenizer,
    label: str,
    device: torch.device,
) -> Inspection:
    # Weights in fp32 whatever the run uses, so that a step can also run in full precision.
    spec = spec.model_copy(update={"memory": spec.memory.model_copy(update={"weights": "fp32", "update": "after"})})
    model = build(shape, device, spec.seed, spec.model.init)
    if plan.precision in FP8:
        convert(model, plan.precision, device)
    optimizer = optimizer_for(model, spec)
    objective = make_pretrain(spec, stream.order.names, tokenizer, shape, plan.context)
    return Inspection(spec, plan, device, model, optimizer, stream, label, objective)


def from_spec(spec: RunSpec) -> Inspection:
    """A fresh model as a run of the spec would start with."""
    spec = completed(spec)
    device = pick_device(spec.parallel)
    resolved = decide(spec, device)
    stream = build_stream(spec, resolved.data, resolved.rows, resolved.training, [Segment(0, 0)])
    assert isinstance(stream, BatchStream), "datasets from Python are refused by open_data"
    label = f"{spec.name}, {spec.model.hf or 'fresh weights'}"
    bench = _assemble(spec, resolved.training, resolved.shape, stream, resolved.data.tokenizer, label, device)
    if resolved.source:
        load_source(bench.model, resolved.source)
    return bench


def from_run(folder: Path, checkpoint: str = "last", device: str = "auto") -> Inspection:
    """Weights and moments of a checkpoint, which is verified; the run is only read."""
    run, stream, data, plan = stream_of(folder)
    _, spec = existing_run(folder)
    if device not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"--device {device}: write auto, cpu, cuda or mps")
    target = pick_device(ParallelSpec(device=device))  # type: ignore[arg-type]
    path = find_checkpoint(run, checkpoint)
    shape = ModelShape.from_dict(json.loads((run.folder / "model.json").read_text())["shape"])
    bench = _assemble(spec, plan, shape, stream, data.tokenizer, f"{run.name} at {path.name}", target)
    state = {f"model.{name}": tensor for name, tensor in bench.model.state_dict().items()}
    state |= {f"optimizer.{name}": tensor for name, tensor in bench.optimizer.state().items()}
    try:
        bench.step = CheckpointStore(run.checkpoints).load(path, state).step
    except DamagedCheckpoint as error:
        raise UserError(f"{error}; choose another with --checkpoint") from None
    bench.run = run
    return bench


def inspect_lr(
    path: Path, settings: list[str], checkpoint: str, device: str, first: float, last: float, steps: int
) -> InspectionReport:
    """Of a spec with fresh weights, or of a run's folder with those of a checkpoint."""
    if not 0 < first < last or steps < 10:
        raise UserError(f"--first {first:g} --last {last:g} --steps {steps}: write 0 < first < last, 10 steps or more")
    if path.is_dir():
        bench = from_run(path, checkpoint, device)
    else:
        overrides = [*settings, f"parallel.device={device}"] if device != "auto" else settings
        bench = from_spec(load_spec(path, overrides))
    subject = bench.subject()

    def attempt(i: int, rate: float) -> float:
        loss = float(backward_step(subject, bench.step + i))
        bench.update(rate)
        return loss

    return landscape.lr_range_report(landscape.run_lr_range_test(attempt, first, last, steps), bench.plan.peak_lr)


def inspect_gradients(bench: Inspection, batches: int) -> InspectionReport:
    flows = gradients.measure_gradient_flow(bench.subject(), bench.steps(batches))
    return gradients.gradient_report(flows, bench.label)


def inspect_landscape(
    bench: Inspection, batches: int, reach: float, points: int, grid: int, seed: int
) -> InspectionReport:
    loss_slice = landscape.slice_loss(bench.subject(), bench.steps(batches), reach, points, grid, seed)
    return landscape.landscape_report(loss_slice, bench.label)


def inspect_histograms(bench: Inspection) -> InspectionReport:
    step = bench.steps(1)[0]
    lr = planned_lr(bench, step)
    distributions = histograms.measure_distributions(bench.subject(), step, lambda: bench.update(lr))
    return histograms.histogram_report(distributions, bench.label)


def inspect_noise(bench: Inspection, batches: int) -> InspectionReport:
    """Small batches have an eighth of a step's sequences, at least one."""
    steps = bench.steps(batches)
    rows = bench.stream.steps.rows(steps[0])
    try:
        scale = gradients.measure_noise_scale(bench.subject(min(bench.plan.micro_rows, max(1, rows // 8))), steps)
    except ValueError as error:
        raise UserError(f"--batches {batches}: {error}") from None
    return gradients.noise_report(scale, bench.stream.step_count(steps[0]), bench.label)


def inspect_nan(folder: Path, step: int, checkpoint: str | None, device: str) -> InspectionReport:
    """Without a checkpoint's name, takes the newest at or before the step and replays the steps in between, with the
    recorded learning rates and without vetoed updates."""
    name = checkpoint or _newest_before(folder, step)
    bench = from_run(folder, name, device)
    if not 0 <= step < bench.plan.total_steps:
        raise UserError(f"--step {step}: this run has steps 0 to {bench.plan.total_steps - 1}")
    subject = bench.subject()
    if checkpoint is None:
        assert bench.run is not None
        records = {int(record["step"]): record for record in bench.run.metrics() if bench.step <= record["step"] < step}
        for earlier in range(bench.step, step):
            record = records.get(earlier, {})
            if record.get("veto") is None:
                backward_step(subject, earlier)
                bench.update(number(record.get("lr")) or planned_lr(bench, earlier))
        bench.label += f", {step - bench.step} steps replayed"
    in_fp32 = (lambda: backward_step(subject, step, "fp32")) if bench.plan.precision != "fp32" else None
    trace = nonfinite.trace_nonfinite(bench.model, lambda: backward_step(subject, step), in_fp32)
    return nonfinite.nonfinite_report(trace, step, bench.label)


def planned_lr(bench: Inspection, step: int) -> float:
    plan, schedule = bench.plan, bench.spec.schedule
    return Schedule(plan.peak_lr, plan.warmup_steps, plan.total_steps, schedule.kind, schedule.floor).lr(step)


def _newest_before(folder: Path, step: int) -> str:
    committed = CheckpointStore(Run.existing(folder).checkpoints).committed()
    names = [path.name for path, manifest in committed if manifest.step <= step]
    if not names:
        existing = ", ".join(path.name for path, _ in committed) or "none"
        raise UserError(f"{folder}: no checkpoint at or before step {step}; name one with --checkpoint: {existing}")
    return names[-1]
