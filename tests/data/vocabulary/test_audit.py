"""An audit counts what can be counted by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from bessemer.data.tokenizer import Tokenizer
from bessemer.data.vocabulary.audit import audit, fertility
from bessemer.data.vocabulary.undertrained import indicator, rarely_seen, suspects
from bessemer.errors import UserError


def small(merges: list[tuple[str, str]]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(left + right for left, right in merges)]
    inner = Inner(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    return Tokenizer(inner, "<end>")


def test_fertility_of_each_group() -> None:
    tokenizer = small([("a", "b"), ("ab", "c")])
    found = audit(tokenizer, [("latin", "abc abc"), ("latin", "ab"), ("cjk", "語")])
    latin, cjk, total = found.groups
    # abc, Ġ, abc and ab: the space and the word are one stretch, but no merge joins them.
    assert (latin.documents, latin.words, latin.text_bytes, latin.tokens) == (2, 3, 9, 4)
    assert latin.tokens_per_word == pytest.approx(4 / 3)
    assert latin.bytes_per_token == pytest.approx(9 / 4)
    assert (latin.byte_tokens, latin.failures) == (0, 0)
    assert (cjk.tokens, cjk.byte_tokens, cjk.byte_share) == (3, 3, 1.0)
    assert (total.group, total.documents, total.tokens) == ("all", 3, 7)
    assert found.counts.sum() == 7
    assert found.counts[tokenizer.inner.token_to_id("abc")] == 2


def test_tokens_that_are_not_used_or_not_reached() -> None:
    # bc comes before ab, so "abc" is always a + bc: the token abc, made of ab + c, is never reached.
    tokenizer = small([("b", "c"), ("a", "b"), ("ab", "c")])
    found = audit(tokenizer, [("x", "abc ab")])
    lost = tokenizer.inner.token_to_id("abc")
    assert found.unreachable_tokens == [(lost, "abc")]
    assert (lost, "abc") in found.unused_tokens or found.unused > 50
    assert found.unused == tokenizer.vocab_size - 1 - len(set(tokenizer.encode("abc ab")))
    assert found.fragments == 128  # the bytes above ASCII are no characters
    assert found.longest_tokens[0] == (lost, "abc")


def test_variants_and_tokens_with_the_same_text() -> None:
    tokenizer = small([("a", "b"), ("A", "B"), ("Ġ", "ab")])
    found = audit(tokenizer, [("x", "ab")])
    # a/A ... z/Z are 26 pairs; ab, AB and " ab" are one stem with two variants more.
    assert found.variants == 26 + 2
    assert found.same_text == []
    inner = Inner(models.BPE(vocab={"▁a": 0, " a": 1, "b": 2, "</s>": 3}, merges=[]))
    inner.decoder = decoders.Replace("▁", " ")
    assert audit(Tokenizer(inner, "</s>"), []).same_text == [[0, 1]]


def test_text_that_does_not_come_back_is_counted() -> None:
    inner = Inner(models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    found = audit(Tokenizer(inner, "</s>"), [("x", "a"), ("x", "a z"), ("x", "q r s")])
    assert (found.groups[0].failures, found.groups[0].unknown_tokens) == (2, 4)


def test_a_table_and_json() -> None:
    found = audit(small([("a", "b")]), [("x", "ab " * 100)])
    assert [len(row) for row in found.rows()] == [len(found.HEADER)] * 2
    assert found.rows()[0][:4] == ("x", "1", "2.00", "1.50")
    about = json.loads(found.to_json())
    assert about["groups"][0]["tokens_per_word"] == 2.0
    assert "counts" not in about


def test_long_documents_count_once() -> None:
    text = "words and words\n" * 40_000
    row = fertility(small([("a", "b")]), [text])
    assert (row.documents, row.words, row.text_bytes) == (1, 120_000, len(text))


def test_no_text_at_all() -> None:
    found = audit(small([]), [])
    assert (found.groups[-1].tokens_per_word, found.groups[-1].bytes_per_token, found.unused) == (
        0.0,
        0.0,
        256,
    )


def test_rarely_seen_tokens_by_count() -> None:
    assert rarely_seen([5, 0, 2, 0, 9], at_most=2).tolist() == [1, 3, 2]
    assert rarely_seen([1000, 1000, 9, 11, 0]).tolist() == [4]  # a hundredth of the mean is 4
    assert rarely_seen([1000, 1000, 4, 5, 0]).tolist() == [4, 2]


def test_the_indicator_is_the_papers() -> None:
    """Against a plain computation in 64 bits, with the decomposition of the whole matrix."""
    rng = np.random.default_rng(0)
    unused = [3, 17, 90]
    matrix = rng.normal(size=(200, 12)) + 5 * rng.normal(size=12)
    matrix[unused] = matrix[unused[0]] * rng.uniform(0.9, 1.1, (3, 1))
    first = np.linalg.svd(matrix - matrix.mean(axis=0), full_matrices=False)[2][0]
    rest = np.array([row - np.dot(row, first) * first for row in matrix])
    mean = sum(rest[i] for i in unused) / len(unused)
    expected = [1 - np.dot(row, mean) / np.linalg.norm(row) / np.linalg.norm(mean) for row in rest]
    np.testing.assert_allclose(indicator(matrix, unused), expected, atol=1e-9)
    np.testing.assert_allclose(indicator(matrix.astype(np.float32), unused), expected, atol=1e-4)
    norms = [np.sqrt((row**2).sum()) for row in matrix]
    np.testing.assert_allclose(indicator(matrix, [], tied=False), norms)


def test_an_undertrained_token_is_found() -> None:
    rng = np.random.default_rng(1)
    start = rng.normal(size=16)
    matrix = rng.normal(size=(500, 16)) * 3
    unused, hidden = [400, 401, 402], 77
    matrix[[*unused, hidden]] = start + 0.01 * rng.normal(size=(4, 16))
    assert suspects(indicator(matrix, unused), unused)[0] == hidden
    assert not set(suspects(indicator(matrix, unused), unused).tolist()) & set(unused)
    matrix[hidden] *= 0.001
    assert suspects(indicator(matrix, [], tied=False), [])[0] == hidden


def test_the_indicator_needs_an_example() -> None:
    with pytest.raises(UserError, match="no ids known to be unused"):
        indicator(np.zeros((4, 2)), [])
    with pytest.raises(ValueError, match="rows and columns"):
        indicator(np.zeros(4), [1])
