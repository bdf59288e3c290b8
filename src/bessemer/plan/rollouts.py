"""The part of a plan that is of reinforcement learning: what a round holds, and the generator's memory."""

from __future__ import annotations

from bessemer.plan.decision import Plan
from bessemer.spec.model import BASE
from bessemer.spec.quantity import human_bytes
from bessemer.spec.rl import CRITIC, GKD, ONLINE_DPO, REFERENCE, RL_OBJECTIVES
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape


def log_rl(spec: RunSpec, shape: ModelShape, context: int, plan: Plan) -> None:
    """Adds the objective's choices, the size of a round and the generator's memory to the plan."""
    if spec.objective not in RL_OBJECTIVES:
        return
    rl = spec.rl
    loss, advantage, aggregate = rl.resolved(spec.objective)
    if spec.objective not in ("raft", ONLINE_DPO, GKD):
        plan.add(
            "rl.advantage", advantage, f"usual for {spec.objective}", "asked" if rl.advantage != "auto" else "rule"
        )
    if spec.objective == ONLINE_DPO:
        plan.add("dpo.loss", spec.dpo.loss, "of the best and the worst answer to each prompt", "rule")
    elif spec.objective != GKD:
        plan.add("rl.loss", loss, f"aggregated over {aggregate}", "asked" if rl.loss != "auto" else "rule")
    answers = rl.prompts * rl.samples
    plan.add(
        "rl.round",
        f"{answers:,} answers",
        f"{rl.prompts} prompts x {rl.samples}, for {rl.round_steps} steps",
        "counted",
    )
    numbers = 8 + 4 * len(rl.arrays(spec.objective))
    size = answers * rl.max_tokens * numbers
    plan.add("rl.stored", human_bytes(size), f"at most, for a round: {numbers} bytes for each answer token", "counted")
    cached = 2 * shape.layers * shape.kv_heads * shape.head_dim
    slots = min(rl.slots, answers)
    cache = slots * context * cached * (2 if spec.precision not in ("fp32", "tf32") else 4)
    reason = f"keys and values of {slots} answers of {context} tokens at a time, freed before the steps"
    plan.add("memory.generation", human_bytes(cache), reason, "counted")
    for name in (REFERENCE, CRITIC):
        if other := spec.models.get(name):
            reason = (
                "the run's model with its adapter off" if other.path == BASE else "trained" if other.train else "frozen"
            )
            plan.add(f"models.{name}", other.path, reason, "rule", "established")
