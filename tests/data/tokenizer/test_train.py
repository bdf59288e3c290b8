"""Every kind of tokenizer writes any text back and is the same for the same texts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError

pytest.importorskip("sentencepiece")

TEXT = Path(__file__).read_text() + "日本語 naïve été\n\n\n" * 5
KINDS = ("bpe", "unigram", "wordpiece", "char")
TRAINED = {kind: Tokenizer.train([TEXT], 500, kind=kind, special=["<|a|>"]) for kind in KINDS}

traps = st.sampled_from(
    [
        "▁",
        "\ue000",
        "\ue000a",
        "\ue000b",
        "\ue001",
        "<0x41>",
        "<unk>",
        "[UNK]",
        "##a",
        "\0",
        "\r\n",
        "\t",
        "  ",
        "\n",
        "\u2028",
    ]
)
any_text = st.lists(st.one_of(traps, st.text(st.characters(exclude_categories=["Cs"]), max_size=4))).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=any_text)
def test_any_text_round_trips(kind: str, text: str) -> None:
    tokenizer = TRAINED[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.special.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_vocabulary_is_used_and_not_exceeded(kind: str) -> None:
    tokenizer = TRAINED[kind]
    assert tokenizer.vocab_size <= 500
    if kind != "char":  # the text has fewer characters
        assert tokenizer.vocab_size > 450
        assert len(tokenizer.encode(TEXT)) < 0.7 * len(TEXT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [pytest.param("1", marks=pytest.mark.slow), "3"])
def test_training_is_the_same_in_every_process_for_any_threads(kind: str, threads: str) -> None:
    script = (
        "from pathlib import Path; from bessemer.data.tokenizer.tokenizer import Tokenizer\n"
        f"text = Path({str(__file__)!r}).read_text() + {'日本語 naïve été' + chr(10) * 3!r} * 5\n"
        f"print(Tokenizer.train([text], 500, kind={kind!r}, special=['<|a|>']).fingerprint)"
    )
    environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, env=environment)
    assert found.stdout.strip() == TRAINED[kind].fingerprint


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("texts", [[], [""], ["   "], ["\n\n"], ["a"], ["▁\ue000\ue001\0"]])
def test_next_to_no_text_gives_a_tokenizer_too(kind: str, texts: list[str]) -> None:
    tokenizer = Tokenizer.train(texts, 400, kind=kind)
    assert tokenizer.decode(tokenizer.encode("any 語\n")) == "any 語\n"


@pytest.mark.parametrize(("kind", "smallest"), [("bpe", 257), ("char", 257), ("wordpiece", 258), ("unigram", 279)])
def test_the_smallest_vocabulary_of_each_kind(kind: str, smallest: int) -> None:
    tokenizer = Tokenizer.train(["aaaa bbbb <|user|>\n"] * 3, smallest, kind=kind)
    assert tokenizer.vocab_size <= smallest
    assert tokenizer.decode(tokenizer.encode("ab żółw\n")) == "ab żółw\n"
    with pytest.raises(UserError, match=rf"{smallest - 1} is too small .*give {smallest} or more"):
        Tokenizer.train(["a"], smallest - 1, kind=kind)


def test_an_unknown_kind() -> None:
    with pytest.raises(UserError, match=r"tokenizer\.kind: 'morse'; write one of bpe"):
        Tokenizer.train(["a"], 300, kind="morse")


def test_unigram_pieces_do_not_cross_words() -> None:
    names = TRAINED["unigram"].inner.get_vocab()
    assert "▁return" in names or "return" in names
    assert not any("▁" in name[1:].lstrip("▁") for name in names)
    assert not any("\n" in name and name.strip("\n") for name in names)


def test_unigram_has_runs_of_newlines_and_spaces() -> None:
    tokenizer = Tokenizer.train(["def f():\n    return 1\n\n\n"] * 50, 400, kind="unigram")
    shown = [tokenizer.decode([i]) for i in tokenizer.encode("def f():\n    return 1\n\n\n")]
    assert shown[-1] == "\n\n\n"
    assert len(shown) < 14


def test_wordpiece_takes_the_longest_token() -> None:
    tokenizer = TRAINED["wordpiece"]
    names = set(tokenizer.inner.get_vocab())
    ids = tokenizer.encode("tokenizer")
    first = tokenizer.inner.id_to_token(ids[0])
    longest = max((name for name in names if "tokenizer".startswith(name)), key=len)
    assert first == longest


def test_wordpiece_is_not_quadratic_in_a_long_word() -> None:
    text = "a" * 100_000 + "語" * 10_000
    assert TRAINED["wordpiece"].decode(TRAINED["wordpiece"].encode(text)) == text


def test_characters_are_kept_by_frequency() -> None:
    tokenizer = Tokenizer.train(["aaabbc"], 259, kind="char")
    assert [tokenizer.decode([i]) for i in tokenizer.encode("ab")] == ["a", "b"]
    assert len(tokenizer.encode("c")) == 1  # as the byte 0x63, which is one token too
    assert tokenizer.inner.id_to_token(tokenizer.encode("c")[0]) == "<0x63>"
