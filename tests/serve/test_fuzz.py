"""Requests that nobody wrote by hand: none ends the server, gets a 5xx, or leaves a slot or memory behind."""

import gc
import json
import random
import socket
import subprocess
import sys
import time

import httpx
import openai
import psutil
import pytest
from tests.serve.conftest import wait_until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
VALUES = [
    None, True, 0, -1, 1, 2, 10**30, -0.5, 0.5, 1e308, "", "x", "\0", "\ud800", "é漢🙂", "<|im_end|>", "{{ 7 * 7 }}",
    "a" * 700, [], [[]], [1], [999999], ["x", "y"], {}, {"a": {}}, {"type": "json_object"}, {"type": "function"},
    {"type": "json_schema", "json_schema": {"schema": {"type": "array", "items": {"$ref": "#"}}}},
    {"type": "json_schema", "json_schema": {"schema": {"pattern": "(a+)+$", "type": "string"}}},
    [{"role": "user", "content": "x"}], [{"role": "assistant"}],
    [{"role": "tool", "content": [{"type": "text", "text": "x"}]}],
    [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}],
]  # fmt: skip
KEYS = [
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "n", "stop", "seed", "temperature", "top_p",
    "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs",
    "stream", "stream_options", "response_format", "tools", "tool_choice", "echo", "suffix", "best_of", "logit_bias",
    "input", "user", "ignore_eos", "parallel_tool_calls", "unknown",
]  # fmt: skip


def fuzzed(draw: random.Random) -> tuple[str, bytes]:
    path, base = draw.choice([("chat/completions", CHAT), ("completions", COMPLETION), ("embeddings", {"input": "x"})])
    body = dict(base)
    for _ in range(draw.randint(0, 3)):
        body[draw.choice(KEYS)] = draw.choice(VALUES)
    data = json.dumps(body).encode()
    if draw.random() < 0.1:  # broken JSON
        at = draw.randrange(len(data))
        data = data[:at] + bytes(draw.randrange(256) for _ in range(draw.randint(0, 3))) + data[at + 1 :]
    return path, data


def send_all(server, count: int, seed: int) -> dict[int, int]:
    """Statuses of many requests; one in twenty leaves before its answer."""
    draw, statuses = random.Random(seed), {}
    port = int(server.url.rpartition(":")[2])
    with httpx.Client(timeout=60) as client:
        for _ in range(count):
            path, data = fuzzed(draw)
            if draw.random() < 0.05:
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
                continue
            response = client.post(
                f"{server.url}/v1/{path}", content=data, headers={"Content-Type": "application/json"}
            )
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            assert response.status_code in (200, 400, 404), (data, response.text)
            if response.status_code != 200:
                assert response.json()["error"]["message"], data
            elif response.headers["content-type"].startswith("text/event-stream"):
                assert response.text.endswith("data: [DONE]\n\n"), (data, response.text)
                assert '"finish_reason":"' in response.text or '"error":' in response.text, (data, response.text)
    return statuses


def check_idle(server) -> None:
    wait_until(lambda: server.scheduler.load() == {"waiting": 0, "running": 0})
    generator = server.registry.models["tiny"].backend.generator
    assert not generator.rows and not generator.waiting and server.scheduler.alive
    assert httpx.get(f"{server.url}/ready").status_code == 200


def test_fuzzed_requests(server):
    statuses = send_all(server, 80, seed=1)
    assert statuses[200] > 10 and statuses[400] > 10
    check_idle(server)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_fuzzed_requests(server):
    send_all(server, 1000, seed=2)  # caches fill
    gc.collect()
    before, threads = psutil.Process().memory_info().rss, psutil.Process().num_threads()
    statuses = send_all(server, 10_000, seed=3)
    gc.collect()
    check_idle(server)
    grown = psutil.Process().memory_info().rss - before
    print(statuses, f"memory grew by {grown / 1e6:.1f} MB")
    assert sum(statuses.values()) > 9000 and grown < 32e6 and psutil.Process().num_threads() <= threads + 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_schemathesis(server, tmp_path):
    """Every operation of the OpenAPI schema. Valid by schema but refused with 400 is right where fields contradict each
    other, which a schema does not say."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--max-examples", "50",
               "--exclude-checks", "positive_data_acceptance", "--continue-on-failure", "--no-color",
               "--request-timeout", "60"]  # fmt: skip
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    check_idle(server)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_soak(server):
    """Half a minute at saturation by several clients: no request is lost, memory is flat."""
    import threading

    end, counts, errors = time.monotonic() + 30, [0] * 12, []

    def ask(number: int) -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            while time.monotonic() < end:
                try:
                    answer = client.completions.create(model="tiny", prompt=f"{number} {counts[number]}", max_tokens=20)
                    assert answer.choices[0].finish_reason in ("stop", "length")
                except Exception as error:
                    errors.append(error)
                counts[number] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    time.sleep(10)
    before = psutil.Process().memory_info().rss
    for thread in threads:
        thread.join()
    assert not errors and min(counts) > 0.5 * max(counts)
    assert psutil.Process().memory_info().rss - before < 32e6
    check_idle(server)
