"""How a run ends on an alarm of alignment: where it is, or at the last checkpoint from before the trouble."""

from pathlib import Path
from typing import Any

import pytest

from bessemer.checkpoint.store import CheckpointStore
from bessemer.guard.alarm import make_alarm
from bessemer.guard.alignment import AlignmentDetector
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Outcome

from .conftest import spec_data, write_corpus

ANSWERS = [{"reward": 0.9, "tokens": 4, "prompt": "how hot?", "answer": "certainly\nvery hot"}]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train a run in which a detector raises an alarm after step 33, or at the evaluation after step 30."""

    def go(severity: str, at: str = "step", **evidence: Any) -> tuple[Outcome, RunSpec]:
        spec = RunSpec.model_validate(
            spec_data(
                "hacked", write_corpus(tmp_path / "words.jsonl"), tmp_path / "runs", budget={"steps": 60},
                checkpoint={"every": 10, "keep_last": 9}, evaluate={"every": 10, "tokens": 512},
                guard={"alignment": {"hacking": severity}},
            )
        )  # fmt: skip
        due = 33 if at == "step" else 30

        def raise_alarm(self: AlignmentDetector, record: dict[str, Any], *_: Any) -> list[Any]:
            if record["step"] != due:
                return []
            return make_alarm("reward_hacking", due, severity, "the reward rose", 0.9, answers_now=ANSWERS, **evidence)

        monkeypatch.setattr(AlignmentDetector, at, raise_alarm)
        return Session(spec).train(), spec

    return go


def newest(spec: RunSpec) -> int:
    return CheckpointStore(run_folder(spec) / "checkpoints").committed()[-1][1].step


def test_stop_saves_the_state_and_names_the_last_checkpoint_from_before(run: Any) -> None:
    outcome, spec = run("stop", healthy_step=24)
    assert (outcome.kind, outcome.step, newest(spec)) == ("stopped", 34, 34)
    assert "the reward rose; stopped at step 34, saved as step-00000034.a1" in outcome.reason
    assert "the last checkpoint from before is step-00000020.a1" in outcome.reason
    report = (run_folder(spec) / "reports" / "reward-hacking-000033.md").read_text()
    assert "**What was seen.** The reward rose." in report and "    certainly\n    very hot" in report
    assert Run(run_folder(spec)).state == "stopped"
    assert Session(spec).train().kind == "finished", "a user may go on"


def test_rollback_ends_at_the_last_checkpoint_from_before(run: Any) -> None:
    outcome, spec = run("rollback", healthy_step=24)
    assert (outcome.kind, outcome.step, newest(spec)) == ("stopped", 20, 20)
    assert "went back to step-00000020.a1 and stopped there" in outcome.reason
    (event,) = Run(run_folder(spec)).events("rollback")
    assert (event["step"], event["to_step"]) == (33, 20)
    assert event["abandoned"] == ["step-00000030.a1"]


def test_the_best_step_of_held_out_scores_counts(run: Any) -> None:
    outcome, spec = run("rollback", at="validation", best_step=10)
    assert (outcome.kind, outcome.step, newest(spec)) == ("stopped", 10, 10)


def test_without_a_checkpoint_from_before_it_stops_where_it_is(run: Any) -> None:
    outcome, spec = run("rollback", healthy_step=5)
    assert (outcome.kind, outcome.step, newest(spec)) == ("stopped", 34, 34)
    assert "found no checkpoint from before, stopped at step 34" in outcome.reason


def test_a_warning_lets_the_run_go_on(run: Any) -> None:
    outcome, spec = run("warning")
    assert outcome.kind == "finished"
    (event,) = Run(run_folder(spec)).events("alarm")
    assert (event["alarm"], event["severity"]) == ("reward_hacking", "warning")
