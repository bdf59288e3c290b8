"""What `objective: dpo` adds to a start: the reference model, which is the model that the run starts from."""

from __future__ import annotations

from bessemer.align.dpo import REFERENCE
from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.spec.model import BASE, OtherModelSpec
from bessemer.spec.schema import RunSpec


def with_reference(spec: RunSpec) -> RunSpec:
    """The spec with `models.reference`, unless it names one or the loss needs none."""
    if spec.objective != "dpo" or not spec.dpo.needs_reference or REFERENCE in spec.models:
        return spec
    path = BASE if spec.adapter else spec.model.hf or spec.start_from
    if path is None:
        raise UserError(
            "objective: dpo compares with the model that training starts from: write model: {hf: FOLDER} or start_from"
        )
    return spec.model_copy(update={"models": {**spec.models, REFERENCE: OtherModelSpec(path=path)}})


def log_preferences(spec: RunSpec, plan: Plan) -> None:
    """Adds the loss and the reference to the plan."""
    if spec.objective != "dpo":
        return
    plan.add("dpo.loss", spec.dpo.loss, f"beta {spec.dpo.beta_value:g}", "asked")
    if reference := spec.models.get(REFERENCE):
        reason = "the run's model with its adapter off" if reference.path == BASE else "frozen"
        plan.add(f"models.{REFERENCE}", reference.path, reason, "rule", "established")
