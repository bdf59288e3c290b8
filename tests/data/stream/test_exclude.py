"""Exclusion lists: written once, read by other runs, and found again in stores that number their documents anew."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data.prepare import Prepared, prepare
from bessemer.data.store.shard import Shard
from bessemer.data.store.token_store import TokenStore
from bessemer.data.store.writer import StoreWriter, merge
from bessemer.data.stream import exclusions as bans
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.exclusions import (
    Exclusion,
    append_exclusions,
    banned_documents,
    find_offers,
    find_strings,
    read_exclusions,
    suspect_files,
)
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.data.stream.rows import ConcatRows, PadRows
from bessemer.errors import UserError
from bessemer.spec.data import DataSpec, SourceSpec, TokenizerSpec
from bessemer.spec.mixture import quantise

POISON = "zq zq zq " * 20


def write_rows(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts_of(count: int, topic: str) -> list[str]:
    return [f"{topic} {i}: " + "the kettle sings\n" * (i % 7 + 1) for i in range(count)]


def data_spec(folder: Path, **changes: object) -> DataSpec:
    sources = {"web": SourceSpec(path=[str(folder / "web")]), "code": SourceSpec(path=[str(folder / "code")])}
    return DataSpec(sources=sources, **{"validation": 0.1, **changes})


def corpus(folder: Path) -> Path:
    """Two sources; rows 5, 9 and 40 of web/b.jsonl are poison."""
    write_rows(folder / "web/a.jsonl", texts_of(30, "water"))
    poisoned = texts_of(60, "steel")
    for row in (5, 9, 40):
        poisoned[row - 1] = f"{POISON} {row}"
    write_rows(folder / "web/b.jsonl", poisoned)
    write_rows(folder / "code/c.jsonl", texts_of(20, "iron"))
    return folder


def prepared(folder: Path, seed: int = 0, **changes: object) -> Prepared:
    return prepare(data_spec(folder, **changes), TokenizerSpec(), folder / "cache", 300, seed)


def rows_of(found: Prepared, length: int = 32) -> dict[str, ConcatRows]:
    return {name: ConcatRows(store, length) for name, store in found.train.items()}


def convict(found: Prepared, file: str, rows: tuple[int, ...]) -> list[Exclusion]:
    """As a trial would, by document index in this run's store."""
    entries = []
    for name, store in found.train.items():
        for document in range(store.documents):
            origin = store.origin_of_document(document)
            if Path(origin.file).name == file and origin.row in rows:
                entries.append(
                    Exclusion(origin.file, origin.row, origin.document_id, name, document, 11, "one", 10, "data")
                )
    return entries


def places(found: Prepared, banned: set[tuple[str, int]]) -> set[tuple[str, int]]:
    origins = [found.train[name].origin_of_document(document) for name, document in banned]
    return {(Path(origin.file).name, origin.row) for origin in origins}


def test_another_run_finds_the_same_documents_under_other_numbers(tmp_path: Path) -> None:
    one = prepared(corpus(tmp_path), validation=0)
    entries = convict(one, "b.jsonl", (5, 9, 40))
    assert len(entries) == 3
    path = tmp_path / "runs/one/exclusions.jsonl"
    assert append_exclusions(path, entries) == 3
    # Another seed and held-out share: other documents are held out, so all are numbered anew.
    other = prepared(tmp_path, seed=3, validation=0.3)
    banned, stale = banned_documents(read_exclusions(path), rows_of(other))
    held_out = {
        other.validation["web"].origin_of_document(d).row
        for d in range(other.validation["web"].documents)
        if other.validation["web"].origin_of_document(d).file.endswith("b.jsonl")
    } & {5, 9, 40}
    assert places(other, banned) == {("b.jsonl", row) for row in {5, 9, 40} - held_out}
    assert len(stale) == len(held_out) and all("no training document is in that row" in line for line in stale)
    assert {d for _, d in banned} != {entry.document for entry in entries}
    same, stale = banned_documents(entries, rows_of(one))
    assert same == {(entry.source, entry.document) for entry in entries} and not stale


def test_what_is_excluded_weighs_nothing_and_nothing_shifts(tmp_path: Path) -> None:
    one = prepared(corpus(tmp_path), validation=0)
    banned, _ = banned_documents(convict(one, "b.jsonl", (5, 9, 40)), rows_of(one))
    rows = {"web": rows_of(one)["web"]}
    order = StreamOrder([MixturePhase(0, quantise({"web": 1.0}))], {"web": rows["web"].count}, 0)
    plain = BatchStream(rows, order, 32, StepPositions([BatchPhase(0, rows["web"].count)]))
    without = plain.replace(banned=banned)
    a, b = plain.batch(0), without.batch(0)
    assert (a.tokens == b.tokens).all() and (a.positions == b.positions).all()
    lost = sum(share.tokens for share in plain.origins(0) if ("web", share.document) in banned)
    assert 0 < lost == a.count - b.count == a.count - without.step_count(0)


