"""Positions other than rotary ones: ALiBi, sinusoidal embeddings, T5's learned bias by distance.

Legend: T queries, S keys (the queries are the last T of them), N heads. Biases are added to attention logits, and grow
with T * S * N: 8K tokens and 32 heads take 8 GB in float32, where rotary positions take none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bessemer.errors import UserError


def alibi_slopes(heads: int) -> Tensor:
    """(N,) on the CPU: 2^(-8 i / N) for i = 1 ... N; for another number than a power of two those of the power below,
    then every other one of the power above. In float32 as BLOOM was trained, which is bit-equal to transformers."""
    below = 1 << (heads.bit_length() - 1)
    base, extra = (torch.tensor(2 ** (-top / below), device="cpu", dtype=torch.float32) for top in (8, 4))
    every, odd = torch.arange(1, below + 1, device="cpu"), torch.arange(1, 2 * (heads - below) + 1, 2, device="cpu")
    return torch.cat((base**every, extra**odd))


def alibi_bias(slopes_N: Tensor, T: int, S: int) -> Tensor:
    """(1, N, T, S): -slope * |distance|, on the slopes' device. (BLOOM's own code adds slope * key position: a constant
    more for each query, which softmax does not see.)"""
    keys_S = torch.arange(S, device=slopes_N.device)
    distance_TS = (keys_S - keys_S[S - T :, None]).abs()
    return (distance_TS * -slopes_N[:, None, None])[None]


def alibi_rounded(slopes_N: Tensor, places_BS: Tensor) -> Tensor:
    """(B, N, 1, S): slope * key position, both and their product rounded to bfloat16 as Falcon-RW was trained. Rounded,
    it is not the same from any beginning: positions must be those inside a document."""
    return slopes_N.bfloat16()[:, None, None] * places_BS[:, None, None]


def sinusoidal(length: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """(length, width) in float64: sin in even and cos in odd columns, as in "Attention is all you need" (fairseq's and
    tensor2tensor's code have all sines first)."""
    rate = 10_000.0 ** (-torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float64), rate)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :width]


def relative_bucket(key_minus_query: Tensor, bidirectional: bool, buckets: int, max_distance: int) -> Tensor:
    """T5's bucket of each distance: one each for the near ones, then ever wider ones, and one from `max_distance` on.
    Keys ahead have half of the buckets if bidirectional; else they count as distance 0."""
    ahead = torch.zeros_like(key_minus_query)
    distance = (-key_minus_query).clamp(min=0)
    if bidirectional:
        buckets //= 2
        ahead = (key_minus_query > 0) * buckets
        distance = key_minus_query.abs()
    exact = buckets // 2
    # float32, as T5 was trained: some borders fall on the other side in float64.
    wide = torch.log(distance.float().clamp(min=1) / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + wide.long()).clamp(max=buckets - 1)
    return ahead + torch.where(distance < exact, distance, far)


class RelativeBias(nn.Module):
    """A learned bias for each bucket and head; T5 shares one among all layers of a stack. Starts at zero."""

    def __init__(self, buckets: int, max_distance: int, heads: int, bidirectional: bool) -> None:
        super().__init__()
        near = buckets // 4 if bidirectional else buckets // 2
        if not 0 < near < max_distance:
            need = "at least 4 buckets (2 if causal)" if near < 1 else f"relative_distance above {near}"
            raise UserError(f"relative_buckets {buckets} with relative_distance {max_distance}: choose {need}")
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.weight = nn.Parameter(torch.zeros(buckets, heads))
        self._lookups: dict[torch.device, Tensor] = {}

    def forward(self, T: int, S: int, device: torch.device) -> Tensor:
        """(1, N, T, S)."""
        reach = self.max_distance
        places = torch.arange(1 - S, T, device=device).clamp(-reach, reach) + reach
        line_NL = self.weight[self._lookup(device)[places]].T  # every distance once, from 1 - S to T - 1
        # Window w is the row of query T - 1 - w. A lookup of all pairs would need an int64 index of size T * S.
        return line_NL.unfold(1, S, 1).flip(1)[None]

    def _lookup(self, device: torch.device) -> Tensor:
        """Buckets of the distances from -max to max. Made on the CPU: a GPU's logarithm may put a border elsewhere."""
        if device not in self._lookups:
            distances = torch.arange(-self.max_distance, self.max_distance + 1, device="cpu")
            found = relative_bucket(distances, self.bidirectional, self.buckets, self.max_distance)
            self._lookups[device] = found.to(device)
        return self._lookups[device]
