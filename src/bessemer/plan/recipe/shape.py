"""The shape of a model for a size and a context: heads, KV heads, positions, width and depth, counted to within 2 %.

The choices follow the models that others trained and measured; within them the one nearest to the size is taken, and
`spec/shape.py`, from which models are built, says what it comes to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from bessemer.errors import UserError
from bessemer.plan.recipe.fine_tuning import RecipeAnswer
from bessemer.plan.recipe.tokens import vocabulary
from bessemer.spec.published import rope_base_needed, rope_reach
from bessemer.spec.quantity import human_bytes, human_count
from bessemer.spec.shape import ModelShape, Rope, cache_bytes

TOLERANCE = 0.02
SMALLEST, LARGEST = 1e6, 2e12
LONGEST = 1 << 24  # tokens of context
# (parameters, width over layers): GPT-3 Small 64, Llama 3.2 1B 128, Llama 3.2 3B 110, Llama 3 8B 128, 70B 102,
# 405B 130. Between 50 and 150 the loss hardly moves (Kaplan et al. 2020, figure 5).
_ASPECTS = ((10e6, 48.0), (125e6, 64.0), (1.2e9, 128.0), (3e9, 110.0), (8e9, 128.0), (70e9, 102.0), (405e9, 130.0))
_FFN = 3.25  # width of SwiGLU's inner part: 8/3 (Llama 2) to 4 (Llama 3.2 1B); Llama 3 has 3.5
_HEADS = ((6e9, 8), (300e6, 4), (50e6, 2))  # (parameters, multiple of heads)
_TIED_BELOW = 4e9  # Llama 3.2 1B and 3B tie their embeddings, 8B does not
_SHORT = 8192  # first training of long-context models: Llama 3 405B reads 8K for 95 % of its tokens
_BASES = (10_000.0, 500_000.0, 1_000_000.0)  # Llama 2; Llama 3; Qwen2 and Code Llama
LLAMA_3 = "Llama 3 2024, table 3 and section 3.4.2"
XU = "Xu et al. 2024, base of RoPE bounds context length"


@dataclass(frozen=True)
class Design:
    """A shape, and each of its choices with its reason by the key of the spec."""

    shape: ModelShape
    context: int
    answers: dict[str, RecipeAnswer[object]]

    @property
    def parameters(self) -> int:
        return self.shape.parameters


def design(parameters: float, context: int = 4096, vocab: int | None = None) -> Design:
    """A decoder of about `parameters` parameters, embeddings among them, for `context` tokens."""
    if not SMALLEST <= parameters <= LARGEST:
        raise UserError(
            f"parameters: {human_count(parameters)} is outside what shapes are known for: write 1M to 2T, such as 3B"
        )
    if not 2 <= context <= LONGEST:
        raise UserError(f"context: {context:,} tokens: write 2 to {LONGEST:,}, such as 8192")
    wanted_vocab = vocabulary(parameters) if vocab is None else None
    words = wanted_vocab.value if wanted_vocab else int(vocab or 0)
    if words < 1:
        raise UserError(f"vocabulary: {words} tokens: write at least 1, such as 32000")
    rope, positions = _positions(context)
    shape = _nearest(parameters, words, rope)
    off = shape.parameters / parameters - 1
    if abs(off) > TOLERANCE:
        raise UserError(
            f"parameters: {human_count(parameters)} cannot be met within 2 % with a vocabulary of {words:,}, whose "
            f"embedding alone has {human_count(words * shape.width)}: write a smaller vocabulary, or "
            f"{human_count(shape.parameters)} parameters"
        )
    answers: dict[str, RecipeAnswer[object]] = {
        "model.width": RecipeAnswer(
            shape.width,
            f"with {shape.layers} layers {shape.parameters:,} parameters, {off:+.2%} of what was asked",
            "counted by spec/shape.py",
            "established",
        ),
        "model.layers": RecipeAnswer(
            shape.layers,
            f"width over layers {shape.width / shape.layers:.0f}; from 50 to 150 the loss hardly moves",
            "Kaplan et al. 2020, figure 5; Llama 3 2024",
            "established",
        ),
        "model.heads": RecipeAnswer(
            shape.heads, f"heads of {shape.head_dim}, as wide as attention kernels are fastest for", LLAMA_3,
            "established",
        ),
        "model.kv_heads": _kv_answer(shape, context),
        "model.ffn": RecipeAnswer(
            shape.ffn, f"{shape.ffn / shape.width:.2f} of the width, a multiple of {_step(parameters)}",
            "Shazeer 2020, SwiGLU; Llama 2 and 3", "established",
        ),
        "model.tied": RecipeAnswer(
            shape.tied,
            f"the embedding is {words * shape.width / shape.parameters:.0%} of the parameters",
            "Llama 3.2 2024: 1B and 3B tied, 8B not", "empirical at this scale",
        ),
        "model.rope": positions,
    }  # fmt: skip
    if wanted_vocab:
        answers["tokenizer.vocab"] = RecipeAnswer(words, wanted_vocab.reason, wanted_vocab.source, wanted_vocab.basis)
    return Design(shape, context, answers)


def _nearest(parameters: float, vocab: int, rope: Rope) -> ModelShape:
    """Of widths near the usual one, the depth and inner width that come nearest to the size and to what is usual."""
    head_dim = 128 if parameters >= 1.5e9 else 64
    step, aspect = _step(parameters), _aspect(parameters)
    tied = parameters < _TIED_BELOW
    # Heads that tensor parallel divides, and that a few KV heads serve.
    unit = head_dim * next((heads for least, heads in _HEADS if parameters >= least), 1)
    even = 4 if parameters >= 6e9 else 2 if parameters >= 100e6 else 1  # layers that pipeline stages divide
    found: list[tuple[float, ModelShape]] = []
    guess = (parameters * aspect / (2.5 + 3 * _FFN)) ** (1 / 3)  # attention with few KV heads and the feed-forward part
    for width in range(unit, int(guess * 2) + 2 * unit, unit):
        if width < guess / 2.5 and width > unit:
            continue
        heads = width // head_dim
        kv_heads = _kv_heads(heads)
        layer = 2 * width * (heads + kv_heads) * head_dim + 2 * width  # attention and two norms
        for layers in range(even, int(width / aspect * 2) + even + 2, even):
            if layers < width / aspect / 2.2 and layers > even:
                continue
            rest = vocab * width * (1 if tied else 2) + width + layers * layer
            ffn = round((parameters - rest) / (3 * width * layers) / step) * step
            if ffn < step:
                continue
            off = abs((rest + 3 * width * layers * ffn) / parameters - 1)
            odd = abs(math.log(width / layers / aspect)) + 2 * abs(math.log(ffn / width / _FFN)) + 6 * off
            shape = ModelShape(vocab, width, layers, heads, kv_heads, head_dim, ffn, tied=tied, rope=rope)
            found.append((odd + (100 if off > TOLERANCE else 0), shape))
    if not found:  # the embedding alone is too large: the smallest body, for the message
        return ModelShape(vocab, unit, 1, 1, 1, head_dim, step, tied=tied, rope=rope)
    return min(found, key=lambda item: item[0])[1]


def _positions(context: int) -> tuple[Rope, RecipeAnswer[object]]:
    """The rotary base for the context. Beyond 8K the first training stays at 8K, and the base already suits the end."""
    needed = rope_base_needed(context)
    # Bases in use lie up to three times below the bound and work: Llama 2 has 1e4 at 4K.
    theta = next((base for base in _BASES if base * 3.3 >= needed), 10.0 ** math.ceil(math.log10(needed)))
    reason = f"rotary base {theta:g}: {context:,} tokens ask for at least {needed:.2g}"
    if context > _SHORT:
        reason += (
            f"; train at {_SHORT:,} tokens first and at {context:,} for the last 5 % of the tokens: attention over the "
            "whole "
            "context from the start multiplies the cost"
        )
    value = {"theta": theta, "reach": rope_reach(theta), "first_context": min(context, _SHORT)}
    return Rope(theta=theta), RecipeAnswer(value, reason, f"{XU}; {LLAMA_3}", "empirical at this scale")


def _kv_answer(shape: ModelShape, context: int) -> RecipeAnswer[object]:
    kept = cache_bytes(shape, context)
    full = kept * shape.heads // shape.kv_heads
    reason = (
        f"{human_bytes(kept)} of cache for {context:,} tokens instead of {human_bytes(full)} with a KV head for each "
        "head"
    )
    return RecipeAnswer(shape.kv_heads, reason, "Ainslie et al. 2023, grouped-query attention: 8 groups lose little",
                  "established")  # fmt: skip


def _kv_heads(heads: int) -> int:
    """8 where that divides, else the largest divisor below, so that a cache stays small and tensor parallel divides."""
    if heads <= 2:
        return heads
    return max(divisor for divisor in range(1, min(8, heads // 2) + 1) if heads % divisor == 0)


def _aspect(parameters: float) -> float:
    if parameters <= _ASPECTS[0][0]:
        return _ASPECTS[0][1]
    for (left, low), (right, high) in pairwise(_ASPECTS):
        if parameters <= right:
            return low + (high - low) * math.log(parameters / left) / math.log(right / left)
    return _ASPECTS[-1][1]


def _step(parameters: float) -> int:
    """The inner width is a multiple of this: tensor cores want 64, tensor parallel over 8 more."""
    return 512 if parameters >= 6e9 else 256 if parameters >= 1e9 else 64 if parameters >= 50e6 else 16
