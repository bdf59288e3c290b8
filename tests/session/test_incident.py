"""Trouble in whole runs: it is noticed, put on trial and repaired, and afterwards the run is as if it had not been."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.checkpoint.manifest import read_manifest
from bessemer.checkpoint.store import CheckpointStore
from bessemer.guard.judge import Judge
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.load import dump_spec
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Job

from .conftest import Faults, spec_data, write_corpus

Make = Callable[..., RunSpec]
STEPS, BAD = 72, 44


def trouble_spec(name: str, corpus: Path, runs: Path, guard: dict[str, Any] | None = None, **parts: Any) -> RunSpec:
    """Copies and checkpoints lie close together, so that a run of 72 steps can go back twice."""
    ladder = {"careful": 4, **(guard or {}).get("ladder", {})}
    settings = {"warmup": 8, "window": 32, "copy_every": "16 steps", **(guard or {}), "ladder": ladder}
    budget = {"steps": STEPS, "batch": 128}
    return RunSpec.model_validate(
        spec_data(name, corpus, runs, guard=settings, budget=budget, evaluate={"every": 36}, **parts)
    )


@pytest.fixture
def make(corpus: Path, prepared: Path, tmp_path: Path) -> Make:
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / ".data").symlink_to(prepared)
    return lambda name="run", guard=None, **parts: trouble_spec(name, corpus, runs, guard, **parts)


@pytest.fixture(scope="module")
def unbroken(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """The same run without trouble."""
    spec = trouble_spec("whole", corpus, tmp_path_factory.mktemp("whole"))
    assert Session(spec).train().kind == "finished"
    assert not list(Run(run_folder(spec)).events("veto"))
    return spec


class Break(Faults):
    """Does something to the job before a step, so many times."""

    def __init__(self, what: Callable[[Job], None], step: int = BAD, times: int = 1) -> None:
        self.what, self.at, self.times = what, step, times

    def before_step(self, job: Job, step: int) -> None:
        if step == self.at and self.times:
            self.times -= 1
            self.what(job)


class Jump(Faults):
    """A learning rate a hundred times too high, for one step."""

    times = 1

    def lr(self, step: int, planned: float) -> float:
        if step == BAD and self.times:
            self.times -= 1
            return 100 * planned
        return planned


class Spoil(Faults):
    """Gradients that are NaN at some steps."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def after_backward(self, job: Job, step: int) -> None:
        if step in self.steps:
            job.engine.model.norm.weight.grad *= float("nan")


@torch.no_grad()
def flip(job: Job) -> None:
    """The top exponent bit of one weight: a value below 2 becomes 2^128 times as large."""
    weight = job.engine.model.blocks[0].ffn.down.weight.view(-1)
    weight[5:6].view(torch.int32).bitwise_xor_(1 << 30)


@torch.no_grad()
def wipe(job: Job) -> None:
    job.engine.model.blocks[0].ffn.down.weight.fill_(float("nan"))


def events(spec: RunSpec, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in Run(run_folder(spec)).events() if event["kind"] in kinds]


def losses(spec: RunSpec) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in Run(run_folder(spec)).metrics()]


def report(spec: RunSpec) -> dict[str, Any]:
    (path,) = (run_folder(spec) / "reports").glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def last_weights(spec: RunSpec) -> dict[str, str]:
    """Hashes of the last checkpoint's shards, which hold weights, moments and the guard's window."""
    manifest = CheckpointStore(run_folder(spec) / "checkpoints").committed()[-1][1]
    assert manifest.step == STEPS
    return {name: about["xxh3_128"] for name, about in manifest.files.items() if name.endswith(".distcp")}


