"""A step that runs out of memory is tried again in smaller pieces with the same numbers, or ends the run in order."""

import json
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bessemer.guard.detectors import Detectors
from bessemer.guard.judge import Judge
from bessemer.guard.ladder import Ladder
from bessemer.guard.layer_stats import LayerStats
from bessemer.model.moe import MixtureOfExperts
from bessemer.model.transformer import build_model
from bessemer.observe.view import RunView
from bessemer.optim.choose import make_optimizer
from bessemer.plan.decide import Interval
from bessemer.plan.decision import Plan
from bessemer.plan.schedule import Schedule
from bessemer.run.directory import RunWriter
from bessemer.spec.optimizer import OptimizerSpec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape, Moe
from bessemer.train.engine import Engine
from bessemer.train.evaluate import Evaluator
from bessemer.train.job import DataFeed, Guard, Job, Outcome, Recorder
from bessemer.train.loop import train_loop
from bessemer.train.memory import fit as room
from bessemer.train.memory.snapshots import MemorySnapshots
from bessemer.train.objective import Pretrain

CPU, STEPS = torch.device("cpu"), 6
NEVER = Interval(1000, None)


@dataclass(frozen=True)
class Planned:
    """What the loop and `room` read of a plan."""

    micro_rows: int = 4
    activations: str = "none"
    total_steps: int = STEPS
    context: int = 8
    precision: str = "fp32"
    batch_rows: tuple[tuple[int, int], ...] = ((0, 4),)
    evaluate: Interval = NEVER
    save: Interval = NEVER
    look: Interval = NEVER
    copy: Interval = NEVER

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Quiet:
    def step(self, record: Any) -> None: ...
    def validation(self, record: Any) -> None: ...
    def event(self, record: Any) -> None: ...
    def micro_batch(self, step: int, done: int, total: int, tokens: int) -> None: ...
    def activity(self, what: str, done: int = 0, total: int = 0) -> None: ...


class Saves(list):
    """Stands for the disk: the steps after which it was asked to save."""

    def save(self, job: Job, step: int, validation_loss: float | None) -> str:
        self.append(step)
        return f"step-{step}"

    def poll(self, job: Job) -> None: ...
    def confirm(self, job: Job, done: int) -> None: ...
    def wait(self, job: Job, uploads: bool = False) -> bool:
        return True

    def interval_s(self, job: Job) -> None: ...


class Full(Pretrain):
    """A device whose memory ends at so many rows, from the given call on, and with `activations` none only."""

    def __init__(self, rows: int = 1000, from_call: int = 0, recomputing_helps: bool = False) -> None:
        super().__init__(cross_documents=False)
        self.rows, self.from_call, self.helps, self.calls = rows, from_call, recomputing_helps, 0

    def loss(self, model: Any, feed: Any, count: float) -> Any:
        terms = super().loss(model, feed, count)
        if not model.training:
            return terms
        self.calls += 1
        plain = not hasattr(model.blocks[0].forward, "plain")
        if self.calls > self.from_call and len(feed.tokens_BT) > self.rows and (plain or not self.helps):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")
        return terms


@pytest.fixture
def make_job(tmp_path: Any, shape: ModelShape, store_of: Any, stream_of: Any) -> Any:
    opened: list[RunWriter] = []

    def make(objective: Pretrain | None = None, kind: ModelShape = shape, **sections: Any) -> Job:
        spec = RunSpec.model_validate({"name": "x", "model": "1M", "data": {"sources": {"a": "x"}}, **sections})
        rows = spec.budget.micro_batch
        model = build_model(kind, "cpu", 0)
        run = RunWriter(tmp_path / f"run{len(opened)}")
        opened.append(run)
        run.write_file("plan.json", Plan().to_json())
        plan: Any = Planned() if rows == "auto" else Planned(micro_rows=rows)
        optimizer = make_optimizer(model.named_parameters(), OptimizerSpec())
        stream = stream_of(store_of(f"a{len(opened)}", [5, 13, 30, 2] * 9), 8, 4)
        saver: Any = Saves()
        return Job(
            Engine(spec, plan, CPU, model, objective or Full(), optimizer, Schedule(1e-2, 2, STEPS)),
            DataFeed(stream, Evaluator({}, 8, 200, 4, "fp32", CPU), str),
            Guard(Judge(spec.guard, CPU), Detectors(spec.guard, None, STEPS), LayerStats(model), Ladder(spec.guard)),
            Recorder(run, Quiet(), 1000, 1e9),
            saver,
        )

    yield make
    for run in opened:
        run.close()


def losses(job: Job) -> list[float]:
    assert [record["step"] for record in job.recorder.run.metrics()] == list(range(STEPS))
    return [record["loss"] for record in job.recorder.run.metrics()]


