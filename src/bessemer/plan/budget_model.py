"""The model that a budget is best spent on, and its tokens: the law of compute at what the money buys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from bessemer.errors import UserError
from bessemer.plan.asked import Asked
from bessemer.plan.hardware import find_gpu
from bessemer.plan.prices import load_prices
from bessemer.plan.recipe.answer import Answer
from bessemer.plan.recipe.tokens import Allocation, model_for_compute
from bessemer.plan.wishes import USUAL_MFU, Limits, half_precision, is_wanted, ways_within
from bessemer.spec.quantity import human_count

TRIES = 12
SMALL = 1e6  # parameters: the smallest shapes that are known


def model_for_budget(
    limits: Limits, tokens: int | None, build: Callable[[str, int], Asked], where: str | None = None,
    network: str | None = None,
) -> Asked:  # fmt: skip
    """The model that the law of compute asks for at what the budget buys, and its tokens. The price of a FLOP depends
    on the model, so the first guess is corrected by what it would cost."""
    assert limits.budget_usd is not None
    prices = load_prices()
    compute = max(
        limits.budget_usd
        / price.usd_hour
        * 3600
        * find_gpu(price.gpu).peak(half_precision(find_gpu(price.gpu)))
        * USUAL_MFU
        for price in prices.prices
        if price.term in ("on_demand", "spot") and is_wanted(price.gpu, where)
    )
    most, why, kept = math.inf, "", None
    for _ in range(TRIES):
        asked = _named(_allocated(compute, tokens), tokens is not None, build, why)
        ways, _lost = ways_within(asked, replace(limits, budget_usd=None), where, network, prices, most_types=2)
        if not ways:
            most, why = compute / 2, "; the deadline allows no more"
            compute /= 3
            continue
        share = ways[0].usd / limits.budget_usd
        kept = asked if share <= 1 else kept
        if 0.85 <= share <= 1 or (share < 1 and 0.96 * compute / share > most):
            return asked
        compute *= 0.96 / share
    return kept or asked


def _allocated(compute: float, tokens: int | None) -> Answer[Allocation]:
    if tokens is None:
        return model_for_compute(compute)
    size = compute / 6 / tokens
    reason = f"what {compute:.2g} FLOPs of the budget train on {human_count(tokens)} tokens"
    return Answer(Allocation(size, tokens, math.nan), reason, "C = 6 N D", "established")


def _named(answer: Answer[Allocation], given: bool, build: Callable[[str, int], Asked], why: str) -> Asked:
    """As a wish of two digits, as a person would write it; `given`: the tokens were."""
    found = answer.value
    if found.parameters < SMALL:
        raise UserError(
            f"the budget trains {human_count(found.parameters)} parameters, less than the smallest known shape of 1M: "
            "write a larger --budget"
        )
    size = f"{float(f'{found.parameters / 1e6:.2g}'):g}M"
    whole = int(float(f"{found.tokens:.3g}"))
    asked = build(size, whole)
    answers = dict(asked.answers)
    if not given:
        answers["budget.tokens"] = Answer(whole, answer.reason + why, answer.source, answer.basis)
    return replace(asked, reason=answer.reason + why, source=answer.source, basis=answer.basis, answers=answers)
