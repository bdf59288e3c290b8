"""The same looks on a GPU, in bf16: numbers agree with those of the CPU, weights come back bit by bit."""

from collections.abc import Iterator

import pytest
import torch

from bessemer.diagnose.gradients import check_gradients, measure_gradient_flow, measure_noise_scale
from bessemer.diagnose.histograms import lost_to_bf16, measure_distribution, measure_distributions
from bessemer.diagnose.landscape import slice_loss
from bessemer.diagnose.nonfinite import trace_nonfinite
from bessemer.diagnose.report import InspectedModel, MicroBatchTerms, backward_step
from bessemer.model.transformer import build_model
from bessemer.spec.shape import ModelShape
from bessemer.train.compile import compute_in
from bessemer.train.loss import linear_cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def decoder(device: str, precision: str) -> InspectedModel:
    shape = ModelShape(vocab=512, width=128, layers=4, heads=4, kv_heads=2, head_dim=32, ffn=256)
    model = build_model(shape, "cpu", seed=0).to(device)

    def parts(step: int, asked: str | None) -> Iterator[MicroBatchTerms]:
        for k in range(4):
            tokens = torch.randint(0, 512, (2, 65), generator=torch.Generator().manual_seed(17 * step + k)).to(device)
            with compute_in(asked or precision, torch.device(device)):
                hidden = model(tokens[:, :-1]).flatten(0, 1)
                ones = torch.ones(hidden.shape[0], device=device)
                loss = linear_cross_entropy(hidden, model.head_weight, tokens[:, 1:].flatten(), ones, 1 / 512)[0]
            yield MicroBatchTerms(loss, 0.25, 128.0)

    return InspectedModel(model, parts)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_every_look_works_and_agrees_with_the_cpu(precision: str) -> None:
    here, there = decoder("cpu", "fp32"), decoder("cuda", precision)
    before = [p.detach().clone() for p in there.model.parameters()]
    close = 0.05 if precision == "bf16" else 1e-3
    for cpu, gpu in zip(measure_gradient_flow(here, [0, 1]), measure_gradient_flow(there, [0, 1]), strict=True):
        assert gpu.grad_norm == pytest.approx(cpu.grad_norm, rel=close), cpu.name
    assert check_gradients(measure_gradient_flow(there, [0])) == []
    slices = slice_loss(there, [0], points=3, grid=2)
    assert slices.line[1] == slices.centre == pytest.approx(float(backward_step(here, 0)), rel=close)
    assert measure_noise_scale(there, [0, 1]).noise_trace == pytest.approx(
        measure_noise_scale(here, [0, 1]).noise_trace, rel=close
    )
    optimizer = torch.optim.AdamW(there.model.parameters(), lr=1e-4, fused=True)
    found = measure_distributions(there, 0, optimizer.step)
    assert all(one.nonfinite == 0 and sum(one.counts) > 0 for one in found)
    assert all(torch.equal(a, b) for a, b in zip(before, there.model.parameters(), strict=True))
    assert (
        trace_nonfinite(there.model, lambda: backward_step(there, 0), lambda: backward_step(there, 0, "fp32")).stage
        is None
    )
    with torch.no_grad():
        there.model.blocks[2].ffn.up.weight[5, 5] = torch.inf
    trace = trace_nonfinite(there.model, lambda: backward_step(there, 0), lambda: backward_step(there, 0, "fp32"))
    assert (trace.stage, trace.module, trace.cured_by_fp32) == ("forward", "blocks.2.ffn.up", False)


def test_rounding_and_histograms_are_the_same_numbers() -> None:
    bits = torch.randint(0, 0x7F80, (1 << 16,)).to(torch.int16)
    weights = bits.view(torch.bfloat16).float() * torch.randint(0, 2, (1 << 16,)).mul(2).sub(1)
    updates = weights * torch.randn(1 << 16) * 2**-8
    assert torch.equal(lost_to_bf16(weights, updates), lost_to_bf16(weights.cuda(), updates.cuda()).cpu())
    values = torch.randn(100_000)
    a, b = measure_distribution("x", "weight", values), measure_distribution("x", "weight", values.cuda())
    assert sum(a.counts) == sum(b.counts) == 100_000
    assert max(abs(m - n) for m, n in zip(a.counts, b.counts, strict=True)) <= 3
