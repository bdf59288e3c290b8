"""Layers whose part behind attention goes tile by tile: the gradients of whole layers, in less room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bessemer.model.transformer import Decoder, build_model
from bessemer.optim.choose import make_optimizer
from bessemer.optim.guarded import OptimizerInBackward
from bessemer.spec.optimizer import MemorySpec, OptimizerSpec
from bessemer.spec.shape import Mla, ModelShape
from bessemer.train.compile import CompiledBlocks, compute_in
from bessemer.train.memory import recompute, tiles
from bessemer.train.memory import recompute as offload

SHAPE = ModelShape(64, 64, 3, 4, 2, 16, 256)
TOKENS = torch.arange(512).view(4, 128) * 7 % 64
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _short_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 tokens are long, and go in eight tiles of 64."""
    monkeypatch.setattr(tiles, "LONG", 256)
    monkeypatch.setattr(tiles, "MOST", 70)


def model_of(shape: ModelShape, dtype: torch.dtype = torch.float64, tokens: Tensor = TOKENS) -> Decoder:
    """With blocks that are served as compiled ones are."""
    model = build_model(shape, "cpu", 0).to(dtype).train()
    served = CompiledBlocks(*tokens.shape, dtype, lambda function: function)
    for block in model.blocks:
        block.compiled = served
    return model