def test_a_veto_is_tried_written_up_and_recovered_from(make: Make) -> None:
    spec = make(checkpoint={"every": 16, "keep_last": 20}, guard={"ladder": {"careful": 12}})
    outcome = Session(spec, faults=Spoil(BAD)).train()
    assert (outcome.kind, outcome.step) == ("finished", STEPS)
    assert [step for step, _ in losses(spec)] == list(range(STEPS))
    (veto,), (trial,) = events(spec, "veto"), events(spec, "trial")
    assert veto["step"] == trial["step"] == BAD
    assert trial["verdict"] == "hardware" and trial["state_healthy"] and trial["confidence"] > 0.5
    assert not events(spec, "rollback", "exclude", "failed")
    (recovered,) = events(spec, "recovered")
    assert BAD < recovered["step"] <= BAD + 8
    names = {path.name for path in (run_folder(spec) / "reports").iterdir()}
    assert {f"anomaly-{BAD:06d}.{kind}" for kind in ("md", "html", "json")} <= names
    told = report(spec)
    assert told["trial"]["verdict"] == "hardware" and told["recovery"]["rejoined_at"] == recovered["step"]
    assert [action["kind"] for action in told["actions"]] == ["veto"]
    # 45 + 12 = 57: until then a save every fourth step instead of every sixteenth.
    assert [event["step"] for event in events(spec, "saved")] == [16, 32, 36, 48, 52, 56, 64, 72]


@pytest.mark.parametrize("copies", ["auto", pytest.param("off", marks=pytest.mark.slow)])
def test_a_damaged_weight_is_undone_and_no_digit_differs_from_a_run_without_it(
    make: Make, unbroken: RunSpec, copies: str
) -> None:
    spec = make(guard={"copies": copies})
    assert Session(spec, faults=Break(flip)).train().kind == "finished"
    (back,) = events(spec, "rollback")
    assert back["step"] in (BAD, BAD + 1) and back["to_step"] <= BAD
    assert back["origin"] == "memory" if copies == "auto" else back["origin"].startswith("step-")
    assert events(spec, "trial")[0]["verdict"] == "hardware"
    assert not events(spec, "skip", "lower_lr", "exclude")
    assert losses(spec) == losses(unbroken)
    assert last_weights(spec) == last_weights(unbroken)
    assert [r["loss"] for r in Run(run_folder(spec)).validations()] == [
        r["loss"] for r in Run(run_folder(unbroken)).validations()
    ]
    assert events(spec, "recovered") and events(spec, "scene_saved")
    assert list((run_folder(spec) / "scenes").iterdir())


@pytest.mark.slow  # the verdict is tested in test_trial.py, the rollback above
def test_a_jump_of_the_learning_rate_is_undone(make: Make, unbroken: RunSpec) -> None:
    spec = make()
    assert Session(spec, faults=Jump()).train().kind == "finished"
    assert len(events(spec, "rollback")) == 1
    assert events(spec, "trial")[0]["verdict"] == "learning rate"
    assert losses(spec) == losses(unbroken)


@pytest.mark.slow
def test_a_relapse_climbs_to_gentler_steps_and_then_stops_with_a_report(make: Make) -> None:
    spec = make(guard={"ladder": {"rollbacks": 2, "gentle": 20, "lr_scale": 0.25, "clip_scale": 0.5}})
    outcome = Session(spec, faults=Break(flip, times=9)).train()
    assert outcome.kind == "failed" and Run(run_folder(spec)).state == "failed"
    assert "after 2 rollbacks" in outcome.reason and f"anomaly-{BAD:06d}.md" in outcome.reason
    first, second = events(spec, "rollback")
    assert second["to_step"] < first["to_step"] or second["to_step"] == first["to_step"] == 0
    (gentle,) = events(spec, "lower_lr")
    assert "x0.25" in gentle["reason"]
    (skip,) = events(spec, "skip")
    assert skip["step"] == second["to_step"] and skip["position"] >= (BAD + 1) * 4
    records = list(Run(run_folder(spec)).metrics())
    assert [record["step"] for record in records] == list(range(len(records)))
    ratio = {record["step"]: (record["lr"] / 0.01, record["clip"]) for record in records if record["step"] > 1}
    until = min(second["to_step"] + 20, len(records))
    assert all(clip == 0.5 for step, (_, clip) in ratio.items() if second["to_step"] <= step < until)
    kinds = [action["kind"] for action in report(spec)["actions"]]
    assert kinds.count("rollback") == 2 and kinds[-1] == "stop"
    assert report(spec)["recovery"] is None


