"""A scoring service is asked as it wants to be asked, again when it fails, at its pace, and never twice for a text."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.data.curate.scores import service as service_module
from bessemer.data.curate.scores.service import AnswerCache, Service, _fill_template, _value_at
from bessemer.data.curate.scores.user_function import Score
from bessemer.data.read.entry import Document
from bessemer.endpoint import parse_retry_after
from bessemer.errors import UserError
from bessemer.spec.curate.scores import ScoreSpec, ServiceSpec

Answer = tuple[int, dict[str, str], Any]  # status, headers, JSON or raw bytes
KEY = "s3cret/key+1"


class Server:
    """A real server on this machine. `answer` decides what comes back; every request is written down."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.answer: Callable[[dict[str, Any]], Answer] = lambda asked: (200, {}, {"score": len(asked["text"])})
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.requests.append(asked)
                    outer.times.append(time.monotonic())
                    outer.headers.append(dict(self.headers))
                    outer.paths.append(self.path)
                    status, headers, body = outer.answer(asked)
                if status == 0:  # hang up
                    self.connection.close()
                    return
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # the client has given up waiting
                    self.close_connection = True

            def log_message(self, *args: Any) -> None:
                return

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/score"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def failing(self, times: int, status: int = 503, headers: dict[str, str] | None = None) -> None:
        """Fails the first requests, then answers."""
        good = self.answer

        def answer(asked: dict[str, Any]) -> Answer:
            return (status, headers or {}, b"busy") if len(self.requests) <= times else good(asked)

        self.answer = answer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running = Server()
    yield running
    running.http.shutdown()
    running.http.server_close()


@pytest.fixture
def service(server: Server, tmp_path: Path) -> Callable[..., Service]:
    def make(version: str = "", **settings: Any) -> Service:
        fast = {"backoff": "0.01s", "requests_per_s": 10_000.0, "timeout": "5s", "cache": str(tmp_path / "a.sqlite")}
        spec = ServiceSpec.model_validate({"url": server.url, **fast, **settings})
        return Service(spec, version)

    return make


def places(texts: list[str]) -> list[str]:
    return [f"f.jsonl:{i + 1}" for i in range(len(texts))]


def ask(service: Service, *texts: str) -> list[float]:
    return service.scores(list(texts), places(list(texts)))


def test_each_text_is_asked_for_once(server: Server, service: Callable[..., Service], tmp_path: Path) -> None:
    assert ask(service(), "a", "bbb", "a", "cc") == [1, 3, 1, 2]
    assert sorted(request["text"] for request in server.requests) == ["a", "bbb", "cc"]
    assert ask(service(), "bbb", "dddd") == [3, 4]  # another process, a resumed job
    assert [request["text"] for request in server.requests[3:]] == ["dddd"]
    assert ask(service(version="2"), "a") == [1]  # scores are to be computed anew
    assert len(server.requests) == 5
    assert b"bbb" not in (tmp_path / "a.sqlite").read_bytes()


def test_requests_and_answers_of_another_shape(server: Server, service: Callable[..., Service]) -> None:
    server.answer = lambda asked: (200, {}, {"results": [{"score": 0.25, "of": asked["in"]["body"]}]})
    made = service(request={"in": {"body": "{text}", "lang": ["en"]}, "n": 1}, response="results.0.score")
    assert ask(made, "x") == [0.25]
    assert server.requests == [{"in": {"body": "x", "lang": ["en"]}, "n": 1}]


def test_batches(server: Server, service: Callable[..., Service]) -> None:
    server.answer = lambda asked: (200, {}, {"scores": [len(text) for text in asked["texts"]]})
    assert ask(service(batch=3, parallel=1), *("a" * n for n in range(1, 8))) == list(range(1, 8))
    assert [len(request["texts"]) for request in server.requests] == [3, 3, 1]
    server.answer = lambda asked: (200, {}, [{"p": len(text)} for text in asked["all"]])
    assert ask(service(batch=2, request={"all": "{texts}"}, response="*.p"), "xx", "y") == [2, 1]
    server.answer = lambda asked: (200, {}, {"scores": [1.0]})
    with pytest.raises(UserError, match=r"expected a list of 2 scores.*asked about f\.jsonl:1"):
        ask(service(batch=2), "new", "newer")


