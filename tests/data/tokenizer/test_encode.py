"""Documents come back in order with their ids, whatever the batches and threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import bessemer.data.tokenizer.encode as module
from bessemer.data.read.entry import Document
from bessemer.data.tokenizer.chat import render, special_tokens
from bessemer.data.tokenizer.encode import encode_documents
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError

TEXT = Path(__file__).read_text()
TRAINED = {
    kind: Tokenizer.train([TEXT], 500, kind=kind, special=special_tokens("chatml"))
    for kind in ("bpe", "wordpiece", "char")
}
TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


@pytest.fixture(params=["bpe", "bpe without tiktoken", "wordpiece", "char"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found = TRAINED[request.param.split()[0]]
    found.__dict__.pop("fast", None)
    if request.param.endswith("tiktoken"):
        found.__dict__["fast"] = None
    return found


def documents() -> list[Document]:
    lines = TEXT.splitlines(keepends=True)
    short = [Document("".join(lines[i : i + 1 + i % 7]), "a", i) for i in range(len(lines))]
    return [*short[:40], Document("", "a", 0), Document(" ", "a", 0), Document(TEXT * 3, "b", 1), *short[40:80]]


@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize("size", [1 << 18, 500])
def test_ids_do_not_depend_on_threads_and_batches(
    tokenizer: Tokenizer, threads: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH_CHARS", size)
    monkeypatch.setattr(module, "_PIECE_CHARS", 2 * size)
    given = documents()
    found = list(encode_documents(given, tokenizer, threads))
    assert [document for document, _, _ in found] == given
    for document, ids, mask in found:
        assert ids.tolist() == [*tokenizer.encode(document.text), tokenizer.eos_id]
        assert ids.dtype == np.dtype("<u2")
        assert mask is None


def test_conversations_have_a_mask(tokenizer: Tokenizer) -> None:
    given = [Document("x", "a", 1), Document("HelloHi", "a", 2, messages=TALK), Document("y", "a", 3)]
    (_, _, first), (_, ids, mask), (_, _, last) = encode_documents(given, tokenizer, template="chatml")
    expected = render(TALK, tokenizer)
    assert first is None and last is None and mask is not None
    assert ids.tolist() == [*expected[0].tolist(), tokenizer.eos_id]
    assert mask.tolist() == [*expected[1].tolist(), 0]
    assert mask.sum() > 0
    # Without a template, a conversation is its text.
    (_, ids, mask) = next(encode_documents(given[1:2], tokenizer))
    assert mask is None and ids.tolist() == [*tokenizer.encode("HelloHi"), tokenizer.eos_id]


def test_a_template_that_ends_with_the_end_of_document() -> None:
    tokenizer = TRAINED["bpe"]
    ((_, ids, mask),) = encode_documents([Document("", "a", 1, messages=TALK)], tokenizer, template="plain")
    assert mask is not None
    assert ids.tolist().count(tokenizer.eos_id) == 1 and ids[-1] == tokenizer.eos_id
    assert mask[-1] == 1 and ids.size == mask.size


def test_a_conversation_that_cannot_be_laid_out_is_named() -> None:
    bad = [{"role": "assistant", "content": 5}]
    given = [Document("", "talks.jsonl", row, messages=TALK if row != 7 else bad) for row in range(1, 12)]
    with pytest.raises(UserError, match=r"^talks\.jsonl:7: content is not text: message 1 has a int; correct"):
        list(encode_documents(given, TRAINED["bpe"], template="chatml"))
    source = "{% if messages[0]['content'] == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    given[3].messages = [{"role": "assistant", "content": "no"}]
    with pytest.raises(UserError, match=r"^talks\.jsonl:4: chat template: not this"):
        list(encode_documents(given[:6], TRAINED["bpe"], template=source))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more documents are read than a few batches hold, however many there are."""
    monkeypatch.setattr(module, "_BATCH_CHARS", 1000)
    read = 0

    def endless() -> Iterator[Document]:
        nonlocal read
        while True:
            read += 1
            yield Document("ten chars\n", "a", read)

    stream = encode_documents(endless(), TRAINED["bpe"], threads=2)
    for wanted in range(1, 3000):
        next(stream)
        assert read - wanted < 4 * 1000 / 10
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("encode")]


def test_an_error_while_reading_comes_through() -> None:
    def broken() -> Iterator[Document]:
        yield Document("a", "a", 1)
        raise UserError("a:2: not valid")

    with pytest.raises(UserError, match="a:2"):
        list(encode_documents(broken(), TRAINED["bpe"]))
    assert list(encode_documents([], TRAINED["bpe"])) == []


def test_a_template_that_the_tokenizer_cannot_write() -> None:
    with pytest.raises(UserError, match=r"^chat template llama3: the tokenizer has no"):
        next(encode_documents([Document("", "a", 1, messages=TALK)], TRAINED["bpe"], template="llama3"))
    # Without a conversation it is not needed.
    assert len(list(encode_documents([Document("a", "a", 1)], TRAINED["bpe"], template="llama3"))) == 1
