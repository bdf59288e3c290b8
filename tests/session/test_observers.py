"""Trackers and alerts of a live run, in their process beside it."""

from __future__ import annotations

import http.server
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bessemer.errors import UserError
from bessemer.observe.view import RunView
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec

pytest.importorskip("apprise", reason="apprise is not installed: pip install 'bessemer[alerts]'")


class SlowView(RunView):
    """Gives the process beside the run the time to see a step."""

    def step(self, record: dict[str, Any]) -> None:
        super().step(record)
        time.sleep(0.25)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    received: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("TEAM_URL", f"json://127.0.0.1:{server.server_port}")
    yield received
    server.shutdown()
    server.server_close()


def process_beside(folder: Path) -> psutil.Process | None:
    """The process that follows a run, from its command line."""
    for process in psutil.process_iter(["cmdline"]):
        if "forward" in (process.info["cmdline"] or []) and str(folder) in process.info["cmdline"]:
            return process
    return None


def wait_until(condition: Callable[[], Any], seconds: float = 100.0) -> Any:
    give_up = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.1)
    return value


@pytest.mark.slow
def test_a_rule_stops_the_run_with_its_checkpoint(
    make_spec: Callable[..., RunSpec], endpoint: list[dict[str, Any]]
) -> None:
    spec = make_spec(
        "watched",
        budget={"steps": 400, "batch": 128},
        checkpoint={"every": 1000},
        trackers=[{"to": "csv", "every": "0.2s"}],
        alerts={
            "routes": [{"to": "TEAM_URL"}],
            "rules": [{"when": "tokens >= 640", "action": "stop"}],
            "every": "0.2s",
        },
    )
    outcome = Session(spec, SlowView()).train()
    assert outcome.kind == "interrupted" and outcome.reason == "stop requested by the alert rule tokens >= 640"
    assert 5 <= outcome.step < 400
    run = Run(run_folder(spec))
    saved = list(run.events("saved"))[-1]
    assert saved["step"] == outcome.step and (run.checkpoints / saved["checkpoint"] / "manifest.json").exists()
    folder = run.folder
    wait_until(lambda: process_beside(folder) is None)
    assert [message["title"] for message in endpoint] == ["watched: tokens >= 640 at step 4"]
    rows = (folder / "trackers" / "csv" / "train-00000.csv").read_text().splitlines()
    assert len(rows) == outcome.step + 1
    assert "csv" in (folder / "logs" / "trackers.log").read_text()


@pytest.mark.slow
def test_a_killed_process_delivers_the_rest_at_the_next_start(make_spec: Callable[..., RunSpec]) -> None:
    class Kill(SlowView):
        def step(self, record: dict[str, Any]) -> None:
            super().step(record)
            if record["step"] == 5:
                os.kill(wait_until(lambda: process_beside(run_folder(spec))).pid, signal.SIGKILL)

    spec = make_spec("killed", budget={"steps": 12, "batch": 128}, trackers=[{"to": "csv", "every": "0.2s"}])
    assert Session(spec, Kill()).train().kind == "finished"
    spec = make_spec("killed", budget={"steps": 16, "batch": 128}, trackers=[{"to": "csv", "every": "0.2s"}])
    assert Session(spec).train().kind == "finished"
    folder = run_folder(spec)
    wait_until(lambda: process_beside(folder) is None)
    rows = (folder / "trackers" / "csv" / "train-00000.csv").read_text().splitlines()
    assert [int(row.split(",")[0]) for row in rows[1:]] == list(range(16))


def test_a_missing_secret_is_refused_before_the_run(
    make_spec: Callable[..., RunSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEAM_URL", raising=False)
    spec = make_spec("refused", alerts={"routes": [{"to": "TEAM_URL"}]})
    with pytest.raises(UserError, match="the environment variable TEAM_URL is not set"):
        Session(spec).train()
    assert not run_folder(spec).exists()
