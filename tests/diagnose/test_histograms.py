"""Updates lost to bf16 against exact rational arithmetic; histograms, zeros and dead units against plain counting."""

import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bessemer.diagnose.histograms import histogram_report, lost_to_bf16, measure_distribution, measure_distributions
from bessemer.diagnose.report import InspectedModel, MicroBatchTerms


def bf16_values() -> list[tuple[Fraction, int]]:
    """Every finite bf16 that is not negative, with its bits, in rising order."""
    floats = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).double().tolist()
    return [(Fraction(value), bits) for bits, value in enumerate(floats)]


VALUES = bf16_values()
TOP = VALUES[-1][0] + (VALUES[-1][0] - VALUES[-2][0])  # where infinity would be


def rounded(value: Fraction) -> Fraction:
    """To the nearest bf16, ties to even bits, exactly: bisection over all of them."""
    size, low, high = abs(value), 0, len(VALUES)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if VALUES[middle][0] <= size else (low, middle)
    below, above = VALUES[low], (VALUES[low + 1] if low + 1 < len(VALUES) else (TOP, len(VALUES)))
    if size - below[0] != above[0] - size:
        nearest = below if size - below[0] < above[0] - size else above
    else:
        nearest = below if below[1] % 2 == 0 else above
    return nearest[0] if value >= 0 else -nearest[0]


def exactly_lost(weight: float, update: float) -> bool:
    w = Fraction(weight)
    return update != 0 and rounded(w + Fraction(update)) == w


def test_lost_updates_agree_with_exact_arithmetic() -> None:
    rng = np.random.default_rng(0)
    bits = torch.from_numpy(rng.integers(0, 0x7F80, 3000).astype(np.int16))
    weights = bits.view(torch.bfloat16) * torch.from_numpy(rng.choice([-1, 1], 3000)).bfloat16()
    scale = torch.from_numpy(rng.choice([2.0**-12, 2.0**-9, 2.0**-8, 2.0**-10], 3000)).float()
    updates = weights.float() * scale * torch.from_numpy(rng.uniform(-2, 2, 3000)).float()
    # Ties, and the closest fp32 on both sides of them, where a sum in fp32 would already be rounded.
    half = (bits + 1).view(torch.bfloat16).float().sub(bits.view(torch.bfloat16).float()) / 2
    half = torch.where(half.isfinite(), half, torch.zeros(()))
    near = [half, torch.nextafter(half, half * 0), torch.nextafter(half, half * 2 + 1e-30), half / 2]
    near += [-one for one in near]
    every = torch.cat([updates, *near, torch.zeros(3000)])
    all_weights = weights.repeat(len(near) + 2)
    found = lost_to_bf16(all_weights.float(), every).tolist()
    wanted = [exactly_lost(w, u) for w, u in zip(all_weights.tolist(), every.tolist(), strict=True)]
    assert found == wanted
    assert 0.2 < sum(wanted) / len(wanted) < 0.8


def test_the_edges_of_bf16() -> None:
    tiny = 2.0**-133
    largest = VALUES[-1][0].numerator
    for weight, update in (
        (0.0, tiny / 2), (0.0, tiny), (0.0, -tiny * 0.75), (-0.0, tiny / 4), (1.0, -(2.0**-9)),
        (1.0, -(2.0**-9) * 1.01), (1.0, 2.0**-8), (1.0078125, 2.0**-8), (2.0**-126, -tiny / 2), (2.0**-126, -tiny),
        (float(largest), 2.0**118), (float(largest), 2.0**120), (1.0, 1e-45), (1.0, -1e-45),
    ):  # fmt: skip
        assert bool(lost_to_bf16(torch.tensor([weight]), torch.tensor([update]))) is exactly_lost(
            weight, float(np.float32(update))
        ), (weight, update)
    # fp32 weights are rounded to bf16 first, as a bf16 copy would hold them.
    assert bool(lost_to_bf16(torch.tensor([1.001]), torch.tensor([1e-4])))


def test_a_histogram_counts_every_finite_value_once() -> None:
    values = torch.cat([torch.randn(1000), torch.zeros(24), torch.tensor([torch.nan, torch.inf])])
    for kind, counted in (("weight", 1024), ("gradient", 1000)):
        found = measure_distribution("x", kind, values)
        assert sum(found.counts) == counted
        assert found.zeros == pytest.approx(24 / 1026) and found.nonfinite == pytest.approx(2 / 1026)
    numbers = values[:1024].numpy()
    plain = measure_distribution("x", "weight", values)
    assert plain.counts == np.histogram(numbers, 32, (numbers.min(), numbers.max()))[0].tolist()
    assert (plain.mean, plain.std) == pytest.approx((numbers.mean(), numbers.std()), rel=1e-4)
    assert plain.largest == np.abs(numbers).max()
    assert measure_distribution("x", "gradient", torch.zeros(5)).zeros == 1.0
    assert measure_distribution("x", "weight", torch.full((3,), torch.nan)).nonfinite == 1.0
    assert measure_distribution("x", "weight", torch.ones(7)).counts == [7]


class Gated(nn.Module):
    """Unit 2 of the hidden layer never fires, and the last output row has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu() * torch.tensor([1.0, 1, 0, 1, 1])
        out: Tensor = self.down(hidden)
        return out[:, :3]


def test_dead_units_zero_gradients_and_lost_updates_of_a_model() -> None:
    torch.manual_seed(0)
    model = Gated()
    batches = torch.randn(3, 8, 6)

    def parts(step: int, precision: str | None) -> Iterator[MicroBatchTerms]:
        for x in batches:
            yield MicroBatchTerms(model(x).square().mean() / 3, 1 / 3, 8.0)

    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    found = {
        (one.kind, one.name): one for one in measure_distributions(InspectedModel(model, parts), 0, optimizer.step)
    }
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    hidden = found["activation", "down"]
    assert (hidden.dead, hidden.units) == (1, 5)
    assert found["activation", "up"].dead == 0
    down = found["gradient", "down.weight"]
    assert down.zeros == pytest.approx(1 - 3 * 4 / 20)  # a row of 5 and, in the others, the dead unit's column
    lost = found["weight", "up.weight"].lost
    assert lost is not None and lost > 0.5 and math.isfinite(lost)
    text = histogram_report(list(found.values()), "here").text()
    assert "Dead units: 1 of 5 inputs of down" in text and "Largest weight" in text
    page = histogram_report(list(found.values()), "here").html()
    assert page.count("<svg") == len(found)
