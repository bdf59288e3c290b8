"""The fast path on a GPU against references in higher precision: loss head, optimizer, compiled blocks, whole steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.model.transformer import build_model
from bessemer.spec.shape import ModelShape
from bessemer.train.compile import compile_blocks, compute_in
from bessemer.train.loss import LossOptions, linear_cross_entropy
from bessemer.train.objective import Pretrain
from bessemer.train.speed import random_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


OPTIONS = {
    "plain": LossOptions(),
    "z": LossOptions(z=1e-3),
    "capped": LossOptions(logit_scale=0.5, logit_cap=5.0, z=1e-3),
}


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("rows", "vocab"), [(700, 1003), (513, 128_256)])
def test_the_head_s_kernel_equals_fp64_of_its_rounded_inputs(
    name: str, rows: int, vocab: int, kept: torch.dtype
) -> None:
    """Within what bf16 logits and gradients allow; losses alone are much closer. The vocabulary need not be even."""
    options, width = OPTIONS[name], 128
    random = torch.Generator("cuda").manual_seed(1)
    hidden = torch.randn(rows, width, device=CUDA, generator=random).bfloat16().requires_grad_()
    head = (torch.randn(vocab, width, device=CUDA, generator=random) * 0.1).to(kept).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), device=CUDA, generator=random)
    weights = (torch.rand(rows, device=CUDA, generator=random) > 0.2).float()
    with compute_in("bf16", CUDA):
        loss, nll, correct = linear_cross_entropy(hidden, head, targets, weights, 1 / rows, options)
    loss.backward()
    h, w = hidden.detach().double().requires_grad_(), head.detach().bfloat16().double().requires_grad_()
    logits = h @ w.t() * options.logit_scale
    if options.logit_cap:
        logits = options.logit_cap * torch.tanh(logits / options.logit_cap)
    exact_nll = F.cross_entropy(logits, targets, reduction="none")
    reference = ((exact_nll + options.z * logits.logsumexp(-1).square()) * weights).sum() / rows
    reference.backward()
    assert abs(float(loss) - float(reference)) < 2e-3 * float(reference)
    assert float((nll - exact_nll).abs().max()) < 0.02  # logits near 5 in bf16
    assert float((correct == (logits.argmax(-1) == targets)).float().mean()) > 0.98
    assert head.grad is not None and head.grad.dtype == kept
    assert off(hidden.grad, h.grad) < 1e-2 and off(head.grad, w.grad) < 1e-2


def test_weights_gradients_are_summed_over_chunks_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred chunks give what one does; summed in bf16 they would be some percent off."""
    import bessemer.train.loss as loss

    random = torch.Generator("cuda").manual_seed(2)
    hidden = torch.randn(12_800, 64, device=CUDA, generator=random).bfloat16()
    head = (torch.randn(512, 64, device=CUDA, generator=random) * 0.3).requires_grad_()
    targets = torch.randint(0, 512, (12_800,), device=CUDA, generator=random)
    found = []
    for limit in (1 << 30, 128 * 512 * 2):
        monkeypatch.setattr(loss, "CHUNK_BYTES_GPU", limit)
        with compute_in("bf16", CUDA):
            value, *_ = linear_cross_entropy(hidden, head, targets, torch.ones(12_800, device=CUDA), 1 / 12_800)
        found.append(torch.autograd.grad(value, head)[0])
    assert off(found[1], found[0]) < 1e-5


