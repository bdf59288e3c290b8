"""The copy that asynchronous saves write from."""

import pytest
import torch

from bessemer.checkpoint.background import Staging, in_background, state_bytes


def test_a_copy_does_not_follow_the_training_and_its_memory_is_used_again(state_of):
    staging, state = Staging(), state_of(1)
    first = staging.copy(state)
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    for tensor in state.values():
        tensor.zero_()
    for name, tensor in state_of(1).items():
        assert torch.equal(first[name].nan_to_num(), tensor.nan_to_num()) and first[name].dtype == tensor.dtype
    assert staging.bytes == state_bytes(state)
    again = staging.copy(state)
    assert {name: tensor.data_ptr() for name, tensor in again.items()} == places
    assert all(not tensor.any() for tensor in again.values())


def test_a_state_that_changes_shape_or_loses_a_tensor_is_copied_as_it_is():
    staging = Staging()
    staging.copy({"a": torch.zeros(3), "b": torch.zeros(2)})
    copy = staging.copy({"a": torch.ones(4, dtype=torch.bfloat16)})
    assert set(copy) == {"a"} and torch.equal(copy["a"], torch.ones(4, dtype=torch.bfloat16))


def test_what_is_raised_behind_comes_out_where_it_is_waited_for():
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        in_background(leave, "leaves").result()
    assert in_background(lambda: 5, "works").result() == 5


@pytest.mark.gpu
def test_a_copy_of_a_gpus_state_is_page_locked_and_whole(checkpoint_store, manifest_of):
    generator = torch.Generator("cuda").manual_seed(1)
    state = {f"model.{n}": torch.randn(4096, 1024, device="cuda", generator=generator) for n in range(8)}
    state["step"] = torch.tensor(3.0, device="cuda")
    expected = {name: tensor.cpu() for name, tensor in state.items()}
    staging = Staging()
    copy = staging.copy(state)
    assert all(tensor.is_pinned() for name, tensor in copy.items() if name != "step")
    future = in_background(lambda: checkpoint_store.save(copy, manifest_of(1)), "save")
    for _ in range(50):  # the training goes on
        for tensor in state.values():
            tensor.add_(1)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpoint_store.load(future.result(), loaded)
    assert all(torch.equal(loaded[name].cpu(), expected[name]) for name in expected)
