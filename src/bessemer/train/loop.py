"""The training loop. For each step: take the micro-batches, sum losses, backward, judge, update; then evaluate or save.

The host reads the numbers of a step while the next one's forward and backward passes run, so that a GPU never waits for
Python, and before the next update: at an incident the weights are those that the step was judged with. A step number
counts attempts, from 0: data position and schedule advance on a veto, the optimizer's count does not.
"""

from __future__ import annotations

import bisect
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from bessemer.data.stream.batches import Prefetch
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.guard.alignment import ALIGNMENT_ALARMS
from bessemer.plan.forecast import forecast
from bessemer.plan.run_forecast import accepted
from bessemer.run.control import ControlRequest
from bessemer.run.journal import last_record
from bessemer.train.alignment import end_alignment_run, keep_healthy_checkpoint
from bessemer.train.control import NUMBERS, from_numbers, next_request, obey, to_numbers
from bessemer.train.device import memory_in_use, synchronize
from bessemer.train.forgetting import check_watched_sources, end_forgetting_run, judge_forgetting, rises
from bessemer.train.job import Abandoned, Incident, Job, Outcome
from bessemer.train.profile import RequestedProfiler
from bessemer.train.rank_report import by_rank, in_own_slot
from bessemer.train.readings import RANK_READINGS
from bessemer.train.step import StepResult, attempt_step, judge_and_update, record_alarm, report_step

DISK_FULL = "full disk"  # in place of a signal's name
SIGNALS = (DISK_FULL, "SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")  # that end a run; the first of several is the reason
FREQUENT_SAVES = 4  # times as many saves after an incident


def train_loop(job: Job) -> Outcome:
    """Train until the budget, a stopping rule, a signal, an incident or a fault. The state is saved in each case but an
    incident, after which the caller repairs the job and calls again."""
    try:
        outcome = TrainLoop(job).run()
    except BaseException:
        if job.rollouts:
            job.rollouts.stop()
        raise
    if job.rollouts and outcome.kind != "incident":
        job.rollouts.stop()
    if isinstance(job.recorder.profiler, RequestedProfiler) and outcome.kind != "incident":
        job.recorder.profiler.abandon()
    return outcome


@dataclass(frozen=True)
class Due:
    """What is due after a step, and in the next one. All ranks must agree where time decides."""

    sample_layers: bool = False
    snapshot: bool = False
    leave: bool = False
    evaluate: bool = False
    save: bool = False
    signal: str | None = None  # that ends the run; read once a step, since it may arrive at any moment
    request: ControlRequest | None = None  # from outside


