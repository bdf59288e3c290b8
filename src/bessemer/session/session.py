"""From a spec to a finished run: prepare the data, decide the plan, build the job, run the loop, tell the outcome."""

from __future__ import annotations

import json
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch

from bessemer.checkpoint.lineage import LINEAGE, record_lineage, repair_lineage
from bessemer.checkpoint.remote import recover
from bessemer.checkpoint.store import CheckpointStore
from bessemer.data.prepare import Prepared
from bessemer.data.stream.order import Segment
from bessemer.data.stream.user_dataset import NOT_REPLAYABLE, IterableStream
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import RankError, UserError
from bessemer.guard.replica_check import ReplicaCheck
from bessemer.guard.watchdog import StepPace, Watchdog
from bessemer.model.families.folder import keep_origin
from bessemer.observe.view import RunView
from bessemer.optim.choose import note_groups
from bessemer.parallel.world import World, join, leave_to_rank_0, set_patience
from bessemer.plan.decide import TrainPlan, decide_training, keeping
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.plan.search.layout import decide_layout
from bessemer.plan.search.replicas import check_processes, check_static_graph, note_replicas
from bessemer.run.directory import Run, RunReader, RunWriter
from bessemer.session.against_plan import AgainstPlan
from bessemer.session.build import JobParts, decide_stages, make_job, open_remote, spec_fingerprint
from bessemer.session.data import (
    DATA_FILES,
    Data,
    build_stream,
    describe_file_changes,
    explain,
    held_out_rows,
    leave_out,
    make_rows,
    offer,
    open_data,
    record_data_files,
    sizes,
)
from bessemer.session.recovery.incident import IncidentResponder
from bessemer.session.recovery.restart import HangResponse, open_again, restarted, under_launcher
from bessemer.session.restore import (
    differences,
    earlier_start,
    refill_history,
    refuse_start_over,
    restore_newest,
    set_aside,
    start_from,
    sweep,
)
from bessemer.session.start import WeightSource, choose_attention, completed, decide_shape, load_source, open_source
from bessemer.spec.load import dump_spec, load_spec
from bessemer.spec.quantity import human_bytes, human_count
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.compile import FP8, use_tf32
from bessemer.train.device import measure, pick_device, use_threads
from bessemer.train.job import Interrupt, Job, Outcome
from bessemer.train.loop import is_evaluated, train_loop
from bessemer.train.lowp.fp8 import converted
from bessemer.train.memory.fit import building, fit, out_of_memory, report_out_of_memory
from bessemer.train.memory.snapshots import MemorySnapshots, fits_snapshots
from bessemer.train.rank_report import report_rank_memory
from bessemer.train.saver import package_versions
from bessemer.train.speed import training_rate

FORMER_SPEC = "spec.yaml"


def run_folder(spec: RunSpec) -> Path:
    return Path(spec.runs) / spec.name


def summary(shape: ModelShape, plan: TrainPlan) -> str:
    """The plan in one line."""
    rows = plan.batch_rows[0][1]
    return (
        f"{human_count(shape.parameters)} parameters, vocabulary {shape.vocab:,}, {plan.total_steps:,} steps of "
        f"{rows} x {plan.context} tokens, peak lr {plan.peak_lr:g}, {plan.precision}"
    )


class Injection(Protocol):
    """Faults to be put into the job, for `bessemer chaos`."""

    def attach(self, job: Job, tokenizer: Tokenizer) -> None: ...


