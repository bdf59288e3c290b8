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

from bessemer.data.tokenizer.tokenizer import Tokenizer, cut
from bessemer.errors import UserError

CODE = Path(__file__).read_text()
TRAINED = Tokenizer.train([CODE], vocab=400)

# Any character that UTF-8 can hold: lone surrogates are refused when a document is read.
any_text = st.text(st.characters(exclude_categories=["Cs"]))
line_text = st.text(st.sampled_from("ab1 \n\t\r.('é世"), max_size=300)


def encode_in_pieces(tokenizer: Tokenizer, text: str, size: int) -> list[int]:
    pieces = enumerate(tokenizer.cut(text, size))
    return [token for k, piece in pieces for token in tokenizer.encode_batch([piece], [k > 0])[0]]


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
        "from pathlib import Path; from bessemer.data.tokenizer.tokenizer import Tokenizer\n"
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
    script = "import sys, bessemer.data.tokenizer.tokenizer; sys.exit('tokenizers' in sys.modules)"
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


KINDS = ("bpe", "unigram", "wordpiece", "char")
SPECIAL = ["<|user|>", "<|end|>"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "unigram":
        pytest.importorskip("sentencepiece")
    return Tokenizer.train([CODE], vocab=420, kind=request.param, special=SPECIAL)


def test_special_tokens_have_one_id_each_that_no_text_gives(kind: Tokenizer, tmp_path: Path) -> None:
    kind.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path)
    assert loaded.special == kind.special
    assert loaded.fingerprint == kind.fingerprint
    for name in (*SPECIAL, kind.eos):
        text = f"a {name}{name} b{name}"
        ids = loaded.encode(text)
        assert not set(ids) & set(loaded.special.values())
        assert loaded.decode(ids) == text
        assert loaded.decode([loaded.special[name]]) == name


def test_special_tokens_are_added_to_a_loaded_tokenizer(tmp_path: Path) -> None:
    TRAINED.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path, special=["<|a|>", "<|b|>"])
    assert (loaded.special["<|a|>"], loaded.special["<|b|>"]) == (TRAINED.vocab_size, TRAINED.vocab_size + 1)
    assert loaded.vocab_size == TRAINED.vocab_size + 2
    assert loaded.encode(CODE) == TRAINED.encode(CODE)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["<é>"], "use ASCII"),
        ([" <a>"], "without spaces"),
        ([""], "without spaces"),
        (["<a>", "<a>"], "name each once"),
    ],
)
def test_a_special_token_that_cannot_be(names: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Tokenizer.train(["a"], vocab=300, special=names)


def test_ids_with_gaps_do_not_get_a_second_token(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)} | {"</s>": 256, "ab": 300}
    inner = Inner(models.BPE(vocab=vocab, merges=[("a", "b")]))
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="gaps"):
        # 258 tokens, so the library would number the next ones from 258 on: up to 300, which is taken.
        Tokenizer.load(tmp_path, special=[f"<{i}>" for i in range(60)])


def prefixed(scheme: str) -> Inner:
    """Words with a space put before the text, in the ways that published tokenizers do it."""
    from tokenizers import decoders, normalizers

    pieces = ["▁", *"abcdefgh\n.", "▁a", "▁b", "bc", "▁abc"]
    inner = Inner(models.Unigram([("<unk>", 0.0), *((p, -5.0 + len(p)) for p in pieces)], unk_id=0))
    if scheme == "prepend":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    inner.add_special_tokens(["</s>"])
    return inner


@pytest.mark.parametrize("scheme", ["prepend", "first", "always", "never"])
@given(text=st.text("abc .\n", max_size=200), size=st.integers(1, 40))
def test_pieces_of_a_tokenizer_with_a_prefix(scheme: str, text: str, size: int) -> None:
    tokenizer = Tokenizer(prefixed(scheme), "</s>")
    assert "".join(tokenizer.cut(text, size)) == text
    # Unigram words are independent, so a place to cut is only ever missing inside a word longer than a piece.
    if max(map(len, text.replace("\n", " ").split()), default=0) < size:
        assert encode_in_pieces(tokenizer, text, size) == tokenizer.encode(text)


def test_a_piece_that_goes_on_has_no_prefix() -> None:
    tokenizer = Tokenizer(prefixed("first"), "</s>")
    whole, rest = tokenizer.encode_batch(["abc", "abc"], [False, True])
    assert [tokenizer.inner.id_to_token(i) for i in whole] == ["▁abc"]
    assert [tokenizer.inner.id_to_token(i) for i in rest] == ["a", "bc"]
    assert (tokenizer.decode(whole), tokenizer.decode(whole, continues=True)) == ("abc", " abc")


@given(st.lists(st.sampled_from(["word ", "x", "\n", "if a:", "    ", "語", "12345", "é", "\n\n", "'s"]), max_size=120))
def test_pieces_join_to_the_ids_of_the_whole(kind: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    assert encode_in_pieces(kind, text, 40) == kind.encode(text)


def test_a_long_line_is_cut_between_words(kind: Tokenizer) -> None:
    text = "some words and more of them " * 400
    pieces = list(kind.cut(text, 500))
    assert len(pieces) > 10
    assert all(500 <= len(piece) <= 1000 for piece in pieces[:-1])
    assert encode_in_pieces(kind, text, 500) == kind.encode(text)


@pytest.mark.parametrize("text", ["a" * 5000, " " * 5000, "語" * 5000, "=" * 5000, "\n" * 5000])
def test_text_without_a_place_to_cut_is_cut_all_the_same(text: str) -> None:
    pieces = list(TRAINED.cut(text, 300))
    assert "".join(pieces) == text
    assert all(len(piece) <= 600 for piece in pieces)


def test_a_cut_that_would_change_the_ids_is_not_made() -> None:
    """This tokenizer joins a newline to the a after it, and a word to the space before: only x and y stay apart."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "a"), ("a", "Ġ"), ("aĠ", "a"), ("aĠ", "x")]
    names = [*alphabet, *(left + right for left, right in merges)]
    inner = Inner(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(inner, "</s>")
    text = "za\na a a xy\na" * 200
    assert len(list(tokenizer.cut(text, 60))) > 20
    assert encode_in_pieces(tokenizer, text, 60) == tokenizer.encode(text)


def test_offsets_are_in_characters() -> None:
    ids, offsets = TRAINED.encode_with_offsets(["def é語"])[0]
    assert ids == TRAINED.encode("def é語")
    assert offsets[0][0] == 0 and offsets[-1] == (5, 6)


def test_offsets_where_a_special_token_is_cut_through(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((character, -3.0) for character in "ab</s>")]
    tokenizer = Tokenizer(Inner(models.Unigram(pieces, unk_id=0)), "</s>")
    ids, offsets = tokenizer.encode_with_offsets(["a</s>b"])[0]
    assert tokenizer.eos_id not in ids
    assert offsets == [(i, i + 1) for i in range(6)]
