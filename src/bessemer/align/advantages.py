"""Advantages of sampled answers as pure functions: rewards in, how much better than expected out.

Legend: P prompts, G answers to each, B answers, T tokens of an answer. A reward of NaN means that no reward applied to
the answer: it is left out of every mean, and its advantage is 0. All functions are compared with TRL 1.13, verl's
recursion or formulas written out (tests/align/test_advantages.py); docs/rewards.md lists papers and defaults.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Scale = Literal["group", "batch", "none"]
EPSILON = 1e-4  # TRL's; verl and OpenRLHF add 1e-6 and 1e-9


def group_advantages(rewards_PG: Tensor, scale: Scale = "group") -> Tensor:
    """Shao et al. 2024, GRPO: reward minus the mean of its group, divided by the group's standard deviation.

    `batch` divides by the deviation of all rewards (Liu et al. 2025, "Part I: tricks or traps"), `none` does not divide
    (Liu et al. 2025, Dr. GRPO). Deviations have Bessel's correction, as in TRL and verl; the paper does not say.
    """
    centred_PG = rewards_PG - torch.nanmean(rewards_PG, dim=1, keepdim=True)
    if scale == "group":
        centred_PG = centred_PG / (_nan_deviation(rewards_PG, dim=1) + EPSILON)
    elif scale == "batch":
        centred_PG = centred_PG / (_nan_deviation(rewards_PG.reshape(1, -1), dim=1) + EPSILON)
    return torch.nan_to_num(centred_PG, nan=0.0)


def rloo_advantages(rewards_PG: Tensor, normalise: bool = False) -> Tensor:
    """Ahmadian et al. 2024, RLOO: reward minus the mean of the *other* rewards of its group.

    It equals G / (G - 1) times Dr. GRPO's. `normalise` whitens over the batch, as TRL's `normalize_advantages`."""
    count_P1 = (~torch.isnan(rewards_PG)).sum(1, keepdim=True)
    others_PG = (torch.nansum(rewards_PG, 1, keepdim=True) - rewards_PG) / (count_P1 - 1)
    advantages_PG = torch.where(count_P1 > 1, rewards_PG - others_PG, torch.nan)
    if normalise:
        deviation = _nan_deviation(advantages_PG.reshape(1, -1), dim=1)
        advantages_PG = (advantages_PG - torch.nanmean(advantages_PG)) / (deviation + EPSILON)
    return torch.nan_to_num(advantages_PG, nan=0.0)


def token_rewards(rewards_B: Tensor, mask_BT: Tensor, penalty_BT: Tensor | None = None) -> Tensor:
    """The reward at the last token of each answer, minus a penalty at every token (beta times KL, in the reward)."""
    mask_BT = mask_BT.to(rewards_B.dtype)
    last_B = (mask_BT * torch.arange(1, mask_BT.shape[1] + 1, device=mask_BT.device)).argmax(1)
    rewards_BT = torch.zeros_like(mask_BT)
    rewards_BT.scatter_(1, last_B[:, None], torch.nan_to_num(rewards_B, nan=0.0)[:, None])
    return (rewards_BT if penalty_BT is None else rewards_BT - penalty_BT) * mask_BT


def reinforce_pp_advantages(
    rewards_PG: Tensor, mask_BT: Tensor, penalty_BT: Tensor | None = None, gamma: float = 1.0, baseline: bool = False
) -> Tensor:
    """Hu 2025, REINFORCE++: the return of each token, whitened over all tokens of the batch. (P, G) -> (P * G, T).

    `penalty_BT` is beta times the KL estimate k1 of each token. `baseline` subtracts the group's mean first
    (REINFORCE++-baseline). OpenRLHF whitens with the plain variance; here and in verl it has Bessel's correction.
    """
    centred_PG = rewards_PG - torch.nanmean(rewards_PG, dim=1, keepdim=True) if baseline else rewards_PG
    mask_BT = mask_BT * (~torch.isnan(rewards_PG)).reshape(-1, 1)
    rewards_BT = token_rewards(centred_PG.reshape(-1), mask_BT, penalty_BT)
    returns_BT, _ = gae(rewards_BT, torch.zeros_like(rewards_BT), mask_BT, gamma, lam=1.0)
    return whiten(returns_BT, mask_BT)


def gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Schulman et al. 2016, generalised advantage estimation. Returns the advantages and the critic's targets.

    values_BT[:, t] is the critic's value before token t. Tokens outside the mask (padding, a tool's output) are
    skipped: the value after a token is that of the next token in the mask, and 0 after the last one, also of a
    truncated answer (as in TRL and OpenRLHF). Defaults of the spec: gamma 1, lambda 0.95, as in TRL.
    """
    advantages_BT = torch.zeros_like(rewards_BT)
    next_value_B = advantage_B = torch.zeros_like(rewards_BT[:, 0])
    for t in reversed(range(rewards_BT.shape[1])):
        used_B = mask_BT[:, t] > 0
        error_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        advantage_B = torch.where(used_B, error_B + gamma * lam * advantage_B, advantage_B)
        next_value_B = torch.where(used_B, values_BT[:, t], next_value_B)
        advantages_BT[:, t] = advantage_B.where(used_B, 0.0)
    return advantages_BT, (advantages_BT + values_BT) * (mask_BT > 0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the mask, 0 elsewhere. Variance with Bessel's correction and 1e-8, as in TRL's PPO."""
    mask = mask.to(values.dtype)
    count = mask.sum().clamp_min(1)
    centred = (values - (values * mask).sum() / count) * mask
    variance = (centred**2).sum() / (count - 1).clamp_min(1)
    return centred * torch.rsqrt(variance + 1e-8)


def equal_groups(rewards_PG: Tensor) -> Tensor:
    """Whether all rewards of a prompt are equal, so that its answers teach nothing; DAPO draws other prompts instead.
    Also true if fewer than two rewards applied."""
    low_P = torch.nan_to_num(rewards_PG, nan=torch.inf).amin(1)
    high_P = torch.nan_to_num(rewards_PG, nan=-torch.inf).amax(1)
    return high_P - low_P <= 1e-8 * high_P.abs()


def best_and_worst(rewards_PG: Tensor) -> Tensor:
    """1 for the answer with the highest reward of a prompt, -1 for that with the lowest, 0 for others and for all of a
    prompt whose rewards are equal. NaN: the answer does not count. The first of equal ones."""
    marks_PG = torch.zeros_like(rewards_PG)
    best_P = torch.nan_to_num(rewards_PG, nan=-torch.inf).argmax(1, keepdim=True)
    worst_P = torch.nan_to_num(rewards_PG, nan=torch.inf).argmin(1, keepdim=True)
    marks_PG.scatter_(1, best_P, 1.0).scatter_(1, worst_P, -1.0)
    return marks_PG.masked_fill(equal_groups(rewards_PG)[:, None], 0.0)


def overlong_penalty(lengths_B: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """Yu et al. 2025, DAPO's soft overlong punishment: 0 up to `max_tokens - buffer` tokens, then down to -1 linearly.
    The paper has max_tokens 20,480 and buffer 4,096."""
    return ((max_tokens - buffer - lengths_B) / buffer).clamp(-1.0, 0.0)


def _nan_deviation(values: Tensor, dim: int) -> Tensor:
    """Standard deviation of the numbers; NaN, so an advantage of 0, where there is only one."""
    centred = values - torch.nanmean(values, dim=dim, keepdim=True)
    count = (~torch.isnan(values)).sum(dim, keepdim=True)
    return torch.sqrt(torch.nansum(centred**2, dim, keepdim=True) / torch.where(count > 1, count - 1, torch.nan))
