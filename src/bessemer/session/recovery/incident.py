"""Responds to an incident: runs a trial of the step, carries out the ladder's decision, writes the report, and checks
that the run recovers.

The loop is stopped in the meantime, with the weights that the step was judged with. Afterwards the loop continues at
the next step or at the step that was rolled back to, or the run ends with a report.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from bessemer.checkpoint.manifest import DamagedCheckpoint, discard, read_manifest, verify
from bessemer.checkpoint.store import CheckpointStore
from bessemer.data.stream.exclusions import FILE_NAME, append_exclusions
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.guard.alignment import ALIGNMENT_ALARMS
from bessemer.guard.judge import NONFINITE, REASONS
from bessemer.guard.ladder import LadderFacts, RecoveryCheck, Rung
from bessemer.observe.format import short_path
from bessemer.run.control import ControlRequest
from bessemer.session.restore import bitwise_since, end_of_best_stretch, load_checkpoint, normal_range, recent_records
from bessemer.train.alignment import end_alignment_run
from bessemer.train.control import answer
from bessemer.train.job import Adjustment, Incident, Job, Outcome
from bessemer.train.memory.snapshots import CONFIRMED_STEPS
from bessemer.train.step import StepResult
from bessemer.trial.case import Action, EarlierState, IncidentCase, NormalRange, Recovery, StepScene, Trial
from bessemer.trial.examine import examine_step
from bessemer.trial.measure import global_batches, run_step
from bessemer.trial.report import case_exclusions, one_line, write_report
from bessemer.trial.trial import run_trial

SAME_CASE = 32  # incidents within so many steps are one case
SERIES = 200  # steps in a report
MAX_SCENES = 2


@dataclass(frozen=True)
class RollbackTarget:
    """A healthy state to roll back to."""

    step: int
    origin: str
    state: Any  # a snapshot in memory, or the folder of a checkpoint


class IncidentResponder:
    """Handles the incidents of one start of a run."""

    def __init__(self, job: Job, store: CheckpointStore) -> None:
        self.job, self.store = job, store
        self.case: IncidentCase | None = None
        self.last_step = -SAME_CASE
        self.targets: list[int] = []  # steps rolled back to in this stretch of trouble
        self.damaged: set[str] = set()  # checkpoints that do not verify

    def respond(self, outcome: Outcome) -> Outcome | None:
        """Handles the incident. None: the loop continues at `job.start_step`; otherwise how the run ends."""
        incident, job = outcome.incident, self.job
        assert incident is not None
        job.start_step = outcome.step
        if incident.alarm and incident.alarm.kind in ALIGNMENT_ALARMS:  # not the fault of a step: nothing to replay
            return end_alignment_run(job, incident.alarm, outcome.step, outcome.validation)
        if incident.request:
            self._roll_back_by_request(incident, incident.request)
            return None
        scene = self._capture_scene(incident)
        case = self._open_case(incident, scene)
        trial = incident.trial or (self._run_trial(scene) if self._is_trial_due(incident) else None)
        if trial is None and case.trial is None:
            reason = why_not_replayable(job) or "trials are off, or the share of the time for trials is spent"
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
            self._record_action("veto", incident.step, f"{incident.symptom}; {rung.reason}")
        end = self._carry_out(rung, incident, scene, trial)
        if end is None and trial and convicted:
            self._exclude(trial)
        job.guard.frequent_saves_until = job.start_step + job.spec.guard.ladder.careful
        self._write_report(case)
        if end is None:
            self._watch_recovery(case, scene)
        return end

    def _roll_back_by_request(self, incident: Incident, request: ControlRequest) -> None:
        """Rolls back because somebody asked. Nothing is put on trial, and the same data is read again."""
        job, self.case = self.job, None
        latest = incident.step - 1 if request.value is None else int(request.value)
        reason = f"{request.who} asked for it"
        while target := next((one for one in self._healthy_states(latest) if one.origin not in self.damaged), None):
            try:
                self._roll_back(target, Rung("rollback", reason, 1), incident)
            except DamagedCheckpoint as error:
                self.damaged.add(target.origin)
                job.recorder.event("checkpoint_passed_over", checkpoint=target.origin, reason=str(error))
                continue
            answer(job, request, incident.step, f"back to step {target.step:,} ({target.origin})", to_step=target.step)
            return
        answer(job, request, incident.step, f"no confirmed state at or before step {latest:,}", done=False)

    def _open_case(self, incident: Incident, scene: StepScene) -> IncidentCase:
        """The open case if this is the same trouble, or a new one."""
        job = self.job
        near = incident.step - self.last_step <= SAME_CASE
        self.last_step = incident.step
        if self.case and near:
            last = self.case.series[-1]["step"] if self.case.series else -1
            self.case.series += [entry for entry in recent_records(job) if entry["step"] > last]
            self.case.recovery = None  # an earlier result no longer holds
            return self.case
        deviations: dict[str, float] = {
            key: incident.statistics[key] for key in ("loss_z", "grad_z") if key in incident.statistics
        }
        self.case = IncidentCase(
            run=job.recorder.run.name, step=incident.step, time=time.time(), symptom=incident.symptom,
            observed={"loss": scene.loss, "grad_norm": scene.grad_norm, "lr": scene.lr, **deviations},
            normal=scene.normal, trial=None, series=recent_records(job)[-SERIES:],
        )  # fmt: skip
        return self.case

    def _capture_scene(self, incident: Incident) -> StepScene:
        """The step as it was judged. An alarm comes after its step was accepted: then the scene is the next step, with
        the current weights, against the normal range from before the trouble."""
        job = self.job
        history = [record for record in job.recorder.history if record["step"] < incident.step]
        step, batches = incident.step, incident.batches
        record, statistics = incident.record, incident.statistics
        loss, norm, lr = float(record["loss"]), float(record["grad_norm"]), float(record["lr"])
        judged = incident.severity in ("veto", "suspect")
        if judged and not _missing(statistics.get("loss_center")):
            guard = job.spec.guard
            normal = NormalRange(
                statistics["loss_center"], statistics["loss_scale"], statistics["grad_center"],
                statistics["grad_scale"], guard.loss_sigma, guard.grad_sigma,
            )  # fmt: skip
        else:
            normal = normal_range(history, job.spec.guard, job.engine.objective.judged)
        replayable = why_not_replayable(job) is None
        if replayable and job.world.size > 1:  # each rank has its own rows; a trial needs all
            batches = global_batches(job.engine, job.data.stream, step)
        if not judged and incident.record["veto"] is None and replayable:
            step = job.start_step
            history = list(job.recorder.history)
            batches = global_batches(job.engine, job.data.stream, step)
            measured = run_step(job.engine, job.data.stream, step)
            job.engine.discard_gradients()
            loss, norm, lr = measured.loss, measured.grad_norm, job.lr(step)
        return StepScene(step, incident.symptom, lr, loss, norm, normal, batches, history)

    def _is_trial_due(self, incident: Incident) -> bool:
        spec = self.job.spec.guard
        if not spec.trial.enabled or why_not_replayable(self.job) is not None:
            return False
        urgent = incident.severity != "veto" or incident.statistics.get("streak", 0) >= spec.max_vetoes
        return urgent or self._affordable()  # the ladder always gets a trial

    def examine(self, attempt: StepResult, statistics: dict[str, float]) -> Trial | None:
        """Examines the documents of an accepted but suspect step, between two steps of the loop, without changing the
        run. Returns the trial if a document is convicted."""
        job, began = self.job, time.monotonic()
        if not self._affordable() or why_not_replayable(job) is not None:
            return None
        if job.guard.watchdog:
            job.guard.watchdog.beat(attempt.step, long=True)
        trial, examined = examine_step(job, attempt, statistics["loss_center"], job.data.decode)
        job.recorder.progress.trial_s += job.world.agree(time.monotonic() - began)
        z_scores = {key: statistics[key] for key in ("loss_z", "row_z")}
        job.recorder.event("examined", step=attempt.step, documents=examined, convicted=bool(trial), **z_scores)
        if trial:
            self._report_trial(attempt.step, trial)
        return trial

    def _affordable(self) -> bool:
        """Trials may take a share of the run's time, plus one budget in advance."""
        spec, progress = self.job.spec.guard.trial, self.job.recorder.progress
        return spec.enabled and progress.trial_s <= spec.budget + spec.share * progress.elapsed_s

    def _run_trial(self, scene: StepScene) -> Trial:
        job = self.job
        earlier = [
            EarlierState(target.step, target.origin, lambda target=target: self._load(target))  # type: ignore[misc]
            for target in self._healthy_states(scene.step - CONFIRMED_STEPS)
        ]
        events = list(job.recorder.run.events()) if job.world.main else []  # rank 0 writes the report
        bitwise_from = job.world.agree(bitwise_since(events))
        budget_s = job.spec.guard.trial.budget
        trial = run_trial(job, scene, earlier, budget_s, events[-200:], job.data.decode, bitwise_from)
        job.recorder.progress.trial_s += trial.seconds
        self._report_trial(scene.step, trial)
        return trial

    def _report_trial(self, step: int, trial: Trial) -> None:
        self.job.recorder.event(
            "trial", step=step, verdict=trial.verdict, confidence=trial.confidence, reason=trial.reason,
            seconds=trial.seconds, state_healthy=trial.state_healthy, began_at=trial.began_at,
            convicted=sum(accused.convicted for accused in trial.accused),
        )  # fmt: skip

    def _healthy_states(self, latest: int) -> list[RollbackTarget]:
        """Confirmed states at or before step `latest`, newest first: snapshots in memory, and checkpoints."""
        snapshots = self.job.guard.snapshots
        held = snapshots.held if snapshots and all(self.job.world.gather(snapshots.complete(self.job))) else []
        targets = [RollbackTarget(one.step, "memory", one) for one in held if one.step <= latest]
        for name, saved in self.job.world.agree(self._confirmed() if self.job.world.main else []):
            skip = name in self.damaged or saved in {target.step for target in targets}
            if saved <= latest and not skip:
                targets.append(RollbackTarget(saved, name, self.store.folder / name))
        return sorted(targets, key=lambda target: -target.step)

    def _confirmed(self) -> list[tuple[str, int]]:
        """Names and steps of the confirmed checkpoints on disk."""
        checkpoints = []
        for folder in self.store.confirmed():
            try:
                checkpoints.append((folder.name, read_manifest(folder).step))
            except DamagedCheckpoint:
                continue
        return checkpoints

    def _verify(self, target: RollbackTarget) -> None:
        """Raises DamagedCheckpoint on all ranks if one of them cannot read the checkpoint."""
        world, message = self.job.world, ""
        if target.origin == "memory" or world.size == 1:  # loading verifies
            return
        try:
            verify(target.state)
        except (DamagedCheckpoint, OSError) as error:
            message = str(error)
        if messages := [text for text in world.gather(message) if text]:
            raise DamagedCheckpoint(messages[0])

    def _load(self, target: RollbackTarget) -> None:
        """Loads weights and moments into the job, and nothing else."""
        self._verify(target)
        if target.origin == "memory":
            target.state.restore_weights(self.job)
        else:
            self.store.load(target.state, self.job.engine.state())

    def _carry_out(self, rung: Rung, incident: Incident, scene: StepScene, trial: Trial | None) -> Outcome | None:
        job = self.job
        if rung.kind == "go on":
            if trial and any(accused.convicted for accused in trial.accused):
                job.guard.judge.forgive_vetoes()  # a correct veto does not count towards veto_share
            return None
        if rung.kind == "reopen":
            job.guard.judge.reopen()
            job.guard.detectors.reopen(rung.reason)
            job.recorder.event("guard_reopened", step=incident.step, reason=rung.reason)
            self._record_action("reopen", incident.step, rung.reason)
            return None
        self._save_scene(scene)
        if rung.kind == "rollback":
            while (target := self._choose_target(self._latest_healthy_step(incident, trial), rung.depth)) is not None:
                try:
                    self._roll_back(target, rung, incident)
                    return None
                except DamagedCheckpoint as error:  # raised before anything is loaded
                    self.damaged.add(target.origin)
                    job.recorder.event("checkpoint_passed_over", checkpoint=target.origin, reason=str(error))
            rung = replace(rung, reason=f"{rung.reason}, and there is no earlier healthy state to roll back to")
        self._record_action("stop", incident.step, rung.reason)
        name = f"anomaly-{(self.case.step if self.case else incident.step):06d}.md"
        where = short_path(str(job.recorder.run.folder / "reports" / name))
        return Outcome("failed", f"{incident.symptom}: {rung.reason}; see {where}", job.start_step)

    def _latest_healthy_step(self, incident: Incident, trial: Trial | None) -> int:
        latest = incident.step - CONFIRMED_STEPS
        if trial and trial.began_at is not None:
            return trial.began_at
        if (step := equal_at(incident)) is not None:
            return step
        if incident.severity == "rollback":
            return min(latest, end_of_best_stretch(self.job.recorder.history))
        return latest

    def _choose_target(self, latest: int, depth: int) -> RollbackTarget | None:
        """The newest healthy state; on a higher rung, one older than the earlier targets."""
        if depth == 1:
            self.targets = []
        targets = self._healthy_states(latest)
        older = [target for target in targets if all(target.step < step for step in self.targets)]
        return next(iter(older or targets), None)

    def _roll_back(self, target: RollbackTarget, rung: Rung, incident: Incident) -> None:
        job, ladder = self.job, self.job.spec.guard.ladder
        job.saver.wait(job)
        self._verify(target)
        before = job.recorder.progress
        read_to = job.data.stream.steps.range(incident.step)[1]
        guard, banned = job.guard_state(), dict(job.data.stream.banned)
        if target.origin == "memory":
            target.state.restore(job)
            job.start_step = target.step
            job.recorder.run.remove_metrics_from(target.step)
        else:
            load_checkpoint(job, self.store, target.state, None, rewind=False)
        job.guard.load_state(guard)  # the ladder and its adjustments are not undone
        progress = job.recorder.progress
        progress.trial_s, progress.elapsed_s = before.trial_s, before.elapsed_s
        progress.rollbacks = before.rollbacks + 1
        job.guard.detectors.reopen("rollback")
        steps = job.data.stream.steps
        skip = rung.skip or isinstance(job.data.stream, IterableStream)
        if skip:
            steps = steps.skip(target.step, read_to)
        start = steps.position(target.step)  # documents convicted since are excluded when read again
        job.data.stream = job.data.stream.replace(steps, {pair: min(since, start) for pair, since in banned.items()})
        while job.recorder.history and job.recorder.history[-1]["step"] >= target.step:
            job.recorder.history.pop()
        if job.guard.snapshots:
            job.guard.snapshots.held = [one for one in job.guard.snapshots.held if one.step <= target.step]
        abandoned = job.saver.abandon(job, target.step)
        self.targets.append(target.step)
        self.last_step = max(self.last_step, incident.step)
        details = {"to_step": target.step, "origin": target.origin, **({"abandoned": abandoned} if abandoned else {})}
        self._record_action("rollback", incident.step, rung.reason, **details)
        if skip:
            self._record_action("skip", target.step, "data that was read since is not read again", position=read_to)
        if rung.gentle:
            until = target.step + ladder.gentle
            job.guard.adjustments.append(Adjustment(target.step, until, ladder.lr_scale, ladder.clip_scale))
            reason = f"learning rate x{ladder.lr_scale:g} and clipping x{ladder.clip_scale:g} up to step {until:,}"
            self._record_action("lower_lr", target.step, reason)

    def _exclude(self, trial: Trial) -> None:
        """Excludes the convicted documents from the rest of the run, and lists them for other runs."""
        job, case = self.job, self.case
        assert case is not None
        convicted = [accused for accused in trial.accused if accused.convicted]
        # A case may hold several trials; each convicts its own documents.
        entries = case_exclusions(replace(case, trial=trial), job.start_step)
        try:
            if job.world.main:
                append_exclusions(job.recorder.run.folder / FILE_NAME, entries)
        except OSError as error:  # this run excludes them all the same
            job.recorder.event("save_failed", step=case.step, reason=f"the exclusion list: {error}")
        if job.spec.guard.trial.exclude:
            position = job.data.stream.steps.position(job.start_step)
            banned = dict(job.data.stream.banned)
            for accused in convicted:
                banned.setdefault((accused.source, accused.document), position)
            job.data.stream = job.data.stream.replace(banned=banned)
        places = [f"{accused.file}:{accused.row}" for accused in convicted]
        self._record_action("exclude", job.start_step, f"{len(convicted)} documents convicted", documents=places[:20])

    def _save_scene(self, scene: StepScene) -> None:
        """Saves the judged state to disk for later analysis."""
        job = self.job
        scenes = CheckpointStore(job.recorder.run.folder / "scenes", job.world)
        try:
            for folder, _ in scenes.committed()[: 1 - MAX_SCENES] if job.world.main else []:
                discard(folder)
        except OSError as error:  # only rank 0 discards
            job.recorder.event("save_failed", step=scene.step, reason=f"an old scene could not be deleted: {error}")
        try:
            saved = job.saver.save_scene(job, scenes, scene.step)
            job.recorder.event("scene_saved", step=scene.step, checkpoint=saved.name)
        except OSError as error:
            job.recorder.event("save_failed", step=scene.step, reason=f"the scene: {error}")

    def _record_action(self, kind: str, step: int, reason: str, **details: Any) -> None:
        if self.case:  # none at a rollback by request
            self.case.actions.append(Action(kind, step, reason, details))
        if kind != "veto":  # the loop has emitted it
            self.job.recorder.event(kind, step=step, reason=reason, **details)

    def _write_report(self, case: IncidentCase) -> None:
        if not self.job.world.main:
            return
        try:
            paths = write_report(self.job.recorder.run.folder, case)
            self.job.recorder.event("report", step=case.step, file=str(paths["md"].name), reason=one_line(case))
        except OSError as error:  # a full disk must not end a repaired run
            self.job.recorder.event("save_failed", step=case.step, reason=f"the report: {error}")

    def _watch_recovery(self, case: IncidentCase, scene: StepScene) -> None:
        job, start = self.job, self.job.start_step
        since = max(start, self.last_step + 1)  # after the trouble

        def on_result(rejoined: int | None, loss: float | None) -> None:
            steps = None if rejoined is None else rejoined - start
            case.recovery = Recovery(rejoined, steps, loss, scene.normal.loss)
            case.series += [entry for entry in recent_records(job) if entry["step"] >= start]
            if rejoined is None:
                reason = f"the loss has not come back to {scene.normal.loss:.3f}"
                job.recorder.event("not_recovered", step=case.step, reason=reason)
            else:
                reason = f"loss {loss:.3f}, trend {scene.normal.loss:.3f}, {steps} steps after the repair"
                job.recorder.event("recovered", step=rejoined, reason=reason)
            self._write_report(case)

        normal, patience = scene.normal, job.spec.guard.ladder.relapse
        check = RecoveryCheck(since, normal.loss, normal.loss_scale, patience, on_result)
        job.guard.recovery_checks = [one for one in job.guard.recovery_checks if one.since < since] + [check]


def equal_at(incident: Incident) -> int | None:
    """If replicas differ: the number of steps after which they were last equal."""
    alarm = incident.alarm
    return int(alarm.finding.evidence["equal_at"]) if alarm and alarm.kind == "weights_differ" else None


def why_not_replayable(job: Job) -> str | None:
    """Why the steps of a run cannot be replayed; None if they can."""
    parallel, layout = job.spec.parallel, job.world.layout
    reasons = {
        "the data cannot be read again": isinstance(job.data.stream, IterableStream),
        "another engine than torch holds the weights": parallel.engine != "torch",
        "trials do not support pipeline parallelism": layout.pp > 1,
        "the error feedback of PowerSGD is not replayed": job.world.size > 1
        and parallel.replicas.compress == "powersgd",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _missing(value: float | None) -> bool:
    return value is None or value != value
