"""`bessemer spec check` warns with file and line, and goes on."""

from pathlib import Path

from .conftest import Call


def test_warnings_have_a_line_and_a_name(call: Call) -> None:
    Path("run.yaml").write_text("model: 1M\ndata: {sources: {mine: data/}}\nschedule:\n  warmup: 0\nprecision: fp16\n")
    said = call("spec", "check", "run.yaml")
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0].startswith("run.yaml:4: warning: schedule.warmup:") and lines[0].endswith("[no_warmup]")
    assert lines[1].startswith("run.yaml:5: warning: precision:") and lines[1].endswith("[fp16_on_new_hardware]")
    assert lines[2] == "run.yaml: 2 warnings (run run)"
    quiet = call("spec", "check", "run.yaml", "--set", "lints.silence=[no_warmup, fp16_on_new_hardware]")
    assert (quiet.code, quiet.out) == (0, "run.yaml: fine (run run)\n")
