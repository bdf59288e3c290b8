"""`bessemer spec check` warns with file and line, and goes on."""

from pathlib import Path

import pytest

from .conftest import Call


def test_warnings_have_a_line_and_a_name(call: Call) -> None:
    Path("run.yaml").write_text("model: 1M\ndata: {sources: {mine: data/}}\nschedule:\n  warmup: 0\nprecision: fp16\n")
    Path("data").mkdir()
    Path("data/a.jsonl").touch()
    said = call("spec", "check", "run.yaml")
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0].startswith("run.yaml:4: warning: schedule.warmup:") and lines[0].endswith("[no_warmup]")
    assert lines[1].startswith("run.yaml:5: warning: precision:") and lines[1].endswith("[fp16_on_new_hardware]")
    assert lines[2] == "run.yaml: 2 warnings (run run)"
    quiet = call("spec", "check", "run.yaml", "--set", "lints.silence=[no_warmup, fp16_on_new_hardware]")
    assert (quiet.code, quiet.out) == (0, "run.yaml: fine (run run)\n")


def test_a_spec_is_not_fine_while_its_files_are_missing(call: Call) -> None:
    Path("run.yaml").write_text("model: {hf: qwen/}\ndata:\n  sources: {mine: data/*.jsonl}\n")
    refused = call("spec", "check", "run.yaml")
    assert (refused.code, refused.out) == (2, "")
    lines = refused.err.splitlines()
    assert lines[0].startswith("run.yaml:1: model.hf: no such folder: 'qwen/'")
    assert lines[1] == "run.yaml:3: data.sources.mine.path: no file matches 'data/*.jsonl': correct the pattern"
    assert lines[2:] == ["run.yaml: pass --skip-paths if its files are on another machine"]
    elsewhere = call("spec", "check", "run.yaml", "--skip-paths")
    assert (elsewhere.code, elsewhere.out) == (0, "run.yaml: fine (run run); its paths were not checked\n")


def test_a_model_of_no_known_family_is_told_before_the_run(call: Call) -> None:
    model = Path("model")
    model.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "x.jsonl"):
        (model / name).touch()
    (model / "config.json").write_text('{"model_type": "xyz", "architectures": ["XyzForCausalLM"]}')
    Path("run.yaml").write_text("model: {hf: model}\ndata: {sources: {mine: model/x.jsonl}}\n")
    refused = call("spec", "check", "run.yaml")
    assert refused.code == 2 and "run.yaml:1: model.hf: 'model': config.json: architectures: Xyz" in refused.err


@pytest.mark.parametrize(
    "command", [("spec", "check"), ("train",), ("generate",), ("data", "check"), ("model", "show")]
)
def test_a_name_that_no_file_system_takes_is_one_line(call: Call, command: tuple[str, ...]) -> None:
    refused = call(*command, "x" * 420)
    assert refused.code == 2 and len(refused.err.splitlines()) == 1
    assert any(reason in refused.err for reason in ("ame too long", "no such file", "no such folder"))
