"""The tracer names the module where the first NaN or Inf was made, forward or backward, and leaves nothing behind."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bessemer.diagnose.nonfinite import nonfinite_report, trace_nonfinite
from bessemer.model.transformer import Decoder, build_model
from bessemer.spec.shape import ModelShape

SHAPE = ModelShape(vocab=29, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24)


@pytest.fixture
def model() -> Decoder:
    return build_model(SHAPE, "cpu", seed=0)


def step_of(model: nn.Module, autocast: bool = False) -> Callable[[], Tensor]:
    tokens = torch.arange(24).view(2, 12) % 29

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss: Tensor = model(tokens).float().square().mean()
        loss.backward()
        return loss

    return run


@pytest.mark.parametrize("autocast", [False, True])
def test_a_finite_step_is_said_to_be_finite(model: Decoder, autocast: bool) -> None:
    trace = trace_nonfinite(model, step_of(model, autocast), step_of(model))
    assert trace.stage is None and trace.cured_by_fp32 is None and trace.loss is not None
    assert "finite everywhere" in nonfinite_report(trace, 3, "here").text()
    assert all(p.grad is None for p in model.parameters())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["embedding", "blocks.0.attention.key", "blocks.1.ffn.up", "blocks.1", "norm"])
def test_nan_injected_in_a_module_names_it(model: Decoder, name: str) -> None:
    def poison(_: nn.Module, __: object, output: Tensor) -> Tensor:
        return output.clone().index_fill_(-1, torch.tensor([0]), torch.nan)

    handle = model.get_submodule(name).register_forward_hook(poison)
    trace = trace_nonfinite(model, step_of(model), step_of(model))
    handle.remove()
    assert (trace.stage, trace.module, trace.kind) == ("forward", name, type(model.get_submodule(name)).__name__)
    assert trace.cured_by_fp32 is False
    assert trace.facts[-1].what == "output" and 0 < trace.facts[-1].nonfinite < 1


def test_an_overflow_between_modules_is_laid_at_the_arithmetic_around_them(model: Decoder) -> None:
    """silu(gate) * up overflows in the feed-forward part itself: neither gate nor up nor down is to blame."""
    with torch.no_grad():
        model.blocks[1].ffn.gate.weight.fill_(1e20)
        model.blocks[1].ffn.up.weight.fill_(1e20)
    trace = trace_nonfinite(model, step_of(model))
    assert (trace.stage, trace.module, trace.kind) == ("forward", "blocks.1.ffn", "FeedForward")
    assert "blocks.1.ffn.down" in trace.detail and not trace.bad_weights


def test_an_overflow_of_half_precision_is_cured_by_fp32() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight.fill_(300.0)
    x = torch.full((2, 4), 1000.0)

    def run(dtype: torch.dtype) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float16):
            loss: Tensor = model(x).float().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        model[0].weight.fill_(1.0)
    trace = trace_nonfinite(model, lambda: run(torch.float16), lambda: run(torch.float32))
    assert (trace.stage, trace.module, trace.cured_by_fp32) == ("forward", "1", True)
    into = trace.facts[0]
    assert (into.shape, into.dtype, into.nonfinite) == ((2, 4), "float16", 0.0)
    assert into.high is not None and into.high == pytest.approx(4000, rel=0.01)
    assert "In fp32 the step is finite" in nonfinite_report(trace, 0, "x").text()


def test_nan_weights_are_listed(model: Decoder) -> None:
    with torch.no_grad():
        model.blocks[0].attention.out.weight[3, :2] = torch.nan
        model.norm.weight[0] = torch.inf
    trace = trace_nonfinite(model, step_of(model))
    assert trace.module == "blocks.0.attention.out"
    assert trace.bad_weights == {"blocks.0.attention.out.weight": 2, "norm.weight": 1}
    assert [one.nonfinite > 0 for one in trace.facts] == [False, True, True]  # input, weight, output


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class Inline(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * 0).sqrt()


def test_a_nan_of_the_backward_pass_alone() -> None:
    """The square root of 0 is 0, its derivative infinite."""
    relu = nn.Linear(4, 4, bias=False)
    nn.init.constant_(relu.weight, -1.0)
    model = nn.Sequential(relu, nn.ReLU(), Root(), nn.Linear(4, 1))

    def run(model: nn.Module) -> Callable[[], Tensor]:
        def step() -> Tensor:
            loss: Tensor = model(torch.ones(2, 4)).sum()
            loss.backward()
            return loss

        return step

    trace = trace_nonfinite(model, run(model))
    assert (trace.stage, trace.module, trace.kind) == ("backward", "2", "Root")
    assert trace.loss is not None and trace.loss == trace.loss
    inline = nn.Sequential(nn.Linear(4, 4), Inline(), nn.Linear(4, 1))
    trace = trace_nonfinite(inline, run(inline))
    assert (trace.stage, trace.module, trace.kind) == ("backward", "1", "Inline")


def test_the_gradient_of_a_weight_and_the_loss_can_be_the_first(model: Decoder) -> None:
    one = nn.Linear(4, 1, bias=False)

    def overflow() -> Tensor:
        loss: Tensor = (one(torch.full((2, 4), 1e30)) * 1e-25).sum() * 1e25
        loss.backward()
        return loss

    nn.init.constant_(one.weight, 1e-9)
    one.weight.register_hook(lambda grad: grad * 1e30)
    trace = trace_nonfinite(one, overflow)
    assert (trace.stage, trace.module) == ("backward", "the model") and "weight" in trace.detail

    def bad_loss() -> Tensor:
        loss: Tensor = (model(torch.zeros(1, 4, dtype=torch.long)).sum() * 0).log()
        loss.backward()
        return loss

    trace = trace_nonfinite(model, bad_loss)
    assert (trace.stage, trace.module) == ("loss", "the loss")


def test_a_batch_that_is_not_finite_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    trace = trace_nonfinite(model, lambda: model(torch.full((1, 4), torch.nan)).sum())
    assert (trace.stage, trace.module) == ("forward", "the batch")
