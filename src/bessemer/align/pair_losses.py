"""Losses of pairs of answers as pure functions: log-probabilities in, one loss per pair out.

The functions agree with TRL 1.13, but for `ipo` and `sigmoid_norm` they were compared with formulas alone
(tests/align/test_pair_losses.py). Where toolkits disagree, these are TRL's, but for
label smoothing of `sigmoid`, which is conservative DPO as in its paper. P is the number of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bessemer.spec.preference import Divergence, DpoSpec

TIE = 1e-5  # of the size of the log-probabilities: fp32 sums in another order differ by less


@dataclass
class PairLogps:
    """Log-probabilities of the answers of P pairs, summed over their tokens, and the number of these."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    divergence: Divergence = "reverse_kl"
    alpha: float = 0.5  # of divergence alpha

    @property
    def chosen_ratio(self) -> Tensor:
        """Log of how much more probable the chosen answer is than with the reference."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        return self.rejected - self.reference_rejected

    @property
    def chosen_score(self) -> Tensor:
        """f'(probability ratio) of the f-divergence: the reward up to beta and a constant (Wang et al. 2023, f-DPO)."""
        return divergence_score(self.chosen_ratio, self.divergence, self.alpha)

    @property
    def rejected_score(self) -> Tensor:
        return divergence_score(self.rejected_ratio, self.divergence, self.alpha)

    @property
    def difference(self) -> Tensor:
        return self.chosen_score - self.rejected_score

    @property
    def chosen_mean(self) -> Tensor:
        return self.chosen / self.chosen_tokens

    @property
    def rejected_mean(self) -> Tensor:
        return self.rejected / self.rejected_tokens

    @property
    def normed_difference(self) -> Tensor:
        return self.chosen_score / self.chosen_tokens - self.rejected_score / self.rejected_tokens


def divergence_score(ratio: Tensor, divergence: Divergence, alpha: float = 0.5) -> Tensor:
    """f'(t) of a log-ratio log t. chi_po is Huang et al. 2024 (chi^2 and KL: t + log t, their bounds of log t); the
    others are TRL's, which bounds exponents by 80 for alpha only."""
    if divergence == "js":
        return math.log(2) + logsigmoid(ratio)
    if divergence == "chi_po":
        return ratio.clamp(-88, 20).exp() + ratio
    power = {"forward_kl": -1.0, "alpha": alpha - 1.0, "reverse_kl": 0.0}[divergence]
    if abs(power) < 1e-6:
        return ratio
    return torch.expm1((power * ratio).clamp(max=80.0)) / power


def chosen_wins(chosen: Tensor, rejected: Tensor, size: Tensor) -> Tensor:
    """1 where the chosen reward is higher, 0 where it is lower, 1/2 for a tie: rewards whose difference is within the
    rounding of `size`, the numbers that they are computed from."""
    return torch.where((chosen - rejected).abs() <= TIE * size, 0.5, (chosen > rejected).to(chosen.dtype))


PairLoss = Callable[[PairLogps, DpoSpec], Tensor]


def sigmoid(pairs: PairLogps, spec: DpoSpec) -> Tensor:
    """Rafailov et al. 2023, DPO; with label smoothing Mitchell 2023, conservative DPO."""
    return _smoothed(spec.beta_value * pairs.difference, spec.smoothing)


def sigmoid_norm(pairs: PairLogps, spec: DpoSpec) -> Tensor:
    """Length-normalised DPO (Lambert et al. 2024, Tulu 3)."""
    return -logsigmoid(spec.beta_value * pairs.normed_difference)


def hinge(pairs: PairLogps, spec: DpoSpec) -> Tensor:
    """Zhao et al. 2023, SLiC-HF."""
    return torch.relu(1 - spec.beta_value * pairs.difference)


def ipo(pairs: PairLogps, spec: DpoSpec) -> Tensor:
    """Azar et al. 2023, IPO, with means over tokens, as its authors confirmed to TRL."""
    return (pairs.normed_difference - 1 / (2 * spec.beta_value)) ** 2


