"""Mixture of experts: the router (after Switch, Mixtral, Qwen3-MoE and DeepSeek-V2/V3) sends each token to a few
feed-forward experts and sums their weighted outputs.

After a training forward each layer holds its `Routing`: the auxiliary losses, and the statistics that the guard reads.
Dropless by default; `capacity` bounds the tokens per expert. Legend: B batch, T time, W width, N tokens (B * T), E
experts, K experts per token, G groups of M experts, A assignments (N * K, in token order), S slots (assignments sorted
by expert), F inner size of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.dtensor import local
from bessemer.errors import UserError
from bessemer.model.layers import ACTIVATIONS, FeedForward
from bessemer.spec.shape import Activation, Moe


@dataclass
class Routing:
    """What one layer's router did with one micro-batch, without masked tokens. All tensors stay on the device."""

    balance: Tensor  # weighted and differentiable, like z
    z: Tensor
    assigned_E: Tensor  # assignments per expert, before dropping
    load_E: Tensor  # the same as shares; uniform if all tokens are masked
    entropy: Tensor  # mean over tokens, relative to the maximum
    dropped: Tensor  # share of assignments over capacity


def check_router(moe: Moe) -> None:
    """Raises UserError for settings that no router supports."""
    size = max(1, moe.experts // moe.groups)
    min_groups = math.ceil(moe.top_k / size)
    problems = {
        f"top_k {moe.top_k}: choose from 1 to the {moe.experts} experts": not 0 < moe.top_k <= moe.experts,
        f"groups {moe.groups}: choose a divisor of the {moe.experts} experts": moe.experts % moe.groups,
        f"top_groups {moe.top_groups}: choose from {min_groups} to {moe.groups}": moe.top_groups
        not in range(min_groups, moe.groups + 1),
        f"group_score top2: use at most {moe.experts // 2} groups": moe.group_score == "top2"
        and size < 2 <= moe.groups,
        f"capacity {moe.capacity}: choose more than 0, or null": moe.capacity is not None and moe.capacity <= 0,
    }
    for problem, occurs in problems.items():
        if occurs:
            raise UserError(f"model: moe.{problem}")


def choose_experts(scores_NE: Tensor, moe: Moe, bias_E: Tensor | None) -> Tensor:
    """(N, K): the experts of each token, from its best groups if there are groups."""
    scores_NE = scores_NE.detach()
    if bias_E is not None:
        scores_NE = scores_NE + bias_E
    if moe.groups > 1:
        scores_NGM = scores_NE.unflatten(-1, (moe.groups, -1))
        best_NG = scores_NGM.amax(-1) if moe.group_score == "max" else scores_NGM.topk(2, dim=-1).values.sum(-1)
        best_groups = best_NG.topk(moe.top_groups).indices
        excluded_NG = torch.ones_like(best_NG, dtype=torch.bool).scatter_(-1, best_groups, False)
        scores_NE = scores_NGM.masked_fill(excluded_NG[..., None], float("-inf")).flatten(-2)
    return scores_NE.topk(moe.top_k, dim=-1).indices


def measure_routing(
    moe: Moe, logits_NE: Tensor, scores_NE: Tensor, chosen_NE: Tensor, dropped_NK: Tensor, mask_N: Tensor
) -> Routing:
    """Means over the unmasked tokens.

    The balance loss is E * sum(f_e * p_e), with f an expert's share of the assignments and p its mean probability: 1 if
    both are uniform, for any K (as in Switch and DeepSeek; transformers' Mixtral does not divide f by K and gives K
    times this).
    """
    weight_N = mask_N.to(logits_NE.dtype)
    total = weight_N.sum().clamp(min=1)

    def mean(x_N: Tensor) -> Tensor:
        return (x_N * weight_N).sum(-1) / total

    probs_NE = scores_NE if moe.score == "softmax" else scores_NE / (scores_NE.sum(-1, keepdim=True) + 1e-20)
    assigned_E = (chosen_NE * weight_N[:, None]).sum(0)
    load_E = torch.where(mask_N.any(), assigned_E / (total * moe.top_k), 1 / moe.experts)
    balance = moe.balance * moe.experts * (load_E * mean(probs_NE.T)).sum()
    z = moe.router_z * mean(logits_NE.logsumexp(-1).square())
    entropy = mean(torch.special.entr(probs_NE.detach()).sum(-1)) / math.log(max(moe.experts, 2))
    return Routing(balance, z, assigned_E, load_E, entropy, mean(dropped_NK.sum(-1) / moe.top_k))


Product = Callable[[Tensor, Tensor], Tensor]  # rows sorted by expert x expert weights (E, out, in)


class Dispatch(Protocol):
    """Expert parallelism: sends rows to the rank that holds their expert and returns the results."""

    def __call__(self, x_SW: Tensor, counts_E: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor: ...


@dataclass
class Permutation:
    """Assignments sorted by expert into slots."""

    assignment_S: Tensor  # A for an empty slot
    slot_A: Tensor  # S for a dropped assignment
    has_gaps: bool  # whether there may be empty slots or dropped assignments
    multiply: Product


class MixtureOfExperts(nn.Module):
    """Replaces a feed-forward part. The experts are stacked: `gate` and `up` (E, F, W), `down` (E, W, F)."""

    choice_bias: Tensor | None

    def __init__(self, width: int, moe: Moe, activation: Activation, gated: bool) -> None:
        super().__init__()
        check_router(moe)
        self.moe, self.activate = moe, ACTIVATIONS[activation]
        self.router = nn.Linear(width, moe.experts, bias=False)
        self.gate = _stack(moe.experts, moe.ffn, width) if gated else None
        self.up = _stack(moe.experts, moe.ffn, width)
        self.down = _stack(moe.experts, width, moe.ffn)
        self.shared = FeedForward(width, moe.shared * moe.ffn, activation, gated) if moe.shared else None
        # float32 and no parameter: it is updated from counts, not by a gradient.
        self.register_buffer("choice_bias", torch.zeros(moe.experts) if moe.choice_bias else None)
        self.dispatch: Dispatch | None = None  # set by expert parallelism
        self.routing: Routing | None = None
        self.assigned: list[Tensor] = []  # (E,) of each micro-batch since the last bias update

    def forward(self, x_BTW: Tensor, router_mask_BT: Tensor | None = None) -> Tensor:
        """Masked tokens (padding) are processed like others, but last, and do not train the router."""
        kind = x_BTW.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_BTW.dtype
        x_NW = x_BTW.flatten(0, -2)
        mask_N = x_NW.new_ones(len(x_NW), dtype=torch.bool) if router_mask_BT is None else router_mask_BT.flatten() > 0
        with torch.autocast(kind, enabled=False):  # it would round the router's logits and copy sums to float32
            logits_NE = F.linear(_at_least_fp32(x_NW), _at_least_fp32(self.router.weight))
            scores_NE = logits_NE.softmax(-1) if self.moe.score == "softmax" else logits_NE.sigmoid()
            choice_NK = choose_experts(scores_NE, self.moe, self.choice_bias)
            weights_NK = scores_NE.gather(1, choice_NK)
            if self.moe.normalise:
                weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
            chosen_NE = torch.zeros_like(scores_NE, dtype=torch.bool).scatter_(1, choice_NK, True)
            counts_E = chosen_NE.sum(0)
            # Evaluation and generation drop nothing: a token must not depend on its neighbours in the batch.
            if self.training and self.moe.capacity is not None:
                priority_NK = scores_NE.detach().gather(1, choice_NK).where(mask_N[:, None], -1.0)
                permutation = self._capped(choice_NK.flatten(), counts_E, priority_NK.flatten())
            else:
                permutation = self._dropless(choice_NK.flatten(), counts_E, x_NW.is_cuda and dtype == torch.bfloat16)
            inputs = x_NW.to(dtype), weights_NK * self.moe.scale, permutation
            if self.dispatch is not None:
                routed_NW = self._dispatched_experts(*inputs, counts_E, self.dispatch)
            else:
                routed_NW = self._local_experts(*inputs)
            if self.training:
                dropped_NK = (permutation.slot_A == len(permutation.assignment_S)).view(choice_NK.shape)
                self.routing = measure_routing(self.moe, logits_NE, scores_NE, chosen_NE, dropped_NK, mask_N)
        y_BTW = routed_NW.view(x_BTW.shape)
        return y_BTW if self.shared is None else y_BTW + self.shared(x_BTW)

    def _dropless(self, choice_A: Tensor, counts_E: Tensor, fast: bool) -> Permutation:
        """As many slots as assignments. The grouped product reads the counts on the device; the looped product waits
        for them on the host, once per layer."""
        assignment_S = choice_A.argsort(stable=True)
        return Permutation(assignment_S, invert_permutation(assignment_S), False, self._product(counts_E, fast))

    def _product(self, counts_E: Tensor, fast: bool) -> Product:
        fast = fast and self.up.shape[1] % 8 == 0 and self.up.shape[2] % 8 == 0  # the kernel needs rows of 16 bytes
        return grouped_product(counts_E.cumsum(0).int()) if fast else looped_product(counts_E)

    def _capped(self, choice_A: Tensor, counts_E: Tensor, scores_A: Tensor) -> Permutation:
        """The same number of slots for every expert: shapes are fixed, and no expert delays the others.

        The highest scores get slots first (as in DeepSeek-V2): by position, the last rows of a batch would be dropped
        regardless of the router. Masked tokens have score -1.
        """
        E, A = self.moe.experts, len(choice_A)
        slots = min(A // self.moe.top_k, math.ceil((self.moe.capacity or 0.0) * A / E))
        order_A = scores_A.argsort(descending=True, stable=True)
        order_A = order_A[choice_A[order_A].argsort(stable=True)]  # by expert, and by score within one
        rank_A = invert_permutation(order_A) - (counts_E.cumsum(0) - counts_E)[choice_A]
        slot_A = torch.where(rank_A < slots, choice_A * slots + rank_A, E * slots)
        assignment_S = slot_A.new_full((E * slots + 1,), A)  # the last entry is no slot
        assignment_S.scatter_(0, slot_A, torch.arange(A, device=slot_A.device))
        return Permutation(assignment_S[:-1], slot_A, True, batched_product)

    def _local_experts(self, x_NW: Tensor, weights_NK: Tensor, permutation: Permutation) -> Tensor:
        """The weighted sum of each token's expert outputs."""
        at, multiply, dtype, K = permutation, permutation.multiply, x_NW.dtype, weights_NK.shape[1]
        x_SW = _Gather.apply(x_NW, at.assignment_S, at.slot_A, K, at.has_gaps)
        inner_SF = self._inner(x_SW, multiply)
        # Weighted before `down`, which is linear: autograd then saves F-wide rows, mostly narrower than W.
        weights_S1 = F.pad(weights_NK.flatten(), (0, 1))[at.assignment_S, None]
        y_SW = multiply((inner_SF * weights_S1).to(dtype), self.down.to(dtype))
        y_AW = _Gather.apply(y_SW, at.slot_A, at.assignment_S, 1, at.has_gaps)
        return y_AW.unflatten(0, (-1, K)).sum(1)

    def _inner(self, x_SW: Tensor, multiply: Product) -> Tensor:
        """(S, F): the activated inner units of each row's expert."""
        inner_SF = multiply(x_SW, local(self.up).to(x_SW.dtype))
        if self.gate is None:
            return self.activate(inner_SF)
        return self.activate(multiply(x_SW, local(self.gate).to(x_SW.dtype))) * inner_SF

    def _dispatched_experts(
        self, x_NW: Tensor, weights_NK: Tensor, permutation: Permutation, counts_E: Tensor, dispatch: Dispatch
    ) -> Tensor:
        """The same under expert parallelism: router weights stay on this rank and multiply the returned rows."""
        at, dtype, K = permutation, x_NW.dtype, weights_NK.shape[1]

        def run(x_SW: Tensor, counts_e: Tensor) -> Tensor:
            multiply = self._product(counts_e, x_SW.is_cuda and dtype == torch.bfloat16)
            return multiply(self._inner(x_SW, multiply).to(dtype), local(self.down).to(dtype))

        x_SW = _Gather.apply(x_NW, at.assignment_S, at.slot_A, K, at.has_gaps)
        y_SW = dispatch(x_SW, counts_E, run)
        y_SW = (y_SW * weights_NK.flatten()[at.assignment_S, None]).to(dtype)
        y_AW = _Gather.apply(y_SW, at.slot_A, at.assignment_S, 1, at.has_gaps)
        return y_AW.unflatten(0, (-1, K)).sum(1)


def looped_product(counts_E: Tensor) -> Product:
    """One product per expert; the reference for the grouped one. The counts are read once, when first needed."""
    counts: list[int] = []

    def multiply(x_SI: Tensor, weight_EOI: Tensor) -> Tensor:
        counts[:] = counts or counts_E.tolist()
        return torch.cat(list(map(F.linear, x_SI.split(counts), weight_EOI.unbind(0))))

    return multiply


def grouped_product(ends_E: Tensor) -> Product:
    """One kernel for all experts; `ends_E` (int32) is where each expert's rows end."""
    return lambda x_SI, weight_EOI: F.grouped_mm(x_SI, weight_EOI.transpose(1, 2), offs=ends_E)


def batched_product(x_SI: Tensor, weight_EOI: Tensor) -> Tensor:
    """For experts with equally many rows."""
    return torch.bmm(x_SI.unflatten(0, (len(weight_EOI), -1)), weight_EOI.transpose(1, 2)).flatten(0, 1)


class _Gather(torch.autograd.Function):
    """Row t of the result is row `from_T[t] // copies` of x, or zeros beyond its end; `to_A` is the inverse.

    Both directions only gather: torch's own backward adds atomically, so that a replay on a GPU would not be bit-equal.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, from_T: Tensor, to_A: Tensor, copies: int, has_gaps: bool) -> Tensor:
        ctx.save_for_backward(to_A)
        ctx.copies, ctx.has_gaps = copies, has_gaps
        return (F.pad(x, (0, 0, 0, 1)) if has_gaps else x).index_select(0, from_T // copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad = (F.pad(grad, (0, 0, 0, 1)) if ctx.has_gaps else grad).index_select(0, *ctx.saved_tensors)
        return grad.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None, None


def invert_permutation(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _at_least_fp32(x: Tensor) -> Tensor:
    """Routers compute in float32: in bf16 experts tie far too often. float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _stack(experts: int, out: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(experts, out, width).uniform_(-(width**-0.5), width**-0.5))  # like nn.Linear


def _take_routings(model: nn.Module) -> dict[str, tuple[MixtureOfExperts, Routing]]:
    """The recorded routing of each layer by the name of its block; clears it."""
    routings = {}
    for name, layer in model.named_modules():
        if isinstance(layer, MixtureOfExperts) and layer.routing is not None:
            routings[name.rpartition(".")[0]] = (layer, layer.routing)
            layer.routing = None
    return routings


def routing_terms(model: nn.Module) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The auxiliary loss of a micro-batch (a mean over its tokens, summed over layers) and statistics for the guard, on
    the device. Call it once after each training forward, before the backward pass, which may recompute layers."""
    pairs = list(_take_routings(model).values())
    if not pairs:
        return None, {}
    for layer, routing in pairs:
        if layer.choice_bias is not None:
            layer.assigned.append(routing.assigned_E)
    load_LE = torch.stack([routing.load_E for _, routing in pairs])
    numbers = {
        "router_max_load": load_LE.amax() * load_LE.shape[1],  # of the mean load: how long the other experts wait
        "router_min_share": load_LE.amin(),
        "router_entropy": torch.stack([routing.entropy for _, routing in pairs]).mean(),
        "router_dropped": torch.stack([routing.dropped for _, routing in pairs]).mean(),
        "router_dead": (load_LE == 0).sum(),  # experts of all layers without a token
    }
    return torch.stack([routing.balance + routing.z for _, routing in pairs]).sum(), numbers


def router_shares(model: nn.Module) -> dict[str, Tensor]:
    """Each block's load per expert (E,). Clears the records, so the forward pass contributes nothing to training."""
    return {name: routing.load_E for name, (_, routing) in _take_routings(model).items()}


@torch.no_grad()
def update_choice_bias(
    model: nn.Module, rate: float, reject: Tensor | None = None, reduce: Callable[[Tensor], object] | None = None
) -> None:
    """After a step, move each bias by `rate` towards an even load (DeepSeek-V3), unless `reject` (0 or 1, on the
    device) is 1. `reduce` sums the counts in place over data-parallel ranks, whose biases must stay equal."""
    layers = [layer for layer in model.modules() if isinstance(layer, MixtureOfExperts) and layer.assigned]
    if not layers:
        return
    assigned_LE = torch.stack([torch.stack(layer.assigned).sum(0) for layer in layers])
    if reduce is not None:
        reduce(assigned_LE)
    updates_LE = rate * (assigned_LE.mean(-1, keepdim=True) - assigned_LE).sign()
    if reject is not None:
        updates_LE = updates_LE * (1 - reject)
    for layer, update_E in zip(layers, updates_LE.unbind(0), strict=True):
        assert layer.choice_bias is not None
        layer.choice_bias += update_E
        layer.assigned = []
