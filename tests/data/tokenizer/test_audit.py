"""An audit counts what can be counted by hand."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.data.tokenizer.vocabulary import audit, fertility


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
    assert (found.groups[-1].tokens_per_word, found.groups[-1].bytes_per_token, found.unused) == (0.0, 0.0, 256)
