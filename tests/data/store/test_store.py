"""A store gives back the tokens it was given and where they came from, and Megatron can read it."""

from __future__ import annotations

import json
import os
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data.store.shard import Origin, Shard
from bessemer.data.store.token_store import TokenStore
from bessemer.data.store.writer import StoreWriter
from bessemer.errors import UserError

SMALL, LARGE = 65_536, 200_000


def origin_at(store: TokenStore, position: int) -> Origin:
    return store.origin_of_document(int(store.document_of(np.array([position]))[0]))


def write_store(prefix: Path, documents: list[list[int]], vocab: int = SMALL) -> TokenStore:
    """Document i comes from row 10 + i of the file /corpus/(i % 3).jsonl and has hash i * 2^40."""
    with StoreWriter(prefix, vocab, "tokenizer-fingerprint") as writer:
        for i, tokens in enumerate(documents):
            writer.add(tokens, f"/corpus/{i % 3}.jsonl", 10 + i, i << 40, 2 * len(tokens))
    return TokenStore(prefix)


def decorated_store(prefix: Path, documents: int = 90, seed: int = 0, first: int = 0) -> TokenStore:
    """Some documents have a mask, some an id and some a score, each kind beginning later than the store."""
    with StoreWriter(prefix, SMALL, "tokenizer-fingerprint") as writer:
        for i, (tokens, mask) in enumerate(decorated_documents(documents, seed)):
            if i >= first:
                writer.add(
                    tokens, f"/corpus/{i // 7}.jsonl", i, i << 40, len(tokens),
                    mask=mask if 20 <= i < 70 else None,
                    id=f"né-{i}" if 30 < i < 60 and i % 2 else "",
                    score=i / 7 if i >= 10 and i % 3 else None,
                )  # fmt: skip
    return TokenStore(prefix)


def decorated_documents(documents: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 200, documents)
    return [(random.integers(0, SMALL, n), random.integers(0, 2, n)) for n in lengths]


def many_documents(vocab: int = SMALL, documents: int = 200) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, vocab, random.integers(1, 50)).tolist() for _ in range(documents)]


@settings(max_examples=40)
@given(vocab=st.sampled_from([SMALL, LARGE]), data=st.data())
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
        origin = origin_at(store, position)
        assert (origin.file, origin.row) == (f"/corpus/{i % 3}.jsonl", 10 + i)
        assert (origin.document, origin.document_id) == (i, f"{i << 40:016x}")
        assert flat[origin.start : origin.stop] == documents[i]


@pytest.mark.parametrize("vocab", [SMALL, LARGE])
def test_gather_takes_rows_from_anywhere(tmp_path: Path, vocab: int) -> None:
    store = write_store(tmp_path / "s", many_documents(vocab), vocab)
    starts = np.array([0, 17, 17, store.tokens - 9, 3])
    rows = store.gather(starts, 9)
    assert rows.dtype == store.dtype
    assert rows.tolist() == [store.slice(s, s + 9).tolist() for s in starts.tolist()]
    assert store.gather(np.array([], dtype=np.int64), 9).shape == (0, 9)
    for bad in (-1, store.tokens - 8):
        with pytest.raises(IndexError):
            store.gather(np.array([0, bad]), 9)


def test_a_position_outside_is_refused(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [[1, 2], [3]])
    for position in (-1, 3):
        with pytest.raises(IndexError):
            origin_at(store, position)
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
    monkeypatch.setattr("bessemer.data.store.format.COPY_ITEMS", 7)
    write_store(tmp_path / "blocks", documents)
    assert (tmp_path / "blocks.idx").read_bytes() == (tmp_path / "whole.idx").read_bytes()


def test_the_fingerprint_depends_on_tokens_and_lengths_alone(tmp_path: Path) -> None:
    def fingerprint(name: str, documents: list[list[int]]) -> str:
        return write_store(tmp_path / name, documents).fingerprint

    first = fingerprint("a", [[1, 2], [3]])
    assert fingerprint("b", [[1, 2], [3]]) == first
    assert len({first, fingerprint("c", [[1], [2, 3]]), fingerprint("d", [[1, 2], [4]])}) == 3


def test_the_fingerprint_counts_a_mask_that_leaves_something_out(tmp_path: Path) -> None:
    def fingerprint(name: str, mask: list[int] | None) -> str:
        with StoreWriter(tmp_path / name, SMALL, "") as writer:
            writer.add([1, 2, 3], "/a", 1, 0, 2, mask=mask, id=name, score=len(name))
        return TokenStore(tmp_path / name).fingerprint

    none = fingerprint("a", None)
    assert fingerprint("bb", [1, 1, 1]) == none
    assert len({none, fingerprint("c", [0, 1, 1]), fingerprint("d", [1, 1, 0])}) == 3


