"""Alerts reach a real HTTP endpoint and a real SMTP server: one message for each incident."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from bessemer.errors import UserError
from bessemer.guard.alarm import ADVICE
from bessemer.observe.alerts.watcher import AlertWatcher
from bessemer.run.control import FOLDER
from bessemer.run.directory import RunWriter
from bessemer.spec.observers import ALARMS, AlertsSpec
from bessemer.spec.schema import RunSpec

from .journals import open_run, write_steps

pytest.importorskip("apprise", reason="apprise is not installed: pip install 'bessemer[alerts]'")


class Endpoint:
    """An HTTP server that Apprise posts JSON to. `status` and `answer` are what it answers."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.status, self.answer = 200, b""
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if endpoint.status == 200:
                    endpoint.received.append(content)
                self.send_response(endpoint.status)
                self.end_headers()
                self.wfile.write(endpoint.answer)

            def log_message(self, *_: Any) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"json://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def titles(self) -> list[str]:
        return [message["title"] for message in self.received]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    made = Endpoint()
    monkeypatch.setenv("TEAM_URL", made.url)
    yield made
    made.server.shutdown()
    made.server.server_close()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def watch(run: RunWriter, clock: Clock | None = None, **alerts: Any) -> AlertWatcher:
    spec = AlertsSpec.model_validate({"routes": [{"to": "TEAM_URL", "on": ["all"]}], **alerts})
    watcher = AlertWatcher(run, spec, clock or Clock())
    assert watcher.acquire()
    return watcher


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunWriter]:
    with open_run(tmp_path / "demo") as made:
        yield made


def test_a_message_has_the_numbers_a_chart_and_the_command(run: RunWriter, endpoint: Endpoint) -> None:
    watcher = watch(run, routes=[{"to": "TEAM_URL", "on": ["rollback"]}])
    write_steps(run, 0, 40)
    run.event("rollback", step=39, to_step=20, origin="step-00000020.a1", reason="the loss diverged")
    run.event("saved", step=40, checkpoint="step-00000040.a1", stall_s=0.1, seconds=0.2)
    assert watcher.forward() == 1
    (message,) = endpoint.received
    assert message["title"] == "demo: rollback at step 39"
    assert "to 20 (step-00000020.a1): the loss diverged" in message["message"]
    assert "at step 39: loss 2.391, grad_norm 1" in message["message"]
    assert f"bessemer replay {run.folder.resolve()} --step 39" in message["message"]
    assert message["message"].count("*") >= 20, "a chart of the loss"


def test_a_flapping_metric_is_one_message(run: RunWriter, endpoint: Endpoint) -> None:
    clock = Clock()
    routes = [{"to": "TEAM_URL", "on": ["rules"]}]
    watcher = watch(run, clock, routes=routes, rules=[{"when": "grad_norm > 5", "quiet": "10 min"}])
    for step in range(0, 60, 2):  # above and below the limit, a minute apart
        write_steps(run, step, step + 1, grad_norm=9.0)
        write_steps(run, step + 1, step + 2, grad_norm=1.0)
        watcher.forward()
        clock.now += 60
    assert endpoint.titles == ["demo: grad_norm > 5 at step 0"]
    clock.now += 601
    write_steps(run, 60, 61, grad_norm=9.0)
    watcher.forward()
    assert endpoint.titles[-1] == "demo: grad_norm > 5 at step 60", "a new incident after a quiet time"


def test_a_window_is_a_mean_of_the_steps_that_the_run_holds(run: RunWriter, endpoint: Endpoint) -> None:
    watcher = watch(run, routes=[{"to": "TEAM_URL", "on": ["rules"]}], rules=[{"when": "loss >= 9", "window": 3}])
    for step, loss in enumerate([9.0, 9.0, 1.0, 1.0, 9.0]):
        run.step({"step": step, "loss": loss})
    watcher.forward()
    run.remove_metrics_from(4)
    run.step({"step": 4, "loss": 9.0})
    run.step({"step": 5, "loss": 9.0})
    watcher.forward()
    assert endpoint.titles == []
    run.step({"step": 6, "loss": "nan"})  # above every limit
    watcher.forward()
    assert endpoint.titles == ["demo: loss >= 9 at step 6"]


def test_a_validation_metric_has_rules_too(run: RunWriter, endpoint: Endpoint) -> None:
    routes = [{"to": "TEAM_URL", "on": ["rules"]}]
    watcher = watch(run, routes=routes, rules=[{"when": "validation:per_source.code < 2"}])
    run.validation({"step": 10, "loss": 1.5, "per_source": {"code": 1.9}})
    run.step({"step": 10, "per_source": {"code": 1.0}})
    watcher.forward()
    assert endpoint.titles == ["demo: validation:per_source.code < 2 at step 10"]


def test_routes_get_what_they_ask_for(run: RunWriter, endpoint: Endpoint) -> None:
    watcher = watch(run, routes=[{"to": "TEAM_URL", "on": ["throughput", "failed"]}])
    alarm = {"severity": "note", "evidence": {}, "cause": "", "confidence": 0.9, "fix": ""}
    run.event("alarm", step=5, alarm="slowdown", reason="a step takes twice as long", **alarm)
    run.event("alarm", step=6, alarm="plateau", reason="the loss does not fall", **alarm)
    run.event("failed", reason="OSError: no space")
    watcher.forward()
    assert endpoint.titles == ["demo: slowdown at step 5 and 1 more"]
    assert "twice as long" in endpoint.received[0]["message"] and "no space" in endpoint.received[0]["message"]


