"""Any text round-trips, and the end-of-document id never comes out of a text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from bessemer.data.tokenizer import Tokenizer, cut
from bessemer.errors import UserError

CODE = Path(__file__).read_text()
TRAINED = Tokenizer.train([CODE], vocab=400)

# Any character that UTF-8 can hold: lone surrogates are refused when a document is read.
any_text = st.text(st.characters(exclude_categories=["Cs"]))
line_text = st.text(st.sampled_from("ab1 \n\t\r.('é世"), max_size=300)


@given(any_text)
def test_any_text_round_trips(text: str) -> None:
    ids = TRAINED.encode(text)
    assert TRAINED.decode(ids) == text
    assert all(0 <= i < TRAINED.vocab_size for i in ids)


@given(any_text, any_text)
def test_text_that_spells_the_end_of_document_is_only_text(before: str, after: str) -> None:
    text = f"{before}<|endoftext|>{after}"
    ids = TRAINED.encode(text)
    assert TRAINED.eos_id not in ids
    assert TRAINED.decode(ids) == text


@given(line_text, st.integers(1, 20))
def test_pieces_join_to_the_text(text: str, size: int) -> None:
    pieces = list(cut(text, size))
    assert "".join(pieces) == text
    assert all(len(piece) <= 2 * size for piece in pieces)


MARGIN_LINES = [line for line in CODE.splitlines(keepends=True) if not line[0].isspace()]


@given(st.lists(st.sampled_from([*MARGIN_LINES, "    x = 1\n", "\n"]), max_size=60))
def test_pieces_have_the_tokens_of_the_whole(lines: list[str]) -> None:
    text = "".join(line + "end\n" for line in lines)
    pieces = TRAINED.encode_batch(list(cut(text, 150)))
    assert [i for ids in pieces for i in ids] == TRAINED.encode(text)


def test_indentation_merges_and_long_numbers_do_not() -> None:
    tokenizer = Tokenizer.train(["if a:\n        return 123456\n"] * 10, vocab=400)
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("if a:\n        return 123456\n")]
    assert "       " in pieces and " return" in pieces
    assert "123456" not in pieces and "123" in pieces


def test_training_is_the_same_in_every_process(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from bessemer.data.tokenizer import Tokenizer\n"
        f"print(Tokenizer.train([Path({str(__file__)!r}).read_text()], vocab=400).fingerprint)"
    )
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == TRAINED.fingerprint


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    TRAINED.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.fingerprint, loaded.eos_id, loaded.vocab_size) == (
        TRAINED.fingerprint,
        TRAINED.eos_id,
        TRAINED.vocab_size,
    )
    assert loaded.encode(CODE) == TRAINED.encode(CODE)


def test_the_module_does_not_import_tokenizers() -> None:
    script = "import sys, bessemer.data.tokenizer; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.parametrize("vocab", [257, 258])
def test_the_smallest_vocabulary(vocab: int) -> None:
    tokenizer = Tokenizer.train(["aaaa aaaa"], vocab=vocab)
    assert tokenizer.vocab_size == vocab
    assert tokenizer.decode(tokenizer.encode("żółw \0")) == "żółw \0"
    with pytest.raises(UserError, match=r"256 is too small .*give 257 or more"):
        Tokenizer.train(["a"], vocab=256)


def byte_level() -> Inner:
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner.model = models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[])
    return inner


@pytest.mark.parametrize("special", [True, False])
def test_a_loaded_end_of_document_is_never_read_from_text(tmp_path: Path, special: bool) -> None:
    inner = byte_level()
    inner.add_tokens(["<tool>", AddedToken("</s>", special=special)])
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (tokenizer.eos, tokenizer.eos_id, tokenizer.vocab_size) == ("</s>", 257, 258)
    # Not cut at 4, not padded to 64, and the four characters stay four.
    assert [len(ids) for ids in tokenizer.encode_batch(["a</s>b", "abcdefgh"])] == [6, 8]


def test_a_model_that_holds_the_end_of_document_as_a_piece(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((character, -3.0) for character in "ab</s>")]
    inner = Inner(models.Unigram(pieces, unk_id=0))
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    ids = tokenizer.encode("a</s></s>b")
    assert tokenizer.eos_id not in ids
    assert len(ids) == 10


def test_a_file_without_a_known_end_of_document(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    inner = byte_level()
    inner.add_special_tokens(["[END]"])
    inner.save(str(path))
    with pytest.raises(UserError, match=r"set tokenizer\.eos to one it has \(\[END\]\)"):
        Tokenizer.load(path)
    with pytest.raises(UserError, match="no end-of-document token <stop>"):
        Tokenizer.load(path, eos="<stop>")
    assert Tokenizer.load(path, eos="[END]").eos_id == 256


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file .*tokenizer\.json"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"not a Hugging Face tokenizer\.json"):
        Tokenizer.load(tmp_path / "tokenizer.json")