class TrainLoop:
    """One call of the loop: the step whose numbers are not read yet, the last validation, and what is due."""

    def __init__(self, job: Job) -> None:
        plan = job.plan
        self.job, self.total = job, plan.total_steps
        self.evaluations, self.saves = job.clock("evaluate", plan.evaluate), job.clock("save", plan.save)
        self.samples, self.snapshots = job.clock("look", plan.look), job.clock("copy", plan.copy)
        self.changes = known_changes(job)
        self.pending: StepResult | None = None
        self.validation: dict[str, Any] | None = None
        self.due = Due()

    def run(self) -> Outcome:
        job, world = self.job, self.job.world
        self.start()
        pin = job.engine.device.type == "cuda"
        stream, workers = job.data.stream, job.spec.data.workers
        depth = 0 if job.rollouts or not workers else max(2, workers)  # the next round of rollouts is not made yet
        threads = 1 if isinstance(stream, IterableStream) else max(1, workers)  # an iterable has an order
        with Prefetch(stream, job.plan.micro_rows, world.dp_rank, world.layout.dp, depth, threads, pin) as prefetch:
            for step in range(job.start_step, self.total):
                if outcome := self.run_step(step, prefetch):
                    return outcome
                if outcome := self.finish_step(step):
                    return outcome
        return self.finish_after_incident()

    def start(self) -> None:
        """Everything before the first step of this call, including an evaluation that is still missing."""
        job, guard, first = self.job, self.job.guard, self.job.start_step
        check_watched_sources(job.spec.guard, job.data.evaluator)  # refused now rather than at the first evaluation
        if first == 0 and job.data.evaluator.available and not job.recorder.progress.first_validation:
            self.validation = validate(job, 0)
        elif 0 < first < self.total and self.evaluations.due_by_steps(first) and not is_evaluated(job, first):
            self.validation = validate(job, first)  # a signal or an incident came before it
        guard.judge.set_rows(job.data.stream.steps.rows(first))
        if guard.replica_check:
            guard.replica_check.start(first)
        job.engine.model.train()
        agree = job.world.agree
        self.due = Due(agree(self.samples.both_due(first)), agree(self.snapshots.due(first)))

    def run_step(self, step: int, prefetch: Prefetch) -> Outcome | None:
        """Compute, judge and update one step; an outcome if the loop ends in it."""
        job, guard, optimizer = self.job, self.job.guard, self.job.engine.optimizer
        guard.phase_tracker.begin_step(step)
        if job.rollouts and job.rollouts.begins_round(job, step) and (outcome := self.begin_round(step)):
            return outcome
        began_s = time.perf_counter()
        with job.span("data"):
            batches = prefetch.get(step)
        if self.due.snapshot:
            self.snapshots.reset()
        # Nothing is updated before the verdict on the previous step is read: after the backward pass, or before it at
        # the price of a wait where the backward pass itself updates.
        if not optimizer.rejects_before_update and (incident := self.settle(step)):
            return self.stop_at(incident, step)
        optimizer.prepare_backward(job.lr(step))  # for updates inside the backward pass
        try:
            with guard.step_pace.measuring(step) if guard.step_pace else nullcontext():
                result = attempt_step(job, step, batches, prefetch.wait_s)
        except Abandoned:
            return self.abandon(step)
        if isinstance(result, str):
            return self.out_of_memory(step, result)
        if optimizer.rejects_before_update and (incident := self.settle(step)):
            job.engine.discard_gradients()
            return self.stop_at(incident, step)
        sample_layers = (
            self.due.sample_layers and job.spec.guard.enabled and optimizer.rejects_before_update and optimizer.whole
        )
        if sample_layers:
            self.samples.reset()
        with job.span("judge"):
            judge_and_update(job, result, sample_layers)
        result.step_s = time.perf_counter() - began_s
        self.pending = result
        self.check_after_update(step)
        return None

    def begin_round(self, step: int) -> Outcome | None:
        """Sample the answers that the next steps train on. Nothing may be pending: an incident changes the weights."""
        job = self.job
        assert job.rollouts is not None
        if self.pending and (incident := report_step(job, self.pending)):
            return self.stop_at(incident, step)
        self.pending = None
        try:
            with job.span("rollouts"):
                reason = job.rollouts.begin_round(job, step)
        except Abandoned:
            return self.abandon(step)
        return self.leave(step, reason, save(job, step, None), None) if reason else None

    def settle(self, step: int) -> Incident | None:
        """Before the update of a step: read and record the previous one, which may be an incident; take a snapshot."""
        job, guard = self.job, self.job.guard
        with job.span("report"):
            incident = report_step(job, self.pending) if self.pending else None
        if incident:
            return incident
        if step in self.changes:
            guard.judge.reopen()
            guard.judge.set_rows(job.data.stream.steps.rows(step))
            guard.detectors.reopen(self.changes[step])
            job.recorder.event("guard_reopened", step=step, reason=self.changes[step])
        if guard.snapshots and self.due.snapshot:
            guard.snapshots.take(job, step)
        return None

    def check_after_update(self, step: int) -> None:
        """Checks and background work that belong to every step."""
        job, guard, done = self.job, self.job.guard, step + 1
        if guard.step_pace:
            guard.step_pace.end(step, guard.phase_tracker)
        if guard.replica_check and guard.replica_check.due(done):
            guard.replica_check.start_digest(step)
        job.saver.poll(job)
        job.saver.confirm(job, done)
        if job.recorder.profiler:
            job.recorder.profiler.step(job.interrupt)

    def finish_step(self, step: int) -> Outcome | None:
        """Most steps end here without more. At a boundary: evaluate, save, perhaps leave."""
        job, guard, result, done = self.job, self.job.guard, self.pending, step + 1
        assert result is not None
        available, hurry = job.data.evaluator.available, FREQUENT_SAVES if done < guard.frequent_saves_until else 1
        local = Due(
            self.samples.both_due(done), self.snapshots.due(done), done == self.total or out_of_time(job, result),
            available and self.evaluations.due(done), self.saves.due(done, hurry, job.saver.interval_s(job)),
        )  # fmt: skip
        due = self.due = agree(job, result, local)
        evaluating = available and (due.leave or due.evaluate) and not due.signal
        boundary = due.leave or evaluating or due.save or bool(due.signal or due.request)
        if guard.watchdog:
            guard.watchdog.beat(step, long=boundary)
        if not boundary:
            return None
        waited_s = time.perf_counter()
        synchronize(job.engine.device)  # nothing may be in flight, and the wait belongs to the step
        result.step_s += job.world.agree(time.perf_counter() - waited_s)
        self.pending = None
        if guard.replica_check and (due.save or due.request):  # no state is saved that differs between replicas
            guard.replica_check.start_digest(step)
        if incident := report_step(job, result):
            if due.request and job.recorder.requests:
                job.recorder.requests.put_back(due.request)
            return self.stop_at(incident, done)
        if due.request and due.request.action == "rollback":
            return self.roll_back_by_request(due.request, done)
        if due.request:
            due = self.due = obey(job, due, due.request, done)
            evaluating = available and (due.leave or due.evaluate) and not due.signal
        return self.evaluate_and_save(done, evaluating)

    def roll_back_by_request(self, request: ControlRequest, done: int) -> Outcome:
        """An incident that nothing is wrong with: the caller rolls back and calls again."""
        record = self.job.recorder.history[-1]
        return self.stop_at(Incident(done, "rollback requested", "request", record, {}, [], request=request), done)

    def evaluate_and_save(self, done: int, evaluating: bool) -> Outcome | None:
        job, due = self.job, self.due
        if evaluating:
            self.validation = validate(job, done)
            evaluating = self.validation is not None
            self.evaluations.reset()
            if outcome := self.check_held_out():
                return outcome
        reason = stop_reason(job, self.validation if evaluating else None)
        reason = reason or (forecast_reason(job) if evaluating and done < self.total else None)
        new_best = evaluating and job.spec.checkpoint.keep_best and job.recorder.progress.evaluations_since_best == 0
        leaving = due.leave or bool(reason) or bool(due.signal)
        if not (leaving or new_best or due.save):
            return None
        saved = save(job, done, self.validation["loss"] if evaluating and self.validation else None)
        self.saves.reset()
        return self.leave(done, reason, saved, due.signal) if leaving else None

    def finish_after_incident(self) -> Outcome:
        """The last step was an incident that was dealt with: evaluate, save and leave."""
        job = self.job
        signal = next((name for name in job.world.gather(job.interrupt.signal) if name), None)
        self.validation = validate(job, self.total) if job.data.evaluator.available and not signal else None
        if outcome := self.check_held_out():
            return outcome
        saved = save(job, self.total, self.validation["loss"] if self.validation else None)
        return self.leave(self.total, None, saved, signal)

    def check_held_out(self) -> Outcome | None:
        """After an evaluation: how the run ends if it forgets what it began with, or if its held-out score falls."""
        job, validation = self.job, self.validation
        if validation and (urgent := job.guard.held_out_alarm):
            job.guard.held_out_alarm = None
            return end_alignment_run(job, urgent, validation["step"], validation)
        keep_healthy_checkpoint(job)
        alarm = judge_forgetting(job, validation["step"], self.changes) if validation else None
        if validation is None or alarm is None:
            return None
        record_alarm(job.recorder, alarm)
        return end_forgetting_run(job, alarm, validation)

    def stop_at(self, incident: Incident, step: int) -> Outcome:
        return Outcome("incident", incident.symptom, step, self.validation, incident)

    def out_of_memory(self, step: int, reason: str) -> Outcome:
        """The next step does not fit. The state is intact, unless the backward pass has updated some of it."""
        job, judged_first = self.job, self.job.engine.optimizer.rejects_before_update
        if judged_first and self.pending and (incident := report_step(job, self.pending)):
            return self.stop_at(incident, step)
        saved = step == job.start_step  # nothing to save, and the next start plans again
        if not saved and judged_first:
            saved = job.saver.save(job, step, None) is not None and job.saver.wait(job, uploads=True)
        return Outcome("failed", reason if saved else f"{reason}; the last checkpoint stands", step, self.validation)

    def abandon(self, step: int) -> Outcome:
        """A signal came in the middle of a step: save the state before it. The next start repeats the step."""
        self.job.engine.release_memory()
        if self.pending and (incident := report_step(self.job, self.pending)):
            return self.stop_at(incident, step)
        return self.leave(step, None, save(self.job, step, None), self.job.interrupt.signal)

    def leave(self, done: int, reason: str | None, saved: bool, signal: str | None) -> Outcome:
        """How the run ends after its last save."""
        job, run, validation = self.job, self.job.recorder.run, self.validation
        job.recorder.view.activity("waiting until everything is written and uploaded")
        if not (saved and job.saver.wait(job, uploads=True)):
            cause = f" ({run.unwritten})" if run.unwritten else ""
            fault = f"the last state could not be saved{cause}; make room and start again from the checkpoint before"
            return Outcome("failed", fault, done, validation)
        unfinished = signal is not None and not is_evaluated(job, done)  # the next start evaluates the last state
        if done == self.total and not unfinished:
            return Outcome("finished", "the budget is spent", done, validation)
        if reason:
            return Outcome("finished", reason, done, validation)
        if signal == DISK_FULL:
            return Outcome("failed", "the disk was full; the state is saved now: start again", done, validation)
        return Outcome("interrupted", signal or "", done, validation)


