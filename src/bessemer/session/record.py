"""What a start writes into the run's folder: its files and events, and the comparison of the run with its plan."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

import torch

from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.user_dataset import NOT_REPLAYABLE, IterableStream
from bessemer.guard.machine import PlanGapDetector
from bessemer.model.families.folder import keep_origin
from bessemer.parallel.shard import local
from bessemer.plan.actual import EXPECTED, comparison_json, comparison_line, measure_steps
from bessemer.plan.decision import Plan
from bessemer.plan.expect import (
    ExpectedRun,
    RunSetup,
    append_record,
    history_path,
    load_records,
    make_run_record,
    predict_run,
    record_expected,
)
from bessemer.plan.hardware import Machine
from bessemer.plan.local import estimate_duration
from bessemer.session.data import DATA_FILES, record_data_files
from bessemer.session.restore import PreviousStart, differences
from bessemer.session.start import ResolvedRun
from bessemer.spec.load import dump_spec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import bench_count
from bessemer.train.job import Job
from bessemer.train.rank_report import HostLoadProbe, report_rank_memory
from bessemer.train.saver import package_versions
from bessemer.train.speed import measure_token_rate, step_seconds

SPEC_FILE = "spec.yaml"
RATE_KEYS, LENGTH_KEYS = ("schedule.", "optimizer."), ("budget.tokens", "budget.steps", "budget.epochs")
ENDLESS = ("constant", "inverse_sqrt")  # schedules that do not depend on the length of the run
WORTH_MEASURING_S = 10.0  # of all steps, by their matmuls: a shorter run ends before it matters
WORTH_KEEPING_S = 10.0  # of compared steps: shorter runs depend more on the moment than on the machine


def record_start(
    job: Job,
    spec: RunSpec,
    resolved: ResolvedRun,
    machine: Machine,
    previous: PreviousStart,
    restored: str | None,
    log: Callable[[str], None],
) -> None:
    """Writes the run's files and emits the events of a start. `restored` is the checkpoint that was loaded."""
    run, event, world = job.recorder.run, job.recorder.event, job.world
    for line in report_rank_memory(job.engine, job.recorder, resolved.plan):
        log(f"ranks  {line}")
    _write_files(job, spec, resolved)
    if run.lock.previous_owner:
        owner = run.lock.previous_owner
        event("lock_taken", reason=f"process {owner.pid} on {owner.host} died without releasing the lock")
    if previous.spec and (changes := differences(previous.spec.model_dump(mode="json"), spec.model_dump(mode="json"))):
        event("spec_changed", changes=changes, versions=package_versions())
        keys = RATE_KEYS if spec.schedule.kind in ENDLESS else (*RATE_KEYS, *LENGTH_KEYS)
        if job.start_step and any(key.startswith(keys) for key in changes):
            job.guard.changes.setdefault(job.start_step, "the optimizer or its schedule was changed")
    event(
        "started", step=job.start_step, total_steps=job.plan.total_steps, parameters=resolved.shape.parameters,
        device=world.device.type, resumed_from=restored, versions=package_versions(), machine=machine.to_json(),
    )  # fmt: skip
    if isinstance(job.data.stream, IterableStream):
        event("not_replayable", reason=NOT_REPLAYABLE)
    if job.engine.optimizer.fallback_reason:
        event("optimizer_fallback", reason=job.engine.optimizer.fallback_reason)


def _write_files(job: Job, spec: RunSpec, resolved: ResolvedRun) -> None:
    run, tokenizer = job.recorder.run, resolved.data.tokenizer
    run.write_file(SPEC_FILE, dump_spec(spec))
    run.write_file("plan.json", resolved.plan.to_json())
    run.write_file("settings.json", job.plan.to_json())
    run.write_file("data.json", json.dumps({"folder": str(resolved.data.folder)}))
    if job.world.main:
        run.write_file(DATA_FILES, record_data_files(spec))
    run.write_file("model.json", json.dumps({"shape": resolved.shape.to_dict(), "eos": tokenizer.eos}, indent=1))
    if job.world.main:
        tokenizer.save(run.folder / "tokenizer.json")
        keep_origin(run.folder, spec)


