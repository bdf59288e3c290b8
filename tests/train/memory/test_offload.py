"""Activations that travel to the host and back are the same ones, and their buffers are used again."""

import gc

import pytest
import torch

from bessemer.model.transformer import Decoder, build_model
from bessemer.spec.shape import ModelShape
from bessemer.train.memory import recompute
from bessemer.train.memory import recompute as offload

SHAPE = ModelShape(64, 64, 5, 4, 2, 16, 256)
TOKENS = torch.arange(512).view(4, 128) * 7 % 64


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[offload.Offload]:
    """Every store that is made; small tensors travel too."""
    monkeypatch.setattr(offload, "LEAST_BYTES", 1 << 10)
    stores: list[offload.Offload] = []
    real = recompute.Offload
    monkeypatch.setattr(recompute, "Offload", lambda model: stores.append(real(model)) or stores[-1])
    return stores


def gradients(model: Decoder) -> list[torch.Tensor]:
    model(TOKENS).square().mean().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("how", ["none", "selective", "full", 0.5])
def test_gradients_are_the_same(how: str | float, made: list[offload.Offload]) -> None:
    expected = gradients(build_model(SHAPE, "cpu", 0))
    model = build_model(SHAPE, "cpu", 0)
    recompute.apply(model, how, offload=True)
    for _ in range(2):  # the second pass writes into the buffers of the first
        assert all(map(torch.equal, gradients(model), expected))


def test_buffers_are_used_again_and_hold_what_a_pass_saves(made: list[offload.Offload]) -> None:
    model = build_model(SHAPE, "cpu", 0)
    recompute.apply(model, "none", offload=True)
    gradients(model)
    first = {size: {buffer.data_ptr() for buffer in buffers} for size, buffers in made[0].free.items()}
    gradients(model)
    again = {size: {buffer.data_ptr() for buffer in buffers} for size, buffers in made[0].free.items()}
    assert first == again
    held = sum(size * len(buffers) for size, buffers in first.items())
    assert held == pytest.approx(25.1 * SHAPE.layers * TOKENS.numel() * 64 * 4, rel=0.05)


def test_under_a_checkpoint_only_inputs_travel(made: list[offload.Offload]) -> None:
    model = build_model(SHAPE, "cpu", 0)
    recompute.apply(model, "full", offload=True)
    gradients(model)
    row = TOKENS.numel() * 64 * 4
    inputs = made[0].free[row]
    assert len(inputs) == SHAPE.layers
    assert sum(size * len(buffers) for size, buffers in made[0].free.items()) < 1.2 * SHAPE.layers * row


def test_weights_stay_and_so_does_what_is_small(made: list[offload.Offload], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1 << 30)
    model = build_model(SHAPE, "cpu", 0)
    recompute.apply(model, "none", offload=True)
    gradients(model)
    assert made[0].free == {}
    store = offload.Offload(model)
    weight = model.blocks[0].ffn.up.weight
    assert store._out(offload.Layer(), weight) is weight


def test_a_pass_without_its_backward_leaves_nothing_behind(made: list[offload.Offload]) -> None:
    """As after a step that ran out of memory."""
    expected = gradients(build_model(SHAPE, "cpu", 0))
    model = build_model(SHAPE, "cpu", 0)
    recompute.apply(model, "none", offload=True)
    model(TOKENS)
    assert all(map(torch.equal, gradients(model), expected))
    layers, layer = 0, made[0].last
    while layer is not None:
        layers, layer = layers + 1, layer.before
    assert layers == SHAPE.layers  # and none of the passes before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how", ["none", "full"])
def test_on_a_gpu_gradients_are_the_same_and_the_peak_is_lower(how: str) -> None:
    shape, tokens = ModelShape(512, 1024, 12, 8, 8, 128, 4096), torch.arange(16_384, device="cuda").view(8, 2048) % 512
    peaks, found = {}, {}
    for away in (False, True):
        model = build_model(shape, "cuda", 0)
        recompute.apply(model, how, offload=away)
        for _ in range(3):
            gc.collect()  # what another test has left, and a block and its forward, which hold each other
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16):
                out = model(tokens)
            out.float().square().mean().backward()
            del out
            found[away] = [p.grad.cpu() for p in model.parameters()]
            model.zero_grad()
        peaks[away] = torch.cuda.max_memory_allocated() - before
        del model
        torch.cuda.empty_cache()
    for ours, plain in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=1e-2 * float(plain.abs().max()) + 1e-9)
    assert peaks[True] < (0.75 if how == "none" else 1.05) * peaks[False], peaks  # inputs alone are few here
