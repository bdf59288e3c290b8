"""The shuffle: every record in its bucket, nothing lost, and damage never taken for data."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bessemer.data.curate.dedup.shuffle as shuffle
from bessemer.data.curate.step import Collected
from bessemer.errors import UserError

RECORD = np.dtype([("key", "<u8"), ("document", "<i8")])
keys = st.lists(st.integers(0, 2**64 - 1) | st.sampled_from([0, 2**63, 2**64 - 1]), max_size=20)


def records(some: list[int], first: int) -> np.ndarray:
    made = np.empty(len(some), RECORD)
    made["key"], made["document"] = np.array(some, np.uint64), np.arange(first, first + len(some))
    return made


@given(st.lists(keys, min_size=1, max_size=4), st.integers(1, 9), st.sampled_from([16, 64, 10**6]))
def test_each_record_comes_once_and_equal_keys_together(
    tmp_path_factory: pytest.TempPathFactory, runs: list[list[int]], buckets: int, limit: int
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    written = [records(run, 100 * i) for i, run in enumerate(runs)]
    for i, run in enumerate(written):
        shuffle.write_run(folder, i, run, shuffle.hash_bounds(buckets))
    seen: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "BUCKET_BYTES", limit)
        for bucket in range(buckets):
            pieces = list(shuffle.read_bucket(folder, len(runs), bucket, RECORD))
            found = [(int(key), int(document)) for piece in pieces for key, document in piece]
            assert len(found) == shuffle.bucket_size(folder, len(runs), bucket)
            assert all(key * buckets >> 64 == bucket for key, _ in found) or not found
            seen += found
    assert sorted(seen) == sorted((int(key), int(document)) for run in written for key, document in run)


def test_positions_go_back_to_their_part(tmp_path: Path) -> None:
    run = np.empty(4, np.dtype([("key", "<u8")]))
    run["key"] = [shuffle.position(2) + 5, 7, shuffle.position(1), shuffle.position(2)]
    shuffle.write_run(tmp_path, 0, run, shuffle.part_bounds(3))
    back = [np.concatenate(list(shuffle.read_bucket(tmp_path, 1, part, run.dtype)))["key"] for part in range(3)]
    assert [(one - np.uint64(shuffle.position(part))).tolist() for part, one in enumerate(back)] == [[7], [0], [0, 5]]


def test_the_number_of_buckets_follows_from_the_records() -> None:
    assert shuffle.bucket_count(0, RECORD) == 1
    assert shuffle.bucket_count(1 << 19, RECORD) == 1  # 8 MB
    assert shuffle.bucket_count((1 << 19) + 1, RECORD) == 2


def test_a_run_that_was_cut_short_is_told(tmp_path: Path) -> None:
    shuffle.write_run(tmp_path, 0, records([1, 2, 3], 0), shuffle.hash_bounds(1))
    path = tmp_path / "000000.run"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match=r"000000.run: cut short at item 2.*disk"):
        list(shuffle.read_bucket(tmp_path, 1, 0, RECORD))


def collected(path: Path, documents: int = 10, **arrays: np.ndarray) -> Collected:
    with open(path, "wb") as file:
        np.savez(file, **arrays)
    return Collected(3, path, "web", documents)


def test_damage_to_what_was_collected_names_the_part(tmp_path: Path) -> None:
    part = collected(tmp_path / "a.npz", ordinal=np.arange(10), key=np.arange(10, dtype=np.uint64))
    whole = part.path.read_bytes()
    assert shuffle.load_columns(part, ("ordinal", "key"))["key"].tolist() == list(range(10))
    flipped = bytearray(whole)
    flipped[whole.index(np.arange(10).tobytes()) + 8] ^= 1
    for data in (whole[: len(whole) // 2], whole[:-1], b"", bytes(flipped)):
        part.path.write_bytes(data)
        with pytest.raises(UserError, match=r"a.npz: what was collected of part 3 of source 'web' .*delete"):
            shuffle.load_columns(part, ("ordinal", "key"))
    part.path.unlink()
    with pytest.raises(UserError, match="part 3"):
        shuffle.load(part, ("ordinal",))
    with pytest.raises(UserError, match="part 3"):
        shuffle.count_records([part], "key")


@pytest.mark.parametrize("ordinals", [[0, 1, 10], [-1, 1], [0, 0], [2, 1]])
def test_ordinals_that_cannot_be_are_told(tmp_path: Path, ordinals: list[int]) -> None:
    part = collected(tmp_path / "a.npz", ordinal=np.array(ordinals))
    with pytest.raises(UserError, match="numbers its documents otherwise than the 10 of the part"):
        shuffle.load(part, ("ordinal",))


def test_columns_of_unequal_length_are_told(tmp_path: Path) -> None:
    part = collected(tmp_path / "a.npz", ordinal=np.arange(3), key=np.arange(2))
    with pytest.raises(UserError, match=r"cut short \(ordinal 3, key 2 records\)"):
        shuffle.load_columns(part, ("ordinal", "key"))


def test_records_are_counted_by_their_headers(tmp_path: Path) -> None:
    parts = [
        collected(tmp_path / "a.npz", key=np.zeros((5, 2))),
        collected(tmp_path / "b.npz"),
        collected(tmp_path / "c.npz", key=np.zeros(7)),
    ]
    assert shuffle.count_records(parts, "key") == 12