class PlanComparison:
    """The expected speed and memory of one start, compared while it runs and at its end. Only rank 0 compares."""

    def __init__(self, job: Job, shape: ModelShape, machine: Machine, plan: Plan) -> None:
        hosts = Counter(job.guard.detectors.hosts)
        self.job, self.path = job, history_path(machine.name, bench_count(job.engine.device), torch.__version__)
        self.first_step = job.start_step  # earlier records are of another start
        self.occasion = RunSetup(
            job.spec, shape, job.plan, machine, job.world.layout, max(hosts.values(), default=1),
            job.recorder.peak_flops, _resident_bytes(job), filled_share(job),
        )  # fmt: skip
        self.expected: ExpectedRun = predict_run(self.occasion, load_records(self.path), self._measured_step())
        self.duration = estimate_duration(self.occasion, self.expected, job.start_step, self._rate_of)
        record_expected(self.expected, plan)
        if self.expected.withheld and job.world.main:
            job.recorder.event("prediction_withheld", reason=self.expected.withheld)
        job.recorder.run.write_file(EXPECTED, self.expected.to_json())
        job.recorder.run.write_file("plan.json", plan.to_json())
        self.host_load = HostLoadProbe(job.engine.device)
        if job.world.main:
            job.guard.detectors.plan_gap = PlanGapDetector(self.expected, self.host_load)

    def _measured_step(self) -> float | None:
        """Measured seconds of a step, if the device is not in the catalogue and the rest of the run is long enough."""
        job, occasion, peak_flops = self.job, self.occasion, self.job.recorder.peak_flops
        left = max(0, job.plan.total_steps - job.start_step)
        if job.engine.device.type == "cuda" or not left or occasion.flops * left < WORTH_MEASURING_S * peak_flops:
            return None
        return step_seconds(job.engine, job.data.stream, job.start_step, occasion.rows, peak_flops)

    def _rate_of(self, shape: ModelShape) -> float:
        """Tokens/s of another shape on this machine, with this run's context and precision."""
        training, job = self.occasion.training, self.job
        return measure_token_rate(
            shape, training.context, training.precision, job.engine.device, job.recorder.peak_flops
        )

    def record(self, keep: bool) -> None:
        """Emits the comparison; with `keep` also adds the measurement to the machine's history."""
        job = self.job
        measured = measure_steps(record for record in job.recorder.history if record["step"] >= self.first_step)
        if measured is None or not job.world.main:
            return
        line, numbers = comparison_line(self.expected, measured), comparison_json(self.expected, measured)
        job.recorder.event("against_plan", reason=line, numbers=numbers)
        if not keep or measured.steps * measured.step_s < WORTH_KEEPING_S:
            return
        entry = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "run": job.recorder.run.name,
            "step_s": measured.own_s, "peak_bytes": measured.memory_bytes, "cause": self.host_load().held_up,
        }  # fmt: skip
        if error := append_record(self.path, make_run_record(self.occasion, self.expected, entry)):
            job.recorder.event("not_kept", reason=error)


def filled_share(job: Job) -> float:
    """The share of this process's rows that is not padding, in the first step. 1 where it cannot be read ahead."""
    stream, plan = job.data.stream, job.plan
    full = job.spec.objective == "pretrain" and job.spec.data.packing == "concat"
    if full or not isinstance(stream, BatchStream) or job.start_step >= plan.total_steps:
        return 1.0
    batches = stream.micro_batches(job.start_step, plan.micro_rows)
    with torch.random.fork_rng([]):
        read = sum(inputs.read for inputs in job.engine.inputs(batches))
    return read / max(1, sum(len(batch.tokens) for batch in batches) * plan.context) or 1.0


def _resident_bytes(job: Job) -> int:
    """Bytes of snapshots and averages, which a step's memory does not include."""
    state = job.snapshot_state().values() if job.guard.snapshots else ()
    average = job.engine.ema.state().values() if job.engine.ema else ()
    snapshot_bytes = sum(local(tensor).numel() * tensor.element_size() for tensor in state)
    return 2 * snapshot_bytes + sum(tensor.numel() * tensor.element_size() for tensor in average)
