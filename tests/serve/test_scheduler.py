"""Fair queues, limits, clients that leave, faults of a model, and the graceful stop."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque

import httpx
import pytest
from tests.serve.conftest import running, wait_until

from bessemer.errors import UserError
from bessemer.model.generate import Request, Sampling
from bessemer.serve.metrics import ServerMetrics
from bessemer.serve.models import ModelOptions, load_served
from bessemer.serve.scheduler import InferenceJob, QueueLimits, Scheduler
from bessemer.serve.server import ServeOptions, listen, serve


class Recorder:
    """A backend that only notes when jobs start; a job ends when the test says so."""

    def __init__(self, slots):
        self.slots, self.started, self.running = slots, [], []

    def free(self):
        return self.slots - sum(job.samples for job in self.running)

    def start(self, job):
        if job.work == "refused":
            raise UserError("no")
        self.started.append(job.work)
        self.running.append(job)


def admitted(scheduler, backend, count=1):
    """End this many running jobs and admit others, as the scheduler's thread does."""
    for _ in range(count):
        if backend.running:
            scheduler._active.remove(backend.running.pop(0))
    scheduler._admit()
    return list(backend.started)


@pytest.fixture
def scheduled():
    scheduler, backend = Scheduler(QueueLimits(), ServerMetrics()), Recorder(2)

    def queue(client, name, samples=1):
        scheduler._waiting.setdefault(client, deque()).append(InferenceJob("m", backend, client, name, samples))

    return scheduler, backend, queue


def test_clients_take_turns(scheduled):
    scheduler, backend, queue = scheduled
    for i in range(6):
        queue("greedy", f"g{i}")
    assert admitted(scheduler, backend) == ["g0", "g1"]
    queue("late", "l0")
    queue("late", "l1")
    assert admitted(scheduler, backend)[2:] == ["l0"]  # before four that came earlier
    assert admitted(scheduler, backend)[3:] == ["g2"]
    assert admitted(scheduler, backend)[4:] == ["l1"]
    assert admitted(scheduler, backend, 2)[5:] == ["g3", "g4"]


def test_many_samples_wait_for_their_slots_and_are_not_overtaken(scheduled):
    scheduler, backend, queue = scheduled
    queue("a", "a0")
    queue("b", "pair", samples=2)
    admitted(scheduler, backend)
    queue("c", "c0")
    assert admitted(scheduler, backend, 0) == ["a0"]  # one slot is free, for the pair
    assert admitted(scheduler, backend)[1:] == ["pair"]
    assert admitted(scheduler, backend)[2:] == ["c0"]


def test_a_refused_job_does_not_hold_up_the_next(scheduled):
    scheduler, backend, queue = scheduled
    queue("a", "refused")
    queue("a", "a1")
    (refused,) = scheduler._admit()
    assert refused.done and refused.error.status == 400 and backend.started == ["a1"]


LONG = {"prompt": "x", "max_tokens": 400, "temperature": 1, "stop": "\0\0"}


@pytest.fixture
def small(folder):
    limits = QueueLimits(queue=3, client_queue=3)
    model = load_served("tiny", folder, ModelOptions(device="cpu", slots=1))
    loaded = model.loaded
    object.__setattr__(loaded, "format", loaded.format.__class__((), (), 0, frozenset({999})))  # answers never end
    loaded.__dict__["stop_ids"] = frozenset({999})
    with running([model], limits) as server:
        yield server


def post(server, body, **options):
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60, **options)


def test_a_client_that_leaves_frees_its_slot(small):
    """Also one that waits, one that has a complete answer coming, and one that was streaming."""
    generator, load = small.registry.models["tiny"].backend.generator, small.scheduler.load
    for body in (LONG, LONG | {"stream": True}):
        port = int(small.url.rpartition(":")[2])
        with (
            socket.create_connection(("127.0.0.1", port)) as running_one,
            socket.create_connection(("127.0.0.1", port)) as waiting,
        ):
            for connection in (running_one, waiting):
                data = json.dumps(body).encode()
                head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                head += f"Content-Length: {len(data)}\r\n\r\n"
                connection.sendall(head.encode() + data)
                wait_until(lambda: load()["running"] == 1)
            wait_until(lambda: load() == {"running": 1, "waiting": 1})
            waiting.close()
            wait_until(lambda: load() == {"running": 1, "waiting": 0})
            forwards = generator.forwards
            running_one.close()
            wait_until(lambda: load() == {"running": 0, "waiting": 0})
        assert not generator.rows and generator.forwards - forwards < 390
    text = httpx.get(f"{small.url}/metrics").text
    assert 'bessemer_jobs_total{model="tiny",outcome="cancelled"} 4.0' in text


