"""Text from a model: `Generator` serves many requests at once, `generate` one."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from bessemer.model.generate.engine import Completion, Constraint, Generator, Request
from bessemer.model.generate.sampling import Sampling, filter_logits
from bessemer.model.generate.speculate import ModelDrafter, NgramDrafter
from bessemer.model.transformer import Decoder

__all__ = [
    "Completion", "Constraint", "Generator", "ModelDrafter", "NgramDrafter", "Request", "Sampling", "filter_logits",
    "generate",
]  # fmt: skip


def generate(
    model: Decoder, prompt: list[int], max_tokens: int, stop_ids: Collection[int], sampling: Sampling
) -> Iterator[int]:
    """New tokens of one prompt, one by one, until a stop id or `max_tokens`."""
    generator = Generator(model, slots=1, max_length=len(prompt) + max(max_tokens, 1))
    (completion,) = generator.submit(Request(prompt, max_tokens, sampling, frozenset(stop_ids)))
    count = 0
    while completion.reason is None or count < len(completion.tokens):
        if completion.reason is None:
            generator.step()
        yield from completion.tokens[count:]
        count = len(completion.tokens)
