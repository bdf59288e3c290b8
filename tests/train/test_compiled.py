"""Compiled blocks against plain ones: the same numbers, one graph for all layers, and who is not served."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bessemer.model.transformer import Decoder, build_model
from bessemer.spec.shape import Mla, ModelShape
from bessemer.train.compile import CompiledBlocks, compilable, compile_blocks
from bessemer.train.memory import recompute
from bessemer.train.objective import Pretrain
from bessemer.train.speed import random_batch

ROWS, CONTEXT, VOCAB = 2, 32, 300
SMALL = ModelShape(vocab=VOCAB, width=32, layers=3, heads=4, kv_heads=2, head_dim=8, ffn=64)
SHAPES = {
    "llama": SMALL,
    "two norms beside each other": replace(SMALL, parallel="two_norms"),
    "one norm beside each other": replace(SMALL, parallel="one_norm"),
    "sandwich": replace(SMALL, norm_place="sandwich", qk_norm="head", norm_offset=1.0),
    "post": replace(SMALL, norm_place="post", norm="layer", gated=False, activation="gelu", ffn_bias=True),
    "branch": replace(SMALL, norm_place="branch", qk_norm="full", windows=(8, 0)),
    "latent": replace(SMALL, mla=Mla(q_rank=None, kv_rank=16, rope_dim=8, nope_dim=8, value_dim=16)),
}


def compiled(shape: ModelShape, chained: bool = False) -> tuple[Decoder, CompiledBlocks]:
    """A model whose blocks run compiled, by the backend that traces as training does and writes no C++."""
    model = build_model(shape, "cpu", seed=0)
    wrap = torch.compile(backend="aot_eager", dynamic=False, fullgraph=True)
    served = CompiledBlocks(ROWS, CONTEXT, torch.float32, wrap)
    for block in model.blocks:
        assert compilable(block)
        block.compiled = served  # type: ignore[assignment]
    model.chain = served if chained else None
    return model, served


def gradients(model: Decoder, rows: int = ROWS) -> tuple[Tensor, list[Tensor]]:
    objective, batch = Pretrain(cross_documents=False), random_batch(VOCAB, rows, CONTEXT)
    loss = objective.loss(model, objective.feed(batch, torch.device("cpu")), batch.count).loss
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


FAST = (("llama", False), ("sandwich", True))


@pytest.mark.parametrize(
    ("name", "chained"),
    [
        pytest.param(name, chained, marks=() if (name, chained) in FAST else pytest.mark.slow)
        for name in SHAPES
        for chained in (False, True)
        if not (chained and SHAPES[name].parallel == "one_norm")  # read twice: these blocks are never chained
    ],
)
def test_loss_and_gradients_are_those_of_the_plain_blocks(name: str, chained: bool) -> None:
    torch._dynamo.reset()
    model, served = compiled(SHAPES[name], chained)
    if chained:
        served._leave = None  # type: ignore[assignment]  # nobody asks for it
    loss, found = gradients(model)
    expected_loss, expected = gradients(build_model(SHAPES[name], "cpu", seed=0))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("chained", "graphs"), [pytest.param(False, 2, marks=pytest.mark.slow), (True, 3)])
def test_all_layers_share_their_graphs(chained: bool, graphs: int) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, _ = compiled(replace(SMALL, layers=5), chained)
    for _ in range(2):
        gradients(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
def test_gradients_meet_inside_the_graphs_of_a_chain() -> None:
    """One sum of gradients between them, before the first block: others would be a pass over the memory per layer."""
    sums = {}
    for chained in (False, True):
        torch._dynamo.reset()
        model, _ = compiled(replace(SMALL, layers=3), chained)
        tokens = torch.zeros(ROWS, CONTEXT, dtype=torch.long)
        model(tokens).sum().backward()  # which compiles
        hidden = model(tokens)
        model.zero_grad()
        with torch.autograd.profiler.profile() as profile:
            hidden.sum().backward()
        graphs = [event.time_range for event in profile.function_events if event.name == "CompiledFunctionBackward"]
        found = [event.time_range.start for event in profile.function_events if event.name == "aten::add_"]
        sums[chained] = sum(not any(graph.start <= start <= graph.end for graph in graphs) for start in found)
    assert sums[True] == 1 and sums[False] >= 3


def test_what_stands_at_a_border_breaks_the_chain() -> None:
    model, served = compiled(SMALL, chained=True)
    x = torch.zeros(ROWS, CONTEXT, SMALL.width)
    assert served.serves_all(model, x)
    for module in (model.blocks[1], model.norm, model.blocks[2].ffn.down):
        handle = module.register_forward_hook(lambda *_: None)
        assert not served.serves_all(model, x)
        handle.remove()
    recompute.apply(model, "full")
    assert not served.serves_all(model, x)
    recompute.apply(model, "none")
    assert served.serves_all(model, x)
    model.blocks[1].compiled = None
    assert not served.serves_all(model, x)


def test_other_sizes_evaluation_precisions_and_hooks_run_as_they_are() -> None:
    model, served = compiled(SMALL)
    calls: list[str] = []
    block, x = model.blocks[0], torch.zeros(ROWS, CONTEXT, SMALL.width)
    served._enter = lambda one, *args: calls.append("compiled") or one.enter(*args)  # type: ignore[func-returns-value]
    served._leave = lambda one, *args: one.leave(*args)
    assert served.serves(block, x)
    gradients(model)
    assert calls == ["compiled"] * SMALL.layers
    gradients(model, rows=ROWS + 1)
    with torch.no_grad():
        model(torch.zeros(ROWS, CONTEXT, dtype=torch.long))
    with torch.autocast("cpu", torch.bfloat16):
        assert not served.serves(block, x)
    model.eval()
    assert not served.serves(block, x)
    model.train()
    assert calls == ["compiled"] * SMALL.layers
    seen: list[str] = []
    handle = block.ffn.down.register_forward_hook(lambda *_: seen.append("hook"))
    gradients(model)
    assert seen == ["hook"] and len(calls) == 2 * SMALL.layers - 1
    handle.remove()
    assert served.serves(block, x)


def test_blocks_are_chained_where_that_was_asked_for_and_can_be() -> None:
    for shape, chained, made in (
        (SMALL, False, False),
        (SMALL, True, True),
        (SHAPES["one norm beside each other"], True, False),
    ):
        model = build_model(shape, "cpu", seed=0)
        assert compile_blocks(model, ROWS, CONTEXT, torch.float32, chained) == SMALL.layers
        assert (model.chain is not None) == made