def weights(job: Job) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in job.engine.model.parameters()])


@pytest.mark.parametrize(("rows", "call", "events"), [(1, 0, 2), (2, 3, 1), (2, 0, 1)])
def test_a_step_is_tried_again_with_fewer_rows_and_the_same_numbers(
    make_job: Any, rows: int, call: int, events: int
) -> None:
    whole, cramped = make_job(), make_job(Full(rows, call))
    assert train_loop(whole).kind == train_loop(cramped).kind == "finished"
    assert losses(cramped) == pytest.approx(losses(whole), rel=1e-5)
    torch.testing.assert_close(weights(cramped), weights(whole), rtol=1e-4, atol=1e-6)
    told = list(cramped.recorder.run.events("out_of_memory"))
    assert len(told) == events and told[0]["step"] == call
    assert told[0]["said"] == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert "budget.micro_batch is 2 instead of 4" in told[0]["reason"] and "weights" in told[0]["reason"]


def test_the_guards_copies_go_first(make_job: Any) -> None:
    class Once(Full):
        def loss(self, model: Any, feed: Any, count: float) -> Any:
            terms = super().loss(model, feed, count)
            if self.calls == 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return terms

    job = make_job(Once())
    job.guard.snapshots = MemorySnapshots()
    assert train_loop(job).kind == "finished" and job.guard.snapshots is None and job.plan.micro_rows == 4
    (told,) = job.recorder.run.events("out_of_memory")
    assert "snapshots in memory are dropped, and rollbacks read checkpoints: the same step again" in told["reason"]


def test_what_was_found_is_kept_for_the_next_start(make_job: Any) -> None:
    job = make_job(Full(rows=1))
    train_loop(job)
    assert json.loads((job.recorder.run.folder / "settings.json").read_text())["micro_rows"] == 1
    kept = Plan.from_json((job.recorder.run.folder / "plan.json").read_text()).decisions["budget.micro_batch"]
    assert (kept.value, kept.source) == (1, "measured") and "step 0 ran out of memory with 2" in kept.reason


def test_gradients_of_a_failed_attempt_are_forgotten(make_job: Any) -> None:
    """The second of two micro-batches fails: the first one's gradients must not count twice."""
    whole = make_job(Full(), budget={"micro_batch": 2})
    cramped = make_job(Full(rows=1, from_call=1))
    cramped.engine.plan = Planned(micro_rows=2)
    train_loop(whole), train_loop(cramped)
    assert losses(cramped) == pytest.approx(losses(whole), rel=1e-5)


def test_at_one_row_more_is_computed_again(make_job: Any) -> None:
    job = make_job(Full(rows=0, recomputing_helps=True))
    assert train_loop(job).kind == "finished"
    assert (job.plan.micro_rows, job.plan.activations) == (1, "selective")
    assert losses(job) == pytest.approx(losses_of_a_plain(make_job), rel=1e-5)
    kept = Plan.from_json((job.recorder.run.folder / "plan.json").read_text())
    assert kept.value("memory.activations") == "selective"


def losses_of_a_plain(make_job: Any) -> list[float]:
    job = make_job()
    train_loop(job)
    return losses(job)


def ended(job: Job) -> tuple[Outcome, torch.Tensor]:
    """The outcome, and the weights that the last update left."""
    outcome = train_loop(job)
    return outcome, weights(job)


def test_a_written_micro_batch_ends_the_run_after_a_save(make_job: Any) -> None:
    reference = make_job(budget={"micro_batch": 4})
    reference.engine.plan = Planned(total_steps=3)
    _, expected = ended(reference)
    job = make_job(Full(rows=2, from_call=3), budget={"micro_batch": 4}, memory={"activations": "none"})
    outcome, found = ended(job)
    assert (outcome.kind, outcome.step, list(job.saver)) == ("failed", 3, [3])
    assert outcome.reason.startswith("out of memory at step 3: by estimate ")
    assert "Write budget.micro_batch: 2, or memory.activations: selective, or memory.moments: 8bit" in outcome.reason
    assert "\n" not in outcome.reason
    assert [record["step"] for record in job.recorder.run.metrics()] == [0, 1, 2]
    assert torch.equal(found, expected) and all(p.grad is None for p in job.engine.model.parameters())


def test_nothing_is_saved_at_the_first_step_or_where_weights_have_moved(make_job: Any) -> None:
    job = make_job(Full(rows=2), budget={"micro_batch": 4}, memory={"activations": "full"})
    assert train_loop(job).kind == "failed" and job.saver == []
    job = make_job(Full(rows=2, from_call=2))
    job.engine.optimizer.rejects_before_update = False
    outcome = train_loop(job)
    assert outcome.reason.endswith("the last checkpoint stands") and job.saver == [] and job.plan.micro_rows == 4


