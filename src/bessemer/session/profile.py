"""`bessemer train --profile`: profiles a few steps of a run and discards them.

They run in a scratch folder that links to the run's checkpoints and plan. The run is only read and may be training at
the same time. The profile is written to `profile/` in its folder.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bessemer.checkpoint.store import CheckpointStore
from bessemer.errors import UserError
from bessemer.observe.profile import ProfileFacts, as_json, as_text, read_trace, step_time
from bessemer.observe.view import RunView
from bessemer.run.directory import RunWriter
from bessemer.run.journal import Record
from bessemer.session.record import SPEC_FILE
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec
from bessemer.storage import write_atomic
from bessemer.train.device import measure, memory_in_use, memory_limit, stored_ceilings
from bessemer.train.job import Job, Outcome
from bessemer.train.loop import train_loop
from bessemer.train.profile import WARMUP, Profiler
from bessemer.train.saver import CheckpointSaver


class ScratchRun(RunWriter):
    """A run in the scratch folder, without metrics to cut."""

    def go_back(self, step: int, saved: Mapping[str, bytes]) -> list[Record]:
        return []


class Unsaved(CheckpointSaver):
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
        with tempfile.TemporaryDirectory(prefix="bessemer-profile-") as scratch:
            folder = Path(scratch) / self.spec.name
            self._link_run(run_folder(self.spec), folder)
            with ScratchRun(folder) as run, self.view.following(run):
                outcome = self._train(run)
        if not (self.text or self.nsight):
            raise UserError(f"--profile: {outcome.reason}")
        return outcome

    def _link_run(self, run: Path, scratch: Path) -> None:
        """Links what a resume needs, unless the run has too few steps left: then its first steps are profiled."""
        if not (run / "settings.json").exists():
            return
        committed = CheckpointStore(run / "checkpoints").committed()
        total = json.loads((run / "settings.json").read_text())["total_steps"]
        if not committed or committed[-1][1].step + WARMUP + self.steps > total:
            return
        (scratch / "checkpoints").mkdir(parents=True)
        for path, _ in committed:
            (scratch / "checkpoints" / path.name).symlink_to(path.resolve())
        for name in (SPEC_FILE, "plan.json"):
            shutil.copy(run / name, scratch / name)

    def _loop(self, job: Job) -> Outcome:
        needed = job.start_step + WARMUP + self.steps
        if needed > job.plan.total_steps:
            raise UserError(f"--profile: needs {needed} steps, the run has {job.plan.total_steps}: raise budget.tokens")
        if self.nsight and job.engine.device.type != "cuda":
            raise UserError(f"--nsight: needs an NVIDIA GPU, and the run is on {job.engine.device.type}: omit it")
        if job.engine.device.type == "mps":
            raise UserError("--profile: torch cannot profile Apple GPUs: use parallel.device: cpu, or Instruments")
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = None if self.nsight else self.folder / "trace.json.gz"
        job.saver, job.guard.snapshots = Unsaved(job.saver.shelf, ""), None
        job.data.evaluator.parts.clear()
        job.recorder.profiler = profiler = Profiler(job.engine.device, self.steps, trace)
        while (outcome := train_loop(job)).incident:  # a vetoed step takes as long as any other
            job.start_step = outcome.step
        if trace:
            self._report(job, profiler, trace)
        return outcome

    def _report(self, job: Job, profiler: Profiler, trace: Path) -> None:
        machine, stored, plan = measure(job.engine.device), stored_ceilings(job.engine.device), job.plan
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
        profile = as_json(step_time(read_trace(trace)), facts)
        self.text = as_text(profile)
        write_atomic(self.folder / "profile.json", json.dumps(profile, indent=1))
        write_atomic(self.folder / "profile.txt", self.text)
