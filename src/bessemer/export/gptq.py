"""Three ways to quantize a weight matrix: to the nearest value, GPTQ (Frantar et al. 2023) and AWQ (Lin et al. 2024).

GPTQ and AWQ minimise the squared error of the layer's output on calibration inputs, which needs only H = X^T X:
|X (W - Q)^T|^2 = tr((W - Q) H (W - Q)^T). GPTQ rounds the columns one after the other and corrects those that follow.
AWQ multiplies the inputs that carry large activations before rounding; the layer before divides its outputs.
Legend: O and I outputs and inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bessemer.model.families.compressed_tensors import QuantizedWeight, WeightFormat

DAMPING = 0.01  # of the mean of H's diagonal
COLUMNS = 128  # corrected together
SHRINKS = tuple(1 - 0.05 * step for step in range(9))  # of a group's largest weight: clipping it may be better
EXPONENTS = tuple(step / 20 for step in range(21))  # of AWQ's search


def output_error(weight_OI: Tensor, dense_OI: Tensor, hessian_II: Tensor) -> float:
    """Squared error of the outputs, summed over the inputs that H was made from."""
    difference_OI = weight_OI - dense_OI
    return float(((difference_OI @ hessian_II) * difference_OI).sum())


def round_to_nearest(
    weight_OI: Tensor, form: WeightFormat, dtype: torch.dtype = torch.float32, importance_I: Tensor | None = None
) -> QuantizedWeight:
    """`dtype` is that of the stored scales. With `importance_I`, weights of the squared errors of each input, a group's
    scale is the best of several; without it the group's largest weight is the largest code."""
    scale_OG = choose_scales(weight_OI, form, dtype, importance_I)
    weight_OGg = weight_OI.unflatten(1, (scale_OG.shape[1], -1))
    codes_OI = form.round(weight_OGg / scale_OG.float()[..., None]).flatten(1)
    return QuantizedWeight(form, codes_OI.to(form.code_dtype), scale_OG)


def choose_scales(
    weight_OI: Tensor, form: WeightFormat, dtype: torch.dtype, importance_I: Tensor | None = None
) -> Tensor:
    """The scale of each group. A group of zeros has scale 1."""
    weight_OGg = weight_OI.unflatten(1, (-1, form.group or weight_OI.shape[1]))
    full_OG = weight_OGg.abs().amax(-1) / form.half_range
    full_OG = torch.where(full_OG > 0, full_OG, 1.0)
    if importance_I is None:
        return full_OG.to(dtype)
    importance_Gg = importance_I.view(weight_OGg.shape[1:])
    best_OG, least_OG = full_OG.to(dtype), torch.full_like(full_OG, torch.inf)
    for shrink in SHRINKS:
        scale_OG = (full_OG * shrink).to(dtype)
        exact_OG1 = scale_OG.float()[..., None]
        error_OG = ((form.round(weight_OGg / exact_OG1) * exact_OG1 - weight_OGg).square() * importance_Gg).sum(-1)
        better_OG = error_OG < least_OG
        best_OG, least_OG = best_OG.where(~better_OG, scale_OG), least_OG.where(~better_OG, error_OG)
    return best_OG


def gptq(
    weight_OI: Tensor, hessian_II: Tensor, form: WeightFormat, dtype: torch.dtype = torch.float32
) -> QuantizedWeight:
    """Columns are rounded in the order of their activations, the largest first. Groups stay groups of neighbours, with
    scales from the original weights, so that readers need no permutation. Takes O(I^3 + O I^2)."""
    size = weight_OI.shape[1]
    order = hessian_II.diagonal().argsort(descending=True, stable=True)
    scale_OG = choose_scales(weight_OI, form, dtype, hessian_II.diagonal())
    scale_OI = scale_OG.float().repeat_interleave(size // scale_OG.shape[1], dim=1)[:, order]
    weight_OI, codes_OI = weight_OI[:, order].clone(), torch.empty_like(weight_OI)
    factor_II = _inverse_factor(hessian_II[order][:, order])
    for start in range(0, size, COLUMNS):
        stop = min(start + COLUMNS, size)
        block_OC, errors_OC = weight_OI[:, start:stop].clone(), torch.empty_like(weight_OI[:, start:stop])
        factor_CC = factor_II[start:stop, start:stop]
        for i in range(stop - start):
            codes_OI[:, start + i] = form.round(block_OC[:, i] / scale_OI[:, start + i])
            rounded_O = codes_OI[:, start + i] * scale_OI[:, start + i]
            errors_OC[:, i] = (block_OC[:, i] - rounded_O) / factor_CC[i, i]
            block_OC[:, i:].addr_(errors_OC[:, i], factor_CC[i, i:], alpha=-1)
        weight_OI[:, stop:].addmm_(errors_OC, factor_II[start:stop, stop:], alpha=-1)
    return QuantizedWeight(form, codes_OI[:, order.argsort()].to(form.code_dtype), scale_OG)


def _inverse_factor(hessian_II: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse, computed in float64: its rows hold the corrections."""
    exact_II = hessian_II.double()
    diagonal_I = exact_II.diagonal()
    diagonal_I[diagonal_I == 0] = 1.0  # an input that is always zero
    diagonal_I += DAMPING * diagonal_I.mean()
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(exact_II))
    return torch.linalg.cholesky(inverse_II, upper=True).to(hessian_II.dtype)


def awq(
    weight_OI: Tensor, hessian_II: Tensor, form: WeightFormat, dtype: torch.dtype = torch.float32,
    tie: Callable[[Tensor], Tensor] | None = None,
) -> tuple[QuantizedWeight, Tensor]:  # fmt: skip
    """The quantized W * s, and s of each input, which the layer before has to divide by. s is a power of the root mean
    square of the input, the power with the least output error. `tie` makes inputs equal that must have one factor."""
    energy_I = hessian_II.diagonal().clamp(min=1e-12 * float(hessian_II.diagonal().max().clamp(min=1e-30)))
    energy_I = energy_I if tie is None else tie(energy_I)
    least, best_I = float("inf"), torch.ones_like(energy_I)
    for exponent in EXPONENTS:
        factor_I = energy_I.pow(exponent / 2)
        factor_I = factor_I / (factor_I.max() * factor_I.min()).sqrt()
        dense_OI = round_to_nearest(weight_OI * factor_I, form, dtype).dense() / factor_I
        error = output_error(weight_OI, dense_OI, hessian_II)
        if error < least:
            least, best_I = error, factor_I
    importance_I = hessian_II.diagonal() / best_I.square()
    return round_to_nearest(weight_OI * best_I, form, dtype, importance_I), best_I