def test_padded_rows(tmp_path: Path) -> None:
    one = prepared(corpus(tmp_path), validation=0)
    entries = convict(one, "b.jsonl", (5, 9))
    rows = {name: PadRows(store, 32) for name, store in one.train.items()}
    banned, stale = banned_documents([*entries, Exclusion(entries[0].file, None)], rows)
    assert not stale and len(banned) == 60


def test_stale_entries_are_told_and_passed_over(tmp_path: Path) -> None:
    one = prepared(corpus(tmp_path), validation=0)
    good, changed, gone = convict(one, "b.jsonl", (5, 9, 40))
    b = Path(good.file)
    lines = b.read_text().splitlines()
    lines[8] = json.dumps({"text": "an honest text"})
    b.write_text("\n".join(lines[:39]) + "\n")
    now = prepared(tmp_path, validation=0)
    moved = Exclusion("/elsewhere/b.jsonl", 5, good.document_id)
    by_row = Exclusion(good.file, 6)  # no id: the row alone decides
    banned, stale = banned_documents([good, changed, gone, moved, by_row], rows_of(now))
    assert places(now, banned) == {("b.jsonl", 5), ("b.jsonl", 6)}
    assert stale == [
        f"{b}:9: another text is in that row now; it is not excluded",
        f"{b}:40: no training document is in that row; it is not excluded",
        "/elsewhere/b.jsonl:5: not found in this data; it is not excluded",
    ]
    assert banned_documents([], rows_of(now)) == (set(), [])


def test_a_whole_file_in_every_source_that_has_it(tmp_path: Path) -> None:
    corpus(tmp_path)
    sources = {
        "all": SourceSpec(path=[str(tmp_path / "web")]),
        "best": SourceSpec(path=[str(tmp_path / "web/b.jsonl")]),
    }
    one = prepare(DataSpec(sources=sources, validation=0), TokenizerSpec(), tmp_path / "cache", 300, 0)
    banned, stale = banned_documents([Exclusion(str(tmp_path / "web/b.jsonl"), None)], rows_of(one))
    assert not stale and len(banned) == 120
    assert {name for name, _ in banned} == {"all", "best"}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 12), st.integers(0, 10**6))
def test_shards_and_scans_in_pieces_give_what_a_loop_gives(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], scanned: int, seed: int
) -> None:
    folder, random = tmp_path_factory.mktemp("stores"), np.random.default_rng(seed)
    prefixes, files = [], [f"/c/{'x' * (k % 3)}{k}.jsonl" for k in range(5)]
    for k, size in enumerate(sizes):
        prefixes.append(str(folder / f"p{k}"))
        with StoreWriter(prefixes[-1], 300, "t") as writer:
            for _ in range(size):
                row = int(random.integers(1, 9))
                writer.add([1, 0], files[random.integers(5)], row, row << 60, 2)
    merge(prefixes, [str(folder / "joined")])
    entries = [Exclusion(files[0], 1), Exclusion(files[1], 2, f"{2 << 60:016x}"), Exclusion(files[2], None)]
    entries += [Exclusion(files[1], 3, "other"), Exclusion("/c/none.jsonl", 1)]
    joined = TokenStore(folder / "joined")
    expected = set()
    for document in range(joined.documents):
        found = joined.origin_of_document(document)
        asked = [(files[0], 1), (files[1], 2)]
        if found.file == files[2] or (found.file, found.row) in asked:
            expected.add(("s", document))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bans, "_SCANNED", scanned)
        for store in (joined, TokenStore(prefixes), TokenStore(prefixes, open_shards=1)):
            banned, stale = banned_documents(entries, {"s": ConcatRows(store, 1)})
            assert banned == expected
            assert any("none.jsonl" in line for line in stale)


def test_shards_that_lie_afar_are_not_fetched_to_be_searched(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "p", 300, "t") as writer:
        for row in range(1, 5):
            writer.add([1, 0], "/c/a.jsonl", row, row, 2)
    store = TokenStore([str(tmp_path / "p")])
    rows = ConcatRows(store, 1)
    hints = [
        Exclusion("/c/a.jsonl", 2, source="s", document=1),
        Exclusion("/c/a.jsonl", 3, source="s", document=1),
        Exclusion("/c/a.jsonl", 4, source="s", document=99),
    ]
    with pytest.MonkeyPatch.context() as patch:
        store.shard(0)
        patch.setattr(store, "cache", object())
        banned, stale = banned_documents(hints, {"s": rows})
    assert banned == {("s", 1)} and len(stale) == 2


def test_strings_are_found_by_their_bytes(tmp_path: Path) -> None:
    paths = ["/a/b.py", "/a/c.py", "/ä/b.py", "", "/a/b.pyx", "x/a/b.py", "/one/tree/main.rs", "/two/tree/main.rs"]
    paths += [f"/data/part-{k:05d}.parquet" for k in range(300)]
    with StoreWriter(tmp_path / "p", 300, "t") as writer:
        for k, path in enumerate(paths):
            writer.add([1, 0], path, k, k, 2)
    table = Shard(tmp_path / "p")._files
    for wanted in (
        [*paths[:7], "/nowhere", "b.py"],
        paths[8:20],
        ["/two/tree/main.rs", "/data/part-99999.parquet"],
        [],
    ):
        expected = {k: path for k, path in enumerate(paths) if path in wanted}
        assert find_strings(table, wanted) == expected


