"""Numbers in few bits: bf16 by stochastic rounding, fp32 split in two halves, blocks of moments in 8 bits.

All of it is arithmetic on whole tensors that torch.compile fuses into an optimizer's step. Where digits are taken away
it works on the bits: a compiler may leave out a cast to bf16 and back, and the rounding with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

HIGH = -0x10000  # the upper half of 32 bits: sign, exponent and mantissa of a bf16


def mixed(x: Tensor) -> Tensor:
    """A hash of 32 bits (lowbias32, of Wellons' hash prospector); int32 products wrap around."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def noise(like: Tensor, key: Tensor, first: Tensor | int = 0) -> Tensor:
    """16 random bits for each element, a pure function of its place and the key: a run that resumes rounds as it would
    have, on any device, and there is no generator's state to save. `first` is the place of the first element."""
    # Down to 32 bits only after a number from memory: torch 2.11 compiles an int32 arange into 64 bits where pieces are
    # of any size, and then products do not wrap around.
    places = torch.arange(like.numel(), device=like.device).view(like.shape) + first + key.long()
    return mixed(mixed(places.to(torch.int32)) ^ key) & 0xFFFF


def rounded(x: Tensor, key: Tensor, first: Tensor | int = 0) -> Tensor:
    """fp32 to a bf16 neighbour, up with the probability of what is below it: right on average."""
    bits = (x.view(torch.int32) + noise(x, key, first)) & HIGH
    return torch.where(x.isfinite(), bits.view(torch.float32), x)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as its nearest bf16 (still of type fp32) and the bits that are missing, as int16; `joined` undoes it."""
    bits = x.view(torch.int32)
    high = (bits + 0x8000) & HIGH  # a tie goes up: then the difference always fits 16 bits
    return torch.where(x.isnan(), x, high.view(torch.float32)), (bits - high).to(torch.int16)


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    return (weight.float().view(torch.int32) + remainder.to(torch.int32)).view(torch.float32)


def encoded(x: Tensor, signed: bool, key: Tensor, first: Tensor | int = 0) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits, and the largest magnitude of each block, a row of x, as its scale.

    Codes are spaced evenly in the cube root, of a second moment in the sixth: both are cube roots of a gradient's size.
    Against the dynamic maps of bitsandbytes and torchao there is no table to search, and a step of the map is finer on
    a real model's moments (the update m / sqrt(v) to the nearest is 1.4 % off against 2.1 %), the more so the wider a
    block is spread. They are rounded stochastically: to the nearest, small second moments rise and never fall. And one
    above 0 never becomes 0: the update would be divided by epsilon.
    """
    scale = x.abs().amax(1, keepdim=True)
    unit, chance = x / scale.clamp(min=torch.finfo(torch.float32).tiny), noise(x, key, first) / 0x10000
    if signed:
        codes = (unit.abs().pow(1 / 3) * 127 + chance).floor() * unit.sign() + 128
    else:
        codes = torch.where(x > 0, (unit.pow(1 / 6) * 255 + chance).floor().clamp(min=1), 0.0)
    return codes.to(torch.uint8), scale


def decoded(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    root = (codes.float() - 128) / 127 if signed else codes.float() / 255
    cube = root * root * root
    return cube * scale if signed else cube * cube * scale
