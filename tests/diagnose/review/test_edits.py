"""Edits of a source text by its syntax nodes."""

import ast
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.diagnose.review.edits import SourceEdit, SourceText, apply_edits, unified_diff


def test_columns_count_characters_after_wide_ones() -> None:
    text = 'x = "日本é"; y = f(x)\n'
    source = SourceText(text)
    call = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    assert source.of(call) == "f(x)"
    assert apply_edits(text, [source.replace(call, "g(x)")]) == 'x = "日本é"; y = g(x)\n'


def test_wrapping_and_moving_keep_the_indentation() -> None:
    text = "def f():\n    for x in y:\n        a(x)\n    return 1\n"
    source, tree = SourceText(text), ast.parse(text)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    edits = [source.wrap([function.body[0]], "with no_grad():"), source.before(function.body[1], "done()")]
    expected = "def f():\n    with no_grad():\n        for x in y:\n            a(x)\n    done()\n    return 1\n"
    assert apply_edits(text, edits) == expected


def test_an_overlap_or_a_broken_result_is_refused() -> None:
    text = "a = b + c\n"
    assert apply_edits(text, [SourceEdit(4, 9, "d"), SourceEdit(8, 9, "e")]) is None
    assert apply_edits(text, [SourceEdit(4, 9, "(")]) is None


@given(st.lists(st.sampled_from(["x = 1", "y = 2", "if x:\n    y = 3", "z = 'é'"]), min_size=1), st.booleans())
def test_a_patch_applies(lines: list[str], line_end: bool) -> None:
    before = "\n".join(lines) + ("\n" if line_end else "")
    source = SourceText(before)
    first = ast.parse(before).body[0]
    after = apply_edits(before, [source.after(first, "print(1)")])
    assert after is not None and ast.parse(after)
    patch = unified_diff(before, after, "train.py")
    assert patch.startswith("--- a/train.py\n+++ b/train.py\n") and "+print(1)" in patch


@pytest.mark.parametrize("line_end", ["\n", ""])
def test_git_accepts_a_patch(tmp_path: Path, line_end: str) -> None:
    before, after = f"x = 1\ny = 2{line_end}", f"x = 1\ny = 3{line_end}"
    (tmp_path / "train.py").write_text(before)
    patch = unified_diff(before, after, "train.py")
    subprocess.run(["git", "apply"], input=patch, text=True, cwd=tmp_path, check=True)
    assert (tmp_path / "train.py").read_text() == after
