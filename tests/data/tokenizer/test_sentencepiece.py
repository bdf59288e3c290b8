"""A converted SentencePiece model gives the ids that SentencePiece gives."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest

from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError

spm = pytest.importorskip("sentencepiece")

WORDS = ["hello", "world", "the", "aaaa", "abab", "ba", "return", "self.x", "été", "naïve", "ｆｕｌｌ", "①", "ﬁ"]
WORDS += ["日本語", "語", "====", "....", "x1", "2026", "A<B>0x4"]
CHARACTERS = "helowrdtabx1.=é①ﬁ語\u3000\u00a0\t  \n" + "".join(WORDS)
NAMES = ["<s>", "</s>", "<unk>", "<ctl>", "<0x41>", "<0xE3>"]


def encode_in_pieces(tokenizer: Tokenizer, text: str, size: int) -> list[int]:
    pieces = enumerate(tokenizer.cut(text, size))
    return [token for k, piece in pieces for token in tokenizer.encode_batch([piece], [k > 0])[0]]


def corpus() -> list[str]:
    rng = random.Random(1)
    ends = ["", ".", "  two", " \n\n"]
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) + rng.choice(ends) for _ in range(300)]


def texts(symbols: list[str], count: int) -> list[str]:
    rng = random.Random(2)
    found = ["", " ", "   ", "\n", "a", " a", "a ", "a  b", "a\n b "]
    for _ in range(count):
        pieces = [rng.choice(WORDS), rng.choice(CHARACTERS), " ", "  ", *symbols, *NAMES]
        found.append("".join(rng.choice(pieces) for _ in range(rng.randint(0, 12))))
        found.append("".join(rng.choice(CHARACTERS) for _ in range(rng.randint(0, 30))))
    return found


def train(path: Path, **options: Any) -> Any:
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        **{"hard_vocab_limit": False, "minloglevel": 2, "control_symbols": ["<ctl>"], **options},
    )
    path.write_bytes(model.getvalue())
    return spm.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.parametrize("model_type", ["unigram", "bpe", "char"])
@pytest.mark.parametrize("normalizer", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize(
    ("prefix", "remove_spaces", "symbols", "split"),
    [
        (True, True, [], True),
        (False, False, ["<sep>", "<b>"], True),
        (False, True, [], False),
        *(
            pytest.param(*settings, marks=pytest.mark.slow)
            for settings in (
                (True, False, [], True),
                (False, False, [], True),
                (True, True, ["<sep>", "<b>"], True),
                (True, False, ["<sep>", "<b>"], False),
            )
        ),
    ],
)
def test_the_same_ids(
    tmp_path: Path,
    model_type: str,
    normalizer: str,
    byte_fallback: bool,
    prefix: bool,
    remove_spaces: bool,
    symbols: list[str],
    split: bool,
) -> None:
    path = tmp_path / "tokenizer.model"
    theirs = train(
        path,
        model_type=model_type,
        vocab_size=420 if byte_fallback else 150,
        normalization_rule_name=normalizer,
        byte_fallback=byte_fallback,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=remove_spaces,
        user_defined_symbols=symbols,
        split_by_whitespace=split,
        allow_whitespace_only_pieces=not remove_spaces,
    )
    ours = Tokenizer.load(path)
    assert ours.vocab_size == theirs.vocab_size()
    assert (ours.eos, ours.eos_id) == ("</s>", theirs.eos_id())
    ours.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    differing = []
    for text in texts(symbols, 200):
        if prefix and text.strip() in symbols:
            continue  # a text that is nothing but a symbol gets no prefix from the library
        expected, found = theirs.encode(text), ours.encode(text)
        assert again.encode(text) == found
        assert ours.inner.encode(text, add_special_tokens=False).ids == found  # other tools give the same
        if found != expected:
            differing.append((text, expected, found))
    if model_type == "unigram":
        # SentencePiece adds scores in 32 bits, the library in 64: where two ways are equally good, they may differ.
        assert len(differing) <= 2
        for _, expected, found in differing:
            score = [sum(theirs.get_score(i) for i in ids) for ids in (expected, found)]
            assert score[0] == pytest.approx(score[1], abs=1e-4)
    else:
        assert not differing


def test_text_comes_back_as_sentencepiece_returns_it(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    theirs = train(path, model_type="bpe", vocab_size=420, byte_fallback=True, normalization_rule_name="identity")
    ours = Tokenizer.load(path)
    for text in ["hello world", "ｆｕｌｌ ꙮ", "x\ny"]:
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text)) == text


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize("normalizer", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("remove_spaces", [True, False])
def test_pieces_of_a_document_join_to_its_ids(
    tmp_path: Path, model_type: str, normalizer: str, remove_spaces: bool
) -> None:
    path = tmp_path / "tokenizer.model"
    train(
        path,
        model_type=model_type,
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name=normalizer,
        remove_extra_whitespaces=remove_spaces,
    )
    ours = Tokenizer.load(path)
    text = "".join(line + ("\n" if i % 3 else " ") for i, line in enumerate(corpus()))
    assert sum(1 for _ in ours.cut(text, 300)) > 20
    assert encode_in_pieces(ours, text, 300) == ours.encode(text)


def test_special_tokens_are_added_behind_the_model(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    theirs = train(path, model_type="unigram", vocab_size=420, byte_fallback=True)
    ours = Tokenizer.load(path, special=["<|user|>"])
    assert ours.special["<|user|>"] == theirs.vocab_size()
    assert ours.special["<ctl>"] == theirs.piece_to_id("<ctl>")
    assert ours.encode("a <|user|> b") == theirs.encode("a <|user|> b")


def test_a_file_that_ends_too_soon(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    train(path, model_type="bpe", vocab_size=150)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"tokenizer\.model: neither .*ends in the middle.*download"):
        Tokenizer.load(path)


def test_a_kind_of_model_that_cannot_be_converted(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    train(path, model_type="word", vocab_size=50)
    with pytest.raises(UserError, match="not a unigram, BPE or character model"):
        Tokenizer.load(path)
    train(path, model_type="bpe", vocab_size=150, treat_whitespace_as_suffix=True)
    with pytest.raises(UserError, match="spaces behind words"):
        Tokenizer.load(path)