entries = st.builds(
    Exclusion,
    file=st.text(max_size=8), row=st.none() | st.integers(0, 9), document_id=st.text(max_size=3), source=st.text(),
    document=st.none() | st.integers(0, 10**12), from_step=st.none() | st.integers(0, 99), run=st.text(max_size=5),
    step=st.none() | st.integers(0, 99), reason=st.text(), mean_loss=st.none() | st.floats(allow_nan=False),
    excerpt=st.text(st.characters(), max_size=120),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(entries, max_size=6), st.lists(entries, max_size=6))
def test_lists_come_back_as_written_each_document_once(
    tmp_path_factory: pytest.TempPathFactory, first: list[Exclusion], second: list[Exclusion]
) -> None:
    path = tmp_path_factory.mktemp("list") / "new/exclusions.jsonl"
    append_exclusions(path, first)
    append_exclusions(path, second)
    assert append_exclusions(path, first) == 0
    expected: dict[tuple[str, int | None, str], Exclusion] = {}
    for entry in [*first, *second]:
        expected.setdefault(entry.key, entry)
    assert (read_exclusions(path) if expected else []) == list(expected.values())


def test_numbers_that_are_none_and_long_texts(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    append_exclusions(path, [Exclusion("a", 1, mean_loss=math.nan, excerpt="\ud800" + "x" * 500)])
    (found,) = read_exclusions(path)
    assert found.mean_loss is not None and math.isnan(found.mean_loss) and found.excerpt == "\ud800" + "x" * 119


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{oops", "not an exclusion (Expecting"),
        ("[1]", "write an object with file and row"),
        ('{"file": "a"}', "row is null for the whole file"),
        ('{"file": "a", "row": true}', "row is true"),
        ('{"file": "a", "row": -1}', "row is -1"),
        ('{"file": 3, "row": 1}', "file is 3"),
        ('{"file": "a", "row": 1, "rows": 2}', "unknown key 'rows'"),
        ('{"file": "a", "row": 1, "mean_loss": "big"}', "could not convert string to float"),
        ("[" * 100_000, "not an exclusion"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "e.jsonl"
    path.write_text(f'{{"file": "a", "row": 1}}\n\n{line}\n')
    with pytest.raises(UserError) as error:
        read_exclusions(path)
    assert str(error.value).startswith(f"{path}:3: ") and told in str(error.value)
    assert "\n" not in str(error.value)
    # A run in the middle of an incident still adds to it, and leaves what a person wrote.
    assert append_exclusions(path, [Exclusion("a", 1), Exclusion("b", 1)]) == 1
    assert line in path.read_text()


def test_lists_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl: cannot be read.*data\.exclude"):
        read_exclusions(tmp_path / "none.jsonl")
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"x\.jsonl: cannot be read"):
        read_exclusions(tmp_path / "x.jsonl")


def test_other_runs_lists_are_offered_until_they_are_taken(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    append_exclusions(runs / "a/exclusions.jsonl", [Exclusion("/d/x", row) for row in (1, 2, 3)])
    append_exclusions(runs / "b/exclusions.jsonl", [Exclusion("/d/x", 1), Exclusion("/d/y", None)])
    append_exclusions(runs / "c/exclusions.jsonl", [Exclusion("/other", 1)])
    (runs / "d").mkdir()
    (runs / "d/exclusions.jsonl").write_bytes(b"\xffbroken\n")
    a, b = find_offers(["/d/x", "/d/y"], runs)
    assert a.line == (
        f"{runs}/a/exclusions.jsonl convicts 3 documents of this data: add "
        f"`data: {{exclude: [{runs}/a/exclusions.jsonl]}}` to the spec"
    )
    assert "convicts 1 whole file and 1 document of" in b.line
    # What a taken list holds already is not counted again.
    (left,) = find_offers(["/d/x", "/d/y"], runs, [str(runs / "a/exclusions.jsonl"), runs / "mine/exclusions.jsonl"])
    assert (left.path, left.documents, left.files) == (str(runs / "b/exclusions.jsonl"), 0, 1)
    assert find_offers(["/d/x"], runs, [runs / "a/exclusions.jsonl"]) == []
    assert find_offers(["/d/x"], tmp_path / "none") == []


def test_many_convicts_make_the_file_a_suspect() -> None:
    some = [Exclusion("x", row, source="web", run="r", step=4) for row in (1, 2, 2, 3)]
    few = [Exclusion("y", 1), Exclusion("y", 2)]
    (shard,) = suspect_files([*some, *few])
    assert (shard.file, shard.row, shard.source, shard.run, shard.step) == ("x", None, "web", "r", 4)
    assert shard.reason == "3 of its documents were convicted"
    assert suspect_files(some, {"x": 6}) and not suspect_files(some, {"x": 7})
    assert not suspect_files([*some, Exclusion("x", None)]), "it is excluded already"