@pytest.mark.parametrize(("kept", "chunks"), [(torch.float32, 3), (torch.bfloat16, 3), (torch.bfloat16, 1)])
def test_the_head_takes_the_room_that_the_planner_counts(
    kept: torch.dtype, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in bf16 are not copied, and one chunk has no sum in fp32 beside its gradient."""
    import bessemer.plan.cost_model.memory as planned
    import bessemer.train.loss as loss

    rows, vocab, width = 3072, 32_768, 4096
    limit = 2 * vocab * rows // chunks
    monkeypatch.setattr(loss, "CHUNK_BYTES_GPU", limit)
    monkeypatch.setitem(planned.HEAD_CHUNK, "cuda", limit)
    hidden = torch.randn(rows, width, device=CUDA).bfloat16().requires_grad_()
    head = (torch.randn(vocab, width, device=CUDA) * 0.02).to(kept).requires_grad_()
    targets, weights = torch.randint(0, vocab, (rows,), device=CUDA), torch.ones(rows, device=CUDA)
    with compute_in("bf16", CUDA):
        linear_cross_entropy(hidden, head, targets, weights, 1 / rows)[0].backward()  # workspaces of the products
        hidden.grad = head.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(hidden, head, targets, weights, 1 / rows)
    shape = ModelShape(vocab=vocab, width=width, layers=1, heads=4, kv_heads=4, head_dim=64, ffn=512)
    passes = planned.Passes(rows, 1, "bf16", "none", compiled=True)
    counted = planned.head_bytes(shape, passes, kept.itemsize) - 3 * rows * width * 2  # hidden rows and copies of them
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("split", [False, True])
def test_the_adamw_kernel_is_the_reference_s_arithmetic_and_vetoes(split: bool) -> None:
    from bessemer.optim.kernels import adamw
    from bessemer.optim.low_memory import UpdateRule, join_weights, split_weights, update

    random = torch.Generator("cuda").manual_seed(3)
    size, rule = 100_003, UpdateRule("adamw", (0.9, 0.999), 1e-8)
    start = torch.randn(size, device=CUDA, generator=random)
    high, rest = split_weights(start)
    sides: list[tuple[Tensor, dict[str, Tensor]]] = []
    for _ in range(2):
        state = {name: torch.zeros(size, device=CUDA) for name in ("exp_avg", "exp_avg_sq")}
        sides.append((high.bfloat16(), state | {"remainder": rest.clone()}) if split else (start.clone(), state))

    def number(value: float) -> Tensor:
        return torch.tensor(value, device=CUDA)

    key = torch.zeros((), dtype=torch.int32, device=CUDA)
    for step in range(5):
        grad = torch.randn(size, device=CUDA, generator=random) * 0.1
        grad = (grad * float("nan") if step == 3 else grad).to(torch.bfloat16 if split else torch.float32)
        before = [tensor.clone() for tensor in (sides[1][0], *sides[1][1].values())]
        more: Any = (number(float(step)), number(float(step == 3)), number(1.7), number(1e-3), number(0.1))
        update(rule, sides[0][0], grad, sides[0][1], *more, key, key)
        adamw(rule.betas, rule.eps, sides[1][0], grad, sides[1][1], *more)
        if step == 3:
            assert all(torch.equal(a, b) for a, b in zip(before, (sides[1][0], *sides[1][1].values()), strict=True))
    expected, found = (join_weights(w, s["remainder"]) if split else w for w, s in sides)
    assert off(found, expected) < 1e-6
    assert off(sides[1][1]["exp_avg_sq"], sides[0][1]["exp_avg_sq"]) < 1e-6


SHAPE = ModelShape(vocab=1024, width=256, layers=3, heads=4, kv_heads=2, head_dim=64, ffn=512)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("half_weights", [False, True])
def test_a_compiled_step_in_bf16_follows_fp32(half_weights: bool, chained: bool) -> None:
    """Loss and every gradient against the plain model in fp32, on the same weights."""
    rows, context = 4, 256
    batch, objective = random_batch(SHAPE.vocab, rows, context), Pretrain(cross_documents=True)
    plain, fast = build_model(SHAPE, CUDA, seed=0), build_model(SHAPE, CUDA, seed=0)
    for parameter in (*plain.parameters(), *fast.parameters()):
        if parameter.ndim > 1:
            parameter.data = parameter.data.bfloat16().float()
    if half_weights:
        from bessemer.optim.low_memory import to_low_precision

        to_low_precision(fast)
    assert compile_blocks(fast, rows, context, torch.bfloat16, chained) == SHAPE.layers
    for model, precision in ((plain, "fp32"), (fast, "bf16")):
        with compute_in(precision, CUDA):
            terms = objective.loss(model, objective.feed(batch, CUDA), batch.count)
        terms.loss.backward()
    for (name, exact), found in zip(plain.named_parameters(), fast.parameters(), strict=True):
        assert exact.grad is not None and found.grad is not None
        assert found.grad.dtype == (torch.bfloat16 if half_weights and exact.ndim > 1 else torch.float32)
        assert off(found.grad, exact.grad) < 3e-2, name