def test_other_errors_are_not_taken_for_it(make_job: Any) -> None:
    class Wrong(Full):
        def loss(self, *_: Any) -> Any:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        train_loop(make_job(Wrong()))


def test_the_allocators_words_are_known() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert room.out_of_memory(refused.value)
    assert room.out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not room.out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))


def test_experts_forget_a_failed_attempt(make_job: Any, shape: ModelShape) -> None:
    from dataclasses import replace

    job = make_job(kind=replace(shape, moe=Moe(4, 2, 16, choice_bias=True)))
    layers = [module for module in job.engine.model.modules() if isinstance(module, MixtureOfExperts)]
    feed = job.engine.objective.feed(job.data.stream.micro_batches(0, 4)[0], CPU)
    job.engine.objective.loss(job.engine.model, feed, 8.0).loss.backward()
    assert all(layer.assigned for layer in layers)
    job.engine.release_memory()
    assert all(layer.assigned == [] and layer.routing is None for layer in layers)


def test_rows_are_cut_in_order(make_job: Any) -> None:
    job = make_job()
    batches = job.data.stream.micro_batches(0, 4)
    assert room.split(batches, 4) is batches
    parts = room.split(batches, 3)
    assert [len(part.positions) for part in parts] == [3, 1]
    assert [p for part in parts for p in part.positions.tolist()] == batches[0].positions.tolist()


@pytest.mark.parametrize(
    ("peak", "rows", "batch", "limit", "expected"),
    [
        (100, 4, 16, 100, 4),  # 20 stand, 10 of gradients, 17.5 a row
        (100, 4, 16, 99, 2),
        (100, 4, 16, 170, 8),
        (100, 4, 16, 299, 8),
        (100, 4, 16, 300, 16),  # alone it meets no gradients
        (100, 4, 12, 140, 6),
        (100, 4, 4, 99, 2),  # 20 a row, and as micro-batches they meet gradients
        (100, 4, 16, 20, 1),
    ],
)
def test_a_line_through_one_peak_gives_the_rows(peak: int, rows: int, batch: int, limit: int, expected: int) -> None:
    found, _ = room.rows_that_fit(peak, rows, standing=20, gradients=10, batch=batch, limit=limit, most=64)
    assert found == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_probe_finds_rows_and_a_real_shortage_is_survived() -> None:
    """An allowance of 1.5 GB stands for a small device: the estimate's rows do not fit, half of them do."""
    from bessemer.train.speed import random_batch
    from bessemer.train.step import attempt_step

    device, shape = torch.device("cuda"), ModelShape(512, 512, 8, 8, 8, 64, 2048)
    model, events = build_model(shape, device, 0), []
    batch = random_batch(shape.vocab, 32, 512)
    spec = RunSpec.model_validate({"name": "x", "model": "1M", "data": {"sources": {"a": "x"}}})
    plan_of_run: Any = Planned(micro_rows=32, context=512, precision="bf16", batch_rows=((0, 32),))
    optimizer, nothing = make_optimizer(model.named_parameters(), OptimizerSpec()), None
    stream = SimpleNamespace(
        micro_batches=lambda step, rows, *_: room.split([batch], rows), step_count=lambda step: 16_384.0
    )
    parts: Any = (
        Engine(spec, plan_of_run, device, model, Pretrain(False), optimizer, nothing),  # type: ignore[arg-type]
        DataFeed(stream, nothing, str),  # type: ignore[arg-type]
        Guard(nothing, nothing, nothing, nothing),  # type: ignore[arg-type]
        Recorder(nothing, RunView(), 1, 1.0),  # type: ignore[arg-type]
    )
    job: Any = Job(*parts, saver=nothing, start_step=-1)  # type: ignore[arg-type]
    job.recorder.event = lambda kind, **details: events.append((kind, details))
    gauge = room.MemoryGauge(device)
    peak = room.probe(job.engine, stream, gauge)
    plan = Plan()
    room.fit(job, plan, resumed=False)
    assert peak and job.plan.micro_rows == 32 and plan.decisions["budget.micro_batch"].source == "measured"
    expected = float(attempt_step(job, 0, [batch], 0.0).losses.loss)
    job.engine.release_memory()
    torch.cuda.set_per_process_memory_fraction(0.7 * peak / torch.cuda.get_device_properties(device).total_memory)
    try:
        assert room.probe(job.engine, stream, gauge) is None
        while room.probe(job.engine, stream, gauge) is None:
            assert room.reduce_memory(job, plan, "a test") is not None
        assert job.plan.micro_rows in (16, 8)
        assert float(attempt_step(job, 0, [batch], 0.0).losses.loss) == pytest.approx(expected, rel=1e-3)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
