"""A client of endpoints that follow OpenAI's chat completions, and the one HTTP request with JSON that it is made of.

Requests are retried with back-off after 408, 429, 5xx, a lost connection or a timeout; `Retry-After` is respected. Keys
come from an environment variable, are read when the first request is made, and appear in no message.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlsplit

from bessemer.errors import UserError
from bessemer.storage import backoff_s

RETRIED_STATUSES = {408, 429, 500, 502, 503, 504}
MAX_ANSWER_BYTES = 64 << 20
LONGEST_WAIT_S = 600.0
EXCERPT_CHARS = 200


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would change the request and send the key to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class RequestFailed(Exception):
    """One request failed. `again`: another attempt may help, after `pause_s` if the server named it."""

    def __init__(
        self, why: str, again: bool, pause_s: float | None = None, status: int | None = None, location: str = ""
    ) -> None:
        super().__init__(why)
        self.why, self.again, self.pause_s, self.status, self.location = why, again, pause_s, status, location


class Stopped(Exception):
    """Another request has failed for good."""


def post_json(url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> bytes:
    """One POST request. Raises RequestFailed."""
    headers = {"Content-Type": "application/json", "User-Agent": "bessemer", **headers}
    opener = urllib.request.build_opener(_NoRedirect)  # reads the proxies of the environment
    try:
        with opener.open(urllib.request.Request(url, body, headers, method="POST"), timeout=timeout_s) as answer:
            data: bytes = answer.read(MAX_ANSWER_BYTES)
            return data
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(MAX_ANSWER_BYTES)[: 4 * EXCERPT_CHARS].decode(errors="replace")
        why = f"status {error.code}" + (f" ({shorten(text)})" if text.strip() else "")
        pause_s = parse_retry_after(error.headers.get("Retry-After"))
        location = error.headers.get("Location", "another place")
        raise RequestFailed(why, error.code in RETRIED_STATUSES, pause_s, error.code, location) from error
    except (OSError, http.client.HTTPException) as error:  # no connection, or no complete answer
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise RequestFailed(f"its certificate is not valid ({error})", again=False) from error
        raise RequestFailed(f"no answer ({reason or type(error).__name__})", again=True) from error


def parse_retry_after(value: str | None) -> float | None:
    """Seconds, from a number of them or a date."""
    try:
        if value is not None and value.strip().endswith("GMT"):
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        return None if value is None else max(0.0, float(value))
    except (ValueError, TypeError):
        return None


def environment_key(name: str | None, service: str) -> str:
    """The key of a service from the environment; empty without a name."""
    if name is None:
        return ""
    key = os.environ.get(name, "").strip()
    if not key:
        raise UserError(f"{service}: its key is missing: set the environment variable {name}")
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"the environment variable {name} holds characters that no key has; set it again")
    return key


def hide_key(message: str, key: str) -> str:
    """A server may echo the request, so every message passes through here."""
    for secret in {key, quote(key, safe="")} - {""}:
        message = message.replace(secret, "***")
    return message


def shown_url(url: str) -> str:
    """Without query parameters, which may hold secrets."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= EXCERPT_CHARS else text[:EXCERPT_CHARS] + "..."


def pause(wait_s: float, stop: threading.Event) -> None:
    """Waits unless another request has failed for good."""
    if stop.wait(wait_s) if wait_s > 0 else stop.is_set():
        raise Stopped


@dataclass(frozen=True)
class EndpointAnswer:
    """An answer; `finished` unless it was cut off at the maximum length."""

    text: str
    finished: bool


@dataclass(frozen=True)
class Endpoint:
    """A model at `url`, the base that ends in /v1. Sends nothing, and needs no key, before the first conversation."""

    url: str
    model: str
    key_env: str | None = None
    temperature: float = 0.0
    max_tokens: int = 512
    parallel: int = 8
    timeout: float = 60.0
    retries: int = 5
    backoff: float = field(default=1.0, repr=False)

    def complete(self, conversations: Sequence[Sequence[Mapping[str, Any]]], seed: int = 0) -> list[EndpointAnswer]:
        """An answer to each conversation, `parallel` at a time. A failure that retries do not cure is a UserError.

        With a temperature each request has its own seed, which not every endpoint respects."""
        if not conversations:
            return []
        key, stop = environment_key(self.key_env, shown_url(self.url)), threading.Event()
        answers: list[EndpointAnswer | None] = [None] * len(conversations)

        def ask(number: int) -> None:
            answers[number] = self._ask(conversations[number], seed + number, key, stop)

        with ThreadPoolExecutor(min(self.parallel, len(conversations))) as pool:
            try:
                for future in as_completed([pool.submit(ask, number) for number in range(len(conversations))]):
                    future.result()  # reports the first failure
            finally:
                stop.set()
        return [answer for answer in answers if answer is not None]

    def _ask(self, messages: Sequence[Mapping[str, Any]], seed: int, key: str, stop: threading.Event) -> EndpointAnswer:
        request: dict[str, Any] = {
            "model": self.model, "messages": [dict(message) for message in messages],
            "temperature": self.temperature, "max_tokens": self.max_tokens,
        }  # fmt: skip
        if self.temperature > 0:
            request["seed"] = seed % 2**31
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = json.dumps(request).encode()
        for attempt in range(self.retries + 1):
            pause(0, stop)
            try:
                return self._read(post_json(f"{self.url}/chat/completions", body, headers, self.timeout), key)
            except RequestFailed as failure:
                if not failure.again:
                    raise self._failed(f"{failure.why}{self._advice(failure)}", key) from failure
                wait_s = failure.pause_s
                if attempt == self.retries or (wait_s is not None and wait_s > LONGEST_WAIT_S):
                    attempts = f"{attempt + 1} attempts" if attempt else "one attempt"
                    raise self._failed(f"{failure.why} after {attempts}; run again later", key) from failure
            pause(backoff_s(attempt, self.backoff) if wait_s is None else wait_s, stop)
        raise AssertionError  # the last attempt returns or raises

    def _advice(self, failure: RequestFailed) -> str:
        if failure.status in (401, 403):
            return f"; check the environment variable {self.key_env}" if self.key_env else "; set key_env"
        if failure.status is not None and 300 <= failure.status < 400:
            return f"; it leads to {failure.location}: set url to that"
        return "; check url (it ends in /v1) and model" if failure.status else ""

    def _read(self, data: bytes, key: str) -> EndpointAnswer:
        try:
            choice = json.loads(data)["choices"][0]
            text = choice["message"].get("content") or ""
            if not isinstance(text, str):
                raise TypeError("content is no text")
            return EndpointAnswer(text, choice.get("finish_reason") != "length")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            excerpt = shorten(data[: 4 * EXCERPT_CHARS].decode(errors="replace"))
            raise self._failed(f"no chat completion in its answer ({error}): {excerpt}; check url", key) from error

    def _failed(self, why: str, key: str) -> UserError:
        return UserError(hide_key(f"{shown_url(self.url)} ({self.model}): {why}", key))
