"""GPTQ, AWQ and the packed format against references that are slow and plain."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bessemer.export.gptq import DAMPING, awq, choose_scales, gptq, output_error, round_to_nearest
from bessemer.export.input_groups import input_groups
from bessemer.model.families.compressed_tensors import WeightFormat, pack, unpack
from bessemer.model.transformer import Decoder, build_model
from bessemer.spec.shape import ModelShape

INT4 = WeightFormat("int4", 4, 16)


def layer(seed: int = 0, outputs: int = 24, inputs: int = 64) -> tuple[Tensor, Tensor]:
    """A weight, and inputs that are correlated and of unequal size."""
    draw = torch.Generator().manual_seed(seed)
    x_NI = torch.randn(400, inputs, generator=draw) @ torch.randn(inputs, inputs, generator=draw) / inputs**0.5
    return torch.randn(outputs, inputs, generator=draw), x_NI * torch.logspace(-1, 1, inputs)


@given(st.sampled_from([4, 8]), st.integers(1, 9), st.integers(1, 70), st.integers(0, 99))
def test_packing_is_reversible(bits: int, rows: int, columns: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = torch.randint(low, high, (rows, columns), generator=draw, dtype=torch.int8)
    assert torch.equal(unpack(pack(codes, bits), bits, columns), codes)


def test_the_first_number_is_in_the_lowest_bits() -> None:
    codes = torch.tensor([[-8, -7, 7, 0, 1, 2, 3, 7]], dtype=torch.int8)
    assert pack(codes, 4).item() == 0xFBA98F10 - 2**32
    assert pack(torch.tensor([[-128, 127, 1]], dtype=torch.int8), 8).item() == 0x0081FF00


@pytest.mark.slow  # importing it takes seconds
def test_packing_is_that_of_compressed_tensors() -> None:
    theirs = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for bits in (4, 8):
        codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, 72), dtype=torch.int8)
        assert torch.equal(pack(codes, bits), theirs.pack_to_int32(codes, bits))


@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_rounding_is_within_half_a_step(name: str) -> None:
    form = WeightFormat("fp8", 8) if name == "fp8" else WeightFormat(name, int(name[-1]), 16)
    weight_OI, _ = layer()
    quantized = round_to_nearest(weight_OI, form)
    error_OI = (quantized.dense() - weight_OI).abs()
    scale_OI = quantized.scale_OG.repeat_interleave(64 // quantized.scale_OG.shape[1], dim=1)
    # fp8 has 3 bits behind the first; a zero group keeps scale 1.
    step_OI = torch.maximum(weight_OI.abs() / 8, scale_OI * 2**-9) if name == "fp8" else scale_OI
    assert (error_OI <= 0.5001 * step_OI).all()
    assert not round_to_nearest(torch.zeros(3, 16), form).dense().any()


def test_the_error_is_that_of_the_outputs() -> None:
    weight_OI, x_NI = layer()
    dense_OI = round_to_nearest(weight_OI, INT4).dense()
    direct = float((x_NI @ (weight_OI - dense_OI).T).square().sum())
    assert output_error(weight_OI, dense_OI, x_NI.T @ x_NI) == pytest.approx(direct, rel=1e-4)


def reference_gptq(weight_OI: Tensor, hessian_II: Tensor, form: WeightFormat) -> Tensor:
    """Optimal Brain Quantization in a fixed order, with the inverse of what is left at every step."""
    scale_OG = choose_scales(weight_OI, form, torch.float32, hessian_II.diagonal())
    scale_OI = scale_OG.double().repeat_interleave(form.group, dim=1)
    left = hessian_II.diagonal().argsort(descending=True, stable=True).tolist()
    weight_OI, hessian_II = weight_OI.double(), hessian_II.double()
    hessian_II = hessian_II + DAMPING * hessian_II.diagonal().mean() * torch.eye(len(hessian_II))
    dense_OI = torch.zeros_like(weight_OI)
    while left:
        inverse = torch.linalg.inv(hessian_II[left][:, left])
        at = left[0]
        dense_OI[:, at] = form.round(weight_OI[:, at] / scale_OI[:, at]) * scale_OI[:, at]
        error_O = (weight_OI[:, at] - dense_OI[:, at]) / inverse[0, 0]
        weight_OI[:, left] -= error_O[:, None] * inverse[0]
        left = left[1:]
    return dense_OI


def test_gptq_is_optimal_brain_quantization(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bessemer.export.gptq.COLUMNS", 24)  # several blocks, the last a part
    weight_OI, x_NI = (t.double() for t in layer())
    quantized = gptq(weight_OI, x_NI.T @ x_NI, INT4, torch.float32)
    expected = reference_gptq(weight_OI, x_NI.T @ x_NI, INT4)
    torch.testing.assert_close(quantized.dense().double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_gptq_and_awq_beat_rounding_on_other_inputs(seed: int) -> None:
    weight_OI, x_NI = layer(seed)
    hessian_II, held_out_II = (x.T @ x for x in x_NI.split(300))
    plain = output_error(weight_OI, round_to_nearest(weight_OI, INT4).dense(), held_out_II)
    corrected = output_error(weight_OI, gptq(weight_OI, hessian_II, INT4).dense(), held_out_II)
    scaled, factor_I = awq(weight_OI, hessian_II, INT4)
    assert corrected < 0.8 * plain
    assert output_error(weight_OI, scaled.dense() / factor_I, held_out_II) < 0.9 * plain


def test_an_input_that_is_always_zero() -> None:
    weight_OI, x_NI = layer()
    x_NI[:, :20] = 0.0
    hessian_II = x_NI.T @ x_NI
    for dense_OI in (gptq(weight_OI, hessian_II, INT4).dense(), awq(weight_OI, hessian_II, INT4)[0].dense()):
        assert dense_OI.isfinite().all()


SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "groups of heads": {"kv_heads": 2, "qkv_bias": True},
    "gemma": {"norm_place": "sandwich", "norm_offset": 1.0, "activation": "gelu_tanh"},
    "neox": {"norm": "layer", "gated": False, "ffn_bias": True, "qkv_bias": True, "parallel": "two_norms"},
    "one norm": {"norm": "layer", "parallel": "one_norm", "kv_heads": 1},
    "olmo": {"norm_place": "branch", "qk_norm": "full"},
}


@pytest.mark.parametrize("name", SHAPES)
def test_factors_move_to_the_layer_before_without_a_change(name: str) -> None:
    """Every input of every layer multiplied by random factors that its source is divided by."""
    keys = {"heads": 4, "kv_heads": 4, "head_dim": 8, "ffn": 48} | SHAPES[name]
    model = build_model(ModelShape(vocab=32, width=32, layers=1, **keys), "cpu", seed=0).double()
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    tokens_BT = torch.randint(0, 32, (2, 9), generator=draw)
    with torch.no_grad():
        before_BTW = model(tokens_BT)
        groups = input_groups(model.blocks[0])  # type: ignore[arg-type]
        moved = [group for group in groups if group.source is not None]
        for group in moved:
            size = next(iter(group.layers.values())).in_features
            factor_I = group.tie(torch.rand(size, generator=draw, dtype=torch.float64) + 0.5)
            for linear in group.layers.values():
                linear.weight.mul_(factor_I)
            group.divide_source(factor_I)
        torch.testing.assert_close(model(tokens_BT), before_BTW)
    assert sum(len(group.layers) for group in groups) == (6 if name == "neox" else 7)
    assert len(moved) == {"neox": 3, "one norm": 3, "olmo": 2}.get(name, 4)


def test_all_linear_layers_of_other_blocks_are_found() -> None:
    from bessemer.spec.shape import Mamba, Mla

    latent = ModelShape(vocab=32, width=32, layers=1, heads=4, kv_heads=4, head_dim=12, ffn=48, mla=Mla(8, 16, 4, 8, 8))
    mixed = ModelShape(vocab=32, width=32, layers=1, heads=4, kv_heads=4, head_dim=8, ffn=48, mixers=("mamba",),
                       mamba=Mamba(heads=4, head_dim=16, state=8))  # fmt: skip
    for shape in (latent, mixed):
        with torch.device("meta"):
            block = Decoder(shape).blocks[0]
        found = [id(linear) for group in input_groups(block) for linear in group.layers.values()]  # type: ignore
        assert sorted(found) == sorted(id(m) for m in block.modules() if type(m) is torch.nn.Linear)
