"""The loop's own book-keeping on a tiny job: every step once, and how it stands still at an incident."""

from types import SimpleNamespace

import pytest
import torch

from bessemer.guard.alarm import make_alarm
from bessemer.guard.detectors import Detectors
from bessemer.guard.judge import Judge
from bessemer.guard.ladder import Ladder
from bessemer.guard.layer_stats import LayerStats
from bessemer.model.transformer import build_model
from bessemer.optim.choose import make_optimizer
from bessemer.plan.decide import Interval
from bessemer.plan.schedule import Schedule
from bessemer.run.directory import RunWriter
from bessemer.spec.guard import GuardSpec
from bessemer.spec.optimizer import OptimizerSpec
from bessemer.spec.schema import BudgetSpec, CheckpointSpec, ObserveSpec, StopSpec
from bessemer.train import job as job_module
from bessemer.train.engine import Engine
from bessemer.train.evaluate import Evaluator
from bessemer.train.job import Adjustment, Clock, DataFeed, Guard, Job, Recorder
from bessemer.train.loop import train_loop
from bessemer.train.memory.snapshots import MemorySnapshots
from bessemer.train.objective import Pretrain

CPU = torch.device("cpu")
STEPS = 24


class Quiet:
    """A view that shows nothing."""

    def step(self, record): ...
    def validation(self, record): ...
    def event(self, record): ...
    def micro_batch(self, step, done, total, tokens): ...
    def activity(self, what, done=0, total=0): ...


class Saves(list):
    """Stands for the disk: (step, validation loss, steps written down by then)."""

    def save(self, job, step, validation_loss):
        self.append((step, validation_loss, [record["step"] for record in job.recorder.run.metrics()]))
        return f"step-{step}"

    def poll(self, job): ...
    def confirm(self, job, done): ...
    def wait(self, job, uploads=False):
        return True

    def interval_s(self, job):
        return None


class Spoil:
    """Gradients are NaN at some steps, by the protocol that `bessemer chaos` uses."""

    def __init__(self, *steps):
        self.steps, self.asked = steps, []

    def before_step(self, job, step): ...
    def after_backward(self, job, step):
        if step in self.steps:
            job.engine.model.norm.weight.grad *= float("nan")

    def lr(self, step, planned):
        self.asked.append(step)
        return planned


@pytest.fixture
def make_job(tmp_path, shape, store_of, stream_of):
    opened = []

    def make(evaluate=None, save=None, stop=None, look=1000, faults=None, **guard):
        model = build_model(shape, "cpu", 0)
        plan = SimpleNamespace(
            total_steps=STEPS,
            micro_rows=2,
            precision="fp32",
            evaluate=Interval(evaluate, None),
            save=Interval(save, None),
            look=Interval(look, None),
            copy=Interval(4, None),
        )
        spec = SimpleNamespace(
            data=SimpleNamespace(workers=1),
            guard=GuardSpec(**guard),
            optimizer=OptimizerSpec(),
            observe=ObserveSpec(),
            checkpoint=CheckpointSpec(),
            budget=BudgetSpec(stop=StopSpec(**(stop or {}))),
        )
        opened.append(RunWriter(tmp_path / f"run{len(opened)}"))
        optimizer = make_optimizer(model.named_parameters(), OptimizerSpec())
        stream = stream_of(store_of("a", [5, 13, 30, 2] * 9), 8, 4)
        evaluator = Evaluator({"v": store_of("v", [9] * 10, seed=5)}, 8, 200, 4, "fp32", CPU)
        return Job(
            Engine(spec, plan, CPU, model, Pretrain(False), optimizer, Schedule(1e-2, 4, STEPS)),
            DataFeed(stream, evaluator, str),
            Guard(Judge(spec.guard, CPU), Detectors(spec.guard, None, STEPS), LayerStats(model), Ladder(spec.guard)),
            Recorder(opened[-1], Quiet(), 1000, 1e9),
            saver=Saves(),
            faults=faults,
        )

    yield make
    for run in opened:
        run.close()


def steps_of(job):
    return [record["step"] for record in job.recorder.run.metrics()]


def events_of(job, kind):
    return list(job.recorder.run.events(kind))


def run_through(job):
    """Go on after every incident as if nothing had to be done; (last outcome, incidents)."""
    found = []
    while (outcome := train_loop(job)).incident:
        found.append(outcome.incident)
        job.start_step = outcome.step
        assert len(found) < 50
    return outcome, found


