"""The Mamba-2 mixer: a linear recurrence with input-dependent decay, input and output, in place of attention.

Each head has a state, P by N: state = exp(step rate) state + step x b', and outputs y = state c + skip x. `scan`
computes this in chunks of matrix products (state-space duality), in plain torch, so it runs on every device. Legend: B
rows, T time, C chunks, L positions of a chunk (S as sources), W width, H heads, G groups of R heads that share b and c,
P head size, N state size, K convolution taps, X convolved channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.errors import UserError
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.layers import RMSNorm
from bessemer.spec.shape import Mamba


@dataclass
class MambaCache:
    """The generation state of one layer; its size does not depend on the text's length."""

    history_BKX: Tensor | None = None  # the last K - 1 inputs of the convolution
    state_BGRPN: Tensor | None = None
    length: int = 0


class Mamba2(nn.Module):
    """Parameters and results match Hugging Face's Mamba2Mixer (names: `families/bert_t5_mamba.py`)."""

    def __init__(self, width: int, mamba: Mamba, norm_eps: float) -> None:
        super().__init__()
        if mamba.heads % mamba.groups:
            raise UserError(
                f"mamba: {mamba.heads} heads cannot share {mamba.groups} groups: write groups that divide heads"
            )
        self.mamba = mamba
        inner, shared = mamba.heads * mamba.head_dim, mamba.groups * mamba.state
        self.split = (inner, inner + 2 * shared, mamba.heads)  # gate, convolved channels (x, b, c), step
        self.conv_split = (inner, shared, shared)
        channels = self.split[1]
        self.input = nn.Linear(width, sum(self.split), bias=mamba.bias)
        self.conv = nn.Conv1d(channels, channels, mamba.conv, groups=channels, bias=mamba.conv_bias)
        self.step_bias = nn.Parameter(torch.zeros(mamba.heads))
        self.decay_log = nn.Parameter(torch.zeros(mamba.heads))
        self.skip = nn.Parameter(torch.ones(mamba.heads))
        self.norm = RMSNorm(inner, norm_eps)
        self.out = nn.Linear(inner, width, bias=mamba.bias)

    def new_cache(self) -> MambaCache:
        return MambaCache()

    def forward(
        self, x_BTW: Tensor, attention_mask: AttentionMask | None = None, cache: MambaCache | None = None
    ) -> Tensor:
        """Always causal. Neither the convolution nor the state crosses a document border."""
        projected, kind = self.input(x_BTW), x_BTW.device.type
        with torch.autocast("cpu" if kind == "meta" else kind, enabled=False):  # autocast knows no meta device
            mixed = self._mix(projected, _document_breaks(x_BTW, attention_mask), cache)
        return self.out(mixed.to(projected.dtype))

    def _mix(self, projected: Tensor, breaks_BT: Tensor, cache: MambaCache | None) -> Tensor:
        """Everything between the projections, in float32: small errors of the steps would accumulate along the row."""
        m, (B, T) = self.mamba, breaks_BT.shape
        exact = torch.promote_types(projected.dtype, torch.float32)
        gate, convolved, step_BTH = (part.to(exact) for part in projected.split(self.split, dim=-1))
        convolved = F.silu(self._convolve(convolved, breaks_BT, cache))
        x, b, c = convolved.split(self.conv_split, dim=-1)
        x_BTHP = x.view(B, T, m.heads, m.head_dim)
        step_BTH = F.softplus(step_BTH + self.step_bias.to(exact)).clamp(*m.dt_limit)
        rate_H = -self.decay_log.to(exact).exp()
        y_BTHP, state = scan(
            x_BTHP, step_BTH, rate_H, b.view(B, T, m.groups, m.state), c.view(B, T, m.groups, m.state), breaks_BT,
            cache.state_BGRPN if cache else None, m.chunk,
        )  # fmt: skip
        if cache is not None:
            cache.state_BGRPN, cache.length = state, cache.length + T
        y_BTHP = y_BTHP + self.skip.to(exact)[:, None] * x_BTHP
        # The gate comes before the norm, and the norm is over all heads.
        gated = y_BTHP.reshape(B, T, -1) * F.silu(gate)
        return F.rms_norm(gated, self.norm.size, self.norm.weight.to(exact), self.norm.eps)

    def _convolve(self, x_BTX: Tensor, breaks_BT: Tensor, cache: MambaCache | None) -> Tensor:
        """Convolves each channel over its last K positions, tap by tap, since a fused convolution would cross
        documents."""
        T, K = x_BTX.shape[1], self.mamba.conv
        history = cache.history_BKX if cache else None
        x_BTX = F.pad(x_BTX, (0, 0, K - 1, 0)) if history is None else torch.cat((history, x_BTX), dim=1)
        if cache is not None:
            cache.history_BKX = x_BTX[:, T:].clone()
        weight_XK = self.conv.weight.to(x_BTX.dtype)[:, 0]
        document_BT = F.pad(breaks_BT.cumsum(dim=1), (K - 1, 0))
        out = x_BTX[:, K - 1 :] * weight_XK[:, K - 1]
        for k in range(K - 1):
            same_document_BT1 = (document_BT[:, k : k + T] == document_BT[:, K - 1 :])[..., None]
            # Masked after the product: autograd then saves x itself and not a copy per tap.
            out = out + torch.where(same_document_BT1, x_BTX[:, k : k + T] * weight_XK[:, k], 0)
        return out if self.conv.bias is None else out + self.conv.bias.to(out.dtype)


