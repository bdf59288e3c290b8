"""Each tracker, read back with the real thing's own reader."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from bessemer.errors import UserError
from bessemer.observe.trackers.forward import Forwarder
from bessemer.observe.trackers.tracker import KINDS, make_tracker
from bessemer.run.directory import RunWriter
from bessemer.spec.observers import TRACKERS

from .journals import loss_at, open_run, tracker, write_rest, write_steps


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunWriter]:
    with open_run(tmp_path / "demo") as made:
        yield made


def start(run: RunWriter, **settings: Any) -> Forwarder:
    pytest.importorskip(make_tracker(settings["to"]).needs[0] or "pyarrow", reason=f"{settings['to']} is not installed")
    following = Forwarder(run, tracker(**settings))
    assert following.acquire()
    return following


def with_rollback(run: RunWriter, following: Forwarder) -> dict[int, float]:
    """Forward a run whose steps from 12 on are trained twice; the losses that count."""
    write_steps(run, 0, 20)
    following.forward()
    run.remove_metrics_from(12)
    write_steps(run, 12, 20, offset=1.0)
    write_rest(run, 20)
    following.forward()
    following.finish("finished")
    return {step: loss_at(step, 1.0 if step >= 12 else 0.0) for step in range(20)}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables(run: RunWriter, kind: str) -> None:
    pandas = pytest.importorskip("pandas")
    losses = with_rollback(run, start(run, to=kind))
    folder = run.folder / "trackers" / kind
    table = getattr(pandas, f"read_{kind}")(folder / f"train-00000.{kind}")
    assert dict(zip(table["step"], table["loss"], strict=True)) == losses
    validation = getattr(pandas, f"read_{kind}")(folder / f"validation-00000.{kind}")
    assert validation["per_source/words"].tolist() == [2.5]


def test_tables_in_parts(run: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    monkeypatch.setattr("bessemer.observe.trackers.tables.PART_ROWS", 4)
    following = start(run, to="parquet")
    for step in range(0, 10, 2):
        write_steps(run, step, step + 2, **({"late": 1.0} if step >= 6 else {}))
        following.forward()
    folder = run.folder / "trackers" / "parquet"
    assert len(list(folder.glob("train-*"))) == 3
    run.remove_metrics_from(3)
    following.forward()
    table = pandas.concat([pandas.read_parquet(path) for path in sorted(folder.glob("train-*"))])
    assert table["step"].tolist() == [0, 1, 2]


def test_tensorboard(run: RunWriter) -> None:
    losses = with_rollback(run, start(run, to="tensorboard", tags=["first"]))
    module = importlib.import_module("tensorboard.backend.event_processing.event_multiplexer")
    reader = module.EventMultiplexer({"demo": str(run.folder / "trackers" / "tensorboard")}).Reload()
    assert {event.step: event.value for event in reader.Scalars("demo", "train/loss")} == losses
    assert [event.step for event in reader.Scalars("demo", "validation/per_source/words")] == [20]
    texts = {tag: reader.Tensors("demo", tag)[0].tensor_proto.string_val[0] for tag in reader.Runs()["demo"]["tensors"]}
    assert (
        texts["sample/text_summary"] == b"Once upon a time" and b"optimizer.lr | 0.01" in texts["config/text_summary"]
    )


def records_of(path: Path) -> list[Any]:
    """The records of a W&B offline file: 7 bytes, then LevelDB log blocks of 32 KB."""
    pb = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, part, records = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, or the last part
            records.append(pb.Record.FromString(part))
            part = b""
    return records


@pytest.mark.slow  # W&B starts a service
def test_wandb_offline(run: RunWriter) -> None:
    following = start(run, to="wandb", offline=True, group="baseline", tags=["first"])
    write_steps(run, 0, 20)
    following.forward()
    run.remove_metrics_from(12)
    write_steps(run, 12, 20, offset=1.0)
    following.forward()
    following.finish("interrupted")
    following.release()
    again = start(run, to="wandb", offline=True, group="baseline")
    write_rest(run, 20)
    again.forward()
    again.finish("finished")
    first, second = sorted((run.folder / "trackers" / "wandb").glob("offline-run-*/*.wandb"), key=lambda p: len(p.name))
    records = records_of(first)
    rows: list[dict[str, str]] = [
        {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    steps = [
        (int(row["step"]), int(row["generation"]), float(row["train/loss"])) for row in rows if "train/loss" in row
    ]
    newest = {step: loss for step, _, loss in sorted(steps, key=lambda each: each[1])}
    assert newest == {step: loss_at(step, 1.0 if step >= 12 else 0.0) for step in range(20)}
    (info,) = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
    assert (info.run_id, info.run_group, list(info.tags)) == (following.state["id"], "baseline", ["first"])
    assert second.name == f"run-{info.run_id}-2.wandb", "a second offline part of one id would erase the first"
    give_up = time.monotonic() + 60  # the service writes on after `finish`
    while not (texts := [r for r in records_of(second) if "text/sample" in str(r.history)]):
        assert time.monotonic() < give_up
        time.sleep(0.2)
    assert "Once upon a time" in str(texts[0])


def test_prometheus_is_scraped(run: RunWriter) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    port = free_port()
    following = start(run, to="prometheus", port=port)
    write_steps(run, 0, 20)
    following.forward()
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    samples = {
        (sample.name, sample.labels.get("state")): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["run"] == "demo"
    }
    assert samples["bessemer_train_loss", None] == loss_at(19) and samples["bessemer_train_step", None] == 19
    assert samples["bessemer_state", "running"] == 1
    following.finish("finished")
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)


class Receiver:
    """An HTTP server that keeps what is sent to it; `status` is what it answers."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.status = 200
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.paths.append(self.path)
                self.send_response(receiver.status)
                self.end_headers()

            do_PUT = do_POST

            def log_message(self, *_: Any) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_prometheus_pushgateway(run: RunWriter, receiver: Receiver) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    with_rollback(run, start(run, to="prometheus", url=receiver.url))
    families = parser.text_string_to_metric_families(receiver.bodies[-1].decode())
    states = {s.labels["state"]: s.value for f in families for s in f.samples if s.name == "bessemer_state"}
    assert states["finished"] == 1 and states["running"] == 0
    assert receiver.paths[-1] == "/metrics/job/bessemer/run/demo"


