"""Weights in NF4: the published levels, bitsandbytes' codes, gradients of the dense function, and what may be done with
such a weight."""

from statistics import NormalDist
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.errors import UserError
from bessemer.guard.replica_check import digest
from bessemer.model.adapters import add_adapters, init_adapters, linear_layers
from bessemer.model.quantized import (
    LEVELS,
    NF4Tensor,
    allocate_in_nf4,
    check_quantized,
    dynamic_levels,
    quantize,
    rounded_to_nf4,
    same_codes,
    stored_bytes,
    stored_tensors,
)
from bessemer.model.transformer import Decoder, build_model, init_weights
from bessemer.spec.adapter import NF4_BYTES, AdapterSpec
from bessemer.spec.shape import ModelShape


def random(*shape: int, seed: int = 0) -> Tensor:
    return 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(NF4Tensor.of(weight), requires_grad=False)


def test_the_levels_are_quantiles_of_a_normal_distribution() -> None:
    """Section 3 of the QLoRA paper: eight levels above zero, seven below, evenly spaced in probability up to an offset
    that is the mean of 1 - 1/30 and 1 - 1/32, divided by the largest."""
    offset, quantile = (2 - 1 / 30 - 1 / 32) / 2, NormalDist().inv_cdf
    above = [quantile(offset + (0.5 - offset) * i / 8) for i in range(8)]
    below = [-quantile(offset + (0.5 - offset) * i / 7) for i in range(7)]
    expected = sorted([*above, 0.0, *below])
    assert [level * max(above) for level in LEVELS] == pytest.approx(expected, abs=1e-6)