def robust(pairs: PairLogps, spec: DpoSpec) -> Tensor:
    """Chowdhury et al. 2024: unbiased where a share of the pairs is exchanged."""
    share, z = spec.smoothing, spec.beta_value * pairs.difference
    return (-(1 - share) * logsigmoid(z) + share * logsigmoid(-z)) / (1 - 2 * share)


def simpo(pairs: PairLogps, spec: DpoSpec) -> Tensor:
    """Meng et al. 2024, SimPO: mean log-probabilities, a margin, no reference."""
    z = spec.beta_value * (pairs.chosen_mean - pairs.rejected_mean) - spec.margin
    return _smoothed(z, spec.smoothing)


def orpo(pairs: PairLogps, spec: DpoSpec) -> Tensor:
    """Hong et al. 2024, ORPO: the ratio of odds; the cross-entropy is added by `dpo.sft`."""
    odds = _log_odds(pairs.chosen_mean) - _log_odds(pairs.rejected_mean)
    return -spec.beta_value * logsigmoid(odds)


def exo_pair(pairs: PairLogps, spec: DpoSpec) -> Tensor:
    """Ji et al. 2024, EXO, of pairs."""
    z, share = spec.beta_value * pairs.difference, spec.smoothing
    first = torch.sigmoid(z) * (logsigmoid(z) - math.log1p(-share))
    return first + torch.sigmoid(-z) * (logsigmoid(-z) - math.log(share))


def nca_pair(pairs: PairLogps, spec: DpoSpec) -> Tensor:
    """Chen et al. 2024, noise contrastive alignment."""
    chosen, rejected = spec.beta_value * pairs.chosen_ratio, spec.beta_value * pairs.rejected_ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def bco_pair(pairs: PairLogps, spec: DpoSpec) -> Tensor:
    """Jung et al. 2024, BCO, without its running mean, as in TRL's trainer of pairs."""
    return -logsigmoid(spec.beta_value * pairs.chosen_ratio) - logsigmoid(-spec.beta_value * pairs.rejected_ratio)


def sppo_hard(pairs: PairLogps, spec: DpoSpec) -> Tensor:
    """Wu et al. 2024, SPPO with hard labels."""
    half = 0.5 / spec.beta_value
    return (pairs.chosen_ratio - half) ** 2 + (pairs.rejected_ratio + half) ** 2


def apo_zero(pairs: PairLogps, spec: DpoSpec) -> Tensor:
    """D'Oosterlinck et al. 2024, APO-zero: raises the chosen and lowers the rejected answer."""
    beta = spec.beta_value
    return 1 - torch.sigmoid(beta * pairs.chosen_ratio) + torch.sigmoid(beta * pairs.rejected_ratio)


def apo_down(pairs: PairLogps, spec: DpoSpec) -> Tensor:
    """D'Oosterlinck et al. 2024, APO-down: lowers both, the rejected one more."""
    beta = spec.beta_value
    return torch.sigmoid(beta * pairs.chosen_ratio) + 1 - torch.sigmoid(beta * pairs.difference)


def discopop(pairs: PairLogps, spec: DpoSpec) -> Tensor:
    """Lu et al. 2024, DiscoPOP, with its temperature of 0.05."""
    z = spec.beta_value * pairs.difference
    share = torch.sigmoid(z / 0.05)
    return -(1 - share) * logsigmoid(z) + share * torch.exp(-z)


PAIR_LOSSES: dict[str, PairLoss] = {
    function.__name__: function
    for function in (
        sigmoid, sigmoid_norm, hinge, ipo, robust, simpo, orpo, exo_pair, nca_pair, bco_pair, sppo_hard, apo_zero,
        apo_down, discopop,
    )
}  # fmt: skip


def _smoothed(z: Tensor, share: float) -> Tensor:
    return -(1 - share) * logsigmoid(z) - share * logsigmoid(-z) if share else -logsigmoid(z)


def _log_odds(mean: Tensor) -> Tensor:
    """log(p / (1 - p)) of a log-probability; log(1 - p) is exact on both sides of p = 1/2 (Maechler 2012)."""
    below = -math.log(2)
    small = torch.log1p(-torch.exp(mean.clamp(max=below)))
    large = torch.log(-torch.expm1(mean.clamp(min=below, max=-1e-12)))
    return mean - torch.where(mean < below, small, large)
