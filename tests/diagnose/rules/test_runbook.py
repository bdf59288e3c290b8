"""The table of causes, its page, and the lines of configuration."""

import ast
from importlib.util import find_spec
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


def fields_of(package: str, module: str) -> set[str]:
    """Annotated fields of the classes of a module, from its source: importing these packages takes many seconds."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / module).read_text())
    return {
        node.target.id
        for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }  # fmt: skip


@pytest.mark.parametrize(
    "setting", [name for name in LINES if "hf" in LINES[name] and name not in ("shuffle", "resume")]
)
def test_trainer_lines_are_arguments(setting: str) -> None:
    names = fields_of("transformers", "training_args.py") | fields_of("trl", "trainer/dpo_config.py")
    names |= fields_of("trl", "trainer/grpo_config.py")
    line = config_line("hf_trainer", setting, 1).removeprefix("Set `").removesuffix("`.")
    call = ast.parse(f"f({line})", mode="eval").body
    assert isinstance(call, ast.Call)
    assert {keyword.arg for keyword in call.keywords} <= names
