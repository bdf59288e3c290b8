"""`bessemer inspect`: builds a model with its data and optimizer from a spec or a run, and diagnoses it.

Nothing is written into the run; from a spec, its data is prepared as training would. Everything runs in one process on
one device: inspect a smaller sibling of a model that needs several GPUs.

`bessemer train --profile`: profiles a few steps of a run and discards them.

They run in a scratch folder that links to the run's checkpoints and plan. The run is only read and may be training at
the same time. The profile is written to `profile/` in its folder.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch

from bessemer.checkpoint.manifest import DamagedCheckpoint
from bessemer.checkpoint.store import CheckpointStore
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.order import Segment
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.diagnose import gradients, histograms, landscape, nonfinite, short_runs
from bessemer.diagnose.report import InspectedModel, InspectionReport, MicroBatchTerms, backward_step
from bessemer.errors import UserError
from bessemer.model.adapters import clear_adapters, init_adapters
from bessemer.model.families.adapter import read_adapter
from bessemer.model.quantized import NF4
from bessemer.model.transformer import Decoder, build_model
from bessemer.observe.collectives import collectives, compare_ranks, ranks_text
from bessemer.observe.memory_snapshot import peak_text
from bessemer.observe.profile import ProfileFacts, as_json, as_text, read_trace, step_time
from bessemer.observe.view import RunView
from bessemer.optim.choose import optimizer_for
from bessemer.optim.guarded import GuardedOptimizer, clip_divisor
from bessemer.parallel.world import World, join_process_group
from bessemer.plan.decide import TrainPlan
from bessemer.plan.schedule import run_schedule
from bessemer.plan.search.layout import check_processes
from bessemer.run.directory import Run, RunReader, RunWriter
from bessemer.run.journal import Record, to_number
from bessemer.session.build import adapt, further_models
from bessemer.session.data import build_stream
from bessemer.session.models import attach_trained, open_models
from bessemer.session.objectives import make_objective
from bessemer.session.record import SPEC_FILE
from bessemer.session.replay import stream_of
from bessemer.session.session import Session, existing_run, run_folder
from bessemer.session.start import complete_spec, dry_run, load_source
from bessemer.spec.adapter import read_peft
from bessemer.spec.load import load_spec
from bessemer.spec.rl import RL_OBJECTIVES
from bessemer.spec.schema import ParallelSpec, RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.storage import write_atomic
from bessemer.train.compile import FP8, compute_in
from bessemer.train.device import measure_machine, memory_in_use, memory_limit, pick_device, stored_ceilings
from bessemer.train.job import Job, Outcome
from bessemer.train.loop import train_loop
from bessemer.train.lowp import convert_to_fp8
from bessemer.train.objective import Objective
from bessemer.train.profile import WARMUP, StepProfiler
from bessemer.train.saver import CheckpointSaver
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
    objective: Objective
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
    quantized = spec.adapter is not None and spec.adapter.base == NF4
    model = build_model(shape, "meta" if quantized else device, spec.seed, spec.model.init)
    adapt(model, spec, plan, device)
    clear_adapters(model)
    if plan.precision in FP8:
        convert_to_fp8(model, plan.precision, device)
    others = open_models(spec)
    attach_trained(model, others, World(device=device), spec, torch.float32, half=False)
    optimizer = optimizer_for(model, spec)
    objective = make_objective(spec, stream, tokenizer, shape, plan.context)
    objective.models = further_models(model, spec, others, World(device=device), plan.precision)
    return Inspection(spec, plan, device, model, optimizer, stream, label, objective)


def _refuse_rollouts(spec: RunSpec) -> None:
    if spec.objective in RL_OBJECTIVES:
        fix = "inspect the model that it started from, or replay a step"
        raise UserError(f"objective: {spec.objective}: inspect reads token data, and such runs make their own: {fix}")


def from_spec(spec: RunSpec) -> Inspection:
    """A fresh model as a run of the spec would start with."""
    _refuse_rollouts(spec)
    spec = complete_spec(spec)
    device = pick_device(spec.parallel)
    resolved = dry_run(spec, device)
    stream = build_stream(spec, resolved.data, resolved.rows, resolved.training, [Segment(0, 0)])
    assert isinstance(stream, BatchStream), "datasets from Python are refused by open_data"
    label = f"{spec.name}, {spec.model.hf or 'fresh weights'}"
    bench = _assemble(spec, resolved.training, resolved.shape, stream, resolved.data.tokenizer, label, device)
    if resolved.source:
        load_source(bench.model, resolved.source)
    if spec.adapter and resolved.training.adapter:
        adapter = read_peft(spec.adapter)
        given = read_adapter(adapter.path, resolved.shape) if adapter.path else None
        init_adapters(bench.model, adapter, adapter.scale(*resolved.training.adapter), spec.seed, given)
    return bench


def from_run(folder: Path, checkpoint: str = "last", device: str = "auto") -> Inspection:
    """Weights and moments of a checkpoint, which is verified; the run is only read."""
    _, spec = existing_run(folder)
    _refuse_rollouts(spec)
    run, stream, data, plan = stream_of(folder)
    assert isinstance(stream, BatchStream), "others are refused"
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


def _attempt(bench: Inspection) -> Callable[[int, float], tuple[float, float]]:
    subject = bench.subject()

    def attempt(i: int, rate: float) -> tuple[float, float]:
        loss = backward_step(subject, bench.step + i)
        norm = bench.optimizer.grad_norm()
        bench.update(rate)
        return float(loss), float(norm)

    return attempt


def inspect_transfer(
    path: Path, settings: list[str], device: str, widths: Sequence[int], rates: Sequence[float], steps: int
) -> InspectionReport:
    """Short runs of every width at every rate, from fresh weights; heads and feed-forward grow with the width."""
    settings = [*settings, f"parallel.device={device}"] if device != "auto" else settings
    base = from_spec(load_spec(path, settings))
    shape, runs = base.model.shape, dict[int, dict[float, short_runs.ShortRun]]()
    for width in widths:
        if width * shape.kv_heads % shape.width:
            raise UserError(
                f"--widths {width}: is no multiple of {shape.width // math.gcd(shape.width, shape.kv_heads)}, so that "
                f"heads of {shape.head_dim} do not divide it"
            )
        sizes = {key: getattr(shape, key) * width // shape.width for key in ("heads", "kv_heads", "ffn")}
        wider = [*settings, f"model.width={width}", *(f"model.{key}={value}" for key, value in sizes.items())]
        spec = load_spec(path, wider)
        runs[width] = {
            rate: short_runs.short_run(_attempt(from_spec(spec)), rate, steps, short_runs.WARMUP) for rate in rates
        }
    return short_runs.transfer_report(runs, base.spec.model.init)


def inspect_warmup(
    path: Path, settings: list[str], device: str, warmups: Sequence[int], steps: int, rate: float | None
) -> InspectionReport:
    """Short runs with every warm-up to the planned peak rate, from fresh weights."""
    settings = [*settings, f"parallel.device={device}"] if device != "auto" else settings
    spec, runs = load_spec(path, settings), dict[int, short_runs.ShortRun]()
    bench = from_spec(spec)
    rate = bench.plan.peak_lr if rate is None else rate
    for warmup in warmups:
        runs[warmup] = short_runs.short_run(_attempt(bench if not runs else from_spec(spec)), rate, steps, warmup)
    return short_runs.warmup_report(runs, rate, bench.plan.warmup_steps)


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
                bench.update(to_number(record.get("lr")) or planned_lr(bench, earlier))
        bench.label += f", {step - bench.step} steps replayed"
    in_fp32 = (lambda: backward_step(subject, step, "fp32")) if bench.plan.precision != "fp32" else None
    trace = nonfinite.trace_nonfinite(bench.model, lambda: backward_step(subject, step), in_fp32)
    return nonfinite.nonfinite_report(trace, step, bench.label)


def planned_lr(bench: Inspection, step: int) -> float:
    return run_schedule(bench.spec.schedule, bench.plan).lr(step)


def _newest_before(folder: Path, step: int) -> str:
    committed = CheckpointStore(Run.existing(folder).checkpoints).committed()
    names = [path.name for path, manifest in committed if manifest.step <= step]
    if not names:
        existing = ", ".join(path.name for path, _ in committed) or "none"
        raise UserError(f"{folder}: no checkpoint at or before step {step}; name one with --checkpoint: {existing}")
    return names[-1]


class ScratchRun(RunWriter):
    """A run in the scratch folder, without metrics to cut."""

    def go_back(self, step: int, saved: Mapping[str, bytes]) -> list[Record]:
        return []


class DiscardingSaver(CheckpointSaver):
    """Saves nothing and confirms nothing."""

    def save(self, job: Job, step: int, validation_loss: float | None) -> str | None:
        return "nothing"

    def confirm(self, job: Job, done: int) -> None: ...


class ProfileSession(Session):
    """A start of the run that ends after the profiled steps. `text` is the report; with `nsight` there is none, since
    Nsight and torch's profiler exclude each other."""

    def __init__(self, spec: RunSpec, view: RunView, steps: int = 3, nsight: bool = False) -> None:
        if steps < 1:
            raise UserError(f"--profile-steps {steps}: write 1 or more")
        checkpoint = spec.checkpoint.model_copy(update={"remote": None})
        guard = spec.guard.model_copy(update={"forget": None})  # it needs evaluations
        super().__init__(spec.model_copy(update={"checkpoint": checkpoint, "guard": guard}), view)
        self.steps, self.nsight, self.text = steps, nsight, ""
        self.folder = run_folder(self.spec) / "profile"

    def train(self) -> Outcome:
        device = pick_device(self.spec.parallel)
        self.world = world = join_process_group(device, timedelta(seconds=self.spec.parallel.patience))
        with ExitStack() as stack:
            with world.main_process_first():
                if world.main:
                    check_processes(self.spec, self.source.shape if self.source else None, world.size)
                    # Beside the run, since ranks on other hosts read it too.
                    Path(self.spec.runs).mkdir(parents=True, exist_ok=True)
                    scratch = tempfile.TemporaryDirectory(prefix=".profile-", dir=self.spec.runs)
                    folder = Path(stack.enter_context(scratch)) / self.spec.name
                    self._link_run(run_folder(self.spec), folder)
            folder = world.agree(folder if world.main else Path())
            run = stack.enter_context((ScratchRun if world.main else RunReader)(folder))
            stack.enter_context(self.view.following(run))
            try:
                outcome = self._train(run)
            except UserError as error:
                raise self._error_of_rank(error) from None
            world.wait()  # the folder goes
        if world.main and not (self.text or self.nsight):
            raise UserError(f"--profile: {outcome.reason}")
        return outcome

    def _link_run(self, run: Path, scratch: Path) -> None:
        """Links what a resume needs, unless the run has too few steps left: then its first steps are profiled."""
        if not (run / "settings.json").exists():
            return
        committed = CheckpointStore(run / "checkpoints").committed()
        total = json.loads((run / "settings.json").read_text())["total_steps"]
        if not committed or committed[-1][1].step + WARMUP + self.steps >= total:
            return
        (scratch / "checkpoints").mkdir(parents=True)
        for path, _ in committed:
            (scratch / "checkpoints" / path.name).symlink_to(path.resolve())
        for name in (SPEC_FILE, "plan.json"):
            shutil.copy(run / name, scratch / name)

    def _loop(self, job: Job) -> Outcome:
        needed = job.start_step + WARMUP + self.steps + (job.engine.device.type == "cuda" and not self.nsight)
        if needed > job.plan.total_steps:
            raise UserError(f"--profile: needs {needed} steps, the run has {job.plan.total_steps}: raise budget.tokens")
        if self.nsight and job.engine.device.type != "cuda":
            raise UserError(f"--nsight: needs an NVIDIA GPU, and the run is on {job.engine.device.type}: omit it")
        if job.engine.device.type == "mps":
            raise UserError("--profile: torch cannot profile Apple GPUs: use parallel.device: cpu, or Instruments")
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in (path for pattern in ("trace*", "memory*") for path in self.folder.glob(pattern) if self.world.main):
            old.unlink()
        rank = f"-rank-{self.world.rank}" if self.world.size > 1 else ""
        trace = None if self.nsight else self.folder / f"trace{rank}.json.gz"
        memory = self.folder / f"memory{rank}.pickle" if trace and job.engine.device.type == "cuda" else None
        job.saver, job.guard.snapshots = DiscardingSaver(job.saver.store, ""), None
        job.data.evaluator.parts.clear()
        job.recorder.profiler = profiler = StepProfiler(job.engine.device, self.steps, trace, memory)
        while (outcome := train_loop(job)).incident:  # a vetoed step takes as long as any other
            job.start_step = outcome.step
        if trace:
            self._report(job, profiler, trace)
        return outcome

    def _report(self, job: Job, profiler: StepProfiler, trace: Path) -> None:
        events, world = read_trace(trace), job.world
        time = step_time(events)
        parts_ms = {part: us / self.steps / 1e3 for part, us in time.parts.items()}
        own = {"rank": world.rank, "parts_ms": parts_ms, "memory_bytes": memory_in_use(job.engine.device)}
        by_rank = world.gather((own, collectives(events)))
        if not world.main:
            return
        machine, stored, plan = measure_machine(job.engine.device), stored_ceilings(job.engine.device), job.plan
        rates = {f"matmul_{key}": rate for key, rate in machine.matmul.items() if rate}
        weights = sum(parameter.nbytes for parameter in job.engine.optimizer.parameters)
        moments = sum(tensor.nbytes for tensor in job.engine.optimizer.state().values())
        facts = ProfileFacts(
            spec=self.spec, shape=job.engine.model.shape, device=machine.name, precision=plan.precision,
            context=plan.context,
            rows=job.data.stream.steps.rows(job.start_step + WARMUP), micro_rows=plan.micro_rows, steps=self.steps,
            plain_step_s=profiler.plain_step_s, flops_per_token=job.recorder.flops_per_token,
            peak_flops=job.recorder.peak_flops,
            memory_bytes=memory_in_use(job.engine.device), memory_limit=memory_limit(job.engine.device),
            update_bytes=3 * weights + 2 * moments, ceilings=rates | (stored.best() if stored else {}),
        )  # fmt: skip
        ranks, calls = [rank for rank, _ in by_rank], [calls for _, calls in by_rank]
        rows = [asdict(row) | {"bytes_per_s": row.rate} for row in compare_ranks(calls, self.steps)]
        profile = as_json(time, facts) | {"ranks": ranks, "collectives": rows, "memory_peak": profiler.peak}
        peak = peak_text(profiler.peak) if profiler.peak else ""
        self.text = as_text(profile) + ranks_text(ranks, rows) + peak
        write_atomic(self.folder / "profile.json", json.dumps(profile, indent=1))
        write_atomic(self.folder / "profile.txt", self.text)
