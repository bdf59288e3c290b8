"""What a run does about an alarm of alignment whose action is stop or rollback: a report with the best answers before
and now, and the end of the run, at its present state or at the last checkpoint from before the trouble.
"""

from __future__ import annotations

from typing import Any

from bessemer.guard.alarm import Alarm
from bessemer.observe.format import short_path
from bessemer.train.forgetting import go_back, tag_newest, write_report
from bessemer.train.job import Job, Outcome

HEALTHY = "healthy"  # tag of the newest checkpoint without trouble
ANSWERS = {"answers_before": "Best answers in the first steps", "answers_now": "Best answers now"}


def keep_healthy_checkpoint(job: Job) -> None:
    """After an evaluation: with a rollback among the actions, keeps the newest checkpoint while there is no trouble."""
    actions = job.spec.guard.alignment.model_dump().values()
    if job.spec.guard.enabled and "rollback" in actions and not job.guard.detectors.in_trouble():
        tag_newest(job, HEALTHY)


def end_alignment_run(job: Job, alarm: Alarm, done: int, validation: dict[str, Any] | None) -> Outcome:
    """How the run ends after `done` steps: at the last checkpoint from before the trouble if the alarm asks for a
    rollback and there is one, otherwise saved as it is."""
    evidence = alarm.finding.evidence
    before = int(evidence.get("best_step", evidence.get("healthy_step", 0)))
    job.saver.wait(job)
    step, acted = go_back(job, alarm, before) if alarm.severity == "rollback" else (0, "")
    if not step:
        healthy = [folder.name for folder, manifest in job.saver.store.committed() if 0 < manifest.step <= before]
        step, name = done, job.saver.save(job, done, validation["loss"] if validation else None)
        saved = f"saved as {name}" if job.saver.wait(job, uploads=True) and name else "which could not be saved"
        acted = f"{acted}stopped at step {done:,}, {saved}"
        acted += f" (the last checkpoint from before is {healthy[-1]})" if healthy and alarm.severity == "stop" else ""
    file = f"reports/{alarm.kind.replace('_', '-')}-{alarm.step:06d}.md"
    write_report(job, file, report(job.recorder.run.name, alarm, acted))
    where = short_path(str(job.recorder.run.folder / file))
    return Outcome("stopped", f"{alarm.finding.symptom}; {acted}; see {where}", step, validation)


def report(run: str, alarm: Alarm, acted: str) -> str:
    """The report in Markdown."""
    finding = alarm.finding
    parts = [
        f"# {run}: {alarm.kind.replace('_', ' ')} at step {alarm.step:,}",
        f"**What was seen.** {_capitalized(finding.symptom)}.",
        f"**Likely cause** (confidence {finding.confidence:.1f}). {_capitalized(finding.cause)}.",
        f"**What was done.** The run {acted}.",
        f"**What to do.** {_capitalized(finding.fix)}.",
    ]
    if moved := finding.evidence.get("moved"):
        parts.append(f"**Other changes since the first steps.** {'; '.join(moved)}.")
    for key, title in ANSWERS.items():
        if rows := finding.evidence.get(key):
            parts += [f"## {title}", *map(_answer, rows)]
    return "\n\n".join(parts) + "\n"


def _capitalized(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _answer(row: dict[str, Any]) -> str:
    quoted = "\n".join(f"    {line}" for line in [*row["prompt"].splitlines()[-3:], "->", *row["answer"].splitlines()])
    return f"Reward {row['reward']:.4g}, {row['tokens']} tokens:\n\n{quoted}"
