"""Recipes of pre-training: model and tokens for a compute budget, vocabulary, learning rate, batch, warm-up, and the
shape of a model of a given size. Each answer carries its reason, source and basis.

Model and tokens follow Chinchilla's law, L(N, D) = E + A / N^alpha + B / D^beta. Approach 3 of the 2022 paper asks for
93 tokens per parameter at Chinchilla's own budget because of a fitting error; the replication of 2024 corrected it to
about 20. Learning rate and batch are the median of three sources: DeepSeek's compute law, the Step Law in parameters
and tokens, and published runs of that size. If they agree within a factor of two, the answer counts as established.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from bessemer.errors import UserError
from bessemer.plan.decision import Basis, RecipeAnswer
from bessemer.spec import published
from bessemer.spec.published import (
    best_vocabulary_parameters,
    published_batch,
    published_rate,
    rope_base_needed,
    rope_reach,
)
from bessemer.spec.quantity import human_bytes, human_count
from bessemer.spec.shape import ModelShape, Rope, cache_bytes

# Besiroglu et al. 2024 (arXiv 2404.10102), the corrected fit of Hoffmann et al. 2022, approach 3.
A, B, E, ALPHA, BETA = 482.01, 2085.43, 1.8172, 0.3478, 0.3658
FITTED = "Besiroglu et al. 2024, Chinchilla's law refitted"
BALANCE = (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA))  # G of the paper
FITTED_COMPUTE = (1e18, 6e23)  # FLOPs of the smallest runs of the fit, and of Chinchilla itself
TAO = "Tao et al. 2024, scaling laws with vocabulary"
VOCAB_LIMITS = (512, 262_144)  # bytes with some merges; the largest in common use (Gemma 3)
VOCAB_MULTIPLE = 128  # other matrix heights are slower
DEEPSEEK = "DeepSeek LLM 2024"
STEP_LAW = "Li et al. 2025, Step Law"
PUBLISHED = "published runs"
LAWS = f"{DEEPSEEK}; {STEP_LAW}; {published.SOURCE}"
LIMITS_LR = 1e-6, 3e-3  # at 0.9M parameters 3e-3 reached a loss of 2.58, 6e-3 2.67, 1e-2 with twice the batch 3.65
MARIN = "Wen et al. 2025, fantastic pretraining optimizers, refitted to updates of AdamW's size; our runs at 125M"
# By the unit of updates: (rate, at parameters, exponent of the size, limit).
MUON_RATES = {"rms": (4e-3, 125e6, -0.85, 8e-3), "spectral": (0.016, 130e6, -0.62, 0.03)}
WARMUP_STEPS, WARMUP_SHARE = 2000, 0.02
TOLERANCE = 0.02
SIZE_LIMITS = 1e6, 2e12
LONGEST_CONTEXT = 1 << 24  # tokens of context
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
class Allocation:
    """Model size and training tokens, and the loss that the law predicts for Chinchilla's data and tokenizer.
    Differences of losses carry over to other data, absolute values do not."""

    parameters: float
    tokens: float
    loss: float

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters


def predicted_loss(parameters: float, tokens: float) -> float:
    return E + A / parameters**ALPHA + B / tokens**BETA


def optimal_parameters(compute: float) -> float:
    """N* = G (C/6)^(beta / (alpha + beta))."""
    return BALANCE * (compute / 6) ** (BETA / (ALPHA + BETA))


def optimal_tokens(parameters: float) -> float:
    """Tokens of the compute-optimal run whose best model has this many parameters."""
    spent = (parameters / BALANCE) ** ((ALPHA + BETA) / BETA)  # C / 6
    return spent / parameters


def tokens_for_model(parameters: float) -> RecipeAnswer[float]:
    """The tokens for which no other model size would reach a lower loss at the same compute."""
    _check_positive(parameters=parameters)
    tokens = optimal_tokens(parameters)
    ratio = tokens / parameters
    reason = f"{ratio:.0f} tokens for each of {human_count(parameters)} parameters: {6 * parameters * tokens:.2g} FLOPs"
    return RecipeAnswer(tokens, reason, FITTED, _compute_basis(6 * parameters * tokens))


def model_for_compute(compute: float) -> RecipeAnswer[Allocation]:
    """The model with the lowest predicted loss that `compute` FLOPs can train."""
    _check_positive(compute=compute)
    parameters = optimal_parameters(compute)
    tokens = compute / 6 / parameters
    best = Allocation(parameters, tokens, predicted_loss(parameters, tokens))
    reason = f"{compute:.2g} FLOPs: {best.tokens_per_parameter:.0f} tokens a parameter leave the lowest loss"
    return RecipeAnswer(best, reason, FITTED, _compute_basis(compute))


def _compute_basis(compute: float) -> Basis:
    if FITTED_COMPUTE[0] <= compute <= FITTED_COMPUTE[1]:
        return "established"
    near = FITTED_COMPUTE[0] / 100 <= compute <= FITTED_COMPUTE[1] * 100
    return "empirical at this scale" if near else "open question"


def _check_positive(**amounts: float) -> None:
    for name, value in amounts.items():
        if not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name}: {value:g} is no amount: write a number above 0, such as 7e9")


def vocabulary(parameters: float) -> RecipeAnswer[int]:
    """Vocabulary size for a model of this many parameters."""
    _check_positive(parameters=parameters)
    width = max(64.0, (parameters * 100 / 12) ** (1 / 3))  # 12 L d^2 parameters with a width of 100 times the layers
    tokens = best_vocabulary_parameters(parameters) / width
    reason = (
        f"{human_count(tokens * width)} parameters of vocabulary beside {human_count(parameters)}, width {width:.0f}"
    )
    basis: Basis = "empirical at this scale" if 33e6 <= parameters <= 70e9 else "open question"
    value = max(VOCAB_LIMITS[0], min(VOCAB_LIMITS[1], math.ceil(tokens / VOCAB_MULTIPLE) * VOCAB_MULTIPLE))
    return RecipeAnswer(value, reason, TAO, basis)


@dataclass(frozen=True)
class Law:
    """The value that one source gives."""

    name: str
    value: float


def rate_laws(parameters: float, tokens: float) -> tuple[Law, ...]:
    compute = 6 * parameters * tokens
    return (
        Law(DEEPSEEK, 0.3118 * compute**-0.125),
        Law(STEP_LAW, 1.79 * parameters**-0.713 * tokens**0.307),
        Law(PUBLISHED, published_rate(parameters)),
    )


def batch_laws(parameters: float, tokens: float) -> tuple[Law, ...]:
    compute = 6 * parameters * tokens
    return (
        Law(DEEPSEEK, 0.2920 * compute**0.3271),
        Law(STEP_LAW, 0.58 * tokens**0.571),
        Law(PUBLISHED, published_batch(parameters)),
    )


def learning_rate(parameters: float, tokens: float) -> RecipeAnswer[float]:
    """Peak learning rate of AdamW for training from random weights."""
    _check_positive(parameters=parameters, tokens=tokens)
    laws = rate_laws(parameters, tokens)
    median = _median(laws)
    lowest, highest = LIMITS_LR
    value = min(highest, max(lowest, median.value))
    limited = "" if value == median.value else f", kept between {lowest:g} and {highest:g}"
    reason = f"the middle of {_list_laws(laws)}{limited}"
    return RecipeAnswer(float(f"{value:.2g}"), reason, LAWS, _agreement(laws, parameters))


def muon_rate(parameters: float, scale: str) -> RecipeAnswer[float]:
    """Peak learning rate of Muon for training from random weights, in the unit of its updates. The published rates are
    of half a million tokens a batch; smaller ones were not worse here."""
    _check_positive(parameters=parameters)
    largest, size, exponent, highest = MUON_RATES[scale]
    value = min(highest, largest * (parameters / size) ** exponent)
    limited = f", at most {highest:g}" if value == highest else ""
    reason = f"{largest:g} at {human_count(size)} parameters, times the size to the power {exponent:g}{limited}"
    basis: Basis = "empirical at this scale" if 1e8 <= parameters <= 2e9 else "open question"
    return RecipeAnswer(float(f"{value:.2g}"), reason, MARIN, basis)


def batch_tokens(parameters: float, tokens: float) -> RecipeAnswer[int]:
    """Tokens in a batch, at most a hundredth of the run: fewer than 100 steps learn little."""
    _check_positive(parameters=parameters, tokens=tokens)
    laws = batch_laws(parameters, tokens)
    median = _median(laws)
    value = min(median.value, tokens / 100)
    limited = ", at most a hundredth of the run" if value < median.value else ""
    reason = f"the middle of {_list_laws(laws)}{limited}"
    return RecipeAnswer(max(1, round(value)), reason, LAWS, _agreement(laws, parameters))


def rate_for_batch(rate: float, batch: float, other: float) -> RecipeAnswer[float]:
    """The learning rate for another batch: with Adam it scales with the square root of the batch."""
    value = rate * math.sqrt(other / batch)
    reason = f"{rate:g} at {human_count(batch)} tokens, times the root of {other / batch:.3g}"
    basis: Basis = "established" if 1 / 8 <= other / batch <= 8 else "open question"
    return RecipeAnswer(
        value, reason, "Malladi et al. 2022, square-root scaling of Adam; holds below the noise scale", basis
    )


def warmup_steps(steps: int, beta2: float = 0.95) -> RecipeAnswer[int]:
    """2 % of the run, at most 2,000 steps, and at least the steps that the second moment needs to settle."""
    if steps < 1:
        raise UserError(f"steps: {steps} is no run: write at least 1")
    least = math.ceil(2 / (1 - beta2))
    wanted = min(WARMUP_STEPS, max(least, round(WARMUP_SHARE * steps)))
    value = max(1, min(wanted, steps // 10))  # a short run cannot spend more on it
    reason = f"2 % of {steps:,} steps, at most {WARMUP_STEPS:,}, at least 2 / (1 - beta2) = {least}"
    if value < wanted:
        reason += f", here held to a tenth of the run instead of {wanted}"
    source = "Ma and Yarats 2021, untuned warm-up; Llama 2 2023: 2,000 steps"
    return RecipeAnswer(value, reason, source, "established")


def _median(laws: tuple[Law, ...]) -> Law:
    return sorted(laws, key=lambda law: law.value)[len(laws) // 2]


def _list_laws(laws: tuple[Law, ...]) -> str:
    return ", ".join(f"{law.name} {human_count(law.value) if law.value >= 1 else f'{law.value:.1e}'}" for law in laws)


def _agreement(laws: tuple[Law, ...], parameters: float) -> Basis:
    if not published.SMALLEST / 10 <= parameters <= published.LARGEST * 10:
        return "open question"
    values = [law.value for law in laws]
    return "established" if max(values) <= 2 * min(values) else "empirical at this scale"


@dataclass(frozen=True)
class Design:
    """A shape and the reasons of its choices, by spec key."""

    shape: ModelShape
    answers: dict[str, RecipeAnswer[object]]


def design_shape(parameters: float, context: int = 4096, vocab: int | None = None) -> Design:
    """A decoder within 2 % of `parameters` parameters, embeddings included, for `context` tokens.

    The choices follow published models; among those, the shape nearest to the size wins (counted by spec/shape.py).
    """
    if not SIZE_LIMITS[0] <= parameters <= SIZE_LIMITS[1]:
        raise UserError(
            f"parameters: {human_count(parameters)} is outside the sizes with known shapes: write 1M to 2T, such as 3B"
        )
    if not 2 <= context <= LONGEST_CONTEXT:
        raise UserError(f"context: {context:,} tokens: write 2 to {LONGEST_CONTEXT:,}, such as 8192")
    vocab_answer = vocabulary(parameters) if vocab is None else None
    tokens = vocab_answer.value if vocab_answer else int(vocab or 0)
    if tokens < 1:
        raise UserError(f"vocabulary: {tokens} tokens: write at least 1, such as 32000")
    rope, rope_answer = _rope_answer(context)
    shape = _nearest_shape(parameters, tokens, rope)
    off = shape.parameters / parameters - 1
    if abs(off) > TOLERANCE:
        raise UserError(
            f"parameters: {human_count(parameters)} cannot be met within 2 % with a vocabulary of {tokens:,}, whose "
            f"embedding alone has {human_count(tokens * shape.width)}: write a smaller vocabulary, or "
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
            shape.ffn, f"{shape.ffn / shape.width:.2f} of the width, a multiple of {_ffn_multiple(parameters)}",
            "Shazeer 2020, SwiGLU; Llama 2 and 3", "established",
        ),
        "model.tied": RecipeAnswer(
            shape.tied,
            f"the embedding is {tokens * shape.width / shape.parameters:.0%} of the parameters",
            "Llama 3.2 2024: 1B and 3B tied, 8B not", "empirical at this scale",
        ),
        "model.rope": rope_answer,
    }  # fmt: skip
    if vocab_answer:
        answers["tokenizer.vocab"] = RecipeAnswer(tokens, vocab_answer.reason, vocab_answer.source, vocab_answer.basis)
    return Design(shape, answers)


def _nearest_shape(parameters: float, vocab: int, rope: Rope) -> ModelShape:
    """Searches widths, depths and inner widths for the best match of size and usual proportions."""
    head_dim = 128 if parameters >= 1.5e9 else 64
    step, aspect = _ffn_multiple(parameters), _aspect(parameters)
    tied = parameters < _TIED_BELOW
    # A multiple of heads that tensor parallelism can divide and few KV heads can serve.
    unit = head_dim * next((heads for least, heads in _HEADS if parameters >= least), 1)
    layer_multiple = 4 if parameters >= 6e9 else 2 if parameters >= 100e6 else 1  # pipeline stages divide the layers
    candidates: list[tuple[float, ModelShape]] = []
    guess = (parameters * aspect / (2.5 + 3 * _FFN)) ** (1 / 3)  # attention with few KV heads and the feed-forward part
    for width in range(unit, int(guess * 2) + 2 * unit, unit):
        if width < guess / 2.5 and width > unit:
            continue
        heads = width // head_dim
        kv_heads = _kv_heads(heads)
        layer = 2 * width * (heads + kv_heads) * head_dim + 2 * width  # attention and two norms
        for layers in range(layer_multiple, int(width / aspect * 2) + layer_multiple + 2, layer_multiple):
            if layers < width / aspect / 2.2 and layers > layer_multiple:
                continue
            rest = vocab * width * (1 if tied else 2) + width + layers * layer
            ffn = round((parameters - rest) / (3 * width * layers) / step) * step
            if ffn < step:
                continue
            off = abs((rest + 3 * width * layers * ffn) / parameters - 1)
            penalty = abs(math.log(width / layers / aspect)) + 2 * abs(math.log(ffn / width / _FFN)) + 6 * off
            shape = ModelShape(vocab, width, layers, heads, kv_heads, head_dim, ffn, tied=tied, rope=rope)
            candidates.append((penalty + (100 if off > TOLERANCE else 0), shape))
    if not candidates:  # the embedding alone is too large: the smallest body, for the error message
        return ModelShape(vocab, unit, 1, 1, 1, head_dim, step, tied=tied, rope=rope)
    return min(candidates, key=lambda item: item[0])[1]


def _rope_answer(context: int) -> tuple[Rope, RecipeAnswer[object]]:
    """The rotary base for the context. Above 8K, training starts at 8K with the base of the final context."""
    needed = rope_base_needed(context)
    # Bases up to three times below the bound work in practice: Llama 2 has 1e4 at 4K.
    theta = next((base for base in _BASES if base * 3.3 >= needed), 10.0 ** math.ceil(math.log10(needed)))
    reason = f"rotary base {theta:g}: {context:,} tokens ask for at least {needed:.2g}"
    if context > _SHORT:
        reason += (
            f"; train at {_SHORT:,} tokens first and at {context:,} for the last 5 % of the tokens: attention over the "
            "full context from the start multiplies the cost"
        )
    value = {"theta": theta, "reach": rope_reach(theta), "first_context": min(context, _SHORT)}
    return Rope(theta=theta), RecipeAnswer(value, reason, f"{XU}; {LLAMA_3}", "empirical at this scale")


def _kv_answer(shape: ModelShape, context: int) -> RecipeAnswer[object]:
    cache = cache_bytes(shape, context)
    full = cache * shape.heads // shape.kv_heads
    reason = (
        f"{human_bytes(cache)} of cache for {context:,} tokens instead of {human_bytes(full)} with a KV head for each "
        "head"
    )
    return RecipeAnswer(shape.kv_heads, reason, "Ainslie et al. 2023, grouped-query attention: 8 groups lose little",
                  "established")  # fmt: skip


def _kv_heads(heads: int) -> int:
    """8 if that divides the heads, else the largest divisor below: a small cache, divisible by tensor parallelism."""
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


def _ffn_multiple(parameters: float) -> int:
    """The inner width is a multiple of this: 64 for tensor cores, more for tensor parallelism over 8."""
    return 512 if parameters >= 6e9 else 256 if parameters >= 1e9 else 64 if parameters >= 50e6 else 16
