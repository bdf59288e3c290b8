"""Settings of fine-tuning, preference training and RL by size, from released recipes.

Sources: Tulu 3 (Lambert et al. 2024, tables of 8B and 70B), the papers of DPO, SimPO, KTO and GRPO, and the defaults
that TRL and OpenRLHF ship. Rates are for full training; LoRA takes ten times as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.recipe.answer import Answer

TULU = "Tulu 3 2024, released settings of 8B and 70B"
# (parameters, rate)
_SFT_RATES = ((1e9, 1e-5), (8e9, 5e-6), (70e9, 2e-6))
_DPO_RATES = ((1e9, 1e-6), (8e9, 5e-7), (70e9, 2e-7))
LORA_FACTOR = 10.0  # Schulman et al. 2025, LoRA without regret


@dataclass(frozen=True)
class Tuning:
    """An objective and its settings, by name."""

    objective: str
    settings: dict[str, Any]


def sft(parameters: float, lora: bool = False) -> Answer[Tuning]:
    """Supervised fine-tuning on demonstrations."""
    settings = {
        "learning_rate": _rate(_SFT_RATES, parameters, lora), "epochs": 2, "batch_rows": 128, "warmup": 0.03,
        "weight_decay": 0.0, "schedule": "linear", "loss": "sum over tokens",
    }  # fmt: skip
    reason = "two epochs in batches of 128; the loss is summed over tokens, so that short answers do not weigh more"
    return Answer(Tuning("sft", settings), reason, TULU, _basis(parameters))


def dpo(parameters: float, lora: bool = False) -> Answer[Tuning]:
    """Direct preference optimisation on pairs, after SFT."""
    settings = {
        "beta": 0.1, "learning_rate": _rate(_DPO_RATES, parameters, lora), "epochs": 1, "batch_rows": 128,
        "warmup": 0.1, "reference": "the SFT model", "loss": "sigmoid",
    }  # fmt: skip
    reason = (
        "beta 0.1 holds it near the SFT model; lower drifts and picks up what the pairs share by accident, above 0.5 "
        "little changes. Length-normalised, beta is 5"
    )
    return Answer(Tuning("dpo", settings), reason, f"Rafailov et al. 2023; {TULU}", _basis(parameters))


def simpo(parameters: float, lora: bool = False) -> Answer[Tuning]:
    """Pairs without a reference model: length-normalised with a margin; still after SFT."""
    settings = {"beta": 2.5, "gamma": 1.375, "learning_rate": _rate(_DPO_RATES, parameters, lora), "epochs": 1,
                "batch_rows": 128, "nll_weight": 0.0}  # fmt: skip
    reason = "no second model in memory; the margin is gamma / beta on the mean log-probability of a token"
    return Answer(Tuning("simpo", settings), reason, "Meng et al. 2024, SimPO", "empirical at this scale")


def kto(parameters: float, desirable: int, undesirable: int, lora: bool = False) -> Answer[Tuning]:
    """Single answers judged good or bad. The rarer kind weighs more, so that w_d n_d / (w_u n_u) lies in [1, 4/3]."""
    if desirable < 1 or undesirable < 1:
        raise UserError(f"KTO: {desirable} desirable and {undesirable} undesirable rows: it needs some of both")
    ratio = 7 / 6  # the middle of [1, 4/3]
    balance = desirable / undesirable
    weights = (ratio / balance, 1.0) if balance < ratio else (1.0, balance / ratio)
    settings = {
        "beta": 0.1, "desirable_weight": round(weights[0], 3), "undesirable_weight": round(weights[1], 3),
        "learning_rate": _rate(_DPO_RATES, parameters, lora), "epochs": 1, "batch_rows": 32,
    }  # fmt: skip
    reason = f"{desirable:,} good and {undesirable:,} bad rows: weights bring their ratio to {ratio:.2f}"
    return Answer(Tuning("kto", settings), reason, "Ethayarajh et al. 2024, KTO, equation 8", _basis(parameters))


def grpo(parameters: float, verifiable: bool = True, lora: bool = False) -> Answer[Tuning]:
    """RL with groups of answers. A learned reward needs the KL term; a checkable one does with less or none."""
    settings = {
        "learning_rate": 1e-6 * (LORA_FACTOR if lora else 1.0), "group": 8, "clip": 0.2,
        "kl": 0.001 if verifiable else 0.05, "temperature": 1.0, "loss": "sum over tokens of all answers",
        "prompts": 128,
    }  # fmt: skip
    if verifiable:
        reason = "answers are checked, so that the reward cannot be talked round: a small KL only keeps the language"
        source, sure = "Shao et al. 2024, GRPO; Guo et al. 2025, DeepSeek-R1 (KL 0.001)", _basis(parameters)
        return Answer(Tuning("grpo", settings), reason, source, sure)
    reason = "a learned reward is hacked without a KL term: 0.05, and stop when KL passes 2 or lengths drift"
    return Answer(Tuning("grpo", settings), reason, "Gao et al. 2023, reward over-optimisation; TRL's defaults",
                  "empirical at this scale")  # fmt: skip


def ppo(lora: bool = False) -> Answer[Tuning]:
    """RL with a value model, against a learned reward."""
    settings = {
        "learning_rate": 3e-6 * (LORA_FACTOR if lora else 1.0), "value_rate": 9e-6, "kl": 0.05, "clip": 0.2,
        "value_clip": 0.2, "value_weight": 0.1, "gamma": 1.0, "lambda": 0.95, "epochs_per_batch": 4,
        "whiten_advantages": True,
    }  # fmt: skip
    reason = "four models in memory: policy, reference, reward and value; the KL term holds it near the reference"
    return Answer(Tuning("ppo", settings), reason, "Ouyang et al. 2022; TRL's and OpenRLHF's defaults",
                  "empirical at this scale")  # fmt: skip


def _rate(points: tuple[tuple[float, float], ...], parameters: float, lora: bool) -> float:
    """Interpolated on logarithms between released sizes, and flat beyond them."""
    if not parameters > 0:
        raise UserError(f"parameters: {parameters:g} is no size: write a number above 0, such as 8e9")
    value = points[-1][1] if parameters >= points[-1][0] else points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if left <= parameters <= right:
            value = low * (high / low) ** (math.log(parameters / left) / math.log(right / left))
    return float(f"{value * (LORA_FACTOR if lora else 1.0):.2g}")


def _basis(parameters: float) -> Any:
    return "empirical at this scale" if 1e9 <= parameters <= 100e9 else "open question"
