"""The loop. Read it top to bottom: take the micro-batches of a step, sum losses, backward, judge, step, log, save.

Numbers of a step are read on the host when the next one's forward and backward are under way, so that a GPU never waits
for Python, and before the next one's update: at an incident the weights are those that the step was judged with. A
step's number counts attempts, from 0: data position and schedule advance on a veto, the optimizer's count does not.
"""

from __future__ import annotations

import bisect
import math
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from bessemer.data.stream.prefetch import Prefetch
from bessemer.guard.detect.alarm import Alarm
from bessemer.guard.judge import ACCEPT, REASONS, Verdict
from bessemer.run.journal import last_record
from bessemer.train.device import memory_in_use, synchronize
from bessemer.train.forgetting import end_of, judge_forgetting, rises, watched
from bessemer.train.job import Abandoned, Clock, Incident, Job, Outcome
from bessemer.train.lowp.loss_scale import OVERFLOW
from bessemer.train.memory.fit import release
from bessemer.train.profile import span
from bessemer.train.rank_report import Found, balance, by_document, by_rank, in_own_place, rank_record, ranked
from bessemer.train.step import StepResult, attempt_step, judge_and_update

FULL_DISK = "full disk"  # in the place of a signal's name
# That end a run; of several the first one here is its reason.
SIGNALS = (FULL_DISK, "SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
CAREFUL = 4  # times as many saves after an incident


def out_of_room(
    job: Job, step: int, pending: StepResult | None, validation: dict[str, Any] | None, fault: str
) -> Outcome:
    """The end of a run whose next step does not fit. Its state is whole, unless updates were part of the passes."""
    if pending and (incident := report_step(job, pending)):
        return Outcome("incident", incident.symptom, step, validation, incident)
    kept = step == job.start_step  # nothing to save, and the next start plans anew
    if not kept and job.optimizer.judged_first:
        kept = job.saver.save(job, step, None) is not None and job.saver.wait(job, uploads=True)
    return Outcome("failed", fault if kept else f"{fault}; the last checkpoint stands", step, validation)


def abandon(job: Job, step: int, pending: StepResult | None, validation: dict[str, Any] | None) -> Outcome:
    """The end of a run that was told to leave in the middle of a step: its state is saved as it was before the step,
    which the next start computes from its beginning."""
    release(job)
    if pending and (incident := report_step(job, pending)):
        return Outcome("incident", incident.symptom, step, validation, incident)
    return leave(job, step, validation, None, save(job, step, None), job.interrupt.signal)


def save(job: Job, done: int, validation_loss: float | None) -> bool:
    """A checkpoint after `done` steps; False if the disk refused."""
    job.where.enter("save")
    job.view.activity(f"saving after step {done:,}")
    return job.saver.save(job, done, validation_loss) is not None


def report_step(job: Job, attempt: StepResult) -> Incident | None:
    """Read a step's numbers, write them down; an incident if the run must not simply go on."""
    assert attempt.sent is not None
    loss, norm, correct, *judged = attempt.sent.read()
    scale = judged.pop() if attempt.scaled else None
    verdict = Verdict.named(judged) if judged else {}
    code = int(verdict.get("code", ACCEPT))
    withheld = OVERFLOW if scale is not None and not math.isfinite(norm) else None
    if withheld and math.isfinite(loss):  # this is how the scale is found: nothing for the ladder, nor a look's alarms
        code, attempt.look = ACCEPT, None
    first = job.optimizer.judged_first
    clipped, vetoed = first and math.isfinite(norm) and norm > attempt.clip, first and code != ACCEPT
    progress = job.progress
    progress.tokens += attempt.tokens
    progress.elapsed_s += attempt.step_s
    progress.vetoes += vetoed
    progress.clipped += clipped
    record: dict[str, Any] = {
        "step": attempt.step, "loss": loss, "accuracy": round(correct / max(1, attempt.tokens), 5), "grad_norm": norm,
        "lr": attempt.lr, "clip": attempt.clip, "clipped": clipped, "veto": REASONS[code] if vetoed else withheld,
        "tokens": progress.tokens,
        "tokens_per_s": round(attempt.tokens / attempt.step_s, 1),
        "mfu": round(attempt.tokens * job.flops_per_token / attempt.step_s / job.peak_flops, 4),
        "step_s": round(attempt.step_s, 5), "data_wait_s": round(attempt.wait_s, 5),
        "memory_bytes": attempt.memory_bytes,
    }  # fmt: skip
    if scale is not None:
        record["loss_scale"] = scale
    if attempt.rank_step_s:
        record["rank_step_s"] = attempt.rank_step_s
    if attempt.ranks:
        record["balance"] = balance(attempt.ranks["own_s"])
        if job.pipeline:
            idle = attempt.ranks["bubble_s"]
            record["bubble"] = round(sum(idle) / len(idle) / attempt.step_s, 4)
        job.run.rank_numbers(rank_record(attempt.step, attempt.ranks))
    job.run.step(record)
    tell_unwritten(job)
    job.view.step(record)
    job.history.append(record)
    job.recovering = [watched for watched in job.recovering if not watched.step(record)]
    statistics = {key: round(value, 4) for key, value in verdict.items() if key not in ("code", "reopened", "suspect")}
    if code != ACCEPT:
        job.event(
            "veto" if vetoed else "judged_late",
            step=attempt.step, reason=REASONS[code] if vetoed else f"{REASONS[code]}, after its update",
            loss=loss, grad_norm=norm, statistics=statistics,
            documents=ranked(job.world.gather(_own_documents(job, attempt))),
        )  # fmt: skip
    if verdict.get("reopened"):
        reason = f"{job.spec.guard.max_vetoes} vetoes in a row: taken for a lasting change, the window starts anew"
        job.event("guard_reopened", step=attempt.step, loss=loss, reason=reason)
    if verdict.get("gave_way"):
        share = job.spec.guard.veto_share
        reason = f"{share:.0%} of the last {job.spec.guard.window} steps were vetoed: such steps belong to the data"
        job.event("guard_gave_way", step=attempt.step, loss=loss, reason=reason)
    alarms = raise_alarms(job, attempt, record) if job.spec.guard.enabled else []
    urgent = next((alarm for alarm in alarms if alarm.severity in ("rollback", "stop")), None)
    if vetoed or urgent:
        return Incident(
            attempt.step, REASONS[code] if vetoed or not urgent else urgent.finding.symptom,
            urgent.severity if urgent else "veto", record, statistics, attempt.batches, urgent,
        )  # fmt: skip
    if verdict.get("suspect") and job.examine and (trial := job.examine(attempt, statistics)):
        symptom = "documents unlike the rest of their source"
        return Incident(attempt.step, symptom, "suspect", record, statistics, attempt.batches, trial=trial)
    return None


def tell_unwritten(job: Job) -> None:
    """An event when the disk begins to refuse records. They wait in memory; if the next save fails too, the run ends
    (see `agree`)."""
    fault = job.run.unwritten
    if fault and not job.unwritten:
        job.event("write_failed", reason=f"{fault}; records wait in memory until there is room")
    job.unwritten = fault


def _own_documents(job: Job, attempt: StepResult) -> Found:
    """Of those that compute the same losses one speaks; of those that share rows each of its columns."""
    if not job.world.speaks:
        return {}
    columns = job.objective.columns
    part = columns.part(job.plan.context).numpy() if columns else slice(None)
    return by_document(job.stream, attempt.batches, attempt.losses, part)


def raise_alarms(job: Job, attempt: StepResult, record: dict[str, Any]) -> list[Alarm]:
    """What the detectors say of a step, each alarm an event."""
    alarms = job.alike.compare(attempt.step, job.watch.hosts) if job.alike else []
    if attempt.tokens:
        planned = {**record, "lr_planned": job.lr(attempt.step)}
        alarms += job.watch.step(planned, attempt.clocks)
    if attempt.tokens and attempt.look:
        alarms += job.watch.inside(attempt.step, attempt.look.read())
    for alarm in alarms:
        tell(job, alarm)
    return alarms


def tell(job: Job, alarm: Alarm) -> None:
    finding = alarm.finding
    job.event(
        "alarm", step=alarm.step, alarm=alarm.kind, severity=alarm.severity, reason=finding.symptom,
        evidence=finding.evidence, cause=finding.cause, confidence=finding.confidence, fix=finding.fix,
    )  # fmt: skip


def validate(job: Job, done: int) -> dict[str, Any] | None:
    """Evaluate after `done` steps, note a new best; None where a signal came in between."""

    def on_batch(passes: int, total: int) -> None:
        job.view.activity(f"evaluating after step {done:,}", passes, total)
        job.check_interrupt()

    start = time.perf_counter()
    job.where.enter("evaluate")
    try:
        with job.ema.swap() if job.ema else nullcontext():
            result = job.evaluator.evaluate(job.model, job.objective, job.pipeline, on_batch)
    except Abandoned:
        return None
    record = {
        "step": done,
        **asdict(result),
        "perplexity": math.exp(min(50.0, result.loss)),
        "seconds": round(time.perf_counter() - start, 3),
    }
    progress = job.progress
    if progress.best_validation is None or result.loss < progress.best_validation:
        progress.best_validation, progress.evaluations_since_best = result.loss, 0
    else:
        progress.evaluations_since_best += 1
    if done == 0:
        progress.first_validation = dict(result.per_source)
    if found := rises(job, record):
        record["rise"] = found
    job.run.validation(record)
    job.view.validation(record)
    for alarm in job.watch.validation(record) if job.spec.guard.enabled else ():
        tell(job, alarm)
    return record


def evaluated(job: Job, done: int) -> bool:
    """Whether there is nothing to evaluate after `done` steps: nothing is held out, or it is recorded."""
    last = last_record(job.run.validation_path)
    return not job.evaluator.available or job.world.agree(last is not None and last["step"] >= done)


def forgotten(job: Job, validation: dict[str, Any], changes: dict[int, str]) -> Outcome | None:
    """After an evaluation: how the run ends, if what it began with is being unlearnt."""
    alarm = judge_forgetting(job, validation["step"], changes)
    if alarm is None:
        return None
    tell(job, alarm)
    return end_of(job, alarm, validation)


def out_of_time(job: Job, attempt: StepResult) -> bool:
    limit = job.spec.budget.stop.time
    return limit is not None and job.progress.elapsed_s + attempt.step_s >= limit


def stop_reason(job: Job, validation: dict[str, Any] | None) -> str | None:
    """A rule of the spec that ends the run as finished, or None."""
    stop, progress = job.spec.budget.stop, job.progress
    if stop.time is not None and progress.elapsed_s >= stop.time:
        return f"budget.stop.time: {progress.elapsed_s:.0f} s trained"
    if validation is None:
        return None
    if stop.validation_loss is not None and validation["loss"] <= stop.validation_loss:
        return f"budget.stop.validation_loss: {validation['loss']:.4f} reached {stop.validation_loss}"
    if stop.patience is not None and progress.evaluations_since_best >= stop.patience:
        return f"budget.stop.patience: {stop.patience} evaluations without a new best ({progress.best_validation:.4f})"
    return None


def changes_at(job: Job) -> dict[int, str]:
    """Steps before which the guard's window is reopened, since the data or the batch is known to change there."""
    steps = job.stream.steps
    changes = {phase.from_step: "the batch size changes" for phase in steps.batch_phases[1:]}
    for phase in job.stream.order.phases[1:]:
        first = bisect.bisect_right(range(job.plan.total_steps), phase.start, key=lambda step: steps.range(step)[1])
        changes[first] = "the data mixture changes"
    return changes


def save_due(job: Job, saves: Clock, done: int) -> bool:
    hurry = CAREFUL if done < job.careful_until else 1
    return saves.due(done, hurry, job.saver.interval_s(job))


@dataclass(frozen=True)
class Due:
    """What comes after a step, and of the next: where time decides, processes have to agree."""

    look: bool = False
    copy: bool = False
    leave: bool = False
    evaluate: bool = False
    save: bool = False
    signal: str | None = None  # that ends the run; read here once a step, since it may come at any moment


def agree(job: Job, attempt: StepResult, due: Due) -> Due:
    """What is due for one is due for all, a signal too; time and memory are the first one's, since alarms are raised by
    them. One message of the hosts, while the devices compute."""
    world, clocks = job.world, (time.time(), time.monotonic())
    attempt.memory_bytes, attempt.clocks = memory_in_use(job.device), clocks
    if job.disk_refuses and job.interrupt.signal is None:
        job.interrupt.signal = FULL_DISK
    signal = job.interrupt.signal
    if world.size == 1:
        return replace(due, signal=signal)
    job.where.enter("agree")
    flags = [due.look, due.copy, due.leave, due.evaluate, due.save, signal is not None]
    flags += [signal == name for name in SIGNALS]
    numbers = [attempt.step_s, attempt.wait_s, attempt.memory_bytes, *clocks]
    own: list[float] = []
    if job.pace and job.pace.due(attempt.step):  # now and then how each keeps up
        bubble_s = max(0.0, attempt.step_s - job.pipeline.pipeline.busy_s) if job.pipeline else 0.0
        own = in_own_place(world, [job.pace.own_s(), attempt.wait_s, attempt.memory_bytes, bubble_s])
    found = world.sums([*own, *map(float, flags), *(number if world.main else 0.0 for number in numbers)])
    if own:
        attempt.ranks, found = by_rank(found[: len(own)]), found[len(own) :]
        attempt.rank_step_s = attempt.ranks["own_s"]
    look, copy, leaving, evaluating, saving, signalled, *sent = (number > 0 for number in found[: len(flags)])
    if signalled:  # the same for all, so that all leave with the same exit code
        signal = next((name for name, any_got in zip(SIGNALS, sent, strict=True) if any_got), signal)
    else:  # it came while the message was under way: the next step's
        signal = None
    attempt.step_s, attempt.wait_s, memory, *clocks_there = found[len(flags) :]
    attempt.memory_bytes, attempt.clocks = int(memory), (clocks_there[0], clocks_there[1])
    return Due(look, copy, leaving, evaluating, saving, signal)


def settle(job: Job, step: int, pending: StepResult | None, changes: dict[int, str], copying: bool) -> Incident | None:
    """Before the update of a step: the verdict of the one before, which may end it all, and a copy of the state."""
    with span(job, "report"):
        incident = report_step(job, pending) if pending else None
    if incident:
        return incident
    if step in changes:
        job.judge.reopen()
        job.judge.expect(job.stream.steps.rows(step))
        job.watch.reopen(changes[step])
        job.event("guard_reopened", step=step, reason=changes[step])
    if job.copies and copying:
        job.copies.take(job, step)
    return None


def train_loop(job: Job) -> Outcome:
    """Run until the budget, a stopping rule, a signal, an incident or a fault; what was reached is saved in each case
    but an incident, after which the caller repairs the job and calls again."""
    total = job.plan.total_steps
    evaluations, saves = job.clock("evaluate", job.plan.evaluate), job.clock("save", job.plan.save)
    looks, copying = job.clock("look", job.plan.look), job.clock("copy", job.plan.copy)
    changes = changes_at(job)
    watched(job)  # refused now rather than at the first evaluation
    validation = None
    if job.start_step == 0 and job.evaluator.available and not job.progress.first_validation:
        validation = validate(job, 0)
    elif 0 < job.start_step < total and evaluations.by_steps(job.start_step) and not evaluated(job, job.start_step):
        validation = validate(job, job.start_step)  # a signal or an incident came before it
    pending: StepResult | None = None
    job.judge.expect(job.stream.steps.rows(job.start_step))
    if job.alike:
        job.alike.start(job.start_step)
    job.model.train()
    world, pin = job.world, job.device.type == "cuda"
    due = Due(look=world.agree(looks.both_due(job.start_step)), copy=world.agree(copying.due(job.start_step)))
    with Prefetch(job.stream, job.plan.micro_rows, world.dp_rank, world.layout.dp, pin=pin) as feed:
        for step in range(job.start_step, total):
            began = time.perf_counter()
            job.where.begin(step)
            with span(job, "data"):
                batches = feed.get(step)
            # The step before is read while this one runs on the device. Nothing is updated before its verdict is known:
            # where the backward pass updates, before that, at the price of a wait.
            late = job.optimizer.judged_first
            if due.copy:
                copying.reset()
            if not late and (incident := settle(job, step, pending, changes, due.copy)):
                return Outcome("incident", incident.symptom, step, validation, incident)
            job.optimizer.arm(job.lr(step))  # nothing, unless updates are part of the backward pass
            try:
                with job.pace.measuring(step) if job.pace else nullcontext():
                    attempt = attempt_step(job, step, batches, feed.wait_s)
            except Abandoned:
                return abandon(job, step, pending, validation)
            if isinstance(attempt, str):
                return out_of_room(job, step, pending if late else None, validation, attempt)
            if late and (incident := settle(job, step, pending, changes, due.copy)):
                job.optimizer.discard()
                return Outcome("incident", incident.symptom, step, validation, incident)
            looking = job.spec.guard.enabled and job.optimizer.judged_first and job.optimizer.whole and due.look
            if looking:
                looks.reset()
            with span(job, "judge"):
                judge_and_update(job, attempt, looking)
            attempt.step_s = time.perf_counter() - began
            pending, done = attempt, step + 1
            if job.pace:
                job.pace.end(step, job.where)
            if job.alike and job.alike.due(done):
                job.alike.take(step)
            job.saver.poll(job)
            job.saver.confirm(job, done)
            if job.profiler:
                job.profiler.step(job)

            # Most steps end here. The rest is for boundaries: evaluate, save, perhaps leave.
            due = Due(
                looks.both_due(done), copying.due(done), done == total or out_of_time(job, attempt),
                job.evaluator.available and evaluations.due(done), save_due(job, saves, done),
            )  # fmt: skip
            due = agree(job, attempt, due)
            leaving, saving = due.leave, due.save
            evaluating = job.evaluator.available and (leaving or due.evaluate) and not due.signal
            boundary = leaving or evaluating or saving or bool(due.signal)
            if job.watchdog:
                job.watchdog.beat(step, long=boundary)
            if not boundary:
                continue
            waited = time.perf_counter()
            synchronize(job.device)  # nothing may be in flight, and the wait belongs to the step
            attempt.step_s += world.agree(time.perf_counter() - waited)
            pending = None
            if job.alike and saving:  # nothing is saved that is not the same everywhere
                job.alike.take(step)
            if incident := report_step(job, attempt):
                return Outcome("incident", incident.symptom, done, validation, incident)
            if evaluating:
                validation = validate(job, done)
                evaluating = validation is not None
                evaluations.reset()
                if validation and (ended := forgotten(job, validation, changes)):
                    return ended
            reason = stop_reason(job, validation if evaluating else None)
            new_best = evaluating and job.spec.checkpoint.keep_best and job.progress.evaluations_since_best == 0
            if leaving or new_best or reason or saving or due.signal:
                saved = save(job, done, validation["loss"] if evaluating and validation else None)
                saves.reset()
                if leaving or reason or due.signal:
                    return leave(job, done, validation, reason, saved, due.signal)
    # The last step was an incident, and was dealt with: what is left is to evaluate, save and leave.
    signal = next((name for name in world.gather(job.interrupt.signal) if name), None)
    validation = validate(job, total) if job.evaluator.available and not signal else None
    if validation and (ended := forgotten(job, validation, changes)):
        return ended
    saved = save(job, total, validation["loss"] if validation else None)
    return leave(job, total, validation, None, saved, signal)


def leave(
    job: Job, done: int, validation: dict[str, Any] | None, reason: str | None, saved: bool, signal: str | None = None
) -> Outcome:
    """How the run ends after its last save."""
    job.view.activity("waiting until everything is written and uploaded")
    if not (saved and job.saver.wait(job, uploads=True)):
        cause = f" ({job.run.unwritten})" if job.run.unwritten else ""
        fault = f"the last state could not be saved{cause}; make room and start again from the checkpoint before"
        return Outcome("failed", fault, done, validation)
    unfinished = signal is not None and not evaluated(job, done)  # the next start evaluates the last state
    if done == job.plan.total_steps and not unfinished:
        return Outcome("finished", "the budget is spent", done, validation)
    if reason:
        return Outcome("finished", reason, done, validation)
    if signal == FULL_DISK:
        return Outcome("failed", "the disk was full; the state is saved now: start again", done, validation)
    return Outcome("interrupted", signal or "", done, validation)
