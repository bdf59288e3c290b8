"""Policy-gradient losses as pure functions: log-probabilities of sampled tokens in, one loss per token out.

Legend: B rows, T tokens. A row may hold several answers (`samples_BT` numbers them). The functions agree with TRL 1.13
(values and gradients); docs/rewards.md lists each loss with its paper, its defaults and where toolkits disagree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass
class PolicyTokens:
    """Log-probabilities and advantages of sampled tokens. Only `logps` has gradients; values outside the mask are not
    read. `importance` corrects for the generator (`truncated_importance`)."""

    logps: Tensor
    old_logps: Tensor
    advantages: Tensor
    mask: Tensor
    ref_logps: Tensor | None = None
    importance: Tensor | None = None
    samples: Tensor | None = None  # the number of each token's answer in its row; None: a row is one answer

    @property
    def log_ratio(self) -> Tensor:
        return self.logps - self.old_logps

    def zero_outside(self) -> PolicyTokens:
        """The same with log-probabilities of 0 outside the mask, so that no infinity of padding reaches a gradient."""
        fields = {"logps": 0.0, "old_logps": 0.0, "ref_logps": 0.0, "advantages": 0.0, "importance": 1.0}
        values = {name: (getattr(self, name), other) for name, other in fields.items()}
        cleaned = {name: x.where(self.mask > 0, other) for name, (x, other) in values.items() if x is not None}
        return replace(self, **cleaned)

    def per_sample(self, values_BT: Tensor, mean: bool) -> Tensor:
        """The sum or mean over the tokens of each answer, at each of its tokens."""
        used_BT = self.mask.to(values_BT.dtype)
        samples_BT = torch.zeros_like(self.mask, dtype=torch.long) if self.samples is None else self.samples.long()
        nothing_BT = torch.zeros_like(values_BT)  # as wide as the row: counting the answers would wait for the device
        sums_BT = nothing_BT.scatter_add(1, samples_BT, values_BT * used_BT)
        if mean:
            sums_BT = sums_BT / nothing_BT.scatter_add(1, samples_BT, used_BT).clamp_min(1)
        return sums_BT.gather(1, samples_BT)


@dataclass(frozen=True)
class Clip:
    """The ratio stays within [1 - low, 1 + high]. `dual` (Ye et al. 2020; their value is 3) bounds it where the
    advantage is negative; it is TRL's `delta`."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None


RatioLevel = Literal["token", "sequence_mean", "sequence_sum"]
TokenLoss = Callable[[PolicyTokens, Tensor, Clip], Tensor]


@dataclass(frozen=True)
class PolicyLoss:
    """`function(tokens, ratio_BT, clip)`; the ratio of new to old probability is that of a token or of its answer."""

    function: TokenLoss
    ratio: RatioLevel
    paper: str
    clip: Clip = Clip()
    corrected: bool = True  # multiplied by tokens.importance


def clipped(tokens: PolicyTokens, ratio_BT: Tensor, clip: Clip) -> Tensor:
    """PPO's clipped surrogate, of a token's ratio (PPO, GRPO, DAPO) or of an answer's (GSPO, RLOO)."""
    bounded_BT = ratio_BT if clip.dual is None else ratio_BT.clamp(max=clip.dual)
    inside_BT = ratio_BT.clamp(1 - clip.low, 1 + clip.high)
    return -torch.minimum(bounded_BT * tokens.advantages, inside_BT * tokens.advantages)


def reinforce(tokens: PolicyTokens, ratio_BT: Tensor, clip: Clip) -> Tensor:
    """Williams 1992: the plain policy gradient, right only for the first step after the answers were sampled."""
    return -tokens.advantages * tokens.logps


def cispo(tokens: PolicyTokens, ratio_BT: Tensor, clip: Clip) -> Tensor:
    """The ratio is a constant weight of at most 1 + high, so no token loses its gradient.

    TRL bounds the ratio by `epsilon_high` itself (its 5 is high 4 here) and, like ScaleRL, has no lower bound.
    """
    return -ratio_BT.detach().clamp(max=1 + clip.high) * tokens.advantages * tokens.logps


