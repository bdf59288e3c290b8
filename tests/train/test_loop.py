"""The loop's own book-keeping on a tiny job: every step once, and what is left behind when a run fails."""

from types import SimpleNamespace

import pytest
import torch

from bessemer.guard.judge import Judge
from bessemer.model.transformer import build
from bessemer.optim.guarded import GuardedAdamW
from bessemer.optim.schedule import Schedule
from bessemer.plan.decide import Interval
from bessemer.run.directory import RunWriter
from bessemer.spec.schema import BudgetSpec, CheckpointSpec, GuardSpec, OptimizerSpec, StopSpec
from bessemer.train.evaluate import Evaluator
from bessemer.train.job import Interrupt, Job, Progress
from bessemer.train.loop import train_loop
from bessemer.train.objective import CausalLM

CPU = torch.device("cpu")
STEPS = 24


class Quiet:
    """A view that shows nothing."""

    def step(self, record): ...
    def validation(self, record): ...
    def event(self, record): ...


class Saves(list):
    """Stands for the disk: (step, validation loss, steps written down by then)."""

    def save(self, job, step, validation_loss):
        self.append((step, validation_loss, [record["step"] for record in job.run.metrics()]))
        return f"step-{step}"


@pytest.fixture
def make_job(tmp_path, shape, store_of, stream_of):
    opened = []

    def make(evaluate=None, save=None, stop=None, **guard):
        model = build(shape, "cpu", 0)
        plan = SimpleNamespace(
            total_steps=STEPS,
            micro_rows=2,
            precision="fp32",
            evaluate=Interval(evaluate, None),
            save=Interval(save, None),
        )
        spec = SimpleNamespace(
            guard=GuardSpec(**guard),
            optimizer=OptimizerSpec(),
            checkpoint=CheckpointSpec(),
            budget=BudgetSpec(stop=StopSpec(**(stop or {}))),
        )
        opened.append(RunWriter(tmp_path / f"run{len(opened)}"))
        return Job(
            spec=spec,
            plan=plan,
            device=CPU,
            model=model,
            objective=CausalLM(False),
            optimizer=GuardedAdamW(model.named_parameters(), (0.9, 0.95), 1e-8, 0.1),
            schedule=Schedule(1e-2, 4, STEPS),
            judge=Judge(spec.guard, CPU),
            stream=stream_of(store_of("a", [5, 13, 30, 2] * 9), 8, 4),
            evaluator=Evaluator({"v": store_of("v", [9] * 10, seed=5)}, 8, 200, 4, "fp32", CPU),
            run=opened[-1],
            view=Quiet(),
            saver=Saves(),
            flops_per_token=1000,
            peak_flops=1e9,
            interrupt=Interrupt(),
            progress=Progress(),
        )

    yield make
    for run in opened:
        run.close()


def poison(job, first, last=10**9):
    """Gradients are NaN from one step to another, both included."""
    calls = []

    def spoil(gradient):
        calls.append(True)
        step = (len(calls) - 1) // 2  # two micro-batches a step
        return gradient * float("nan") if first <= step <= last else gradient

    job.model.norm.weight.register_hook(spoil)


def steps_of(job):
    return [record["step"] for record in job.run.metrics()]


def test_every_step_is_written_down_once_and_before_its_save(make_job):
    job = make_job(evaluate=10, save=7)
    outcome = train_loop(job)
    assert (outcome.kind, outcome.step) == ("finished", STEPS)
    assert steps_of(job) == list(range(STEPS))
    assert [record["step"] for record in job.run.validations()] == [0, 10, 20, 24]
    assert all(written == list(range(step)) for step, _, written in job.saver)
    assert {7, 14, 21, 24} <= {step for step, _, _ in job.saver}
    assert job.progress.tokens == STEPS * 32
    scored = {step: loss for step, loss, _ in job.saver if loss is not None}
    measured = {record["step"]: record["loss"] for record in job.run.validations()}
    assert scored.items() <= measured.items()


def test_vetoed_steps_keep_their_number_and_the_weights(make_job):
    job = make_job(max_vetoes=5)
    poison(job, 6, 8)
    assert train_loop(job).kind == "finished"
    records = list(job.run.metrics())
    assert [record["step"] for record in records if record["veto"]] == [6, 7, 8]
    assert [record["lr"] for record in records] == [job.schedule.lr(step) for step in range(STEPS)]
    assert float(job.optimizer.state()["norm.weight.step"]) == STEPS - 3
    assert job.progress.vetoes == 3


def test_a_run_that_fails_has_the_weights_of_its_last_good_step(make_job):
    job, good = make_job(max_vetoes=3), make_job()
    poison(job, 6)
    outcome = train_loop(job)
    assert outcome.kind == "failed" and "3 steps in a row" in outcome.reason
    good.plan.total_steps = 6
    train_loop(good)
    for a, b in zip(job.model.parameters(), good.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_that_fails_has_a_record_of_every_step_it_counts(make_job):
    job = make_job(max_vetoes=3)
    poison(job, 6)
    outcome = train_loop(job)
    assert steps_of(job) == list(range(outcome.step))


def test_a_failed_run_s_last_save_claims_no_validation_it_did_not_have(make_job):
    job = make_job(max_vetoes=3)
    poison(job, 6)
    outcome = train_loop(job)
    evaluated = {record["step"] for record in job.run.validations()}
    assert outcome.step not in evaluated
    assert [loss for step, loss, _ in job.saver if step == outcome.step] == [None]
