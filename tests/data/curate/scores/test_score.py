"""Scores from a function of the user's: found by name, called as asked, and refused when they are no numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.data.curate.scores.user_function import Score
from bessemer.data.curate.step import Collected, Drop
from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.spec.curate.scores import ScoreSpec

SCORERS = """
import dataclasses

LOADED = open({log!r}, "a").write("loaded\\n")

@dataclasses.dataclass
class Thing:
    text: str

def length(texts):
    return [len(Thing(text).text) for text in texts]

def one(text):
    return len(text)

def short(texts):
    return [1.0]

def lonely(texts):
    return 3.0

def words(texts):
    return ["high" for _ in texts]

def nan(texts):
    return [0.0 if len(text) < 5 else float("nan") for text in texts]

def fails(texts):
    if len(texts) > 1:
        raise KeyError("no model")
    return [0.0]

def array(texts):
    import numpy as np
    return np.arange(len(texts), dtype=np.float32)

NOT_CALLABLE = 3
"""


@pytest.fixture
def scorers(tmp_path: Path) -> Path:
    path = tmp_path / "my scorers.py"
    path.write_text(SCORERS.format(log=str(tmp_path / "log")))
    return path


def documents(*texts: str) -> list[Document]:
    return [Document(text, "f.jsonl", i + 1) for i, text in enumerate(texts)]


def collected(spec: dict[str, Any], *texts: str) -> list[float]:
    arrays = Score(ScoreSpec.model_validate(spec), 0).collect(documents(*texts), np.arange(len(texts)))
    assert arrays["ordinal"].tolist() == list(range(len(texts)))
    return list(arrays["score"].tolist())


@pytest.mark.parametrize(
    ("name", "takes", "expected"), [("length", "texts", [1, 2]), ("one", "text", [1, 2]), ("array", "texts", [0, 1])]
)
def test_a_function_of_a_file(scorers: Path, name: str, takes: str, expected: list[float]) -> None:
    assert collected({"function": f"{scorers}:{name}", "takes": takes}, "a", "bb") == expected


def test_a_function_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scoring_package").mkdir()
    (tmp_path / "scoring_package" / "__init__.py").write_text("")
    (tmp_path / "scoring_package" / "inner.py").write_text("def f(texts): return [2.5 for _ in texts]")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert collected({"function": "scoring_package.inner:f"}, "a") == [2.5]
    step = Score(ScoreSpec(function="scoring_package.inner:f"), 0)
    before = step.identity
    (tmp_path / "scoring_package" / "inner.py").write_text("def f(texts): return [3.5 for _ in texts]")
    assert Score(ScoreSpec(function="scoring_package.inner:f"), 0).identity != before != ""


def test_nothing_runs_before_a_text_is_scored_and_then_once(scorers: Path) -> None:
    log = scorers.parent / "log"
    spec = ScoreSpec(function=f"{scorers}:length")
    assert Score(spec, 0).identity
    assert not log.exists()
    for _ in range(3):  # a step is made anew for each part
        Score(spec, 0).collect(documents("a"), np.arange(1))
    assert log.read_text() == "loaded\n"
    assert not list(scorers.parent.glob("__pycache__"))


def test_a_changed_file_is_another_function(scorers: Path) -> None:
    spec = ScoreSpec(function=f"{scorers}:length")
    before = Score(spec, 0).identity
    assert Score(spec, 0).identity == before
    scorers.write_text("def length(texts): return [7 for _ in texts]")
    assert Score(spec, 0).identity != before
    assert Score(spec, 0).collect(documents("a"), np.arange(1))["score"].tolist() == [7]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", r"gave 1 scores for 2 texts; give one for each"),
        ("lonely", r"gave float, not a list; set takes: text"),
        ("words", r"gave 'high' for f\.jsonl:1; give a finite number"),
        ("nan", r"gave nan for f\.jsonl:2; give a finite number"),
        ("fails", r"\(line 30\) failed on 2 documents from f\.jsonl:1 on: KeyError: 'no model'"),
        ("missing", r"has no function 'missing'; it has .*length"),
        ("NOT_CALLABLE", r"has no function 'NOT_CALLABLE'"),
    ],
)
def test_what_is_wrong_is_said(scorers: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        collected({"function": f"{scorers}:{name}"}, "abc", "abcdefgh")
    assert f"my scorers.py:{name}" in str(error.value)


def test_a_single_text_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("def f(text):\n    return 1 / len(text)\n")
    with pytest.raises(UserError, match=r"\(line 2\) failed on f\.jsonl:2: ZeroDivisionError"):
        collected({"function": f"{tmp_path}/s.py:f", "takes": "text"}, "abc", "")


def test_files_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file .*nothing\.py; correct the path"):
        _ = Score(ScoreSpec(function=f"{tmp_path}/nothing.py:f"), 0).identity
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(UserError, match="cannot be imported \\(SyntaxError"):
        collected({"function": f"{tmp_path}/broken.py:f"}, "a")
    modules = set(sys.modules)
    (tmp_path / "raises.py").write_text("import no_such_module_at_all\n")
    with pytest.raises(UserError, match="cannot be imported \\(ModuleNotFoundError"):
        collected({"function": f"{tmp_path}/raises.py:f"}, "a")
    assert not {name for name in set(sys.modules) - modules if name.startswith("bessemer_score_")}
    with pytest.raises(UserError, match=r"no module 'no_such_module_at_all' is installed; for a file write"):
        collected({"function": "no_such_module_at_all:f"}, "a")


def test_the_whole_way_with_a_label_of_its_own(scorers: Path, tmp_path: Path) -> None:
    spec = {"function": f"{scorers}:length", "name": "size", "keep": "best 50%", "better": "lower"}
    step = Score(ScoreSpec.model_validate(spec), 0)
    some = documents("aaaa", "aa", "aaa", "a")
    np.savez(tmp_path / "0.npz", **step.collect(some, np.arange(4)))
    decisions_by_part, summary = step.resolve(
        [Collected(0, tmp_path / "0.npz", "s", 4)], tmp_path, lambda function, tasks: [function(t) for t in tasks]
    )
    outcomes = step.apply(some, np.arange(4), next(iter(decisions_by_part)))
    gone = "size above the best 50 %"
    assert outcomes == [Drop(gone, 4.0), None, Drop(gone, 3.0), None]
    assert some[1].labels == {"size": 2.0} and summary["threshold"] == 2.0


def test_no_documents_ask_for_nothing(scorers: Path) -> None:
    assert collected({"function": f"{scorers}:fails"}) == []
