"""Losses of pairs against TRL 1.13, values and gradients, and against formulas of the papers."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bessemer.align.pair_losses import PAIR_LOSSES, PairLogps, chosen_wins
from bessemer.spec.preference import OF_DIFFERENCE, SMOOTHED, WITHOUT_REFERENCE, DpoSpec


def make_pairs(seed: int, scale: float = 8.0, pairs: int = 16) -> PairLogps:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return (-torch.rand(pairs, generator=generator, dtype=torch.float64) * scale - 0.05).requires_grad_()

    lengths = [torch.randint(1, 30, (pairs,), generator=generator).double() for _ in range(2)]
    return PairLogps(draw(), draw(), *lengths, draw().detach(), draw().detach())


def both(pairs: PairLogps, loss: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss.sum(), (pairs.chosen, pairs.rejected), retain_graph=True)]


def ls(value: Tensor) -> Tensor:
    return -torch.log1p(torch.exp(-value))


def normed(p: PairLogps) -> Tensor:
    chosen, rejected = (p.chosen - p.reference_chosen), (p.rejected - p.reference_rejected)
    return chosen / p.chosen_tokens - rejected / p.rejected_tokens


s = torch.sigmoid
# Formulas as the papers have them. p: pairs, b: beta, e: label smoothing.
FORMULAS: dict[str, Any] = {
    "sigmoid": lambda p, b, e: -(1 - e) * ls(b * p.difference) - e * ls(-b * p.difference),
    "sigmoid_norm": lambda p, b, e: -ls(b * normed(p)),
    "hinge": lambda p, b, e: (1 - b * p.difference).clamp(min=0),
    "ipo": lambda p, b, e: (normed(p) - 1 / (2 * b)) ** 2,
    "robust": lambda p, b, e: (-(1 - e) * ls(b * p.difference) + e * ls(-b * p.difference)) / (1 - 2 * e),
    "simpo": lambda p, b, e: -(1 - e) * ls(b * (p.chosen / p.chosen_tokens - p.rejected / p.rejected_tokens) - 1.375)
    - e * ls(-b * (p.chosen / p.chosen_tokens - p.rejected / p.rejected_tokens) + 1.375),
    "orpo": lambda p, b, e: -b * ls(
        p.chosen / p.chosen_tokens - torch.log(1 - torch.exp(p.chosen / p.chosen_tokens))
        - p.rejected / p.rejected_tokens + torch.log(1 - torch.exp(p.rejected / p.rejected_tokens))
    ),
    "exo_pair": lambda p, b, e: s(b * p.difference) * (ls(b * p.difference) - math.log(1 - e))
    + s(-b * p.difference) * (ls(-b * p.difference) - math.log(e)),
    "nca_pair": lambda p, b, e: -ls(b * p.chosen_ratio)
    - 0.5 * (ls(-b * p.chosen_ratio) + ls(-b * p.rejected_ratio)),
    "bco_pair": lambda p, b, e: -ls(b * p.chosen_ratio) - ls(-b * p.rejected_ratio),
    "sppo_hard": lambda p, b, e: (p.chosen_ratio - 0.5 / b) ** 2 + (p.rejected_ratio + 0.5 / b) ** 2,
    "apo_zero": lambda p, b, e: 1 - s(b * p.chosen_ratio) + s(b * p.rejected_ratio),
    "apo_down": lambda p, b, e: s(b * p.chosen_ratio) + 1 - s(b * p.difference),
    "discopop": lambda p, b, e: -(1 - s(b * p.difference / 0.05)) * ls(b * p.difference)
    + s(b * p.difference / 0.05) * torch.exp(-b * p.difference),
}  # fmt: skip


def settings(name: str, smoothing: float = 0.1) -> DpoSpec:
    return DpoSpec(loss=name, beta=0.3, smoothing=smoothing if name in SMOOTHED else 0.0)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_formulas(name: str) -> None:
    pairs, spec = make_pairs(1), settings(name)
    loss = PAIR_LOSSES[name](pairs, spec)
    expected = FORMULAS[name](pairs, 0.3, spec.smoothing)
    for ours, theirs in zip(both(pairs, loss), both(pairs, expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    extreme = PAIR_LOSSES[name](make_pairs(2, scale=3000.0), spec)
    assert extreme.isfinite().all() or name == "discopop"  # exp of the log-ratio, as published


def test_the_reference_is_used_where_it_is_needed() -> None:
    for name, loss in PAIR_LOSSES.items():
        pairs, spec = make_pairs(3), settings(name)
        before = loss(pairs, spec)
        pairs.reference_chosen = pairs.reference_chosen - 1
        assert torch.equal(before, loss(pairs, spec)) == (name in WITHOUT_REFERENCE)


# f'(t) as the papers have it: Wang et al. 2023, Table 1 (up to constants, which cancel); Huang et al. 2024 for chi_po.
SLOPES: dict[str, Any] = {
    "reverse_kl": lambda t: torch.log(t) + 1,
    "forward_kl": lambda t: -1 / t,
    "js": lambda t: torch.log(2 * t / (1 + t)),
    "alpha": lambda t: (t ** (0.3 - 1)) / (0.3 - 1),
    "chi_po": lambda t: t + torch.log(t),
}


@pytest.mark.parametrize("name", OF_DIFFERENCE)
@pytest.mark.parametrize("divergence", SLOPES)
def test_divergences_replace_the_log_ratio(divergence: str, name: str) -> None:
    pairs, spec = make_pairs(7, scale=3.0), settings(name)
    pairs.divergence, pairs.alpha = divergence, 0.3  # type: ignore[assignment]
    slope = SLOPES[divergence]
    scores = [slope(ratio.exp()) for ratio in (pairs.chosen_ratio, pairs.rejected_ratio)]
    if name in ("ipo", "sigmoid_norm"):  # means: the constants that do not cancel are those of f'(1) = 0
        scores = [score - slope(torch.tensor(1.0).double()) * (divergence != "chi_po") for score in scores]
        scores = [scores[0] / pairs.chosen_tokens, scores[1] / pairs.rejected_tokens]
    ones = torch.ones_like(pairs.chosen_tokens)
    plain = PairLogps(*scores, ones, ones, 0 * ones, 0 * ones)  # their difference is that of the log-ratios
    ours, theirs = PAIR_LOSSES[name](pairs, spec), PAIR_LOSSES[name](plain, spec)
    for mine, other in zip(both(pairs, ours), both(pairs, theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"loss": "simpo", "divergence": "js"}, "simpo is not a loss of the difference"),
        ({"divergence": "js", "alpha": 0.7}, "alpha is that of divergence: alpha"),
    ],
)
def test_divergences_that_have_no_effect_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DpoSpec.model_validate(section)


def test_ties_count_half() -> None:
    chosen, rejected = torch.tensor([1.0, 1.0, 2.0, 1.0]), torch.tensor([1.0, 1.0 + 1e-6, 1.0, 1.001])
    assert chosen_wins(chosen, rejected, torch.ones(4)).tolist() == [0.5, 0.5, 1.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PAIR_LOSSES) - {"ipo", "sigmoid_norm", "simpo", "orpo"}))
def test_dpo_losses_are_those_of_trl(name: str) -> None:
    """TRL ignores label smoothing of sigmoid."""
    dpo_loss = pytest.importorskip("trl.losses.dpo_loss", reason="TRL 1.13 is not installed")
    function = dpo_loss.FusedLinearDPOFunction.preference_loss_fn
    pairs, spec = make_pairs(4), settings(name, 0.0 if name == "sigmoid" else 0.1)
    count = len(pairs.chosen)
    answer = function(
        pairs.chosen, pairs.rejected, torch.zeros(2 * count, 1), ref_chosen_logps=pairs.reference_chosen,
        ref_rejected_logps=pairs.reference_rejected, beta=0.3, loss_type=name, label_smoothing=spec.smoothing,
    )  # fmt: skip
    theirs = answer[0] if isinstance(answer, tuple) else answer
    ours = PAIR_LOSSES[name](pairs, spec).sum() / count
    for mine, other in zip(both(pairs, ours), both(pairs, theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.mark.slow
def test_simpo_and_orpo_are_those_of_trl() -> None:
    trainers = pytest.importorskip("trl.experimental.cpo", reason="TRL 1.13 is not installed")
    orpo = pytest.importorskip("trl.experimental.orpo")
    pairs = make_pairs(5)
    device = SimpleNamespace(device="cpu")
    inner = SimpleNamespace(
        alpha=0.0, loss_type="simpo", simpo_gamma=0.7, beta=0.3, label_smoothing=0.1, accelerator=device
    )
    theirs = trainers.CPOTrainer.cpo_loss(inner, pairs.chosen_mean, pairs.rejected_mean)[0]
    ours = PAIR_LOSSES["simpo"](pairs, DpoSpec(loss="simpo", beta=0.3, margin=0.7, smoothing=0.1))
    for mine, other in zip(both(pairs, ours), both(pairs, theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
    inner = SimpleNamespace(beta=0.3, accelerator=device)
    theirs = -orpo.ORPOTrainer.odds_ratio_loss(inner, pairs.chosen_mean, pairs.rejected_mean)[0]
    ours = PAIR_LOSSES["orpo"](pairs, DpoSpec(loss="orpo", beta=0.3))
    for mine, other in zip(both(pairs, ours), both(pairs, theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7, check_dtype=False)  # TRL's is in float32
