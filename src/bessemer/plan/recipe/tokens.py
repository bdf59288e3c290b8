"""How large a model and how much text: Chinchilla's law with its corrected fit, over-training, and repeated data.

L(N, D) = E + A / N^alpha + B / D^beta. The fit printed in 2022 as approach 3 asks for 93 tokens a parameter at
Chinchilla's own budget; the replication of 2024 found the mistake, and its constants restore about 20.

How many tokens a vocabulary should have: larger models deserve larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bessemer.errors import UserError
from bessemer.plan.recipe.fine_tuning import Basis, RecipeAnswer
from bessemer.spec.published import best_vocabulary_parameters, worth_of_epochs
from bessemer.spec.quantity import human_count

# Besiroglu et al. 2024 (arXiv 2404.10102), the corrected fit of Hoffmann et al. 2022, approach 3.
A, B, E, ALPHA, BETA = 482.01, 2085.43, 1.8172, 0.3478, 0.3658
FITTED = "Besiroglu et al. 2024, Chinchilla's law refitted"
BALANCE = (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA))  # G of the paper
FITTED_COMPUTE = (1e18, 6e23)  # FLOPs of the smallest runs of the fit, and of Chinchilla itself
FREE_EPOCHS = 4.0  # "negligible changes to loss compared to having unique data" up to here
REPEATED = "Muennighoff et al. 2023, scaling data-constrained models"
SERVED = "Sardana et al. 2024, beyond Chinchilla-optimal; " + FITTED


@dataclass(frozen=True)
class Allocation:
    """A model and its training: parameters, tokens, the FLOPs of training, and the loss the law predicts.

    The loss is that of Chinchilla's data and tokenizer: its differences carry over to others, its value does not.
    """

    parameters: float
    tokens: float
    loss: float

    @property
    def compute(self) -> float:
        return 6 * self.parameters * self.tokens

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
    """Tokens with which no other size would have been better for the same compute."""
    _positive("parameters", parameters)
    tokens = optimal_tokens(parameters)
    ratio = tokens / parameters
    reason = f"{ratio:.0f} tokens for each of {human_count(parameters)} parameters: {6 * parameters * tokens:.2g} FLOPs"
    return RecipeAnswer(tokens, reason, FITTED, _basis(6 * parameters * tokens))


def model_for_compute(compute: float, served_tokens: float = 0.0) -> RecipeAnswer[Allocation]:
    """The best model that `compute` FLOPs train, and with `served_tokens` train and serve (2 N FLOPs a token)."""
    _positive("compute", compute)
    if served_tokens < 0:
        raise UserError(f"served tokens: {served_tokens:g} is negative: write 0 or more")
    if not served_tokens:
        parameters = optimal_parameters(compute)
        found = _allocation(parameters, compute / 6 / parameters)
        reason = f"{compute:.2g} FLOPs: {found.tokens_per_parameter:.0f} tokens a parameter leave the lowest loss"
        return RecipeAnswer(found, reason, FITTED, _basis(compute))

    def loss(parameters: float) -> float:
        left = (compute - 2 * parameters * served_tokens) / (6 * parameters)
        return predicted_loss(parameters, left) if left > 0 else math.inf

    largest = compute / (2 * served_tokens)  # nothing would be left for training
    if largest < 1e6:
        raise UserError(
            f"served tokens: {human_count(served_tokens)} leave nothing of {compute:.2g} FLOPs for training even a "
            "model "
            "of 1M parameters: write fewer, or more compute"
        )
    parameters = _lowest(loss, 1e3, min(largest, optimal_parameters(compute)))
    found = _allocation(parameters, (compute - 2 * parameters * served_tokens) / (6 * parameters))
    reason = (
        f"{compute:.2g} FLOPs for training and for {human_count(served_tokens)} served tokens: a smaller model on "
        f"{found.tokens_per_parameter:.0f} tokens a parameter"
    )
    return RecipeAnswer(found, reason, SERVED, _basis(found.compute, found.tokens_per_parameter))


def cheapest_for_loss(loss: float, served_tokens: float) -> RecipeAnswer[Allocation]:
    """The model of a given loss whose training and serving together cost the fewest FLOPs."""
    if not loss > E:
        raise UserError(f"loss {loss:g}: the law's floor is {E:g}, which no model reaches: write more than that")

    def compute(parameters: float) -> float:
        tokens = _tokens_for(loss, parameters)
        return 6 * parameters * tokens + 2 * parameters * served_tokens

    least = (A / (loss - E)) ** (1 / ALPHA)  # a model this small would need endless text
    parameters = _lowest(compute, least * 1.0001, least * 1e6)
    found = _allocation(parameters, _tokens_for(loss, parameters))
    reason = (
        f"for a loss of {loss:.3f} and {human_count(served_tokens)} served tokens training and serving cost "
        f"{compute(parameters):.2g} FLOPs; {found.tokens_per_parameter:.0f} tokens a parameter"
    )
    return RecipeAnswer(found, reason, SERVED, _basis(found.compute, found.tokens_per_parameter))


def overtraining(parameters: float, tokens: float) -> float:
    """How many times the compute-optimal tokens a run reads: 1 is Chinchilla's, below 1 is under-trained."""
    return tokens / optimal_tokens(parameters)


