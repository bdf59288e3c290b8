"""The client of chat completions against a real server on this machine: order, retries, keys, messages."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bessemer.endpoint import Endpoint, EndpointAnswer, RequestFailed, post_json
from bessemer.errors import UserError

KEY = "sk-very-secret"
Answer = tuple[int, Any, dict[str, str]]  # status, JSON, headers


class ChatServer:
    """Answers with `answer(request, count)`; records requests and how many were served at the same time."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.active = self.most_active = 0
        self.answer: Callable[[dict[str, Any], int], Answer] = lambda request, count: completion("ok")
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.requests.append({"path": self.path, **request})
                    outer.headers.append(dict(self.headers))
                    outer.active += 1
                    outer.most_active = max(outer.most_active, outer.active)
                    count = len(outer.requests)
                status, value, headers = outer.answer(request, count)
                body = value if isinstance(value, bytes) else json.dumps(value).encode()
                with outer._lock:
                    outer.active -= 1
                try:
                    self.send_response(status)
                    for name, text in headers.items():
                        self.send_header(name, text)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:  # the client has given up waiting
                    self.close_connection = True

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def completion(text: str, reason: str = "stop") -> Answer:
    return 200, {"choices": [{"message": {"content": text}, "finish_reason": reason}]}, {}


def asking(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in texts]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running = ChatServer()
    yield running
    running.close()


def test_answers_are_in_order_and_parallel_requests_are_bounded(server: ChatServer) -> None:
    def answer(request: dict[str, Any], count: int) -> Answer:
        text = request["messages"][0]["content"]
        time.sleep(0.03 if text in "024" else 0.01)
        return completion(text * 2, "length" if text == "3" else "stop")

    server.answer = answer
    endpoint = Endpoint(server.url, "judge", temperature=0.5, max_tokens=7, parallel=3)
    answers = endpoint.complete(asking(*"0123456789"), seed=40)
    assert answers == [EndpointAnswer(digit * 2, digit != "3") for digit in "0123456789"]
    assert 1 < server.most_active <= 3
    first = min(server.requests, key=lambda request: int(request["seed"]))
    assert first == {
        "path": "/v1/chat/completions", "model": "judge", "messages": [{"role": "user", "content": "0"}],
        "temperature": 0.5, "max_tokens": 7, "seed": 40,
    }  # fmt: skip
    assert endpoint.complete([]) == []


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_failures_are_retried(server: ChatServer, status: int) -> None:
    server.answer = lambda request, count: (status, {"error": "busy"}, {}) if count < 3 else completion("at last")
    answers = Endpoint(server.url, "m", backoff=0.01).complete(asking("a"))
    assert answers[0].text == "at last" and len(server.requests) == 3


def test_retry_after_is_respected(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("bessemer.endpoint.pause", lambda wait_s, stop: waits.append(wait_s))
    server.answer = lambda request, count: (429, {}, {"Retry-After": "17"}) if count == 1 else completion("ok")
    Endpoint(server.url, "m").complete(asking("a"))
    assert [wait_s for wait_s in waits if wait_s] == [17.0]
    server.answer = lambda request, count: (429, {}, {"Retry-After": "99999"})
    with pytest.raises(UserError, match=r"status 429 \(.*\) after one attempt; run again later"):
        Endpoint(server.url, "m").complete(asking("a"))


def test_a_slow_server_is_a_timeout_that_is_retried(server: ChatServer) -> None:
    def answer(request: dict[str, Any], count: int) -> Answer:
        time.sleep(1.0 if count == 1 else 0)
        return completion("ok")

    server.answer = answer
    assert Endpoint(server.url, "m", timeout=0.2, backoff=0.01).complete(asking("a"))[0].text == "ok"


def test_no_server() -> None:
    with pytest.raises(UserError, match=r"http://127.0.0.1:9/v1 \(m\): no answer .* after 2 attempts; run again later"):
        Endpoint("http://127.0.0.1:9/v1", "m", retries=1, backoff=0.01).complete(asking("a", "b"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, {"error": "bad key"}, {}), "status 401 .*; check the environment variable JUDGE_KEY"),
        ((404, {"error": f"no model; your key {KEY}"}, {}), r"status 404 .*\*\*\*.*; check url \(it ends in /v1\)"),
        ((301, {}, {"Location": "https://other/v1"}), "it leads to https://other/v1: set url to that"),
        ((200, {"choices": []}, {}), "no chat completion in its answer"),
        ((200, b"<html>not an API</html>", {}), "no chat completion in its answer .*not an API"),
    ],
)
def test_final_failures_name_the_fix_and_never_the_key(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch, answer: Answer, message: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server.answer = lambda request, count: answer
    endpoint = Endpoint(server.url, "m", key_env="JUDGE_KEY")
    with pytest.raises(UserError, match=message) as error:
        endpoint.complete(asking("a"))
    assert len(server.requests) == 1 and server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in str(error.value) and KEY not in repr(endpoint) and KEY not in repr(error.value)


def test_a_missing_key_is_reported_before_any_request(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(UserError, match="set the environment variable JUDGE_KEY"):
        Endpoint(server.url, "m", key_env="JUDGE_KEY").complete(asking("a"))
    assert server.requests == []


def test_one_failure_stops_the_others(server: ChatServer) -> None:
    def answer(request: dict[str, Any], count: int) -> Answer:
        time.sleep(0.02)
        return (400, {}, {}) if count == 3 else completion("ok")

    server.answer = answer
    with pytest.raises(UserError, match="status 400"):
        Endpoint(server.url, "m", parallel=2).complete(asking(*map(str, range(200))))
    assert len(server.requests) < 20


def test_a_redirect_does_not_carry_the_key(server: ChatServer) -> None:
    other = ChatServer()
    server.answer = lambda request, count: (307, {}, {"Location": other.url})
    with pytest.raises(RequestFailed, match="status 307"):
        post_json(server.url, b"{}", {"Authorization": f"Bearer {KEY}"}, 5)
    assert other.requests == []
    other.close()
