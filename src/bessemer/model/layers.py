"""The small building blocks of a model: norms, the feed-forward part, and positions (rotary and its context extensions,
ALiBi, sinusoidal, T5's relative bias).

Rotary frequencies follow transformers' ROPE_INIT_FUNCTIONS operation by operation: at position 100,000 a last-bit
difference of a frequency is an angle of 0.006. Biases are added to attention logits and take T * S * N numbers: 8 GB in
float32 for 8K tokens and 32 heads.

Legend: B batch, T queries or positions, S keys (the queries are the last T of them), N heads, D rotated dimensions of a
head, H = D / 2, W width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.errors import UserError
from bessemer.spec.shape import Activation, ModelShape, Rope


class RMSNorm(nn.Module):
    """x / rms(x) * (offset + weight)."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.size, self.eps, self.offset = (size,), eps, offset
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        if not self.offset:
            # torch has no kernel for mixed types and would take six passes.
            return F.rms_norm(x, self.size, self.weight.to(x.dtype), self.eps)
        # float32 up to the last product, as Gemma was trained.
        exact = x if x.dtype == torch.float64 else x.float()
        weight = self.weight.to(exact.dtype) + self.offset
        return (F.rms_norm(exact, self.size, None, self.eps) * weight).to(x.dtype)


def make_norm(shape: ModelShape, size: int | None = None) -> nn.Module:
    """The norm of a shape, over the width or another size."""
    if shape.norm == "layer":
        return nn.LayerNorm(size or shape.width, eps=shape.norm_eps)
    return RMSNorm(size or shape.width, shape.norm_eps, shape.norm_offset)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}


class FeedForward(nn.Module):
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int, activation: Activation, gated: bool, bias: bool = False) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[activation]
        self.gate = nn.Linear(width, inner, bias=bias) if gated else None
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x_BTW: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activate(self.up(x_BTW)))
        return self.down(self.activate(self.gate(x_BTW)) * self.up(x_BTW))


