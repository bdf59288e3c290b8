"""A real MLflow server that is killed while a run trains, and comes back: no step is missing."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from bessemer.observe.observers import follow_run
from bessemer.observe.trackers import forward
from bessemer.observe.trackers.forward import Forwarder

from .journals import loss_at, open_run, tracker, write_rest, write_steps

START_S = 150.0  # the server imports for half a minute on a busy machine


class Server:
    """`mlflow server` on SQLite, in a session of its own, so that its workers can be killed with it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.url = folder, f"http://127.0.0.1:{port}"
        self.command = [
            sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
            "--artifacts-destination", str(folder / "artifacts"), "--port", str(port), "--workers", "1",
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        give_up = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).read()
                return
            except OSError:
                assert time.monotonic() < give_up, (self.folder / "server.log").read_text()[-2000:]
                time.sleep(0.5)

    def kill(self) -> None:
        if self.process:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_no_step_is_missing_after_the_server_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("mlflow") is None or importlib.util.find_spec("graphene") is None:
        pytest.skip("the MLflow server is not installed: pip install --no-deps mlflow graphene graphql-relay huey")
    monkeypatch.setattr(forward, "LONGEST_RETRY_S", 1.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = Server(tmp_path, free.getsockname()[1])
    server.start()
    lines: list[str] = []
    try:
        with open_run(tmp_path / "runs" / "demo") as run:
            following = Forwarder(run, tracker(to="mlflow", url=server.url, project="llm", every="0.2s"))
            thread = threading.Thread(target=follow_run, args=(run, [following], lines.append))
            thread.start()
            write_steps(run, 0, 20)
            wait_for(lambda: following.steps.steps == 20)
            server.kill()
            write_steps(run, 20, 40)
            wait_for(lambda: any("trying again" in line for line in lines))
            server.start()
            write_steps(run, 40, 60)
            write_rest(run, 60)
        thread.join(200)
        assert not thread.is_alive() and "delivered again" in lines[-1]
        client = importlib.import_module("mlflow").MlflowClient(tracking_uri=server.url)
        identifier = following.state["run_id"]
        history = {metric.step: metric.value for metric in client.get_metric_history(identifier, "train/loss")}
        assert history == {step: loss_at(step) for step in range(60)}
        recorded = client.get_run(identifier)
        assert recorded.info.status == "FINISHED" and recorded.data.params["plan.optimizer.lr"] == "0.01"
        assert recorded.data.tags["sample.60"] == "Once upon a time"
        assert [item.path for item in client.list_artifacts(identifier, "reports")] == ["reports/anomaly-000003.md"]
    finally:
        server.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.1)
