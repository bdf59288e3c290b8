"""The tour of the code names only what exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
SOURCE = ROOT / "src" / "bessemer"
NAMES = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)))
PATHS = sorted(set(re.findall(r"`([\w/]+(?:\.py|/))(?:::\w+)?`", PAGE)))


@pytest.mark.parametrize("path", PATHS)
def test_paths_exist(path: str) -> None:
    assert (SOURCE / path).exists() or (ROOT / path).exists()


@pytest.mark.parametrize(("path", "name"), NAMES)
def test_names_exist(path: str, name: str) -> None:
    defined = set()
    for node in ast.walk(ast.parse((SOURCE / path).read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    assert name in defined, f"docs/architecture.md says {path}::{name}"


def test_the_map_has_every_folder() -> None:
    drawn = PAGE.split("```")[1]
    folders = [path.name for path in SOURCE.iterdir() if path.is_dir() and (path / "__init__.py").exists()]
    assert [name for name in folders if f"{name}/" not in drawn] == []