def sapo(tokens: PolicyTokens, ratio_BT: Tensor, clip: Clip) -> Tensor:
    """A sigmoid gate instead of a clip, with the paper's temperatures: 1 for positive advantages, 1.05 for others."""
    heat_BT = torch.full_like(tokens.advantages, 1.05).masked_fill(tokens.advantages > 0, 1.0)
    return -torch.sigmoid(heat_BT * (ratio_BT - 1)) * 4 / heat_BT * tokens.advantages


def vespo(tokens: PolicyTokens, ratio_BT: Tensor, clip: Clip) -> Tensor:
    """A gamma-shaped constant weight of the answer's ratio: e^l w^k e^(-l w), with k, l = 2, 3 for advantages of at
    least 0 and 3, 2 for others. The importance of the generator is part of w."""
    log_BT = tokens.log_ratio.detach().clamp(-20, 20)
    if tokens.importance is not None:
        log_BT = log_BT + tokens.importance.log().clamp(-18.420681, 20)
    log_BT = tokens.per_sample(log_BT, mean=False).clamp(-18.420681, 20)  # log(1e-8), as the authors' code
    k_BT = torch.full_like(tokens.advantages, 3.0).masked_fill(tokens.advantages >= 0, 2.0)
    l_BT = 5.0 - k_BT
    weight_BT = torch.exp(l_BT + k_BT * log_BT - l_BT * log_BT.exp())
    return -weight_BT * tokens.advantages * tokens.logps


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "clip": PolicyLoss(clipped, "token", "Schulman et al. 2017, PPO; Shao et al. 2024, GRPO; Yu et al. 2025, DAPO"),
    "gspo": PolicyLoss(clipped, "sequence_mean", "Zheng et al. 2025, GSPO", Clip(3e-4, 4e-4)),
    "rloo": PolicyLoss(clipped, "sequence_sum", "Ahmadian et al. 2024, RLOO"),
    "reinforce": PolicyLoss(reinforce, "token", "Williams 1992, REINFORCE"),
    "cispo": PolicyLoss(cispo, "token", "MiniMax 2025, CISPO (MiniMax-M1)", Clip(1.0, 4.0)),
    "sapo": PolicyLoss(sapo, "token", "SAPO, arXiv 2511.20347"),
    "vespo": PolicyLoss(vespo, "token", "VESPO, arXiv 2602.10693", corrected=False),
}


@dataclass(frozen=True)
class KlPenalty:
    """beta times an estimate of the KL divergence from the reference, added to the loss. `corrected` multiplies it by
    the ratio, without which k3's gradient is right on the sampled policy only (DeepSeek-V3.2; TRL's default)."""

    beta: float
    estimator: str = "k3"
    corrected: bool = True


def policy_loss(
    name: str, tokens: PolicyTokens, clip: Clip | None = None, kl: KlPenalty | None = None
) -> tuple[Tensor, Tensor]:
    """The loss of each token and the ratio that was clipped, both 0 (1) outside the mask; not aggregated."""
    loss = POLICY_LOSSES[name]
    tokens = tokens.zero_outside()
    log_BT = tokens.log_ratio
    if loss.ratio != "token":
        log_BT = tokens.per_sample(log_BT, mean=loss.ratio == "sequence_mean")
    ratio_BT = log_BT.exp()
    losses_BT = loss.function(tokens, ratio_BT, clip or loss.clip)
    if loss.corrected and tokens.importance is not None:
        losses_BT = losses_BT * tokens.importance
    if kl is not None and kl.beta:
        assert tokens.ref_logps is not None
        kl_BT = KL_ESTIMATORS[kl.estimator](tokens.logps, tokens.ref_logps)
        losses_BT = losses_BT + kl.beta * (kl_BT * ratio_BT if kl.corrected else kl_BT)
    return losses_BT.where(tokens.mask > 0, 0.0), ratio_BT.detach().where(tokens.mask > 0, 1.0)


