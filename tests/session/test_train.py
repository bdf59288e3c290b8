"""Whole runs, as a user starts them: they finish, stop, resume digit for digit, and refuse what would spoil them."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.errors import UserError
from bessemer.observe.view import RunView
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec
from bessemer.train import step as one_step
from bessemer.train.job import Job, Outcome

from .conftest import Faults, spec_data, train_until

Make = Callable[..., RunSpec]
SHORT = {"steps": 14}  # of a run that is stopped after step 6


def losses(spec: RunSpec) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in Run(run_folder(spec)).metrics()]


def events(spec: RunSpec, kind: str) -> list[dict[str, Any]]:
    return list(Run(run_folder(spec)).events(kind))


def train(spec: RunSpec) -> Outcome:
    return Session(spec).train()


def test_a_run_finishes_and_its_records_are_whole(make_spec: Make) -> None:
    spec = make_spec()
    outcome = train(spec)
    run = Run(run_folder(spec))
    assert (outcome.kind, outcome.step, run.state) == ("finished", 40, "finished")
    records = list(run.metrics())
    assert [record["step"] for record in records] == list(range(40))
    assert records[-1]["loss"] < records[0]["loss"] - 1
    assert records[-1]["tokens"] == 40 * 128
    validations = list(run.validations())
    assert [record["step"] for record in validations] == [0, 10, 20, 30, 40]
    plan = {d["key"]: d for d in json.loads((run.folder / "plan.json").read_text())["decisions"]}
    assert plan["optimizer.lr"]["source"] == "asked"
    assert plan["schedule.warmup"]["value"] == 4  # a tenth of 40 steps
    assert (run.folder / "logs" / "rank-0.log").read_text().count("\n") > 5


def test_the_same_command_again_says_that_it_is_done(make_spec: Make) -> None:
    spec = make_spec(budget={"steps": 5})
    train(spec)
    outcome = train(spec)
    assert outcome.kind == "finished"
    assert "spent already" in outcome.reason
    assert len(losses(spec)) == 5


@pytest.fixture(scope="module")
def unbroken(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """A run of 40 steps that was never stopped."""
    spec = RunSpec.model_validate(spec_data("whole", corpus, tmp_path_factory.mktemp("whole")))
    assert train(spec).kind == "finished"
    return spec


# 8 and 38: as an evaluation is due, and the last one
@pytest.mark.parametrize("stop", [pytest.param(3, marks=pytest.mark.slow), 8, pytest.param(38, marks=pytest.mark.slow)])
def test_a_resumed_run_equals_an_unbroken_one_digit_for_digit(make_spec: Make, unbroken: RunSpec, stop: int) -> None:
    broken = make_spec("broken")
    assert train_until(broken, stop).kind == "interrupted"
    assert Run(run_folder(broken)).state == "interrupted"
    assert train(broken).kind == "finished"
    assert losses(broken) == losses(unbroken)
    assert [r["loss"] for r in Run(run_folder(broken)).validations()] == [
        r["loss"] for r in Run(run_folder(unbroken)).validations()
    ]


def test_a_resumed_run_has_the_records_that_trials_compare_with(make_spec: Make) -> None:
    seen: list[dict[str, Any]] = []

    class Peek(Faults):
        def attach(self, job: Job, tokenizer: Any) -> None:
            seen.extend(job.recorder.history)

    spec = make_spec(budget={"steps": 20})
    train_until(spec, 9)
    before = list(Run(run_folder(spec)).metrics())
    assert Session(spec, faults=Peek()).train().kind == "finished"
    assert seen == before and len(before) >= 10


class StopWithin(RunView):
    """Asks a session to stop after a micro-batch of a step, or after a pass of the first evaluation."""

    def __init__(self, step: int | None, done: int) -> None:
        super().__init__()
        self.at, self.session, self.seen = (step, done), None, 0

    def micro_batch(self, step: int, done: int, total: int, tokens: int) -> None:
        super().micro_batch(step, done, total, tokens)
        self.seen += done == 1
        if (step, done) == self.at:
            self.session.interrupt.signal = "SIGINT"

    def activity(self, what: str, done: int = 0, total: int = 0) -> None:
        super().activity(what, done, total)
        if self.at == (None, done) and what.startswith("evaluating"):
            self.session.interrupt.signal = "SIGINT"


@pytest.mark.parametrize(
    ("at", "parts"),
    [
        pytest.param((0, 2), {}, marks=pytest.mark.slow),
        ((7, 1), {"dropout": {"residual": 0.1}, "optimizer": {"lr": 0.01, "ema": 0.9}}),
        pytest.param(
            (10, 3), {"model": {"moe": {"experts": 4, "top_k": 2, "ffn": 16, "choice_bias": True}}},
            marks=pytest.mark.slow,
        ),
        ((None, 1), {}),
    ],
)  # fmt: skip
def test_a_signal_in_the_middle_of_a_step_leaves_no_trace_of_it(
    make_spec: Make, at: tuple[int | None, int], parts: dict[str, Any]
) -> None:
    budget = {"steps": 12, "batch": 128, "micro_batch": 1}
    whole, broken = (make_spec(name, budget=budget, **parts) for name in ("whole", "broken"))
    train(whole)
    view = StopWithin(*at)
    view.session = Session(broken, view)
    step = at[0] or 0
    outcome = view.session.train()
    assert (outcome.kind, outcome.reason, outcome.step) == ("interrupted", "SIGINT", step)
    assert view.seen == step + (at[0] is not None)  # no step was begun after it, and that one was not ended
    assert losses(broken) == losses(whole)[:step]
    assert train(broken).kind == "finished"
    assert losses(broken) == losses(whole)
    validations = [[(r["step"], r["loss"]) for r in Run(run_folder(spec)).validations()] for spec in (broken, whole)]
    assert validations[0] == validations[1]


def test_what_is_updated_in_the_backward_pass_is_not_left_half_way(make_spec: Make) -> None:
    spec = make_spec(budget={"steps": 12, "batch": 128, "micro_batch": 4}, memory={"update": "in_backward"})
    view = StopWithin(3, 0)
    view.session = Session(spec, view)
    assert view.session.train().step == 4


def test_metrics_past_the_checkpoint_are_cut_and_the_cut_is_an_event(
    make_spec: Make, unbroken: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = make_spec("broken")
    genuine = one_step.compute_step

    def fail_at_25(job: Any, step: int, *rest: Any) -> Any:
        if step == 25:
            raise MemoryError("no memory")
        return genuine(job, step, *rest)

    monkeypatch.setattr(one_step, "compute_step", fail_at_25)
    with pytest.raises(MemoryError):
        train(broken)
    assert Run(run_folder(broken)).state == "failed"
    assert "MemoryError" in (run_folder(broken) / "logs" / "rank-0.log").read_text()
    monkeypatch.setattr(one_step, "compute_step", genuine)
    train(broken)
    assert events(broken, "metrics_cut")[-1]["from_step"] == 20
    assert losses(broken) == losses(unbroken)


def test_another_stream_is_refused_by_name(make_spec: Make) -> None:
    train_until(make_spec(), 12)
    with pytest.raises(UserError, match="sequence_length was 32, is 16"):
        train(make_spec(data={**make_spec().data.model_dump(), "context": 16}, budget={"steps": 40, "batch": 128}))
    with pytest.raises(UserError, match=r"seed was 0, is 1"):
        train(make_spec(seed=1))
    assert len(losses(make_spec())) == 14  # nothing was cut by the refusals (a step is read one step late)


def test_another_model_is_refused_and_nothing_is_lost(make_spec: Make) -> None:
    train_until(make_spec(), 12)
    with pytest.raises(UserError, match="has shape"):
        train(make_spec(model={"ffn": 128}))
    assert len(losses(make_spec())) == 14


def test_another_learning_rate_resumes_with_an_event(make_spec: Make) -> None:
    train_until(make_spec(budget=SHORT), 6)
    spec = make_spec(budget=SHORT, optimizer={"lr": 0.003})
    assert train(spec).kind == "finished"
    changed = events(spec, "spec_changed")[-1]
    assert changed["changes"] == {"optimizer.lr": [0.01, 0.003]}
    assert changed["versions"]["torch"] == torch.__version__


def test_other_threads_say_that_digits_may_differ(make_spec: Make) -> None:
    train_until(make_spec(budget=SHORT), 6)
    spec = make_spec(budget=SHORT, parallel={"threads": 2})
    try:
        train(spec)
    finally:
        torch.set_num_threads(1)
    assert "threads 1 -> 2" in events(spec, "digits_may_differ")[-1]["reason"]


def test_another_guard_window_starts_empty_and_the_run_goes_on(make_spec: Make) -> None:
    train_until(make_spec(budget=SHORT), 6)
    assert train(make_spec(budget=SHORT, guard={"window": 64})).kind == "finished"


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(make_spec: Make, unbroken: RunSpec) -> None:
    broken = make_spec("broken", checkpoint={"every": 10, "keep_last": 3})
    train_until(broken, 25)
    newest = sorted((run_folder(broken) / "checkpoints").iterdir())[-1]
    shard = newest / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    train(broken)
    assert newest.name in events(broken, "checkpoint_passed_over")[-1]["checkpoint"]
    assert losses(broken) == losses(unbroken)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(make_spec: Make) -> None:
    train_until(make_spec(), 12)
    for shard in (run_folder(make_spec()) / "checkpoints").glob("*/__0_0.distcp"):
        shard.write_bytes(b"")
    with pytest.raises(UserError, match=r"distcp: 0 bytes, .* No checkpoint verifies. Refusing to start"):
        train(make_spec())
    assert len(losses(make_spec())) == 14


@pytest.mark.parametrize(
    ("stop", "word"),
    [({"validation_loss": 5.0}, "validation_loss"), ({"time": "0.05 s"}, "time"), ({"patience": 1}, "patience")],
)
def test_stopping_rules_end_a_run_as_finished_with_the_reason(make_spec: Make, stop: dict[str, Any], word: str) -> None:
    spec = make_spec(
        budget={"steps": 400, "batch": 128, "stop": stop}, optimizer={"lr": 0.3 if word == "patience" else 0.01}
    )
    outcome = train(spec)
    assert outcome.kind == "finished"
    assert word in outcome.reason
    assert outcome.step < 400
    assert Run(run_folder(spec)).state == "finished"


@pytest.mark.slow  # the document of test_exclude.py is named as well
def test_a_poisoned_document_is_vetoed_by_name(make_spec: Make, tmp_path: Path) -> None:
    poison = tmp_path / "noise.txt"
    poison.write_text("".join(map(chr, random.Random(0).choices(range(1, 32), k=2000))))
    sources = {**make_spec().data.model_dump()["sources"], "noise": {"path": [str(poison)], "weight": 0.02}}
    spec = make_spec(data={"sources": sources, "context": 32, "validation": 0.1}, budget={"steps": 160, "batch": 32})
    assert train(spec).kind == "finished"
    vetoes = events(spec, "veto")
    assert vetoes
    assert all(veto["documents"][0]["file"] == str(poison) for veto in vetoes)
    assert vetoes[0]["documents"][0]["share"] > 0.5
    assert vetoes[0]["statistics"]["loss_z"] > 10


def test_a_mixture_and_a_batch_change_reopen_the_guard(make_spec: Make, corpus: Path) -> None:
    sources = {"words": {"path": [str(corpus)]}, "again": {"path": [str(corpus)]}}
    phases = [{"start": 20 * 128, "weights": {"again": 1.0}}]
    changes = [{"from_step": 30, "batch": 256}]
    spec = make_spec(
        data={"sources": sources, "phases": phases, "context": 32, "validation": 0.1},
        budget={"steps": 40, "batch": 128, "batch_changes": changes},
    )
    train(spec)
    assert [event["step"] for event in events(spec, "guard_reopened")] == [20, 30]
    assert [record["tokens"] for record in Run(run_folder(spec)).metrics()][-1] == 30 * 128 + 10 * 256


def test_a_full_disk_loses_a_save_and_not_the_run(make_spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.checkpoint import store as checkpoint_store

    genuine, calls = checkpoint_store.commit, []

    def refuse_once(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        genuine(*args)

    monkeypatch.setattr(checkpoint_store, "commit", refuse_once)
    spec = make_spec()
    assert train(spec).kind == "finished"
    assert "No space left" in events(spec, "save_failed")[0]["reason"]


def test_two_sessions_never_write_one_run(make_spec: Make) -> None:
    spec = make_spec(budget={"steps": 5})

    class StartAnother(RunView):
        refusal = ""

        def step(self, record: dict[str, Any]) -> None:
            if record["step"] == 2:
                with pytest.raises(UserError) as refused:
                    train(spec)
                StartAnother.refusal = str(refused.value)

    Session(spec, StartAnother()).train()
    assert "being written by process" in StartAnother.refusal
    assert len(losses(spec)) == 5


def test_another_batch_size_is_refused_with_the_way_to_change_it(make_spec: Make) -> None:
    train_until(make_spec(), 12)
    with pytest.raises(UserError, match=r"batch_changes: \[\{from_step: 14, batch: 256\}\]"):
        train(make_spec(budget={"steps": 40, "batch": 256}))
    changes = [{"from_step": 14, "batch": 256}]
    spec = make_spec(budget={"steps": 40, "batch": 128, "batch_changes": changes})
    assert train(spec).kind == "finished"
    assert list(Run(run_folder(spec)).metrics())[-1]["tokens"] == 14 * 128 + 26 * 256


def test_a_run_killed_before_its_first_save_is_planned_anew(make_spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("no memory")

    genuine = one_step.compute_step
    monkeypatch.setattr(one_step, "compute_step", fail)
    with pytest.raises(MemoryError):
        train(make_spec(budget=SHORT, optimizer={"lr": "auto"}))
    monkeypatch.setattr(one_step, "compute_step", genuine)
    spec = make_spec(budget=SHORT, optimizer={"lr": "auto"}, model={"ffn": 128})
    assert train(spec).kind == "finished"


def test_without_a_fused_optimizer_the_run_says_so_and_still_vetoes(
    make_spec: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bessemer.optim.choose.veto_fault", lambda spec, path, *_: "broken" if path == "fused" else None
    )
    spec = make_spec(budget={"steps": 24})

    class Infinite(Faults):
        def after_backward(self, job: Job, step: int) -> None:
            if step == 20:
                job.engine.model.norm.weight.grad *= float("inf")

    assert Session(spec, faults=Infinite()).train().kind == "finished"
    assert "read on the host" in events(spec, "optimizer_fallback")[0]["reason"]
    assert [event["step"] for event in events(spec, "veto")] == [20]
