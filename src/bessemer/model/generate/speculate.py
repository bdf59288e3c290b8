"""Speculative decoding: cheap guesses, read by the model in one pass and accepted so that its distribution is kept.

A guess x with draft probability q(x) is accepted with probability min(1, p(x) / q(x)); at the first rejection a token
is drawn from max(0, p - q), and after the last acceptance one from p (Leviathan et al. 2023). p and q are the
distributions after temperature and filters. Greedy decoding accepts what equals the model's own choice, so its tokens
are identical.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bessemer.errors import UserError
from bessemer.model.generate.runner import make_runner
from bessemer.model.generate.sampling import Sampling, SamplingBatch, uniform
from bessemer.model.transformer import Decoder

_ACCEPT, _RESIDUAL = 1, 2  # streams of random numbers beside that of plain draws


@dataclass(frozen=True)
class Draft:
    """Guessed tokens; `probabilities` (guesses, V) they were drawn with, None where each was certain."""

    tokens: list[int]
    probabilities: Tensor | None = None


class Drafter(Protocol):
    """Guesses the next tokens of a slot."""

    def propose(self, slot: int, context: list[int], sampling: Sampling) -> Draft: ...


@dataclass(frozen=True)
class NgramDrafter:
    """Copies what followed the last occurrence of the context's end: free, and good at code and quotations."""

    length: int = 4
    longest_match: int = 3

    def propose(self, slot: int, context: list[int], sampling: Sampling) -> Draft:
        for size in range(min(self.longest_match, len(context) - 1), 0, -1):
            tail = context[-size:]
            for at in range(len(context) - size - 1, -1, -1):
                if context[at : at + size] == tail:
                    return Draft(context[at + size : at + size + self.length])
        return Draft([])


class ModelDrafter:
    """A smaller model with the same vocabulary."""

    def __init__(self, model: Decoder, target: Decoder, length: int = 4) -> None:
        if model.shape.vocab != target.shape.vocab:
            raise UserError(
                f"the draft model has {model.shape.vocab} tokens, the model {target.shape.vocab}: use equal tokenizers"
            )
        self.model, self.length = model, length
        self.reserve(1, 64)

    def reserve(self, slots: int, positions: int) -> None:
        """Make room for the slots of a generator; memory is taken as they fill."""
        self.runner = make_runner(self.model, slots, positions + self.length + 1)
        self.held: dict[int, list[int]] = {}

    def propose(self, slot: int, context: list[int], sampling: Sampling) -> Draft:
        held = self.held.get(slot, [])
        shared = next(
            (i for i, (a, b) in enumerate(zip(held, context, strict=False)) if a != b), min(len(held), len(context))
        )
        if not self.runner.reuses_prefixes:
            shared = 0
        logits_1V = self.runner.prefill([(slot, context, min(shared, len(context) - 1))])
        self.runner.select([slot])
        settings = SamplingBatch.of([sampling], logits_1V.device)
        tokens, probabilities = [], []
        for i in range(self.length):
            probabilities.append(settings.filter(logits_1V.double()).softmax(dim=-1)[0])
            token_1 = settings.draw(logits_1V, self.runner.next_positions())
            tokens.append(int(token_1))
            if i + 1 < self.length:
                self.runner.accept(token_1)
                logits_1V = self.runner.step()
        self.held[slot] = context + tokens[:-1]
        return Draft(tokens, None if sampling.temperature == 0 else torch.stack(probabilities))


def verify(draft: Draft, logits_TV: Tensor, sampling: Sampling, position: int) -> list[int]:
    """The tokens that the model accepts of a draft, and one more of its own. Row i of the logits follows i guesses; the
    first new token stands at `position`."""
    if sampling.penalizes:
        raise UserError("speculative decoding has no penalties: remove them or the draft")
    count, device = len(draft.tokens), logits_TV.device
    if sampling.temperature == 0:
        choices = logits_TV[: count + 1].argmax(dim=-1).tolist()
        agreed = next((i for i in range(count) if choices[i] != draft.tokens[i]), count)
        return choices[: agreed + 1]
    settings = SamplingBatch.of([sampling] * (count + 1), device)
    p_TV = settings.filter(logits_TV[: count + 1].double()).softmax(dim=-1)
    positions = torch.arange(position, position + count + 1, device=device)
    chances = uniform(settings.seed_B, positions, 1, _ACCEPT)[:, 0].tolist()
    new: list[int] = []
    for i, token in enumerate(draft.tokens):
        q_V = torch.zeros_like(p_TV[i]) if draft.probabilities is None else draft.probabilities[i]
        if draft.probabilities is None:
            q_V[token] = 1.0
        if chances[i] < float(p_TV[i, token] / q_V[token]):
            new.append(token)
            continue
        return [*new, _draw((p_TV[i] - q_V).clamp(min=0), settings, positions, i)]
    return [*new, _draw(p_TV[count], settings, positions, count)]


def _draw(weights_V: Tensor, settings: SamplingBatch, positions: Tensor, i: int) -> int:
    """One token with these weights, which need not add up to 1."""
    sums_V = weights_V.cumsum(dim=0)
    at = uniform(settings.seed_B[i : i + 1], positions[i : i + 1], 1, _RESIDUAL)[0, 0] * sums_V[-1]
    return int(torch.searchsorted(sums_V, at, right=True).clamp(max=len(weights_V) - 1))
