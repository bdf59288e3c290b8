"""A store gives back the tokens it was given and where they came from, and Megatron can read it."""

from __future__ import annotations

import json
import pickle
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data.store import StoreWriter, TokenStore
from bessemer.errors import UserError

SMALL, LARGE = 65_536, 200_000


def write_store(prefix: Path, documents: list[list[int]], vocab: int = SMALL) -> TokenStore:
    """Document i comes from row 10 + i of the file /corpus/(i % 3).jsonl and has hash i * 2^40."""
    with StoreWriter(prefix, vocab, "tokenizer-fingerprint") as writer:
        for i, tokens in enumerate(documents):
            writer.add(tokens, f"/corpus/{i % 3}.jsonl", 10 + i, i << 40, 2 * len(tokens))
    return TokenStore(prefix)


def many_documents(vocab: int = SMALL, documents: int = 200) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, vocab, random.integers(1, 50)).tolist() for _ in range(documents)]


@settings(max_examples=40)
@given(
    vocab=st.sampled_from([SMALL, LARGE]),
    data=st.data(),
)
def test_tokens_and_origins_come_back(
    tmp_path_factory: pytest.TempPathFactory, vocab: int, data: st.DataObject
) -> None:
    token = st.integers(0, vocab - 1)
    documents = data.draw(st.lists(st.lists(token, min_size=1, max_size=20), max_size=12))
    store = write_store(tmp_path_factory.mktemp("store") / "web.en", documents, vocab)
    flat = [token for tokens in documents for token in tokens]
    assert (len(store), store.tokens, store.documents) == (len(flat), len(flat), len(documents))
    assert store.text_bytes == 2 * len(flat)
    assert store.slice(0, store.tokens).tolist() == flat
    owners = [i for i, tokens in enumerate(documents) for _ in tokens]
    assert store.document_of(np.arange(len(flat))).tolist() == owners
    for position, i in enumerate(owners):
        origin = store.origin(position)
        assert (origin.file, origin.row) == (f"/corpus/{i % 3}.jsonl", 10 + i)
        assert (origin.document, origin.document_id) == (i, f"{i << 40:016x}")
        assert flat[origin.start : origin.stop] == documents[i]


@pytest.mark.parametrize("vocab", [SMALL, LARGE])
def test_gather_takes_rows_from_anywhere(tmp_path: Path, vocab: int) -> None:
    store = write_store(tmp_path / "s", many_documents(vocab), vocab)
    starts = np.array([0, 17, 17, store.tokens - 9, 3])
    rows = store.gather(starts, 9)
    assert rows.dtype == np.int64
    assert rows.tolist() == [store.slice(s, s + 9).tolist() for s in starts.tolist()]
    assert store.gather(np.array([], dtype=np.int64), 9).shape == (0, 9)
    for bad in (-1, store.tokens - 8):
        with pytest.raises(IndexError):
            store.gather(np.array([0, bad]), 9)


def test_a_position_outside_is_refused(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [[1, 2], [3]])
    for position in (-1, 3):
        with pytest.raises(IndexError):
            store.origin(position)
    with pytest.raises(IndexError):
        store.origin_of_document(2)


def test_the_index_is_megatrons_byte_for_byte(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [[5, 6, 7], [8], [9, 10]])
    expected = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", 8) + struct.pack("<QQ", 3, 4)
    expected += struct.pack("<3i", 3, 1, 2) + struct.pack("<3q", 0, 6, 8) + struct.pack("<4q", 0, 1, 2, 3)
    assert (tmp_path / "s.idx").read_bytes() == expected
    assert (tmp_path / "s.bin").read_bytes() == struct.pack("<6H", 5, 6, 7, 8, 9, 10)
    write_store(tmp_path / "l", [[5, 199_999]], LARGE)
    assert (tmp_path / "l.idx").read_bytes()[17] == 4
    assert (tmp_path / "l.bin").read_bytes() == struct.pack("<2i", 5, 199_999)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [SMALL, LARGE])
def test_megatron_reads_the_same_documents(tmp_path: Path, vocab: int) -> None:
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    documents = many_documents(vocab)
    write_store(tmp_path / "s", documents, vocab)
    dataset = megatron.IndexedDataset(str(tmp_path / "s"), multimodal=False, mmap=True)
    assert len(dataset) == len(documents)
    assert dataset.document_indices.tolist() == list(range(len(documents) + 1))
    for i, tokens in enumerate(documents):
        assert dataset[i].tolist() == tokens


def test_an_index_larger_than_one_copied_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = many_documents()
    write_store(tmp_path / "whole", documents)
    monkeypatch.setattr("bessemer.data.store._COPY_ITEMS", 7)
    write_store(tmp_path / "blocks", documents)
    assert (tmp_path / "blocks.idx").read_bytes() == (tmp_path / "whole.idx").read_bytes()


def test_the_fingerprint_depends_on_tokens_and_lengths_alone(tmp_path: Path) -> None:
    def fingerprint(name: str, documents: list[list[int]]) -> str:
        return write_store(tmp_path / name, documents).fingerprint

    first = fingerprint("a", [[1, 2], [3]])
    assert fingerprint("b", [[1, 2], [3]]) == first
    assert len({first, fingerprint("c", [[1], [2, 3]]), fingerprint("d", [[1, 2], [4]])}) == 3


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with StoreWriter(tmp_path / "s", SMALL, "") as writer:
            writer.add([1, 2], "/a", 1, 0, 2)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_finished_store_has_no_temporary_files(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [[1]])
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [
        ".bin",
        ".idx",
        ".json",
        ".origins",
        ".starts",
    ]


@pytest.mark.parametrize("suffix", ["bin", "idx", "json", "origins", "starts"])
@pytest.mark.parametrize("damage", ["truncated", "deleted"])
def test_a_damaged_store_is_refused_by_name(tmp_path: Path, suffix: str, damage: str) -> None:
    write_store(tmp_path / "s", many_documents())
    path = tmp_path / f"s.{suffix}"
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError) as caught:
        TokenStore(tmp_path / "s")
    assert str(path) in str(caught.value)
    assert f"delete the folder {tmp_path} and run again" in str(caught.value)


def test_an_index_of_another_store_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [[1, 2]])
    data = bytearray((tmp_path / "s.idx").read_bytes())
    data[17] = 4
    (tmp_path / "s.idx").write_bytes(data)
    with pytest.raises(UserError, match=r"s\.idx has another header"):
        TokenStore(tmp_path / "s")


def test_a_store_of_a_later_version_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [[1, 2]])
    about = json.loads((tmp_path / "s.json").read_text())
    (tmp_path / "s.json").write_text(json.dumps(about | {"format_version": 99}))
    with pytest.raises(UserError, match="has format 99"):
        TokenStore(tmp_path / "s")


def test_threads_and_pickled_copies_read_the_same(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", many_documents())
    assert len(pickle.dumps(store)) < 1000
    copy = pickle.loads(pickle.dumps(store))
    starts = [np.random.default_rng(i).integers(0, store.tokens - 16, 8) for i in range(64)]
    expected = [store.gather(row, 16).tolist() for row in starts]
    with ThreadPoolExecutor(4) as pool:
        assert [rows.tolist() for rows in pool.map(lambda row: copy.gather(row, 16), starts)] == expected
