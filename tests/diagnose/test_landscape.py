"""The slice on a quadratic, whose values are closed-form, and the weights' bits after it."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from bessemer.diagnose.landscape import direction, landscape_report, preserve_weights, slice_loss
from bessemer.diagnose.report import InspectedModel, MicroBatchTerms


def bowl(target: float = 0.0) -> InspectedModel:
    """Loss = 1/2 |W - target|^2 over a 3 x 4 matrix; a bias that no direction moves."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def parts(step: int, precision: str | None) -> Iterator[MicroBatchTerms]:
        for _ in range(2):
            yield MicroBatchTerms(0.25 * ((model.weight - target) ** 2).sum() + 0 * model.bias.sum(), 0.5, 1.0)

    return InspectedModel(model, parts)


def test_directions_have_the_length_of_each_row() -> None:
    weight = torch.randn(5, 3, 2)
    drawn = direction(weight, "a", 1)
    assert torch.allclose(drawn.flatten(1).norm(dim=1), weight.flatten(1).norm(dim=1))
    assert torch.equal(drawn, direction(weight, "a", 1))
    assert not torch.equal(drawn, direction(weight, "b", 1)) and not torch.equal(drawn, direction(weight, "a", 2))
    assert not direction(torch.ones(4), "norm", 1).any()


def test_the_slice_is_the_closed_form() -> None:
    subject = bowl()
    weight = subject.model.weight.detach().clone()
    found = slice_loss(subject, [0, 1], reach=0.5, points=5, grid=3, seed=4)
    d1, d2 = direction(weight, "weight", 8), direction(weight, "weight", 9)
    assert found.offsets == [-0.5, -0.25, 0.0, 0.25, 0.5]
    expected = [0.5 * float(((weight + a * d1) ** 2).sum()) for a in found.offsets]
    assert found.line == pytest.approx(expected, rel=1e-5)
    for b, row in zip(found.grid_offsets, found.grid, strict=True):
        expected = [0.5 * float(((weight + a * d1 + b * d2) ** 2).sum()) for a in found.grid_offsets]
        assert row == pytest.approx(expected, rel=1e-5)
    # The second derivative of 1/2 |W + a d|^2 is |d|^2 = |W|^2.
    assert found.curvature == pytest.approx(float((weight**2).sum()), rel=1e-3)
    assert "downhill" in landscape_report(found, "here").text()  # zero is lower: the weights are not at the minimum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_restored_bit_by_bit_also_after_a_failure(dtype: torch.dtype) -> None:
    subject = bowl()
    subject.model.to(dtype)
    before = [p.detach().clone() for p in subject.model.parameters()]
    slice_loss(subject, [0], points=3, grid=3)
    assert all(torch.equal(a, b) for a, b in zip(before, subject.model.parameters(), strict=True))

    def interrupted() -> None:
        with preserve_weights(subject), torch.no_grad():
            subject.model.weight.fill_(float("nan"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(torch.equal(a, b) for a, b in zip(before, subject.model.parameters(), strict=True))


def test_points_that_are_not_finite_are_counted() -> None:
    subject = bowl()
    made = subject.parts

    def parts(step: int, precision: str | None) -> Iterator[MicroBatchTerms]:
        for part in made(step, precision):
            yield MicroBatchTerms(torch.where(part.loss > 0.8, torch.nan, part.loss), part.share, part.tokens)

    found = slice_loss(InspectedModel(subject.model, parts), [0], reach=3.0, points=3, grid=0)
    text = landscape_report(found, "here").text()
    assert "2 of 3 points are not finite" in text and not found.grid
