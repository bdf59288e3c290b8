"""Latent attention against the equations of the DeepSeek-V2 paper, one position and one head at a time, in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bessemer.model.attention import LATENT_EPS, AttentionInputs, LatentAttention, LayerCache
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.layers import RotaryTable
from bessemer.spec import shape as count
from bessemer.spec.shape import Mla, ModelShape, Rope

WIDTH, HEADS = 12, 3


def shape_of(mla: Mla, **more: object) -> ModelShape:
    return ModelShape(vocab=10, width=WIDTH, layers=1, heads=HEADS, kv_heads=HEADS, head_dim=4, ffn=8, mla=mla, **more)  # type: ignore[arg-type]


def make(shape: ModelShape, seed: int = 0) -> LatentAttention:
    """Every part matters: norms and biases too."""
    torch.manual_seed(seed)
    layer = LatentAttention(shape).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) / math.sqrt(parameter.shape[-1]))
    return layer


def place_of(shape: ModelShape, start: int, stop: int, attention_mask: AttentionMask | None = None) -> AttentionInputs:
    assert shape.mla is not None
    cos, sin = RotaryTable(shape.mla.rope_dim, shape.rope).get(stop, torch.device("cpu"), torch.float64)
    return AttentionInputs(attention_mask or AttentionMask(), (cos[start:], sin[start:]))


def rows(B: int, T: int) -> Tensor:
    return torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + LATENT_EPS) * weight


def turned(x: Tensor, position: int, rope: Rope) -> Tensor:
    """Pairs of numbers as complex ones, multiplied by exp(i angle)."""
    half = len(x) // 2
    angles = position * rope.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = x.view(half, 2) if rope.interleaved else x.view(2, half).T
    numbers = torch.complex(pairs[:, 0], pairs[:, 1]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((numbers.real, numbers.imag))


def equations(layer: LatentAttention, x_TW: Tensor) -> Tensor:
    mla, shape = layer.mla, layer.shape
    scale = shape.attention_scale or 1 / math.sqrt(mla.nope_dim + mla.rope_dim)
    queries, keys, values = [], [], []
    for t, x_W in enumerate(x_TW):
        q = x_W if mla.q_rank is None else normed(layer.query_down(x_W), layer.query_norm.weight)
        down = layer.kv_down(x_W)
        waist, shared = normed(down[: mla.kv_rank], layer.kv_norm.weight), turned(down[mla.kv_rank :], t, shape.rope)
        q_ND = layer.query(q).view(HEADS, -1)
        kv_ND = layer.kv(waist).view(HEADS, -1)
        queries.append([torch.cat((q_D[: mla.nope_dim], turned(q_D[mla.nope_dim :], t, shape.rope))) for q_D in q_ND])
        keys.append([torch.cat((kv_D[: mla.nope_dim], shared)) for kv_D in kv_ND])
        values.append([kv_D[mla.nope_dim :] for kv_D in kv_ND])
    out = []
    for t in range(len(x_TW)):
        heads = []
        for n in range(HEADS):
            logits = torch.stack([queries[t][n] @ keys[s][n] * scale for s in range(t + 1)])
            heads.append(logits.softmax(0) @ torch.stack([values[s][n] for s in range(t + 1)]))
        out.append(layer.out(torch.cat(heads)))
    return torch.stack(out)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    mla = Mla(
        draw(st.integers(1, 7)), draw(st.integers(1, 5)), draw(st.sampled_from([2, 4, 6])), draw(st.integers(1, 6)),
        draw(st.sampled_from([None, 1, 5])),
    )  # fmt: skip
    rope = Rope(theta=draw(st.sampled_from([100.0, 1e4])), interleaved=draw(st.booleans()))
    biased, scale = draw(st.booleans()), draw(st.sampled_from([None, 0.7]))
    return shape_of(mla, rope=rope, qkv_bias=biased, out_bias=biased, attention_scale=scale)


@settings(max_examples=15, deadline=None)
@given(shapes())
def test_is_the_paper(shape: ModelShape) -> None:
    """Values, and gradients of inputs and of every weight."""
    layer, x_TW = make(shape), rows(1, 6)[0].requires_grad_()
    ours, theirs = layer(x_TW[None], place_of(shape, 0, 6))[0], equations(layer, x_TW)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    weights = torch.linspace(-1, 2, ours.numel(), dtype=torch.float64).view(ours.shape)
    wanted = [x_TW, *layer.parameters()]
    found, expected = (torch.autograd.grad((y * weights).sum(), wanted) for y in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@settings(max_examples=15, deadline=None)
@given(shapes())
def test_its_parameters_are_counted(shape: ModelShape) -> None:
    assert count.parameter_counts(shape)["attention"] == sum(
        parameter.numel() for parameter in LatentAttention(shape).parameters()
    )


MLA = Mla(kv_rank=5, nope_dim=4, rope_dim=2, value_dim=3, q_rank=6)


@pytest.mark.parametrize("parts", [[1] * 9, [5, 4], [3, 1, 4, 1]])
def test_a_cache_changes_nothing(parts: list[int]) -> None:
    shape = shape_of(MLA, rope=Rope(interleaved=True))
    layer, x_BTW, cache = make(shape), rows(2, 9), LayerCache()
    found, start = [], 0
    for x in x_BTW.split(parts, dim=1):
        found.append(layer(x, place_of(shape, start, start + x.shape[1]), cache))
        start += x.shape[1]
    torch.testing.assert_close(torch.cat(found, dim=1), layer(x_BTW, place_of(shape, 0, 9)), rtol=1e-11, atol=1e-11)


def test_documents_and_windows_are_kept_apart() -> None:
    shape = shape_of(MLA, rope=Rope(interleaved=True), windows=(3,))
    layer, x_BTW = make(shape), rows(1, 9)
    whole = layer(x_BTW, place_of(shape, 0, 9, AttentionMask(torch.tensor([[0] * 5 + [1] * 4]))))
    alone = [layer(x, place_of(shape, 0, x.shape[1])) for x in x_BTW.split([5, 4], dim=1)]
    torch.testing.assert_close(whole, torch.cat(alone, dim=1), rtol=1e-11, atol=1e-11)
    changed = x_BTW.clone()
    changed[:, 0] += 1
    moved = (layer(changed, place_of(shape, 0, 9)) != layer(x_BTW, place_of(shape, 0, 9))).any(-1)[0]
    assert moved.tolist() == [True] * 3 + [False] * 6