def test_a_cancelled_job_is_not_stepped_again(folder):
    model = load_served("tiny", folder, ModelOptions(device="cpu", slots=1))
    scheduler = Scheduler(QueueLimits(), ServerMetrics())
    job = InferenceJob("tiny", model.backend, "a", Request([1, 2], 50, Sampling(), frozenset()))
    model.backend.start(job)
    scheduler._active.append(job)
    model.backend.step()
    scheduler.cancel([job])
    scheduler._drop_cancelled()
    assert not model.backend.generator.rows and model.backend.free() == 1 and not scheduler._active


def test_a_full_queue_is_refused_and_told_when_to_retry(small):
    threads = [threading.Thread(target=post, args=(small, LONG | {"max_tokens": 200})) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: small.scheduler.load() == {"running": 1, "waiting": 3})
    response = post(small, LONG)
    assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
    assert response.json()["error"] | {"message": ""} == {
        "message": "", "type": "rate_limit_error", "param": None, "code": "queue_full"}  # fmt: skip
    for thread in threads:
        thread.join()


def test_one_client_cannot_fill_the_queue(folder):
    """Half of the queue is refused to it, while another key is accepted and gets the next slot."""
    from bessemer.serve.app import Access

    model, go_on = load_served("tiny", folder, ModelOptions(device="cpu", slots=1)), threading.Event()
    step, start, statuses, started = model.backend.step, model.backend.start, [], []

    def held_step():
        if go_on.wait(0.001):
            step()

    def noted_start(job):
        started.append(job.client)
        start(job)

    def ask(key):
        response = post(server, LONG | {"max_tokens": 2}, headers={"Authorization": f"Bearer {key}"})
        statuses.append(response.status_code)

    model.backend.step, model.backend.start = held_step, noted_start
    limits, access = QueueLimits(queue=4, client_queue=2), Access(keys=("greedy", "late"), local_only=False)
    with running([model], limits, access) as server:
        threads = []
        for waiting, key in ((0, "greedy"), (1, "greedy"), (2, "greedy"), (3, "late")):
            threads.append(threading.Thread(target=ask, args=(key,)))
            threads[-1].start()
            wait_until(lambda waiting=waiting: server.scheduler.load() == {"running": 1, "waiting": waiting})
        ask("greedy")
        assert statuses.pop() == 429
        go_on.set()
        for thread in threads:
            thread.join()
    assert statuses == [200] * 4 and started == ["key 0", "key 1", "key 0", "key 0"]


def test_an_answer_that_takes_too_long_ends(folder):
    model = load_served("tiny", folder, ModelOptions(device="cpu", slots=1))
    model.loaded.__dict__["stop_ids"] = frozenset({999})  # answers never end
    step = model.backend.step

    def slow_step():
        time.sleep(0.02)
        step()

    model.backend.step = slow_step
    with running([model], QueueLimits(request_s=0.2)) as server:
        body = post(server, LONG).json()
    assert body["choices"][0]["finish_reason"] == "length" and 0 < body["usage"]["completion_tokens"] < 400


def test_a_job_that_waits_too_long(folder):
    model = load_served("tiny", folder, ModelOptions(device="cpu", slots=1))
    model.loaded.__dict__["stop_ids"] = frozenset({999})
    with running([model], QueueLimits(queue_s=0.01, request_s=2.0)) as server:
        first = threading.Thread(target=post, args=(server, LONG))
        first.start()
        wait_until(lambda: server.scheduler.load()["running"] == 1)
        response = post(server, LONG)
        first.join()
    assert response.status_code == 503 and response.json()["error"]["code"] == "queue_timeout"


