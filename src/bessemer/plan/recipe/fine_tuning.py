"""Recipes of fine-tuning: which objective fits the data, full training, LoRA or QLoRA by memory, LoRA settings, and the
settings of SFT, DPO, SimPO, KTO, GRPO and PPO by model size.

Sources: Tulu 3 (Lambert et al. 2024, tables of 8B and 70B), the papers of the objectives, and the defaults of TRL and
OpenRLHF. Learning rates are for full training; LoRA takes ten times as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

from bessemer.errors import UserError
from bessemer.plan.decision import Basis, RecipeAnswer
from bessemer.spec.adapter import MODULES, NF4_BYTES, lora_parameters
from bessemer.spec.optimizer import MemorySpec, OptimizerSpec, optimizer_bytes
from bessemer.spec.quantity import human_bytes, human_count
from bessemer.spec.shape import ModelShape

Use = Literal["style", "instructions", "domain", "rl"]
# Rank by use. RL learns about one bit per episode, so that even rank 1 matched full training.
_USUAL_RANK: dict[Use, int] = {"style": 16, "instructions": 32, "domain": 64, "rl": 8}
SCHULMAN = "Schulman et al. 2025, LoRA without regret"
BITS_PER_PARAMETER = 2.0  # knowledge capacity of a trained parameter (Allen-Zhu and Li 2024)
LARGEST_RANK = 256
Goal = Literal["knowledge", "format", "instructions", "preferences", "reasoning"]
Data = Literal["text", "demonstrations", "pairs", "ratings", "verifier", "prompts"]
Objective = Literal["prompting", "continue", "sft", "dpo", "kto", "rl"]
Weights = Literal["none", "full", "lora", "qlora"]
# Rows below which an objective learns mostly noise.
FEWEST_ROWS = {"sft": 50, "dpo": 500, "kto": 500, "rl": 100}
LIMA = "Zhou et al. 2023, LIMA: 1,000 good rows made an assistant"
FEW_ROWS = 1000  # demonstrations, below which adapters are better: they forget less (Biderman et al. 2024)
HALF_BYTES = 2.0  # per parameter in 16 bits
ADAPTER_SHARE = 0.006  # of the parameters: rank 16 on all matrices of a 7B
# Factor for activations of one checkpointed row, buffers and fragmentation; and memory of the GPU driver. A 7B model
# then needs 22 GB with LoRA and 9 with QLoRA (Axolotl's table: 16 to 24, and 10 to 14).
OVERHEAD, DRIVER_BYTES = 1.2, 4e9
EXTRA_BYTES = {
    "dpo": HALF_BYTES,
    "kto": HALF_BYTES,
    "rl": 2 * HALF_BYTES,
}  # per parameter: the reference, for RL also rollouts
TULU = "Tulu 3 2024, released settings of 8B and 70B"
# (parameters, rate)
_SFT_RATES = ((1e9, 1e-5), (8e9, 5e-6), (70e9, 2e-6))
SFT_SMALLEST = _SFT_RATES[0][0]  # smaller models follow the rule of continued pre-training
SFT_ROWS, SFT_FEWEST_ROWS, SFT_STEPS = 128, 8, 100
_DPO_RATES = ((1e9, 1e-6), (8e9, 5e-7), (70e9, 2e-7))
LORA_FACTOR = 10.0  # Schulman et al. 2025, LoRA without regret


@dataclass(frozen=True)
class LoraSettings:
    rank: int
    alpha: int
    learning_rate: float
    parameters: int
    modules: tuple[str, ...] = MODULES


def lora(shape: ModelShape, use: Use, full_rate: float, learnt_tokens: float = 0.0) -> RecipeAnswer[LoraSettings]:
    """Rank, alpha and learning rate. `full_rate` is the learning rate of full fine-tuning; `learnt_tokens` is the
    number of tokens in the loss, each about one bit of new information."""
    if use not in _USUAL_RANK:
        raise UserError(f"use {use!r}: write {', '.join(_USUAL_RANK)}")
    rank = _USUAL_RANK[use]
    reason = f"usual for {use}"
    basis: Basis = "empirical at this scale"
    while use != "rl" and rank < LARGEST_RANK and BITS_PER_PARAMETER * lora_parameters(shape, rank) < learnt_tokens:
        rank *= 2
        reason = f"{human_count(learnt_tokens)} learnt tokens, about a bit each, need parameters of 2 bits each"
    if use != "rl" and BITS_PER_PARAMETER * lora_parameters(shape, rank) < learnt_tokens:
        reason += f"; more than rank {rank} can hold: full fine-tuning learns more"
        basis = "open question"
    size = lora_parameters(shape, rank)
    share = size / shape.parameters
    reason += f"; all matrices, {human_count(size)} parameters ({share:.1%}); alpha twice the rank; ten times the rate"
    settings = LoraSettings(rank, 2 * rank, 10 * full_rate, size)
    return RecipeAnswer(settings, reason, SCHULMAN, basis)


@dataclass(frozen=True)
class Method:
    """How to fine-tune. `stages` are in order: SFT comes before preference training if the model is not aligned yet."""

    objective: Objective
    weights: Weights
    stages: tuple[str, ...]
    needed_bytes: float


def choose_method(
    goal: Goal, data: Data, rows: int, parameters: float, memory_bytes: float, aligned: bool = False
) -> RecipeAnswer[Method]:
    """The objective for a goal and the available data, and full, LoRA or QLoRA training for `memory_bytes` of all GPUs
    together. `aligned`: the model already follows instructions."""
    _check_method(goal, data, rows, parameters, memory_bytes)
    objective, reason, source, basis = _choose_objective(goal, data, rows)
    if objective == "prompting":
        return RecipeAnswer(Method("prompting", "none", ("prompting",), 0.0), reason, source, basis)
    weights, needed, why = _choose_weights(objective, rows, parameters, memory_bytes)
    preference = objective in ("dpo", "kto", "rl")
    stages = ("sft", objective) if preference and not aligned else (objective,)
    if len(stages) > 1:
        reason += "; SFT first, since preference training needs a model that gives good answers"
    return RecipeAnswer(Method(objective, weights, stages, needed), f"{reason}; {why}", source, basis)


def _choose_objective(goal: Goal, data: Data, rows: int) -> tuple[Objective, str, str, Basis]:
    amount = f"{rows:,} rows"
    if data == "text":
        if goal == "knowledge":
            return "continue", f"{amount} of plain text carry knowledge: continue pre-training, with replay", (
                "Ibrahim et al. 2024, continual pre-training"), "established"  # fmt: skip
        return "prompting", f"plain text shows no {goal}: write demonstrations, 50 or more", LIMA, "established"
    if data == "demonstrations":
        if rows < FEWEST_ROWS["sft"]:
            fewer = f"{amount} of demonstrations are fewer than {FEWEST_ROWS['sft']}: put the best ones into the prompt"
            return "prompting", fewer, LIMA, "empirical at this scale"
        extra = "; facts hardly stick this way and invite invention" if goal == "knowledge" else ""
        source = f"{LIMA}; Gekhman et al. 2024" if goal == "knowledge" else LIMA
        return "sft", f"{amount} of demonstrations are imitated{extra}", source, "established"
    if data == "pairs":
        if rows < FEWEST_ROWS["dpo"]:
            few = f"{amount} of pairs are fewer than {FEWEST_ROWS['dpo']}: imitate the chosen answers"
            return "sft", few, "rule", "open question"
        return "dpo", f"{amount} of pairs say which answer is better", "Rafailov et al. 2023, DPO", "established"
    if data == "ratings":
        if rows < FEWEST_ROWS["kto"]:
            few = f"{amount} of ratings are fewer than {FEWEST_ROWS['kto']}: imitate the good answers"
            return "sft", few, "rule", "open question"
        return "kto", f"{amount} judge single answers, which cannot be paired", "Ethayarajh et al. 2024, KTO", (
            "empirical at this scale")  # fmt: skip
    if data == "verifier":
        if rows < FEWEST_ROWS["rl"]:
            few = f"{amount} to check are fewer than {FEWEST_ROWS['rl']}: sample answers and imitate those that pass"
            return "sft", few, "Yuan et al. 2023, rejection sampling", "empirical at this scale"
        return "rl", f"{amount} whose answers can be checked: the reward is the check", (
            "Guo et al. 2025, DeepSeek-R1"), "established"  # fmt: skip
    if goal in ("preferences", "reasoning") and rows >= FEWEST_ROWS["rl"]:
        return "rl", f"{amount} of prompts need a reward model or a judge, and a KL term against hacking it", (
            "Ouyang et al. 2022; Gao et al. 2023"), "empirical at this scale"  # fmt: skip
    return "prompting", f"{amount} of prompts without answers teach nothing alone: collect answers or pairs", "rule", (
        "established")  # fmt: skip


def method_bytes(objective: Objective, weights: Weights, parameters: float) -> float:
    """Memory of training, summed over GPUs: optimizer states, a reference model if needed, and overhead."""
    states = optimizer_bytes(OptimizerSpec(), MemorySpec()).device  # AdamW with fp32 weights: 18 bytes
    extra = EXTRA_BYTES.get(objective, 0.0) * parameters
    if weights == "full":
        return DRIVER_BYTES + OVERHEAD * (states * parameters + extra)
    base = HALF_BYTES if weights == "lora" else NF4_BYTES
    # With adapters the base model is the reference; rollouts of RL use the same weights.
    return DRIVER_BYTES + OVERHEAD * (base * parameters + states * ADAPTER_SHARE * parameters)


def _choose_weights(objective: Objective, rows: int, parameters: float, memory: float) -> tuple[Weights, float, str]:
    kinds: tuple[Weights, ...] = ("full", "lora", "qlora")
    needs = {kind: method_bytes(objective, kind, parameters) for kind in kinds}
    few = objective == "sft" and rows < FEW_ROWS
    for kind in kinds:
        if needs[kind] > memory or (kind == "full" and few):
            continue
        reason = f"{kind} needs about {human_bytes(needs[kind])} of {human_bytes(memory)}"
        if kind == "lora" and few:
            reason += f"; {rows:,} rows would make full training forget (Biderman et al. 2024)"
        elif kind != "full":
            before = kinds[kinds.index(kind) - 1]
            reason += f"; {before} would need {human_bytes(needs[before])}"
        if kind != "full" and objective == "continue":
            reason += "; adapters learn less knowledge than full training"
        return kind, needs[kind], reason
    raise UserError(
        f"memory: {human_count(parameters)} parameters need at least {human_bytes(needs['qlora'])} with QLoRA, and "
        f"{human_bytes(memory)} are available: use more or larger GPUs, or a model of at most "
        f"{human_count(max(0.0, parameters * (memory - DRIVER_BYTES) / (needs['qlora'] - DRIVER_BYTES)))} parameters"
    )


def _check_method(goal: str, data: str, rows: int, parameters: float, memory: float) -> None:
    for name, value, allowed in (("goal", goal, get_args(Goal)), ("data", data, get_args(Data))):
        if value not in allowed:
            raise UserError(f"{name} {value!r}: write {', '.join(allowed)}")
    for name, amount in (("rows", rows), ("parameters", parameters), ("memory", memory)):
        if not amount > 0:
            raise UserError(f"{name}: {amount:g} is no amount: write a number above 0")


@dataclass(frozen=True)
class Tuning:
    """An objective and its settings by name."""

    objective: str
    settings: dict[str, Any]


def sft(parameters: float, lora: bool = False) -> RecipeAnswer[Tuning]:
    """Supervised fine-tuning on demonstrations."""
    settings = {
        "learning_rate": _rate(_SFT_RATES, parameters, lora), "epochs": 2, "batch_rows": SFT_ROWS, "warmup": 0.03,
        "weight_decay": 0.0, "schedule": "linear", "loss": "sum over tokens",
    }  # fmt: skip
    reason = "two epochs in batches of 128; the loss is summed over tokens, so that short answers do not weigh more"
    return RecipeAnswer(Tuning("sft", settings), reason, TULU, _basis(parameters))


def sft_batch_rows(rows: float) -> int:
    """Conversations per step of a run over that many: 128, or fewer for at least 100 steps, but no less than 8."""
    return int(min(SFT_ROWS, max(SFT_FEWEST_ROWS, rows // SFT_STEPS)))


def classify(parameters: float, trained: bool) -> RecipeAnswer[Tuning]:
    """Classification of texts or tokens, of trained weights or from random ones (whose rate follows pre-training)."""
    rate = 2e-5 if parameters < _SFT_RATES[0][0] else _rate(_SFT_RATES, parameters, False)
    settings = {"learning_rate": rate, "epochs": 3 if trained else 10, "batch_rows": 32, "warmup": 0.1}
    reason = "a few passes in small batches; more passes memorise the labels"
    return RecipeAnswer(
        Tuning("classify", settings), reason, "Devlin et al. 2019, BERT, appendix A.3", _basis(parameters)
    )


def dpo(parameters: float, lora: bool = False) -> RecipeAnswer[Tuning]:
    """Direct preference optimisation on pairs, after SFT."""
    settings = {
        "beta": 0.1, "learning_rate": _rate(_DPO_RATES, parameters, lora), "epochs": 1, "batch_rows": 128,
        "warmup": 0.1, "reference": "the SFT model", "loss": "sigmoid",
    }  # fmt: skip
    reason = (
        "beta 0.1 holds it near the SFT model; lower drifts and picks up what the pairs share by accident, above 0.5 "
        "little changes. Length-normalised, beta is 5"
    )
    return RecipeAnswer(Tuning("dpo", settings), reason, f"Rafailov et al. 2023; {TULU}", _basis(parameters))


def reward(parameters: float, lora: bool = False) -> RecipeAnswer[Tuning]:
    """A reward model from preference pairs."""
    settings = {"learning_rate": _rate(_SFT_RATES, parameters, lora), "epochs": 1, "batch_rows": 64, "warmup": 0.03}
    reason = "one pass: a second one overfits the pairs; the rate is that of SFT"
    return RecipeAnswer(
        Tuning("reward", settings), reason, "Touvron et al. 2023, Llama 2, section 3.2.2", _basis(parameters)
    )


def simpo(parameters: float, lora: bool = False) -> RecipeAnswer[Tuning]:
    """Preference pairs without a reference model: length-normalized, with a margin; after SFT."""
    settings = {"beta": 2.5, "gamma": 1.375, "learning_rate": _rate(_DPO_RATES, parameters, lora), "epochs": 1,
                "batch_rows": 128, "nll_weight": 0.0}  # fmt: skip
    reason = "no second model in memory; the margin is gamma / beta on the mean log-probability of a token"
    return RecipeAnswer(Tuning("simpo", settings), reason, "Meng et al. 2024, SimPO", "empirical at this scale")


def kto(parameters: float, desirable: int, undesirable: int, lora: bool = False) -> RecipeAnswer[Tuning]:
    """Single answers judged good or bad. The rarer kind weighs more, so that w_d n_d / (w_u n_u) is in [1, 4/3]."""
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
    return RecipeAnswer(Tuning("kto", settings), reason, "Ethayarajh et al. 2024, KTO, equation 8", _basis(parameters))


def grpo(parameters: float, verifiable: bool = True, lora: bool = False) -> RecipeAnswer[Tuning]:
    """RL with groups of answers. A learned reward needs the KL term; a verifiable one needs little or none."""
    settings = {
        "learning_rate": 1e-6 * (LORA_FACTOR if lora else 1.0), "group": 8, "clip": 0.2,
        "kl": 0.001 if verifiable else 0.05, "temperature": 1.0, "loss": "sum over tokens of all answers",
        "prompts": 128,
    }  # fmt: skip
    if verifiable:
        reason = "a verified reward cannot be hacked by words: a small KL term only preserves the language"
        source, sure = "Shao et al. 2024, GRPO; Guo et al. 2025, DeepSeek-R1 (KL 0.001)", _basis(parameters)
        return RecipeAnswer(Tuning("grpo", settings), reason, source, sure)
    reason = "a learned reward is hacked without a KL term: 0.05, and stop when KL passes 2 or lengths drift"
    return RecipeAnswer(Tuning("grpo", settings), reason, "Gao et al. 2023, reward over-optimisation; TRL's defaults",
                  "empirical at this scale")  # fmt: skip


def ppo(lora: bool = False) -> RecipeAnswer[Tuning]:
    """RL with a value model, against a learned reward."""
    settings = {
        "learning_rate": 3e-6 * (LORA_FACTOR if lora else 1.0), "value_rate": 9e-6, "kl": 0.05, "clip": 0.2,
        "value_clip": 0.2, "value_weight": 0.1, "gamma": 1.0, "lambda": 0.95, "epochs_per_batch": 4,
        "whiten_advantages": True,
    }  # fmt: skip
    reason = "four models in memory: policy, reference, reward and value; the KL term holds it near the reference"
    return RecipeAnswer(Tuning("ppo", settings), reason, "Ouyang et al. 2022; TRL's and OpenRLHF's defaults",
                  "empirical at this scale")  # fmt: skip


def _rate(points: tuple[tuple[float, float], ...], parameters: float, lora: bool) -> float:
    """Interpolated in log space between released sizes, constant beyond them."""
    if not parameters > 0:
        raise UserError(f"parameters: {parameters:g} is no size: write a number above 0, such as 8e9")
    value = points[-1][1] if parameters >= points[-1][0] else points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if left <= parameters <= right:
            value = low * (high / low) ** (math.log(parameters / left) / math.log(right / left))
    return float(f"{value * (LORA_FACTOR if lora else 1.0):.2g}")


def _basis(parameters: float) -> Basis:
    return "empirical at this scale" if 1e9 <= parameters <= 100e9 else "open question"
