"""The router of a mixture of experts: which experts a token goes to, and an account of what was chosen.

Pure functions of scores, after Switch, Mixtral, Qwen3-MoE and DeepSeek-V2/V3; the experts are in moe.py.
Legend: N tokens, E experts, K experts of a token, G groups of M experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bessemer.errors import UserError
from bessemer.spec.shape import Moe


@dataclass
class Routing:
    """What one layer's router did with one micro-batch; tokens that do not count are left out. All on the device."""

    balance: Tensor  # weighted and differentiable, as z is
    z: Tensor
    assigned_E: Tensor  # assignments of each expert, before any is dropped
    load_E: Tensor  # the same as shares, even ones if nothing counts
    entropy: Tensor  # mean over tokens, of the largest possible
    dropped: Tensor  # share of assignments beyond the capacity


def check(moe: Moe) -> None:
    """Refuse what no router can do, with the setting to change."""
    size = max(1, moe.experts // moe.groups)
    least = math.ceil(moe.top_k / size)
    problems = {
        f"top_k {moe.top_k}: choose from 1 to the {moe.experts} experts": not 0 < moe.top_k <= moe.experts,
        f"groups {moe.groups}: choose a divisor of the {moe.experts} experts": moe.experts % moe.groups,
        f"top_groups {moe.top_groups}: choose from {least} to {moe.groups}": not least <= moe.top_groups <= moe.groups,
        f"group_score top2: use at most {moe.experts // 2} groups": moe.group_score == "top2"
        and size < 2 <= moe.groups,
        f"capacity {moe.capacity}: choose more than 0, or null": moe.capacity is not None and moe.capacity <= 0,
    }
    for line, wrong in problems.items():
        if wrong:
            raise UserError(f"model: moe.{line}")


def choose(scores_NE: Tensor, moe: Moe, bias_E: Tensor | None) -> Tensor:
    """(N, K): the experts of each token, from its best groups where there are groups."""
    scores_NE = scores_NE.detach()
    if bias_E is not None:
        scores_NE = scores_NE + bias_E
    if moe.groups > 1:
        scores_NGM = scores_NE.unflatten(-1, (moe.groups, -1))
        best_NG = scores_NGM.amax(-1) if moe.group_score == "max" else scores_NGM.topk(2, dim=-1).values.sum(-1)
        out_NG = torch.ones_like(best_NG, dtype=torch.bool).scatter_(-1, best_NG.topk(moe.top_groups).indices, False)
        scores_NE = scores_NGM.masked_fill(out_NG[..., None], float("-inf")).flatten(-2)
    return scores_NE.topk(moe.top_k, dim=-1).indices


def account(
    moe: Moe, logits_NE: Tensor, scores_NE: Tensor, chosen_NE: Tensor, dropped_NK: Tensor, counted_N: Tensor
) -> Routing:
    """Means over the tokens that count.

    Balance is E * sum(f_e * p_e), f an expert's share of the assignments and p its mean probability: 1 where both are
    even, whatever K (Switch, DeepSeek; transformers' Mixtral does not divide f by K and gives K times this).
    """
    count_N = counted_N.to(logits_NE.dtype)
    total = count_N.sum().clamp(min=1)

    def mean(x_N: Tensor) -> Tensor:
        return (x_N * count_N).sum(-1) / total

    shares_NE = scores_NE if moe.score == "softmax" else scores_NE / (scores_NE.sum(-1, keepdim=True) + 1e-20)
    assigned_E = (chosen_NE * count_N[:, None]).sum(0)
    load_E = torch.where(counted_N.any(), assigned_E / (total * moe.top_k), 1 / moe.experts)
    balance = moe.balance * moe.experts * (load_E * mean(shares_NE.T)).sum()
    z = moe.router_z * mean(logits_NE.logsumexp(-1).square())
    entropy = mean(torch.special.entr(shares_NE.detach()).sum(-1)) / math.log(max(moe.experts, 2))
    return Routing(balance, z, assigned_E, load_E, entropy, mean(dropped_NK.sum(-1) / moe.top_k))
