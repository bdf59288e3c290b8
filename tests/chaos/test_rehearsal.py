"""`bessemer train --rehearse`: the small copy of a run, the checks of the full one, and a play with real processes."""

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from bessemer.chaos import rehearsal, rehearsal_spec
from bessemer.chaos.rehearsal import Rehearsal, RehearsalStage, StageFailure, conclusion
from bessemer.cli.main import app
from bessemer.errors import UserError
from bessemer.spec.load import dump_spec, load_spec
from bessemer.spec.model import model_shape
from bessemer.spec.schema import RunSpec


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    words = ["steel", "iron", "blast", "flame", "ore", "coke", "slag", "heat", "pour", "mould", "ingot", "forge"]
    lines = [json.dumps({"text": " ".join(words[i % 12 :] + words[: i % 7])}) for i in range(400)]
    (tmp_path / "words.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "name": "big", "runs": str(tmp_path / "runs"), "tokenizer": {"vocab": 50_000},
        "model": {"width": 1024, "layers": 24, "heads": 16, "kv_heads": 4, "ffn": 2816},
        "data": {"sources": {"words": str(tmp_path / "words.jsonl")}, "context": 64},
        "budget": {"tokens": "20B", "batch": "1M"}, "schedule": {"warmup": "2000 steps"}, "precision": "fp32",
        "checkpoint": {"every": "500 steps", "remote": f"file://{tmp_path}/remote"},
        "parallel": {"device": "cpu", "threads": 1}, "trackers": ["tensorboard"],
    }  # fmt: skip


def spec_of(settings: dict[str, Any], tmp_path: Path, **more: Any) -> RunSpec:
    path = tmp_path / "big.yaml"
    path.write_text(yaml.safe_dump({**settings, **more}))
    return load_spec(path)


def shrink(spec: RunSpec, folder: Path, gpus: int = 0, most: int = 8) -> tuple[RunSpec, list[str]]:
    notes: list[str] = []
    small = rehearsal_spec.rehearsal_spec(spec, folder, gpus, most, notes)
    (folder / "small.yaml").write_text(dump_spec(small))
    return load_spec(folder / "small.yaml"), notes


def test_the_copy_is_small_and_keeps_its_design(settings: dict[str, Any], tmp_path: Path) -> None:
    spec = spec_of(settings, tmp_path)
    small, notes = shrink(spec, tmp_path)
    before, after = model_shape(spec.model, 512), model_shape(small.model, 512)
    assert after.parameters < 2e6 and before.parameters > 1e8
    assert after.heads // after.kv_heads == before.heads // before.kv_heads and after.tied == before.tied
    assert small.budget.steps == rehearsal_spec.STEPS and small.budget.tokens == "auto"
    assert small.checkpoint.remote is None and small.trackers == [] and small.runs.startswith(str(tmp_path))
    assert small.objective == spec.objective and small.optimizer == spec.optimizer and small.guard == spec.guard
    assert small.schedule.warmup == "auto" and any("schedule" in note for note in notes)


def test_a_layout_is_kept_where_it_fits(settings: dict[str, Any], tmp_path: Path) -> None:
    spec = spec_of(settings, tmp_path, parallel={"device": "cpu", "tp": 4, "dp_replicate": 2})
    small, notes = shrink(spec, tmp_path, most=8)
    assert (small.parallel.tp, small.parallel.dp_replicate) == (4, 2) and "layout" not in " ".join(notes)
    assert model_shape(small.model, 512).kv_heads % 4 == 0
    small, notes = shrink(spec, tmp_path, most=4)
    assert small.parallel.tp == 1 and any("needs 8 processes" in note for note in notes)


def test_a_gpu_run_is_rehearsed_on_a_cpu(settings: dict[str, Any], tmp_path: Path) -> None:
    spec = spec_of(settings, tmp_path, precision="fp8", parallel={"device": "cuda"})
    small, notes = shrink(spec, tmp_path)
    assert small.precision == "auto" and small.parallel.device == "cpu" and "no GPU here" in notes[0]
    assert shrink(spec, tmp_path, gpus=1, most=1)[0].precision == "fp8"


def test_large_sources_are_sampled_by_whole_rows(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal_spec, "SAMPLE_BYTES", 5000)
    small, _ = shrink(spec_of(settings, tmp_path), tmp_path)
    [path] = small.data.sources["words"].path
    text = Path(path).read_text()
    assert 4000 < len(text) <= 5000 and text.endswith("\n")
    assert all("text" in json.loads(line) for line in text.splitlines())
    monkeypatch.setattr(rehearsal_spec, "SAMPLE_BYTES", 8 << 20)
    small, _ = shrink(spec_of(settings, tmp_path), tmp_path)
    assert small.data.sources["words"].path == [str(tmp_path / "words.jsonl")]


def test_datasets_from_python_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    spec = spec_of(settings, tmp_path, data={"sources": {"mine": "python"}, "context": 64})
    with pytest.raises(UserError, match=r"data\.sources\.mine: datasets passed from Python"):
        shrink(spec, tmp_path)