def test_masked_tokens_weigh_nothing(tmp_path: Path) -> None:
    store = decorated_store(tmp_path / "s")
    flat = np.concatenate(
        [mask if 20 <= i < 70 else np.ones_like(mask) for i, (_, mask) in enumerate(decorated_documents(90, 0))]
    )
    assert store.masked and store.infos[0].kept == flat.sum() < store.tokens
    positions = np.arange(store.tokens + 1)
    assert store.targets_before(positions).tolist() == [0, *np.cumsum(flat).tolist()]
    for length in (1, 63, 64, 65, 1000, store.tokens):
        starts = np.random.default_rng(length).integers(0, store.tokens - length + 1, 30)
        weights = store.weights(starts, length)
        assert weights is not None and weights.dtype == np.float32
        assert np.array_equal(weights, flat[starts[:, None] + np.arange(length)])
    with pytest.raises(IndexError):
        store.weights(np.array([store.tokens]), 1)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300)), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_any_mask_comes_back(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[bool, int]], seed: int
) -> None:
    prefix, random = tmp_path_factory.mktemp("mask") / "s", np.random.default_rng(seed)
    masks = [random.integers(0, 2, n) if given else np.ones(n, int) for given, n in parts]
    with StoreWriter(prefix, SMALL, "") as writer:
        for (given_, n), mask in zip(parts, masks, strict=True):
            writer.add(np.zeros(n, int), "/a", 1, 1, 1, mask=mask if given_ else None)
    store = TokenStore(prefix)
    assert store.masked == any(given for given, _ in parts)
    flat = np.concatenate(masks)
    kept = np.diff(store.targets_before(np.arange(store.tokens + 1)))
    assert kept.tolist() == flat.tolist()
    weights = store.weights(np.array([0]), store.tokens)
    assert (weights is None and flat.all()) or np.array_equal(weights[0], flat)


@pytest.mark.parametrize("long_run", [1, 10**9])  # a copy for each run, an index for each token
@pytest.mark.parametrize("spill", [False, True])
def test_runs_are_copied_to_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_run: int, spill: bool
) -> None:
    monkeypatch.setattr("bessemer.data.store.token_store._LONG_RUN", long_run)
    monkeypatch.setattr("bessemer.data.store.token_store._INDEX_ITEMS", 97)
    for store in (decorated_store(tmp_path / "s"), write_store(tmp_path / "plain", many_documents())):
        random = np.random.default_rng(1)
        lengths = random.integers(1, 70, 40)
        starts = random.integers(0, store.tokens - lengths + 1)
        gaps = random.integers(0, 3, 40) * random.integers(0, 2, 40)
        at = np.cumsum(lengths + gaps) - lengths
        tokens, weights = (np.full(at[-1] + lengths[-1] + 5, -1), np.full(at[-1] + lengths[-1] + 5, -1, np.float32))
        store.copy_runs(starts, lengths, tokens, at, spill)
        store.copy_weights(starts, lengths, weights, at, spill)
        inside = np.zeros(tokens.size, bool)
        for start, length, to in zip(starts, lengths, at, strict=True):
            assert np.array_equal(tokens[to : to + length], store.slice(start, start + length))
            expected = store.weights(np.array([start]), length)
            assert np.array_equal(weights[to : to + length], np.ones(length) if expected is None else expected[0])
            inside[to : to + length] = True
        inside[at[0] : at[-1]] |= spill
        assert (tokens[~inside] == -1).all() and (weights[~inside] == -1).all()
        with pytest.raises(IndexError):
            store.copy_runs(np.array([store.tokens - 1]), np.array([2]), tokens, np.array([0]))


def test_ids_and_scores_come_back(tmp_path: Path) -> None:
    store = decorated_store(tmp_path / "s")
    scores = store.scores(np.arange(90))
    assert scores.dtype == np.float32
    for i in range(90):
        has_id = 30 < i < 60 and i % 2
        assert store.origin_of_document(i).document_id == (f"né-{i}" if has_id else f"{i << 40:016x}")
        scored = i >= 10 and i % 3
        assert scores[i] == np.float32(i / 7) if scored else np.isnan(scores[i])
    plain = write_store(tmp_path / "plain", [[1], [2]])
    assert plain.shard(0).ids is None and np.isnan(plain.scores(np.array([1, 0, 1]))).all()
    assert not plain.masked and plain.weights(np.array([0]), 1) is None


