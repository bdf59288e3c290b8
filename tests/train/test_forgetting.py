"""What a run does when there is nothing to compare with, and when the disk refuses."""

from types import SimpleNamespace
from typing import Any

import pytest

from bessemer.checkpoint.store import CheckpointStore
from bessemer.errors import UserError
from bessemer.guard.forgetting import Record
from bessemer.run.directory import RunWriter
from bessemer.spec.guard import GuardSpec
from bessemer.spec.mixture import quantise
from bessemer.train.forgetting import check_watched_sources, curves, judge_forgetting, rises
from bessemer.train.job import Progress


@pytest.fixture
def job(tmp_path):
    """As much of a job as is looked at."""
    run, told = RunWriter(tmp_path / "run"), []

    def event(kind: str, **details: Any) -> None:
        told.append((kind, details))

    guard = GuardSpec.model_validate({"forget": {"sources": ["general"], "action": "rollback"}})
    yield SimpleNamespace(
        spec=SimpleNamespace(guard=guard), told=told,
        data=SimpleNamespace(
            evaluator=SimpleNamespace(parts={"general": None, "domain": None}),
            stream=SimpleNamespace(steps=SimpleNamespace(position=lambda step: 4 * step)),
        ),
        recorder=SimpleNamespace(run=run, event=event, progress=Progress()),
        plan=SimpleNamespace(mixtures=[(0, quantise({"general": 1})), (100, quantise({"domain": 1}))]),
        saver=SimpleNamespace(store=CheckpointStore(run.checkpoints)),
    )  # fmt: skip
    run.close()


def record(step: int, general: float) -> Record:
    return {"step": step, "per_source": {"general": general, "domain": 3.0}}


def test_the_mixture_in_the_evidence_is_that_of_the_last_step_read(job):
    for step in (0, 13, 26):
        job.recorder.run.validation(record(step, 2.0 + step))
    found = judge_forgetting(job, 26, {26: "the data mixture changes"})
    assert found.finding.evidence["mixture"] == {"domain": 1.0}
    assert (job.recorder.run.folder / "reports" / "forgetting.svg").read_text().startswith("<svg xmlns=")
    job.recorder.run.validation(record(30, 2.0))
    assert judge_forgetting(job, 30, {}) is None


def test_without_the_first_evaluation_it_says_that_it_cannot_judge(job):
    job.recorder.run.validation(record(10, 9.0))
    assert judge_forgetting(job, 10, {}) is None
    assert rises(job, record(20, 9.0)) == {}
    assert [kind for kind, _ in job.told] == ["forgetting_not_judged"]
    job.recorder.progress.first_validation = {"general": 6.0, "domain": 3.0}  # as a checkpoint holds it
    assert rises(job, record(20, 9.0)) == {"general": 0.5}


def test_a_disk_or_a_tag_file_that_refuses_does_not_end_the_run(job):
    job.recorder.run.validation(record(0, 2.0))
    (job.recorder.run.checkpoints / "tags.json").write_text("{")
    (job.recorder.run.folder / "reports" / "forgetting.svg").mkdir()
    assert judge_forgetting(job, 10, {}) is None
    assert [(kind, details["reason"].split(":")[0]) for kind, details in job.told] == [
        ("save_failed", "reports/forgetting.svg"),
        ("save_failed", "the tag remembers"),
    ]


def test_nothing_held_out_is_refused_and_a_guard_that_is_off_watches_nothing(job):
    job.data.evaluator.parts = {}
    with pytest.raises(UserError, match=r"'general' has no held-out part \(there are: none\)"):
        check_watched_sources(job.spec.guard, job.data.evaluator)
    job.spec.guard = job.spec.guard.model_copy(update={"enabled": False})
    assert check_watched_sources(job.spec.guard, job.data.evaluator) is None and judge_forgetting(job, 10, {}) is None


def test_the_figure_has_every_source_and_the_limits(job):
    lines = curves(job.spec.guard.forget, [record(0, 2.0), record(10, 2.5)], {5: "the batch size changes"})
    assert lines.series == {"general": [2.0, 2.5], "domain": [3.0, 3.0], "limit of general": [2.1, 2.1]}
    assert lines.marks == {"batch size 5": 5}
