"""What a step's record says of itself, against numbers computed by hand."""

from types import SimpleNamespace

import pytest
import torch

from bessemer.guard.alarm import make_alarm
from bessemer.guard.judge import ACCEPT, GRAD_OUTLIER, LOSS, LOSS_OUTLIER, NONFINITE
from bessemer.spec.guard import GuardSpec
from bessemer.spec.optimizer import OptimizerSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import ScalarTransfer
from bessemer.train.engine import Engine, PassResult
from bessemer.train.job import DataFeed, Guard, Job, Progress, Recorder
from bessemer.train.step import StepResult, report_step


class Log(list):
    """Stands for the run and for the view: remembers what it is told."""

    unwritten = ""

    def step(self, record):
        self.append(record)


@pytest.fixture
def job(store_of, stream_of):
    events = []
    shape = ModelShape(vocab=100, width=8, layers=3, heads=2, kv_heads=1, head_dim=4, ffn=10)
    spec = SimpleNamespace(guard=GuardSpec(max_vetoes=3), optimizer=OptimizerSpec(clip=1.0))
    objective = SimpleNamespace(columns=None, metrics=("accuracy",), judged=LOSS)
    optimizer = SimpleNamespace(rejects_before_update=True)
    job = Job(
        Engine(spec, None, torch.device("cpu"), None, objective, optimizer, None),
        DataFeed(stream_of(store_of("a", [5, 13, 30, 2] * 9), 8, 4), None, str),
        Guard(None, SimpleNamespace(step=lambda record, clocks: []), None, None),
        Recorder(Log(), Log(), shape.flops_per_token(16), 2e9),
        saver=None,
    )
    job.recorder.progress = Progress(tokens=1000, elapsed_s=10.0, vetoes=2, clipped=1)
    job.lr, job.events = lambda step: 3e-4, events
    job.recorder.event = lambda kind, **details: events.append({"kind": kind, **details})
    return job


def attempt_of(
    job, code=ACCEPT, loss=2.5, norm=0.5, correct=16.0, streak=0.0, reopened=0.0, gave_way=0.0, step=7, suspect=0.0
):
    verdict = {
        "code": code, "streak": streak, "reopened": reopened, "gave_way": gave_way, "suspect": suspect, "loss_z": 1.25,
        "loss_center": 2.4, "loss_scale": 0.05, "grad_z": -0.5, "grad_center": 0.45, "grad_scale": 0.25, "row_z": 0.75,
        "row_center": 0.04, "row_scale": 0.01,
    }  # fmt: skip
    scalars = {"loss": loss, "grad_norm": norm, "sum.accuracy": correct, "count.accuracy": 64.0}
    if job.spec.guard.enabled:
        scalars |= {f"guard.{name}": value for name, value in verdict.items()}
    batches = job.data.stream.micro_batches(step, 2)
    losses = [torch.full(batch.targets.shape, 2.5) for batch in batches]
    return StepResult(
        step=step,
        lr=3e-4,
        clip=1.0,
        tokens=64,
        memory_bytes=5_000_000,
        scalars=ScalarTransfer({name: torch.tensor(float(value)) for name, value in scalars.items()}),
        losses=PassResult(torch.tensor(loss), torch.tensor([[correct, 64.0]]), losses),
        batches=batches,
        wait_s=0.001,
        read=80,
        step_s=0.5,
    )


def test_throughput_and_utilisation_by_hand(job):
    assert report_step(job, attempt_of(job)) is None
    (record,) = job.recorder.run
    # 100 x 8 embedding, 3 layers of 8 x (2 x 8 + 2 x 4) + 3 x 8 x 10: 2,096 in products; seven norms of 8 are in none.
    flops_per_token = 6 * 2096 + 12 * 3 * 8 * 16
    assert job.recorder.flops_per_token == flops_per_token
    assert record["tokens_per_s"] == 160.0  # 80 tokens in half a second, 64 of them in the loss
    assert record["mfu"] == round(160 * flops_per_token / 2e9, 4) == 0.0014
    assert record["accuracy"] == 0.25
    assert record["tokens"] == 1064
    assert record["step_s"] == 0.5 and record["data_wait_s"] == 0.001
    assert (record["step"], record["loss"], record["grad_norm"], record["lr"]) == (7, 2.5, 0.5, 3e-4)
    assert record["veto"] is None and record["clipped"] is False
    assert record["memory_bytes"] > 1e6
    assert list(job.recorder.view) == list(job.recorder.run) and job.events == []


def test_utilisation_is_one_when_the_peak_is_reached(job):
    job.recorder.peak_flops = 80 * job.recorder.flops_per_token / 0.5
    report_step(job, attempt_of(job))
    assert job.recorder.run[0]["mfu"] == 1.0


def test_totals_add_up_over_steps(job):
    for step in range(4):
        report_step(job, attempt_of(job, norm=0.5 + step, step=step))
    assert job.recorder.progress == Progress(tokens=1256, elapsed_s=12.0, vetoes=2, clipped=4)
    assert [record["clipped"] for record in job.recorder.run] == [False, True, True, True]
    assert [record["tokens"] for record in job.recorder.run] == [1064, 1128, 1192, 1256]


