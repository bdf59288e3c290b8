"""Weights saved as bf16 and the bits that it lacks, read by who keeps fp32, and the other way round: bit for bit."""

import pytest
import torch

from bessemer.errors import UserError
from bessemer.optim.low_memory import join_weights, split_weights


def kept(split: bool, exact: torch.Tensor) -> dict[str, torch.Tensor]:
    if not split:
        return {"model.w": exact.clone()}
    high, rest = split_weights(exact)
    return {"model.w": high.bfloat16(), "optimizer.w.remainder": rest}


@pytest.mark.parametrize(("saved", "asked"), [(True, False), (False, True), (True, True)])
def test_weights_come_back_whole(checkpoint_store, manifest_of, saved, asked):
    exact = torch.randn(300, 7, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 9, 7)
    exact[0, :3] = torch.tensor([0.0, float("inf"), 3.0000001])
    folder = checkpoint_store.save(kept(saved, exact), manifest_of(1))
    state = kept(asked, torch.zeros_like(exact))
    checkpoint_store.load(folder, state)
    found = join_weights(state["model.w"], state["optimizer.w.remainder"]) if asked else state["model.w"]
    assert torch.equal(found.view(torch.int32), exact.view(torch.int32))


def test_weights_alone_in_bf16_are_the_nearest(checkpoint_store, manifest_of):
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    folder = checkpoint_store.save(kept(True, exact), manifest_of(1))
    state = {"model.w": torch.zeros(1000, dtype=torch.bfloat16)}
    checkpoint_store.load(folder, state)
    assert torch.equal(state["model.w"], exact.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_never_taken_for_numbers(checkpoint_store, manifest_of, dtype):
    folder = checkpoint_store.save({"optimizer.w.exp_avg": torch.arange(8, dtype=torch.uint8)}, manifest_of(1))
    with pytest.raises(UserError, match=r"is torch.uint8, the spec asks for .*: put the spec's optimizer and memory"):
        checkpoint_store.load(folder, {"optimizer.w.exp_avg": torch.zeros(8, dtype=dtype)})
