"""How much of a model trains, counted without it and compared with the model's own parameters."""

from dataclasses import replace

import pytest
import torch

from bessemer.model.transformer import build_model, make_module
from bessemer.optim.choose import freeze, optimizer_for
from bessemer.plan.cost_model.memory import Passes, estimate_memory
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import PRESETS, ModelShape, Moe
from bessemer.spec.trained import trained_share

SMALL = replace(PRESETS["1M"], vocab=500)
SHAPES = {
    "dense": SMALL,
    "untied": replace(SMALL, tied=False, qkv_bias=True),
    "experts": replace(SMALL, moe=Moe(4, 2, 64, shared=1, dense_layers=(0,))),
}
PATTERNS = [
    ["embedding"], ["blocks.0-1"], ["blocks.0-2.attention", "embedding"], ["*.ffn.*"], ["blocks.*"],
    ["*.query.weight", "blocks.3.ffn.down"], ["embedding", "blocks.0", "blocks.0-1"],
]  # fmt: skip


@pytest.mark.parametrize("patterns", PATTERNS, ids=",".join)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_share_is_that_of_the_model(shape: ModelShape, patterns: list[str]) -> None:
    with torch.device("meta"):
        model = make_module(shape)
    frozen, trained = freeze(model, patterns)
    assert trained_share(shape, patterns) == pytest.approx(trained / (frozen + trained), abs=0.002)


def test_unknown_names_count_as_trained() -> None:
    assert trained_share(SMALL, ["*.bias"]) == trained_share(SMALL, []) == 1.0


@pytest.mark.parametrize("patterns", [[], ["embedding", "blocks.0-2"]], ids=["all", "part"])
def test_gradients_and_moments_are_those_of_what_trains(patterns: list[str]) -> None:
    spec = RunSpec.model_validate({
        "name": "x", "model": {"preset": "1M"}, "data": {"sources": {"a": "a.jsonl"}}, "budget": {"steps": 1},
        "optimizer": {"freeze": patterns},
    })  # fmt: skip
    needs = estimate_memory(spec, SMALL, Passes(64, 1, "fp32", "none", compiled=False, device="cpu"))
    model = build_model(SMALL, "cpu", 0)
    optimizer = optimizer_for(model, spec)
    moments = sum(tensor.nbytes for name, tensor in optimizer.state().items() if not name.endswith(".step"))
    assert needs.weights == sum(parameter.nbytes for parameter in model.parameters())
    assert needs.moments == pytest.approx(moments, rel=0.02)
    assert needs.gradients == pytest.approx(sum(p.nbytes for p in optimizer.parameters), rel=0.02)
