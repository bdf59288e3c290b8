"""The page about runs of other frameworks: its code runs, and its names are those of the code."""

import re
from pathlib import Path

import pytest

from bessemer.observe.foreign import NAMES
from bessemer.observe.foreign.logs import LOG_FORMATS

PAGE = (Path(__file__).parents[2] / "docs" / "foreign-runs.md").read_text()
PRINTED = {"hf_log": "printed dictionaries", "text_log": "any line", "megatron": "Megatron-LM"}


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.log").write_text("iter 10: loss 3.2000, time 12.30ms, mfu 12.34%\n")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(code, {})
    assert capsys.readouterr().out == "nanogpt train 10 3.2 1 [] []\n"


def test_names_and_formats() -> None:
    section = PAGE.split("## Names and units")[1].split("\n\n")[1]
    listed = set(re.findall(r"`(\w+)`", section)) - {"NAMES"}
    assert listed <= set(NAMES) and {"loss", "lr", "step_s"} <= listed
    for name in LOG_FORMATS:
        plain = PRINTED.get(name, name).replace("_", "").replace("-", "").lower()
        assert plain in PAGE.replace("-", "").lower(), name
