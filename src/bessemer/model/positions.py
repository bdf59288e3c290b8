"""Rotary positions (RoFormer), with the ways of stretching them beyond the context that a model was trained with.

Frequencies are those of transformers' ROPE_INIT_FUNCTIONS, operation by operation: at position 100,000 a last-bit
difference of a frequency is already an angle of 0.006. Legend: T positions, D rotated dimensions of a head, H = D / 2.

Positions other than rotary ones: ALiBi, sinusoidal embeddings, T5's learned bias by distance.

Legend: T queries, S keys (the queries are the last T of them), N heads. Biases are added to attention logits, and grow
with T * S * N: 8K tokens and 32 heads take 8 GB in float32, where rotary positions take none.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.errors import UserError
from bessemer.spec.shape import Rope


class RotaryTable:
    """cos and sin by position, grown on demand and kept per device and type. Not a parameter, never saved."""

    def __init__(self, head_dim: int, rope: Rope) -> None:
        self.size, self.rope = int(head_dim * rope.share), rope
        _check(head_dim, self.size, rope)
        self._tables: dict[tuple[torch.device, torch.dtype, bool], tuple[Tensor, Tensor]] = {}

    def get(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(length, D) each, computed in float32 (float64 for float64 models). The angles of pair i are in columns i
        and H + i, whichever way `rotate` pairs the numbers of a head.

        LongRoPE and dynamic scaling look at the length asked for, which is that of the row and not of a document in it.
        """
        beyond = self.rope.scaling in ("longrope", "dynamic") and length > self.rope.original
        # Dynamic scaling has other angles for every length: only the last is kept, or generation would fill the memory.
        own = beyond and self.rope.scaling == "dynamic"
        cos_TD, sin_TD = self._tables.get((device, dtype, beyond), (None, None))
        if cos_TD is None or sin_TD is None or len(cos_TD) < length or (own and len(cos_TD) != length):
            rows = length if own else 1 << max(length - 1, 1).bit_length()
            with torch.inference_mode(False):  # a table first asked for by generation must serve training too
                cos_TD, sin_TD = self._make(rows, length, device, dtype)
            self._tables[device, dtype, beyond] = (cos_TD, sin_TD)
        return cos_TD[:length], sin_TD[:length]

    def _make(self, rows: int, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        frequency_H = frequencies(self.size, self.rope, length, exact).to(device)
        angle_TH = torch.outer(torch.arange(rows, device=device, dtype=exact), frequency_H)
        angle_TD = torch.cat((angle_TH, angle_TH), dim=-1)
        factor = attention_factor(self.rope)
        return (angle_TD.cos() * factor).to(dtype), (angle_TD.sin() * factor).to(dtype)


def _check(head_dim: int, size: int, rope: Rope) -> None:
    where = f"rope scaling {rope.scaling}"
    if size < 2 or size % 2:
        raise UserError(f"rope.share {rope.share} of head_dim {head_dim} is {size} numbers; choose an even number >= 2")
    if rope.factor <= 0:
        raise UserError(f"{where}: rope.factor is {rope.factor}; give the new context divided by the old")
    if rope.scaling in ("dynamic", "yarn", "longrope", "llama3") and rope.original < 2:
        raise UserError(f"{where}: rope.original is {rope.original}; set it to the context the model was trained with")
    if rope.scaling in ("ntk", "dynamic") and size == 2:
        raise UserError(f"{where} needs more than one pair, and rope.share {rope.share} of head_dim {head_dim} is one")
    for name, divisors in (("short", rope.short), ("long", rope.long)):
        if rope.scaling == "longrope" and len(divisors) != size // 2:
            raise UserError(f"{where}: rope.{name} has {len(divisors)} numbers; give {size // 2}, one for each pair")


def frequencies(size: int, rope: Rope, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(H,) radians per position of each pair when `length` positions are in use. On the CPU: equal for every device."""
    theta, factor = rope.theta, rope.factor
    if rope.scaling == "ntk":
        theta *= factor ** (size / (size - 2))
    elif rope.scaling == "dynamic":
        stretch = factor * max(length, rope.original) / rope.original - (factor - 1)
        theta *= stretch ** (size / (size - 2))
    period_H = theta ** (torch.arange(0, size, 2, device="cpu", dtype=torch.int64).to(dtype) / size)
    if rope.scaling == "linear":
        return 1.0 / period_H / factor
    if rope.scaling == "yarn":
        keep_H = _yarn_keep(size, rope, dtype)
        return 1.0 / (factor * period_H) * (1 - keep_H) + 1.0 / period_H * keep_H
    if rope.scaling == "longrope":
        divisors = rope.long if length > rope.original else rope.short
        return 1.0 / (torch.tensor(divisors, device="cpu", dtype=dtype) * period_H)
    if rope.scaling == "llama3":
        return _llama3(1.0 / period_H, rope)
    return 1.0 / period_H


def _yarn_keep(size: int, rope: Rope, dtype: torch.dtype) -> Tensor:
    """(H,) the share of each frequency left as it was: 1 for the fast ones, 0 for the slow, a ramp between."""

    def pair_with(rotations: float) -> float:
        """The (fractional) pair that turns so many times within the original context."""
        return size * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp_H = (torch.arange(size // 2, device="cpu", dtype=dtype) - low) / (high - low)
    return 1 - ramp_H.clamp(0, 1)


def _llama3(frequency_H: Tensor, rope: Rope) -> Tensor:
    """Long waves are stretched by the factor, short ones not, and those between in part."""
    wave_H = 2 * math.pi / frequency_H
    keep_H = (rope.original / wave_H - rope.low_freq) / (rope.high_freq - rope.low_freq)
    between_H = (1 - keep_H) * frequency_H / rope.factor + keep_H * frequency_H
    scaled_H = torch.where(wave_H > rope.original / rope.low_freq, frequency_H / rope.factor, between_H)
    return torch.where(wave_H < rope.original / rope.high_freq, frequency_H, scaled_H)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's temperature. DeepSeek also multiplies its attention scale by yarn_mscale(factor, mscale_all_dim) ** 2."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def attention_factor(rope: Rope) -> float:
    """What cos and sin are multiplied by, so logits by its square: longer contexts want sharper attention."""
    if rope.scaling not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.scaling == "longrope":
        return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original))
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor)


class _Rotate(torch.autograd.Function):
    """x cos + rotate(x) sin; the backward pass is the rotation by the opposite angle, so nothing of x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, -sin, ctx.interleaved), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    size, half = cos.shape[-1], cos.shape[-1] // 2
    if interleaved:
        first, second = slice(0, size, 2), slice(1, size, 2)
        cos = cos[..., :half].repeat_interleave(2, dim=-1)  # small: the table has neither rows nor heads
    else:
        first, second = slice(0, half), slice(half, size)
    out = x * cos if size == x.shape[-1] else torch.cat((x[..., :size] * cos, x[..., size:]), dim=-1)
    out[..., first].addcmul_(x[..., second], sin[..., :half], value=-1)
    out[..., second].addcmul_(x[..., first], sin[..., :half])
    return out


def rotate(x_BTND: Tensor, cos_TD: Tensor, sin_TD: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first D numbers of each head by its position; the rest passes.

    Pairs are (i, H + i), as in Llama, or neighbours (2i, 2i + 1) if interleaved, as in GPT-J and DeepSeek; each number
    stays where it was. (transformers' DeepSeek-V3 writes rotated neighbours to (i, H + i): queries and keys are
    permuted alike, so scores are the same.)
    """
    out: Tensor = _Rotate.apply(x_BTND, cos_TD.unsqueeze(-2), sin_TD.unsqueeze(-2), interleaved)  # type: ignore[no-untyped-call]
    return out


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
