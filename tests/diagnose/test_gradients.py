"""Gradient flow: the numbers of a model by hand, and networks that are known to vanish, explode or do neither."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from bessemer.diagnose.gradients import check_gradients, depth_trend, gradient_report, measure_gradient_flow
from bessemer.diagnose.report import InspectedModel, MicroBatchTerms, backward_step, mean_step_loss


def subject_of(model: nn.Module, width: int) -> InspectedModel:
    def parts(step: int, precision: str | None) -> Iterator[MicroBatchTerms]:
        generator = torch.Generator().manual_seed(step)
        for _ in range(2):
            x = torch.randn(16, width, generator=generator)
            yield MicroBatchTerms((model(x) - 1).square().mean() / 2, 0.5, 16.0)

    return InspectedModel(model, parts)


def deep(layers: int, width: int, std: float, act: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), act()) for _ in range(layers)))
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            nn.init.normal_(parameter, std=std / width**0.5)
    return model


class Named(nn.Module):
    """Gives the layers names as a decoder has them: blocks.0., blocks.1., ..."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks(x)
        return out


@pytest.mark.parametrize(
    ("std", "act", "kind"),
    [
        (1.0, nn.Sigmoid, "vanishing"),
        (8.0, nn.ReLU, "exploding"),
        (8.0, nn.Tanh, "exploding"),
        (1.4, nn.ReLU, None),
        (1.0, nn.Tanh, None),
    ],
)
def test_known_networks(std: float, act: type[nn.Module], kind: str | None) -> None:
    found = check_gradients(measure_gradient_flow(subject_of(Named(deep(8, 32, std, act)), 32), [0, 1]))
    if kind is None:
        assert found == []
    else:
        assert any(kind in finding.symptom for finding in found)


def test_a_layer_cut_off_and_a_nan_are_named() -> None:
    model = Named(deep(3, 8, 1.4, nn.ReLU))
    with torch.no_grad():
        model.blocks[1][0].bias.fill_(-1e3)  # no unit fires: the layers up to here get no gradient
        model.blocks[2][0].bias.fill_(1.0)
    symptoms = " ".join(
        finding.symptom for finding in check_gradients(measure_gradient_flow(subject_of(model, 8), [0]))
    )
    assert "vanishing gradients in blocks.0.0.weight, blocks.1.0.weight" in symptoms
    with torch.no_grad():
        model.blocks[2][0].bias[0] = torch.nan
    assert "non-finite gradients" in gradient_report(measure_gradient_flow(subject_of(model, 8), [0]), "here").text()


def test_the_numbers_are_those_of_the_gradient() -> None:
    model = nn.Linear(3, 2, bias=False)
    subject = subject_of(model, 3)
    norms, largest = [], 0.0
    for step in (4, 5):
        backward_step(subject, step)
        assert model.weight.grad is not None
        norms.append(float(model.weight.grad.norm()))
        largest = max(largest, float(model.weight.grad.abs().max()))
    (found,) = measure_gradient_flow(subject, [4, 5])
    assert found.grad_norm == pytest.approx(sum(norms) / 2) and found.grad_norm_max == pytest.approx(max(norms))
    assert found.largest == pytest.approx(largest)
    assert found.ratio == pytest.approx(found.grad_norm / float(model.weight.detach().norm()))
    assert model.weight.grad is None and depth_trend([found]) is None


def test_the_loss_of_a_step_is_the_sum_of_its_parts() -> None:
    subject = subject_of(nn.Linear(3, 1), 3)
    one, two = (float(backward_step(subject, step)) for step in (0, 1))
    assert mean_step_loss(subject, [0, 1]) == pytest.approx((one + two) / 2)
