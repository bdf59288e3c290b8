"""What one GPU can give up so that a model fits that does not fit as it is planned."""

from __future__ import annotations

from typing import Any

from bessemer.plan.memory import Passes, estimate
from bessemer.plan.per_rank import CONTEXT, FRAGMENTS
from bessemer.spec.memory import LEAN, MemorySpec, optimizer_bytes
from bessemer.spec.quantity import human_bytes
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

# In the order of what each costs (docs/gpu.md), every one with all before it. The last is how 70B trained on an H200.
RUNGS: tuple[dict[str, Any], ...] = (
    {"memory.weights": "kahan", "memory.activations": "full"},
    {"memory.moments": "8bit"},
    {"memory.weights": "stochastic"},
    {"memory.offload_optimizer": True},
    {"memory.update": "in_backward"},
    {"memory.offload_activations": True, "optimizer.name": "lion"},
)
EDGE = 0.97  # of the memory: 70.6B parameters trained at 0.956 of an H200


def lighter(spec: RunSpec, shape: ModelShape, context: int, precision: str, usable: float, whole: int) -> str:
    """The first rung that fits, as keys of a spec; nothing where none does, weights cannot be kept in bf16, or there
    are experts, which nobody has trained this way. `usable` is what a plan fills of the `whole`; the last rung may go
    further, and says so."""
    if precision not in ("bf16", "fp8") or spec.optimizer.name not in LEAN or shape.wrapped or shape.moe:
        return ""
    keys: dict[str, Any] = {}
    for rung in RUNGS:
        keys |= rung
        leaner = _with(spec, keys)
        at_once = leaner.memory.update == "in_backward"
        need = estimate(leaner, shape, Passes(context, 1, precision, "full", compiled=True, several=not at_once))
        fits = need.total * (1 + FRAGMENTS) + CONTEXT <= usable
        if not fits and (rung is not RUNGS[-1] or need.total > EDGE * whole):
            continue
        written = keys | ({"budget.batch": context} if at_once else {})  # a step is one micro-batch
        said = ", ".join(f"{key}: {'true' if value is True else value}" for key, value in written.items())
        host = int(optimizer_bytes(leaner.optimizer, leaner.memory, precision).host * shape.parameters)
        notes = [f"{human_bytes(need.total)} for one row of {context:,} tokens"]
        notes += [f"{human_bytes(host)} on the host"] * bool(host)
        notes += ["no step can be vetoed"] * at_once
        notes += ["at the edge"] * (not fits)
        return f"This one GPU holds it with {said} ({'; '.join(notes)})"
    return ""


def _with(spec: RunSpec, keys: dict[str, Any]) -> RunSpec:
    memory = {key.removeprefix("memory."): value for key, value in keys.items() if key.startswith("memory.")}
    name = keys.get("optimizer.name", spec.optimizer.name)
    return spec.model_copy(
        update={
            "memory": MemorySpec.model_validate(memory),
            "optimizer": spec.optimizer.model_copy(update={"name": name}),
        }
    )