def agree(job: Job, result: StepResult, due: Due) -> Due:
    """What is due for one rank is due for all, a signal too. Time and memory are rank 0's, since alarms depend on them.
    One message between the hosts, while the devices compute."""
    world, engine, pace = job.world, job.engine, job.guard.step_pace
    result.memory_bytes, result.clocks = memory_in_use(engine.device), (time.time(), time.monotonic())
    if job.recorder.disk_full and job.interrupt.signal is None:
        job.interrupt.signal = DISK_FULL
    signal = job.interrupt.signal
    request = next_request(job)
    if world.size == 1:
        return replace(due, signal=signal, request=request)
    job.guard.phase_tracker.enter_phase("agree")
    flags = [due.sample_layers, due.snapshot, due.leave, due.evaluate, due.save, signal is not None]
    flags += [signal == name for name in SIGNALS]
    of_main = [result.step_s, result.wait_s, result.memory_bytes, *result.clocks]
    stats: list[float] = []
    if pace and pace.due(result.step):  # every few steps each rank's own times
        bubble_s = max(0.0, result.step_s - engine.pipeline.pipeline.busy_s) if engine.pipeline else 0.0
        readings = job.recorder.readings.of_rank() if job.recorder.readings else [math.nan] * len(RANK_READINGS)
        stats = in_own_slot(world, [pace.read_own_s(), result.wait_s, result.memory_bytes, bubble_s, *readings])
    own_read = result.read * world.layout.dp / world.size  # ranks that share rows have read the same
    numbers = [own_read, *(number if world.main else 0.0 for number in of_main)]
    sums = world.sums([*stats, *map(float, flags), *numbers, *to_numbers(request)])
    request, sums = from_numbers(sums[-NUMBERS:], request), sums[:-NUMBERS]
    if stats:
        result.rank_stats, sums = by_rank(sums[: len(stats)]), sums[len(stats) :]
    sample, snapshot, leave, evaluate, saving, signalled, *by_name = (count > 0 for count in sums[: len(flags)])
    if signalled:  # the same for all, so that all leave with the same exit code
        signal = next((name for name, received in zip(SIGNALS, by_name, strict=True) if received), signal)
    else:  # it arrived after the message was sent: the next step's
        signal = None
    result.read, result.step_s, result.wait_s, memory_bytes, wall_s, monotonic_s = sums[len(flags) :]
    result.memory_bytes, result.clocks = int(memory_bytes), (wall_s, monotonic_s)
    return Due(sample, snapshot, leave, evaluate, saving, signal, request)


