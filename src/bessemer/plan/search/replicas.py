"""Checks `parallel.replicas` (DDP options) against the layout and records it in the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.plan.search.layout import Layout, decide_layout
from bessemer.spec.model import model_shape
from bessemer.spec.parallel import ReplicasSpec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

if TYPE_CHECKING:
    from bessemer.plan.decide import TrainPlan

REPLICAS_KEY = "parallel.replicas"
CHANGES = {
    "bf16": "half the traffic; gradients are rounded to three digits, which changes the losses slightly",
    "powersgd": "sends low-rank matrices, and the remainder in the next step; this changes the losses",
}


def note_replicas(spec: RunSpec, layout: Layout, plan: Plan) -> None:
    """Refuse these keys in layouts without DDP, which reduces the gradients of full replicas."""
    settings, usual = spec.parallel.replicas, ReplicasSpec()
    changed = [key for key in ReplicasSpec.model_fields if getattr(settings, key) != getattr(usual, key)]
    if not changed or layout.size == 1:  # one process sends nothing and may run the same spec
        return
    if layout.size > layout.dp_replicate:
        degree = next(key for key in ("dp_shard", "tp", "cp", "pp") if getattr(layout, key) > 1)
        raise UserError(
            f"{REPLICAS_KEY}.{changed[0]}: for full replicas, and parallel.{degree} is {getattr(layout, degree)}: "
            f"write parallel.{degree}: 1, or leave this out"
        )
    if settings.divide_optimizer and spec.memory.update == "in_backward":
        raise UserError(f"{REPLICAS_KEY}.divide_optimizer: memory.update is in_backward: write after, or false here")
    for key in changed:
        plan.add_requested(f"{REPLICAS_KEY}.{key}", getattr(settings, key))
    if settings.compress != "none":
        plan.add(f"{REPLICAS_KEY}.compress", settings.compress, CHANGES[settings.compress], "asked")
    if settings.divide_optimizer:
        reason = f"each of {layout.dp_replicate} replicas keeps and steps its share of the moments"
        plan.add(f"{REPLICAS_KEY}.divide_optimizer", True, f"{reason}, whole tensors", "asked")


def check_processes(spec: RunSpec, folder_shape: ModelShape | None, size: int) -> None:
    """Refuse a layout before processes start and data is read. `folder_shape` is the shape of a folder of weights. What
    depends on the data (an open context) or on this machine's memory is checked later."""
    vocab = spec.tokenizer.vocab
    shape = model_shape(
        spec.model, folder_shape.vocab if folder_shape else vocab if isinstance(vocab, int) else 0, folder_shape
    )
    context = spec.data.context if isinstance(spec.data.context, int) else 0  # every degree divides 0
    unlimited = Machine("cpu", "any", 1 << 60, 1)
    note_replicas(spec, decide_layout(spec, shape, context, unlimited, size, Plan()), Plan())


def check_static_graph(spec: RunSpec, layout: Layout, training: TrainPlan) -> None:
    """DDP records the graph in the first backward pass, and fails if that pass does not send its gradients. With
    several micro-batches per step only the last one sends them."""
    if not spec.parallel.replicas.static_graph or layout.size == 1:
        return
    rows = -(-max(rows for _, rows in training.batch_rows) // layout.dp)
    if rows > training.micro_rows:
        raise UserError(
            f"{REPLICAS_KEY}.static_graph: a process takes {rows} rows of a step in passes of {training.micro_rows}, "
            f"and it has to take them in one: write budget.micro_batch: {rows}, or false here"
        )
