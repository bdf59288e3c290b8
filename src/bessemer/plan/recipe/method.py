"""Which fine-tuning: what the data can teach decides the objective, what fits in memory decides full, LoRA or QLoRA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from bessemer.errors import UserError
from bessemer.plan.recipe.answer import Answer, Basis
from bessemer.spec.memory import MemorySpec, optimizer_bytes
from bessemer.spec.optimizer import OptimizerSpec
from bessemer.spec.quantity import human_bytes, human_count

Goal = Literal["knowledge", "format", "instructions", "preferences", "reasoning"]
Data = Literal["text", "demonstrations", "pairs", "ratings", "verifier", "prompts"]
Objective = Literal["prompting", "continue", "sft", "dpo", "kto", "rl"]
Weights = Literal["none", "full", "lora", "qlora"]

# Rows below which an objective learns mostly noise.
FEWEST = {"sft": 50, "dpo": 500, "kto": 500, "rl": 100}
LIMA = "Zhou et al. 2023, LIMA: 1,000 good rows made an assistant"
FEW_ROWS = 1000  # of demonstrations: adapters learn less from them, and forget less (Biderman et al. 2024)
# Bytes a parameter: weights in 16 bits; in NF4 with double quantisation, 0.5 and 0.127 / 8 (Dettmers et al. 2023).
HALF_BYTES, NF4_BYTES = 2.0, 0.516
ADAPTER_SHARE = 0.006  # of the parameters: rank 16 on all matrices of a 7B
# Activations of one checkpointed row, buffers and fragmentation, and what a GPU's driver takes: with these a 7B needs
# 22 GB with LoRA and 9 with QLoRA (Axolotl's table: 16 to 24, and 10 to 14).
ROOM, DRIVER_BYTES = 1.2, 4e9
EXTRA = {"dpo": HALF_BYTES, "kto": HALF_BYTES, "rl": 2 * HALF_BYTES}  # the reference; for RL rollouts too


@dataclass(frozen=True)
class Method:
    """What to do, in order: an SFT stage comes before preferences where there is none yet."""

    objective: Objective
    weights: Weights
    stages: tuple[str, ...]
    needed_bytes: float


def choose_method(
    goal: Goal, data: Data, rows: int, parameters: float, memory_bytes: float, aligned: bool = False
) -> Answer[Method]:
    """The objective for a goal and the data at hand, and how much of the model is trained in `memory_bytes` (of all
    GPUs together). `aligned` says that the model already follows instructions."""
    _check(goal, data, rows, parameters, memory_bytes)
    objective, reason, source, basis = _objective(goal, data, rows)
    if objective == "prompting":
        return Answer(Method("prompting", "none", ("prompting",), 0.0), reason, source, basis)
    weights, needed, why = _weights(objective, rows, parameters, memory_bytes)
    preference = objective in ("dpo", "kto", "rl")
    stages = ("sft", objective) if preference and not aligned else (objective,)
    if len(stages) > 1:
        reason += "; SFT first, or it has to find good answers before it can prefer them"
    return Answer(Method(objective, weights, stages, needed), f"{reason}; {why}", source, basis)


def _objective(goal: Goal, data: Data, rows: int) -> tuple[Objective, str, str, Basis]:
    told = f"{rows:,} rows"
    if data == "text":
        if goal == "knowledge":
            return "continue", f"{told} of plain text carry knowledge: continue pre-training, with replay", (
                "Ibrahim et al. 2024, continual pre-training"), "established"  # fmt: skip
        return "prompting", f"plain text shows no {goal}: write demonstrations, 50 or more", LIMA, "established"
    if data == "demonstrations":
        if rows < FEWEST["sft"]:
            fewer = f"{told} of demonstrations are fewer than {FEWEST['sft']}: put the best ones into the prompt"
            return "prompting", fewer, LIMA, "empirical at this scale"
        extra = "; facts hardly stick this way and invite invention" if goal == "knowledge" else ""
        source = f"{LIMA}; Gekhman et al. 2024" if goal == "knowledge" else LIMA
        return "sft", f"{told} of demonstrations are imitated{extra}", source, "established"
    if data == "pairs":
        if rows < FEWEST["dpo"]:
            few = f"{told} of pairs are fewer than {FEWEST['dpo']}: imitate the chosen answers"
            return "sft", few, "rule", "open question"
        return "dpo", f"{told} of pairs say which answer is better", "Rafailov et al. 2023, DPO", "established"
    if data == "ratings":
        if rows < FEWEST["kto"]:
            few = f"{told} of ratings are fewer than {FEWEST['kto']}: imitate the good answers"
            return "sft", few, "rule", "open question"
        return "kto", f"{told} judge single answers, which cannot be paired", "Ethayarajh et al. 2024, KTO", (
            "empirical at this scale")  # fmt: skip
    if data == "verifier":
        if rows < FEWEST["rl"]:
            few = (
                f"{told} to check are fewer than {FEWEST['rl']}: sample answers, keep those that pass and imitate them"
            )
            return "sft", few, "Yuan et al. 2023, rejection sampling", "empirical at this scale"
        return "rl", f"{told} whose answers can be checked: the reward is the check", (
            "Guo et al. 2025, DeepSeek-R1"), "established"  # fmt: skip
    if goal in ("preferences", "reasoning") and rows >= FEWEST["rl"]:
        return "rl", f"{told} of prompts need a reward model or a judge, and a KL term against hacking it", (
            "Ouyang et al. 2022; Gao et al. 2023"), "empirical at this scale"  # fmt: skip
    return "prompting", f"{told} of prompts without answers teach nothing alone: collect answers or pairs", "rule", (
        "established")  # fmt: skip


def method_bytes(objective: Objective, weights: Weights, parameters: float) -> float:
    """Memory of training, without the division among GPUs: states, a reference where one is needed, and some room."""
    states = optimizer_bytes(OptimizerSpec(), MemorySpec()).device  # AdamW with fp32 weights: 18 bytes
    extra = EXTRA.get(objective, 0.0) * parameters
    if weights == "full":
        return DRIVER_BYTES + ROOM * (states * parameters + extra)
    base = HALF_BYTES if weights == "lora" else NF4_BYTES
    # With adapters the reference is the base model itself; rollouts of RL read the same weights.
    return DRIVER_BYTES + ROOM * (base * parameters + states * ADAPTER_SHARE * parameters)


def _weights(objective: Objective, rows: int, parameters: float, memory: float) -> tuple[Weights, float, str]:
    kinds: tuple[Weights, ...] = ("full", "lora", "qlora")
    needs = {kind: method_bytes(objective, kind, parameters) for kind in kinds}
    few = objective == "sft" and rows < FEW_ROWS
    for kind in kinds:
        if needs[kind] > memory or (kind == "full" and few):
            continue
        told = f"{kind} needs about {human_bytes(needs[kind])} of {human_bytes(memory)}"
        if kind == "lora" and few:
            told += f"; {rows:,} rows would make full training forget (Biderman et al. 2024)"
        elif kind != "full":
            before = kinds[kinds.index(kind) - 1]
            told += f"; {before} would need {human_bytes(needs[before])}"
        if kind != "full" and objective == "continue":
            told += "; adapters take in less knowledge than full training"
        return kind, needs[kind], told
    raise UserError(
        f"memory: {human_count(parameters)} parameters need at least {human_bytes(needs['qlora'])} with QLoRA, and "
        f"{human_bytes(memory)} are there: take more or larger GPUs, or a model of at most "
        f"{human_count(max(0.0, parameters * (memory - DRIVER_BYTES) / (needs['qlora'] - DRIVER_BYTES)))} parameters"
    )


def _check(goal: str, data: str, rows: int, parameters: float, memory: float) -> None:
    for name, value, known in (("goal", goal, get_args(Goal)), ("data", data, get_args(Data))):
        if value not in known:
            raise UserError(f"{name} {value!r}: write {', '.join(known)}")
    for name, amount in (("rows", rows), ("parameters", parameters), ("memory", memory)):
        if not amount > 0:
            raise UserError(f"{name}: {amount:g} is no amount: write a number above 0")
