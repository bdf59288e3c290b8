"""Kernels of the choice of the next tokens on a GPU, which a decoding graph ends with: the most likely token of each
row, or the draw that `sampling` defines, with its log-probability.

Programs read parts of a row and keep the best token of each, with its noise, and the sum for the logsumexp; a second
kernel combines the parts and appends the token to its slot. Noise is in float64, as in `sampling`, the rest in float32.
Legend: B rows, S slots, P parts, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PART = 1024  # logits that a program reads
GOLDEN, MIX_1, MIX_2 = (tl.constexpr(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@triton.jit
def _mix(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * tl.full([1], MIX_1, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([1], MIX_2, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def _gumbel(seed, position, v_V):  # type: ignore[no-untyped-def]
    """`sampling.gumbel` of one row's tokens v, float64."""
    golden = tl.full([1], GOLDEN, tl.uint64)
    key = _mix(_mix(seed.to(tl.uint64) * golden) + position.to(tl.uint64) * tl.full([1], MIX_1, tl.uint64))
    bits_V = _mix(key + v_V.to(tl.uint64) * golden)
    uniform_V = ((bits_V >> 11).to(tl.int64).to(tl.float64) + 0.5) * (1.0 / 9007199254740992.0)
    return -tl.log(-tl.log(uniform_V))


@triton.jit
def _draw_parts(  # type: ignore[no-untyped-def]
    logits, slots, positions, seeds, heats, scored_heats, tops, ids, highs, sums, row_stride,
    V: tl.constexpr, STEP: tl.constexpr, SAMPLED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    place = row * tl.num_programs(1) + part
    v = part * STEP + tl.arange(0, STEP)
    inside = v < V
    if SAMPLED:
        heat = tl.load(heats + row)
        noise_V = _gumbel(tl.load(seeds + row), tl.load(positions + tl.load(slots + row)) + 1, v)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    logit_V = tl.load(logits + row.to(tl.int64) * row_stride + v, mask=inside, other=float("-inf")).to(tl.float32)
    if SAMPLED:
        scored_V = logit_V / tl.load(scored_heats + row)
        high = tl.max(scored_V, 0)
        finite = tl.where(high > float("-inf"), high, 0.0)
        tl.store(highs + place, high)
        tl.store(sums + place, tl.sum(tl.exp(scored_V - finite), 0))
        tempered_V = (logit_V / tl.where(heat > 0, heat, 1.0)).to(tl.float64)
        logit_V = tempered_V + tl.where(heat > 0, noise_V, 0.0)
    top, at = tl.max(logit_V, 0, return_indices=True)  # the first of equals
    tl.store(tops + place, top)
    tl.store(ids + place, part * STEP + at)


@triton.jit
def _take(  # type: ignore[no-untyped-def]
    logits, slots, positions, tokens, scored_heats, tops, ids, highs, sums, chosen, row_stride, null_slot,
    V: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, SAMPLED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The best token of all parts, appended to the row's slot; the null slot stays at position 0."""
    row = tl.program_id(0)
    p = tl.arange(0, PARTS_PAD)
    place_P, inside = row * PARTS + p, p < PARTS
    if OVERLAP:
        gdc_wait()
    best = tl.max(tl.load(tops + place_P, mask=inside, other=float("-inf")), 0, return_indices=True)[1]
    best = tl.minimum(best, PARTS - 1)  # without NaN the minima change nothing
    token = tl.minimum(tl.load(ids + row * PARTS + best), V - 1)
    logprob = 0.0
    if SAMPLED:
        high_P = tl.load(highs + place_P, mask=inside, other=float("-inf"))
        high = tl.max(high_P, 0)
        total = tl.sum(tl.load(sums + place_P, mask=inside, other=0.0) * tl.exp(high_P - high), 0)
        logit = tl.load(logits + row.to(tl.int64) * row_stride + token).to(tl.float32)
        logprob = logit / tl.load(scored_heats + row) - high - tl.log(total)
    slot = tl.load(slots + row)
    tl.store(tokens + slot, token.to(tl.int64))
    tl.store(positions + slot, tl.where(slot == null_slot, 0, tl.load(positions + slot) + 1))
    tl.store(chosen + 2 * row, token.to(tl.float64))
    tl.store(chosen + 2 * row + 1, logprob)


def draw(
    logits_BV: Tensor, slots_B: Tensor, token_S: Tensor, position_S: Tensor, null_slot: int,
    settings: tuple[Tensor, Tensor, Tensor] | None = None, overlap: bool = False,
) -> Tensor:  # fmt: skip
    """(B, 2) float64: the token of each row, which becomes the last one of its slot, and its log-probability.

    `settings` are the seeds, the temperatures, and the temperatures of the distributions that the log-probabilities
    are of. Without them the most likely tokens are taken, and there are no log-probabilities. With `overlap` each
    kernel starts while the one before still runs."""
    (B, V), device = logits_BV.shape, logits_BV.device
    assert logits_BV.stride(1) == 1
    parts, sampled = triton.cdiv(V, PART), settings is not None
    seed_B, heat_B, scored_heat_B = settings or (None, None, None)
    tops_BP = torch.empty(B, parts, dtype=torch.float64 if sampled else torch.float32, device=device)
    highs_BP, sums_BP = torch.empty(2, B, parts, dtype=torch.float32, device=device)
    ids_BP = torch.empty(B, parts, dtype=torch.int32, device=device)
    chosen_B2 = torch.empty(B, 2, dtype=torch.float64, device=device)
    early: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    kinds = {"V": V, "SAMPLED": sampled, "OVERLAP": overlap, **early}
    _draw_parts[(B, parts)](
        logits_BV, slots_B, position_S, seed_B, heat_B, scored_heat_B, tops_BP, ids_BP, highs_BP, sums_BP,
        logits_BV.stride(0), STEP=PART, **kinds,
    )  # fmt: skip
    _take[(B,)](
        logits_BV, slots_B, position_S, token_S, scored_heat_B, tops_BP, ids_BP, highs_BP, sums_BP, chosen_B2,
        logits_BV.stride(0), null_slot, PARTS=parts, PARTS_PAD=triton.next_power_of_2(parts), **kinds,
    )  # fmt: skip
    return chosen_B2