def value_loss(values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, clip: float | None = 0.2) -> Tensor:
    """Half the squared error of the critic, the larger of that and of the value clipped to `clip` around the old one
    (Schulman et al. 2017, code). TRL adds it with weight 0.1, as does the spec; verl and OpenRLHF train it alone."""
    error_BT = (values_BT - returns_BT) ** 2
    if clip is not None:
        near_BT = old_values_BT + (values_BT - old_values_BT).clamp(-clip, clip)
        error_BT = torch.maximum(error_BT, (near_BT - returns_BT) ** 2)
    return 0.5 * error_BT


def k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """log p - log q (Schulman 2020). Unbiased, large variance. In the reward it is the KL penalty of RLHF; as a loss
    its gradient has mean 0, so it holds nothing back."""
    return logps - ref_logps


def k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """(log p - log q)^2 / 2. Biased, but as a loss its gradient on the sampled policy is that of the reverse KL."""
    return 0.5 * (logps - ref_logps) ** 2


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """q/p - 1 - log(q/p) (GRPO's). Unbiased and never negative; as a loss its gradient is that of the forward KL unless
    it is multiplied by the ratio. Not clamped, as in TRL; verl clamps log(q/p) to 20 and the result to 10."""
    return torch.expm1(ref_logps - logps) - (ref_logps - logps)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def truncated_importance(old_logps: Tensor, generator_logps: Tensor, cap: float = 2.0) -> Tensor:
    """Yao et al. 2025, truncated importance sampling: min(p trainer / p generator, cap) of each token, no gradients.
    Corrects for a generator with other numerics or older weights. TRL's cap is 3, verl's 2."""
    return (old_logps - generator_logps).exp().clamp(max=cap).detach()


Aggregation = Literal["token", "sequence", "constant", "sum"]


def aggregation(name: Aggregation, lengths_BT: Tensor, max_tokens: int) -> tuple[Tensor, Tensor | float]:
    """The weights w and scales s of tokens, from the number of tokens in each token's answer (0 outside answers). The
    loss of a batch is sum(w * s * loss) / sum(w) over all its micro-batches and ranks.

    token: mean over the tokens of the batch (DAPO; TRL's `bnpo` where nothing is accumulated). sequence: mean over
    answers of their means (GRPO). constant: sum over tokens / max_tokens, mean over answers (Dr. GRPO). sum: the same
    without the division (LUSPO). TRL's default is token, verl's too; OpenRLHF means over answers.
    """
    used_BT = (lengths_BT > 0).to(torch.float32)
    if name == "token":
        return used_BT, 1.0
    weights_BT = used_BT / lengths_BT.clamp_min(1)
    scales: dict[str, Tensor | float] = {"sequence": 1.0, "constant": lengths_BT / max_tokens, "sum": lengths_BT}
    return weights_BT, scales[name]


class KlController:
    """The coefficient beta of the KL penalty: fixed, or moved towards a target KL (Ziegler et al. 2019, Eq. 8: at most
    20 % of `samples / horizon` at a time; horizon 10,000). `limit` is a hard bound that the caller enforces."""

    def __init__(
        self, beta: float, target: float | None = None, horizon: int = 10_000, limit: float | None = None
    ) -> None:
        self.beta, self.target, self.horizon, self.limit = beta, target, horizon, limit

    def update(self, kl: float, samples: int) -> None:
        """`kl`: the mean over `samples` answers of the KL summed over their tokens, in nats (also of `target`)."""
        if self.target is not None:
            self.beta *= 1 + min(max(kl / self.target - 1, -0.2), 0.2) * samples / self.horizon

    def exceeded(self, kl: float) -> bool:
        return self.limit is not None and not kl <= self.limit

    def state_dict(self) -> dict[str, Any]:
        return {"beta": self.beta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.beta = float(state["beta"])
