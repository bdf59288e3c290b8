"""One start of a run, from a spec to an outcome. `Session._train` lists the steps; the other modules do the work."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from bessemer.data.chat_checks import Mistake
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import RankError, UserError
from bessemer.guard.watchdog import Watchdog
from bessemer.observe.observers import ObserverProcess
from bessemer.observe.view import RunView
from bessemer.parallel.world import World, exit_silently, join_process_group
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.plan.run_forecast import FORECAST_OF, LiveForecast
from bessemer.plan.search.layout import check_processes
from bessemer.run.control import RequestReader
from bessemer.run.directory import Run, RunReader, RunWriter
from bessemer.session.build import attach_snapshots, build_job, fit_memory
from bessemer.session.data import Data, describe_file_changes, exclude_documents, open_data, report_other_exclusions
from bessemer.session.preferences import agreement_lines, check_pair_sources, decide_sharing
from bessemer.session.record import SPEC_FILE, PlanComparison, record_start
from bessemer.session.recovery.incident import IncidentResponder
from bessemer.session.recovery.restart import HangResponse, is_relaunched, open_run, under_launcher
from bessemer.session.reference import store_reference
from bessemer.session.restore import PreviousStart, load_previous_start, prepare_checkpoints, restore
from bessemer.session.sft import check_sources, refuse_mistakes
from bessemer.session.start import (
    ResolvedRun,
    choose_layout,
    complete_spec,
    decide_adapter_kind,
    decide_shape,
    open_source,
    resolve_run,
)
from bessemer.session.tasks import attach_tasks
from bessemer.session.teacher import store_teacher
from bessemer.spec.load import load_spec
from bessemer.spec.preference import ANSWER_OBJECTIVES
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.compile import use_tf32
from bessemer.train.device import measure_machine, pick_device, use_threads
from bessemer.train.job import Interrupt, Job, Outcome
from bessemer.train.loop import is_evaluated, train_loop
from bessemer.train.memory.fit import out_of_memory, report_out_of_memory
from bessemer.train.readings import SystemReadings


def run_folder(spec: RunSpec) -> Path:
    return Path(spec.runs) / spec.name


class Injection(Protocol):
    """Faults that `bessemer chaos` puts into the job."""

    def attach(self, job: Job, tokenizer: Tokenizer) -> None: ...


class Session:
    """One start of a run, in one process."""

    adds_to_history = True  # whether its speed corrects later predictions on this machine

    def __init__(
        self,
        spec: RunSpec,
        view: RunView | None = None,
        datasets: Mapping[str, Any] | None = None,
        faults: Injection | None = None,
        restart: bool = False,
    ) -> None:
        self.spec, self.datasets, self.faults = complete_spec(spec), dict(datasets or {}), faults
        self.restart = restart and not is_relaunched()  # a relaunch by torchrun continues the run
        self.view = view or RunView()
        self.view.objective = self.spec.objective
        self.interrupt = Interrupt()
        self.world = World()
        self.source = open_source(self.spec)
        self.observers: ObserverProcess | None = None  # trials and measurements have none

    def train(self) -> Outcome:
        """Starts or continues the run. Every end but a kill is recorded as an event."""
        device = pick_device(self.spec.parallel)
        self.world = join_process_group(device, timedelta(seconds=self.spec.parallel.patience))
        with self.world.main_process_first():
            if self.world.main:
                check_processes(self.spec, self.source.shape if self.source else None, self.world.size)
            self.observers = observers = ObserverProcess(self.spec, self.world.main, self.view.say)
            run = open_run(run_folder(self.spec)) if self.world.main else RunReader(run_folder(self.spec))
        with observers, run:
            try:
                with self.view.following(run):
                    return self._train_and_record_end(run)
            except UserError:
                # A run that never started leaves nothing behind. A launcher that would relaunch it reads the refusal.
                if run.created and not under_launcher() and not any(run.metrics()):
                    run.remove()
                raise

    def _train_and_record_end(self, run: RunWriter) -> Outcome:
        try:
            outcome = self._train(run)
        except UserError as error:
            run.event("refused", reason=str(error).splitlines()[0])  # the run is unchanged
            raise self._error_of_rank(error) from None
        except KeyboardInterrupt:
            run.event("interrupted", reason="Ctrl-C twice: stopped at once; the last checkpoint is intact")
            raise
        except Exception as error:
            self.view.log(traceback.format_exc())
            run.event("failed", reason=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            raise
        run.event(outcome.kind, step=outcome.step, reason=outcome.reason)
        self.view.outcome(outcome.kind, outcome.reason, outcome.step, run)
        return outcome

    def _error_of_rank(self, error: UserError) -> UserError:
        """The error as this rank raises it. Ends this process if rank 0 prints the same error for all."""
        if self.world.rank_0_reports_same_error(str(error)):
            exit_silently(2)
        return error if self.world.main else RankError(f"rank {self.world.rank}: {error}")

    def _train(self, run: RunWriter) -> Outcome:
        """The steps of a start, in order."""
        plan, world = Plan(), self.world
        previous = self._open_checkpoints(run)
        machine = self._measure_machine(plan)
        data, shape, context = self._open_data(run, plan, previous)
        self.spec = decide_adapter_kind(self.spec, shape, context, machine, plan, previous.plan, world.size)
        self.spec = decide_sharing(self.spec, shape, data, plan)
        machine = choose_layout(self.spec, world, shape, context, machine, plan, previous.plan)
        resolved = resolve_run(self.spec, data, shape, context, machine, plan, previous.plan, world.layout)
        store_reference(self.spec, resolved, world, self.view, run.folder, previous.plan)
        store_teacher(self.spec, resolved, world, self.view.progress)
        job = build_job(self.spec, resolved, machine, world, run, self.view, previous.plan)
        job.interrupt = self.interrupt
        peak_bytes = fit_memory(job, plan, resumed=previous.plan is not None)
        self.view.activity("loading weights")
        restored = restore(job, self.spec, previous, self.source, resolved.others)
        exclude_documents(job)
        record_start(job, self.spec, resolved, machine, previous, restored, self.view.log)
        if self.observers:
            self.observers.start(run.folder)
        attach_tasks(job, self.spec, data.tokenizer, run.folder)
        report_other_exclusions(self.spec, job)
        attach_snapshots(job, peak_bytes)
        if self.faults:
            self.faults.attach(job, data.tokenizer)
        comparison = self._expect(job, resolved, machine)
        if job.start_step >= job.plan.total_steps and is_evaluated(job, job.start_step):
            key = next((key for key in ("steps", "epochs") if getattr(self.spec.budget, key) is not None), "tokens")
            return Outcome("finished", f"the budget was spent already; raise budget.{key} to train on", job.start_step)
        with use_tf32(job.plan.precision):
            outcome = self._loop(job)
        comparison.record(keep=self.faults is None and self.adds_to_history)
        return outcome

    def _open_checkpoints(self, run: RunWriter) -> PreviousStart:
        """Spec and plan of the checkpoint to continue from, after repairs and downloads."""

        def event(kind: str, **details: Any) -> None:
            self.view.event(run.event(kind, **details))

        with self.world.main_process_first():
            if self.world.main:
                prepare_checkpoints(self.spec, run, self.restart, event)
            return load_previous_start(run)

    def _measure_machine(self, plan: Plan) -> Machine:
        use_threads(self.spec.parallel)
        machine = self.world.agree(measure_machine(self.world.device) if self.world.main else None)
        assert machine is not None
        reason = f"{machine.name}, {machine.threads} threads, {machine.source}"
        plan.add("parallel.device", self.world.device.type, reason, "found")
        return machine

    def _open_data(self, run: RunWriter, plan: Plan, previous: PreviousStart) -> tuple[Data, ModelShape, int]:
        """The data, and the model shape and context that it leads to."""
        self.view.activity("listing the sources")
        with self.world.main_process_first():
            resumed = previous.plan is not None and self.world.main
            if resumed and (files := describe_file_changes(run.folder, self.spec)):
                note = f"files differ from those of the run's last start ({files}): the data is prepared again"
                self._note_data(run, note)
            data, shape, context = self._prepare(plan)
        for note in getattr(data, "notes", ()):
            self._note_data(run, note)
        if self.spec.objective in ("sft", *ANSWER_OBJECTIVES) and previous.plan is None:
            self._check_rows(run, data, context)
        return data, shape, context

    def _check_rows(self, run: RunWriter, data: Data, context: int) -> None:
        """Refuses a new run whose rows make it worthless, and notes lesser mistakes."""
        self.view.activity("checking the rows")
        mistakes: dict[str, list[Mistake]] = {}
        with self.world.main_process_first():
            if self.world.main:
                check = check_pair_sources if self.spec.objective in ANSWER_OBJECTIVES else check_sources
                mistakes = check(self.spec, data, context)
                for note in agreement_lines(self.spec):
                    self._note_data(run, note)
        for line in refuse_mistakes(self.world.agree(mistakes)):
            self._note_data(run, f"warning: {line}")

    def _prepare(self, plan: Plan) -> tuple[Data, ModelShape, int]:
        data = open_data(self.spec, plan, self.view.progress, self.datasets)
        return data, *decide_shape(self.spec, self.source, data.tokenizer.vocab_size, plan)

    def _note_data(self, run: RunWriter, note: str) -> None:
        self.view.say(f"data  {note}")
        run.event("data_note", reason=note)

    def _expect(self, job: Job, resolved: ResolvedRun, machine: Machine) -> PlanComparison:
        """Predicts speed and memory, and shows the plan."""
        self.view.activity("measuring a step")
        comparison = PlanComparison(job, resolved.shape, machine, resolved.plan)
        self.view.expected_rate = comparison.expected.tokens_per_s
        self.view.planned(resolved.plan.rows(), resolved.summary(job.plan))
        if comparison.duration is not None:
            self.view.say(f"time  {comparison.duration}")
        return comparison

    def _loop(self, job: Job) -> Outcome:
        """Runs the training loop, and responds to incidents, until the run ends."""
        responder = IncidentResponder(job, job.saver.store)
        job.guard.examine = responder.examine
        job.recorder.requests = RequestReader(job.recorder.run.folder) if job.world.main else None
        if job.world.main and self.spec.objective in FORECAST_OF:
            self.view.forecaster = LiveForecast(job.recorder.run, job.engine.schedule, job.plan.total_steps).add
        hangs = HangResponse(job, self.view.log)
        several = job.world.size > 1
        watchdog = Watchdog(
            job.spec.guard.detect.hang, hangs.report, on_end=hangs.end_process if several else None,
            on_pause=hangs.report_pause, peers=hangs if several else None,
        )  # fmt: skip
        readings = SystemReadings(job.recorder, job.engine.device, job.guard.detectors.hosts, job.world.main)
        with self._signals(job), watchdog as job.guard.watchdog, readings as job.recorder.readings:
            while True:
                try:
                    outcome = train_loop(job)
                except Exception as error:
                    job.saver.wait(job)  # let a save in flight finish
                    if not isinstance(error, RuntimeError) or not out_of_memory(error) or several:
                        raise
                    self.view.log(traceback.format_exc())
                    done = job.recorder.history[-1]["step"] + 1 if job.recorder.history else 0
                    return Outcome("failed", report_out_of_memory(job, error), done)
                if outcome.incident is None:
                    return outcome
                job.guard.last_incident_step = outcome.incident.step
                watchdog.beat(outcome.step, long=True)
                self.view.activity(f"looking into step {outcome.incident.step:,}")
                if (end := responder.respond(outcome)) is not None:
                    job.saver.wait(job, uploads=True)
                    return end

    @contextmanager
    def _signals(self, job: Job) -> Iterator[None]:
        """Ctrl-C, SIGTERM, SIGUSR1 (a scheduler's warning) and SIGHUP (a lost terminal) end the step at its next
        micro-batch, or after it if it cannot be abandoned; a second Ctrl-C stops at once. Under `nohup` SIGHUP stays
        ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, _: object) -> None:
            if self.interrupt.signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.interrupt.signal = signal.Signals(number).name
            action = "stopping at the next micro-batch" if job.engine.can_abandon_step else "finishing the step"
            self.view.say(f"{action} and saving; press Ctrl-C again to stop at once")

        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        handlers = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def train(
    spec: RunSpec, view: RunView | None = None, datasets: Mapping[str, Any] | None = None, restart: bool = False
) -> Outcome:
    """Starts a run, or continues it from its last checkpoint; with `restart`, begins again at step 0.

    `datasets` are your own, by the names of sources whose path is `python`: map-style ones (`len`, `[i]`) are as
    replayable as files, iterables only go forward. An item is a text, token ids, or a mapping with tokens and a mask.
    """
    return Session(spec, view, datasets, restart=restart).train()


def existing_run(folder: str | Path) -> tuple[Run, RunSpec]:
    """A run with the spec of its last start."""
    run = Run.existing(folder)
    return run, load_spec(run.folder / SPEC_FILE)