class RotaryTable:
    """cos and sin by position, extended on demand and cached per device and dtype. Not a parameter, never saved."""

    def __init__(self, head_dim: int, rope: Rope) -> None:
        self.size, self.rope = int(head_dim * rope.share), rope
        _check(head_dim, self.size, rope)
        self._tables: dict[tuple[torch.device, torch.dtype, bool], tuple[Tensor, Tensor]] = {}

    def get(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two (length, D) tables, computed in float32 (float64 for float64 models). Pair i has its angles in columns i
        and H + i, whichever way `rotate` pairs the numbers of a head.

        LongRoPE and dynamic scaling depend on `length`, which is that of the row and not of a document in it.
        """
        beyond = self.rope.scaling in ("longrope", "dynamic") and length > self.rope.original
        # Dynamic scaling has different angles for every length: only the last table is kept, or generation would fill
        # the memory.
        per_length = beyond and self.rope.scaling == "dynamic"
        cos_TD, sin_TD = self._tables.get((device, dtype, beyond), (None, None))
        if cos_TD is None or sin_TD is None or len(cos_TD) < length or (per_length and len(cos_TD) != length):
            rows = length if per_length else 1 << max(length - 1, 1).bit_length()
            with torch.inference_mode(False):  # a table created during generation must serve training too
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
    prefix = f"rope scaling {rope.scaling}"
    if size < 2 or size % 2:
        raise UserError(f"rope.share {rope.share} of head_dim {head_dim} is {size} numbers; choose an even number >= 2")
    if rope.factor <= 0:
        raise UserError(f"{prefix}: rope.factor is {rope.factor}; set it to the new context divided by the old one")
    if rope.scaling in ("dynamic", "yarn", "longrope", "llama3") and rope.original < 2:
        raise UserError(f"{prefix}: rope.original is {rope.original}; set it to the context the model was trained with")
    if rope.scaling in ("ntk", "dynamic") and size == 2:
        raise UserError(f"{prefix} needs at least two pairs; rope.share {rope.share} of head_dim {head_dim} is one")
    for name, divisors in (("short", rope.short), ("long", rope.long)):
        if rope.scaling == "longrope" and len(divisors) != size // 2:
            raise UserError(f"{prefix}: rope.{name} has {len(divisors)} numbers; write {size // 2}, one per pair")


def frequencies(size: int, rope: Rope, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(H,) radians per position of each pair when `length` positions are in use. Computed on the CPU, so equal on every
    device."""
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
    """(H,) the share of each frequency that stays unscaled: 1 for fast ones, 0 for slow ones, a ramp in between."""

    def pair_with(rotations: float) -> float:
        """The (fractional) pair that makes this many rotations within the original context."""
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
    """Long wavelengths are stretched by the factor, short ones are not, those in between partly."""
    wave_H = 2 * math.pi / frequency_H
    keep_H = (rope.original / wave_H - rope.low_freq) / (rope.high_freq - rope.low_freq)
    between_H = (1 - keep_H) * frequency_H / rope.factor + keep_H * frequency_H
    scaled_H = torch.where(wave_H > rope.original / rope.low_freq, frequency_H / rope.factor, between_H)
    return torch.where(wave_H < rope.original / rope.high_freq, frequency_H, scaled_H)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's temperature. DeepSeek also multiplies its attention scale by yarn_mscale(factor, mscale_all_dim) ** 2."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def attention_factor(rope: Rope) -> float:
    """The factor on cos and sin (so logits get its square): longer contexts want sharper attention."""
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
    """x cos + rotate(x) sin. The backward pass rotates by the opposite angle, so x is not saved."""

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
        cos = cos[..., :half].repeat_interleave(2, dim=-1)  # small: the table has no batch or head dimension
    else:
        first, second = slice(0, half), slice(half, size)
    out = x * cos if size == x.shape[-1] else torch.cat((x[..., :size] * cos, x[..., size:]), dim=-1)
    out[..., first].addcmul_(x[..., second], sin[..., :half], value=-1)
    out[..., second].addcmul_(x[..., first], sin[..., :half])
    return out


def rotate(x_BTND: Tensor, cos_TD: Tensor, sin_TD: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first D numbers of each head by its position; the rest passes through.

    Pairs are (i, H + i), as in Llama, or neighbours (2i, 2i + 1) if interleaved, as in GPT-J and DeepSeek; each number
    stays in place. (transformers' DeepSeek-V3 writes rotated neighbours to (i, H + i): queries and keys are permuted
    alike, so scores are equal.)
    """
    out: Tensor = _Rotate.apply(x_BTND, cos_TD.unsqueeze(-2), sin_TD.unsqueeze(-2), interleaved)  # type: ignore[no-untyped-call]
    return out


def alibi_slopes(heads: int) -> Tensor:
    """(N,) on the CPU: 2^(-8 i / N) for i = 1 ... N. If N is no power of two: those of the power below, then every
    second one of the power above. In float32, bit-equal to transformers' BLOOM."""
    below = 1 << (heads.bit_length() - 1)
    base, extra = (torch.tensor(2 ** (-top / below), device="cpu", dtype=torch.float32) for top in (8, 4))
    powers = torch.arange(1, below + 1, device="cpu")
    odd_powers = torch.arange(1, 2 * (heads - below) + 1, 2, device="cpu")
    return torch.cat((base**powers, extra**odd_powers))


def alibi_bias(slopes_N: Tensor, T: int, S: int) -> Tensor:
    """(1, N, T, S): -slope * |distance|, on the slopes' device. (BLOOM's own code adds slope * key position, which
    differs by a constant per query that softmax ignores.)"""
    keys_S = torch.arange(S, device=slopes_N.device)
    distance_TS = (keys_S - keys_S[S - T :, None]).abs()
    return (distance_TS * -slopes_N[:, None, None])[None]


def alibi_rounded(slopes_N: Tensor, places_BS: Tensor) -> Tensor:
    """(B, N, 1, S): slope * key position, with both factors and the product rounded to bfloat16, as Falcon-RW was
    trained. Rounding breaks translation invariance: positions must count from the document's start."""
    return slopes_N.bfloat16()[:, None, None] * places_BS[:, None, None]


def sinusoidal(length: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """(length, width) in float64: sin in even and cos in odd columns, as in "Attention is all you need" (fairseq and
    tensor2tensor put all sines first)."""
    rate = 10_000.0 ** (-torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float64), rate)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :width]


def relative_bucket(key_minus_query: Tensor, bidirectional: bool, buckets: int, max_distance: int) -> Tensor:
    """T5's bucket of each distance: one each for near distances, then ever wider ones, and one from `max_distance` on.
    Keys ahead use half of the buckets if bidirectional; otherwise they count as distance 0."""
    ahead = torch.zeros_like(key_minus_query)
    distance = (-key_minus_query).clamp(min=0)
    if bidirectional:
        buckets //= 2
        ahead = (key_minus_query > 0) * buckets
        distance = key_minus_query.abs()
    exact = buckets // 2
    # float32, as T5 was trained: in float64 some distances fall into another bucket.
    wide = torch.log(distance.float().clamp(min=1) / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + wide.long()).clamp(max=buckets - 1)
    return ahead + torch.where(distance < exact, distance, far)


class RelativeBias(nn.Module):
    """A learned bias per bucket and head, starting at zero. T5 shares one over all layers of a stack."""

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
        distances = torch.arange(1 - S, T, device=device).clamp(-reach, reach) + reach
        line_NL = self.weight[self._lookup(device)[distances]].T  # every distance once, from 1 - S to T - 1
        # Window w is the row of query T - 1 - w. Indexing all pairs would need an int64 index of T * S.
        return line_NL.unfold(1, S, 1).flip(1)[None]

    def of_queries(self, positions_BT: Tensor, S: int) -> Tensor:
        """(B, N, T, S) for queries at the given positions and keys at 0 to S - 1."""
        keys_S = torch.arange(S, device=positions_BT.device)
        distance_BTS = (keys_S - positions_BT[..., None]).clamp(-self.max_distance, self.max_distance)
        buckets_BTS = self._lookup(positions_BT.device)[distance_BTS + self.max_distance]
        return self.weight[buckets_BTS].permute(0, 3, 1, 2)

    def _lookup(self, device: torch.device) -> Tensor:
        """Buckets of the distances from -max to max. Computed on the CPU: a GPU's logarithm may round differently."""
        if device not in self._lookups:
            distances = torch.arange(-self.max_distance, self.max_distance + 1, device="cpu")
            buckets = relative_bucket(distances, self.bidirectional, self.buckets, self.max_distance)
            self._lookups[device] = buckets.to(device)
        return self._lookups[device]