def test_the_numbers_of_a_weight_are_the_nearest_levels() -> None:
    weight = random(32, 128)
    values, blocks = rounded_to_nf4(weight), weight.view(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    exact = torch.tensor(LEVELS)[(blocks / scale - torch.tensor(LEVELS)[:, None, None]).abs().argmin(0)] * scale
    # The scales have 8 bits: within a blocks's own step of the dynamic type.
    assert (values.view(-1, 64) - exact).abs().max() < 0.04 * scale.max()
    assert ((values - weight).norm() / weight.norm()) == pytest.approx(0.0925, abs=0.004)
    assert len(set(dynamic_levels())) == 256 and max(map(abs, dynamic_levels())) == 1.0


def test_it_is_what_bitsandbytes_computes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = random(256, 512)
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    parts = quantize(weight)
    assert torch.equal(parts["codes"], codes.view(-1))
    assert torch.allclose(parts["maxima"], state.state2.absmax) and torch.allclose(parts["offset"], state.offset)
    # Only ties between two scales may fall otherwise.
    different = parts["scales"] != state.absmax
    assert different.float().mean() < 0.01
    assert (parts["scales"].int() - state.absmax.int()).abs().max() <= 1
    close = functional.dequantize_4bit(codes, state).view(-1, 64)[~different]
    assert torch.allclose(rounded_to_nf4(weight).view(-1, 64)[~different], close, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shape", [(64, 64), (24, 40), (3, 5)], ids=str)
def test_products_and_gradients_are_those_of_the_dense_weight(shape: tuple[int, int]) -> None:
    layer = nn.Linear(shape[1], shape[0])
    layer.weight = frozen(random(*shape))
    layer.bias.requires_grad_(False)
    x = torch.randn(2, 3, shape[1], generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    dense, x64 = layer.weight.dense().double(), x.detach().double().requires_grad_()  # type: ignore[operator]
    expected = F.linear(x64, dense, layer.bias.double())
    expected.square().sum().backward()
    assert x.grad is not None and x64.grad is not None
    assert torch.allclose(y.double(), expected, atol=1e-6) and torch.allclose(x.grad.double(), x64.grad, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer(x.double()).dtype == torch.float64 if layer.bias is None else True


def test_only_codes_are_saved_for_the_backward_pass() -> None:
    weight = frozen(random(256, 256))
    saved: list[Tensor] = []
    x = torch.randn(2, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        F.linear(x, weight)
    assert sum(tensor.nbytes for tensor in saved) == stored_bytes(weight) < 0.52 * weight.numel()
    assert stored_bytes(weight) == int(NF4_BYTES * weight.numel()) + 4


def test_a_weight_is_loaded_by_copy_and_otherwise_only_read() -> None:
    weight, other = frozen(random(16, 64)), random(16, 64, seed=1)
    before = digest([weight])
    layer = nn.Linear(64, 16, bias=False)
    layer.weight = weight
    layer.state_dict()["weight"].copy_(other)
    assert same_codes(weight, other) and not same_codes(weight, random(16, 64)) and digest([weight]) != before
    assert torch.equal(weight.double(), weight.dense().double()) and torch.equal(weight.cpu(), weight.dense())  # type: ignore
    for copied in (weight.clone(), weight.cpu(), weight.to("cpu", copy=True)):  # as trials save and restore states
        assert all(torch.equal(a, b) for a, b in zip(stored_tensors(copied), stored_tensors(weight), strict=True))
    assert weight.clone().dense().equal(weight.dense()) and len(stored_tensors(weight)) == 4  # type: ignore
    with pytest.raises(TypeError, match="a weight in NF4 is frozen"):
        weight.mul_(2)
    zeros = NF4Tensor.of(torch.zeros(4, 64))
    assert torch.equal(zeros.dense(), torch.zeros(4, 64))


SHAPE = ModelShape(vocab=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64, tied=True)


def model_in_nf4(kind: str) -> tuple[Decoder, Decoder]:
    """A model with a base in NF4, and the same with the dense values of that base."""
    models, spec = [], AdapterSpec(kind=kind)  # type: ignore[arg-type]
    for quantized in (True, False):
        model = build_model(SHAPE, "meta" if quantized else "cpu", 0)
        layers = list(linear_layers(model))
        add_adapters(model, spec, 4, 8.0)
        if quantized:
            allocate_in_nf4(model, layers, torch.device("cpu"))
        init_weights(model, 0)
        for i, name in enumerate(layers):
            weight = random(*model.get_submodule(name).weight.shape, seed=i)  # type: ignore
            with torch.no_grad():
                model.get_submodule(name).weight.copy_(weight if quantized else rounded_to_nf4(weight))  # type: ignore
        init_adapters(model, spec, 2.0, 0)
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        models.append(model)
    return models[0], models[1].double()


@pytest.mark.parametrize("kind", ["lora", "dora", "pissa"])
def test_a_model_has_the_gradients_of_the_dense_one(kind: str) -> None:
    model, dense = model_in_nf4(kind)
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(3))
    for each in (model, dense):
        logits: Any = each.logits(each(tokens))
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    expected = {name: p.grad for name, p in dense.named_parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gap = (parameter.grad - expected[name]).abs().max() / expected[name].abs().max()  # type: ignore
            assert gap < 1e-4, name


def test_another_form_of_the_base_is_refused() -> None:
    model, _ = model_in_nf4("lora")
    names = {name for name, p in model.named_parameters() if isinstance(p, NF4Tensor)}
    check_quantized(model, names, "step-1")
    with pytest.raises(UserError, match=r"adapter.base: step-1 was trained with its base in full, not nf4"):
        check_quantized(model, (), "step-1")
    with pytest.raises(UserError, match="with its base nf4, not in full"):
        check_quantized(nn.Linear(2, 2), names, "step-1")


@pytest.mark.slow
def test_it_compiles_without_the_dense_weight() -> None:
    layer = nn.Linear(128, 64, bias=False)
    layer.weight = frozen(random(64, 128))
    x = torch.randn(4, 128, requires_grad=True)
    expected = layer(x)
    expected.sum().backward()
    gradient, x.grad, saved = x.grad, None, []
    compiled = torch.compile(lambda x: layer(x) * 2, fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = compiled(x)
    y.sum().backward()
    assert torch.allclose(y, 2 * expected) and torch.allclose(x.grad, 2 * gradient)  # type: ignore
    assert max((t.nbytes for t in saved), default=0) < layer.weight.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_gives_the_same_bits(dtype: torch.dtype) -> None:
    weight = random(300, 129)
    expected, actual = NF4Tensor.of(weight), NF4Tensor.of(weight, torch.device("cuda"))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(stored_tensors(expected), stored_tensors(actual), strict=True))
    assert torch.equal(expected.dense(dtype), actual.dense(dtype).cpu())
