"""Requests and plans from a few words, for the tests of the planner."""

from collections.abc import Mapping

from bessemer.plan.hardware import parse_cluster
from bessemer.plan.request import PlanRequest, request_from_options
from bessemer.plan.search.proposal import Proposal, propose


def request(
    model: str, tokens: int | None = None, context: int | None = None, batch: int | None = None,
    precision: str | None = None, degrees: Mapping[str, int] | None = None,
) -> PlanRequest:  # fmt: skip
    settings = {"data.context": context, "budget.batch": batch, "precision": precision}
    settings |= {f"parallel.{key}": degree for key, degree in (degrees or {}).items()}
    return request_from_options(
        model, tokens, [f"{key}={value}" for key, value in settings.items() if value is not None]
    )


def plan_on(
    model: str, gpus: str, tokens: int | None = None, context: int | None = None, batch: int | None = None,
    precision: str | None = None, network: str | None = None,
) -> Proposal:  # fmt: skip
    return propose(request(model, tokens, context, batch, precision), parse_cluster(gpus, network))