@pytest.mark.parametrize(
    ("code", "word"),
    [
        (NONFINITE, "non-finite loss or gradient"),
        (LOSS_OUTLIER, "loss outlier"),
        (GRAD_OUTLIER, "gradient-norm outlier"),
    ],
)
def test_a_veto_is_an_event_with_its_statistics_and_documents(job, code, word):
    attempt = attempt_of(job, code, loss=9.0, norm=4.0, streak=1.0)
    incident = report_step(job, attempt)
    assert (incident.step, incident.symptom, incident.severity) == (7, word, "veto")
    assert incident.record is job.recorder.run[0] and incident.batches is attempt.batches and incident.alarm is None
    (event,) = job.events
    assert incident.statistics == event["statistics"]
    assert (event["kind"], event["step"], event["reason"]) == ("veto", 7, word)
    assert (event["loss"], event["grad_norm"]) == (9.0, 4.0)
    assert event["statistics"] == pytest.approx(
        {
            "streak": 1.0, "gave_way": 0.0, "loss_z": 1.25, "loss_center": 2.4, "loss_scale": 0.05, "grad_z": -0.5,
            "grad_center": 0.45, "grad_scale": 0.25, "row_z": 0.75, "row_center": 0.04, "row_scale": 0.01,
        },
        abs=1e-4,
    )  # fmt: skip
    shares = {(share.file, share.row): share.tokens for share in job.data.stream.origins(7)}
    blamed = {(entry["file"], entry["row"]): entry["tokens"] for entry in event["documents"]}
    assert len(blamed) == min(8, len(shares)) and blamed.items() <= shares.items()
    assert job.recorder.run[0]["veto"] == word and job.recorder.progress.vetoes == 3


def test_a_norm_that_is_not_finite_was_not_clipped(job):
    report_step(job, attempt_of(job, NONFINITE, norm=float("inf"), streak=1.0))
    assert job.recorder.run[0]["clipped"] is False and job.recorder.progress.clipped == 1


def test_an_alarm_is_an_incident_when_it_asks_for_more_than_a_note(job):
    said = {}
    job.guard.detectors.step = lambda record, clocks: said.get(record["step"], [])
    said[1] = make_alarm("plateau", 1, "note", "flat", 0.5)
    said[2] = make_alarm("divergence", 2, "rollback", "leaving", 0.9)
    said[3] = make_alarm("divergence", 3, "stop", "gone", 0.9)
    found = [report_step(job, attempt_of(job, step=step)) for step in (1, 2, 3)]
    assert found[0] is None
    assert [(f.step, f.symptom, f.severity, f.alarm.kind) for f in found[1:]] == [
        (2, "leaving", "rollback", "divergence"),
        (3, "gone", "stop", "divergence"),
    ]
    assert [event["kind"] for event in job.events] == ["alarm"] * 3


def test_an_alarm_on_a_vetoed_step_sets_how_far_to_go_and_not_the_symptom(job):
    job.guard.detectors.step = lambda record, clocks: make_alarm("nonfinite", 7, "rollback", "five in a row", 1.0)
    incident = report_step(job, attempt_of(job, NONFINITE, loss=float("nan"), streak=5.0))
    assert (incident.symptom, incident.severity) == ("non-finite loss or gradient", "rollback")


def test_the_learning_rate_that_was_used_is_watched_against_the_planned_one(job):
    seen = []
    job.guard.detectors.step = lambda record, clocks: seen.append(record) or []
    job.lr = lambda step: 1e-5
    report_step(job, attempt_of(job))
    assert (seen[0]["lr"], seen[0]["lr_planned"]) == (3e-4, 1e-5)
    assert "lr_planned" not in job.recorder.run[0]


def test_a_recovery_is_watched_until_it_is_told(job):
    asked = []
    job.guard.recovery_checks = [
        SimpleNamespace(step=lambda record: asked.append(record["step"]) or record["step"] == 2)
    ]
    for step in range(4):
        report_step(job, attempt_of(job, step=step))
    assert asked == [0, 1, 2] and job.guard.recovery_checks == []
    assert [record["step"] for record in job.recorder.history] == [0, 1, 2, 3]


def test_a_window_that_starts_anew_is_an_event(job):
    report_step(job, attempt_of(job, ACCEPT, reopened=1.0))
    assert [event["kind"] for event in job.events] == ["guard_reopened"]


def test_a_guard_that_gives_way_says_so(job):
    assert report_step(job, attempt_of(job, ACCEPT, gave_way=1.0)) is None
    (event,) = job.events
    assert event["kind"] == "guard_gave_way" and "5% of the last 128 steps" in event["reason"]


def test_with_the_guard_off_nothing_is_called_a_veto(job):
    job.spec.guard = GuardSpec(enabled=False)
    assert report_step(job, attempt_of(job, NONFINITE, streak=9.0)) is None
    assert job.recorder.run[0]["veto"] is None and job.recorder.progress.vetoes == 2 and job.events == []


def test_with_the_guard_off_its_window_is_nobody_s_concern(job):
    job.spec.guard = GuardSpec(enabled=False)
    report_step(job, attempt_of(job, ACCEPT, reopened=1.0))
    assert job.events == []


def test_a_suspect_step_is_an_incident_only_if_its_documents_are_convicted(job):
    asked, found = [], []
    job.guard.examine = lambda attempt, statistics: (
        asked.append((attempt.step, statistics["row_z"])) or (found or [None])[0]
    )
    assert report_step(job, attempt_of(job)) is None and asked == []
    assert report_step(job, attempt_of(job, suspect=1.0)) is None and asked == [(7, 0.75)]
    found.append("a trial")
    incident = report_step(job, attempt_of(job, suspect=1.0, step=8))
    assert (incident.step, incident.severity, incident.trial) == (8, "suspect", "a trial")
    assert job.recorder.run[-1]["veto"] is None
