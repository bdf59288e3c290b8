"""The reward section: how preference pairs train a model that gives an answer a number."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from bessemer.spec.classify import ClassifySpec, as_classifier
from bessemer.spec.quantity import SpecSection, setting
from bessemer.spec.shape import ModelShape

if TYPE_CHECKING:
    from bessemer.spec.schema import RunSpec


class RewardModelSpec(SpecSection):
    """A Bradley-Terry reward model from preference pairs (`objective: reward`). A source's column `margin`, if it names
    one, is subtracted from the difference of the two rewards."""

    heads: int = setting(
        1, "scores of each answer: with several, their mean is the reward and their spread the uncertainty", 4, ge=1,
        le=64,
    )  # fmt: skip
    bootstrap: bool = setting(
        True, "with several heads: each weighs the pairs differently (Poisson of mean 1, by a hash of the pair)", False
    )
    spread: float = setting(
        1.0,
        "with several heads: the standard deviation of their scores at the start; a larger one keeps them different on "
        "answers unlike those of the pairs",
        3.0,
        gt=0,
        le=100,
    )
    center_rewards_coefficient: Annotated[float, Field(ge=0, le=1000)] | Literal["auto"] = setting(
        "auto",
        "weight of the squared sum of a pair's rewards, which keeps their mean near 0 (Eisenstein et al. 2023); auto "
        "is 0, and 0.01 with several heads, whose scores are comparable only then",
        0.01,
    )
    smoothing: float = setting(0.0, "assumed share of pairs whose answers are exchanged", 0.1, ge=0, lt=0.5)

    @property
    def centring(self) -> float:
        automatic = 0.01 if self.heads > 1 else 0.0
        return automatic if self.center_rewards_coefficient == "auto" else self.center_rewards_coefficient

    @property
    def labels(self) -> list[str]:
        """The names of the scores in an exported config.json."""
        return ["reward"] if self.heads == 1 else [f"reward_{number}" for number in range(self.heads)]


def with_label_head(spec: RunSpec, shape: ModelShape) -> ModelShape:
    """The shape that the spec's objective trains: with a head of labels or scores, or as it is."""
    if spec.objective == "classify" and spec.classify is not None:
        return as_classifier(shape, spec.classify)
    if spec.objective == "reward":  # transformers scores the last token, without a bias
        return replace(as_classifier(shape, ClassifySpec(problem="regression", pool="last")), labels=spec.reward.heads)
    return shape
