"""CSV files, JSON lines and our own run folders."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bessemer.errors import UserError
from bessemer.observe.foreign import read, recognise
from bessemer.run.directory import RunWriter


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("step,loss,lr,mfu,note\n0,3.5,1e-4,40,a\n1,,1e-4,40,b\n2,nan,1e-4,40,c\n3,inf,1e-4,40,d\n")
    (run,) = read(path)
    assert recognise(path) == "csv" and run.name == "run" and set(run.series) == {"loss", "lr", "mfu"}
    loss = run.series["loss"]
    assert loss.steps.tolist() == [0, 2, 3] and loss.lines.tolist() == [2, 4, 5]
    assert math.isnan(loss.values[1]) and math.isinf(loss.values[2])
    assert run.series["mfu"].values[0] == 0.4 and any("percent" in note for note in run.notes)


def test_lightning_csv(tmp_path: Path) -> None:
    folder = tmp_path / "lightning_logs" / "version_0"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(
        "epoch,lr-AdamW,step,train_loss_epoch,train_loss_step,val_loss\n"
        ",0.001,9,,,\n0,,9,,2.5,\n0,,9,,,2.75\n0,,9,2.6,,\n1,,19,,2.0,\n1,,19,,,2.5\n"
    )
    (run,) = read(tmp_path)
    assert run.format == "lightning_csv" and run.name == "version_0"
    assert run.series["loss"].values.tolist() == [2.5, 2.0]
    assert run.series["validation_loss"].steps.tolist() == [9, 19] and run.series["lr"].values.tolist() == [0.001]
    assert run.series["train_loss_epoch"].values.tolist() == [2.6]


def test_exported_charts_of_wandb(tmp_path: Path) -> None:
    path = tmp_path / "wandb_export.csv"
    path.write_text(
        '"Step","big - train/loss","big - train/loss__MIN","big - train/loss__MAX","small - train/loss"\n'
        '"1","2.5","2.5","2.5","3.5"\n"2","2.0","2.0","2.0",""\n'
    )
    big, small = read(path)
    assert (big.name, small.name) == ("big", "small") and set(big.series) == {"loss"}
    assert big.series["loss"].values.tolist() == [2.5, 2.0] and small.series["loss"].values.tolist() == [3.5]


def test_steps_that_begin_again_in_each_epoch(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("epoch,batch,loss\n" + "".join(f"{e},{b},{e}.5\n" for e in range(3) for b in range(0, 100, 10)))
    (run,) = read(path)
    assert run.series["loss"].steps.tolist() == list(range(0, 300, 10)) and not run.restarts
    assert any("each epoch" in note for note in run.notes)


def test_restart_within_an_epoch(tmp_path: Path) -> None:
    steps = [*range(0, 200, 10), *range(150, 250, 10)]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps({"step": s, "epoch": s / 100, "loss": i}) + "\n" for i, s in enumerate(steps)))
    (run,) = read(path)
    assert run.restarts == [150] and run.series["loss"].steps.tolist() == list(range(0, 250, 10))
    assert run.series["loss"].values[15] == 20


def test_rows_out_of_order_are_sorted(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("step,loss\n" + "".join(f"{step},{step / 10}\n" for step in range(99, -1, -1)))
    (run,) = read(path)
    assert run.series["loss"].steps.tolist() == list(range(100)) and run.series["loss"].values[99] == 9.9
    assert not run.restarts and any("not in order" in note for note in run.notes)


@pytest.mark.parametrize("text", ["loss,lr\n1,2\n", "1,2\n3,4\n", "", "\n\n"])
def test_csv_without_steps_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.csv"
    path.write_text(text)
    with pytest.raises(UserError, match="looked for"):
        read(path)


def test_llama_factory(tmp_path: Path) -> None:
    path = tmp_path / "out" / "trainer_log.jsonl"
    path.parent.mkdir()
    records = [
        {"current_steps": step, "total_steps": 30, "loss": 2.0, "lr": 1e-5, "epoch": step / 10, "percentage": 3.0,
         "elapsed_time": "0:00:10", "remaining_time": "0:00:10"}
        for step in (10, 20, 30)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (run,) = read(path.parent)
    assert (run.format, run.name, run.total_steps) == ("llama_factory", "out", 30)
    assert run.series["loss"].steps.tolist() == [10, 20, 30] and run.series["loss"].mean_of == 10
    assert run.series["lr"].values[0] == 1e-5 and "elapsed_time" not in run.series


def test_nested_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"
    path.write_text('{"step": 1, "data": {"actor/lr": 1e-6, "critic/rewards/mean": NaN}}\nnot json\n')
    (run,) = read(path)
    assert run.series["lr"].values.tolist() == [1e-6] and math.isnan(run.series["reward"].values[0])
    assert any("1 lines" in note for note in run.notes)


def test_run_folder(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "mine") as writer:
        writer.write_file("spec.yaml", "optimizer:\n  lr: 0.01\n")
        writer.event("started", step=0, total_steps=100)
        writer.event("started", step=50, total_steps=100)
        for step in range(100):
            writer.step({"step": step, "loss": math.nan if step == 7 else 2.0, "tokens_per_s": 9.0, "veto": None})
        writer.validation({"step": 100, "loss": 1.5, "per_source": {"words": 1.4}})
    (run,) = read(tmp_path / "mine")
    assert run.format == "bessemer" and run.settings == {"optimizer/lr": 0.01}
    assert run.restarts == [50] and run.total_steps == 100 and len(run.series["loss"]) == 100
    assert math.isnan(run.series["loss"].values[7]) and run.series["loss"].lines[7] == 8
    assert run.series["validation_loss"].values.tolist() == [1.5] and run.series["per_source/words"].values[0] == 1.4
    assert [folder.name for folder in read(tmp_path)] == ["mine"]


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read(tmp_path / "absent")