def weights(job):
    return [parameter.detach().clone() for parameter in job.engine.model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_every_step_is_written_down_once_and_before_its_save(make_job):
    job = make_job(evaluate=10, save=7)
    outcome = train_loop(job)
    assert (outcome.kind, outcome.step) == ("finished", STEPS)
    assert steps_of(job) == list(range(STEPS))
    assert [record["step"] for record in job.recorder.run.validations()] == [0, 10, 20, 24]
    assert all(written == list(range(step)) for step, _, written in job.saver)
    assert {7, 14, 21, 24} <= {step for step, _, _ in job.saver}
    assert job.recorder.progress.tokens == STEPS * 32
    scored = {step: loss for step, loss, _ in job.saver if loss is not None}
    measured = {record["step"]: record["loss"] for record in job.recorder.run.validations()}
    assert scored.items() <= measured.items()


def test_vetoed_steps_keep_their_number_and_the_weights(make_job):
    job = make_job(faults=Spoil(6, 7, 8), evaluate=10, save=7)
    outcome, incidents = run_through(job)
    assert (outcome.kind, outcome.step) == ("finished", STEPS)
    assert [(found.step, found.severity) for found in incidents] == [(6, "veto"), (7, "veto"), (8, "veto")]
    records = list(job.recorder.run.metrics())
    assert [record["step"] for record in records] == list(range(STEPS))
    assert [record["step"] for record in records if record["veto"]] == [6, 7, 8]
    assert [record["lr"] for record in records] == [job.engine.schedule.lr(step) for step in range(STEPS)]
    assert float(job.engine.optimizer.state()["norm.weight.step"]) == STEPS - 3
    assert job.recorder.progress.vetoes == 3
    assert [record["step"] for record in job.recorder.history] == list(range(STEPS))


@pytest.mark.parametrize("save", [None, 7], ids=["within", "at a boundary"])
def test_at_an_incident_the_weights_are_those_that_the_step_was_judged_with(make_job, save):
    job, good = make_job(faults=Spoil(6), save=save), make_job()
    outcome = train_loop(job)
    assert (outcome.kind, outcome.step, outcome.incident.step) == ("incident", 7, 6)
    assert outcome.incident.symptom == "non-finite loss or gradient" == outcome.incident.record["veto"]
    assert outcome.incident.statistics["streak"] == 1
    wanted = job.data.stream.micro_batches(6, 2)
    for ours, theirs in zip(outcome.incident.batches, wanted, strict=True):
        assert (ours.tokens == theirs.tokens).all()
    assert steps_of(job) == list(range(7)), "the step that was under way is not written down"
    assert all(parameter.grad is None for parameter in job.engine.model.parameters())
    good.plan.total_steps = 6
    train_loop(good)
    assert same(weights(job), weights(good))
    assert float(job.engine.optimizer.state()["norm.weight.step"]) == 6


def test_what_was_under_way_at_an_incident_is_done_again_and_nothing_else(make_job):
    """A run that stands still at an alarm and goes on equals one that never stood still."""
    job, whole = make_job(), make_job()
    genuine = job.guard.detectors.step

    def cry(record, clocks):
        return (
            make_alarm("divergence", 9, "rollback", "it leaves", 1.0)
            if record["step"] == 9
            else genuine(record, clocks)
        )

    job.guard.detectors.step = cry
    outcome, (incident,) = run_through(job)
    assert outcome.kind == "finished"
    assert (incident.step, incident.severity, incident.symptom) == (9, "rollback", "it leaves")
    assert incident.alarm.kind == "divergence" and incident.record["veto"] is None
    train_loop(whole)
    assert same(weights(job), weights(whole))
    told = events_of(job, "alarm")
    assert [(event["step"], event["alarm"], event["severity"]) for event in told] == [(9, "divergence", "rollback")]
    assert {"reason", "evidence", "cause", "confidence", "fix"} <= told[0].keys()


@pytest.mark.parametrize("severity", ["note", "warning"])
def test_an_alarm_that_asks_for_nothing_is_only_an_event(make_job, severity):
    job = make_job()
    job.guard.detectors.step = lambda record, _: (
        make_alarm("plateau", 9, severity, "flat", 0.5) if record["step"] == 9 else []
    )
    assert train_loop(job).kind == "finished"
    assert [event["severity"] for event in events_of(job, "alarm")] == [severity]


@pytest.mark.parametrize("bad", [(STEPS - 1,), (STEPS - 2, STEPS - 1)])
def test_a_run_whose_last_step_is_vetoed_is_still_evaluated_and_saved(make_job, bad):
    job = make_job(faults=Spoil(*bad), evaluate=10, save=7)
    outcome, incidents = run_through(job)
    assert (outcome.kind, outcome.step) == ("finished", STEPS)
    assert len(incidents) == len(bad)
    assert job.saver[-1][0] == STEPS and job.saver[-1][2] == list(range(STEPS))
    assert outcome.validation["step"] == STEPS == list(job.recorder.run.validations())[-1]["step"]


def test_a_guard_that_is_off_reports_no_incident(make_job):
    job = make_job(faults=Spoil(6), look=5, enabled=False)
    assert train_loop(job).kind == "finished"
    assert [record["veto"] for record in job.recorder.run.metrics()] == [None] * STEPS
    assert not all(parameter.isfinite().all() for parameter in job.engine.model.parameters())
    assert not events_of(job, "veto") and not events_of(job, "alarm")


def test_a_look_inside_changes_no_digit(make_job):
    looked, plain = make_job(look=3), make_job()
    seen = []
    looked.guard.detectors.check_layers = lambda step, look: seen.append((step, look)) or []
    train_loop(looked)
    train_loop(plain)
    assert [step for step, _ in seen] == list(range(0, STEPS, 3))
    assert {"grad_norm", "update_ratio", "entropy"} <= seen[0][1]["layers"]["blocks.0"].keys()
    assert same(weights(looked), weights(plain))


def test_copies_are_of_states_between_steps(make_job):
    job, good = make_job(), make_job()
    job.guard.snapshots = MemorySnapshots()
    train_loop(job)
    assert [kept.step for kept in job.guard.snapshots.held] == [16, 20]
    good.plan.total_steps = 16
    train_loop(good)
    for name, parameter in good.engine.model.named_parameters():
        assert torch.equal(job.guard.snapshots.held[0].state[f"model.{name}"], parameter)
    # The step before is read before the copy is taken, so its counters are those of the same moment.
    assert [kept.progress.tokens for kept in job.guard.snapshots.held] == [16 * 32, 20 * 32]


def test_a_gentler_step_lasts_as_long_as_it_is_meant_to(make_job):
    job = make_job(faults=Spoil())
    job.guard.adjustments = [Adjustment(5, 9, 0.5, 0.25), Adjustment(8, 12, 0.5, 1.0)]
    train_loop(job)
    lrs = {
        record["step"]: record["lr"] / job.engine.schedule.lr(record["step"]) for record in job.recorder.run.metrics()
    }
    clips = {record["step"]: record["clip"] for record in job.recorder.run.metrics()}
    assert [lrs[step] for step in (4, 5, 8, 9, 11, 12)] == pytest.approx([1.0, 0.5, 0.25, 0.5, 0.5, 1.0])
    assert [clips[step] for step in (4, 5, 8, 9)] == [1.0, 0.25, 0.25, 1.0]
    assert job.faults.asked == list(range(STEPS))


def test_after_an_incident_saves_are_four_times_as_frequent(make_job):
    job = make_job(save=8)
    job.guard.frequent_saves_until = 10
    train_loop(job)
    assert [step for step, _, _ in job.saver] == [2, 4, 6, 8, 16, 24]


def test_a_step_without_anything_to_learn_from_changes_nothing(make_job):
    job, calm = make_job(), make_job()
    bare = {("a", document): 5 * 4 for document in range(36)}  # all of them, from step 5 on
    job.data.stream = job.data.stream.replace(banned=bare)
    calm.plan.total_steps = 5
    train_loop(job)
    train_loop(calm)
    records = list(job.recorder.run.metrics())
    assert [record["loss"] for record in records[5:]] == [0.0] * (STEPS - 5)
    assert job.recorder.progress.tokens == 5 * 32 and job.recorder.progress.vetoes == 0
    assert same(weights(job), weights(calm))


def test_trouble_every_few_steps_does_not_put_off_saves_that_are_due_by_time(make_job, monkeypatch):
    """A step takes ten seconds here and saves are due every hundred; every third step is vetoed."""
    now, job = [0.0], make_job(faults=Spoil(*range(2, STEPS - 1, 3)))
    monkeypatch.setattr(job_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    job.clocks["save"] = Clock(Interval(None, 100.0), 0.0)
    job.faults.before_step = lambda job, step: now.__setitem__(0, now[0] + 10.0)
    outcome, incidents = run_through(job)
    assert outcome.kind == "finished" and len(incidents) == 7
    saved = [step for step, _, _ in job.saver]
    assert len(saved) >= 3 and max(b - a for a, b in zip([0, *saved], saved, strict=False)) <= 10
