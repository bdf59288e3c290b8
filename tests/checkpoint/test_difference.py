"""What changed between two checkpoints, by hand-computed numbers."""

import math

import pytest
import torch

from bessemer.checkpoint.tensors import TensorChange, compare


def test_each_kind_of_change() -> None:
    a = {
        "same": torch.tensor([math.nan, -0.0, 1.0]),
        "moved": torch.tensor([3.0, 4.0]),
        "sign": torch.tensor([0.0]),
        "gone": torch.ones(2),
        "shape": torch.ones(2),
        "kind": torch.ones(2),
        "count": torch.tensor(2**60),
    }
    b = {
        "same": torch.tensor([math.nan, -0.0, 1.0]),
        "moved": torch.tensor([3.0, 4.5]),
        "sign": torch.tensor([-0.0]),
        "shape": torch.ones(3),
        "kind": torch.ones(2).bfloat16(),
        "count": torch.tensor(2**60 + 1),
        "new": torch.ones(2),
    }
    found = {change.name: change for change in compare(a, b)}
    assert list(found) == [*a, "new"]
    assert found["same"] == TensorChange("same", "same", 0.0, 0.0)
    assert found["moved"] == TensorChange("moved", "changed", 0.1, 0.5)
    assert found["sign"].what == "changed" and found["sign"].largest == 0
    assert found["gone"].what == "only in A" and found["new"].what == "only in B"
    assert found["shape"].what == "float32 (2,) and float32 (3,)"
    assert found["kind"].what == "float32 (2,) and bfloat16 (2,)"
    assert found["count"].largest == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_longer_a_number_is_an_infinite_change(value: float) -> None:
    (change,) = compare({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, value])})
    assert change.largest == math.inf and change.relative == math.inf
    (back,) = compare({"w": torch.tensor([1.0, value])}, {"w": torch.tensor([1.0, 2.0])})
    assert back.largest == math.inf


def test_an_old_nan_does_not_hide_the_size_of_a_change() -> None:
    (change,) = compare({"w": torch.tensor([math.nan, 4.0])}, {"w": torch.tensor([math.nan, 3.0])})
    assert (change.relative, change.largest) == (0.25, 1.0)
