"""LoRA: which rank, alpha and learning rate, and what the adapters weigh.

An adapter of rank r beside a matrix of d_in x d_out has r (d_in + d_out) parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bessemer.errors import UserError
from bessemer.plan.recipe.answer import Answer, Basis
from bessemer.spec.quantity import human_count
from bessemer.spec.shape import ModelShape

Use = Literal["style", "instructions", "domain", "rl"]
MODULES = ("q", "k", "v", "o", "gate", "up", "down")
# Rank by what is learnt. RL takes in about a bit from an episode, so that even rank 1 matched full training.
_USUAL: dict[Use, int] = {"style": 16, "instructions": 32, "domain": 64, "rl": 8}
SCHULMAN = "Schulman et al. 2025, LoRA without regret"
BITS_PER_PARAMETER = 2.0  # Allen-Zhu and Li 2024, knowledge capacity: what a trained parameter can hold
LARGEST_RANK = 256


@dataclass(frozen=True)
class LoraSettings:
    rank: int
    alpha: int
    learning_rate: float
    parameters: int
    modules: tuple[str, ...] = MODULES


def matrix_sides(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(d_in, d_out) of each kind of matrix of a layer."""
    width, inner, kv = shape.width, shape.attention_width, shape.kv_heads * shape.head_dim
    sides = {"q": (width, inner), "k": (width, kv), "v": (width, kv), "o": (inner, width)}
    if shape.gated:
        sides["gate"] = (width, shape.ffn)
    return sides | {"up": (width, shape.ffn), "down": (shape.ffn, width)}


def lora_parameters(shape: ModelShape, rank: int, modules: tuple[str, ...] = MODULES) -> int:
    """Trained parameters: the sum of r (d_in + d_out) over the chosen matrices of all layers."""
    if rank < 1:
        raise UserError(f"rank: {rank} is no rank: write at least 1, such as 16")
    sides = matrix_sides(shape)
    return shape.layers * rank * sum(sum(sides[name]) for name in modules if name in sides)


def lora(shape: ModelShape, use: Use, full_rate: float, learnt_tokens: float = 0.0) -> Answer[LoraSettings]:
    """Rank, alpha and learning rate. `full_rate` is what full fine-tuning would take; `learnt_tokens` are those of the
    data that count in the loss, about a bit of new information each."""
    if use not in _USUAL:
        raise UserError(f"use {use!r}: write {', '.join(_USUAL)}")
    rank = _USUAL[use]
    reason = f"usual for {use}"
    basis: Basis = "empirical at this scale"
    while use != "rl" and rank < LARGEST_RANK and BITS_PER_PARAMETER * lora_parameters(shape, rank) < learnt_tokens:
        rank *= 2
        reason = f"{human_count(learnt_tokens)} learnt tokens, about a bit each, need so many parameters of 2 bits"
    if use != "rl" and BITS_PER_PARAMETER * lora_parameters(shape, rank) < learnt_tokens:
        reason += f"; more than rank {rank} holds: full fine-tuning will learn more"
        basis = "open question"
    size = lora_parameters(shape, rank)
    share = size / shape.parameters
    reason += f"; all matrices, {human_count(size)} parameters ({share:.1%}); alpha twice the rank; ten times the rate"
    settings = LoraSettings(rank, 2 * rank, 10 * full_rate, size)
    return Answer(settings, reason, SCHULMAN, basis)
