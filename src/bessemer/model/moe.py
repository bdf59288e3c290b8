"""The router of a mixture of experts: which experts a token goes to, and an account of what was chosen.

Pure functions of scores, after Switch, Mixtral, Qwen3-MoE and DeepSeek-V2/V3; the experts are in moe.py.
Legend: N tokens, E experts, K experts of a token, G groups of M experts.

A mixture of experts: a router sends each token to a few feed-forward parts, whose weighted outputs are summed.

After a training forward each layer keeps its `Routing`: the losses that keep the experts in use, and the numbers that
the guard reads. Dropless by default; `capacity` bounds what an expert takes.
Legend: B batch, T time, W width, N tokens (B * T), E experts, K experts of a token, A assignments (N * K, of the tokens
in their order), S seats of assignments in the order of their experts, F inner size of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.dtensor import is_dtensor
from bessemer.errors import UserError
from bessemer.model.layers import ACTIVATIONS, FeedForward
from bessemer.spec.shape import Activation, Moe


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


Product = Callable[[Tensor, Tensor], Tensor]  # of rows in their seats and the experts' weights (E, out, in)


class Dispatch(Protocol):
    """Of processes that share a layer's experts: rows go to whoever has their expert, and come back."""

    def __call__(self, x_SW: Tensor, counts_E: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor: ...


@dataclass
class Seating:
    """Assignments brought together by expert."""

    assignment_S: Tensor  # A at an empty seat
    seat_A: Tensor  # S for an assignment without a seat
    holes: bool  # whether there may be any of these
    multiply: Product


class MixtureOfExperts(nn.Module):
    """In place of a feed-forward part. Its experts are stacked: `gate` and `up` (E, F, W), `down` (E, W, F)."""

    choice_bias: Tensor | None

    def __init__(self, width: int, moe: Moe, activation: Activation, gated: bool) -> None:
        super().__init__()
        check(moe)
        self.moe, self.activate = moe, ACTIVATIONS[activation]
        self.router = nn.Linear(width, moe.experts, bias=False)
        self.gate = _stack(moe.experts, moe.ffn, width) if gated else None
        self.up = _stack(moe.experts, moe.ffn, width)
        self.down = _stack(moe.experts, width, moe.ffn)
        self.shared = FeedForward(width, moe.shared * moe.ffn, activation, gated) if moe.shared else None
        # float32, and no parameter: it is moved by counting, not by a gradient.
        self.register_buffer("choice_bias", torch.zeros(moe.experts) if moe.choice_bias else None)
        self.dispatch: Dispatch | None = None  # where experts are divided among processes
        self.routing: Routing | None = None
        self.assigned: list[Tensor] = []  # (E,) of each micro-batch since the bias moved

    def forward(self, x_BTW: Tensor, counted_BT: Tensor | None = None) -> Tensor:
        """Tokens not counted (padding) are served like the others, but last, and teach the router nothing."""
        kind = x_BTW.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_BTW.dtype
        x_NW = x_BTW.flatten(0, -2)
        counted_N = x_NW.new_ones(len(x_NW), dtype=torch.bool) if counted_BT is None else counted_BT.flatten() > 0
        with torch.autocast(kind, enabled=False):  # which would round the router's logits and copy sums to float32
            logits_NE = F.linear(_exact(x_NW), _exact(self.router.weight))
            scores_NE = logits_NE.softmax(-1) if self.moe.score == "softmax" else logits_NE.sigmoid()
            choice_NK = choose(scores_NE, self.moe, self.choice_bias)
            weights_NK = scores_NE.gather(1, choice_NK)
            if self.moe.normalise:
                weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
            chosen_NE = torch.zeros_like(scores_NE, dtype=torch.bool).scatter_(1, choice_NK, True)
            counts_E = chosen_NE.sum(0)
            # Evaluation and generation drop nothing: there a token must not depend on its neighbours in the batch.
            if self.training and self.moe.capacity is not None:
                seated_NK = scores_NE.detach().gather(1, choice_NK).where(counted_N[:, None], -1.0)
                seating = self._capped(choice_NK.flatten(), counts_E, seated_NK.flatten())
            else:
                seating = self._dropless(choice_NK.flatten(), counts_E, x_NW.is_cuda and dtype == torch.bfloat16)
            if self.dispatch is not None:
                routed_NW = self._sent(x_NW.to(dtype), weights_NK * self.moe.scale, seating, counts_E, self.dispatch)
            else:
                routed_NW = self._experts(x_NW.to(dtype), weights_NK * self.moe.scale, seating)
            if self.training:
                dropped_NK = (seating.seat_A == len(seating.assignment_S)).view(choice_NK.shape)
                self.routing = account(self.moe, logits_NE, scores_NE, chosen_NE, dropped_NK, counted_N)
        y_BTW = routed_NW.view(x_BTW.shape)
        return y_BTW if self.shared is None else y_BTW + self.shared(x_BTW)

    def _dropless(self, choice_A: Tensor, counts_E: Tensor, fast: bool) -> Seating:
        """As many seats as assignments. The grouped product reads the counts on the device; one product for each expert
        waits for them on the host, once a layer."""
        assignment_S = choice_A.argsort(stable=True)
        return Seating(assignment_S, _inverse(assignment_S), False, self._product(counts_E, fast))

    def _product(self, counts_E: Tensor, fast: bool) -> Product:
        fast = fast and self.up.shape[1] % 8 == 0 and self.up.shape[2] % 8 == 0  # the kernel wants rows of 16 bytes
        return grouped_product(counts_E.cumsum(0).int()) if fast else looped_product(counts_E)

    def _capped(self, choice_A: Tensor, counts_E: Tensor, scores_A: Tensor) -> Seating:
        """The same number of seats for every expert: shapes are fixed, and no expert makes the others wait.

        The highest scores are seated first (as in DeepSeek-V2): by position the last rows of a batch would be dropped,
        whatever the router thinks of them. Tokens that do not count have the score -1 here.
        """
        E, A = self.moe.experts, len(choice_A)
        seats = min(A // self.moe.top_k, math.ceil((self.moe.capacity or 0.0) * A / E))
        order_A = scores_A.argsort(descending=True, stable=True)
        order_A = order_A[choice_A[order_A].argsort(stable=True)]  # by expert, and by score within one
        rank_A = _inverse(order_A) - (counts_E.cumsum(0) - counts_E)[choice_A]
        seat_A = torch.where(rank_A < seats, choice_A * seats + rank_A, E * seats)
        assignment_S = seat_A.new_full((E * seats + 1,), A)  # the last one is no seat
        assignment_S.scatter_(0, seat_A, torch.arange(A, device=seat_A.device))
        return Seating(assignment_S[:-1], seat_A, True, batched_product)

    def _experts(self, x_NW: Tensor, weights_NK: Tensor, seating: Seating) -> Tensor:
        """The weighted sum of what the chosen experts make of each token."""
        at, multiply, dtype, K = seating, seating.multiply, x_NW.dtype, weights_NK.shape[1]
        x_SW = _Move.apply(x_NW, at.assignment_S, at.seat_A, K, at.holes)
        inner_SF = multiply(x_SW, self.up.to(dtype))
        if self.gate is None:
            inner_SF = self.activate(inner_SF)
        else:
            inner_SF = self.activate(multiply(x_SW, self.gate.to(dtype))) * inner_SF
        # Weighted before `down`, which is linear: what is kept for the backward pass is F wide, mostly less than W.
        weights_S1 = F.pad(weights_NK.flatten(), (0, 1))[at.assignment_S, None]
        y_SW = multiply((inner_SF * weights_S1).to(dtype), self.down.to(dtype))
        y_AW = _Move.apply(y_SW, at.seat_A, at.assignment_S, 1, at.holes)
        return y_AW.unflatten(0, (-1, K)).sum(1)

    def _sent(self, x_NW: Tensor, weights_NK: Tensor, seating: Seating, counts_E: Tensor, dispatch: Dispatch) -> Tensor:
        """The same where experts are divided among processes: weights stay here, and meet what comes back."""
        at, dtype, K = seating, x_NW.dtype, weights_NK.shape[1]

        def run(x_SW: Tensor, counts_e: Tensor) -> Tensor:
            multiply = self._product(counts_e, x_SW.is_cuda and dtype == torch.bfloat16)
            inner_SF = multiply(x_SW, _held(self.up).to(dtype))
            if self.gate is None:
                inner_SF = self.activate(inner_SF)
            else:
                inner_SF = self.activate(multiply(x_SW, _held(self.gate).to(dtype))) * inner_SF
            return multiply(inner_SF.to(dtype), _held(self.down).to(dtype))

        x_SW = _Move.apply(x_NW, at.assignment_S, at.seat_A, K, at.holes)
        y_SW = dispatch(x_SW, counts_E, run)
        y_SW = (y_SW * weights_NK.flatten()[at.assignment_S, None]).to(dtype)
        y_AW = _Move.apply(y_SW, at.seat_A, at.assignment_S, 1, at.holes)
        return y_AW.unflatten(0, (-1, K)).sum(1)


def looped_product(counts_E: Tensor) -> Product:
    """One product after the other; the reference for the grouped one. The counts are read once, when first needed."""
    counts: list[int] = []

    def multiply(x_SI: Tensor, weight_EOI: Tensor) -> Tensor:
        counts[:] = counts or counts_E.tolist()
        return torch.cat(list(map(F.linear, x_SI.split(counts), weight_EOI.unbind(0))))

    return multiply


def grouped_product(ends_E: Tensor) -> Product:
    """One kernel for all experts; `ends_E` (int32) says where each one's rows end."""
    return lambda x_SI, weight_EOI: F.grouped_mm(x_SI, weight_EOI.transpose(1, 2), offs=ends_E)


def batched_product(x_SI: Tensor, weight_EOI: Tensor) -> Tensor:
    """For experts with the same number of rows."""
    return torch.bmm(x_SI.unflatten(0, (len(weight_EOI), -1)), weight_EOI.transpose(1, 2)).flatten(0, 1)


class _Move(torch.autograd.Function):
    """Row t of the result is row `from_T[t] // copies` of x, or zeros beyond its end; `to_A` is the way back.

    Both directions only read: torch's own backward adds atomically, and a replay on a GPU would differ in its digits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, from_T: Tensor, to_A: Tensor, copies: int, holes: bool) -> Tensor:
        ctx.save_for_backward(to_A)
        ctx.copies, ctx.holes = copies, holes
        return (F.pad(x, (0, 0, 0, 1)) if holes else x).index_select(0, from_T // copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad = (F.pad(grad, (0, 0, 0, 1)) if ctx.holes else grad).index_select(0, *ctx.saved_tensors)
        return grad.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None, None


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _exact(x: Tensor) -> Tensor:
    """Routers work in float32: in bf16 two experts tie far too often. float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def _stack(experts: int, out: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(experts, out, width).uniform_(-(width**-0.5), width**-0.5))  # as nn.Linear


def _held(parameter: Tensor) -> Tensor:
    """This process's experts."""
    held: Tensor = parameter.to_local() if is_dtensor(parameter) else parameter
    return held


def _routings(model: nn.Module) -> dict[str, tuple[MixtureOfExperts, Routing]]:
    """What the layers recorded, by the name of their block; cleared."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, MixtureOfExperts) and layer.routing is not None:
            found[name.rpartition(".")[0]] = (layer, layer.routing)
            layer.routing = None
    return found


def routing_terms(model: nn.Module) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The loss to add to a micro-batch's (a mean over its tokens, summed over layers) and numbers for the guard, still
    on the device. Call it once after each training forward, before the backward pass, which may run layers again."""
    found = list(_routings(model).values())
    if not found:
        return None, {}
    for layer, routing in found:
        if layer.choice_bias is not None:
            layer.assigned.append(routing.assigned_E)
    load_LE = torch.stack([routing.load_E for _, routing in found])
    numbers = {
        "router_max_load": load_LE.amax() * load_LE.shape[1],  # of the mean load: how long the others wait
        "router_min_share": load_LE.amin(),
        "router_entropy": torch.stack([routing.entropy for _, routing in found]).mean(),
        "router_dropped": torch.stack([routing.dropped for _, routing in found]).mean(),
        "router_dead": (load_LE == 0).sum(),  # experts of all layers that got nothing
    }
    return torch.stack([routing.balance + routing.z for _, routing in found]).sum(), numbers


def router_shares(model: nn.Module) -> dict[str, Tensor]:
    """Each block's shares of its experts (E,) after a look at the model, which thus trains nothing."""
    return {name: routing.load_E for name, (_, routing) in _routings(model).items()}


@torch.no_grad()
def update_choice_bias(
    model: nn.Module, rate: float, reject: Tensor | None = None, reduce: Callable[[Tensor], object] | None = None
) -> None:
    """After a step: each bias moves by `rate` towards an even load (DeepSeek-V3), unless `reject` (0 or 1, on the
    device) vetoed it. `reduce` sums the counts in place over data-parallel ranks, whose biases must stay equal."""
    layers = [layer for layer in model.modules() if isinstance(layer, MixtureOfExperts) and layer.assigned]
    if not layers:
        return
    assigned_LE = torch.stack([torch.stack(layer.assigned).sum(0) for layer in layers])
    if reduce is not None:
        reduce(assigned_LE)
    moves_LE = rate * (assigned_LE.mean(-1, keepdim=True) - assigned_LE).sign()
    if reject is not None:
        moves_LE = moves_LE * (1 - reject)
    for layer, move_E in zip(layers, moves_LE.unbind(0), strict=True):
        assert layer.choice_bias is not None
        layer.choice_bias += move_E
        layer.assigned = []
