"""How the next token of each row is chosen: penalties, temperature, top-k, top-p, min-p, and the draw itself.

Every row has its own settings and its own random numbers. A draw depends only on (seed, position, token), through a
hash and the Gumbel-max trick, so a request gives the same tokens whatever else is in the batch.
Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

import torch
from torch import Tensor

from bessemer.errors import UserError

_INF = float("inf")
# splitmix64, whose constants as signed 64-bit integers are what torch multiplies with.
_GOLDEN, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


@dataclass(frozen=True)
class Sampling:
    """Settings of one request. Temperature 0 takes the most likely token."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # on every token of prompt and answer, as in Hugging Face
    presence_penalty: float = 0.0  # on tokens of the answer, as in OpenAI's API; so is the next
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise UserError(f"{name.replace('_', ' ')} {getattr(self, name)} must be a finite number")
        if self.temperature < 0:
            raise UserError(f"temperature {self.temperature} is negative: write 0 for greedy, or about 0.8")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p} must be above 0 and at most 1")
        if self.top_k < 0:
            raise UserError(f"top-k {self.top_k} is negative: write 0 for no limit")
        if not 0 <= self.min_p < 1:
            raise UserError(f"min-p {self.min_p} must be at least 0 and below 1")
        if self.repetition_penalty <= 0:
            raise UserError(f"repetition penalty {self.repetition_penalty} must be above 0: write 1 for none")

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True)
class SamplingBatch:
    """The settings of several rows as tensors on the device."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    seed_B: Tensor
    scored_heat_B: Tensor  # temperature of the distribution that log-probabilities are of
    penalty_3B: Tensor | None  # repetition, presence, frequency; None: no row has any
    filters: bool
    greedy: bool  # all rows

    @classmethod
    def of(cls, rows: Sequence[Sampling], device: torch.device, tempered: Sequence[bool] = ()) -> Self:
        """`tempered` says which rows' log-probabilities are of the distribution at their temperature."""

        def column(values: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        scored = [r.temperature if own and r.temperature > 0 else 1.0 for r, own in zip_longest(rows, tempered)]
        penalties = [[r.repetition_penalty, r.presence_penalty, r.frequency_penalty] for r in rows]
        return cls(
            column([r.temperature for r in rows]), column([r.top_k for r in rows], torch.int64),
            column([r.top_p for r in rows]), column([r.min_p for r in rows]),
            column([(r.seed + 2**63) % 2**64 - 2**63 for r in rows], torch.int64), column(scored),
            torch.tensor(penalties, dtype=torch.float32).T.to(device) if any(r.penalizes for r in rows) else None,
            any(r.filters for r in rows), all(r.temperature == 0 for r in rows),
        )  # fmt: skip

    def penalize(self, logits_BV: Tensor, prompt_BV: Tensor, answer_BV: Tensor) -> Tensor:
        """`prompt_BV` and `answer_BV` count how often each token stands there."""
        if self.penalty_3B is None:
            return logits_BV
        repetition, presence, frequency = self.penalty_3B.to(logits_BV.dtype)[..., None]
        scaled_BV = torch.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
        logits_BV = torch.where(prompt_BV + answer_BV > 0, scaled_BV, logits_BV)
        return logits_BV - presence * (answer_BV > 0) - frequency * answer_BV

    def temper(self, logits_BV: Tensor) -> Tensor:
        """Divided by the temperature; rows of temperature 0 stay as they are."""
        heat_B1 = torch.where(self.temperature_B > 0, self.temperature_B, 1.0)[:, None]
        return logits_BV / heat_B1.to(logits_BV.dtype)

    def filter(self, logits_BV: Tensor) -> Tensor:
        """Tempered logits with every token outside top-k, top-p and min-p at -inf, applied in this order. Top-p keeps
        the smallest set whose probability reaches p."""
        logits_BV = self.temper(logits_BV)
        if not self.filters:
            return logits_BV
        V = logits_BV.shape[-1]
        sorted_BV, index_BV = torch.sort(logits_BV, dim=-1, descending=True)
        k_B1 = torch.where(self.top_k_B > 0, self.top_k_B.clamp(max=V), V)[:, None]
        sorted_BV = sorted_BV.masked_fill(sorted_BV < sorted_BV.gather(1, k_B1 - 1), -_INF)
        shares_BV = sorted_BV.softmax(dim=-1)
        outside_BV = shares_BV.cumsum(dim=-1) - shares_BV >= self.top_p_B.to(shares_BV.dtype)[:, None]
        outside_BV &= (self.top_p_B < 1)[:, None]
        sorted_BV = sorted_BV.masked_fill(outside_BV, -_INF)
        shares_BV = sorted_BV.softmax(dim=-1)
        outside_BV = shares_BV < self.min_p_B.to(shares_BV.dtype)[:, None] * shares_BV[:, :1]
        sorted_BV = sorted_BV.masked_fill(outside_BV, -_INF)
        return torch.empty_like(sorted_BV).scatter_(1, index_BV, sorted_BV)

    def draw(self, logits_BV: Tensor, position_B: Tensor) -> Tensor:
        """(B,) tokens of positions `position_B`, from penalized logits."""
        if self.greedy:
            return logits_BV.argmax(dim=-1)
        if logits_BV.is_cuda and logits_BV.element_size() < 4:
            logits_BV = logits_BV.float()  # as the kernel of a decoding graph: the draws are the same
        noisy_BV = self.filter(logits_BV).double() + gumbel(self.seed_B, position_B, logits_BV.shape[-1])
        sampled_B = noisy_BV.argmax(dim=-1)
        return torch.where(self.temperature_B > 0, sampled_B, logits_BV.argmax(dim=-1))


def filter_logits(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """`SamplingBatch.filter` of one row."""
    return SamplingBatch.of([sampling], logits_V.device).filter(logits_V[None].float())[0]


def uniform(seed_B: Tensor, position_B: Tensor, count: int, stream: int = 0) -> Tensor:
    """(B, count) numbers in (0, 1), float64: a hash of seed, position, column and stream."""
    key_B = _mix(_mix(seed_B * _GOLDEN + stream) + position_B * _MIX_1)
    column = torch.arange(count, device=seed_B.device)
    bits = _mix(key_B[:, None] + column * _GOLDEN)
    return (((bits >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53


def gumbel(seed_B: Tensor, position_B: Tensor, count: int, stream: int = 0) -> Tensor:
    """Noise whose argmax with logits is a draw from their softmax."""
    return -(-uniform(seed_B, position_B, count, stream).log()).log()


def _mix(z: Tensor) -> Tensor:
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX_2
    return z ^ ((z >> 31) & ((1 << 33) - 1))
