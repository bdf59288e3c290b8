"""Settings of the steps that score documents (trained classifiers, perplexity, a user's function or service), and of
the one that rewrites them by a user's function."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag, WithJsonSchema, field_validator, model_validator

from bessemer.spec.clean.service import ServiceSpec
from bessemer.spec.clean.step import Named, StepSpec, setting
from bessemer.spec.part import Part
from bessemer.spec.quantity import Share, parse_share, shown

_BEST = "best "


class Bounds(Part):
    """A score's lowest and highest value that is kept."""

    min: float | None = setting(None, "lowest score that is kept", 0.5, ge=-1e12, le=1e12)
    max: float | None = setting(None, "highest score that is kept", 2.5, ge=-1e12, le=1e12)

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


class QualitySpec(StepSpec, step="quality"):
    """Documents that a trained classifier finds poor go. The label `quality` is the probability of its first class."""

    model: Named = setting(..., "a classifier trained from folders of good and other text", "quality.safetensors")
    keep: Keep | None = setting(None, f"lowest score, or a share such as best 25%; {_LABEL_ONLY}", 0.5)
    per: Per = setting("corpus", _PER, "source")


class DomainSpec(StepSpec, step="domain"):
    """Labels each document with the most probable class of a trained classifier, as `domain`, and may filter by it."""

    model: Named = setting(..., "a classifier trained from one folder for each domain", "domain.safetensors")
    keep: list[str] | None = setting(None, f"domains that are kept; {_LABEL_ONLY}", ["science", "news"], min_length=1)
    min_probability: float = setting(0.0, "below it, the domain is called unsure", 0.5, ge=0, le=1)


class PerplexitySpec(StepSpec, step="perplexity"):
    """Documents that a small model of good text finds surprising go.

    The label `perplexity` is in bits per byte, which is fair to long and short documents; `perplexity_part` is head,
    middle or tail as in CCNet.
    """

    model: Named = setting(..., "a model trained from good text", "wiki.safetensors")
    keep: Keep | None = setting(
        None,
        f"highest bits per byte, or a share such as best 30% (lowest first); {_LABEL_ONLY}",
        "best 30%",
        {"max": 2.5},
    )
    per: Per = setting("corpus", _PER, "source")
    head: Share = setting(0.3, "share of documents labelled head", "30%")
    middle: Share = setting(0.3, "share labelled middle; the rest is the tail", "30%")

    @field_validator("keep")
    @classmethod
    def _bounded_above(cls, value: float | Bounds | str | None) -> float | Bounds | str | None:
        if isinstance(value, float):
            raise ValueError(f"a low perplexity is good: write {{max: {value:g}}} for the highest that is kept")
        return value

    @model_validator(mode="after")
    def _whole(self) -> PerplexitySpec:
        if self.head + self.middle > 1:
            raise ValueError(f"head {self.head:g} and middle {self.middle:g} are more than the whole")
        return self


class ScoreSpec(StepSpec, step="score"):
    """Scores from a Python function of yours, or from an HTTP service. Name one of the two.

    Nothing of it runs unless a spec names it. Results are kept: they are computed anew when the function's file or
    these settings change; when only something behind them changed, give another `version`.
    """

    function: str | None = setting(
        None,
        "module:name or path/to/file.py:name of a function",
        "scorers.py:readability",
        pattern=r"^[^:\s][^:]*:[A-Za-z_]\w*$",
    )
    takes: Literal["texts", "text"] = setting(
        "texts", "texts: a list of texts, one number for each comes back; text: one text, one number", "text"
    )
    service: ServiceSpec | None = setting(None, "an HTTP service instead of a function", "https://host/score")
    name: str = setting("score", "the label that is set", "toxicity", pattern=r"^[a-z][a-z0-9_]*$")
    keep: Keep | None = setting(
        None, f"lowest score, bounds, or a share such as best 25%; {_LABEL_ONLY}", 0.5, {"max": 0.5}, "best 25%"
    )
    better: Literal["higher", "lower"] = setting("higher", "which scores a share such as best 25% keeps", "lower")
    per: Per = setting("corpus", _PER, "source")
    version: str = setting("", "any word; another one means that scores have to be computed anew", "2")

    @model_validator(mode="after")
    def _one(self) -> ScoreSpec:
        if (self.function is None) == (self.service is None):
            raise ValueError("give either function: file.py:name or service: URL")
        return self


class RewriteSpec(StepSpec, step="rewrite"):
    """Some documents are replaced by what a Python function of yours makes of them, with the label `rewritten`.

    The function gets a list of texts and returns as many; None or an empty text leaves the original as it is. A step
    changes documents and cannot add any: to train on original and rewritten text, name the same path as two sources
    and give one of them this step. Conversations are left as they are. Nothing of it runs unless a spec names it;
    results are kept until the function's file or these settings change.
    """

    function: str = setting(
        ...,
        "module:name or path/to/file.py:name of a function that takes a list of texts and returns one",
        "rewriters.py:paraphrase",
        pattern=r"^[^:\s][^:]*:[A-Za-z_]\w*$",
    )
    share: Share = setting(1.0, "share of documents to rewrite, chosen by a hash of the text", "10%")
    texts: int = setting(32, "texts in one call of the function, at most", 32, ge=1)
    version: str = setting("", "any word; another one means that texts have to be rewritten anew", "2")