def test_a_fault_of_the_model_ends_its_requests_alone(small, caplog):
    backend = small.registry.models["tiny"].backend
    good_step = backend.generator.step

    def failing_step():
        good_step()
        raise RuntimeError("out of memory")

    backend.generator.step = failing_step
    response = post(small, LONG)
    assert response.status_code == 500 and response.json()["error"]["code"] == "model_error"
    assert "a step of the model failed" in caplog.text
    assert post(small, LONG | {"max_tokens": 3}).json()["usage"]["completion_tokens"] == 3  # a new generator


def test_keys_hosts_and_bodies(folder):
    from bessemer.serve.app import Access

    model = load_served("tiny", folder, ModelOptions(device="cpu"))
    access = Access(keys=("secret", "other"), origins=("http://app.test",), local_only=False)
    with running([model], QueueLimits(body_bytes=1000), access) as server:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            response = httpx.get(server.url + path)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        for path in ("/", "/health", "/ready"):
            assert httpx.get(server.url + path).status_code == 200
        headers = {"Authorization": "Bearer other", "Origin": "http://app.test"}
        response = httpx.get(f"{server.url}/v1/models", headers=headers)
        assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "http://app.test"
        assert post(server, {"prompt": "x" * 2000}, headers=headers).status_code == 413

        def chunks():
            yield b'{"prompt": "'
            yield from [b"x" * 100] * 20

        response = httpx.post(
            f"{server.url}/v1/completions", content=chunks(), headers={**headers, "Content-Type": "application/json"}
        )
        assert response.status_code == 413
    with running([model]) as server:  # a web page that resolves its own name to this machine
        assert httpx.get(f"{server.url}/v1/models", headers={"Host": "evil.test:80"}).status_code == 403
        assert httpx.get(f"{server.url}/v1/models").headers.get("access-control-allow-origin") is None


def test_mistakes_at_the_start(folder, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="BESSEMER_API_KEYS"):
        serve(ServeOptions(folder, host="0.0.0.0"))
    monkeypatch.setenv("BESSEMER_API_KEYS", "a,,b")
    with pytest.raises(UserError, match="empty key"):
        serve(ServeOptions(folder))
    monkeypatch.delenv("BESSEMER_API_KEYS")
    taken = listen("127.0.0.1", 0)
    taken.listen()
    with pytest.raises(UserError, match="choose another"):
        serve(ServeOptions(folder, port=taken.getsockname()[1]))
    with pytest.raises(UserError, match="NAME=FOLDER"):
        serve(ServeOptions(folder, port=0, adapters=["x"]))
    with pytest.raises(UserError, match="no such folder; give a run"):
        serve(ServeOptions(tmp_path / "none", port=0))
    with pytest.raises(UserError, match="not a run"):  # a folder of weights has no newer checkpoints
        serve(ServeOptions(folder, port=0, watch=True))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"serve needs llguidance: pip install 'bessemer\[serve\]'"):
        serve(ServeOptions(folder, port=0))


@pytest.mark.slow
def test_sigterm_drains(folder, tmp_path):
    """A running and a waiting request end, new connections are refused, and the command exits with 0."""
    command = [sys.executable, "-m", "bessemer", "serve", str(folder), "--port", "0", "--slots", "1", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
    for line in process.stdout:
        if line.startswith("serving"):
            break
    url, results = line.split()[1].removesuffix("/v1"), []
    ready = time.monotonic() + 60
    while time.monotonic() < ready:
        try:
            httpx.get(f"{url}/ready")
            break
        except httpx.ConnectError:
            time.sleep(0.1)
    body = LONG | {"max_tokens": 300, "n": 1}
    threads = [
        threading.Thread(target=lambda: results.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: "bessemer_running_samples 1.0" in httpx.get(f"{url}/metrics").text)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert process.wait(30) == 0, process.stderr.read()
    assert [response.status_code for response in results] == [200] * 3
    assert "stopped after" in process.stdout.read()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_importing_the_command_loads_no_server() -> None:
    code = "import sys, bessemer.cli.main; print([m for m in ('torch', 'fastapi', 'uvicorn') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
