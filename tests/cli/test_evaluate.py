"""`bessemer evaluate`: the table, the gate's exit code, the comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bessemer.cli.main import app
from bessemer.errors import UserError
from bessemer.evaluate.compare import comparison, comparison_lines
from bessemer.evaluate.results import Evaluation, TaskResult


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["evaluate", *arguments])


def result(name: str, values: list[float], **more: Any) -> Evaluation:
    row = TaskResult("forge", "acc", values, [str(i) for i in range(len(values))], sum(values) / len(values), 0,
                     "t", "Q", **more)  # fmt: skip
    return Evaluation(name, [row])


GOOD = [1.0] * 70 + [0.0] * 30
BAD = [1.0] * 40 + [0.0] * 60
OTHER = [1.0] * 69 + [0.0] * 30 + [1.0]


def test_a_comparison_names_what_differs_and_the_best() -> None:
    facts = comparison([result("a", BAD), result("b", GOOD), result("c", OTHER)], ["a", "b", "c"])
    better, same = facts["rows"][0]["tests"]
    assert better["difference"] == pytest.approx(0.3) and better["differs"] and better["test"] == "McNemar exact"
    assert better["p_holm"] == pytest.approx(2 * better["p"]) or better["p_holm"] == same["p_holm"]
    assert facts["best"] == {"model": "b", "metric": "forge acc", "score": 0.7}
    table = comparison_lines(facts)
    assert table[2][1:4] == ["b", "70.0%", "60.4% to 78.1%"] and table[2][-1].startswith("better")
    (row,) = comparison([result("b", GOOD), result("c", OTHER)], ["b", "c"])["rows"]
    assert not row["tests"][0]["differs"] and row["detectable_difference"] == pytest.approx(0.0398, abs=2e-3)


def test_other_prompts_or_questions_are_not_compared() -> None:
    with pytest.raises(UserError, match="c: forge acc has other questions"):
        comparison([result("a", BAD), result("c", BAD[:50])], ["a", "c"])
    changed = result("c", BAD)
    changed.results[0].template = "u"
    with pytest.raises(UserError, match="c: forge acc was asked with another prompt"):
        comparison([result("a", BAD), changed], ["a", "c"])


def test_the_command_compares_folders(tmp_path: Path) -> None:
    for name, values in (("a", BAD), ("b", GOOD)):
        result(name, values).write(tmp_path / name)
    shown = invoke("compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert shown.exit_code == 0 and "+30.0 (" in shown.output and f"best  {tmp_path / 'b'}" in shown.output
    facts = json.loads(invoke("compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json").output)
    assert facts["best"]["score"] == 0.7
    with pytest.raises(UserError, match=r"--metric anvil: .* there are forge acc"):
        CliRunner().invoke(
            app, ["evaluate", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--metric", "anvil"],
            catch_exceptions=False,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("runs/x",), "name what to measure"),
        (("runs/x", "--tasks", "none.jsonl"), "none.jsonl"),
        (("runs/x", "--held-out", "--fail-below", "forge"), "write TASK=SCORE"),
        (("runs/x", "--tasks", "folder.jsonl"), "folder.jsonl: is a folder; pass a .jsonl file of questions"),
        (("runs/x", "--tasks", "bytes.jsonl"), r"bytes.jsonl: not UTF-8 text \(byte 0\); pass a .jsonl file of quest"),
        (("runs/x", "--tasks", "empty.jsonl"), "empty.jsonl: has no questions"),
        (("runs/x", "--tasks", "none.yaml"), "none.yaml: no such file; pass a task definition of lm-eval"),
        (("runs/x", "--tasks", "broken.yaml"), "broken.yaml: is not YAML .*line 2"),
        (("runs/x", "--tasks", "empty.yaml"), "empty.yaml: has no `task:`"),
        (("runs/x", "--tasks", "bytes.yaml"), "bytes.yaml: not UTF-8 text"),
        (("runs/x", "--tasks", "good.jsonl,other/good.jsonl"), "another task is named 'good', .* rename one"),
        (("runs/x", "--suite", "physics"), "write standard, medical, code, arc; single tasks go into --tasks"),
        (("runs/x", "--tasks", "good.jsonl", "--out", "good.jsonl"), "--out good.jsonl: cannot be made"),
        (("compare", "a"), "at least two"),
    ],
)
def test_mistakes_come_before_a_model_is_loaded(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("folder.jsonl", "other"):
        Path(folder).mkdir()
    for name in ("good.jsonl", "other/good.jsonl"):
        Path(name).write_text('{"prompt": "Q", "answer": "A"}\n')
    contents = {"empty.jsonl": b"\n\n", "bytes.jsonl": b"\xff\xfe", "broken.yaml": b"a: [b\n", "empty.yaml": b""}
    for name, content in {**contents, "bytes.yaml": b"\x84"}.items():
        Path(name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, ["evaluate", *arguments], catch_exceptions=False)
