"""Waiting for a job: until its target says that it has ended, whoever submitted it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from bessemer.launch import submit as submitting
from bessemer.launch.job import JobState, LaunchJob
from bessemer.launch.submit import active_job, wait_for_job
from bessemer.run.directory import RunWriter


@pytest.mark.parametrize(("end", "code"), [("finished", 0), ("interrupted", 1)])
def test_the_code_tells_whether_the_run_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, code: int
) -> None:
    states = iter(["PENDING", "RUNNING", "RUNNING", "COMPLETED"])
    target = SimpleNamespace(states=lambda job: [JobState(job.id, next(states))])
    monkeypatch.setitem(submitting.TARGETS, "slurm", target)
    folder = tmp_path / "mine" / "launch"
    folder.mkdir(parents=True)
    job = LaunchJob("slurm", "mine", "7", str(folder), 0.0, 1, 8)
    job.save()
    with RunWriter(tmp_path / "mine") as run:
        run.event("started")
        run.event(end, step=3, reason="as it happens")
    active = active_job(SimpleNamespace(folder=folder))  # type: ignore[arg-type]
    assert active is not None and active[0] == job and active[1].state == "PENDING"
    lines: list[str] = []
    assert wait_for_job(job, lines.append, poll_s=0.0) == code
    assert lines == ["waiting  for mine, slurm job 7: RUNNING", f"ended    mine: {end}"]
