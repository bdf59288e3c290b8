"""fp16's loss scale against torch's own GradScaler, and what a step of the loop makes of an overflow."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bessemer.errors import UserError
from bessemer.guard.detectors import Detectors
from bessemer.guard.judge import Judge
from bessemer.model.transformer import build_model
from bessemer.observe.view import RunView
from bessemer.optim.choose import make_optimizer
from bessemer.optim.guarded import clip_divisor
from bessemer.spec.guard import GuardSpec
from bessemer.spec.optimizer import OptimizerSpec
from bessemer.spec.schema import ObserveSpec
from bessemer.spec.shape import ModelShape
from bessemer.train import lowp as scaling
from bessemer.train.compile import compute_in
from bessemer.train.engine import Engine
from bessemer.train.job import DataFeed, Guard, Job, Recorder
from bessemer.train.loss import linear_cross_entropy
from bessemer.train.lowp import OVERFLOW, START, LossScale, scaled
from bessemer.train.objective import Pretrain
from bessemer.train.speed import random_batch
from bessemer.train.step import StepResult, compute_step, judge_and_update, report_step

CPU = torch.device("cpu")
SHAPE = ModelShape(vocab=61, width=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=48)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def inputs(step: int) -> torch.Tensor:
    """Some steps are so large that their gradients overflow at the first scales, and one at any scale."""
    size = {4: 30.0, 5: 30.0, 11: 1e5, 17: 100.0}.get(step, 1.0)
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(step)) * size


def test_step_by_step_as_grad_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "GOOD_STEPS", 3)
    spec, lr = OptimizerSpec(weight_decay=0.1), 1e-2
    ours, theirs = network(), network()
    guarded, scale = make_optimizer(ours.named_parameters(), spec), LossScale("dynamic", CPU)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=lr, betas=tuple(spec.settings()["betas"]), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=START, growth_interval=3)
    seen, overflows = [], 0
    for step in range(30):
        x = inputs(step)
        for model, factor in ((ours, scale.scale), (theirs, scaler.scale(torch.ones(())))):
            with compute_in("fp16", CPU):
                y = model(x)
            (y.float().square().sum() * factor).backward()
        norm = guarded.grad_norm() / scale.scale
        divisor = clip_divisor(norm, 1e30) * scale.scale
        overflow = scale.update(norm)
        guarded.step(lr, overflow, divisor)
        scaler.step(adamw)
        scaler.update()
        adamw.zero_grad()
        overflows += int(overflow)
        seen.append(float(scale.scale))
        assert seen[-1] == scaler.get_scale(), step
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q), step
    assert 2 <= overflows < 20 and len(set(seen)) > 3  # it fell and it grew


def test_small_gradients_survive() -> None:
    """1e-9 is nothing in fp16; through the scale it comes back to 0.1 %."""
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    for scale, kept in ((None, False), (LossScale("dynamic", CPU), True), (LossScale(1024.0, CPU), False)):
        layer.zero_grad()
        with scaled(scale, layer.parameters()) as factor:
            with compute_in("fp16", CPU):
                y = layer(x)
            (y.float().sum() * 1e-9 * factor).backward()
        assert torch.allclose(layer.weight.grad, torch.full((4, 4), 1e-9), rtol=1e-3, atol=0) is kept
    layer.weight.grad = torch.full((4, 4), 3.0)
    with scaled(LossScale("dynamic", CPU), layer.parameters()) as factor:  # what was there before stays
        (layer(x).sum() * factor).backward()
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 4.0))


def test_a_fixed_scale_never_changes_and_is_not_saved() -> None:
    fixed = LossScale(1024.0, CPU)
    for norm in (1.0, float("inf"), float("nan"), 1.0):
        assert float(fixed.update(torch.tensor(norm))) == float(norm != 1.0)
    assert float(fixed.scale) == 1024.0 and fixed.state() == {}


@pytest.mark.parametrize("asked", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_does_not_scale_is_refused(asked: float) -> None:
    with pytest.raises(UserError, match=r"loss_scale: .* write dynamic"):
        LossScale(asked, CPU)


def test_a_load_into_the_state_goes_on_from_there() -> None:
    saved, fresh = LossScale("dynamic", CPU), LossScale("dynamic", CPU)
    for norm in (float("inf"), 1.0, 1.0):
        saved.update(torch.tensor(norm))
    for name, tensor in fresh.state().items():
        tensor.copy_(saved.state()[name])
    assert (float(fresh.scale), int(fresh.good)) == (START / 2, 2)


def test_the_head_of_a_large_batch_keeps_its_gradients() -> None:
    """Divided by the 4M tokens of a step inside, gradients would be nothing before the scale meets them."""
    draw = torch.Generator().manual_seed(0)
    hidden_RW, head_VW = torch.randn(64, 32, generator=draw), torch.randn(128, 32, generator=draw) * 0.02
    targets_R = torch.randint(0, 128, (64,), generator=draw)
    found = {}
    for precision, factor in (("fp32", 1.0), ("fp16", START)):
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden_RW, head_VW)]
        with compute_in(precision, CPU):
            loss, _, _ = linear_cross_entropy(*inputs, targets_R, torch.ones(64), 1 / 4e6)
        (loss * factor).backward()
        found[precision] = [tensor.grad / factor for tensor in inputs]
    for half, full in zip(found["fp16"], found["fp32"], strict=True):
        assert float((half - full).norm() / full.norm()) < 2e-3


class Log(list[dict[str, Any]]):
    unwritten = ""

    def step(self, record: dict[str, Any]) -> None:
        self.append(record)


def make_job(asked: str | float | None, guard: GuardSpec | None = None, device: torch.device = CPU) -> Any:
    """What the loop needs of a job for one step; None is fp32."""
    guard, model = guard or GuardSpec(), build_model(SHAPE, device, 0)
    events: list[dict[str, Any]] = []
    spec = SimpleNamespace(guard=guard, observe=ObserveSpec())
    plan = SimpleNamespace(precision="fp32" if asked is None else "fp16")
    optimizer, nothing = make_optimizer(model.named_parameters(), OptimizerSpec()), None
    stream = SimpleNamespace(step_count=lambda step: 4.0 * 16, locate=lambda batch: [])
    parts: Any = (
        Engine(
            spec, plan, device, model, Pretrain(cross_documents=False), optimizer, nothing,
            loss_scale=None if asked is None else LossScale(asked, device),
        ),
        DataFeed(stream, nothing, str),
        Guard(Judge(guard, device), Detectors(guard, None, 1000), nothing, nothing),
        Recorder(Log(), RunView(), 1, 1.0),
    )  # type: ignore[arg-type]  # fmt: skip
    job: Any = Job(*parts, saver=nothing, start_step=-1)  # type: ignore[arg-type]
    job.lr, job.clip = lambda step: 1e-3, lambda step: 1.0
    job.events, job.recorder.event = events, lambda kind, **rest: events.append({"kind": kind, **rest})
    return job


def attempt_step(job: Any, step: int) -> StepResult:
    batches = [random_batch(SHAPE.vocab, 2, 16, seed=step), random_batch(SHAPE.vocab, 2, 16, seed=step + 100)]
    attempt = compute_step(job, step, batches, 0.0)
    judge_and_update(job, attempt, sample_layers=False)
    attempt.step_s = 1.0
    return attempt


def tensors(job: Any) -> list[torch.Tensor]:
    return [t.detach().clone() for t in (*job.engine.model.parameters(), *job.engine.optimizer.state().values())]


def test_a_step_reports_unscaled_numbers_and_learns_as_fp32_does() -> None:
    half, full = make_job(1024.0), make_job(None)
    for step in range(5):
        for job in (half, full):
            assert report_step(job, attempt_step(job, step)) is None
        (a, b) = half.recorder.run[-1], full.recorder.run[-1]
        assert a["loss_scale"] == 1024.0 and "loss_scale" not in b
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-3)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-2)
        assert a["veto"] is None and a["clipped"] == b["clipped"]
    # Adam moves the weights alike whatever the scale of its gradients; its moments tell.
    sums = [
        sum(t.norm() for name, t in job.engine.optimizer.state().items() if "exp_avg" in name) for job in (half, full)
    ]
    assert float(sums[0]) == pytest.approx(float(sums[1]), rel=0.02)


@pytest.mark.parametrize("enabled", [True, False])
def test_an_overflow_withholds_the_step_and_is_no_incident(enabled: bool) -> None:
    job = make_job("dynamic", GuardSpec(enabled=enabled))
    job.engine.loss_scale.scale.fill_(2.0**40)  # any gradient overflows
    before = tensors(job)
    assert report_step(job, attempt_step(job, 0)) is None
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(job), strict=True))
    assert float(job.engine.loss_scale.scale) == 2.0**39
    (record,) = job.recorder.run
    assert record["veto"] == OVERFLOW and record["loss_scale"] == 2.0**40 and job.recorder.progress.vetoes == 0
    assert job.events == []
    job.engine.loss_scale.scale.fill_(1024.0)
    assert report_step(job, attempt_step(job, 1)) is None
    assert job.recorder.run[-1]["veto"] is None and not torch.equal(before[0], tensors(job)[0])


def test_a_loss_that_is_not_finite_is_an_incident_still() -> None:
    job = make_job("dynamic")
    with torch.no_grad():
        job.engine.model.embedding.weight.fill_(float("nan"))
    incident = report_step(job, attempt_step(job, 0))
    assert incident is not None and incident.symptom == "non-finite loss or gradient"


def test_a_scale_below_one_again_and_again_raises_the_alarm() -> None:
    job, alarms = make_job("dynamic"), []
    for step in range(70):
        record = {"step": step, "loss": 2.0, "grad_norm": float("inf"), "lr": 1e-3, "veto": OVERFLOW}
        alarms += job.guard.detectors.step(record | {"loss_scale": 0.25})
    assert "loss_scale" in {alarm.kind for alarm in alarms}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_scaled_step_never_waits_for_the_device() -> None:
    job = make_job("dynamic", device=torch.device("cuda"))
    for step in range(3):
        attempt_step(job, step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attempt = attempt_step(job, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert report_step(job, attempt) is None and "loss_scale" in job.recorder.run[-1]