def check(settings: dict[str, Any], tmp_path: Path, **more: Any) -> Rehearsal:
    return Rehearsal(spec_of(settings, tmp_path, **more), tmp_path / "play", lambda stage: None, 0)


def test_the_checks_of_the_full_run_pass(settings: dict[str, Any], tmp_path: Path) -> None:
    plays = check(settings, tmp_path)
    assert "4 checkpoints of about" in plays.check_disk() and "takes, returns and deletes" in plays.check_store()
    assert not list((tmp_path / "remote").iterdir()) and not list((tmp_path / "runs").iterdir())
    assert "trained from the data" in plays.check_tokenizer() and "llama" in plays.check_family()


def test_a_full_disk_is_noticed(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10**12, 10**12, 10**9))
    with pytest.raises(StageFailure, match=r"has 1 GB free: lower checkpoint\.keep_last|has 954 MiB free"):
        check(settings, tmp_path).check_disk()


def test_faults_of_the_full_run_have_a_reason(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StageFailure, match=r"runs: .* cannot be written"):
        check(settings, tmp_path, runs=str(tmp_path / "file" / "runs")).check_disk()
    with pytest.raises(StageFailure, match=r"checkpoint\.remote: .* cannot be written"):
        check(settings, tmp_path, checkpoint={"remote": f"file://{tmp_path}/file/remote"}).check_store()
    with pytest.raises(StageFailure, match=r"tokenizer\.path: "):
        check(settings, tmp_path, tokenizer={"path": str(tmp_path / "file")}).check_tokenizer()
    model = {**settings["model"], "positions": "alibi", "qk_norm": "full", "logit_cap": 30.0}
    with pytest.raises(StageFailure, match="no family of Hugging Face"):
        check(settings, tmp_path, model=model).check_family()


def test_differences_are_relative_and_name_the_step() -> None:
    before = {4: {"loss": 2.0, "grad_norm": 1.0, "lr": 0.1}, 5: {"loss": 2.0, "grad_norm": 1.0, "lr": 0.1}}
    after = {4: before[4], 5: {"loss": 2.0, "grad_norm": 1.1, "lr": 0.1}}
    assert max(rehearsal._differences(before, before, [4, 5]))[0] == 0.0
    difference, step, column = max(rehearsal._differences(before, after, [4, 5]))
    assert (difference, step, column) == (pytest.approx(0.1 / 1.1), 5, "grad_norm")
    assert max(rehearsal._differences(before, {4: before[4], 5: {}}, [4, 5]))[0] == float("inf")


def test_an_unwritable_target_ends_with_code_1(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec_of(settings, tmp_path, runs=str(tmp_path / "file" / "runs"))
    result = CliRunner().invoke(app, ["train", str(tmp_path / "big.yaml"), "--rehearse"])
    assert result.exit_code == 1, result.output
    assert "failed   disk" in result.output and "skipped  export" in result.output and "prepare failed" in result.output
    assert "do not start the full run yet" in result.output


def test_a_folder_of_the_user_is_not_replaced(settings: dict[str, Any], tmp_path: Path) -> None:
    plays = check(settings, tmp_path)
    plays.folder.mkdir()
    (plays.folder / "thesis.txt").write_text("mine")
    with pytest.raises(StageFailure, match="exists and is no rehearsal"):
        plays.prepare()
    assert (plays.folder / "thesis.txt").exists()


def test_the_last_line_names_what_failed() -> None:
    stages = [
        RehearsalStage("train", "ok", 2.0, ""),
        RehearsalStage("export", "failed", 1.0, "no family", "bessemer export --help"),
    ]
    assert conclusion(stages).startswith("export failed")
    assert "look: bessemer export --help" in str(stages[1])
    assert "can start" in conclusion(stages[:1])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("exportable", [True, False])
def test_a_run_is_played_from_start_to_export(settings: dict[str, Any], tmp_path: Path, exportable: bool) -> None:
    """Killed with SIGKILL, continued with the same numbers, exported; a model that nothing can represent fails at its
    export and nowhere else."""
    odd = {} if exportable else {"positions": "alibi", "qk_norm": "full", "logit_cap": 30.0}
    spec_of(settings, tmp_path, model={**settings["model"], **odd})
    result = CliRunner().invoke(app, ["train", str(tmp_path / "big.yaml"), "--rehearse", "--json"])
    answer = json.loads(result.stdout)
    states = {stage["name"]: stage["state"] for stage in answer["stages"]}
    failed = {name for name, state in states.items() if state != "ok"}
    assert failed == (set() if exportable else {"family", "export"}), answer
    assert result.exit_code == (0 if exportable else 1)
    texts = {stage["name"]: stage["text"] for stage in answer["stages"]}
    assert "SIGKILL" in texts["train"] and "repeated bit for bit" in texts["resume"]
    assert "from step 8" in texts["resume"] and not (tmp_path / "runs" / "big").exists()