class Die(Break):
    """Two flips at one step, and then the process dies."""

    def __init__(self, how: Callable[[], None]) -> None:
        super().__init__(flip, times=2)
        self.how = how

    def before_step(self, job: Job, step: int) -> None:
        if step == 63:
            self.how()
        super().before_step(job, step)


def crash() -> None:
    raise MemoryError("no memory")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["crashed", pytest.param("killed", marks=pytest.mark.slow)])
def test_after_two_rollbacks_a_run_resumes_with_the_same_past(make: Make, tmp_path: Path, how: str) -> None:
    guard = {"ladder": {"gentle": 40}}
    whole, broken = make("whole", guard), make("broken", guard)
    assert Session(whole, faults=Break(flip, times=2)).train().kind == "finished"
    assert len(events(whole, "rollback")) == 2 and len(events(whole, "lower_lr", "skip")) == 2
    if how == "crashed":
        with pytest.raises(MemoryError):
            Session(broken, faults=Die(crash)).train()
    else:
        (tmp_path / "spec.yaml").write_text(dump_spec(broken))
        lines = (
            "import sys",
            f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})",
            "from bessemer.spec.load import load_spec",
            "from tests.session.test_incident import Die, Session, kill",
            f"Session(load_spec({str(tmp_path / 'spec.yaml')!r}), faults=Die(kill)).train()",
        )
        done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
    before = CheckpointStore(run_folder(broken) / "checkpoints").committed()[-1][1]
    assert before.step > BAD and len(before.segments) == 2 and before.guard["adjustments"]
    assert Session(broken).train().kind == "finished"
    assert losses(broken) == losses(whole)
    ends = [CheckpointStore(run_folder(spec) / "checkpoints").committed()[-1][1] for spec in (whole, broken)]
    assert ends[0].segments == ends[1].segments == before.segments
    for key in ("adjustments", "ladder", "bans"):
        assert ends[0].guard[key] == ends[1].guard[key] == before.guard[key]
    assert ends[0].progress["rollbacks"] == ends[1].progress["rollbacks"] == 2


def test_without_trials_steps_that_stay_non_finite_lead_back_and_the_window_is_skipped(make: Make) -> None:
    spec = make(guard={"max_vetoes": 3, "trial": {"enabled": False}})
    assert Session(spec, faults=Break(wipe)).train().kind == "finished"
    assert not events(spec, "trial")
    assert [event["step"] for event in events(spec, "veto")] == [BAD, BAD + 1, BAD + 2]
    (back,), (skip,) = events(spec, "rollback"), events(spec, "skip")
    # 30 and later are not yet confirmed by 16 steps; the checkpoint of 20 is newer than the copy of 16.
    assert (back["step"], back["to_step"], back["origin"]) == (BAD + 2, 20, "step-00000020.a1")
    assert skip["position"] == (BAD + 3) * 4
    assert [step for step, _ in losses(spec)] == list(range(STEPS))
    assert all(loss < 10 for _, loss in losses(spec))
    told = report(spec)
    assert told["trial"] is None and told["actions"][0]["kind"] == "no trial"


def test_with_nothing_to_go_back_to_the_run_stops_and_says_so(make: Make) -> None:
    spec = make(guard={"max_vetoes": 2, "trial": {"enabled": False}})
    outcome = Session(spec, faults=Break(wipe, step=5)).train()
    assert outcome.kind == "failed" and "no earlier healthy state" in outcome.reason
    assert Run(run_folder(spec)).state == "failed"
    assert (run_folder(spec) / "reports" / "anomaly-000005.md").exists()


