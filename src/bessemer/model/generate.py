"""Sampling from a model with temperature, top-k, top-p, a seed and a key-value cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bessemer.errors import UserError
from bessemer.model.encoder_decoder import EncoderDecoder
from bessemer.model.transformer import Decoder


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. Temperature 0 is greedy."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature {self.temperature} is negative: write 0 for greedy, or about 0.8")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p} must be above 0 and at most 1")
        if self.top_k < 0:
            raise UserError(f"top-k {self.top_k} is negative: write 0 for no limit")


def filter_logits(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Logits over the temperature, -inf outside top-k and top-p. Top-p keeps the smallest set that reaches p."""
    logits_V = logits_V.float() / sampling.temperature
    if 0 < sampling.top_k < logits_V.numel():
        threshold = torch.topk(logits_V, sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < threshold, float("-inf"))
    if sampling.top_p < 1:
        ordered, index = torch.sort(logits_V, descending=True)
        probs = torch.softmax(ordered, dim=-1)
        outside = torch.cumsum(probs, dim=-1) - probs >= sampling.top_p
        logits_V = logits_V.masked_fill(torch.zeros_like(outside).scatter(0, index, outside), float("-inf"))
    return logits_V


@torch.inference_mode()
def generate(
    model: Decoder, prompt: list[int], max_tokens: int, ends: Collection[int], sampling: Sampling
) -> Iterator[int]:
    """Yields new tokens until one of `ends` or `max_tokens`. The prompt needs at least one token."""
    device = model.head_weight.device
    generator = torch.Generator(device="cpu").manual_seed(sampling.seed)
    if isinstance(model, EncoderDecoder):  # it encodes the prompt; T5's decoder starts from its padding, 0
        caches, prompt = model.new_caches(torch.tensor([prompt], device=device)), [0]
    else:
        caches = model.new_caches()
    tokens, history, rope = torch.tensor([prompt], device=device), list(prompt), model.shape.rope
    for _ in range(max_tokens):
        if rope.scaling == "longrope" and caches[0].length == rope.original:
            # Beyond the original context LongRoPE uses other angles: recompute the cached keys.
            caches, tokens = model.new_caches(), torch.tensor([history], device=device)
        hidden_BTW = model(tokens, caches=caches)
        logits_V = model.logits(hidden_BTW[:, -1])[0]
        if sampling.temperature == 0:
            token = int(logits_V.argmax())
        else:
            probs = torch.softmax(filter_logits(logits_V, sampling), dim=-1).cpu()
            token = int(torch.multinomial(probs, 1, generator=generator))
        if token in ends:
            return
        history.append(token)
        yield token
        tokens = torch.tensor([[token]], device=device)