class Session:
    """One start of a run, in one process."""

    def __init__(
        self,
        spec: RunSpec,
        view: RunView | None = None,
        datasets: Mapping[str, Any] | None = None,
        faults: Injection | None = None,
        restart: bool = False,
    ) -> None:
        self.spec, self.datasets, self.faults = completed(spec), dict(datasets or {}), faults
        self.restart = restart and not restarted()  # a launcher's own restart continues
        self.view = view or RunView()
        self.interrupt = Interrupt()
        self.world = World()
        self.source = open_source(self.spec)

    def train(self) -> Outcome:
        """Start or continue the run. Every way out but a kill leaves its word in the events."""
        device = pick_device(self.spec.parallel)
        self.world = join(device, timedelta(seconds=self.spec.parallel.patience))
        with self.world.first_alone():
            if self.world.main:
                check_processes(self.spec, self.source.shape if self.source else None, self.world.size)
            run = open_again(run_folder(self.spec)) if self.world.main else RunReader(run_folder(self.spec))
        with run:
            try:
                with self.view.following(run):
                    return self._train_and_tell(run)
            except UserError:
                # A run that never began leaves nothing behind. A launcher that would start it again reads the refusal.
                if run.created and not under_launcher() and not any(run.metrics()):
                    run.remove()
                raise

    def _train_and_tell(self, run: RunWriter) -> Outcome:
        try:
            outcome = self._train(run)
        except UserError as error:
            run.event("refused", reason=str(error).splitlines()[0])  # the run stands as it stood
            if self.world.says_it_too(str(error)):
                leave_to_rank_0(2)
            raise error if self.world.main else RankError(f"rank {self.world.rank}: {error}") from None
        except KeyboardInterrupt:
            run.event("interrupted", reason="Ctrl-C, at once; the last checkpoint stands")
            raise
        except Exception as error:
            self.view.log(traceback.format_exc())
            run.event("failed", reason=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            raise
        run.event(outcome.kind, step=outcome.step, reason=outcome.reason)
        self.view.outcome(outcome.kind, outcome.reason, outcome.step, run)
        return outcome

    def _train(self, run: RunWriter) -> Outcome:
        world, device = self.world, self.world.device
        with world.first_alone():  # which sets aside, and fetches what lies afar
            if world.main:
                self._take_stock(run)
            former, previous = earlier_start(run)
        use_threads(self.spec.parallel)
        machine = world.agree(measure(device) if world.main else None)
        assert machine is not None
        plan = Plan()
        about = f"{machine.name}, {machine.threads} threads, {machine.source}"
        plan.add("parallel.device", device.type, about, "found")
        self.view.activity("listing the sources")
        with world.first_alone():
            if previous is not None and world.main and (files := describe_file_changes(run.folder, self.spec)):
                note = f"files differ from those of the run's last start ({files}): the data is prepared again"
                self.view.say(f"data  {note}")
                run.event("data_note", reason=note)
            prepared, shape, context = self._prepare(plan)
        for note in prepared.notes if isinstance(prepared, Prepared) else ():
            self.view.say(f"data  {note}")
            run.event("data_note", reason=note)
        if previous is None:
            machine = world.agree(self._measure_precision(machine, shape, context, device) if world.main else machine)
        layout = decide_layout(self.spec, shape, context, machine, world.size, plan)
        note_replicas(self.spec, layout, plan)
        world.lay(layout, alone=self.spec.parallel.shard.alone)
        set_patience(timedelta(seconds=self.spec.parallel.patience))
        rows = make_rows(self.spec, prepared, context)
        held_out = held_out_rows(prepared, context)
        training = decide_training(
            self.spec, shape, context, machine,
            sizes(self.spec, rows, prepared, context), sum(held.tokens for held in held_out.values()), plan, previous,
            world.layout,
        )  # fmt: skip
        explain(self.spec, rows, training, plan)
        stream = build_stream(self.spec, prepared, rows, training, [Segment(0, 0)])
        parts = JobParts(
            training,
            shape,
            stream,
            held_out,
            prepared.tokenizer,
            device,
            machine.peak(training.precision)[0] * world.size,
            world,
            decide_stages(self.spec, shape, training, world, plan),
        )
        kept = keeping(self.spec, training.weights)
        with building(kept, shape, training, device, world.layout.dp_shard):
            self.view.activity("building the model")
            job = make_job(self.spec, parts, run, self.view)
            choose_attention(job.engine, plan, previous)
        if training.precision in FP8:
            reason = "the linear layers of inner blocks; the first and last block and the head stay in bf16"
            plan.add("precision.layers", len(converted(job.engine.model)), reason, "rule")
        with use_tf32(training.precision):
            self.view.activity("measuring the memory of a step")
            peak = fit(job, plan, resumed=previous is not None)
        training = job.plan  # a probing step may have changed its mind
        check_static_graph(self.spec, world.layout, training)
        job.interrupt = self.interrupt
        if world.size > 1:
            guard = self.spec.guard
            job.guard.step_pace = StepPace(job.engine.model.blocks, device)
            job.guard.replica_check = ReplicaCheck(
                job.engine.model, world, guard.detect.weights if guard.enabled else None
            )
        note_groups(job.engine.model, job.spec, plan)
        self.view.activity("loading weights")
        with world.first_alone():
            restored = restore_newest(job, CheckpointStore(run.checkpoints, world), former)
        if restored is not None:
            refill_history(job)
        if restored is None and self.spec.start_from:
            start_from(job, Path(self.spec.start_from))
        elif restored is None and self.source is not None:
            self._load_source(job, self.source)
        if world.main:
            if damage := repair_lineage(run.folder):
                job.recorder.event("records_repaired", file=f"checkpoints/{LINEAGE}", reason=damage)
            record_lineage(
                run.folder, stream_fingerprint=stream.fingerprint, spec_fingerprint=spec_fingerprint(self.spec),
                versions=package_versions(), resumed_from=restored, started_from=self.spec.start_from,
            )  # fmt: skip
        world.wait()
        leave_out(job)
        for line in report_rank_memory(job.engine, job.recorder, plan):
            self.view.log(f"ranks  {line}")
        run.write_file(FORMER_SPEC, dump_spec(self.spec))
        run.write_file("plan.json", plan.to_json())
        run.write_file("settings.json", training.to_json())
        run.write_file("data.json", json.dumps({"folder": str(prepared.folder)}))
        if world.main:
            run.write_file(DATA_FILES, record_data_files(self.spec))
        run.write_file("model.json", json.dumps({"shape": shape.to_dict(), "eos": prepared.tokenizer.eos}, indent=1))
        if world.main:
            prepared.tokenizer.save(run.folder / "tokenizer.json")
            keep_origin(run.folder, self.spec)
        if run.lock.taken_from:
            owner = run.lock.taken_from
            job.recorder.event("lock_taken", reason=f"process {owner.pid} on {owner.host} died without its last word")
        if former and (changed := differences(former.model_dump(mode="json"), self.spec.model_dump(mode="json"))):
            job.recorder.event("spec_changed", changes=changed, versions=package_versions())
        job.recorder.event(
            "started", step=job.start_step, total_steps=training.total_steps, parameters=shape.parameters,
            device=device.type, resumed_from=restored, versions=package_versions(), machine=machine.to_json(),
        )  # fmt: skip
        if isinstance(stream, IterableStream):
            job.recorder.event("not_replayable", reason=NOT_REPLAYABLE)
        if job.engine.optimizer.fallback_reason:
            job.recorder.event("optimizer_fallback", reason=job.engine.optimizer.fallback_reason)
        offer(self.spec, job)
        self._copies(job, peak)
        if self.faults:
            self.faults.attach(job, prepared.tokenizer)
        self.view.activity("measuring a step")
        against = AgainstPlan(job, shape, machine, plan)
        self.view.expected_rate = against.expected.tokens_per_s
        self.view.planned(plan.rows(), summary(shape, training))
        if against.duration is not None:
            self.view.say(f"time  {against.duration}")
        if job.start_step >= training.total_steps and is_evaluated(job, job.start_step):
            return Outcome("finished", "the budget was spent already; raise budget.tokens to train on", job.start_step)
        with use_tf32(training.precision):
            outcome = self._loop(job)
        against.end(keep=self.faults is None)
        return outcome

    def _copies(self, job: Job, peak: int | None) -> None:
        """Recent states in memory, where there is room."""
        if job.spec.guard.copies == "off" or not job.spec.guard.enabled:
            return
        if job.spec.parallel.engine == "deepspeed":  # the plan says so
            return
        fits, needed, free = fits_snapshots(job.state(), job.engine.device, job.world, peak)
        if all(self.world.gather(fits)):
            job.guard.snapshots = MemorySnapshots()
        else:
            room = f"two copies of the state need {human_bytes(needed)}, {human_bytes(free)} are free"
            reason = f"{room}: rollbacks will read checkpoints"
            job.recorder.event("no_copies", reason=reason)

    def _take_stock(self, run: RunWriter) -> None:
        """Bring the run's checkpoints into the state that this start goes by."""

        def event(kind: str, **details: Any) -> None:
            self.view.event(run.event(kind, **details))

        remote, shelf = open_remote(self.spec, run.folder), CheckpointStore(run.checkpoints)
        if self.restart:
            set_aside(run, remote)
        sweep(run, shelf, event)
        if remote:
            recover(shelf, remote, event)
        if not any(shelf.newest_first()):
            refuse_start_over(run, shelf)

    def _measure_precision(self, machine: Machine, shape: ModelShape, context: int, device: torch.device) -> Machine:
        """On a CPU a fast bf16 product does not yet make a fast step: train two layers both ways before choosing."""
        promising = machine.matmul["bf16"] > 1.3 * machine.matmul["fp32"]
        if device.type != "cpu" or self.spec.precision != "auto" or not promising or shape.wrapped:
            return machine
        short, rows = replace(shape, layers=min(2, shape.layers)), max(1, 1024 // context)
        rates = {key: training_rate(short, context, rows, key, device, budget_s=0.3) for key in ("fp32", "bf16")}
        return replace(machine, training=rates)

    def _prepare(self, plan: Plan) -> tuple[Data, ModelShape, int]:
        spec = self.spec
        prepared = open_data(spec, plan, self.view.progress, self.datasets)
        return prepared, *decide_shape(spec, self.source, prepared.tokenizer.vocab_size, plan)

    def _load_source(self, job: Job, source: WeightSource) -> None:
        with job.engine.optimizer.opened(job.engine.model):
            added = load_source(job.engine.model, source)
        if job.engine.ema:
            job.engine.ema.restart()
        more = f"; {added} tokens more, which begin as the mean of the others" if added else ""
        job.recorder.event("started_from", checkpoint=str(source.folder.path), reason=f"{source.name} weights{more}")

    def _loop(self, job: Job) -> Outcome:
        """The loop, and what is done about each incident, until the run ends."""
        responder = IncidentResponder(job, job.saver.shelf)
        job.guard.examine = responder.examine
        hung = HangResponse(job, self.view.log)
        hang, several = job.spec.guard.detect.hang, job.world.size > 1
        with (
            self._signals(job),
            Watchdog(
                hang,
                hung.tell,
                on_end=hung.end if several else None,
                on_pause=hung.paused,
                peers=hung if several else None,
            ) as job.guard.watchdog,
        ):
            while True:
                try:
                    outcome = train_loop(job)
                except Exception as error:
                    job.saver.wait(job)  # what is being written is worth having
                    if not isinstance(error, RuntimeError) or not out_of_memory(error) or job.world.size > 1:
                        raise
                    self.view.log(traceback.format_exc())
                    return Outcome(
                        "failed",
                        report_out_of_memory(job, error),
                        job.recorder.history[-1]["step"] + 1 if job.recorder.history else 0,
                    )
                if outcome.incident is None:
                    return outcome
                job.guard.last_incident_step = outcome.incident.step
                job.guard.watchdog.beat(outcome.step, long=True)
                self.view.activity(f"looking into step {outcome.incident.step:,}")
                ended = responder.respond(outcome)
                if ended is not None:
                    job.saver.wait(job, uploads=True)
                    return ended

    @contextmanager
    def _signals(self, job: Job) -> Iterator[None]:
        """Ctrl-C, SIGTERM, SIGUSR1 (a scheduler's warning) and SIGHUP (a lost terminal) end the step at its next
        micro-batch, or finish it where that cannot be; a second Ctrl-C leaves at once. Under `nohup` SIGHUP stays
        ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, _: object) -> None:
            if self.interrupt.signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.interrupt.signal = signal.Signals(number).name
            what = "stopping at the next micro-batch" if job.engine.can_abandon_step else "finishing the step"
            self.view.say(f"{what} and saving; press Ctrl-C again to leave at once")

        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        former = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


def train(
    spec: RunSpec, view: RunView | None = None, datasets: Mapping[str, Any] | None = None, restart: bool = False
) -> Outcome:
    """Start a run, or continue it where it stopped; with `restart`, begin it again from step 0.

    `datasets` are your own, by the names of sources whose path is `python`: map-style ones (`len`, `[i]`) are as
    replayable as files, iterables only go forward. An item is a text, token ids, or a mapping with tokens and a mask.
    """
    return Session(spec, view, datasets, restart=restart).train()


def existing_run(folder: str | Path) -> tuple[Run, RunSpec]:
    """A run with the spec it was last started with."""
    run = Run.existing(folder)
    return run, load_spec(run.folder / FORMER_SPEC)
