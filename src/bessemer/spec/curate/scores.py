"""Settings of the curation steps that score documents (classifiers, perplexity, a user's function or HTTP service) or
rewrite them."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Discriminator, Tag, WithJsonSchema, field_validator, model_validator

from bessemer.spec.quantity import Seconds, Share, ShortSection, SpecSection, format_value, parse_share, setting
from bessemer.spec.text_steps import Named, StepSpec

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
    """An HTTP service that scores text. `service: URL` is short for `service: {url: URL}`: it receives {"text": ...} by
    POST and returns {"score": ...}.

    Answers are cached on disk, so a restarted job sends no text twice.
    """

    preset: Literal["plain", "perspective"] = setting("plain", "plain, or perspective (Google's API)", "perspective")
    url: str = setting("", "URL of the service, without keys", "https://host/score")
    request: dict[str, Any] | None = setting(
        None, 'JSON to send; "{text}" is replaced by the text, "{texts}" by a list of texts', {"input": "{text}"}
    )
    response: Named | None = setting(
        None, "path to the score in the answer; a number selects an entry of a list, * all entries", "results.0.score"
    )
    batch: int = setting(1, "texts per request", 16, ge=1, le=10_000)
    key_env: Named | None = setting(None, "environment variable with the key, which is written nowhere", "SCORER_KEY")
    key_header: str = setting(
        "Authorization: Bearer {key}",
        "header with the key",
        "X-Api-Key: {key}",
        pattern=r"^[A-Za-z0-9-]+: ?[^\r\n]*\{key\}[^\r\n]*$",
    )
    key_query: Named | None = setting(None, "URL parameter with the key, instead of a header", "key")
    requests_per_s: float = setting(
        10.0,
        "maximum requests per second of all workers of a machine; "
        "on a cluster, the service's limit divided by the number of machines",
        1.0,
        gt=0,
        le=100_000,
    )
    parallel: int = setting(4, "parallel requests per worker", 4, ge=1, le=256)
    timeout: Seconds = setting(30.0, "timeout of a request", "30s", gt=0)
    retries: int = setting(6, "retries after 429, 5xx, no answer or no connection", 6, ge=0, le=100)
    backoff: Seconds = setting(1.0, "wait before the first retry; doubles each time", "1s", gt=0)
    longest_wait: Seconds = setting(600.0, "maximum wait before a retry, whatever the service asks", "10 min", gt=0)
    max_bytes: int | None = setting(None, "maximum bytes of a text to send; longer texts are cut", 20480, ge=1)
    cache: Named = setting(
        "auto", "file of cached answers on a local disk (auto: in the user's cache)", "scores.sqlite"
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
            raise ValueError(f"expected a URL such as https://host/score, got {format_value(value)}")
        if parts.username or parts.password:
            raise ValueError("the URL contains a password, which would be logged: use key_env and key_header")
        return value

    @model_validator(mode="after")
    def _placeholders(self) -> ServiceSpec:
        if not self.url:
            raise ValueError("set url, such as https://host/score")
        placeholder = "{texts}" if self.batch > 1 else "{text}"
        if not _contains(self.request, placeholder):
            raise ValueError(f'with batch: {self.batch} the request needs "{placeholder}" as one of its values')
        return self


def _contains(value: Any, wanted: str) -> bool:
    if isinstance(value, dict):
        return any(_contains(inner, wanted) for inner in value.values())
    if isinstance(value, list):
        return any(_contains(inner, wanted) for inner in value)
    return value == wanted


_BEST = "best "


class Bounds(SpecSection):
    """The lowest and highest score to keep."""

    min: float | None = setting(None, "lowest score to keep", 0.5, ge=-1e12, le=1e12)
    max: float | None = setting(None, "highest score to keep", 2.5, ge=-1e12, le=1e12)

    @model_validator(mode="after")
    def _some(self) -> Bounds:
        if self.min is None and self.max is None:
            raise ValueError("set min or max, such as {max: 2.5}")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}: nothing would be kept")
        return self


def _parse_keep(value: Any) -> Any:
    """A number is the lowest score, a mapping is Bounds, and `best 25%` is checked and stays a string."""
    if isinstance(value, (dict, Bounds)):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, str) or not value.startswith(_BEST):
        raise ValueError(
            "expected a lowest score such as 0.5, bounds such as {max: 0.5}, or a share such as 'best 25%'; "
            f"got {format_value(value)}"
        )
    if parse_share(value.removeprefix(_BEST)) <= 0:
        raise ValueError(f"{format_value(value)} would keep nothing; remove the step or write a larger share")
    return value


def _keep_kind(value: Any) -> str:
    return "bounds" if isinstance(value, (dict, Bounds)) else "share" if isinstance(value, str) else "least"


def best_share(keep: object) -> float | None:
    """The share in `best 25%`; None for other values of `keep`."""
    return parse_share(keep.removeprefix(_BEST)) if isinstance(keep, str) else None


Keep = Annotated[
    Annotated[float, Tag("least")] | Annotated[Bounds, Tag("bounds")] | Annotated[str, Tag("share")],
    Discriminator(_keep_kind),
    BeforeValidator(_parse_keep),
    WithJsonSchema({"type": ["number", "string", "object"], "examples": ["best 25%"]}),
]
Per = Literal["corpus", "source"]
_PER = "whether a share such as best 25% is of the whole corpus or of each source"
_LABEL_ONLY = "not set: only label documents"


class QualitySpec(StepSpec, step="quality"):
    """Drops documents with a low classifier score. The label `quality` is the probability of the first class."""

    model: Named = setting(..., "a classifier trained on folders of good and other text", "quality.safetensors")
    keep: Keep | None = setting(None, f"lowest score, or a share such as best 25%; {_LABEL_ONLY}", 0.5)
    per: Per = setting("corpus", _PER, "source")


class DomainSpec(StepSpec, step="domain"):
    """Labels each document with the most probable class of a trained classifier, as `domain`, and can filter by it."""

    model: Named = setting(..., "a classifier trained on one folder per domain", "domain.safetensors")
    keep: list[str] | None = setting(None, f"domains to keep; {_LABEL_ONLY}", ["science", "news"], min_length=1)
    min_probability: float = setting(0.0, "documents below it get the domain unsure", 0.5, ge=0, le=1)


class PerplexitySpec(StepSpec, step="perplexity"):
    """Drops documents with a high perplexity under a small model of good text.

    The label `perplexity` is in bits per byte, comparable for long and short documents; `perplexity_part` is head,
    middle or tail as in CCNet.
    """

    model: Named = setting(..., "a model trained on good text", "wiki.safetensors")
    keep: Keep | None = setting(
        None,
        f"highest bits per byte, or a share such as best 30% (lowest first); {_LABEL_ONLY}",
        "best 30%",
        {"max": 2.5},
    )
    per: Per = setting("corpus", _PER, "source")
    head: Share = setting(0.3, "share of documents labelled head", "30%")
    middle: Share = setting(0.3, "share of documents labelled middle; the rest is the tail", "30%")

    @field_validator("keep")
    @classmethod
    def _bounded_above(cls, value: float | Bounds | str | None) -> float | Bounds | str | None:
        if isinstance(value, float):
            raise ValueError(f"low perplexity is good: write {{max: {value:g}}} for the highest to keep")
        return value

    @model_validator(mode="after")
    def _whole(self) -> PerplexitySpec:
        if self.head + self.middle > 1:
            raise ValueError(f"head {self.head:g} and middle {self.middle:g} sum to more than 1: lower them")
        return self


class ScoreSpec(StepSpec, step="score"):
    """Scores from your Python function or from an HTTP service. Set one of the two.

    Results are cached and recomputed when the function's file or these settings change. If only something behind them
    changed, set another `version`.
    """

    function: str | None = setting(
        None,
        "module:name or path/to/file.py:name of a function",
        "scorers.py:readability",
        pattern=r"^[^:\s][^:]*:[A-Za-z_]\w*$",
    )
    takes: Literal["texts", "text"] = setting(
        "texts",
        "texts: the function takes a list of texts and returns one number each; text: one text, one number",
        "text",
    )
    service: ServiceSpec | None = setting(None, "an HTTP service instead of a function", "https://host/score")
    name: str = setting("score", "name of the label", "toxicity", pattern=r"^[a-z][a-z0-9_]*$")
    keep: Keep | None = setting(
        None, f"lowest score, bounds, or a share such as best 25%; {_LABEL_ONLY}", 0.5, {"max": 0.5}, "best 25%"
    )
    better: Literal["higher", "lower"] = setting("higher", "which scores a share such as best 25% keeps", "lower")
    per: Per = setting("corpus", _PER, "source")
    version: str = setting("", "any string; a new one recomputes the scores", "2")

    @model_validator(mode="after")
    def _one(self) -> ScoreSpec:
        if (self.function is None) == (self.service is None):
            raise ValueError("set either function: file.py:name or service: URL")
        return self


class RewriteSpec(StepSpec, step="rewrite"):
    """Replaces documents by the output of your Python function, with the label `rewritten`.

    The function gets a list of texts and returns as many; None or an empty text keeps the original. A step cannot add
    documents: to train on original and rewritten text, list the same path as two sources and give one of them this
    step. Conversations are not changed. Results are cached until the function's file or these settings change.
    """

    function: str = setting(
        ...,
        "module:name or path/to/file.py:name of a function from a list of texts to a list of texts",
        "rewriters.py:paraphrase",
        pattern=r"^[^:\s][^:]*:[A-Za-z_]\w*$",
    )
    share: Share = setting(1.0, "share of documents to rewrite, chosen by a hash of the text", "10%")
    texts: int = setting(32, "maximum texts per call of the function", 32, ge=1)
    version: str = setting("", "any string; a new one rewrites the texts again", "2")