def test_perspective(server: Server, service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSPECTIVE_API_KEY", KEY)
    server.answer = lambda asked: (200, {}, {"attributeScores": {"TOXICITY": {"summaryScore": {"value": 0.5}}}})
    assert ask(service(preset="perspective"), "é" * 20_000) == [0.5]
    sent = server.requests[0]
    assert sent["requestedAttributes"] == {"TOXICITY": {}} and sent["doNotStore"] is True
    assert sent["comment"]["text"] == "é" * 10_240
    assert server.paths == ["/score?key=s3cret%2Fkey%2B1"] and "Authorization" not in server.headers[0]


def test_keys_come_from_the_environment_and_go_nowhere_else(
    server: Server, service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = service(key_env="SCORER_KEY")
    monkeypatch.delenv("SCORER_KEY", raising=False)
    with pytest.raises(UserError, match="set the environment variable SCORER_KEY"):
        ask(made, "a")
    assert not server.requests
    monkeypatch.setenv("SCORER_KEY", f" {KEY}\n")  # as a file with a newline at its end gives it
    assert ask(made, "a") == [1]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert ask(service(key_env="SCORER_KEY", key_header="X-Api-Key: {key}"), "b") == [1]
    assert server.headers[1]["X-Api-Key"] == KEY
    server.answer = lambda asked: (403, {}, f"bad key {KEY} or s3cret%2Fkey%2B1".encode())
    with pytest.raises(UserError, match=r"status 403 \(bad key \*\*\* or \*\*\*\); check .* SCORER_KEY") as error:
        ask(made, "c")
    assert "s3cret" not in str(error.value)
    monkeypatch.setenv("SCORER_KEY", "two\nlines")
    with pytest.raises(UserError, match="holds characters that no key has") as error:
        ask(made, "d")
    assert "lines" not in str(error.value)
    assert ask(made, "a") == [1]  # what is known needs no key
    for path in tmp_path.iterdir():
        assert b"s3cret" not in path.read_bytes()


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 0])
def test_a_service_that_fails_is_asked_again(
    server: Server, service: Callable[..., Service], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backoffs: list[tuple[int, float]] = []

    def counted(attempt: int, first_s: float, longest_s: float) -> float:
        backoffs.append((attempt, first_s))
        return 0.0

    monkeypatch.setattr(service_module, "backoff_s", counted)
    server.failing(2, status)
    assert ask(service(retries=2, parallel=1), "abc") == [3]
    assert len(server.requests) == 3
    assert backoffs == [(0, 0.01), (1, 0.01)]


def test_a_service_that_goes_on_failing_is_an_error(server: Server, service: Callable[..., Service]) -> None:
    server.failing(10**9)
    with pytest.raises(UserError, match=r"/score: status 503 \(busy\) after 3 attempts; .*\(asked about f\.jsonl:1\)"):
        ask(service(retries=2), "abc")
    assert len(server.requests) == 3
    with pytest.raises(UserError, match="after one attempt"):
        ask(service(retries=0), "abc")


def test_no_connection_and_no_answer_are_errors_after_retries(
    server: Server, service: Callable[..., Service], tmp_path: Path
) -> None:
    def slow(asked: dict[str, Any]) -> Answer:
        time.sleep(0.3)
        return 200, {}, {"score": 1}

    server.answer = slow
    with pytest.raises(UserError, match=r"no answer \(.*timed out.*\) after 2 attempts"):
        ask(service(retries=1, timeout="0.05s"), "abc")
    with pytest.raises(UserError, match=r"no answer \(.*refused.*\) after 2 attempts"):
        ask(service(url="http://127.0.0.1:9/score", retries=1), "abc")


def test_retry_after_is_respected_by_all(server: Server, service: Callable[..., Service]) -> None:
    def slow(asked: dict[str, Any]) -> Answer:
        time.sleep(0.03)
        return 200, {}, {"score": len(asked["text"])}

    server.answer = slow
    server.failing(1, 429, {"Retry-After": "0.5"})
    texts = ["a" * n for n in range(1, 20)]
    assert ask(service(parallel=2), *texts) == list(range(1, 20))
    early = [moment for moment in server.times if moment - server.times[0] < 0.45]
    assert len(early) < 12  # one was refused, and the other thread asked on until it knew; else there are 15
    # Another worker, which has seen no refusal, waits too: the pause is in the shared file.
    made, begun = service(), time.monotonic()
    made.answers.hold(made.shown_url, 0.4)
    assert ask(service(), "b" * 30) == [30]
    assert time.monotonic() - begun >= 0.39


def test_a_pause_that_is_too_long_is_an_error(server: Server, service: Callable[..., Service]) -> None:
    server.failing(1, 429, {"Retry-After": "3600"})
    with pytest.raises(UserError, match=r"status 429 \(busy\), asking for a pause of 3600 s after one attempt"):
        ask(service(longest_wait="1 min"), "a")
    assert len(server.requests) == 1


def test_retry_after_as_a_date() -> None:
    assert 50 < (parse_retry_after(formatdate(time.time() + 60, usegmt=True)) or 0) <= 60
    assert parse_retry_after(formatdate(time.time() - 60, usegmt=True)) == 0
    assert parse_retry_after("soon") is None and parse_retry_after(None) is None and parse_retry_after("-3") == 0


def test_the_rate_limit_holds_over_threads(server: Server, service: Callable[..., Service]) -> None:
    begun = time.monotonic()
    ask(service(requests_per_s=40.0, parallel=8), *(str(i) for i in range(12)))
    assert max(server.times) - begun >= 11 / 40 - 0.01


def _turns(path: Path) -> list[float]:
    answers = AnswerCache(path)
    return [time.time() + answers.turn("http://host/", 10.0) for _ in range(20)]


def test_the_rate_limit_holds_over_processes(tmp_path: Path) -> None:
    """Nobody waits here: the turns that three processes take at once are far enough apart."""
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.map(_turns, [tmp_path / "new" / "a.sqlite"] * 3)
    taken = sorted(turn for turns in found for turn in turns)
    assert len(taken) == 60 and min(np.diff(taken)) > 5


def _worker(url: str, cache: str, first: int) -> None:
    spec = ServiceSpec.model_validate({"url": url, "requests_per_s": 1000.0, "parallel": 4, "cache": cache})
    texts = [f"{first}-{i}" for i in range(8)]
    assert Service(spec).scores(texts, ["p"] * 8) == [len(text) for text in texts]


def test_several_processes_share_a_new_file(server: Server, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    cache = str(tmp_path / "new" / "a.sqlite")
    workers = [context.Process(target=_worker, args=(server.url, cache, k)) for k in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(server.requests) == 24 == len({request["text"] for request in server.requests})
    for k in range(3):
        _worker(server.url, cache, k)
    assert len(server.requests) == 24


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>", r"no score at 'score' of its answer \(Expecting value.*<html>; check service\.response"),
        ({"result": 1}, r"there is no 'score'\): \{\"result\": 1\}"),
        ({"score": "0.5"}, r"a score is '0\.5', not a number"),
        ({"score": True}, r"a score is True, not a number"),
        ({"score": None}, r"a score is None, not a number"),
        (b'{"score": NaN}', r"a score is nan, not a number"),
        (b'{"score": 1e999}', r"a score is inf, not a number"),
        (b"", r"no score at"),
        ([], r"no score at"),
    ],
)
def test_malformed_answers_name_the_url_and_the_document(
    server: Server, service: Callable[..., Service], body: Any, message: str
) -> None:
    server.answer = lambda asked: (200, {}, body)
    with pytest.raises(UserError, match=message) as error:
        ask(service(), "abc")
    assert str(error.value).startswith(server.url) and "(asked about f.jsonl:1)" in str(error.value)
    assert "\n" not in str(error.value)
    assert len(server.requests) == 1  # asking again would not help


def test_other_refusals_are_not_asked_again(server: Server, service: Callable[..., Service]) -> None:
    server.answer = lambda asked: (400, {}, {"error": "text is empty " + "x" * 1000})
    with pytest.raises(UserError, match=r"status 400 .*\.\.\.\); check service\.request") as error:
        ask(service(), "")
    assert len(str(error.value)) < 500 and len(server.requests) == 1
    server.answer = lambda asked: (302, {"Location": "http://elsewhere/"}, b"")
    with pytest.raises(UserError, match=r"status 302; it leads to http://elsewhere/: set service\.url"):
        ask(service(key_env=None), "b")


def test_parameters_of_the_url_are_sent_but_not_shown(server: Server, service: Callable[..., Service]) -> None:
    server.answer = lambda asked: (400, {}, b"")
    with pytest.raises(UserError) as error:
        ask(service(url=server.url + "?token=hidden"), "b")
    assert server.paths == ["/score?token=hidden"] and "hidden" not in str(error.value)


def test_answers_before_a_failure_are_kept(server: Server, service: Callable[..., Service]) -> None:
    good = server.answer
    server.answer = lambda asked: (400, {}, b"no") if asked["text"] == "bad" else good(asked)
    with pytest.raises(UserError, match=r"asked about f\.jsonl:3"):
        ask(service(parallel=1), "a", "bb", "bad", "dddd")
    assert [request["text"] for request in server.requests[:3]] == ["a", "bb", "bad"]
    server.answer = good
    asked = len(server.requests)
    ask(service(), "a", "bb", "bad", "dddd")
    assert {request["text"] for request in server.requests[asked:]} <= {"bad", "dddd"}


def test_a_failure_leaves_no_queue_behind(server: Server, service: Callable[..., Service]) -> None:
    server.answer = lambda asked: (400, {}, b"no")
    with pytest.raises(UserError):
        ask(service(requests_per_s=5.0, parallel=1), *(str(i) for i in range(500)))
    made = service(requests_per_s=5.0)
    assert made.answers.turn(made.shown_url, 0.2) < 2.0


def _forever(url: str, cache: str) -> None:
    spec = ServiceSpec.model_validate({"url": url, "parallel": 1, "requests_per_s": 100.0, "cache": cache})
    Service(spec).scores([str(i) for i in range(1000)], ["p"] * 1000)


def test_a_killed_job_asks_for_nothing_twice(server: Server, tmp_path: Path) -> None:
    cache = str(tmp_path / "a.sqlite")
    context = multiprocessing.get_context("spawn")
    job = context.Process(target=_forever, args=(server.url, cache))
    job.start()
    while len(server.requests) < 10:
        time.sleep(0.01)
    assert job.pid is not None
    os.kill(job.pid, signal.SIGKILL)
    job.join()
    before = [request["text"] for request in server.requests]
    spec = ServiceSpec.model_validate({"url": server.url, "requests_per_s": 1e4, "cache": cache})
    assert Service(spec).scores([str(i) for i in range(20)], ["p"] * 20) == [len(str(i)) for i in range(20)]
    again = [request["text"] for request in server.requests[len(before) :]]
    assert set(again) & set(before[:-1]) == set()  # the last one's answer may not have come before the kill
    assert len(again) < 12


def test_the_file_of_answers(tmp_path: Path) -> None:
    answers = AnswerCache(tmp_path / "x" / "a.sqlite")
    keys = [str(i).encode() for i in range(2000)]
    answers.put([(key, float(i)) for i, key in enumerate(keys)])
    answers.put([(keys[0], 99.0)])  # the first answer stays
    assert AnswerCache(answers.path).get([*keys, b"other"]) == {key: float(i) for i, key in enumerate(keys)}
    (tmp_path / "bad.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(UserError, match=r"bad\.sqlite: .*set service\.cache to a file on a local disk"):
        AnswerCache(tmp_path / "bad.sqlite").get([b"a"])


def test_a_clock_that_went_back_does_not_hold_up_for_ever(tmp_path: Path) -> None:
    answers = AnswerCache(tmp_path / "a.sqlite")
    answers.turn("u", 1.0)
    with sqlite3.connect(answers.path) as connection:
        connection.execute("UPDATE turns SET next_s = next_s + 100000")
    assert answers.turn("u", 1.0) == 0


def test_paths_and_templates() -> None:
    assert _value_at({"a": [{"b": 1}, {"b": 2}]}, ["a", "*", "b"]) == [1, 2]
    assert _value_at({"a": [5, 6]}, ["a", "1"]) == 6
    for wrong in (["a", "9"], ["a", "x"], ["b"], ["a", "0", "c"], ["*"]):
        with pytest.raises((ValueError, LookupError)):
            _value_at({"a": [5, 6]}, wrong)
    assert _fill_template(["{texts}", {"x": "{text}"}, "text"], ["p", "q"]) == [["p", "q"], {"x": "p"}, "text"]


def test_the_step_with_a_service(server: Server, tmp_path: Path) -> None:
    spec = {"service": {"url": server.url, "cache": str(tmp_path / "a.sqlite")}, "keep": {"max": 2.0}}
    step = Score(ScoreSpec.model_validate(spec), 0)
    documents = [Document("abc", "f.jsonl", 1), Document("a", "f.jsonl", 2)]
    assert step.collect(documents, np.array([0, 5]))["score"].tolist() == [3, 1]
    assert step.identity == ""