def _document_breaks(x_BTW: Tensor, attention_mask: AttentionMask | None) -> Tensor:
    """(B, T), 1 where a document starts in the middle of the row."""
    breaks_BT = torch.zeros(x_BTW.shape[:2], dtype=torch.int32, device=x_BTW.device)
    if attention_mask is not None and attention_mask.documents_BT is not None:
        breaks_BT[:, 1:] = attention_mask.documents_BT[:, 1:] != attention_mask.documents_BT[:, :-1]
    return breaks_BT


def scan(
    x_BTHP: Tensor, step_BTH: Tensor, rate_H: Tensor, b_BTGN: Tensor, c_BTGN: Tensor, breaks_BT: Tensor,
    state_BGRPN: Tensor | None, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The outputs (without the skip) and the last state. The chunk size affects only the cost: per head the memory is
    O(T (chunk + P N / chunk)).

    Log decays are summed within a chunk and only their differences, never positive, go through exp: nothing overflows,
    and masked entries are -inf before exp, where the gradient is exactly zero.
    """
    (B, T, H, P), (G, N) = x_BTHP.shape, b_BTGN.shape[2:]
    R, L = H // G, min(chunk, T)
    C = -(-T // L)

    def chunked(part: Tensor, *sizes: int) -> Tensor:  # padding has step 0, which leaves the state unchanged
        padding = (0, 0) * (part.ndim - 2) + (0, C * L - T)
        return F.pad(part, padding).view(B, C, L, *sizes)

    inputs = chunked(x_BTHP * step_BTH[..., None], G, R, P)
    b, c = chunked(b_BTGN, G, N), chunked(c_BTGN, G, N)
    decay = chunked(step_BTH * rate_H, G, R).cumsum(dim=2)  # log of how much of the initial state remains
    breaks_BCL = chunked(breaks_BT).cumsum(dim=2)

    # Within a chunk: attention without softmax, whose weights are the products c.b times the decay in between.
    visible_BCLS = (breaks_BCL[:, :, :, None] == breaks_BCL[:, :, None, :]).tril()
    between_BCGRLS = decay.permute(0, 1, 3, 4, 2)[..., None] - decay.permute(0, 1, 3, 4, 2)[..., None, :]
    decay_BCGRLS = between_BCGRLS.masked_fill(~visible_BCLS[:, :, None, None], -torch.inf).exp()
    weights = torch.einsum("bclgn,bcsgn->bcgls", c, b)[:, :, :, None] * decay_BCGRLS
    y = torch.einsum("bcgrls,bcsgrp->bclgrp", weights, inputs)

    # Each chunk's contribution to the state, the states along the chunks, and each position's read of its chunk's
    # initial state.
    left_BCLGR = _exp_where(decay[:, :, -1:] - decay, breaks_BCL == breaks_BCL[:, :, -1:])
    left = torch.einsum("bclgn,bclgrp->bcgrpn", b, inputs * left_BCLGR[..., None])
    reached_BCLGR = _exp_where(decay, breaks_BCL == 0)
    state = left.new_zeros(B, G, R, P, N) if state_BGRPN is None else state_BGRPN
    initial_states = []
    for i in range(C):  # sequential: T / chunk small steps; a matrix over chunks would be quadratic in T
        initial_states.append(state)
        state = state * reached_BCLGR[:, i, -1, :, :, None, None] + left[:, i]
    y = y + torch.einsum("bclgn,bcgrpn->bclgrp", c, torch.stack(initial_states, dim=1)) * reached_BCLGR[..., None]
    return y.reshape(B, C * L, H, P)[:, :T], state


def _exp_where(log_BCLGR: Tensor, visible_BCL: Tensor) -> Tensor:
    return log_BCLGR.masked_fill(~visible_BCL[..., None, None], -torch.inf).exp()


def init_mamba(module: Mamba2, generator: torch.Generator) -> None:
    """The mixer's own parameters, as in the paper: rates -1, -2, -3, ..., steps log-uniform from 0.001 to 0.1, skips 1,
    and torch's default convolution. The two projections are left to the model's initialisation."""
    rates = torch.arange(1, module.mamba.heads + 1, dtype=torch.float32)
    taps = 1 / math.sqrt(module.mamba.conv)
    with torch.no_grad():
        module.decay_log.copy_(rates.log())
        step_H = torch.empty_like(module.step_bias, dtype=torch.float32)
        step_H.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
        module.step_bias.copy_(step_H + torch.log(-torch.expm1(-step_H)))  # softplus of this is the step
        module.skip.fill_(1.0)
        module.norm.weight.fill_(1.0)
        module.conv.weight.uniform_(-taps, taps, generator=generator)
        if module.conv.bias is not None:
            module.conv.bias.zero_()