def compute_overhead(parameters: float, tokens: float) -> float:
    """Extra compute, as a share, against the compute-optimal run that reaches the same predicted loss."""
    loss = predicted_loss(parameters, tokens)
    low, high = 1e12, 1e32
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        best = optimal_parameters(middle)
        low, high = (middle, high) if predicted_loss(best, middle / 6 / best) > loss else (low, middle)
    return 6 * parameters * tokens / high - 1


def effective_tokens(unique: float, read: float) -> float:
    """What reading `read` tokens of `unique` ones is worth in fresh tokens."""
    return unique * worth_of_epochs(read / unique)


def tokens_with_data(parameters: float, unique: float) -> RecipeAnswer[float]:
    """Tokens to read when only `unique` are there: the optimum, by repeating up to where repeats still teach."""
    _positive("unique tokens", unique)
    wanted = optimal_tokens(parameters)
    if wanted <= unique:
        reason = f"{human_count(wanted)} are optimal and {human_count(unique)} are there: nothing is read twice"
        return RecipeAnswer(wanted, reason, FITTED, _basis(6 * parameters * wanted))
    read = min(wanted, FREE_EPOCHS * unique)
    epochs, worth = read / unique, effective_tokens(unique, read)
    reason = f"{epochs:.1f} passes over {human_count(unique)} tokens are worth {human_count(worth)} fresh ones"
    if read < wanted:
        beyond = effective_tokens(unique, wanted)
        reason += (
            f"; the optimum of {human_count(wanted)} would be {wanted / unique:.0f} passes, worth "
            f"{human_count(beyond)}: find more text, or take a smaller model"
        )
    return RecipeAnswer(read, reason, REPEATED, "empirical at this scale")


def model_for_data(unique: float) -> RecipeAnswer[Allocation]:
    """The model that four passes over all the text make compute-optimal."""
    _positive("unique tokens", unique)
    worth = effective_tokens(unique, FREE_EPOCHS * unique)
    low, high = 1e3, 1e16
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if optimal_tokens(middle) < worth else (low, middle)
    found = _allocation(low, FREE_EPOCHS * unique)
    reason = f"four passes over {human_count(unique)} tokens are worth {human_count(worth)} fresh ones"
    return RecipeAnswer(found, reason, f"{REPEATED}; {FITTED}", "empirical at this scale")


def _allocation(parameters: float, tokens: float) -> Allocation:
    return Allocation(parameters, tokens, predicted_loss(parameters, tokens))


def _tokens_for(loss: float, parameters: float) -> float:
    left = loss - E - A / parameters**ALPHA
    return (B / left) ** (1 / BETA) if left > 0 else math.inf


def _lowest(cost: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one valley is lowest, by golden section on the logarithm."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = math.log(low), math.log(high)
    while right - left > 1e-6:
        first, second = right - ratio * (right - left), left + ratio * (right - left)
        if cost(math.exp(first)) > cost(math.exp(second)):
            left = first
        else:
            right = second
    return math.exp((left + right) / 2)


def _basis(compute: float, tokens_per_parameter: float = 20.0) -> Basis:
    """Established where the law was fitted; the loss of heavy over-training was tried up to 10,000 tokens a parameter
    (Sardana et al.), with other constants."""
    inside = FITTED_COMPUTE[0] <= compute <= FITTED_COMPUTE[1]
    if inside and tokens_per_parameter <= 100:
        return "established"
    near = FITTED_COMPUTE[0] / 100 <= compute <= FITTED_COMPUTE[1] * 100
    return "empirical at this scale" if near and tokens_per_parameter <= 10_000 else "open question"


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise UserError(f"{name}: {value:g} is no amount: write a number above 0, such as 7e9")


TAO = "Tao et al. 2024, scaling laws with vocabulary"
LEAST, MOST = 512, 262_144  # of bytes and merges; the largest in common use (Gemma 3)
MULTIPLE = 128  # matrices of other heights are slower
MANY_LANGUAGES = 128_000  # Llama 3, Qwen: below it scripts other than Latin fall apart into bytes


def vocabulary(
    parameters: float, width: float | None = None, corpus_bytes: float | None = None, languages: int = 1
) -> RecipeAnswer[int]:
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
    return RecipeAnswer(value, reason, source, basis)


def _usual_width(parameters: float) -> float:
    """Roughly: 12 L d^2 parameters with a width of 100 layers' worth."""
    return max(64.0, (parameters * 100 / 12) ** (1 / 3))
