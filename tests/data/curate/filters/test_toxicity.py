"""The `toxicity` step: words, phrases and scripts without spaces, against the regular expression that C4 used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bessemer.data.curate.filters.content import Toxicity, make_lexicon
from bessemer.data.curate.step import Drop
from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.spec.text_steps import ToxicitySpec

WORDS = ["grub", "mud pie", "f*x", "2bad", "半熟", "ばか"]


@pytest.fixture
def lexicon(tmp_path: Path) -> str:
    path = tmp_path / "en"
    path.write_text("# mild\n" + "\n".join(WORDS) + "\n", encoding="utf-8")
    return str(path)


def run(text: str, lexicon: str, language: str | None = None, **settings: Any) -> tuple[Any, dict[str, Any]]:
    document = Document(text, "f", 1, labels={"language": language} if language else {})
    [outcome] = Toxicity(ToxicitySpec(lexicons={"en": lexicon}, **settings), 0).apply([document])
    return outcome, document.labels


@pytest.mark.parametrize(
    ("text", "hits"),
    [
        ("A grub.", 1),
        ("GRUB, grub; (Grub)", 3),
        ("grubby begrub grub_2 grub2", 0),
        ("mud pie, MUD \n pie", 2),
        ("mud, pie mudpie", 0),
        ("f*x", 1),
        ("f*xy af*x fox", 0),
        ("2bad 12bad", 1),
        ("卵は半熟です", 1),  # no spaces around it
        ("ばかばかしい", 2),
        ("", 0),
        ("nothing", 0),
    ],
)
def test_hits(text: str, hits: int) -> None:
    assert make_lexicon(WORDS).count(text.lower()) == hits


@given(
    st.lists(
        st.text("ab *-é", min_size=1, max_size=5)
        .map(lambda s: " ".join(s.split()))
        .filter(lambda s: re.search(r"\w", s)),
        min_size=1,
        max_size=4,
    ),
    st.text("ab *-é.\n_", max_size=40),
)
def test_finds_what_the_regular_expression_of_c4_finds(phrases: list[str], text: str) -> None:
    alternatives = "|".join(re.escape(phrase) for phrase in phrases)
    c4 = re.search(rf"(?:\W|^)({alternatives})(?:\W|$)", text)
    ours = make_lexicon(phrases).count(text)
    if c4:
        assert ours > 0
    elif ours:  # we also take other spaces inside a phrase
        assert any(" " in phrase for phrase in phrases) and re.search(r"\s\s|\n", text)


def test_documents_go_by_hits_and_by_share(lexicon: str) -> None:
    text = "grub and grub in a garden of ten words altogether"
    assert run(text, lexicon) == (Drop("offensive words", 2), {"toxic_words": 2})
    assert run(text, lexicon, min_hits=2)[0] == Drop("offensive words", 2)
    assert run(text, lexicon, min_hits=3) == (None, {"toxic_words": 2})
    assert run(text, lexicon, min_share=0.2)[0] == Drop("offensive words", 2)
    assert run(text, lexicon, min_share=0.21)[0] is None
    assert run("clean", lexicon) == (None, {})


def test_lines_with_hits_go(lexicon: str) -> None:
    assert run("one\ngrub two\n\nthree", lexicon, action="lines")[0] == "one\n\nthree"
    assert run("grub\ngrub\n  ", lexicon, action="lines")[0] == Drop("offensive words", "in every line")
    assert run("mud\npie", lexicon, action="lines")[0] is None


def test_each_language_has_its_list(lexicon: str, tmp_path: Path) -> None:
    other = tmp_path / "any"
    other.write_text("weed\n")
    spec = ToxicitySpec(lexicons={"de": lexicon, "any": str(other)}, default_language="fr")
    labelled = [("grub", {"language": "de"}), ("grub", {"language": "en"}), ("grub", {}), ("weed", {"language": "en"})]
    documents = [Document(text, "f", 1, labels=dict(labels)) for text, labels in labelled]
    assert [outcome is None for outcome in Toxicity(spec, 0).apply(documents)] == [False, True, True, False]


def test_entries_can_be_excepted(lexicon: str) -> None:
    assert run("a grub", lexicon, allow=["grub"])[0] is None
    assert ToxicitySpec(lexicons={"en": "x"}).allow == ["sm", "グロ", "女の子", "性"]


def test_the_share_that_is_kept_is_the_same_in_every_run(lexicon: str) -> None:
    texts = [f"grub number {n}" for n in range(2000)]
    step = Toxicity(ToxicitySpec(lexicons={"en": lexicon}, keep_fraction=0.25), 7)
    outcomes = step.apply([Document(text, "f", 1) for text in texts])
    assert outcomes == [step.apply([Document(text, "g", 2)])[0] for text in texts]
    expected = [xxhash.xxh3_64_intdigest(text.encode(), 7) < 2**62 for text in texts]
    assert [outcome is None for outcome in outcomes] == expected
    assert 430 < sum(expected) < 570
    everything = Toxicity(ToxicitySpec(lexicons={"en": lexicon}, keep_fraction=1.0), 7)
    assert everything.apply([Document("grub", "f", 1)]) == [None]


class Model:
    labels = ("fine", "toxic")

    def probabilities(self, texts: list[str]) -> list[list[float]]:
        return [[1 - text.count("!") / 10, text.count("!") / 10] for text in texts]


def test_a_classifier_decides_above_its_threshold(
    tmp_path: Path, lexicon: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = pytest.importorskip("bessemer.data.curate.scores.classifier")
    monkeypatch.setattr(linear, "load", lambda path: Model())
    file = tmp_path / "model"
    file.write_bytes(b"weights")
    step = Toxicity(ToxicitySpec(classifier=str(file), lexicons={"en": lexicon}, max_score=0.3), 0)
    documents = [Document(text, "f", 1) for text in ("hm!!!", "hm!!!!", "grub", "fine")]
    assert step.apply(documents) == [None, Drop("toxic by the classifier", 0.4), Drop("offensive words", 1), None]
    assert [document.labels["toxicity"] for document in documents] == [0.3, 0.4, 0.0, 0.0]
    file.write_bytes(b"other weights")
    assert Toxicity(step.spec, 0).identity != step.identity
    monkeypatch.setattr(Model, "labels", ("good", "bad"))
    with pytest.raises(UserError, match="but not toxic"):
        Toxicity(step.spec, 0)


def test_a_real_classifier_file_is_read(tmp_path: Path) -> None:
    linear = pytest.importorskip("bessemer.data.curate.scores.classifier")
    import numpy as np

    shape = linear.FeatureShape(words=1, chars=0, bits=8)
    model = linear.LinearModel(["toxic", "fine"], shape, np.zeros((1, 256), np.int32), np.zeros(1, np.int64), {})
    model.save(tmp_path / "toxic.safetensors")
    step = Toxicity(ToxicitySpec(classifier=str(tmp_path / "toxic.safetensors"), max_score=0.5), 0)
    document = Document("any text", "f", 1)
    assert step.apply([document]) == [None] and document.labels == {"toxicity": 0.5}


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="lexicons"):
        ToxicitySpec()
    with pytest.raises(UserError, match=r"lexicons\.en"):
        run("x", str(tmp_path / "missing"))
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(UserError, match="holds no words"):
        run("x", str(tmp_path / "empty"))


@pytest.mark.slow
def test_a_megabyte_of_one_piece_has_the_hits_of_a_count_by_hand() -> None:
    """Inputs on which a backtracking pattern would take quadratic time."""
    lexicon = make_lexicon(
        [f"{word} {other}" for word in "abcdefgh" for other in "ijklmnop"] + ["ああ" * n for n in range(1, 40)]
    )
    longest, rest = divmod(500_000, 78)  # the longest phrase first, then one for what is left
    expected = {"a ": 0, "a  ": 0, "あ": longest + (rest > 1), "a\n": 0, "ab": 0, " ": 0, "a i ": 250_000}
    for piece, hits in expected.items():
        assert lexicon.count((piece * 500_000)[:1_000_000]) == hits
