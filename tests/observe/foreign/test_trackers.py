"""Files that TensorBoard, Weights & Biases and MLflow write."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from bessemer.errors import UserError
from bessemer.observe.foreign import ForeignRun, read, recognise

LOSSES = [3.0, 2.5, math.nan, 2.0, math.inf, 1.5]


def check(run: ForeignRun, rel: float = 1e-6) -> None:
    """The run of `LOSSES` at steps 10, 20, ..."""
    loss = run.series["loss"]
    assert loss.steps.tolist() == [10, 20, 30, 40, 50, 60]
    assert loss.values.tolist() == pytest.approx(LOSSES, nan_ok=True, rel=rel)
    assert run.series["lr"].values.tolist() == pytest.approx([1e-3] * 6, rel=rel)


class TestTensorBoard:
    @pytest.fixture
    def writer(self):
        pytest.importorskip("tensorboard")
        from tensorboard.summary import Writer

        return Writer

    def test_scalars(self, tmp_path: Path, writer) -> None:
        log = writer(str(tmp_path / "run"))
        for i, loss in enumerate(LOSSES, 1):
            log.add_scalar("train/loss", loss, i * 10)
            log.add_scalar("train/learning_rate", 1e-3, i * 10)
        log.close()
        (run,) = read(tmp_path)
        assert recognise(tmp_path) == run.format == "tensorboard" and run.name == "run"
        check(run)

    def test_restart_in_a_second_file(self, tmp_path: Path, writer) -> None:
        for start, count, loss in ((0, 100, 5.0), (60, 20, 4.0)):
            log = writer(str(tmp_path / f"{start}"))
            for step in range(start, start + count):
                log.add_scalar("loss", loss, step)
                log.add_scalar("lr", loss, step)
            log.close()
        (tmp_path / "run").mkdir()
        for start in (0, 60):
            (path,) = (tmp_path / f"{start}").iterdir()
            path.rename(tmp_path / "run" / f"events.out.tfevents.17950000{start:02}.host")
        (run,) = read(tmp_path / "run")
        assert run.restarts == [60]
        assert run.series["loss"].steps.tolist() == list(range(80))
        assert run.series["loss"].values.tolist() == [5.0] * 60 + [4.0] * 20

    def test_all_points_of_a_long_run(self, tmp_path: Path, writer) -> None:
        log = writer(str(tmp_path))
        for step in range(12_000):
            log.add_scalar("loss", 100.0 if step == 7_654 else 1.0, step)
        log.close()
        (run,) = read(next(tmp_path.iterdir()))
        assert len(run.series["loss"]) == 12_000 and run.series["loss"].values[7_654] == 100

    def test_cut_and_damaged_files(self, tmp_path: Path, writer) -> None:
        log = writer(str(tmp_path))
        for step in range(100):
            log.add_scalar("loss", 1.0, step)
        log.close()
        (path,) = tmp_path.iterdir()
        content = path.read_bytes()
        path.write_bytes(content[:-5])
        (run,) = read(path)
        assert len(run.series["loss"]) == 99
        path.write_bytes(content[:1000] + b"\xff" * 2000)
        with pytest.raises(UserError, match=r"damaged|not an event file"):
            read(path)

    @pytest.mark.slow
    def test_hyper_parameters_of_torch(self, tmp_path: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(tmp_path)) as log:
            log.add_hparams({"lr": 0.125, "optimizer": "adamw", "tied": True}, {"loss": 2.0})
            log.add_text("args", '{"weight_decay": 0.1}')
            log.add_scalar("loss/train", 2.0, 1, new_style=True)
        runs = read(tmp_path)
        settings = {key: value for run in runs for key, value in run.settings.items()}
        assert settings == {"lr": 0.125, "optimizer": "adamw", "tied": True, "weight_decay": 0.1}
        assert any(run.series["loss"].values.tolist() == [2.0] for run in runs)


WANDB = """
import math, os, sys, wandb
config = {"optimizer": {"lr": 0.001}, "seed": 3}
run = wandb.init(project="p", name="mine", mode="offline", dir=sys.argv[1], config=config,
                 settings=wandb.Settings(x_disable_stats=True, console="off"))
for i, loss in enumerate([3.0, 2.5, math.nan, 2.0, math.inf, 1.5], 1):
    run.log({"train/loss": loss, "train/learning_rate": 1e-3, "train/global_step": i * 10, "nested": {"a": i},
             "text": "x" * (40_000 if i == 3 else 5)})
