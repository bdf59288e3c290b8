"""Settings of the steps that score documents: trained classifiers, perplexity, a user's own function or service."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from bessemer.spec.clean.service import ServiceSpec
from bessemer.spec.clean.step import StepSpec
from bessemer.spec.part import Part
from bessemer.spec.quantity import Share, parse_share, shown

_BEST = "best "


class Bounds(Part):
    """A score's lowest and highest value that is kept."""

    min: float | None = Field(None, description="lowest score that is kept", examples=[0.5])
    max: float | None = Field(None, description="highest score that is kept", examples=[2.5])

    @model_validator(mode="after")
    def _some(self) -> Bounds:
        if self.min is None and self.max is None:
            raise ValueError("give min or max, such as {max: 2.5}")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} lies above max {self.max}: nothing would be kept")
        return self


def _keep(value: Any) -> Any:
    """A number is the lowest score, a mapping has bounds, and `best 25%` is checked and left as it was written."""
    if isinstance(value, (dict, Bounds)):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, str) or not value.startswith(_BEST):
        raise ValueError(
            "expected a lowest score such as 0.5, bounds such as {max: 0.5}, or a share such as 'best 25%'; "
            f"got {shown(value)}"
        )
    if parse_share(value.removeprefix(_BEST)) <= 0:
        raise ValueError(f"{shown(value)} would keep nothing; leave the step out or name a larger share")
    return value


def _kind(value: Any) -> str:
    return "bounds" if isinstance(value, (dict, Bounds)) else "share" if isinstance(value, str) else "least"


def best_share(keep: object) -> float | None:
    """The share of documents that `best 25%` stands for; None for anything else."""
    return parse_share(keep.removeprefix(_BEST)) if isinstance(keep, str) else None


Keep = Annotated[
    Annotated[float, Tag("least")] | Annotated[Bounds, Tag("bounds")] | Annotated[str, Tag("share")],
    Discriminator(_kind),
    BeforeValidator(_keep),
    WithJsonSchema({"type": ["number", "string", "object"], "examples": ["best 25%"]}),
]
Per = Literal["corpus", "source"]
_PER = "what a share such as best 25% is taken of: the whole corpus, or each source"
_LABEL_ONLY = "not set: nothing is dropped, documents are only labelled"


class QualitySpec(StepSpec):
    """Documents that a trained classifier finds poor go. The label `quality` is the probability of its first class."""

    step: ClassVar[str] = "quality"
    model: str = Field(
        min_length=1,
        description="a classifier trained from folders of good and other text",
        examples=["quality.safetensors"],
    )
    keep: Keep | None = Field(
        None, description=f"lowest score, or a share such as best 25%; {_LABEL_ONLY}", examples=[0.5]
    )
    per: Per = Field("corpus", description=_PER, examples=["source"])


class DomainSpec(StepSpec):
    """Labels each document with the most probable class of a trained classifier, as `domain`, and may filter by it."""

    step: ClassVar[str] = "domain"
    model: str = Field(
        min_length=1,
        description="a classifier trained from one folder for each domain",
        examples=["domain.safetensors"],
    )
    keep: list[str] | None = Field(
        None,
        min_length=1,
        description=f"domains that are kept; {_LABEL_ONLY}",
        examples=[["science", "news"]],
    )
    min_probability: float = Field(
        0.0, ge=0, le=1, description="below it, the domain is called unsure", examples=[0.5]
    )


class PerplexitySpec(StepSpec):
    """Documents that a small model of good text finds surprising go.

    The label `perplexity` is in bits per byte, which is fair to long and short documents; `perplexity_part` is head,
    middle or tail as in CCNet.
    """

    step: ClassVar[str] = "perplexity"
    model: str = Field(
        min_length=1, description="a model trained from good text", examples=["wiki.safetensors"]
    )
    keep: Keep | None = Field(
        None,
        description=f"highest bits per byte, or a share such as best 30% (lowest first); {_LABEL_ONLY}",
        examples=["best 30%", {"max": 2.5}],
    )
    per: Per = Field("corpus", description=_PER, examples=["source"])
    head: Share = Field(0.3, description="share of documents labelled head", examples=["30%"])
    middle: Share = Field(0.3, description="share labelled middle; the rest is the tail", examples=["30%"])

    @field_validator("keep")
    @classmethod
    def _bounded_above(cls, value: float | Bounds | str | None) -> float | Bounds | str | None:
        if isinstance(value, float):
            raise ValueError(
                f"a low perplexity is good: write {{max: {value:g}}} for the highest that is kept"
            )
        return value

    @model_validator(mode="after")
    def _whole(self) -> PerplexitySpec:
        if self.head + self.middle > 1:
            raise ValueError(f"head {self.head:g} and middle {self.middle:g} are more than the whole")
        return self


class ScoreSpec(StepSpec):
    """Scores from a Python function of yours, or from an HTTP service. Name one of the two.

    Nothing of it runs unless a spec names it. Results are kept: they are computed anew when the function's file or
    these settings change; when only something behind them changed, give another `version`.
    """

    step: ClassVar[str] = "score"
    function: str | None = Field(
        None,
        pattern=r"^[^:\s][^:]*:[A-Za-z_]\w*$",
        description="module:name or path/to/file.py:name of a function",
        examples=["scorers.py:readability"],
    )
    takes: Literal["texts", "text"] = Field(
        "texts",
        description="texts: a list of texts, one number for each comes back; text: one text, one number",
        examples=["text"],
    )
    service: ServiceSpec | None = Field(
        None, description="an HTTP service instead of a function", examples=["https://host/score"]
    )
    name: str = Field(
        "score", pattern=r"^[a-z][a-z0-9_]*$", description="the label that is set", examples=["toxicity"]
    )
    keep: Keep | None = Field(
        None,
        description=f"lowest score, bounds, or a share such as best 25%; {_LABEL_ONLY}",
        examples=[0.5, {"max": 0.5}, "best 25%"],
    )
    better: Literal["higher", "lower"] = Field(
        "higher", description="which scores a share such as best 25% keeps", examples=["lower"]
    )
    per: Per = Field("corpus", description=_PER, examples=["source"])
    version: str = Field(
        "", description="any word; another one means that scores have to be computed anew", examples=["2"]
    )

    @model_validator(mode="after")
    def _one(self) -> ScoreSpec:
        if (self.function is None) == (self.service is None):
            raise ValueError("give either function: file.py:name or service: URL")
        return self


STEPS: tuple[type[StepSpec], ...] = (QualitySpec, DomainSpec, PerplexitySpec, ScoreSpec)
