"""Sums, never means: the loss and the gradients of a step are the same however it is cut."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bessemer.guard.judge import Judge
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.transformer import build_model
from bessemer.observe.view import RunView
from bessemer.optim.choose import make_optimizer
from bessemer.optim.guarded import GuardedOptimizer
from bessemer.optim.wrappers import SharpnessAware
from bessemer.plan.schedule import Schedule
from bessemer.spec.guard import GuardSpec
from bessemer.spec.optimizer import OptimizerSpec
from bessemer.spec.schema import ObserveSpec
from bessemer.train.engine import Engine
from bessemer.train.job import DataFeed, Guard, Job, Recorder
from bessemer.train.objective import Pretrain
from bessemer.train.step import compute_step, judge_and_update

CPU = torch.device("cpu")
CONTEXT, ROWS = 8, 6


@pytest.fixture
def stream(store_of, stream_of):
    return stream_of(store_of("a", [5, 13, 1, 8, 30, 2, 2, 11] * 12), CONTEXT, ROWS)


class Given(AttentionMask):
    """A mask as it is written."""

    def __init__(self, mask):
        super().__init__()
        self.given = mask

    def plain(self, window, length):
        return False

    def mask(self, window, T, S, device):
        return self.given


def direct(model, batch, cross_documents):
    """(sum of losses, right guesses) with the mask built by looking at every pair of columns."""
    total, right = torch.zeros((), dtype=torch.float64), 0
    for row in range(len(batch.tokens)):
        documents = batch.documents[row]
        look = [
            [s <= t and (cross_documents or documents[s] == documents[t]) for s in range(CONTEXT)]
            for t in range(CONTEXT)
        ]
        hidden = model(torch.from_numpy(batch.tokens[row])[None], Given(torch.tensor(look)[None, None]))
        logits, targets = model.logits(hidden)[0].double(), torch.from_numpy(batch.targets[row])
        weights = torch.from_numpy(batch.weights[row]).double()
        total = total + (F.cross_entropy(logits, targets, reduction="none") * weights).sum()
        right += int(((logits.argmax(dim=-1) == targets) & (weights > 0)).sum())
    return total, right


@pytest.mark.parametrize("cross_documents", [False, True])
@pytest.mark.parametrize("step", [0, 3, 7])
def test_the_terms_equal_a_direct_computation(shape, stream, cross_documents, step):
    model = build_model(shape, "cpu", 2).double()
    objective = Pretrain(cross_documents)
    (batch,) = stream.micro_batches(step, ROWS + 2)  # two rows of padding
    assert not batch.single_document and batch.weights[-2:].sum() == 0
    terms = objective.loss(model, objective.feed(batch, CPU), batch.count)
    expected, right = direct(model, batch, cross_documents)
    torch.testing.assert_close(terms.loss, expected / (ROWS * CONTEXT), rtol=1e-9, atol=0)
    assert int(terms.metrics["accuracy"][0]) == right
    assert terms.nll_BT.shape == (ROWS + 2, CONTEXT) and not terms.nll_BT.requires_grad
    again = (terms.nll_BT * torch.from_numpy(batch.weights)).sum() / batch.count
    torch.testing.assert_close(again, terms.loss.detach(), rtol=1e-9, atol=0)
    found = torch.autograd.grad(terms.loss, list(model.parameters()))
    for a, b in zip(found, torch.autograd.grad(expected / batch.count, list(model.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-10)


def test_rows_without_a_boundary_need_no_mask(store_of, stream_of):
    stream = stream_of(store_of("long", [500]), CONTEXT, ROWS)
    batch = stream.batch(0)
    assert batch.single_document
    assert Pretrain(False).feed(batch, CPU).attention_mask.documents_BT is None
    packed = stream_of(store_of("short", [3] * 200), CONTEXT, ROWS).batch(0)
    assert Pretrain(False).feed(packed, CPU).attention_mask.documents_BT is not None
    assert Pretrain(True).feed(packed, CPU).attention_mask.documents_BT is None


class Recording(GuardedOptimizer):
    """Keeps the gradients that a step was given."""

    def step(self, lr, reject, divisor):
        self.seen = {name: parameter.grad.clone() for name, parameter in self.named}
        super().step(lr, reject, divisor)


def attempt_step(job, step, batches):
    """What the loop does of a step, without the records."""
    attempt = compute_step(job, step, batches, 0.0)
    judge_and_update(job, attempt, sample_layers=False)
    return attempt


def job_of(shape, stream, precision="fp32", dtype=torch.float32, **optimizer):
    model = build_model(shape, "cpu", 3).to(dtype)
    made = make_optimizer(model.named_parameters(), OptimizerSpec())
    schedule, spec = Schedule(1e-2, 4, 100), OptimizerSpec(**optimizer)
    plan = SimpleNamespace(precision=precision)
    run_spec = SimpleNamespace(guard=GuardSpec(), optimizer=spec, observe=ObserveSpec())
    optimizer = Recording(made.named, made.optimizers, made.path)
    return Job(
        Engine(run_spec, plan, CPU, model, Pretrain(cross_documents=False), optimizer, schedule),
        DataFeed(stream, None, str),
        Guard(Judge(GuardSpec(), CPU), None, None, None),
        Recorder(None, RunView(), 1, 1.0),
        saver=None,
        start_step=-1,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-7)])
@pytest.mark.parametrize("micro_rows", [6, 3, 2, 1, 4, 5, 7], ids=lambda n: f"{n}-rows")
def test_a_step_is_the_same_at_any_split(shape, stream, micro_rows, dtype, tolerance):
    """1, 2, 3, 6 micro-batches, and with 2, 4 and 1 rows of padding. Three steps, so that the updates agree too."""
    whole, split = job_of(shape, stream, dtype=dtype), job_of(shape, stream, dtype=dtype)
    for step in range(3):
        batches = stream.micro_batches(step, micro_rows)
        assert len(batches) == -(-ROWS // micro_rows)
        a = attempt_step(whole, step, stream.micro_batches(step, ROWS))
        b = attempt_step(split, step, batches)
        assert abs(float(b.losses.loss - a.losses.loss)) < tolerance * float(a.losses.loss)
        whole_norm, split_norm = (attempt.scalars.read()["grad_norm"] for attempt in (a, b))
        assert abs(split_norm - whole_norm) < 10 * tolerance * whole_norm
        assert torch.equal(a.losses.metrics_M2, b.losses.metrics_M2) and a.tokens == b.tokens == ROWS * CONTEXT
        for name, gradient in whole.engine.optimizer.seen.items():
            torch.testing.assert_close(split.engine.optimizer.seen[name], gradient, rtol=0, atol=tolerance)


def test_the_loss_of_a_step_is_the_mean_over_its_tokens(shape, stream):
    job = job_of(shape, stream, dtype=torch.float64)
    model = build_model(shape, "cpu", 3).double()
    attempt = attempt_step(job, 4, stream.micro_batches(4, 4))
    expected, right = direct(model, stream.batch(4), cross_documents=False)
    assert float(attempt.losses.loss) == pytest.approx(float(expected.detach()) / (ROWS * CONTEXT), rel=1e-6)
    assert int(attempt.losses.metrics_M2[0, 0]) == right
    gradients = torch.autograd.grad(expected / (ROWS * CONTEXT), list(model.parameters()))
    assert attempt.scalars.read()["grad_norm"] == pytest.approx(
        float(torch.cat([g.flatten() for g in gradients]).norm()), rel=1e-6
    )


@pytest.mark.parametrize("clip", [1e-3, 0.5, 100.0])
def test_a_step_clips_like_torch(shape, stream, clip):
    job = job_of(shape, stream, dtype=torch.float64, clip=clip, weight_decay=0.1)
    model = build_model(shape, "cpu", 3).double()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for step in range(4):
        attempt_step(job, step, stream.micro_batches(step, 3))
        total, _ = direct(model, stream.batch(step), cross_documents=False)
        (total / (ROWS * CONTEXT)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group in plain.param_groups:
            group["lr"] = job.engine.schedule.lr(step)
        plain.step()
        plain.zero_grad()
    for ours, theirs in zip(job.engine.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=0, atol=2e-5)


def test_a_vetoed_step_changes_no_weight_and_a_guard_that_is_off_lets_it_through(shape, stream):
    for enabled in (True, False):
        job = job_of(shape, stream)
        job.spec.guard = GuardSpec(enabled=enabled)
        attempt_step(job, 0, stream.micro_batches(0, 6))
        before = [p.detach().clone() for p in job.engine.model.parameters()]
        hook = job.engine.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
        attempt = attempt_step(job, 1, stream.micro_batches(1, 6))
        hook.remove()
        assert attempt.scalars.read().get("guard.code") == (1.0 if enabled else None)
        same = all(torch.equal(a, b.detach()) for a, b in zip(before, job.engine.model.parameters(), strict=True))
        assert same == enabled
        assert all(p.grad is None for p in job.engine.model.parameters())


def test_bf16_follows_fp32(shape, stream):
    losses = {}
    for precision in ("fp32", "bf16"):
        job = job_of(shape, stream, precision)
        attempts = [attempt_step(job, step, stream.micro_batches(step % 3, 3)) for step in range(12)]
        losses[precision] = np.array([float(attempt.losses.loss) for attempt in attempts])
    assert losses["fp32"][-1] < losses["fp32"][0]
    assert 0 < np.abs(losses["fp32"] - losses["bf16"]).max() < 0.03


def test_sam_updates_with_the_gradient_of_the_perturbed_weights(shape, stream):
    """AdamW with SAM, written out; then a step whose second gradient is not finite changes nothing."""
    job, rho = job_of(shape, stream, dtype=torch.float64, clip=0.5, weight_decay=0.1), 0.05
    job.engine.sam = SharpnessAware(job.engine.optimizer.named, rho)
    model = build_model(shape, "cpu", 3).double()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, foreach=False)

    def gradients(step):
        total, _ = direct(model, stream.batch(step), cross_documents=False)
        return torch.autograd.grad(total / (ROWS * CONTEXT), list(model.parameters()))

    for step in range(4):
        attempt = attempt_step(job, step, stream.micro_batches(step, 3))
        first = gradients(step)
        norm = torch.cat([g.flatten() for g in first]).norm()
        assert attempt.scalars.read()["grad_norm"] == pytest.approx(float(norm), rel=1e-6), "the first is judged"
        with torch.no_grad():
            kept = [p.clone() for p in model.parameters()]
            for parameter, gradient in zip(model.parameters(), first, strict=True):
                parameter += rho * gradient / norm
        for parameter, gradient, copy in zip(model.parameters(), gradients(step), kept, strict=True):
            parameter.grad = gradient
            parameter.data.copy_(copy)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in plain.param_groups:
            group["lr"] = job.engine.schedule.lr(step)
        plain.step()
    for ours, theirs in zip(job.engine.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=0, atol=2e-5)

    before = [p.detach().clone() for p in job.engine.model.parameters()]
    passes = []
    hook = job.engine.model.norm.weight.register_hook(
        lambda gradient: passes.append(0) or gradient * (float("inf") if len(passes) == 2 else 1.0)
    )
    attempt = attempt_step(job, 4, stream.micro_batches(4, ROWS))
    hook.remove()
    assert len(passes) == 2 and attempt.scalars.read()["guard.code"] == 0.0
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, job.engine.model.parameters(), strict=True))
