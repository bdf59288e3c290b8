"""How a scoring service is asked over HTTP: what is sent, where the score stands in the answer, and how fast."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import field_validator, model_validator

from bessemer.spec.clean.step import Named, setting
from bessemer.spec.part import ShortPart
from bessemer.spec.quantity import Seconds, shown

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


class ServiceSpec(ShortPart):
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
