"""What a real Trainer of Hugging Face writes and prints."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from bessemer.errors import UserError
from bessemer.observe.foreign import ForeignRun, read, recognise

DATA = Path(__file__).parent / "data" / "trainer"  # written by `train` below with transformers 5.22


def train(folder: Path) -> None:
    """A run of 30 steps, and what it printed, with the bars in between, in `train.log`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=1, num_key_value_heads=1)  # fmt: skip
    rows = [{"input_ids": (ids := torch.randint(0, 32, (8,))), "labels": ids} for _ in range(40)]
    arguments: dict[str, Any] = {"report_to": "none", "use_cpu": True, "seed": 1}
    arguments |= {"logging_steps": 5, "max_steps": 30, "save_steps": 15, "eval_strategy": "steps", "eval_steps": 10}
    with (folder / "train.log").open("w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        trainer = Trainer(
            LlamaForCausalLM(config), TrainingArguments(str(folder / "out"), learning_rate=1e-3, **arguments),
            train_dataset=rows, eval_dataset=rows[:8],
        )  # fmt: skip
        trainer.train()


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "trainer"
    shutil.copytree(DATA, folder)
    (folder / "out" / "checkpoint-30" / "training_args.bin").write_bytes(b"\x80\x04 a pickle")
    return folder


@pytest.mark.slow
def test_todays_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    train(tmp_path)
    check_state(tmp_path)
    check_log(tmp_path)


def check(run: ForeignRun, history: list[dict[str, Any]], digits: float) -> None:
    """The run has what the trainer logged."""
    for name, key in (("loss", "loss"), ("validation_loss", "eval_loss"), ("lr", "learning_rate"), ("grad_norm",) * 2):
        expected = {record["step"]: record[key] for record in history if key in record}
        series = run.series[name]
        assert series.steps.tolist() == list(expected), name
        assert series.values.tolist() == pytest.approx(list(expected.values()), rel=digits)
    assert run.series["loss"].mean_of == 5 and run.total_steps == 30


def test_trainer_state(output: Path) -> None:
    check_state(output)


def test_printed_log(output: Path) -> None:
    check_log(output)


def check_state(output: Path) -> None:
    state = json.loads((output / "out" / "checkpoint-30" / "trainer_state.json").read_text())
    for path in (
        output / "out",
        output / "out" / "checkpoint-30",
        output / "out" / "checkpoint-30" / "trainer_state.json",
    ):
        (run,) = read(path)
        assert recognise(path) == run.format == "hf_trainer" and run.name == "out"
        check(run, state["log_history"], 1e-12)
        assert run.settings["hidden_size"] == 16 and run.settings["save_steps"] == 15
        assert any("training_args.bin is a pickle" in note for note in run.notes)
    lines = (output / "out" / "checkpoint-30" / "trainer_state.json").read_text().splitlines()
    line = int(run.series["loss"].lines[0])
    assert lines[line - 1].strip() == '"step": 5'


def check_log(output: Path) -> None:
    state = json.loads((output / "out" / "checkpoint-30" / "trainer_state.json").read_text())
    (run,) = read(output / "train.log")
    assert run.format == "hf_log"
    check(run, state["log_history"], 2e-3)


def test_output_that_was_buffered(output: Path, tmp_path: Path) -> None:
    """All bars first, then all dictionaries: the steps follow from the epochs."""
    pieces = (output / "train.log").read_text().replace("\r", "\n").splitlines()
    prints = [piece for piece in pieces if piece.startswith("{")]
    (tmp_path / "train.log").write_text("\n".join([p for p in pieces if not p.startswith("{")] + prints))
    (run,) = read(tmp_path / "train.log")
    assert run.series["loss"].steps.tolist() == [5, 10, 15, 20, 25, 30]
    assert any("epochs" in note for note in run.notes)


def test_version_4_prints(tmp_path: Path) -> None:
    text = "".join(
        f"{{'loss': {loss}, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': {step / 100}}}\n"
        f" {step}%|█ | {step}/100 [00:01<00:10,  9.00it/s]\r"
        for step, loss in ((10, 2.31), (20, 0.0), (30, "nan"))
    )
    (tmp_path / "train.log").write_text(
        f"Map: 100%|███| 5000/5000 [00:01<00:00, 9it/s]\n  0%| | 0/100 [00:00<?]\n{text}"
    )
    (run,) = read(tmp_path / "train.log")
    losses = run.series["loss"]
    assert losses.steps.tolist() == [10, 20, 30] and losses.values[:2].tolist() == [2.31, 0.0]
    assert math.isnan(losses.values[2]) and math.isnan(run.series["grad_norm"].values[0]) and run.total_steps == 100


def test_a_log_without_bars_or_steps_counts_records(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(
        "{'loss': 3.0, 'learning_rate': 1e-05}\n{'loss': 2.0, 'learning_rate': 1e-05}\n"
    )
    (run,) = read(tmp_path / "train.log")
    assert run.series["loss"].steps.tolist() == [1, 2] and any("counted" in note for note in run.notes)


def test_ms_swift(tmp_path: Path) -> None:
    (tmp_path / "logging.jsonl").write_text(
        '{"loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-05, "epoch": 0.1, "global_step/max_steps": "5/20"}\n'
        '{"loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-05, "epoch": 0.2, "global_step/max_steps": "10/20"}\n'
    )
    (run,) = read(tmp_path)
    assert run.format == "ms_swift" and run.series["loss"].steps.tolist() == [5, 10]
    (tmp_path / "train.log").write_text("{'loss': 2.5, 'epoch': 0.1, 'global_step/max_steps': '5/20'}\n")
    (run,) = read(tmp_path / "train.log")
    assert run.series["loss"].steps.tolist() == [5] and run.total_steps == 20


def test_damaged_state(output: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-30"
    shutil.copytree(output / "out" / "checkpoint-30", checkpoint)
    state = checkpoint / "trainer_state.json"
    state.write_text(state.read_text()[:200])
    with pytest.raises(UserError, match=r"trainer_state\.json: not valid JSON"):
        read(checkpoint)
    state.write_text("{}")
    with pytest.raises(UserError, match="no log_history"):
        read(checkpoint)
