"""Load on an OpenAI-compatible server (`bessemer bench serve`): requests arrive by a Poisson process, whether or not
earlier ones have ended, so a server that falls behind shows it. Latencies count from the planned arrival.

TTFT is the time to the first token, TPOT the mean time of a further one, ITL a gap between two events, goodput the
requests per second that meet every limit of `--slo`.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from bessemer.errors import UserError


@dataclass(frozen=True)
class Promise:
    """Limits that a request must meet, in seconds; None: none."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    latency_s: float | None = None


PROMISES = {
    "interactive": Promise(ttft_s=0.5, tpot_s=0.05),  # a person reads along
    "streaming": Promise(ttft_s=2.0, tpot_s=0.1),
    "edge": Promise(ttft_s=3.0, tpot_s=0.25),  # small machines
    "batch": Promise(latency_s=60.0),
}
ATTAINED = 0.95  # share of requests that must meet the promise


@dataclass(frozen=True)
class Load:
    """What is sent. `lengths` are (prompt, answer, weight); each is drawn from half to one and a half times."""

    url: str
    model: str | None = None
    requests: int = 100
    rate: float = 4.0  # per second; 0: all at once
    lengths: Sequence[tuple[int, int, float]] = ((256, 128, 1.0),)
    chat: bool = False
    ignore_eos: bool = False  # answers of full length; some servers refuse the option
    seed: int = 0
    key: str | None = None
    timeout_s: float = 600.0
    seconds: float | None = None  # the measurement ends then; requests that have not ended are left out of the rates


@dataclass
class RequestTimes:
    """One request; times are seconds from its planned arrival."""

    arrival_s: float
    prompt_tokens: int = 0
    tokens: int = 0
    events_s: list[float] = field(default_factory=list)  # of each piece of text
    end_s: float = 0.0
    error: str | None = None
    unfinished: bool = False  # as the measurement ended

    @property
    def ttft_s(self) -> float:
        return self.events_s[0] if self.events_s else self.end_s

    @property
    def tpot_s(self) -> float:
        return (self.end_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else 0.0

    def meets(self, promise: Promise) -> bool:
        pairs = ((self.ttft_s, promise.ttft_s), (self.tpot_s, promise.tpot_s), (self.end_s, promise.latency_s))
        return self.error is None and all(limit is None or value <= limit for value, limit in pairs)


def parse_lengths(text: str) -> list[tuple[int, int, float]]:
    """`256x128`, or a mix such as `128x64:0.8,2048x256:0.2`."""
    lengths = []
    for part in text.split(","):
        sizes, _, weight = part.partition(":")
        prompt, _, answer = sizes.partition("x")
        try:
            lengths.append((int(prompt), int(answer), float(weight or 1)))
            if min(lengths[-1]) <= 0:
                raise ValueError
        except ValueError:
            raise UserError(f"--lengths {part}: write PROMPTxANSWER:SHARE, such as 256x128 or 128x64:0.8") from None
    return lengths


def plan_requests(load: Load) -> list[tuple[float, int, int]]:
    """(arrival in seconds, prompt tokens, answer tokens) of each request."""
    draw, at, planned = random.Random(load.seed), 0.0, []
    weights = [weight for _, _, weight in load.lengths]
    for _ in range(load.requests):
        prompt, answer, _ = draw.choices(load.lengths, weights)[0]
        planned.append(
            (at, draw.randint(max(1, prompt // 2), prompt * 3 // 2), draw.randint(max(1, answer // 2), answer * 3 // 2))
        )
        at += draw.expovariate(load.rate) if load.rate > 0 else 0.0
    return planned


class Target:
    """A server, checked once: its address and the model's name."""

    def __init__(self, load: Load) -> None:
        parts = urlsplit(load.url if "//" in load.url else f"http://{load.url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{load.url}: write a URL such as http://127.0.0.1:8000/v1")
        self.secure, self.host, self.port = parts.scheme == "https", parts.hostname, parts.port
        self.path, self.timeout_s = parts.path.rstrip("/") or "/v1", load.timeout_s
        self.headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {load.key}"} if load.key else {}
        )
        self.model = load.model or self.first_model(load.url)

    def connect(self) -> http.client.HTTPConnection:
        if self.secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self.host, self.port, timeout=self.timeout_s, context=context)
        return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_s)

    def first_model(self, url: str) -> str:
        try:
            connection = self.connect()
            connection.request("GET", f"{self.path}/models", headers=self.headers)
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise UserError(
                    f"{url}: /models answers with status {response.status}: {body[:200].decode(errors='replace')}"
                )
            return str(json.loads(body)["data"][0]["id"])
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"{url}: cannot be reached ({error}); is the server running?") from None
        except (ValueError, LookupError, TypeError):
            raise UserError(f"{url}: /models lists no model: give its name with --model") from None


