"""`adapter: auto`: full fine-tuning, LoRA or QLoRA, the first whose training step fits the device by estimate."""

from __future__ import annotations

from dataclasses import replace

from bessemer.plan.cost_model.memory import SHARE, Passes, estimate_memory
from bessemer.plan.decide import decide_precision, decide_weights, with_weights
from bessemer.plan.decision import EMPIRICAL, Plan
from bessemer.plan.hardware import Machine
from bessemer.plan.recipe.fine_tuning import SCHULMAN
from bessemer.spec.model import BASE
from bessemer.spec.quantity import human_bytes
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

SOURCES = {"full": "Biderman et al. 2024: LoRA learns less", "lora": SCHULMAN, "qlora": "Dettmers et al. 2023, QLoRA"}
KEY = "adapter.kind"


def choose_adapter(
    spec: RunSpec, shape: ModelShape, context: int, machine: Machine, plan: Plan, previous: Plan | None = None,
    processes: int = 1,
) -> RunSpec:  # fmt: skip
    """The spec with `adapter: auto` decided; other specs unchanged. A resumed run keeps the decision of its first
    start. Weights may be divided among the processes."""
    if spec.adapter is None or spec.adapter.kind != "auto":
        return spec
    if kind := plan.keep(KEY, "auto", previous):
        return with_kind(spec, str(kind))
    limit = int(machine.memory_bytes * SHARE.get(machine.device, SHARE["cpu"]))
    shares_base = any(other.path == BASE for other in spec.models.values())  # needs an adapter to switch off
    sizes: dict[str, int] = {}
    for kind in list(SOURCES)[shares_base:]:
        divided = processes if spec.parallel.dp_shard in ("auto", processes) else 1
        sizes[kind] = _least_bytes(with_kind(spec, kind), shape, context, machine, previous, divided)
        if sizes[kind] <= limit:
            break
    hardly = "" if sizes[kind] <= limit else "the least, which hardly fits: "
    reason = f"{hardly}{kind} needs {human_bytes(sizes[kind])} of {human_bytes(limit)} by estimate"
    reason += "".join(f"; {other} would need {human_bytes(sizes[other])}" for other in sizes if other != kind)
    reason += "; models.*.path: base needs an adapter" if shares_base else ""
    plan.add(KEY, kind, reason, f"estimate; {SOURCES[kind]}", EMPIRICAL)
    return with_kind(spec, kind)


def with_kind(spec: RunSpec, kind: str) -> RunSpec:
    """The spec with full, lora or qlora instead of auto."""
    assert spec.adapter is not None
    update = {"kind": "lora", "base": "nf4" if kind == "qlora" else "full"}
    return spec.model_copy(update={"adapter": None if kind == "full" else spec.adapter.model_copy(update=update)})


def _least_bytes(
    spec: RunSpec, shape: ModelShape, context: int, machine: Machine, previous: Plan | None, divided: int
) -> int:
    """Peak of a step with the fewest rows and the most recomputation that the spec allows."""
    precision = decide_precision(spec, machine, Plan(), previous)
    if divided == 1:
        spec = with_weights(spec, decide_weights(spec, shape, machine, precision, Plan()))
    rows = 1 if spec.budget.micro_batch == "auto" else int(spec.budget.micro_batch)
    mode = "full" if spec.memory.activations == "auto" else spec.memory.activations
    compiled = machine.device == "cuda" and spec.compile != "off" and not (shape.moe or shape.mamba)
    passes = Passes(context, rows, precision, mode, compiled, machine.device, shards=divided)
    return estimate_memory(spec, shape, replace(passes, several=spec.memory.update == "after")).total
