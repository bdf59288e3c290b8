"""What only a GPU can show: no host sync inside a step, a veto under NaN, bf16 beside fp32, a resumed run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bessemer.data.stream.batches import Batch
from bessemer.guard.judge import Judge
from bessemer.model.transformer import build_model
from bessemer.observe.view import RunView
from bessemer.optim.choose import make_optimizer
from bessemer.optim.low_memory import to_low_precision
from bessemer.plan.schedule import Schedule
from bessemer.spec.guard import GuardSpec
from bessemer.spec.optimizer import MemorySpec, OptimizerSpec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.engine import Engine
from bessemer.train.job import DataFeed, Guard, Job, Recorder
from bessemer.train.loss import linear_cross_entropy
from bessemer.train.objective import Pretrain
from bessemer.train.speed import random_batch
from bessemer.train.step import StepResult, compute_step, judge_and_update

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPE = ModelShape(512, 128, 2, 4, 2, 32, 256)


def make_job(precision: str = "fp32", seed: int = 0, weights: str = "fp32") -> Any:
    device = torch.device("cuda")
    model = build_model(SHAPE, device, seed)
    if weights != "fp32":
        to_low_precision(model)
    schedule = Schedule(1e-3, 2, 100)
    spec: Any = SimpleNamespace(guard=GuardSpec(), optimizer=SimpleNamespace(clip=1.0))
    optimizer = make_optimizer(model.named_parameters(), OptimizerSpec(), memory=MemorySpec(weights=weights))
    plan, nothing, stream = (
        SimpleNamespace(precision=precision),
        None,
        SimpleNamespace(step_count=lambda step: 8.0 * 64),
    )
    parts: Any = (
        Engine(spec, plan, device, model, Pretrain(cross_documents=False), optimizer, schedule),  # type: ignore[arg-type]
        DataFeed(stream, nothing, str),  # type: ignore[arg-type]
        Guard(Judge(GuardSpec(), device), nothing, nothing, nothing),  # type: ignore[arg-type]
        Recorder(nothing, RunView(), 1, 1.0),  # type: ignore[arg-type]
    )
    return Job(*parts, saver=nothing, start_step=-1)  # type: ignore[arg-type]


def attempt_step(job: Any, step: int, batches: list[Batch]) -> StepResult:
    """What the loop does of a step, without the records."""
    attempt = compute_step(job, step, batches, 0.0)
    judge_and_update(job, attempt, sample_layers=False)
    return attempt


KINDS = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "kahan"), ("bf16", "stochastic")]


@pytest.mark.parametrize(("precision", "weights"), KINDS)
@pytest.mark.parametrize("boundary", [False, True])
def test_a_step_never_waits_for_the_device(precision: str, weights: str, boundary: bool) -> None:
    job, batch = make_job(precision, weights=weights), random_batch(SHAPE.vocab, 8, 64)
    if boundary:
        batch.documents[:, 30:] = 1
    for step in range(3):
        attempt_step(job, step, [batch])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attempt_step(job, 3, [batch])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("precision", "weights"), KINDS)
def test_a_vetoed_step_leaves_every_bit(precision: str, weights: str) -> None:
    job, batch = make_job(precision, weights=weights), random_batch(SHAPE.vocab, 8, 64)
    for step in range(3):
        attempt_step(job, step, [batch])
    before = [p.detach().clone() for p in job.engine.model.parameters()] + [
        t.clone() for t in job.engine.optimizer.state().values()
    ]
    hook = job.engine.model.norm.weight.register_hook(lambda g: g * float("nan"))
    attempt = attempt_step(job, 3, [batch])
    hook.remove()
    after = [p.detach() for p in job.engine.model.parameters()] + list(job.engine.optimizer.state().values())
    assert attempt.scalars.read()["guard.code"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_bf16_follows_fp32() -> None:
    batch = random_batch(SHAPE.vocab, 8, 64)
    losses = {}
    for precision in ("fp32", "bf16"):
        job = make_job(precision)
        losses[precision] = [float(attempt_step(job, step, [batch]).losses.loss) for step in range(30)]
    gaps = [abs(a - b) for a, b in zip(losses["fp32"], losses["bf16"], strict=True)]
    assert losses["fp32"][-1] < losses["fp32"][0] - 0.5
    assert max(gaps) < 0.05


@pytest.mark.parametrize(("rows", "vocab"), [(700, 1000), (64, 50_000)])
def test_the_loss_head_equals_fp64(rows: int, vocab: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    hidden = torch.randn(rows, 96, device="cuda", generator=generator, requires_grad=True)
    head = (torch.randn(vocab, 96, device="cuda", generator=generator) * 0.1).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), device="cuda", generator=generator)
    loss, _, _ = linear_cross_entropy(hidden, head, targets, torch.ones(rows, device="cuda"), 1 / rows)
    loss.backward()
    h, w = hidden.detach().double().requires_grad_(), head.detach().double().requires_grad_()
    reference = F.cross_entropy(h @ w.t(), targets)
    reference.backward()
    assert abs(float(loss) - float(reference)) < 1e-5
    for ours, exact in ((hidden.grad, h.grad), (head.grad, w.grad)):
        assert float((ours - exact).norm() / exact.norm()) < 1e-4


def test_a_run_on_the_gpu_resumes(tmp_path: Path) -> None:
    from bessemer.run.directory import Run
    from bessemer.session.session import Session, run_folder

    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(" ".join(f"word{(i * j) % 37}" for j in range(200)))

    def spec(name: str, steps: int) -> RunSpec:
        return RunSpec.model_validate(
            {
                "name": name, "runs": str(tmp_path / "runs"), "model": {"width": 64, "layers": 2, "heads": 2},
                "tokenizer": {"vocab": 300}, "budget": {"steps": steps, "batch": 512}, "optimizer": {"lr": 0.003},
                "data": {"sources": {"text": {"path": [str(text)]}}, "context": 64, "validation": 0.1},
                "schedule": {"kind": "constant", "warmup": 2},
                "checkpoint": {"every": 10},
            }
        )  # fmt: skip

    Session(spec("whole", 40)).train()
    Session(spec("broken", 20)).train()
    Session(spec("broken", 40)).train()
    whole, broken = (list(Run(run_folder(spec(name, 40))).metrics()) for name in ("whole", "broken"))
    assert [r["step"] for r in broken] == list(range(40))
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(whole, broken, strict=True)) < 0.02