def test_files_come_back_in_order(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", SMALL, "") as writer:
        for path in ("/b", "/a", "/ö \u2028", "/a", ""):
            writer.add([1], path, 1, 1, 1)
    store = TokenStore(tmp_path / "s")
    assert store.files == ["/b", "/a", "/ö \u2028", ""]
    assert [origin_at(store, k).file for k in range(5)] == ["/b", "/a", "/ö \u2028", "/a", ""]


@given(data=st.data())
@settings(max_examples=40)
def test_documents_in_windows_are_what_a_scan_finds(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=12))
    store = write_store(tmp_path_factory.mktemp("in") / "s", [[1] * n for n in lengths])
    windows = data.draw(st.lists(st.tuples(st.integers(0, store.tokens - 1), st.integers(1, 30)), max_size=5))
    starts = np.array([s for s, _ in windows], np.int64)
    sizes = np.array([min(n, store.tokens - s) for s, n in windows], np.int64)
    first, more, inner = store.documents_in(starts, sizes)
    edges = store.edges(0, store.documents)[:-1].tolist()
    expected = [[e for e in edges if s < e < s + n] for s, n in zip(starts.tolist(), sizes.tolist(), strict=True)]
    assert first.tolist() == store.document_of(starts).tolist()
    assert more.tolist() == [len(found) for found in expected]
    assert inner.tolist() == [e for found in expected for e in found]
    documents = np.arange(store.documents)
    begin, end = store.extents(documents)
    assert begin.tolist() == edges and (end - begin).tolist() == lengths
    assert store.edges(0, store.documents).tolist() == [*edges, store.tokens]


def test_a_new_writer_replaces_a_store_at_once(tmp_path: Path) -> None:
    """A crash while the second is written must not leave the first one's .json with the second one's tokens."""
    decorated_store(tmp_path / "s")
    writer = StoreWriter(tmp_path / "s", SMALL, "")
    writer.add([1, 2], "/a", 1, 0, 2)
    assert not (tmp_path / "s.json").exists() and not (tmp_path / "s.mask").exists()
    with writer:
        pass
    assert TokenStore(tmp_path / "s").tokens == 2


def test_a_map_holds_no_descriptor_and_outlives_its_file(tmp_path: Path) -> None:
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("no /proc")
    write_store(tmp_path / "s", many_documents())
    store = decorated_store(tmp_path / "d")
    store.shard(0).map_all()
    held = [os.readlink(link) for link in descriptors.iterdir() if link.is_symlink()]
    assert not [path for path in held if path.startswith(str(tmp_path))]
    expected = store.gather(np.array([0]), store.tokens).tolist()
    for path in tmp_path.glob("d.*"):
        path.unlink()
    assert store.gather(np.array([0]), store.tokens).tolist() == expected
    assert store.origin_of_document(31).document_id == "né-31"


def test_a_store_is_read_without_arrow_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = decorated_store(tmp_path / "s")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    plain = TokenStore(tmp_path / "s")
    plain.shard(0).map_all()
    assert np.array_equal(plain.slice(0, plain.tokens), store.slice(0, store.tokens))
    assert plain.origin_of_document(31) == store.origin_of_document(31)
    with pytest.raises(ValueError, match="read-only"):
        plain.slice(0, 1)[0] = 1


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
        ".chunks",
        ".files",
        ".idx",
        ".json",
        ".origins",
        ".starts",
    ]


@pytest.mark.parametrize(
    "suffix", ["bin", "chunks", "files", "idx", "json", "mask", "ids", "origins", "scores", "starts"]
)
@pytest.mark.parametrize("damage", ["truncated", "deleted"])
def test_a_damaged_store_is_refused_by_name(tmp_path: Path, suffix: str, damage: str) -> None:
    decorated_store(tmp_path / "s")
    path = tmp_path / f"s.{suffix}"
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError) as caught:
        Shard(tmp_path / "s")
    assert str(path) in str(caught.value)
    assert f"delete the folder {tmp_path} and prepare the data again" in str(caught.value)


def read_all(store: TokenStore) -> list[object]:
    """Everything that a run or a person reads of a store, in small pieces."""
    starts, lengths = np.arange(0, store.tokens - 8, 5), 8
    whole = np.full(starts.shape, lengths)
    rows = [store.gather(starts, lengths).tolist()]
    weights = store.weights(starts, lengths)
    copied = np.zeros(whole.sum(), np.float32)
    store.copy_weights(starts, whole, copied, np.cumsum(whole) - whole)
    documents = np.arange(store.documents)
    found = [array.tolist() for array in store.documents_in(starts, whole)]
    edges = [array.tolist() for array in store.extents(documents)]
    kept = store.targets_before(np.arange(store.tokens + 1)).tolist()
    origins = [store.origin_of_document(i) for i in range(store.documents)]
    return [
        *rows, None if weights is None else weights.tolist(), copied.tolist(), *found, *edges, kept, origins,
        store.document_of(starts).tolist(), store.edges(0, store.documents).tolist(), store.slice(3, 90).tolist(),
        np.nan_to_num(store.scores(documents)).tolist(),
        [store.shard(0).begins_in(i, i + 9) [0] for i in starts.tolist()],
        store.text_bytes, store.fingerprint, store.vocab,
    ]  # fmt: skip