run.finish()
"""  # the long text makes a record of several parts


def check_wandb(folder: Path) -> None:
    (run,) = read(folder)
    assert recognise(folder) == run.format == "wandb" and run.name == "mine"
    check(run)
    assert run.series["nested/a"].values.tolist() == [1, 2, 3, 4, 5, 6]
    assert run.settings == {"optimizer/lr": 0.001, "seed": 3}


def field(number: int, value: bytes | str) -> bytes:
    """A field of a protocol buffer that holds text or a message."""
    data = value.encode() if isinstance(value, str) else value
    size, head = len(data), bytes([number << 3 & 127 | 130, number >> 4]) if number > 15 else bytes([number << 3 | 2])
    while size > 127:
        head += bytes([size & 127 | 128])
        size >>= 7
    return head + bytes([size]) + data


def item(key: str, value: object) -> bytes:
    return field(1, b"".join(field(2, part) for part in key.split("|")) + field(16, json.dumps(value)))


@pytest.fixture
def wandb_file(tmp_path: Path) -> Path:
    """What wandb writes, as far as runs are read: its records in parts of blocks of 32 KiB."""
    config = item("optimizer", {"lr": 0.001}) + item("seed", 3) + item("_wandb", {"x": 1})
    records = [field(17, field(1, "abc") + field(4, config) + field(8, "mine"))]
    for i, loss in enumerate(LOSSES, 1):
        row = {
            "train/loss": loss,
            "train/learning_rate": 1e-3,
            "train/global_step": i * 10,
            "nested|a": i,
            "_runtime": 1.0,
        }
        row["text"] = "x" * (40_000 if i == 3 else 5)
        records.append(field(2, b"".join(item(key, value) for key, value in row.items())))
    content = b":W&B\xe1\xbe\x00"
    for record in records:
        first = True
        while first or record:
            left = 32768 - len(content) % 32768
            if left < 7:
                content += bytes(left)
                continue
            part, record = record[: left - 7], record[left - 7 :]
            content += struct.pack("<IHB", 0, len(part), (2 if record else 1) if first else (3 if record else 4)) + part
            first = False
    path = tmp_path / "wandb" / "offline-run-1-abc" / "run-abc.wandb"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def test_wandb_file(wandb_file: Path, tmp_path: Path) -> None:
    check_wandb(tmp_path)


def test_cut_and_damaged_wandb_file(wandb_file: Path) -> None:
    content = wandb_file.read_bytes()
    wandb_file.write_bytes(content[:-100])
    (run,) = read(wandb_file)
    assert len(run.series["loss"]) == 5
    wandb_file.write_bytes(content[:7] + b"\xff" * 70_000)
    with pytest.raises(UserError, match=r"damaged|not a file of wandb"):
        read(wandb_file)


@pytest.mark.slow
def test_todays_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    subprocess.run([sys.executable, "-c", WANDB, str(tmp_path)], check=True, capture_output=True, timeout=110)
    check_wandb(tmp_path)


MLFLOW = """
import math, os, sys
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
import mlflow
from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient
client = MlflowClient(sys.argv[1])
run = client.create_run(client.create_experiment("e"), run_name="mine")
metrics = [Metric(key, value, 1000 + i, i * 10) for i, loss in enumerate([3.0, 2.5, math.nan, 2.0, math.inf, 1.5], 1)
           for key, value in (("train/loss", loss), ("learning_rate", 1e-3))]
client.log_batch(run.info.run_id, metrics=metrics, params=[Param("lr", "0.001"), Param("model", "llama")])
client.set_terminated(run.info.run_id)
"""


def check_mlflow(path: Path) -> None:
    (run,) = read(path)
    assert recognise(path) == run.format == "mlflow" and run.name == "mine"
    check(run)
    assert run.settings == {"lr": 0.001, "model": "llama"}


def write_store(folder: Path) -> None:
    """A run in a file store."""
    run = folder / "1" / "abc"
    for name in ("metrics/train", "params", "tags"):
        (run / name).mkdir(parents=True)
    (run / "meta.yaml").write_text("run_id: abc\nrun_name: mine\n")
    (run / "metrics" / "train" / "loss").write_text("".join(f"{i} {v} {i * 10}\n" for i, v in enumerate(LOSSES, 1)))
    (run / "metrics" / "learning_rate").write_text("".join(f"{i} 0.001 {i * 10}\n" for i in range(1, 7)))
    (run / "params" / "lr").write_text("0.001")
    (run / "params" / "model").write_text("llama")


def test_mlflow_folder(tmp_path: Path) -> None:
    write_store(tmp_path / "mlruns")
    check_mlflow(tmp_path / "mlruns")


def test_mlflow_database(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    with contextlib.closing(sqlite3.connect(path)) as store, store:
        store.execute("create table runs (run_uuid, name, start_time)")
        store.execute("create table params (key, value, run_uuid)")
        store.execute("create table metrics (key, value, timestamp, run_uuid, step, is_nan)")
        store.executemany("insert into runs values (?, ?, ?)", [("abc", "mine", 1), ("def", "without metrics", 2)])
        store.executemany("insert into params values (?, ?, 'abc')", [("lr", "0.001"), ("model", "llama")])
        for i, loss in enumerate(LOSSES, 1):
            value = 0.0 if math.isnan(loss) else min(loss, sys.float_info.max)
            rows = [
                ("train/loss", value, i, "abc", i * 10, math.isnan(loss)),
                ("learning_rate", 1e-3, i, "abc", i * 10, 0),
            ]
            store.executemany("insert into metrics values (?, ?, ?, ?, ?, ?)", rows)
    check_mlflow(path)


def test_another_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(path)) as store, store:
        store.execute("create table metrics (key)")
    with pytest.raises(UserError, match="not a run in a known format; looked for"):
        read(path)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["mlruns", "mlflow.db"])
def test_todays_mlflow(tmp_path: Path, store: str) -> None:
    pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / store}" if store.endswith(".db") else (tmp_path / store).as_uri()
    subprocess.run([sys.executable, "-c", MLFLOW, uri], check=True, capture_output=True, timeout=110, cwd=tmp_path)
    check_mlflow(tmp_path / store)


def test_folder_of_several_formats(tmp_path: Path) -> None:
    """Exact tables are preferred to logs of the same runs; notes are no runs."""
    (tmp_path / "metrics.csv").write_text("step,loss\n1,2.0\n")
    (tmp_path / "train.log").write_text("step 1 loss: 2.0\n")
    (tmp_path / "notes.txt").write_text("nothing\n")
    write_store(tmp_path / "mlruns")
    assert recognise(tmp_path) == "csv+mlflow" and len(read(tmp_path)) == 2
