"""What `parallel.replicas` asks for, checked against the layout and told in the plan."""

from __future__ import annotations

from bessemer.errors import UserError
from bessemer.plan.decide import TrainPlan
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.plan.search.layout import Layout, decide_layout
from bessemer.spec.model import model_shape
from bessemer.spec.parallel import ReplicasSpec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

REPLICAS_KEY = "parallel.replicas"
CHANGES = {
    "bf16": "half of what is sent; gradients are rounded to three digits, which changes the losses a little",
    "powersgd": "matrices of low rank are sent, and what they leave out a step later: this changes the losses",
}


def note_replicas(spec: RunSpec, layout: Layout, plan: Plan) -> None:
    """These keys are for whole replicas, whose gradients DDP adds up: another layout sends them otherwise."""
    asked, usual = spec.parallel.replicas, ReplicasSpec()
    written = [key for key in ReplicasSpec.model_fields if getattr(asked, key) != getattr(usual, key)]
    if not written or layout.size == 1:  # one process sends nothing: the same spec runs there too
        return
    if layout.size > layout.dp_replicate:
        degree = next(key for key in ("dp_shard", "tp", "cp", "pp") if getattr(layout, key) > 1)
        raise UserError(
            f"{REPLICAS_KEY}.{written[0]}: for whole replicas, and parallel.{degree} is {getattr(layout, degree)}: "
            f"write parallel.{degree}: 1, or leave this out"
        )
    if asked.divide_optimizer and spec.memory.update == "in_backward":
        raise UserError(f"{REPLICAS_KEY}.divide_optimizer: memory.update is in_backward: write after, or false here")
    for key in written:
        plan.asked(f"{REPLICAS_KEY}.{key}", getattr(asked, key))
    if asked.compress != "none":
        plan.add(f"{REPLICAS_KEY}.compress", asked.compress, CHANGES[asked.compress], "asked")
    if asked.divide_optimizer:
        reason = f"each of {layout.dp_replicate} replicas keeps and steps its share of the moments"
        plan.add(f"{REPLICAS_KEY}.divide_optimizer", True, f"{reason}, whole tensors", "asked")


def check_processes(spec: RunSpec, given: ModelShape | None, size: int) -> None:
    """Refuse a layout before a process is started or data is read. `given` is the shape that a folder of weights has.
    What depends on the data (a context that is left open) or on this machine's memory is checked later."""
    vocab = spec.tokenizer.vocab
    shape = model_shape(spec.model, given.vocab if given else vocab if isinstance(vocab, int) else 0, given)
    context = spec.data.context if isinstance(spec.data.context, int) else 0  # which every degree divides
    roomy = Machine("cpu", "any", 1 << 60, 1)
    note_replicas(spec, decide_layout(spec, shape, context, roomy, size, Plan()), Plan())


def check_static_graph(spec: RunSpec, layout: Layout, training: TrainPlan) -> None:
    """DDP learns the graph in the first backward pass, and fails unless that one sends its gradients: with several
    passes in a step only the last does."""
    if not spec.parallel.replicas.static_graph or layout.size == 1:
        return
    rows = -(-max(rows for _, rows in training.batch_rows) // layout.dp)
    if rows > training.micro_rows:
        raise UserError(
            f"{REPLICAS_KEY}.static_graph: a process takes {rows} rows of a step in passes of {training.micro_rows}, "
            f"and it has to take them in one: write budget.micro_batch: {rows}, or false here"
        )
