"""What a run was expected to do and what it does: said at its start, compared while it goes, kept at its end."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import torch

from bessemer.guard.detect.machine import PlanGapDetector
from bessemer.parallel.shard import local
from bessemer.plan.actual import EXPECTED, actual, comparison_json, comparison_line
from bessemer.plan.decision import Plan
from bessemer.plan.expect import (
    ExpectedRun,
    Occasion,
    expect,
    history_path,
    keep_record,
    load_records,
    note_expected,
    record_of,
)
from bessemer.plan.hardware import Machine
from bessemer.plan.local import estimate_duration
from bessemer.spec.shape import ModelShape
from bessemer.train.device import bench_count
from bessemer.train.job import Job
from bessemer.train.rank_report import HostLoadProbe
from bessemer.train.speed import rate_here
from bessemer.train.step_probe import step_seconds

WORTH_MEASURING_S = 10.0  # of all steps, by their products alone: a shorter run has ended before it matters
WORTH_KEEPING_S = 10.0  # of compared steps: shorter runs say more of the moment than of the machine


class AgainstPlan:
    """For one start of a run. Only the first process compares: its numbers are everybody's."""

    def __init__(self, job: Job, shape: ModelShape, machine: Machine, plan: Plan) -> None:
        hosts = Counter(job.guard.detectors.hosts)
        self.job, self.path = job, _history(machine, job.engine.device)
        self.first_step = job.start_step  # records before are of another start
        self.occasion = Occasion(
            job.spec, shape, job.plan, machine, job.world.layout, max(hosts.values(), default=1),
            job.recorder.peak_flops, _beside(job),
        )  # fmt: skip
        self.expected: ExpectedRun = expect(self.occasion, load_records(self.path), self._measured_step())
        self.duration = estimate_duration(self.occasion, self.expected, job.start_step, self._rate_of)
        note_expected(self.expected, plan)
        if self.expected.withheld and job.world.main:
            job.recorder.event("prediction_withheld", reason=self.expected.withheld)
        job.recorder.run.write_file(EXPECTED, self.expected.to_json())
        job.recorder.run.write_file("plan.json", plan.to_json())
        self.around = HostLoadProbe(job.engine.device)
        if job.world.main:
            job.guard.detectors.gap = PlanGapDetector(self.expected, self.around)

    def _measured_step(self) -> float | None:
        """Seconds, where no catalogue has the device and what is left is long enough to ask."""
        job, occasion = self.job, self.occasion
        left = max(0, job.plan.total_steps - job.start_step)
        if (
            job.engine.device.type == "cuda"
            or not left
            or occasion.flops * left < WORTH_MEASURING_S * job.recorder.peak_flops
        ):
            return None
        return step_seconds(job.engine, job.data.stream, job.start_step, occasion.rows, job.recorder.peak_flops)

    def _rate_of(self, shape: ModelShape) -> float:
        """Tokens/s of another shape here, with this run's context and precision."""
        training = self.occasion.training
        return rate_here(
            shape, training.context, training.precision, self.job.engine.device, self.job.recorder.peak_flops
        )

    def end(self, keep: bool) -> None:
        """Tell plan and run side by side; `keep` what the run says of the machine."""
        job = self.job
        found = actual(record for record in job.recorder.history if record["step"] >= self.first_step)
        if found is None or not job.world.main:
            return
        words, numbers = comparison_line(self.expected, found), comparison_json(self.expected, found)
        job.recorder.event("against_plan", reason=words, numbers=numbers)
        if not keep or found.steps * found.step_s < WORTH_KEEPING_S:
            return
        measured = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "run": job.recorder.run.name,
            "step_s": found.own_s,
            "peak_bytes": found.memory_bytes, "cause": self.around().held_up,
        }  # fmt: skip
        if fault := keep_record(self.path, record_of(self.occasion, self.expected, measured)):
            job.recorder.event("not_kept", reason=fault)


def _history(machine: Machine, device: torch.device) -> Path:
    return history_path(machine.name, bench_count(device), torch.__version__)


def _beside(job: Job) -> int:
    """Bytes of copies and averages that lie beside a step."""
    state = (
        sum(local(tensor).numel() * tensor.element_size() for tensor in job.state().values())
        if job.guard.snapshots
        else 0
    )
    average = (
        sum(tensor.numel() * tensor.element_size() for tensor in job.engine.ema.state().values())
        if job.engine.ema
        else 0
    )
    return 2 * state + average