SUFFIXES = ("bin", "chunks", "files", "idx", "json", "mask", "ids", "origins", "scores", "starts")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_flipped_bit_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Refused by name, or without any effect (the part of the `.idx` that only Megatron reads)."""
    monkeypatch.setattr("bessemer.data.store.digests.CHUNK_BYTES", 64)  # so that most of a file stays unread
    store = decorated_store(tmp_path / "s")
    store.shard(0).verify()
    expected = read_all(store)
    assert read_all(TokenStore(tmp_path / "s")) == expected  # the searches work on files that are not verified yet
    path = tmp_path / f"s.{suffix}"
    whole = path.read_bytes()
    noticed = 0
    for at in range(0, len(whole), max(1, len(whole) // 24)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        refusal = None
        try:
            assert read_all(TokenStore(tmp_path / "s")) == expected
        except UserError as error:
            refusal = str(error)
            noticed += 1
        assert refusal is None or (str(path) in refusal and "prepare the data again" in refusal)
        if suffix != "json":
            with pytest.raises(UserError, match=rf"s\.{suffix}"):
                Shard(tmp_path / "s").verify()
    assert noticed > 20 or suffix == "idx" or (suffix == "json" and noticed)


def test_a_damaged_place_is_named(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [[i % 1000] * 1000 for i in range(400)])
    with open(tmp_path / "s.bin", "r+b") as file:
        file.seek(500_000)
        file.write(b"\xff\xff")
    store = TokenStore(tmp_path / "s")
    store.slice(0, 100)
    store.slice(350_000, 350_100)
    with pytest.raises(UserError, match=r"s\.bin: bytes 393,216 to 524,288 are not those that were written"):
        store.gather(np.array([10, 250_100]), 8)


def test_a_store_without_digests_is_read(tmp_path: Path) -> None:
    """As earlier versions wrote them."""
    store = decorated_store(tmp_path / "s")
    expected = read_all(store)
    about = json.loads((tmp_path / "s.json").read_text())
    about["sizes"].pop("chunks")
    del about["digest"]
    (tmp_path / "s.json").write_text(json.dumps(about | {"sums": {}}))
    (tmp_path / "s.chunks").unlink()
    old = TokenStore(tmp_path / "s")
    assert not old.verifiable and store.verifiable
    assert read_all(old) == expected


def test_two_writers_of_one_store_do_not_mix(tmp_path: Path) -> None:
    """One of them was orphaned by a kill: it writes on after the other has begun, and may end after it."""
    first, second = (StoreWriter(tmp_path / "s", SMALL, "") for _ in range(2))
    for writer in (first, second, first, second):
        writer.add([1, 2, 3], "/a", 1, 0, 3)
    for writer in (second, first):
        with writer:
            pass
        store = Shard(tmp_path / "s")
        store.verify()
        assert store.slice(0, 6).tolist() == [1, 2, 3, 1, 2, 3]
    assert not list(tmp_path.glob("*.tmp"))


def test_an_index_of_another_store_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [[1, 2]])
    data = bytearray((tmp_path / "s.idx").read_bytes())
    data[17] = 4
    (tmp_path / "s.idx").write_bytes(data)
    with pytest.raises(UserError, match=r"s\.idx: has a header that does not match"):
        Shard(tmp_path / "s")


def test_a_store_of_a_later_version_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [[1, 2]])
    about = json.loads((tmp_path / "s.json").read_text())
    (tmp_path / "s.json").write_text(json.dumps(about | {"format_version": 99}))
    with pytest.raises(UserError, match="format 99 instead of 2"):
        TokenStore(tmp_path / "s")


def test_threads_read_the_same(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", many_documents())
    starts = [np.random.default_rng(i).integers(0, store.tokens - 16, 8) for i in range(64)]
    expected = [store.gather(row, 16).tolist() for row in starts]
    with ThreadPoolExecutor(4) as pool:
        assert [rows.tolist() for rows in pool.map(lambda row: store.gather(row, 16), starts)] == expected
