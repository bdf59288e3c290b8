"""Repeated passages against the plain definition and against a suffix array; characters stay whole."""

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import bessemer.data.curate.dedup.shuffle as shuffle
import bessemer.data.curate.dedup.substrings as anchors
import bessemer.data.curate.dedup.substrings as windows
from bessemer.data.curate.dedup.substrings import DedupSubstrings, cut_bytes, find_anchors, gram_length
from bessemer.data.curate.step import Drop
from bessemer.spec.curate.dedup import DedupSubstringsSpec


def step(length: int, left: int = 0) -> DedupSubstrings:
    return DedupSubstrings(DedupSubstringsSpec(min_bytes=length, min_left_chars=left), 0)


def slow(texts: list[str], length: int) -> list[str]:
    """Every window is looked up among all earlier ones; what repeats one that ends before it goes."""
    first: dict[bytes, tuple[int, int]] = {}
    left = []
    for number, text in enumerate(texts):
        raw = text.encode()
        gone = bytearray(len(raw))
        for i in range(len(raw) - length + 1):
            document, at = first.setdefault(raw[i : i + length], (number, i))
            if document != number or i - at >= length:
                gone[i : i + length] = b"\1" * length
        left.append(bytes(byte for byte, flag in zip(raw, gone, strict=True) if not flag).decode())
    return left


words = st.sampled_from(["a", "b", "ab", "aab", "abcdefg", "hijk", "abcabcabc", "xxxxxxxxxx", "hijklmnop", " "])
texts = st.lists(st.lists(words, max_size=12).map("".join), min_size=1, max_size=6)


@given(texts, st.sampled_from([2, 3, 5, 8, 13]), st.integers(1, 3), st.integers(1, 4), st.sampled_from([900, 10**6]))
@example(["x" * 100, "y" * 30 + "x" * 40], 5, 1, 2, 10**6)
@example(["ab" * 60 + "c", "c" + "ba" * 40], 7, 2, 1, 10**6)
@settings(max_examples=60)
def test_the_definition(
    run_step: Any, documents: Any, some: list[str], length: int, parts: int, batch: int, limit: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "BUCKET_BYTES", limit)  # also puts contexts in a file
        ran = run_step(step(length), documents(some), parts, batch, gaps=2)
    assert ran.texts(some) == slow(some, length)


@pytest.mark.parametrize("alphabet", ["ab", "abcdefghijklmnopqrstuvwxyz "])
def test_longer_texts_with_planted_copies(run_step: Any, documents: Any, alphabet: str) -> None:
    draw = random.Random(alphabet)
    texts: list[str] = []
    for _ in range(30):
        text = "".join(draw.choice(alphabet) for _ in range(draw.randrange(400)))
        for _ in range(draw.randrange(4)):
            if texts:
                other = draw.choice(texts)
                at, size = draw.randrange(len(other) + 1), draw.randrange(100)
                text += other[at : at + size]
        texts.append(text)
    for length in (20, 33, 50):
        expected = slow(texts, length)
        assert expected != texts
        assert run_step(step(length), documents(texts), 4, 7).texts(texts) == expected


def test_long_documents_are_cut_into_pieces_without_loss(
    run_step: Any, documents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anchors, "_BLOCK_BYTES", 64)
    draw = random.Random(4)
    text = "".join(draw.choice("abcd") for _ in range(700))
    texts = [text, "z" + text[100:400] + "z", text[350:] + text[:90], "ab" * 300]
    for length in (10, 16):
        assert run_step(step(length), documents(texts), 2, 2).texts(texts) == slow(texts, length)


def test_as_by_a_suffix_array(run_step: Any, documents: Any) -> None:
    """Positions that share `length` bytes with an earlier one, read off a suffix array of the whole corpus."""
    library = pytest.importorskip("pydivsufsort")
    draw = np.random.default_rng(5)
    texts = ["".join(map(chr, draw.integers(97, 101, 300))) for _ in range(40)]
    texts += [texts[i][50:150] + texts[i + 1][200:] for i in range(0, 30, 2)]
    length = 12
    joined, separators = bytearray(), set()
    for text in texts:
        joined += text.encode() + b"\0"
        separators.add(len(joined) - 1)
    array = np.frombuffer(joined, np.uint8)
    order = library.divsufsort(array)
    common = library.kasai(array, order)
    gone = np.zeros(array.size, bool)
    at = 0
    while at < order.size:
        stop = at + 1
        while stop < order.size and common[stop - 1] >= length:
            stop += 1
        places = sorted(int(one) for one in order[at:stop])
        places = [
            one for one in places if not separators & set(range(one, one + length)) and one + length <= array.size
        ]
        for one in places[1:]:
            if one - places[0] >= length:
                gone[one : one + length] = True
        at = stop
    starts = np.cumsum([0, *(len(text) + 1 for text in texts)])
    expected = [
        "".join(letter for i, letter in enumerate(text) if not gone[start + i])
        for text, start in zip(texts, starts, strict=False)
    ]
    assert expected != texts
    assert run_step(step(length), documents(texts), 3, 11).texts(texts) == expected


def test_parts_batches_and_workers_make_no_difference(run_step: Any, documents: Any, pool: Any) -> None:
    draw = random.Random(6)
    passages = ["".join(draw.choice("abcdefgh ") for _ in range(150)) for _ in range(8)]
    texts = ["".join(draw.choice(passages)[draw.randrange(40) :] for _ in range(3)) for _ in range(30)]
    ran = run_step(step(60), documents(texts))
    assert ran.texts(texts) == slow(texts, 60)
    for parts, batch, each in ((3, 4, None), (30, 1, None), (5, 6, pool)):
        other = run_step(step(60), documents(texts), parts, batch, **({"each": each} if each else {}))
        assert (other.outcomes, other.summary) == (ran.outcomes, ran.summary)
    assert json.loads(json.dumps(ran.summary))["repeated_bytes"] == sum(map(len, texts)) - sum(
        map(len, slow(texts, 60))
    )


