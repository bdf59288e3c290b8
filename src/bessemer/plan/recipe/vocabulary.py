"""How many tokens a vocabulary should have: larger models deserve larger ones."""

from __future__ import annotations

import math

from bessemer.errors import UserError
from bessemer.plan.recipe.answer import Answer, Basis
from bessemer.spec.published import best_vocabulary_parameters
from bessemer.spec.quantity import human_count

TAO = "Tao et al. 2024, scaling laws with vocabulary"
LEAST, MOST = 512, 262_144  # of bytes and merges; the largest in common use (Gemma 3)
MULTIPLE = 128  # matrices of other heights are slower
MANY_LANGUAGES = 128_000  # Llama 3, Qwen: below it scripts other than Latin fall apart into bytes


def vocabulary(
    parameters: float, width: float | None = None, corpus_bytes: float | None = None, languages: int = 1
) -> Answer[int]:
    """Tokens of a vocabulary for a model of so many parameters; less text or a few languages more change it."""
    if not parameters > 0:
        raise UserError(f"parameters: {parameters:g} is no size: write a number above 0")
    width = width or _usual_width(parameters)
    found = best_vocabulary_parameters(parameters) / width
    reason = (
        f"{human_count(found * width)} parameters of vocabulary beside {human_count(parameters)}, width {width:.0f}"
    )
    basis: Basis = "empirical at this scale" if 33e6 <= parameters <= 70e9 else "open question"
    source = TAO
    if languages > 5 and found < MANY_LANGUAGES and parameters >= 1e9:
        found, source = MANY_LANGUAGES, f"{TAO}; Llama 3 2024"
        reason = f"{languages} languages: below {MANY_LANGUAGES:,} other scripts fall apart into bytes"
    if corpus_bytes is not None and found * 16_000 > corpus_bytes:
        found = corpus_bytes / 16_000
        reason = f"{human_count(corpus_bytes)} bytes of text: 16,000 for each token to learn from"
        source, basis = "rule", "open question"
    value = max(LEAST, min(MOST, math.ceil(found / MULTIPLE) * MULTIPLE))
    return Answer(value, reason, source, basis)


def _usual_width(parameters: float) -> float:
    """Roughly: 12 L d^2 parameters with a width of 100 layers' worth."""
    return max(64.0, (parameters * 100 / 12) ** (1 / 3))