def gradients(model: Decoder, tokens: Tensor = TOKENS) -> dict[str, Tensor]:
    model(tokens).square().mean().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def count_tiles(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    seen: list[torch.Size] = []
    left = tiles._left

    def counted(block: Any, x: Tensor, out: Tensor) -> Tensor:
        seen.append(x.shape)
        return left(block, x, out)

    monkeypatch.setattr(tiles, "_left", counted)
    return seen


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases, no gate": {"gated": False, "ffn_bias": True, "norm": "layer", "activation": "gelu"},
    "after the sum": {"norm_place": "post", "norm": "layer"},
    "sandwich": {"norm_place": "sandwich"},
    "side by side": {"parallel": "two_norms"},
    "latent": {"kv_heads": 4, "mla": Mla(16, 8, 8, 16)},
    "head norms": {"qk_norm": "head"},
}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("plain", 1), *((name, 4) for name in SHAPES),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in SHAPES if name != "plain"),
    ],
)  # fmt: skip
def test_gradients_are_those_of_whole_layers(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, tokens = replace(SHAPE, **SHAPES[name]), TOKENS.view(rows, -1)
    expected = gradients(model_of(shape, tokens=tokens), tokens)
    model = model_of(shape, tokens=tokens)
    recompute.apply(model, "full")
    seen = count_tiles(monkeypatch)
    found = gradients(model, tokens)
    assert seen == [torch.Size((1, 64, 64))] * 8 * 3 * 2  # tiles, layers, passes
    assert found.keys() == expected.keys()
    assert max(float((found[key] - expected[key]).abs().max()) for key in found) < 1e-13


def test_with_offload_only_inputs_of_layers_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the graphs save while a layer runs forward is seen by no hook around it."""
    monkeypatch.setattr(offload, "LEAST_BYTES", 1 << 10)
    stores: list[offload.Offload] = []
    real = recompute.Offload
    monkeypatch.setattr(recompute, "Offload", lambda model: stores.append(real(model)) or stores[-1])
    expected = gradients(model_of(SHAPE))
    model = model_of(SHAPE)
    recompute.apply(model, "full", offload=True)
    seen = count_tiles(monkeypatch)
    for _ in range(2):
        found = gradients(model)
        assert max(float((found[key] - expected[key]).abs().max()) for key in found) < 1e-13
        buffers = {size: len(buffers) for size, buffers in stores[0].free.items()}
        assert buffers == {TOKENS.numel() * 64 * 8: SHAPE.layers}
    assert seen


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"positions": "alibi"}, TOKENS), ({"positions": "relative"}, TOKENS), ({"parallel": "one_norm"}, TOKENS),
        ({}, TOKENS[:2]), ({}, TOKENS.view(1, -1)[:, :509]),
    ],
    ids=["alibi", "relative", "one norm for both", "short", "a prime number"],
)  # fmt: skip
def test_what_has_no_tiles_is_computed_whole(
    changes: dict[str, Any], tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(SHAPE, **changes)
    expected = gradients(model_of(shape, tokens=tokens), tokens)
    model = model_of(shape, tokens=tokens)
    recompute.apply(model, "full")
    seen = count_tiles(monkeypatch)
    found = gradients(model, tokens)
    assert not seen and all(torch.equal(found[key], expected[key]) for key in expected)


def test_hooks_dropout_and_evaluation_meet_whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = count_tiles(monkeypatch)
    hooked, random, judged = (model_of(SHAPE) for _ in range(3))
    hooked.blocks[0].ffn.register_forward_hook(lambda *_: None)
    for block in random.blocks:
        block.dropout = 0.1
    for model in (hooked, random, judged):
        recompute.apply(model, "full")
    gradients(random)
    judged.eval()
    judged(TOKENS)
    assert not seen
    gradients(hooked)
    assert len(seen) == 8 * 2 * 2  # the two layers without


def test_tiles_are_equal_and_at_most_as_large_as_said() -> None:
    assert [tiles.tile_for(tokens) for tokens in (256, 512, 7 * 64, 280, 509)] == [None, 64, 64, 70, None]


def test_a_frozen_weight_has_no_gradient_and_the_others_have_theirs() -> None:
    expected = gradients(model_of(SHAPE))
    model = model_of(SHAPE)
    for block in model.blocks:
        block.ffn.up.weight.requires_grad_(False)
        block.attention_norm.weight.requires_grad_(False)
    recompute.apply(model, "full")
    found = gradients(model)
    assert len(found) == len(expected) - 6
    assert all(torch.allclose(found[key], expected[key], rtol=1e-10, atol=1e-14) for key in found)


def test_nothing_behind_attention_is_as_long_as_the_row() -> None:
    class Largest(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            found = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor) and x.shape[-1:] == (256,)]
            self.elements = max([self.elements, *found])
            return out

    largest = {}
    for how in ("none", "full"):
        model = model_of(SHAPE)
        recompute.apply(model, how)
        with Largest() as seen:
            gradients(model)
        largest[how] = seen.elements
    assert largest["none"] == 512 * 256
    assert largest["full"] == 64 * 256  # of a tile, and of a weight


def test_two_graphs_serve_all_layers_and_both_passes() -> None:
    model = model_of(SHAPE)
    served = CompiledBlocks(*TOKENS.shape, torch.float64, torch.compile(backend="aot_eager", dynamic=False))
    for block in model.blocks:
        block.compiled = served
    recompute.apply(model, "full")
    torch._dynamo.utils.counters.clear()
    found = [gradients(model) for _ in range(2)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # to attention and from it
    torch.compiler.reset()
    expected = gradients(model_of(SHAPE))
    for key, value in expected.items():
        assert torch.equal(found[0][key], found[1][key])
        assert torch.allclose(found[0][key], value, rtol=1e-10, atol=1e-14)


def test_a_second_backward_pass_and_inputs_on_the_host_give_the_same() -> None:
    expected = gradients(model_of(SHAPE))
    model = model_of(SHAPE)
    recompute.apply(model, "full", offload=True)
    loss = model(TOKENS).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, 2 * expected[name], rtol=1e-10, atol=1e-14)


@pytest.mark.slow
def test_weights_in_bf16_are_summed_over_tiles_in_fp32() -> None:
    """As far from fp32 as whole layers are, not as eight roundings would be."""
    exact = gradients(model_of(SHAPE, torch.float32))

    def distance(how: str) -> float:
        model = build_model(SHAPE, "cpu", 0).train()
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.data = parameter.data.bfloat16()
        served = CompiledBlocks(*TOKENS.shape, torch.bfloat16, lambda function: function)
        for block in model.blocks:
            block.compiled = served
        recompute.apply(model, how)
        with compute_in("bf16", torch.device("cpu")):
            found = gradients(model)
        key = "blocks.1.ffn.down.weight"
        assert found[key].dtype == torch.bfloat16
        return float((found[key].float() - exact[key]).norm() / exact[key].norm())

    assert distance("full") < 1.1 * distance("none") < 0.05


def test_updates_in_the_backward_pass_are_those_of_whole_layers() -> None:
    weights = {}
    for how in ("none", "full"):
        model = model_of(SHAPE, torch.float32)
        recompute.apply(model, how)
        memory = MemorySpec(update="in_backward")
        optimizer = make_optimizer(model.named_parameters(), OptimizerSpec(), memory=memory)
        assert isinstance(optimizer, OptimizerInBackward)
        optimizer.prepare_backward(1e-2)
        model(TOKENS).square().mean().backward()
        weights[how] = {name: p.detach().clone() for name, p in model.named_parameters()}
        assert all(p.grad is None for p in model.parameters())
    for name, weight in weights["none"].items():
        assert torch.allclose(weights["full"][name], weight, atol=1e-5), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_long_row_takes_less_room_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape(vocab=512, width=512, layers=3, heads=8, kv_heads=2, head_dim=64, ffn=2048)
    tokens = torch.randint(0, 512, (1, 65_536), device=CUDA, generator=torch.Generator(CUDA).manual_seed(0))
    found, peaks = {}, {}
    for long in (32_768, 1 << 30):
        monkeypatch.setattr(tiles, "MOST", 16_384)
        monkeypatch.setattr(tiles, "LONG", long)
        torch.compiler.reset()
        model = build_model(shape, CUDA, 0, matrices=torch.bfloat16).train()
        wrap = torch.compile(dynamic=False, fullgraph=True)
        served = CompiledBlocks(1, 65_536, torch.bfloat16, wrap)
        for block in model.blocks:
            block.compiled = served
        recompute.apply(model, "full")
        for _ in range(2):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            with compute_in("bf16", CUDA):
                model(tokens).float().square().mean().backward()
        peaks[long] = torch.cuda.max_memory_allocated()
        found[long] = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
        del model, served
    tile, whole = found.values()
    for name in whole:
        assert float((tile[name] - whole[name]).norm() / whole[name].norm()) < 2e-2, name
    room = 65_536 * 2 * 2048  # bytes of one wide tensor
    assert peaks[1 << 30] - peaks[32_768] > 2 * room