def test_opentelemetry(run: RunWriter, receiver: Receiver) -> None:
    following = start(run, to="otel", url=f"{receiver.url}/v1/metrics", group="baseline")
    write_steps(run, 0, 20)
    receiver.status = 400  # 5xx would be tried again by the exporter itself
    with pytest.raises(ConnectionError, match="did not take the metrics"):
        following.forward()
    following.fail()
    receiver.status = 200
    assert following.forward() == 20
    service = importlib.import_module("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    message = service.ExportMetricsServiceRequest.FromString(receiver.bodies[-1])
    (resource,) = message.resource_metrics
    attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
    values = {metric.name: metric.gauge.data_points[0].as_double
              for scope in resource.scope_metrics for metric in scope.metrics}  # fmt: skip
    assert attributes["bessemer.group"] == "baseline" and attributes["service.instance.id"] == following.state["id"]
    assert attributes["bessemer.run"] == "demo" and values["bessemer.train.loss"] == loss_at(19)


def test_trackio(run: RunWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed")
    storage = importlib.import_module("trackio.sqlite_storage")
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path / "trackio")
    following = start(run, to="trackio", project="llm")
    with_rollback(run, following)
    logs = storage.SQLiteStorage.get_logs("llm", following.state["id"])
    assert {log["step"] for log in logs if "train/loss" in log} == set(range(20))


def test_every_tracker_has_a_module_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KINDS.keys() == TRACKERS.keys()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in set(KINDS) - {"csv", "parquet"}:
        settings = {"port": 1} if name == "prometheus" else {"url": "http://host"} if name in ("otel", "mlflow") else {}
        with pytest.raises(UserError, match=f"trackers: {name} needs the package .*: pip install"):
            make_tracker(name).check(tracker(to=name, **settings))


def test_mlflow_needs_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("mlflow") is None:
        pytest.skip("mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match="mlflow has no address"):
        make_tracker("mlflow").check(tracker(to="mlflow"))


def test_values_that_are_not_finite_arrive(run: RunWriter) -> None:
    following = start(run, to="tensorboard")
    run.step({"step": 0, "loss": math.nan, "grad_norm": math.inf})
    assert following.forward() == 1


def run_alone(code: str, run: RunWriter) -> None:
    """Run code in a process of its own: some clients patch other libraries when they are imported."""
    completed = subprocess.run(
        [sys.executable, "-c", code, str(run.folder)], capture_output=True, text=True, timeout=300
    )
    assert completed.returncode == 0, completed.stderr[-2000:]


FORWARD_ALONE = """
import sys
from bessemer.observe.trackers.forward import Forwarder
from bessemer.run.directory import Run
from bessemer.spec.observers import TrackerSpec
spec = TrackerSpec.model_validate({"to": NAME, "offline": True, "tags": ["first"], "group": "baseline"})
following = Forwarder(Run(sys.argv[1]), spec)
assert following.acquire() and following.forward() == 21
following.finish("finished")
"""


@pytest.mark.slow  # its archive is written at the end of a process
@pytest.mark.timeout(320)
def test_comet_offline_archive(run: RunWriter) -> None:
    if importlib.util.find_spec("comet_ml") is None:
        pytest.skip("comet-ml is not installed")
    write_steps(run, 0, 20)
    write_rest(run, 20)
    run_alone(FORWARD_ALONE.replace("NAME", "'comet'"), run)
    (archive,) = (run.folder / "trackers" / "comet").glob("*.zip")
    with zipfile.ZipFile(archive) as file:
        messages = [json.loads(line) for line in file.read("messages.json").splitlines()]
        described = json.loads(file.read("experiment.json"))
    metrics = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
    losses = {
        metric["step"]: float(metric["metricValue"]) for metric in metrics if metric["metricName"] == "train/loss"
    }
    assert losses == {step: loss_at(step) for step in range(20)}
    assert set(described["tags"]) >= {"first", "group: baseline"}


@pytest.mark.slow  # its session is packed after pauses of seconds
@pytest.mark.timeout(320)
def test_clearml_offline_session(run: RunWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("clearml") is None:
        pytest.skip("clearml is not installed")
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "clearml"))
    write_steps(run, 0, 20)
    write_rest(run, 20)
    run_alone(FORWARD_ALONE.replace("NAME", "'clearml'"), run)
    (session,) = json.loads((run.folder / "trackers" / "clearml.json").read_text())["state"]["sessions"]
    with zipfile.ZipFile(f"{session}.zip") as file:
        lines = file.read("metrics.jsonl").decode().splitlines()
    points = [point for line in lines for point in json.loads(line)]
    losses = {p["iter"]: p["value"] for p in points if (p.get("metric"), p.get("variant")) == ("loss", "train")}
    assert losses == {step: loss_at(step) for step in range(20)}