def test_a_guard_that_is_off_does_nothing(make: Make) -> None:
    spec = make(guard={"enabled": False})
    assert Session(spec, faults=Spoil(BAD)).train().kind == "finished"
    assert not events(spec, "veto", "trial", "rollback", "report", "no_copies", "alarm")
    assert not list((run_folder(spec) / "reports").iterdir())
    assert losses(spec)[BAD + 1][1] == "nan", "it went into the weights"


def test_a_run_whose_last_step_is_vetoed_has_its_last_checkpoint(make: Make) -> None:
    spec = make()
    outcome = Session(spec, faults=Spoil(STEPS - 1)).train()
    assert outcome.kind == "finished" and outcome.validation is not None
    folder, manifest = CheckpointStore(run_folder(spec) / "checkpoints").committed()[-1]
    assert manifest.step == STEPS and read_manifest(folder).validation_loss == outcome.validation["loss"]


def test_a_damaged_checkpoint_is_passed_over_in_a_rollback(make: Make) -> None:
    spec = make(guard={"copies": "off"}, checkpoint={"every": 10, "keep_last": 9})

    def damage(job: Job) -> None:
        flip(job)
        newest = CheckpointStore(job.recorder.run.checkpoints).confirmed()[0]
        shard = newest / "__0_0.distcp"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)

    assert Session(spec, faults=Break(damage)).train().kind == "finished"
    (passed,), (back,) = events(spec, "checkpoint_passed_over"), events(spec, "rollback")
    assert (passed["checkpoint"], back["origin"]) == ("step-00000020.a1", "step-00000010.a1")
    assert [step for step, _ in losses(spec)] == list(range(STEPS))


@pytest.mark.slow
def test_examinations_that_convict_nobody_change_no_digit(make: Make, unbroken: RunSpec) -> None:
    spec = make(guard={"suspect_sigma": 0.01})
    assert Session(spec).train().kind == "finished"
    examined = events(spec, "examined")
    assert len(examined) > 5 and not any(event["convicted"] for event in examined)
    assert not events(spec, "exclude", "trial", "veto")
    assert losses(spec) == losses(unbroken) and last_weights(spec) == last_weights(unbroken)


def test_planted_documents_are_convicted_without_a_veto_and_no_honest_one_is(make: Make, tmp_path: Path) -> None:
    """A page of noise in four short rows, and honest pages with ruled lines: the rows of a document come together."""
    draw, path = random.Random(0), write_corpus(tmp_path / "mixed.jsonl", 240)
    lines = path.read_text().splitlines()
    for row in range(0, 240, 8):
        lines[row] = json.dumps({"text": json.loads(lines[row])["text"] + "\n" + "#" * 79})
    planted = {101, 141, 181, 221}  # rows of a file are counted from 1
    for row in planted:
        lines[row - 1] = json.dumps({"text": "".join(draw.choices("qxzjvkwyb0123456789", k=160))})
    path.write_text("\n".join(lines) + "\n")
    data = {"sources": {"words": {"path": [str(path)]}}, "context": 32, "validation": 0.0}
    spec = make(data=data, guard={"loss_sigma": 100.0, "grad_sigma": 100.0})
    assert Session(spec).train().kind == "finished"
    listed = [json.loads(line) for line in (run_folder(spec) / "exclusions.jsonl").open()]
    assert listed and {entry["row"] for entry in listed} <= planted
    assert not events(spec, "veto") and all("unlike" in entry["reason"] for entry in listed)
    assert [step for step, _ in losses(spec)] == list(range(STEPS))


def test_a_checkpoint_from_before_rows_were_judged_is_gone_on_from(
    make: Make, unbroken: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Judge.state
    monkeypatch.setattr(Judge, "state", lambda self: {k: v for k, v in state(self).items() if k != "rows"})
    spec = make(checkpoint={"every": 40})

    class End(Faults):
        def before_step(self, job: Job, step: int) -> None:
            if step == 50:
                raise RuntimeError("the end of this start")

    with pytest.raises(RuntimeError):
        Session(spec, faults=End()).train()
    monkeypatch.undo()
    assert Session(spec).train().kind == "finished"
    assert losses(spec) == losses(unbroken)
