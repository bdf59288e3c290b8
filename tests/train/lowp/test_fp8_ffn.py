"""The feed-forward part in fp8 as one function, beside its layers one by one and beside fp32."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.model.layers import FeedForward
from bessemer.model.transformer import build_model
from bessemer.spec.shape import ModelShape
from bessemer.train import lowp as fp8_ffn
from bessemer.train.compile import compute_in
from bessemer.train.lowp import E4M3, E5M2, Fp8FeedForward, convert_to_fp8, gate_gradients, gated, turned

pytest.importorskip("torchao")
CPU = torch.device("cpu")
SHAPE = ModelShape(vocab=61, width=128, layers=1, heads=2, kv_heads=1, head_dim=64, ffn=256)
gpu = pytest.mark.gpu


def made(device: torch.device = CPU, whole: bool = True) -> FeedForward:
    model = build_model(SHAPE, CPU, seed=0).to(device)  # a GPU draws other first weights
    convert_to_fp8(model, "fp8", device, keep=0, least=16, emulate=device.type == "cpu")
    part: Any = model.blocks[0].ffn
    assert type(part) is Fp8FeedForward
    if not whole:
        part.__class__ = FeedForward
    return part


def passes(part: FeedForward, precision: str = "fp8", rows: int = 192, call: Any = None) -> list[Tensor]:
    """Output and the gradients of input and weights; columns of the input differ in size."""
    device, draw = part.up.weight.device, torch.Generator().manual_seed(0)
    x = (torch.randn(2, rows // 2, 128, generator=draw) * torch.logspace(-1, 1, 128)).to(device).requires_grad_()
    with compute_in(precision, device):
        y = (call or part)(x)
    part.zero_grad()
    y.backward(torch.randn(y.shape, generator=draw).to(y))
    weights = (part.gate.weight, part.up.weight, part.down.weight)  # type: ignore[union-attr]
    return [found.detach().float().cpu() for found in (y, x.grad, *(w.grad for w in weights)) if found is not None]


def far(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_it_is_as_close_to_fp32_as_its_layers_one_by_one() -> None:
    exact = passes(made(), "fp32")
    whole, layered = passes(made()), passes(made(whole=False))
    assert len(whole) == 5
    for wanted, ours, theirs in zip(exact, whole, layered, strict=True):
        assert 1e-3 < far(ours, wanted) < 1.15 * far(theirs, wanted)
        assert far(ours, theirs) < 1.5 * far(theirs, wanted)  # rounded at other places, not elsewhere


def test_rows_that_are_no_tile_and_those_who_listen_get_the_layers() -> None:
    part, heard = made(), []
    for found, wanted in zip(passes(part, rows=96), passes(made(whole=False), rows=96), strict=True):
        assert torch.equal(found, wanted)
    hook = part.gate.register_forward_hook(lambda *args: heard.append(args[-1]))  # type: ignore[union-attr]
    for found, wanted in zip(passes(part), passes(made(whole=False)), strict=True):
        assert torch.equal(found, wanted)
    hook.remove()
    passes(part)
    assert len(heard) == 1


def test_what_is_not_swiglu_stays_as_it_is() -> None:
    for shape in (
        ModelShape(vocab=61, width=128, layers=1, heads=2, kv_heads=1, head_dim=64, ffn=256, activation="gelu"),
        ModelShape(vocab=61, width=128, layers=1, heads=2, kv_heads=1, head_dim=64, ffn=256, ffn_bias=True),
        ModelShape(vocab=61, width=128, layers=1, heads=2, kv_heads=1, head_dim=64, ffn=96),
    ):
        model = build_model(shape, CPU, seed=0)
        convert_to_fp8(model, "fp8", CPU, keep=0, least=16, emulate=True)
        assert type(model.blocks[0].ffn) is FeedForward


@pytest.mark.slow
def test_it_compiles_into_one_graph() -> None:
    part = made()
    torch.compiler.reset()
    whole = torch.compile(part.forward, fullgraph=True, dynamic=False, backend="aot_eager")
    for found, wanted in zip(passes(part, call=whole), passes(made()), strict=True):
        assert far(found, wanted) < 1e-2  # sums in another order move a few roundings


def test_nan_goes_through() -> None:
    gu = torch.randn(64, 128).bfloat16()
    gu[3, 5] = float("nan")
    assert gated(gu)[1].isnan().all()
    assert gate_gradients(torch.ones(64, 64).bfloat16(), gu, torch.ones(1))[2].isnan().all()
    assert float(gated(torch.zeros(64, 128))[0].float().abs().max()) == 0


def exact_gradients(dh: Tensor, gu: Tensor) -> Tensor:
    held = gu.double().requires_grad_()
    g, u = held.chunk(2, dim=1)
    (F.silu(g) * u).backward(dh.double())
    assert held.grad is not None
    return held.grad


def inputs(device: str) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    gu, dh = torch.randn(192, 512, generator=draw) * 2, torch.randn(192, 256, generator=draw) * 1e-4
    return gu.to(device).bfloat16(), dh.to(device).bfloat16()


def check_casts(device: str) -> None:
    """Each number is within the rounding of its format, of the formula in float64."""
    gu, dh = inputs(device)
    g, u = gu.double().chunk(2, dim=1)
    h, scale = gated(gu)
    exact = F.silu(g) * u
    assert h.dtype == E4M3 and far(h.double() * scale, exact) < 0.03
    assert float(scale) == pytest.approx(float(exact.abs().max()) / 448, rel=1e-5)
    d_rows, d_columns, d_scale, h_columns = gate_gradients(dh, gu, scale)
    assert d_rows.dtype == E5M2 and far(d_rows.double() * d_scale, exact_gradients(dh, gu)) < 0.06
    assert torch.equal(d_rows.t().float(), d_columns.float()) and d_columns.is_contiguous()
    moved = (h_columns.t().float() != h.float()).float().mean()  # 1 / (1 / scale) may be a last digit off
    assert float(moved) < 1e-3 and h_columns.is_contiguous()
    times = torch.full((1,), 30.0, device=device)
    for gradient, dtype in ((True, E5M2), (False, E4M3)):
        rows, columns = turned(gu, times, gradient)
        assert torch.equal(columns.t().float(), fp8_ffn._cast(gu, times, dtype).float())
        assert not gradient or torch.equal(rows.float(), columns.t().float())


def test_casts_are_the_formula() -> None:
    check_casts("cpu")


@gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_are_the_formula() -> None:
    check_casts("cuda")
    gu, dh = inputs("cuda")
    gu[3, 5] = float("nan")
    assert gated(gu)[1].isnan().all() and gate_gradients(dh, gu, torch.ones(1, device="cuda"))[2].isnan().all()


@gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_it_is_what_a_cpu_emulates(compiled: bool) -> None:
    part = made(torch.device("cuda"))
    call = torch.compile(part.forward, fullgraph=True, dynamic=False) if compiled else None
    for found, wanted, exact in zip(passes(part, call=call), passes(made()), passes(made(), "fp32"), strict=True):
        assert far(found, exact) < 1.15 * far(wanted, exact)
        assert compiled or far(found, wanted) < 2e-2  # some roundings fall the other way, compiled ones are left out