def save(job: Job, done: int, validation_loss: float | None) -> bool:
    """A checkpoint after `done` steps; False if the disk refused."""
    if job.rollouts:
        job.rollouts.settle(job)
    job.guard.phase_tracker.enter_phase("save")
    job.recorder.view.activity(f"saving after step {done:,}")
    return job.saver.save(job, done, validation_loss) is not None


def validate(job: Job, done: int) -> dict[str, Any] | None:
    """Evaluate after `done` steps and record it; None if a signal interrupted it."""
    engine, recorder, progress = job.engine, job.recorder, job.recorder.progress

    def on_batch(passes: int, total: int) -> None:
        recorder.view.activity(f"evaluating after step {done:,}", passes, total)
        job.check_interrupt()

    began_s = time.perf_counter()
    job.guard.phase_tracker.enter_phase("evaluate")
    job.data.evaluator.begin(done)
    try:
        with engine.ema.swap() if engine.ema else nullcontext():
            result = job.data.evaluator.evaluate(engine.model, engine.objective, engine.pipeline, on_batch)
            scores = job.data.tasks.score(job, done) if job.data.tasks else {}
    except Abandoned:
        return None
    record = {
        "step": done,
        "loss": result.loss,
        **result.metrics,
        "tokens": result.tokens,
        "per_source": result.per_source,
        "seconds": round(time.perf_counter() - began_s, 3),
    }
    if scores:
        record["tasks"] = scores
    progress.last_score = job.guard.detectors.alignment.score(record)
    score = [progress.last_score, result.loss]
    if progress.best_score is None or score < progress.best_score:
        progress.best_score, progress.best_validation, progress.evaluations_since_best = score, result.loss, 0
    else:
        progress.evaluations_since_best += 1
    if done == 0:
        progress.first_validation = dict(result.per_source)
    if rise := rises(job, record):
        record["rise"] = rise
    recorder.run.validation(record)
    recorder.view.validation(record)
    for alarm in job.guard.detectors.validation(record) if job.spec.guard.enabled else ():
        record_alarm(recorder, alarm)
        if alarm.kind in ALIGNMENT_ALARMS and alarm.severity in ("stop", "rollback"):
            job.guard.held_out_alarm = alarm
    return record