def test_characters_stay_whole(run_step: Any, documents: Any) -> None:
    assert cut_bytes("aéz", [2], [4]) == "aé"  # half of é stays, so it stays
    assert cut_bytes("aéz", [1], [2]) == "aéz"
    assert cut_bytes("aéz", [0], [3]) == "z"
    assert cut_bytes("日本語", [1, 7], [6, 9]) == "日語"
    assert cut_bytes("日本語", [0], [9]) == ""
    # é and è share their first byte: the copy reaches into the middle of a character.
    texts = ["0123456789é abc", "x0123456789è abc", "y日0123456789é"]
    left = run_step(step(10), documents(texts)).texts(texts)
    assert left == [texts[0], "xè abc", "y日"]
    # Two repeats meet inside a character: together they hold all of it.
    texts = ["ABCDEFGHIè", "ĩabcdefghi", "ABCDEFGHIéabcdefghi"]
    assert run_step(step(10), documents(texts)).texts(texts) == [*texts[:2], ""]


def test_too_little_left(run_step: Any, documents: Any) -> None:
    passage = "a passage that is repeated word for word."
    texts = [passage, passage + " 12345", passage + " abcd", "1"]
    ran = run_step(step(41, left=5), documents(texts))
    assert ran.outcomes == [
        None, " 12345", Drop("too little left without repeated passages", 4.0), None,
    ]  # fmt: skip


def test_the_shortest_repeat(run_step: Any, documents: Any) -> None:
    texts = ["x0123456789y", "z0123456789w"]
    assert run_step(step(10), documents(texts)).texts(texts) == [texts[0], "zw"]
    assert run_step(step(11), documents(texts)).texts(texts) == texts


def test_hashes_that_collide_cut_nothing_out_by_mistake(
    run_step: Any, documents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one hash for all windows, what goes must still be a repeat: the bytes decide."""
    monkeypatch.setattr(windows, "_VALUES", np.zeros(256, np.uint64))
    draw = random.Random(7)
    texts = ["".join(draw.choice("ab") for _ in range(60)) for _ in range(12)]
    for text, left, exact in zip(texts, run_step(step(8), documents(texts)).texts(texts), slow(texts, 8), strict=True):
        assert len(exact) <= len(left) <= len(text)
    assert run_step(step(8), documents(texts)).texts(texts) != slow(texts, 8)


@given(st.lists(st.binary(max_size=30) | st.binary(min_size=100, max_size=300), max_size=4), st.integers(2, 20))
def test_every_window_has_one_anchor_that_its_bytes_decide(some: list[bytes], length: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anchors, "_BLOCK_BYTES", 16)  # many blocks, and texts in several pieces
        found = find_anchors(some, length)
    served: dict[tuple[int, int], tuple[int, int]] = {}
    for key, document, offset, lead, span in zip(
        found.key, found.document, found.offset, found.lead, found.span, strict=True
    ):
        for start in range(offset - lead, offset - lead + span):
            assert 0 <= offset - start <= length - gram_length(length)
            assert (document, start) not in served
            served[int(document), int(start)] = int(key), int(offset - start)
    for document, start, end in found.local.tolist():
        for at in range(start, end - length + 1):
            window = some[document][at : at + length]
            assert window in some[document][:at], "an equal window ends before it"
            served.setdefault((document, at), (0, 0))
    assert set(served) == {(i, at) for i, raw in enumerate(some) for at in range(len(raw) - length + 1)}
    by_bytes: dict[bytes, set[tuple[int, int]]] = {}
    for (document, start), which in served.items():
        if which != (0, 0):
            by_bytes.setdefault(some[document][start : start + length], set()).add(which)
    assert all(len(which) == 1 for which in by_bytes.values())


def test_a_byte_that_comes_back_is_no_period() -> None:
    for byte in range(256):
        raw = bytes(one for other in range(97, 117) for one in (byte, other))
        assert not find_anchors([raw], 3).local.size


def test_there_are_few_anchors() -> None:
    draw = random.Random(8)
    raw = bytes(draw.randrange(256) for _ in range(100_000))
    assert abs(find_anchors([raw], 200).key.size / (100_000 * 2 / 102) - 1) < 0.1


@pytest.mark.parametrize("unit", [b" ", b"ab", b"=-=-", b"abcdefghijklm", "日本".encode()])
def test_a_megabyte_of_one_thing_takes_few_anchors_too(unit: bytes) -> None:
    raw = unit * (1_000_000 // len(unit))
    found = find_anchors([raw], 200)
    assert found.key.size < 20_000
    covered = sum(end - start for _, start, end in found.local.tolist())
    assert covered > 0.9 * len(raw)


def test_anchors_are_the_same_in_any_batch() -> None:
    draw = random.Random(9)
    some = [bytes(draw.randrange(97, 100) for _ in range(draw.choice([0, 30, 500, 200_000]))) for _ in range(6)]
    together = find_anchors(some, 40)
    for i, raw in enumerate(some):
        alone = find_anchors([raw], 40)
        mine = together.document == i
        for name in ("key", "offset", "lead", "span"):
            assert (getattr(together, name)[mine] == getattr(alone, name)).all()