def test_a_rollback_speaks_for_its_vetoes(run: RunWriter, endpoint: Endpoint) -> None:
    watcher = watch(run, routes=[{"to": "TEAM_URL", "on": ["veto", "rollback"]}])
    for step in (5, 6):
        run.event("veto", step=step, reason="not finite", loss="nan", grad_norm="nan", statistics={}, documents=[])
    run.event("rollback", step=6, to_step=2, origin="memory", reason="two vetoes")
    watcher.forward()
    assert endpoint.titles == ["demo: rollback at step 6"]


def test_a_message_waits_for_the_network_and_is_sent_once(run: RunWriter, endpoint: Endpoint) -> None:
    watcher = watch(run)
    watcher.forward()
    endpoint.received.clear()
    endpoint.status = 503
    run.event("hang", step=3, reason="no step for 10 min")
    for _ in range(2):
        with pytest.raises(ConnectionError, match=r"1 messages wait, they were not taken by TEAM_URL: .*error=503"):
            watcher.forward()
    watcher.release()
    endpoint.status = 200
    assert watch(run).forward() == 1, "another process delivers it"
    assert endpoint.titles == ["demo: hang at step 3"]


def test_the_reason_of_a_refusal_is_told_without_secrets(
    run: RunWriter, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM_URL", f"{endpoint.url}/T0KEN%2Fsecret?+key=private")
    endpoint.status, endpoint.answer = 410, b'{"error": "the channel of T0KEN/secret is archived, key private"}'
    watcher = watch(run, routes=[{"to": "TEAM_URL", "on": ["hang"]}])
    run.event("hang", step=3, reason="no step for 10 min")
    with pytest.raises(ConnectionError) as refused:
        watcher.forward()
    assert "error=410" in str(refused.value) and "is archived" in str(refused.value)
    assert not any(secret in str(refused.value) for secret in ("T0KEN", "secret", "private"))
    endpoint.server.shutdown()
    endpoint.server.server_close()
    with pytest.raises(ConnectionError, match="refused") as gone:
        watcher.forward()
    assert "T0KEN" not in str(gone.value) and "secret" not in str(gone.value)


def test_events_before_the_first_start_with_alerts_are_no_news(run: RunWriter, endpoint: Endpoint) -> None:
    write_steps(run, 0, 5, grad_norm=9.0)
    run.event("rollback", step=4, to_step=2, origin="memory", reason="old")
    run.event("started", step=5, total_steps=100, time=2e9)
    watcher = watch(run, routes=[{"to": "TEAM_URL", "on": ["rollback", "rules"]}], rules=[{"when": "grad_norm > 5"}])
    assert watcher.forward() == 0


def test_a_killed_run_is_told_once(run: RunWriter, endpoint: Endpoint) -> None:
    watcher = watch(run, routes=[{"to": "TEAM_URL", "on": ["died"]}])
    write_steps(run, 0, 5)
    watcher.forward()
    watcher.finish("interrupted")
    watcher.finish("interrupted")
    assert endpoint.titles == ["demo: died at step 5"]


def test_a_rule_asks_the_run_to_stop_once(run: RunWriter, endpoint: Endpoint) -> None:
    watcher = watch(run, rules=[{"when": "loss > 2", "action": "stop"}], routes=[{"to": "TEAM_URL", "on": ["rules"]}])
    write_steps(run, 0, 5)
    watcher.forward()
    (request,) = (run.folder / FOLDER).glob("*.json")
    assert json.loads(request.read_text())["who"] == "the alert rule loss > 2"
    assert "the run was asked to stop" in endpoint.received[0]["message"]


def test_mail_arrives(run: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = pytest.importorskip("aiosmtpd.controller", reason="aiosmtpd is not installed")
    mails: list[Message] = []

    class Handler:
        async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:
            mails.append(message_from_bytes(envelope.content))
            return "250 OK"

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = controller.Controller(Handler(), hostname="127.0.0.1", port=port, ready_timeout=60)
    server.start()
    try:
        monkeypatch.setenv(
            "TEAM_URL", f"mailto://127.0.0.1:{port}?from=run@example.org&to=team@example.org&mode=insecure&format=text"
        )
        watcher = watch(run, routes=[{"to": "TEAM_URL", "on": ["failed"]}])
        write_steps(run, 0, 30)
        run.event("failed", reason="OSError: no space left")
        assert watcher.forward() == 1
    finally:
        server.stop()
    (mail,) = mails
    body = next(part for part in mail.walk() if part.get_content_type() == "text/plain").get_payload(decode=True)
    assert mail["Subject"] == "demo: failed at step 0" and b"no space left" in body and b"bessemer runs" in body


@pytest.mark.parametrize(
    ("alerts", "message"),
    [
        ({"routes": [{"to": "json://host/secret"}]}, "URLs of alerts hold secrets"),
        ({"routes": [{"to": "X", "on": ["crash"]}]}, "no event 'crash'"),
        ({"routes": [{"to": "X"}], "rules": [{"when": "loss is high"}]}, "is no condition"),
        ({"rules": [{"when": "loss > 3"}]}, "alerts needs routes"),
    ],
)
def test_wrong_alerts_are_refused(alerts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunSpec.model_validate({"model": "10M", "data": {"sources": {"a": "b"}}, "alerts": alerts})


def test_a_missing_or_wrong_address_is_refused(run: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="the environment variable TEAM_URL is not set"):
        watch(run)
    monkeypatch.setenv("TEAM_URL", "nothing://secret-word")
    with pytest.raises(UserError, match="TEAM_URL holds no URL that Apprise knows") as error:
        watch(run)
    assert "secret-word" not in str(error.value)


def test_every_alarm_can_be_routed() -> None:
    assert set(ALARMS) == {*ADVICE, "plan_speed", "plan_memory"}
