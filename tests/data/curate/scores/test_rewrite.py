"""The user's function is called with what the hash chose, its answers are checked, its file is the step's identity."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bessemer.data.curate.scores.user_function import Rewrite
from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.spec.curate.scores import RewriteSpec

UPPER = "def change(texts):\n    CALLS.append(len(texts))\n    return [text.upper() for text in texts]\nCALLS = []\n"


def step(tmp_path: Path, source: str = UPPER, **settings: object) -> Rewrite:
    path = tmp_path / "mine.py"
    path.write_text(source)
    return Rewrite(RewriteSpec.model_validate({"function": f"{path}:change", **settings}), seed=0)


def documents(*texts: str) -> list[Document]:
    return [Document(text, "a.jsonl", row) for row, text in enumerate(texts, start=1)]


def test_texts_are_replaced_and_marked(tmp_path: Path) -> None:
    found = documents("one", "TWO", "", "three")
    assert step(tmp_path).apply(found) == ["ONE", None, None, "THREE"]  # what is unchanged counts as kept
    assert [document.labels for document in found] == [{"rewritten": 1.0}, {}, {}, {"rewritten": 1.0}]
    talk = Document("hello", "a.jsonl", 1, messages=[{"role": "user", "content": "hello"}])
    assert step(tmp_path).apply([talk]) == [None] and talk.labels == {}
    assert step(tmp_path).apply([]) == []


def test_no_answer_keeps_the_original(tmp_path: Path) -> None:
    source = "def change(texts):\n    return [None, '', '  ', 'new'][: len(texts)]\n"
    assert step(tmp_path, source).apply(documents("a", "b", "c", "d")) == [None, None, None, "new"]


def test_half_a_surrogate_pair_is_repaired(tmp_path: Path) -> None:
    [text] = step(tmp_path, "def change(texts):\n    return [chr(0xD83D) + 'x' for _ in texts]\n").apply(documents("a"))
    assert text == "\N{REPLACEMENT CHARACTER}x"


def test_calls_hold_so_many_texts_at_most(tmp_path: Path) -> None:
    rewrite = step(tmp_path, texts=4)
    rewrite.apply(documents(*(f"text {k}" for k in range(10))))
    assert rewrite._function is not None
    assert rewrite._function.__globals__["CALLS"][-3:] == [4, 4, 2]  # type: ignore[attr-defined]


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_share_is_chosen_by_the_text(tmp_path: Path, share: float) -> None:
    rewrite = step(tmp_path, share=share)
    texts = [f"text {k}" for k in range(2000)]
    changed = {text for text, out in zip(texts, rewrite.apply(documents(*texts)), strict=True) if out}
    assert len(changed) == pytest.approx(2000 * share, abs=80 if 0 < share < 1 else 0)
    again = step(tmp_path, share=share).apply(documents(*reversed(texts)))
    assert changed == {text for text, out in zip(reversed(texts), again, strict=True) if out}


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=12), st.integers(1, 12))
def test_batches_do_not_matter(tmp_path_factory: pytest.TempPathFactory, texts: list[str], cut: int) -> None:
    rewrite = step(tmp_path_factory.getbasetemp(), share=0.5)
    whole = rewrite.apply(documents(*texts))
    assert rewrite.apply(documents(*texts[:cut])) + rewrite.apply(documents(*texts[cut:])) == whole


def test_the_identity_follows_the_file(tmp_path: Path) -> None:
    first = step(tmp_path)
    assert first.apply(documents("a")) == ["A"]
    edited = step(tmp_path, UPPER.replace("upper", "title") + "# edited\n")
    assert edited.identity != first.identity
    assert edited.apply(documents("a b")) == ["A B"]
    assert step(tmp_path).identity == first.identity


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def change(texts):\n    return texts[1:]\n", "returned 1 items"),
        ("def change(texts):\n    return 'ab'\n", "returned str"),
        ("def change(texts):\n    return [1, 2]\n", "returned a int"),
        ("def change(texts):\n    raise KeyError('x')\n", r"a\.jsonl:1, 2 texts\) failed: KeyError: 'x'"),
        ("other = 1\n", "no function 'change'"),
        ("1 / 0\n", r"cannot be imported \(ZeroDivisionError"),
    ],
)
def test_a_wrong_function_is_told(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        step(tmp_path, source).apply(documents("a", "b"))


def test_a_missing_function_is_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file .*gone\.py"):
        Rewrite(RewriteSpec(function=f"{tmp_path}/gone.py:change"), 0)
    with pytest.raises(UserError, match=r"rewrite\.function there_is_none:change: no module"):
        Rewrite(RewriteSpec(function="there_is_none:change"), 0)
    with pytest.raises(UserError, match="cannot be imported"):
        Rewrite(RewriteSpec(function="there_is_none.inside:change"), 0)
    with pytest.raises(ValidationError):
        RewriteSpec(function="no_colon")
