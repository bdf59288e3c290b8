"""Counts are those that are published and that torch finds: parameters of real models, FLOPs of each family."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from published import PUBLISHED, Published
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bessemer.model.attention_backends import set_backend
from bessemer.model.families.registry import FAMILIES, read_shape
from bessemer.model.transformer import build_model, make_module
from bessemer.spec.shape import ModelShape, active_parameters

FIRST = list({one.config["model_type"]: one for one in reversed(PUBLISHED)}.values())[::-1]  # one of each family
ROW = 512  # two chunks of a state space: a single one has no state to pass on


def name(one: Published) -> str:
    return one.name


def test_every_family_has_a_published_model() -> None:
    assert {one.config["model_type"] for one in PUBLISHED} == set(FAMILIES)


@pytest.mark.parametrize(
    "one", [pytest.param(one, marks=() if one in FIRST else pytest.mark.slow) for one in PUBLISHED], ids=name
)
def test_parameters_are_the_published_ones(one: Published) -> None:
    shape = read_shape(one.config)[1]
    with torch.device("meta"):
        built = sum(parameter.numel() for parameter in make_module(shape).parameters())
    assert shape.parameters == built == one.parameters


@pytest.mark.parametrize("one", [one for one in PUBLISHED if one.active], ids=name)
def test_active_parameters_are_the_published_ones(one: Published) -> None:
    """Published in round numbers, some without an embedding."""
    assert active_parameters(read_shape(one.config)[1]) / 1e9 == pytest.approx(one.active, rel=0.02)


def small(shape: ModelShape) -> ModelShape:
    """With little of everything, but all kinds of layers: tokens find their experts only in numbers that exist."""
    assert shape.moe is not None
    moe = replace(
        shape.moe, experts=8, top_k=min(4, shape.moe.top_k), ffn=20, groups=min(4, shape.moe.groups),
        top_groups=min(2, shape.moe.top_groups),
    )  # fmt: skip
    kv_heads, mla = 2, shape.mla
    if mla:
        kv_heads, mla = 4, replace(mla, kv_rank=12, nope_dim=6, rope_dim=4, value_dim=10, q_rank=mla.q_rank and 14)
    return replace(shape, vocab=97, width=32, heads=4, kv_heads=kv_heads, head_dim=8, ffn=48, moe=moe, mla=mla)


def counted(shape: ModelShape, row: int) -> int:
    """By torch, of a row forward and backward. Attention is written out: a fused kernel's backward pass computes the
    scores again, which is no part of the model's FLOPs."""
    real = shape.moe is not None
    with FakeTensorMode() if not real else torch.device("cpu"):
        model = build_model(shape, "cpu", seed=0) if real else make_module(shape)
        set_backend(model, "math")
        tokens_BT = torch.zeros(1, row, dtype=torch.long)
        more: dict[str, Any] = {"encoder_tokens_BS": tokens_BT} if shape.decoder_layers else {}
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model.logits(model(tokens_BT, **more)).sum().backward()
    return int(counter.get_total_flops())


# Slow: blocks of the kinds that a fast one has, with other sizes.
REPEATED = ("mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt_neox", "bloom", "qwen3_moe", "deepseek_v2", "olmo2")


@pytest.mark.parametrize(
    "one",
    [pytest.param(one, marks=pytest.mark.slow if one.config["model_type"] in REPEATED else ()) for one in FIRST],
    ids=lambda one: one.config["model_type"],
)
def test_flops_are_those_that_torch_counts(one: Published) -> None:
    """To the last one. Real widths, fewer layers; small ones where tokens choose experts. The row is within windows:
    torch counts what a window hides."""
    shape = read_shape(one.config)[1]
    shape = small(shape) if shape.moe else shape
    shape = replace(shape, layers=min(2, shape.layers), decoder_layers=min(2, shape.decoder_layers))
    assert counted(shape, ROW) == ROW * shape.flops_per_token(ROW)


def test_windows_bound_what_is_counted() -> None:
    shape = ModelShape(97, 32, 4, 4, 2, 8, 48, windows=(16, 0))
    hidden = ROW * 2 * 12 * shape.attention_width * (ROW - 16)  # of two layers
    assert counted(shape, ROW) == ROW * shape.flops_per_token(ROW) + hidden
