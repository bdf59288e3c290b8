"""The conversation of someone who sets up DPO with TRL's options in mind: each command's answer leads to the next step,
up to a run."""

import json
import math
from pathlib import Path

import pytest
from tests.align.test_dpo import base as base  # the fixture
from tests.align.test_dpo import write_rows
from typer.testing import CliRunner

from bessemer.cli.main import app
from bessemer.errors import UserError
from bessemer.run.directory import Run

# "Beta 0.1, learning rate 5e-7, batch size 16-32 pairs, 1-3 epochs", as TRL's config would have them.
FIRST_TRY = """
name: aligned
objective: dpo
model_name_or_path: MODEL
beta: 0.1
learning_rate: 5e-7
max_length: 512
max_prompt_length: 256
remove_unused_columns: false
data: {sources: {preferences: PAIRS}}
dpo: {loss_type: sigmoid, label_smoothing: 0.1, reference_free: false}
"""
SECOND_TRY = """
name: aligned
runs: RUNS
objective: dpo
start_from: MODEL
model: {width: 32, layers: 1, heads: 2, kv_heads: 1, ffn: 64}
tokenizer: {path: TOKENIZER, chat: none}
data: {sources: {preferences: PAIRS}, context: 48, validation: 10%}
budget: {epochs: 1, batch: 1536}
optimizer: {lr: 1e-3}
dpo: {beta: 0.1}
parallel: {device: cpu, threads: 1}
precision: fp32
"""


def answer(*arguments: str) -> tuple[int, str]:
    """The exit code and output; the program prints a UserError and exits with 2."""
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, UserError):
        return 2, result.output + "\n".join(getattr(result.exception, "problems", [str(result.exception)]))
    return result.exit_code, result.output


def test_from_trl_options_to_a_run(base: tuple[Path, Path, Path], tmp_path: Path) -> None:
    run, _, pairs = base
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(FIRST_TRY.replace("PAIRS", str(pairs)).replace("MODEL", str(run)))
    code, text = answer("spec", "check", str(first))
    assert code == 2
    for advice in (
        "beta: unknown key here; it belongs under dpo:",
        "learning_rate: unknown key; in Bessemer it is optimizer.lr; write lr: 5e-07",
        "max_length: unknown key; in Bessemer it is data.context; write context: 512",
        "max_prompt_length: unknown key; in Bessemer it is data.context (of a prompt and its answers together",
        "only the columns that a source names are read: remove the key",
        "dpo.label_smoothing: unknown key; in Bessemer it is dpo.smoothing; write smoothing: 0.1",
        "dpo.loss_type: unknown key; in Bessemer it is dpo.loss; write loss: sigmoid",
        "losses without a reference are simpo and orpo",
    ):
        assert advice in text, advice

    checkpoint = next((run / "checkpoints").glob("step-*"))
    values = {"RUNS": tmp_path / "runs", "MODEL": checkpoint, "TOKENIZER": run / "tokenizer.json", "PAIRS": pairs}
    spec = SECOND_TRY
    for name, value in values.items():
        spec = spec.replace(name, str(value))
    second.write_text(spec)
    code, text = answer("data", "check", str(second))  # the columns are called otherwise
    assert code == 2 and "dpo compares two answers: name their columns" in text

    trl = write_rows(tmp_path / "trl.jsonl", [
        {"prompt": row["question"], "chosen": row["good"], "rejected": row["bad"]} for row in rows
    ])  # fmt: skip
    long = {"prompt": "is red " + "x" * 50, "chosen": "yes red", "rejected": "no green"}
    write_rows(tmp_path / "long.jsonl", [*map(json.loads, trl.read_text().splitlines()), long])
    second.write_text(spec.replace(str(pairs), str(tmp_path / "long.jsonl")))
    code, text = answer("data", "check", str(second))
    assert code == 2 and "long.jsonl:201: 1 of 1" in text and "answers would be cut off: raise it to 7" in text, text

    second.write_text(spec.replace(str(pairs), str(trl)))
    code, text = answer("data", "check", str(second))
    assert code == 0 and "pairs: no mistakes found" in text, text
    code, text = answer("plan", str(second))
    assert code == 0, text
    code, text = answer("train", str(second), "--plain")
    assert code == 0, text
    metrics = list(Run.existing(tmp_path / "runs" / "aligned").metrics())
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-5) and metrics[-1]["margin"] > 0
    assert {"accuracy", "margin", "chosen_shift"} <= metrics[0].keys()  # what the conversation says to monitor
    decisions = json.loads((tmp_path / "runs" / "aligned" / "plan.json").read_text())["decisions"]
    values = {item["key"]: item["value"] for item in decisions}
    assert values["dpo.share_prefix"] is True and values["dpo.reference"] == "stored"
