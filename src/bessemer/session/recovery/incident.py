"""What is done about an incident: put the step on trial, climb the ladder, write it up, and prove the recovery.

The loop stands still meanwhile, with the weights that the step was judged with. Afterwards the job is ready for the
loop to be called again, at the next step or at the one that was rolled back to; or the run ends with a report.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from typing import Any

from bessemer.checkpoint.manifest import DamagedCheckpoint, discard, read_manifest, verify
from bessemer.checkpoint.store import CheckpointStore
from bessemer.data.stream.exclusions import FILE_NAME, append_exclusions
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.guard.judge import NONFINITE, REASONS
from bessemer.guard.ladder import LadderFacts, RecoveryCheck, Rung
from bessemer.observe.format import short_path
from bessemer.session.restore import best_before, digits_from, load_checkpoint, recent, usual
from bessemer.train.job import Adjustment, Incident, Job, Outcome
from bessemer.train.memory.snapshots import CONFIRMED_STEPS
from bessemer.train.step import StepResult
from bessemer.trial.case import Action, EarlierState, IncidentCase, NormalRange, Recovery, StepScene, Trial
from bessemer.trial.examine import examine_step
from bessemer.trial.measure import global_batches, run_step
from bessemer.trial.report import exclusions_of, one_line, write_report
from bessemer.trial.trial import run_trial

SAME_CASE = 32  # trouble so many steps after the last belongs to the same case
SERIES = 200  # steps shown in a report
SCENES_KEPT = 2


@dataclass(frozen=True)
class RollbackTarget:
    """A healthy state to go back to."""

    step: int
    origin: str
    state: Any  # a Copy in memory, or the folder of a checkpoint


class IncidentResponder:
    """Deals with the incidents of one start of a run."""

    def __init__(self, job: Job, shelf: CheckpointStore) -> None:
        self.job, self.shelf = job, shelf
        self.case: IncidentCase | None = None
        self.last_step = -SAME_CASE
        self.targets: list[int] = []  # steps gone back to in this stretch of trouble
        self.damaged: set[str] = set()  # checkpoints that do not verify

    def respond(self, outcome: Outcome) -> Outcome | None:
        """Do what has to be done. None: the loop may go on from `job.start_step`; otherwise how the run ends."""
        incident, job = outcome.incident, self.job
        assert incident is not None
        job.start_step = outcome.step
        scene = self._scene(incident)
        case = self._open(incident, scene)
        trial = incident.trial or (self._try(scene) if self._worth_a_trial(incident) else None)
        if trial is None and case.trial is None:
            reason = replays(job) or "trials are off, or the share of the time for trials is spent"
            case.actions.append(Action("no trial", incident.step, reason))
        if trial and (case.trial is None or trial.confidence >= case.trial.confidence):
            case.trial = trial
        convicted = [accused for accused in trial.accused if accused.convicted] if trial else []
        rung = job.guard.ladder.decide(
            LadderFacts(
                step=incident.step, streak=int(incident.statistics.get("streak", 0)),
                finite=incident.symptom != REASONS[NONFINITE],
                severity=incident.severity, state_healthy=trial.state_healthy if trial else None,
                verdict=trial.verdict if trial else None, convicted=len(convicted),
                replicas_differ=equal_at(incident) is not None,
            )
        )  # fmt: skip
        if incident.severity == "veto":
            self._acted("veto", incident.step, f"{incident.symptom}; {rung.reason}")
        ended = self._climb(rung, incident, scene, trial)
        if ended is None and trial and convicted:
            self._exclude(trial)
        job.guard.frequent_saves_until = job.start_step + job.spec.guard.ladder.careful
        self._write(case)
        if ended is None:
            self._watch_recovery(case, scene)
        return ended

    def _open(self, incident: Incident, scene: StepScene) -> IncidentCase:
        """The open case, if this is more of the same trouble, or a new one."""
        job = self.job
        near = incident.step - self.last_step <= SAME_CASE
        self.last_step = incident.step
        if self.case and near:
            last = self.case.series[-1]["step"] if self.case.series else -1
            self.case.series += [entry for entry in recent(job) if entry["step"] > last]
            self.case.recovery = None  # what was told before this is no longer true
            return self.case
        deviations: dict[str, float] = {
            key: incident.statistics[key] for key in ("loss_z", "grad_z") if key in incident.statistics
        }
        self.case = IncidentCase(
            run=job.recorder.run.name, step=incident.step, time=time.time(), symptom=incident.symptom,
            observed={"loss": scene.loss, "grad_norm": scene.grad_norm, "lr": scene.lr, **deviations},
            normal=scene.normal, trial=None, series=recent(job)[-SERIES:],
        )  # fmt: skip
        return self.case

    def _scene(self, incident: Incident) -> StepScene:
        """The step as it was judged. An alarm comes after its step was accepted: then the next step is the scene, as it
        looks with the weights of now, against what was usual before the trouble began."""
        job = self.job
        history = [record for record in job.recorder.history if record["step"] < incident.step]
        step, batches = incident.step, incident.batches
        record, found = incident.record, incident.statistics
        loss, norm, lr = float(record["loss"]), float(record["grad_norm"]), float(record["lr"])
        judged = incident.severity in ("veto", "suspect")
        if judged and not _missing(found.get("loss_center")):
            normal = NormalRange(
                found["loss_center"], found["loss_scale"], found["grad_center"], found["grad_scale"],
                job.spec.guard.loss_sigma, job.spec.guard.grad_sigma,
            )  # fmt: skip
        else:
            normal = usual(history, job.spec.guard.loss_sigma, job.spec.guard.grad_sigma)
        replayable = replays(job) is None
        if replayable and job.world.size > 1:  # each has its own rows, and a trial is about all of them
            batches = global_batches(job.engine, job.data.stream, step)
        if not judged and incident.record["veto"] is None and replayable:
            step = job.start_step
            history = list(job.recorder.history)
            batches = global_batches(job.engine, job.data.stream, step)
            measured = run_step(job.engine, job.data.stream, step)
            job.engine.discard_gradients()
            loss, norm, lr = measured.loss, measured.grad_norm, job.lr(step)
        return StepScene(step, incident.symptom, lr, loss, norm, normal, batches, history)

    def _worth_a_trial(self, incident: Incident) -> bool:
        spec = self.job.spec.guard
        if not spec.trial.enabled or replays(self.job) is not None:
            return False
        urgent = incident.severity != "veto" or incident.statistics.get("streak", 0) >= spec.max_vetoes
        return urgent or self._affordable()  # at a rung of the ladder always one

    def examine(self, attempt: StepResult, statistics: dict[str, float]) -> Trial | None:
        """Look at the documents of a step that was accepted and is suspect, between two steps of the loop: nothing of
        the run changes by it. The trial, if a document is to be convicted."""
        job, began = self.job, time.monotonic()
        if not self._affordable() or replays(job) is not None:
            return None
        if job.guard.watchdog:
            job.guard.watchdog.beat(attempt.step, long=True)
        trial, seen = examine_step(job, attempt, statistics["loss_center"], job.data.decode)
        job.recorder.progress.trial_s += job.world.agree(time.monotonic() - began)
        numbers = {key: statistics[key] for key in ("loss_z", "row_z")}
        job.recorder.event("examined", step=attempt.step, documents=seen, convicted=bool(trial), **numbers)
        if trial:
            self._report_trial(attempt.step, trial)
        return trial

    def _affordable(self) -> bool:
        """Trials may take a share of the run's time, and one budget in advance."""
        spec, progress = self.job.spec.guard.trial, self.job.recorder.progress
        return spec.enabled and progress.trial_s <= spec.budget + spec.share * progress.elapsed_s

    def _try(self, scene: StepScene) -> Trial:
        job = self.job
        earlier = [
            EarlierState(target.step, target.origin, lambda target=target: self._load(target))  # type: ignore[misc]
            for target in self._healthy(scene.step - CONFIRMED_STEPS)
        ]
        events = list(job.recorder.run.events()) if job.world.main else []  # for the report, which that one writes
        alike_from = job.world.agree(digits_from(events))
        budget_s = job.spec.guard.trial.budget
        trial = run_trial(job, scene, earlier, budget_s, events[-200:], job.data.decode, alike_from)
        job.recorder.progress.trial_s += trial.seconds
        self._report_trial(scene.step, trial)
        return trial

    def _report_trial(self, step: int, trial: Trial) -> None:
        self.job.recorder.event(
            "trial", step=step, verdict=trial.verdict, confidence=trial.confidence, reason=trial.reason,
            seconds=trial.seconds, state_healthy=trial.state_healthy, began_at=trial.began_at,
            convicted=sum(accused.convicted for accused in trial.accused),
        )  # fmt: skip

    def _healthy(self, latest: int) -> list[RollbackTarget]:
        """Confirmed states of step `latest` or before, newest first: those in memory, and checkpoints."""
        held = self.job.guard.snapshots.held if self.job.guard.snapshots else []
        found = [RollbackTarget(kept.step, "memory", kept) for kept in held if kept.step <= latest]
        for name, saved in self.job.world.agree(self._confirmed() if self.job.world.main else []):
            known = name in self.damaged or saved in {target.step for target in found}
            if saved <= latest and not known:
                found.append(RollbackTarget(saved, name, self.shelf.folder / name))
        return sorted(found, key=lambda target: -target.step)

    def _confirmed(self) -> list[tuple[str, int]]:
        """Names and steps of the checkpoints that may be gone back to, as the disk has them now."""
        found = []
        for folder in self.shelf.confirmed():
            try:
                found.append((folder.name, read_manifest(folder).step))
            except DamagedCheckpoint:
                continue
        return found

    def _verify(self, target: RollbackTarget) -> None:
        """Raises Damaged in all processes if one of them cannot read a checkpoint as it was saved."""
        world, fault = self.job.world, ""
        if target.origin == "memory" or world.size == 1:  # loading verifies
            return
        try:
            verify(target.state)
        except (DamagedCheckpoint, OSError) as error:
            fault = str(error)
        if faults := [words for words in world.gather(fault) if words]:
            raise DamagedCheckpoint(faults[0])

    def _load(self, target: RollbackTarget) -> None:
        """Its weights and moments into the job; nothing else."""
        self._verify(target)
        if target.origin == "memory":
            for name, tensor in self.job.engine.state().items():
                tensor.copy_(target.state.state[name])
        else:
            self.shelf.load(target.state, self.job.engine.state())

    def _climb(self, rung: Rung, incident: Incident, scene: StepScene, trial: Trial | None) -> Outcome | None:
        job = self.job
        if rung.kind == "go on":
            if trial and any(accused.convicted for accused in trial.accused):
                job.guard.judge.pardon()  # a veto that was right does not count towards giving way
            return None
        if rung.kind == "reopen":
            job.guard.judge.reopen()
            job.guard.detectors.reopen(rung.reason)
            job.recorder.event("guard_reopened", step=incident.step, reason=rung.reason)
            self._acted("reopen", incident.step, rung.reason)
            return None
        self._keep_scene(scene)
        if rung.kind == "rollback":
            latest = incident.step - CONFIRMED_STEPS
            if trial and trial.began_at is not None:
                latest = trial.began_at
            elif (alike := equal_at(incident)) is not None:
                latest = alike
            elif incident.severity == "rollback":
                latest = min(latest, best_before(job.recorder.history))
            while (target := self._choose(latest, rung.depth)) is not None:
                try:
                    self._go_back(target, rung, incident)
                    return None
                except DamagedCheckpoint as error:  # found before anything of it was loaded
                    self.damaged.add(target.origin)
                    job.recorder.event("checkpoint_passed_over", checkpoint=target.origin, reason=str(error))
            rung = replace(rung, reason=f"{rung.reason}, and there is no earlier healthy state to go back to")
        self._acted("stop", incident.step, rung.reason)
        name = f"anomaly-{(self.case.step if self.case else incident.step):06d}.md"
        where = short_path(str(job.recorder.run.folder / "reports" / name))
        return Outcome("failed", f"{incident.symptom}: {rung.reason}; see {where}", job.start_step)

    def _choose(self, latest: int, depth: int) -> RollbackTarget | None:
        """The newest healthy state; on a further rung, one that is older than where it was gone back to before."""
        if depth == 1:
            self.targets = []
        targets = self._healthy(latest)
        older = [target for target in targets if all(target.step < step for step in self.targets)]
        return next(iter(older or targets), None)

    def _go_back(self, target: RollbackTarget, rung: Rung, incident: Incident) -> None:
        job, ladder = self.job, self.job.spec.guard.ladder
        job.saver.wait(job)
        self._verify(target)
        trial_s, elapsed_s, rollbacks = (
            job.recorder.progress.trial_s,
            job.recorder.progress.elapsed_s,
            job.recorder.progress.rollbacks,
        )
        read_to = job.data.stream.steps.range(incident.step)[1]
        guard, banned = job.guard_state(), dict(job.data.stream.banned)
        if target.origin == "memory":
            target.state.restore(job)
            job.start_step = target.step
            job.recorder.run.cut_after(target.step)
        else:
            load_checkpoint(job, self.shelf, target.state, None, rewind=False)
        job.guard.load_state(guard)  # the ladder and what it adjusted are not undone
        job.recorder.progress.trial_s, job.recorder.progress.elapsed_s = trial_s, elapsed_s
        job.recorder.progress.rollbacks = rollbacks + 1
        job.guard.detectors.reopen("rollback")
        steps = job.data.stream.steps
        skip = rung.skip or isinstance(job.data.stream, IterableStream)
        if skip:
            steps = steps.skip(target.step, read_to)
        start = steps.position(target.step)  # what was convicted since is left out when it is read again
        job.data.stream = job.data.stream.replace(steps, {pair: min(since, start) for pair, since in banned.items()})
        while job.recorder.history and job.recorder.history[-1]["step"] >= target.step:
            job.recorder.history.pop()
        if job.guard.snapshots:
            job.guard.snapshots.held = [held for held in job.guard.snapshots.held if held.step <= target.step]
        abandoned = job.saver.abandon(job, target.step)
        self.targets.append(target.step)
        self.last_step = max(self.last_step, incident.step)
        said = {"to_step": target.step, "origin": target.origin}
        if abandoned:
            said["abandoned"] = abandoned
        self._acted("rollback", incident.step, rung.reason, **said)
        if skip:
            self._acted("skip", target.step, "what was read since is not read again", position=read_to)
        if rung.gentle:
            until = target.step + ladder.gentle
            job.guard.adjustments.append(Adjustment(target.step, until, ladder.lr_scale, ladder.clip_scale))
            reason = f"learning rate x{ladder.lr_scale:g} and clipping x{ladder.clip_scale:g} up to step {until:,}"
            self._acted("lower_lr", target.step, reason)

    def _exclude(self, trial: Trial) -> None:
        """Leave the convicted documents out of the rest of the run, and offer them to later ones."""
        job, case = self.job, self.case
        assert case is not None
        found = [accused for accused in trial.accused if accused.convicted]
        entries = exclusions_of(replace_trial(case, trial), job.start_step)
        try:
            if job.world.main:
                append_exclusions(job.recorder.run.folder / FILE_NAME, entries)
        except OSError as error:  # this run leaves them out all the same
            job.recorder.event("save_failed", step=case.step, reason=f"the exclusion list: {error}")
        if job.spec.guard.trial.exclude:
            position = job.data.stream.steps.position(job.start_step)
            banned = dict(job.data.stream.banned)
            for accused in found:
                banned.setdefault((accused.source, accused.document), position)
            job.data.stream = job.data.stream.replace(banned=banned)
        places = [f"{accused.file}:{accused.row}" for accused in found]
        self._acted("exclude", job.start_step, f"{len(found)} documents convicted", documents=places[:20])

    def _keep_scene(self, scene: StepScene) -> None:
        """The judged state on disk, for those who want to look at it later."""
        job = self.job
        shelf = CheckpointStore(job.recorder.run.folder / "scenes", job.world)
        try:
            for folder, _ in shelf.committed()[: 1 - SCENES_KEPT] if job.world.main else []:
                discard(folder)
        except OSError as error:  # which the first one alone would hear of
            job.recorder.event("save_failed", step=scene.step, reason=f"an old scene stays: {error}")
        try:
            saved = job.saver.save_scene(job, shelf, scene.step)
            job.recorder.event("scene_saved", step=scene.step, checkpoint=saved.name)
        except OSError as error:
            job.recorder.event("save_failed", step=scene.step, reason=f"the scene: {error}")

    def _acted(self, kind: str, step: int, reason: str, **details: Any) -> None:
        assert self.case is not None
        self.case.actions.append(Action(kind, step, reason, details))
        if kind != "veto":  # which the loop has told already
            self.job.recorder.event(kind, step=step, reason=reason, **details)

    def _write(self, case: IncidentCase) -> None:
        if not self.job.world.main:
            return
        try:
            paths = write_report(self.job.recorder.run.folder, case)
            self.job.recorder.event("report", step=case.step, file=str(paths["md"].name), reason=one_line(case))
        except OSError as error:  # a full disk must not end the run that was just repaired
            self.job.recorder.event("save_failed", step=case.step, reason=f"the report: {error}")

    def _watch_recovery(self, case: IncidentCase, scene: StepScene) -> None:
        job, start = self.job, self.job.start_step
        since = max(start, self.last_step + 1)  # behind the trouble, not before it

        def told(rejoined: int | None, loss: float | None) -> None:
            steps = None if rejoined is None else rejoined - start
            case.recovery = Recovery(rejoined, steps, loss, scene.normal.loss)
            case.series += [entry for entry in recent(job) if entry["step"] >= start]
            if rejoined is None:
                reason = f"the loss has not come back to {scene.normal.loss:.3f}"
                job.recorder.event("not_recovered", step=case.step, reason=reason)
            else:
                reason = f"loss {loss:.3f}, trend {scene.normal.loss:.3f}, {steps} steps after the repair"
                job.recorder.event("recovered", step=rejoined, reason=reason)
            self._write(case)

        watched = RecoveryCheck(since, scene.normal.loss, scene.normal.loss_scale, job.spec.guard.ladder.relapse, told)
        job.guard.recovery_checks = [other for other in job.guard.recovery_checks if other.since < since] + [watched]


def equal_at(incident: Incident) -> int | None:
    """Where processes no longer hold the same weights: the steps after which they last did."""
    alarm = incident.alarm
    return int(alarm.finding.evidence["equal_at"]) if alarm and alarm.kind == "weights_differ" else None


def replays(job: Job) -> str | None:
    """Why the steps of a run cannot be run again as they were; None if they can."""
    asked, layout = job.spec.parallel, job.world.layout
    reasons = {
        "the data cannot be read again": isinstance(job.data.stream, IterableStream),
        "an engine of another kind keeps the weights its own way": asked.engine != "torch",
        "stages of a pipeline hold no trial in this version": layout.pp > 1,
        "what PowerSGD remembers of former gradients is not replayed": job.world.size > 1
        and asked.replicas.compress == "powersgd",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def replace_trial(case: IncidentCase, trial: Trial) -> IncidentCase:
    """The case as this trial alone sees it: a case may hold several, and each convicts its own documents."""
    found = copy.copy(case)
    found.trial = trial
    return found


def _missing(value: float | None) -> bool:
    return value is None or value != value