def send(
    target: Target, load: Load, number: int, start: float, prompt_tokens: int, times: RequestTimes, answer: int
) -> None:
    """One streamed request, timed."""
    draw = random.Random(load.seed * 1_000_003 + number)
    text = " ".join(draw.choice(WORDS) for _ in range(prompt_tokens))
    body: dict[str, Any] = {
        "model": target.model, "max_tokens": answer, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    body |= {"ignore_eos": True} if load.ignore_eos else {}
    body |= {"messages": [{"role": "user", "content": text}]} if load.chat else {"prompt": text}
    connection = target.connect()
    try:
        path = f"{target.path}/{'chat/' * load.chat}completions"
        connection.request("POST", path, json.dumps(body), target.headers)
        response = connection.getresponse()
        if response.status != 200:
            times.error = f"status {response.status}: {response.read()[:200].decode(errors='replace')}"
            return
        _read_events(response, start, times)
    except (OSError, http.client.HTTPException, ValueError) as error:
        times.error = f"{type(error).__name__}: {error}"
    finally:
        times.end_s = time.perf_counter() - start
        connection.close()


def _read_events(response: http.client.HTTPResponse, start: float, times: RequestTimes) -> None:
    finished = False
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            finished = True
            break
        chunk = json.loads(data)
        if "error" in chunk:
            times.error = str(chunk["error"])
            return
        for choice in chunk.get("choices", ()):
            finished |= bool(choice.get("finish_reason"))  # `transformers serve` sends no [DONE]
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                times.events_s.append(time.perf_counter() - start)
        if usage := chunk.get("usage"):
            times.prompt_tokens, times.tokens = usage["prompt_tokens"], usage["completion_tokens"]
    times.tokens = times.tokens or len(times.events_s)
    if not finished:
        times.error = "the stream ended before its answer did"


@dataclass(frozen=True)
class ServeReport:
    """The measurements of one load. Rates are over the time from the first arrival to the last end, and of the requests
    that completed."""

    model: str
    load: Load
    seconds: float
    times: Sequence[RequestTimes]

    @property
    def completed(self) -> list[RequestTimes]:
        return [times for times in self.times if times.error is None]

    def percentiles(self) -> dict[str, dict[str, float]]:
        done = self.completed
        gaps = [b - a for times in done for a, b in zip(times.events_s, times.events_s[1:], strict=False)]
        values = {"ttft_s": [t.ttft_s for t in done], "tpot_s": [t.tpot_s for t in done if t.tokens > 1],
                  "itl_s": gaps, "latency_s": [t.end_s for t in done]}  # fmt: skip
        return {name: {f"p{q}": percentile(some, q) for q in (50, 95, 99)} for name, some in values.items() if some}

    def summary(self, promise: Promise | None = None) -> dict[str, Any]:
        done, unfinished = self.completed, sum(times.unfinished for times in self.times)
        numbers: dict[str, Any] = {
            "model": self.model, "requests": len(self.times), "failed": len(self.times) - len(done) - unfinished,
            "unfinished": unfinished,
            "seconds": self.seconds, "requests_per_s": len(done) / self.seconds,
            "output_tokens_per_s": sum(t.tokens for t in done) / self.seconds,
            "prompt_tokens_per_s": sum(t.prompt_tokens for t in done) / self.seconds, **self.percentiles(),
        }  # fmt: skip
        if promise is not None:
            met = sum(times.meets(promise) for times in self.times)
            attained = met / len(self.times)
            numbers |= {"goodput_per_s": met / self.seconds, "attained": attained, "promise": asdict(promise),
                        "passed": attained >= ATTAINED}  # fmt: skip
        return numbers


def percentile(values: Sequence[float], q: float) -> float:
    """Linear between the nearest ranks, as numpy has it."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * q / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def measure_load(load: Load, report: Callable[[str], None] = lambda line: None) -> ServeReport:
    """Send the load, one thread for each request, and wait for all answers, or until `load.seconds` are over."""
    target, planned = Target(load), plan_requests(load)
    times = [RequestTimes(arrival) for arrival, _, _ in planned]
    threads = []
    start = time.perf_counter()
    end = start + load.seconds if load.seconds is not None else math.inf
    for number, (arrival, prompt, answer) in enumerate(planned):
        if start + arrival > end:
            break
        time.sleep(max(0.0, start + arrival - time.perf_counter()))
        args = (target, load, number, start + arrival, prompt, times[number], answer)
        threads.append(threading.Thread(target=send, args=args, daemon=True))
        threads[-1].start()
        if number % 50 == 49:
            report(f"{number + 1} of {load.requests} requests sent")
    for thread in threads:
        thread.join(None if end == math.inf else max(0.0, end - time.perf_counter()))
    now = time.perf_counter() - start
    times = [_at_the_end(each, now) for each in times[: len(threads)]]
    ends = [each.arrival_s + each.end_s for each in times if each.error is None]
    cut = any(each.unfinished for each in times) and ends
    return ServeReport(target.model, load, max(ends) if cut else now, times)


def _at_the_end(times: RequestTimes, now: float) -> RequestTimes:
    """A copy of what its thread may still write."""
    if times.end_s:
        return times
    error = f"not ended {now:.0f} s after the first request"
    return replace(times, events_s=list(times.events_s), end_s=now - times.arrival_s, error=error, unfinished=True)


def table(summary: dict[str, Any]) -> list[str]:
    """The report for a terminal."""
    answered = summary["requests"] - summary["failed"] - summary["unfinished"]
    cut = f"{summary['unfinished']} not ended, " if summary["unfinished"] else ""
    lines = [
        f"model       {summary['model']}",
        f"requests    {answered} answered, {summary['failed']} failed, {cut}in {summary['seconds']:.1f} s "
        f"({summary['requests_per_s']:.2f} a second)",
        f"tokens/s    {summary['output_tokens_per_s']:,.0f} new, {summary['prompt_tokens_per_s']:,.0f} of prompts",
        "", "               p50       p95       p99",
    ]  # fmt: skip
    for name, text in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("itl_s", "ITL"), ("latency_s", "latency")):
        if name in summary:
            lines.append(f"{text:8}" + "".join(f"{1000 * value:8,.1f}ms" for value in summary[name].values()))
    if "passed" in summary:
        limits = ", ".join(
            f"{name.removesuffix('_s').upper()} {value:g} s" for name, value in summary["promise"].items() if value
        )
        verdict = f"{'passed' if summary['passed'] else 'FAILED'} ({ATTAINED:.0%} needed)"
        lines += ["", f"goodput     {summary['goodput_per_s']:.2f} requests/s within {limits}",
                  f"promise     {verdict}: {summary['attained']:.1%} of requests met it"]  # fmt: skip
    return lines


WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he",
          "this", "are", "or", "his", "from", "at", "which", "but", "have", "an", "had", "they", "you")  # fmt: skip
