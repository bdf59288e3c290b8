"""New tokens shorten the domain's text, change nothing that was, and start from the rows of their pieces."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.data.tokenizer.vocabulary import extend, initial_rows
from bessemer.errors import UserError

TEXT = Path(__file__).read_text()
DOMAIN = ["myocardial infarction, hyperlipidaemia\n" * 9, "the patient's electrocardiogram 語語 ====\n" * 7]
BASE = Tokenizer.train([TEXT], 400, special=["<|user|>"])
EXTENDED = extend(BASE, DOMAIN, 40)


def naive(tokenizer: Tokenizer, texts: list[str], count: int) -> list[tuple[str, str]]:
    """The same merges, counting everything again after each."""
    inner = tokenizer.inner
    words: Counter[str] = Counter()
    for text in texts:
        words.update(word for word, _ in inner.pre_tokenizer.pre_tokenize_str(text))
    table = [([token.value for token in inner.model.tokenize(word)], n) for word, n in words.items()]
    ids = dict(inner.get_vocab())
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for parts, n in table:
            for pair in pairwise(parts):
                pairs[pair] += n
        allowed = [pair for pair, n in pairs.items() if n >= 2 and "".join(pair) not in ids]
        if not allowed:
            break
        best = min(allowed, key=lambda pair: (-pairs[pair], ids[pair[0]], ids[pair[1]]))
        merges.append(best)
        ids["".join(best)] = max(ids.values()) + 1
        for parts, _ in table:
            place = 0
            while place < len(parts) - 1:
                if (parts[place], parts[place + 1]) == best:
                    parts[place : place + 2] = ["".join(best)]
                place += 1
    return merges


def test_the_merges_are_those_of_bpe() -> None:
    expected = ["".join(pair) for pair in naive(BASE, DOMAIN, 40)]
    names = [EXTENDED.tokenizer.inner.id_to_token(BASE.vocab_size + i) for i in range(len(EXTENDED.tokens))]
    assert names == expected


def test_old_ids_keep_their_meaning_and_new_ones_are_used() -> None:
    new = EXTENDED.tokenizer
    assert new.vocab_size == BASE.vocab_size + 40
    assert new.special == BASE.special
    assert all(new.inner.id_to_token(i) == BASE.inner.id_to_token(i) for i in range(BASE.vocab_size))
    for text in DOMAIN:
        assert new.decode(new.encode(text)) == text
        assert max(new.encode(text)) >= BASE.vocab_size
    # A token inside a longer word is used too: it is no added token, which would have to stand alone.
    assert len(new.encode(" unmyocardially")) < len(BASE.encode(" unmyocardially"))


def test_the_report_tells_what_is_saved() -> None:
    assert (EXTENDED.before.group, EXTENDED.after.group) == ("before", "after")
    assert EXTENDED.before.tokens == sum(map(len, BASE.encode_batch(DOMAIN)))
    assert EXTENDED.after.tokens == sum(map(len, EXTENDED.tokenizer.encode_batch(DOMAIN)))
    assert EXTENDED.before.tokens - EXTENDED.after.tokens == sum(EXTENDED.saved)
    assert EXTENDED.after.tokens_per_word < 0.6 * EXTENDED.before.tokens_per_word


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_still_round_trips(text: str) -> None:
    ids = EXTENDED.tokenizer.encode(text)
    assert EXTENDED.tokenizer.decode(ids) == text
    assert len(ids) <= len(BASE.encode(text))


def test_it_is_the_same_after_saving(tmp_path: Path) -> None:
    EXTENDED.tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path)
    assert loaded.fingerprint == EXTENDED.tokenizer.fingerprint
    assert loaded.encode_batch(DOMAIN) == EXTENDED.tokenizer.encode_batch(DOMAIN)
    assert extend(loaded, DOMAIN, 5).tokenizer.vocab_size == loaded.vocab_size + 5  # and it goes on from there


def test_special_tokens_behind_the_vocabulary_stay_where_they_are(tmp_path: Path) -> None:
    BASE.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path, special=["<|late|>"])
    longer = extend(loaded, DOMAIN, 10).tokenizer
    assert longer.special == loaded.special
    assert longer.vocab_size == loaded.vocab_size + 10
    assert longer.encode("a<|late|>b") == loaded.encode("a<|late|>b")


def test_a_tokenizer_with_byte_fallback() -> None:
    pytest.importorskip("sentencepiece")
    import io

    import sentencepiece

    from bessemer.data.tokenizer.load import build_sentencepiece, parse_sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()), model_writer=model, vocab_size=400, model_type="bpe",
        byte_fallback=True, minloglevel=2, hard_vocab_limit=False, normalization_rule_name="identity",
    )  # fmt: skip
    old = Tokenizer(build_sentencepiece(parse_sentencepiece(model.getvalue())), "</s>")
    found = extend(old, DOMAIN, 30)
    assert found.after.tokens < found.before.tokens
    names = [found.tokenizer.inner.id_to_token(old.vocab_size + i) for i in range(len(found.tokens))]
    assert not any("<0x" in name for name in names)
    assert all("▁" not in name.lstrip("▁") for name in names)
    for text in DOMAIN:
        assert found.tokenizer.decode(found.tokenizer.encode(text)) == old.decode(old.encode(text))


def test_only_what_occurs_often_enough() -> None:
    assert extend(BASE, ["zqzq"], 10, min_count=3).tokens == []
    assert extend(BASE, ["zqzq " * 3], 1, min_count=3).saved == [6]
    assert extend(BASE, [], 10).tokens == []


def test_another_model_is_refused() -> None:
    with pytest.raises(UserError, match="not for WordPiece"):
        extend(Tokenizer.train([TEXT], 400, kind="wordpiece"), DOMAIN, 10)


def test_new_rows_are_the_mean_of_the_old_pieces() -> None:
    new = EXTENDED.tokenizer
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(BASE.vocab_size + 12, 8)).astype(np.float32)  # some models pad their matrix
    rows = initial_rows(BASE, new, matrix)
    assert rows.shape == (new.vocab_size, 8) and rows.dtype == np.float32
    np.testing.assert_array_equal(rows[: BASE.vocab_size], matrix[: BASE.vocab_size])
    for i in range(BASE.vocab_size, new.vocab_size):
        text = new.decode([i])
        if "\ufffd" not in text and BASE.decode(BASE.encode(text)) == text and len(text) > 1:
            pieces = BASE.encode(text)
            np.testing.assert_allclose(rows[i], matrix[pieces].mean(axis=0), atol=1e-6)


def test_new_rows_with_the_length_of_the_old() -> None:
    matrix = np.random.default_rng(0).normal(size=(BASE.vocab_size, 8))
    rows = initial_rows(BASE, EXTENDED.tokenizer, matrix, match_norm=True)
    lengths = np.linalg.norm(rows, axis=1)
    np.testing.assert_allclose(lengths[BASE.vocab_size :], lengths[: BASE.vocab_size].mean())
    plain = initial_rows(BASE, EXTENDED.tokenizer, matrix)
    assert np.linalg.norm(plain[BASE.vocab_size :], axis=1).mean() < lengths.mean()


def test_rows_of_a_new_special_token() -> None:
    new = Tokenizer(type(BASE.inner).from_str(BASE.inner.to_str()), BASE.eos, ["<|new|>"])
    matrix = np.random.default_rng(0).normal(size=(BASE.vocab_size, 4))
    rows = initial_rows(BASE, new, matrix)
    np.testing.assert_allclose(rows[-1], matrix[BASE.encode("<|new|>")].mean(axis=0))
    with pytest.raises(ValueError, match="the old tokenizer has"):
        initial_rows(BASE, new, matrix[:-1])
