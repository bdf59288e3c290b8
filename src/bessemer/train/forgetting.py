"""What a run does about forgetting: a chart after every evaluation; on the guard's alarm a report, and the end of the
run, at its present state or at the last checkpoint before it forgot.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bessemer.checkpoint.lineage import read_tags
from bessemer.checkpoint.manifest import DamagedCheckpoint, verify
from bessemer.checkpoint.store import TAGS
from bessemer.errors import UserError
from bessemer.guard.alarm import Alarm
from bessemer.guard.forgetting import Record, check_forgetting, forgetting_states, since_start, source_loss
from bessemer.observe.figure import LineChart, svg_file
from bessemer.observe.format import short_path
from bessemer.spec.guard import ForgetSpec, GuardSpec
from bessemer.storage import write_atomic
from bessemer.train.evaluate import Evaluator
from bessemer.train.job import Job, Outcome

PLOT, REPORT = "reports/forgetting.svg", "reports/forgetting.md"
REMEMBERS = "remembers"  # tag of the newest checkpoint within the limit


def check_watched_sources(guard: GuardSpec, evaluator: Evaluator) -> ForgetSpec | None:
    """The sources whose loss must not rise; None if the spec names none. Refuses a source without held-out data."""
    spec = guard.forget if guard.enabled else None
    for name in spec.sources if spec else ():
        if name not in evaluator.parts:
            known = ", ".join(evaluator.parts) or "none"
            raise UserError(
                f"guard.forget.sources: {name!r} has no held-out part (there are: {known}): name one of data.sources, "
                "and raise data.validation if it is small"
            )
    return spec


def _evaluations(job: Job, *newest: Record) -> list[Record]:
    """All since the one before step 0. Checkpoints hold that one too: a run may continue elsewhere without its
    metrics."""
    records = [*job.recorder.run.validations(), *newest]
    first: Record = {"step": 0, "per_source": job.recorder.progress.first_validation}
    return since_start(records) or ([first, *records] if job.recorder.progress.first_validation else [])


def rises(job: Job, record: Record) -> dict[str, float]:
    """Relative increase of the watched sources' losses since step 0, for the evaluation's record."""
    spec = check_watched_sources(job.spec.guard, job.data.evaluator)
    current = forgetting_states(spec, _evaluations(job, record)) if spec else []
    return {standing.source: standing.rise for standing in current}


def judge_forgetting(job: Job, done: int, changes: dict[int, str]) -> Alarm | None:
    """After an evaluation. `changes` are steps to mark in the chart."""
    spec = check_watched_sources(job.spec.guard, job.data.evaluator)
    if spec is None:
        return None
    records = _evaluations(job)
    if not records:  # no held-out data when it started
        reason = "the run was not evaluated before step 0: there is nothing to compare with"
        job.recorder.event("forgetting_not_judged", step=done, reason=reason)
        return None
    write_report(job, PLOT, svg_file(curves(spec, records, changes).svg()))
    position = job.data.stream.steps.position(done - 1)
    mixture = [mixture for start, mixture in job.plan.mixtures if start <= position][-1]
    if spec.action == "rollback" and not any(standing.in_a_row for standing in forgetting_states(spec, records)):
        tag_newest(job, REMEMBERS)
    return check_forgetting(spec, records, mixture.shares)


def tag_newest(job: Job, tag: str) -> None:
    """Tag the newest checkpoint as one from before any trouble: retention keeps tagged ones."""
    store = job.saver.store
    try:
        tags = read_tags(store.folder)
        if (committed := store.committed()) and tags.get(tag) != (newest := committed[-1][0].name):
            write_atomic(store.folder / TAGS, json.dumps({**tags, tag: newest}, indent=1, sort_keys=True))
    except (OSError, UserError) as error:
        job.recorder.event("save_failed", reason=f"the tag {tag}: {error}")


def curves(spec: ForgetSpec, records: Sequence[Record], changes: dict[int, str]) -> LineChart:
    """Held-out losses of all sources over the steps, with the limits of the watched ones."""
    series = {name: [source_loss(record, name) for record in records] for name in records[-1]["per_source"]}
    for name in spec.sources:
        series[f"limit of {name}"] = [series[name][0] * (1 + spec.limit)] * len(records)
    marks = {f"{what.removeprefix('the ').removesuffix(' changes')} {step:,}": step for step, what in changes.items()}
    return LineChart("held-out loss", [record["step"] for record in records], series, "step", marks=marks)


def end_forgetting_run(job: Job, alarm: Alarm, validation: dict[str, Any]) -> Outcome | None:
    """How the run ends: at the last checkpoint within the limit if the spec asks for a rollback and there is one,
    otherwise saved as it is. None if the alarm is only a note."""
    if alarm.severity == "note":
        return None
    step, acted = go_back(job, alarm, alarm.finding.evidence["remembered"]) if alarm.severity == "rollback" else (0, "")
    if not step:
        step, name = alarm.step, job.saver.save(job, alarm.step, validation["loss"])
        saved = f"saved as {name}" if job.saver.wait(job, uploads=True) and name else "which could not be saved"
        acted = f"{acted}stopped at step {step:,}, {saved}"
    write_report(job, REPORT, report(job.recorder.run.name, alarm, _evaluations(job), acted))
    where = short_path(str(job.recorder.run.folder / REPORT))
    return Outcome("stopped", f"{alarm.finding.symptom}; {acted}; see {where}", step, validation)


def go_back(job: Job, alarm: Alarm, latest: int) -> tuple[int, str]:
    """Make the last intact checkpoint of at most `latest` steps the newest; its step, 0 for none, and a phrase for the
    report."""
    job.saver.wait(job)
    for folder, manifest in reversed(job.saver.store.committed()):
        if not 0 < manifest.step <= latest:
            continue
        try:
            verify(folder)
        except DamagedCheckpoint as error:
            job.recorder.event("checkpoint_passed_over", checkpoint=folder.name, reason=str(error))
            continue
        details = {"to_step": manifest.step, "origin": folder.name, "abandoned": job.saver.abandon(job, manifest.step)}
        job.recorder.event("rollback", step=alarm.step, reason=alarm.finding.symptom, **details)
        return manifest.step, f"went back to {folder.name} and stopped there"
    return 0, "found no checkpoint from before, "


def report(run: str, alarm: Alarm, records: Sequence[Record], acted: str) -> str:
    """The report in Markdown."""
    finding, names = alarm.finding, list(records[-1]["per_source"])
    mixture = ", ".join(f"{name} {share:.1%}" for name, share in finding.evidence["mixture"].items())
    rows = [[f"{record['step']:,}", *(f"{source_loss(record, name):.4f}" for name in names)] for record in records]
    table = [["step", *names], ["---:"] * (len(names) + 1), *rows]
    return "\n\n".join([
        f"# {run}: {finding.evidence['source']} is being forgotten",
        f"**What was seen.** {finding.symptom}.",
        f"**Likely cause** (confidence {finding.confidence:.1f}). {finding.cause}. In force: {mixture}.",
        f"**What was done.** The run {acted}.",
        f"**What to do.** {finding.fix}.",
        "\n".join(f"| {' | '.join(row)} |" for row in table),
        "![held-out losses](forgetting.svg)\n",
    ])  # fmt: skip


def write_report(job: Job, name: str, text: str) -> None:
    """Write a file of the run."""
    try:
        job.recorder.run.write_file(name, text)
    except OSError as error:  # a full disk must not be what ends the run
        job.recorder.event("save_failed", reason=f"{name}: {error}")