def is_evaluated(job: Job, done: int) -> bool:
    """Whether there is nothing to evaluate after `done` steps: no held-out data, or a recorded evaluation."""
    last = last_record(job.recorder.run.validation_path)
    return not job.data.evaluator.available or job.world.agree(last is not None and last["step"] >= done)


def out_of_time(job: Job, result: StepResult) -> bool:
    limit_s = job.spec.budget.stop.time
    return limit_s is not None and job.recorder.progress.elapsed_s + result.step_s >= limit_s


def stop_reason(job: Job, validation: dict[str, Any] | None) -> str | None:
    """The rule of the spec that ends the run as finished, or None."""
    stop, progress = job.spec.budget.stop, job.recorder.progress
    if stop.time is not None and progress.elapsed_s >= stop.time:
        return f"budget.stop.time: {progress.elapsed_s:.0f} s trained"
    if validation is None:
        return None
    if stop.validation_loss is not None and validation["loss"] <= stop.validation_loss:
        return f"budget.stop.validation_loss: {validation['loss']:.4f} reached {stop.validation_loss}"
    if stop.patience is not None and progress.evaluations_since_best >= stop.patience:
        return f"budget.stop.patience: {stop.patience} evaluations without a new best ({progress.best_validation:.4f})"
    return None


def forecast_reason(job: Job) -> str | None:
    """The same by the forecast of the final loss, from all recorded steps."""
    limit, schedule, total = job.spec.budget.stop.forecast, job.engine.schedule, job.plan.total_steps
    if limit is None:
        return None
    reason = None
    if job.world.main:
        result = forecast(accepted(job.recorder.run.metrics()), schedule.lr, total, schedule.warmup)
        if result is not None and result.low > limit:
            reason = f"budget.stop.forecast: the final loss is forecast at {result.text()}, above {limit:g}"
    return job.world.agree(reason)


def known_changes(job: Job) -> dict[int, str]:
    """Steps before which the guard's window is reopened, because the rate, the data or the batch size changes there."""
    stream = job.data.stream
    changes = job.engine.schedule.changes() | job.guard.changes
    changes |= {phase.from_step: "the batch size changes" for phase in stream.steps.batch_phases[1:]}
    for phase in stream.order.phases[1:]:
        steps = range(job.plan.total_steps)
        first = bisect.bisect_right(steps, phase.start, key=lambda step: stream.steps.range(step)[1])
        changes[first] = "the data mixture changes"
    return changes
