"""The table of causes, its page, and the lines of configuration."""

import ast
import dataclasses
from pathlib import Path

import pytest
import yaml

from bessemer.diagnose.rules.__main__ import runbook_markdown
from bessemer.diagnose.rules.config import LINES, config_line
from bessemer.diagnose.rules.judge import EXPLAINS
from bessemer.diagnose.rules.runbook import FAMILIES, RUNBOOK
from bessemer.spec.schema import RunSpec

ROOT = Path(__file__).parents[3]
MODULES = sorted((ROOT / "src/bessemer/diagnose/rules").glob("*.py"))


def test_the_page_is_current() -> None:
    page = (ROOT / "docs/runbooks.md").read_text()
    assert page == runbook_markdown(), "run: .venv/bin/python -m bessemer.diagnose.rules > docs/runbooks.md"


def test_every_cause_is_named_by_a_rule_and_every_setting_has_lines() -> None:
    names = {
        node.value if isinstance(node, ast.Constant) else node.arg
        for path in MODULES if path.stem not in ("runbook", "judge")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant | ast.keyword)
    }  # fmt: skip
    assert set(RUNBOOK) <= names
    assert {entry.setting for entry in RUNBOOK.values()} - {""} == set(LINES)
    assert {entry.family for entry in RUNBOOK.values()} == set(FAMILIES)
    assert set(EXPLAINS) | set().union(*EXPLAINS.values()) <= set(RUNBOOK)


VALUES = {"warmup": 30, "steps": 1000, "save": 100, "samples": 16, "epochs": 1}


@pytest.mark.parametrize("setting", [name for name in LINES if "bessemer" in LINES[name] and name != "resume"])
def test_our_lines_are_keys_of_the_spec(setting: str) -> None:
    line = config_line("bessemer", setting, VALUES.get(setting, 0.5))
    change = yaml.safe_load(line.removeprefix("Set `").removesuffix("`."))
    RunSpec.model_validate({"model": "10M", "data": {"sources": {"code": "src/"}}, **change})


@pytest.mark.parametrize("setting", [name for name in LINES if "hf" in LINES[name]])
def test_trainer_lines_are_arguments(setting: str) -> None:
    trl = pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    line = config_line("hf_trainer", setting, 1).removeprefix("Set `").removesuffix("`.")
    if setting in ("shuffle", "resume"):
        return  # calls, not arguments
    known = {
        f.name for c in (transformers.TrainingArguments, trl.DPOConfig, trl.GRPOConfig) for f in dataclasses.fields(c)
    }
    call = ast.parse(f"f({line})", mode="eval").body
    assert isinstance(call, ast.Call)
    assert {keyword.arg for keyword in call.keywords} <= known
