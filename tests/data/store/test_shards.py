"""Stores joined, or read as one, give the same documents in any division."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data.store.token_store import TokenStore, open_stores, shard_prefixes
from bessemer.data.store.writer import StoreWriter, merge
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.data.stream.rows import sequence_count
from bessemer.errors import UserError
from bessemer.spec.mixture import quantise

pytestmark = pytest.mark.timeout(60)
VOCAB = 300
DOCUMENTS = 40


def write_part(prefix: Path | str, first: int, stop: int, kinds: str = "mask ids scores") -> str:
    """Documents [first, stop) of a corpus; each is always the same. Only some have a mask, an id or a score."""
    with StoreWriter(prefix, VOCAB, "tokenizer") as writer:
        for i in range(first, stop):
            random = np.random.default_rng(i)
            tokens = random.integers(0, VOCAB, random.integers(1, 90))
            masked = "mask" in kinds and i % 10 == 3
            writer.add(
                tokens, f"/corpus/{i // 7}.jsonl", i, i << 40, len(tokens),
                mask=random.integers(0, 2, tokens.size) if masked else None,
                id=f"id-{i}" if "ids" in kinds and i % 10 == 4 else "",
                score=i / 3 if "scores" in kinds and i % 10 == 5 else None,
            )  # fmt: skip
    return str(prefix)


def write_parts(folder: Path, cuts: list[int], **settings: str) -> list[str]:
    return [write_part(folder / f"part{k}", *ends, **settings) for k, ends in enumerate(pairwise(cuts))]


def same_store(one: Any, other: Any, seed: int = 0) -> None:
    """Every method gives the same for both."""
    for name in ("tokens", "documents", "text_bytes", "vocab", "dtype", "masked", "files"):
        assert getattr(one, name) == getattr(other, name), name
    assert (one.fingerprint, one.tokenizer_fingerprint) == (other.fingerprint, other.tokenizer_fingerprint)
    assert len(one) == one.tokens
    random = np.random.default_rng(seed)
    for length in (1, 7, 64, 200, min(one.tokens, 1500)):
        starts = random.integers(0, one.tokens - length + 1, 40)
        lengths = random.integers(1, length + 1, 40)
        assert np.array_equal(one.gather(starts, length), other.gather(starts, length))
        weights = one.weights(starts, length), other.weights(starts, length)
        assert (weights[0] is None and weights[1] is None) or np.array_equal(*weights)
        for mine, theirs in zip(one.documents_in(starts, lengths), other.documents_in(starts, lengths), strict=True):
            assert np.array_equal(mine, theirs)
        at = np.cumsum(lengths + 1) - lengths
        copies = [np.full(at[-1] + lengths[-1], -1, np.float32) for _ in range(4)]
        for store, tokens, kept in ((one, *copies[:2]), (other, *copies[2:])):
            store.copy_runs(starts, lengths, tokens, at)
            store.copy_weights(starts, lengths, kept, at)
        assert np.array_equal(copies[0], copies[2]) and np.array_equal(copies[1], copies[3])
        first, last = sorted(random.integers(0, one.tokens + 1, 2).tolist())
        assert np.array_equal(one.slice(first, last), other.slice(first, last))
    positions = np.arange(one.tokens + 1)
    assert np.array_equal(one.targets_before(positions), other.targets_before(positions))
    assert np.array_equal(one.document_of(positions[:-1]), other.document_of(positions[:-1]))
    documents = random.permutation(one.documents)
    assert np.array_equal(one.scores(documents), other.scores(documents), equal_nan=True)
    assert np.array_equal(one.extents(documents), other.extents(documents))
    for document in range(one.documents):
        assert one.origin_of_document(document) == other.origin_of_document(document)
        stop = random.integers(document + 1, one.documents + 1)
        assert np.array_equal(one.edges(document, stop), other.edges(document, stop))


cuts = st.lists(st.integers(0, DOCUMENTS), max_size=8).map(lambda inner: [0, *sorted(inner), DOCUMENTS])


@settings(max_examples=5, deadline=None)
@given(cuts=cuts, regrouped=cuts, open_shards=st.integers(1, 3))
def test_no_division_can_be_seen(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], regrouped: list[int], open_shards: int
) -> None:
    """Parts may be empty or hold one document; they are joined in groups, and the groups read as one."""
    folder = tmp_path_factory.mktemp("shards")
    whole = TokenStore(write_part(folder / "whole", 0, DOCUMENTS))
    parts = write_parts(folder, cuts)
    same_store(TokenStore(parts, open_shards=open_shards), whole)
    groups = sorted({round(cut / DOCUMENTS * len(parts)) for cut in regrouped})
    joined = []
    for first, stop in pairwise(groups):
        joined.append(str(folder / f"joined{first}"))
        assert merge(parts[first:stop], [joined[-1]]) == 1
    same_store(TokenStore(joined, open_shards=open_shards), whole)


@pytest.mark.parametrize("kinds", ["", "mask", "ids scores"])
def test_a_join_is_what_one_writer_would_have_written(
    tmp_path: Path, kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bessemer.data.store.writer.COPY_ITEMS", 7)  # several blocks
    write_part(tmp_path / "whole", 0, DOCUMENTS, kinds)
    parts = write_parts(tmp_path, [0, 0, 1, 2, 30, 30, 33, DOCUMENTS, DOCUMENTS], kinds=kinds)
    merge(parts, [str(tmp_path / "joined")])
    expected = {path.suffix: path.read_bytes() for path in tmp_path.glob("whole.*")}
    assert {path.suffix: path.read_bytes() for path in tmp_path.glob("joined.*")} == expected
    assert len(expected) == 7 + len(kinds.split())


def test_many_parts_become_shards_of_about_a_size(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, list(range(0, DOCUMENTS + 1, 4)))
    sizes = [TokenStore(part).infos[0].sizes["bin"] for part in parts]
    made = merge(parts, shard_prefixes(tmp_path / "out", "web", "train"), shard_bytes=1000)
    store = open_stores(tmp_path / "out", {"web": made}, "train")["web"]
    expected = [0]
    for size in sizes:
        if expected[-1] + size > 1000:
            expected.append(0)
        expected[-1] += size
    assert [about.sizes["bin"] for about in store.infos] == expected and made > 3
    same_store(store, TokenStore(write_part(tmp_path / "whole", 0, DOCUMENTS)))
    assert merge([], shard_prefixes(tmp_path, "none", "train")) == 0
    assert merge(parts, shard_prefixes(tmp_path / "own", "web", "train"), shard_bytes=1) == len(parts)


def test_a_finished_join_is_kept_and_a_broken_one_made_again(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, [0, 20, 40])
    merge(parts, [str(tmp_path / "joined")])
    made = (tmp_path / "joined.bin").stat().st_mtime_ns
    merge(parts, [str(tmp_path / "joined")])
    assert (tmp_path / "joined.bin").stat().st_mtime_ns == made
    (tmp_path / "joined.starts").write_bytes(b"torn")
    merge(parts, [str(tmp_path / "joined")])
    same_store(TokenStore(tmp_path / "joined"), TokenStore(parts))
    merge(parts[:1], [str(tmp_path / "joined")])  # other parts: another store
    assert TokenStore(tmp_path / "joined").documents == 20


def test_a_killed_join_leaves_nothing_that_looks_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = write_parts(tmp_path, [0, 20, 40])
    merge(parts[:1], [str(tmp_path / "joined")])  # an older one with the same prefix

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bessemer.data.store.writer.write_index", die)
    with pytest.raises(KeyboardInterrupt):
        merge(parts, [str(tmp_path / "joined")])
    assert not (tmp_path / "joined.json").exists()
    monkeypatch.undo()
    merge(parts, [str(tmp_path / "joined")])
    same_store(TokenStore(tmp_path / "joined"), TokenStore(parts))


def test_stores_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    one = write_part(tmp_path / "one", 0, 3)
    with StoreWriter(tmp_path / "two", VOCAB, "another") as writer:
        writer.add([1], "/a", 1, 1, 1)
    for read in (lambda names: merge(names, [str(tmp_path / "out")]), TokenStore):
        with pytest.raises(UserError, match="two: was tokenized by another tokenizer"):
            read([one, str(tmp_path / "two")])


def test_positions_outside_are_refused(tmp_path: Path) -> None:
    store = TokenStore(write_parts(tmp_path, [0, 3, 6]))
    for start in (-1, store.tokens - 4):
        with pytest.raises(IndexError):
            store.gather(np.array([0, start]), 5)
    with pytest.raises(IndexError):
        store.document_of(np.array([store.tokens]))
    with pytest.raises(IndexError):
        store.origin_of_document(6)
    assert store.gather(np.array([], np.int64), 5).shape == (0, 5)
    assert store.slice(5, 5).size == 0
    empty = TokenStore([])
    assert (empty.tokens, empty.documents, empty.files, empty.masked) == (0, 0, [], False)


def test_few_shards_are_open_at_a_time_and_threads_share_them(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, list(range(DOCUMENTS + 1)))
    whole = TokenStore(write_part(tmp_path / "whole", 0, DOCUMENTS))
    store = TokenStore(parts, open_shards=5)
    starts = [np.random.default_rng(i).integers(0, store.tokens - 60, 16) for i in range(32)]
    with ThreadPoolExecutor(4) as pool:
        for found, at in zip(pool.map(lambda row: store.gather(row, 60), starts), starts, strict=True):
            assert np.array_equal(found, whole.gather(at, 60))
    assert len(store._opened) == 5


def test_a_stream_is_the_same_over_any_division(tmp_path: Path) -> None:
    def batches(source: Any) -> tuple[str, list[Any]]:
        order = StreamOrder([MixturePhase(0, quantise({"a": 1.0}))], {"a": sequence_count(source.tokens, 32)}, 3)
        stream = BatchStream({"a": source}, order, 32, StepPositions([BatchPhase(0, 6)]))
        found = [
            [array.tolist() for name, array in vars(stream.batch(step)).items() if name != "fields"]
            for step in range(20)
        ]
        counts = [stream.step_count(step) for step in range(20)]
        assert counts == [stream.batch(step).count for step in range(20)]
        return stream.fingerprint, [found, counts, [stream.origins(step) for step in range(20)]]

    whole = batches(TokenStore(write_part(tmp_path / "whole", 0, DOCUMENTS)))
    assert batches(TokenStore(write_parts(tmp_path, [0, 1, 17, 17, 40, DOCUMENTS]))) == whole


@pytest.mark.slow
def test_ten_thousand_shards_open_with_few_maps(tmp_path: Path) -> None:
    one = write_part(tmp_path / "one", 0, 1)
    prefixes = []
    for k in range(10_000):  # hard links: the same shard again and again
        prefixes.append(str(tmp_path / f"s{k}"))
        for suffix in ("json", "bin", "idx", "starts", "origins", "files", "chunks"):
            os.link(f"{one}.{suffix}", f"{prefixes[-1]}.{suffix}")
    store = TokenStore(prefixes)
    expected = TokenStore(one).slice(0, 10)
    for k in range(0, 10_000, 7):
        assert np.array_equal(store.slice(k * len(TokenStore(one)), k * len(TokenStore(one)) + 10), expected)
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert sum(str(tmp_path) in line for line in maps.read_text().splitlines()) <= 6 * 512
