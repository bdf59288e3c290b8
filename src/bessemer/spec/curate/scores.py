"""How a scoring service is asked over HTTP: what is sent, where the score stands in the answer, and how fast.

Settings of the steps that score documents (trained classifiers, perplexity, a user's function or service), and of
the one that rewrites them by a user's function.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Discriminator, Tag, WithJsonSchema, field_validator, model_validator

from bessemer.spec.curate.step import Named, StepSpec
from bessemer.spec.quantity import Seconds, Share, ShortSection, SpecSection, parse_share, setting, shown

_PRESETS: dict[str, dict[str, Any]] = {
    "plain": {"request": {"text": "{text}"}, "response": "score"},
    "plain batch": {"request": {"texts": "{texts}"}, "response": "scores"},
    # https://developers.perspectiveapi.com: at most 20,480 bytes of text, one request a second without a larger quota.
    "perspective": {
        "url": "https://commentanalyzer.googleapis.com/v1alpha1/comments:analyze",
        "request": {"comment": {"text": "{text}"}, "requestedAttributes": {"TOXICITY": {}}, "doNotStore": True},
        "response": "attributeScores.TOXICITY.summaryScore.value",
        "key_env": "PERSPECTIVE_API_KEY",
        "key_query": "key",
        "max_bytes": 20_480,
        "requests_per_s": 1.0,
    },
}


class ServiceSpec(ShortSection):
    """A service that scores text. `service: URL` is short for `service: {url: URL}`: it gets {"text": ...} by POST and
    answers {"score": ...}.

    Answers are kept on disk, so a job that is stopped and started again asks for nothing twice.
    """

    preset: Literal["plain", "perspective"] = setting(
        "plain", "plain, or perspective for Google's API of that name", "perspective"
    )
    url: str = setting("", "where requests go; keys do not belong in it", "https://host/score")
    request: dict[str, Any] | None = setting(
        None, 'JSON to send; "{text}" stands for the text, "{texts}" for a list of them', {"input": "{text}"}
    )
    response: Named | None = setting(
        None, "path to the score in the answer; a number picks of a list, * takes all of it", "results.0.score"
    )
    batch: int = setting(1, "texts in one request", 16, ge=1, le=10_000)
    key_env: Named | None = setting(
        None, "environment variable that holds the key; the key itself is written nowhere", "SCORER_KEY"
    )
    key_header: str = setting(
        "Authorization: Bearer {key}",
        "the header that carries the key",
        "X-Api-Key: {key}",
        pattern=r"^[A-Za-z0-9-]+: ?[^\r\n]*\{key\}[^\r\n]*$",
    )
    key_query: Named | None = setting(None, "the URL's parameter that carries the key, instead of a header", "key")
    requests_per_s: float = setting(
        10.0,
        "most requests a second, all workers of a machine together; "
        "on a cluster, the service's limit divided by the number of machines",
        1.0,
        gt=0,
        le=100_000,
    )
    parallel: int = setting(4, "requests of one worker that wait for an answer at once", 4, ge=1, le=256)
    timeout: Seconds = setting(30.0, "longest wait for an answer", "30s", gt=0)
    retries: int = setting(6, "further attempts after 429, 5xx, no answer or no connection", 6, ge=0, le=100)
    backoff: Seconds = setting(1.0, "wait before the first retry; it doubles each time", "1s", gt=0)
    longest_wait: Seconds = setting(600.0, "longest wait before one retry, also when asked for more", "10 min", gt=0)
    max_bytes: int | None = setting(None, "only so much of the beginning of a text is sent", 20480, ge=1)
    cache: Named = setting(
        "auto", "file that answers are kept in, on a local disk (auto: in the user's cache folder)", "scores.sqlite"
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"url": value}
        if not isinstance(value, dict):
            return value
        preset = value.get("preset", "plain")
        if preset == "plain" and isinstance(value.get("batch"), int) and value["batch"] > 1:
            preset = "plain batch"
        return {**_PRESETS.get(str(preset), {}), **{k: v for k, v in value.items() if v is not None}}

    @field_validator("url")
    @classmethod
    def _http(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected a URL such as https://host/score, got {shown(value)}")
        if parts.username or parts.password:
            raise ValueError("a URL with a password in it would be logged: use key_env and key_header")
        return value

    @model_validator(mode="after")
    def _placeholders(self) -> ServiceSpec:
        if not self.url:
            raise ValueError("give the service's url, such as https://host/score")
        wanted = "{texts}" if self.batch > 1 else "{text}"
        if not _holds(self.request, wanted):
            raise ValueError(f'with batch: {self.batch} the request needs "{wanted}" as one of its values')
        return self


def _holds(value: Any, wanted: str) -> bool:
    if isinstance(value, dict):
        return any(_holds(inner, wanted) for inner in value.values())
    if isinstance(value, list):
        return any(_holds(inner, wanted) for inner in value)
    return value == wanted


_BEST = "best "


class Bounds(SpecSection):
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
