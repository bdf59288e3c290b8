"""Rows tokenized on the fly against the text laid end to end by hand; the index against the files."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data import lazy, lazy_index
from bessemer.data.curate.ledger import text_hash
from bessemer.data.lazy import LazyRows, choose_block, cost_note
from bessemer.data.lazy_index import Index, Side, build_index
from bessemer.data.read import list_files
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.data.stream.rows import PADDING, Rows
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec
from bessemer.spec.mixture import Mixture
from bessemer.spec.quantity import human_bytes

EOS = 0


class Words:
    """A tokenizer of one id per word with its space: id = 1 + hash of the word, so pieces tell what they were."""

    eos_id, fingerprint = EOS, "words"

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode_batch(self, texts: list[str], continues: list[bool] | None = None) -> list[list[int]]:
        self.texts += texts
        return [[1 + text_hash(word, 0) % 10**6 for word in split(text)] for text in texts]


def split(text: str) -> list[str]:
    """Every word begins with its white space, so that words cut before a space join again."""
    words, word = [], ""
    for letter in text:
        if letter.isspace() and word and not word[-1].isspace():
            words.append(word)
            word = ""
        word += letter
    return [*words, word] if word else words


def write(folder: Path, files: dict[str, list[str]], **settings: Any) -> tuple[list, SourceSpec]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in files.items():
        lines = "".join(json.dumps({"text": text, "id": f"{name}-{k}"}) + "\n" for k, text in enumerate(texts))
        opened = gzip.open if name.endswith(".gz") else open
        with opened(folder / name, "wb") as file:
            file.write(lines.encode())
    source = SourceSpec.model_validate({"path": [str(folder)], **settings})
    return list_files(source), source


def index_of(tmp_path: Path, files: dict[str, list[str]], side: Side | None = None, **settings: Any) -> Index:
    found, source = write(tmp_path / "corpus", files, **settings)
    return build_index("web", found, source, tmp_path / "cache", side)


def by_hand(texts: list[str], block: int) -> list[tuple[list[int], list[int]]]:
    """(ids, document of each) of every block: the text end to end, cut at bytes that move on to white space."""
    begins = np.cumsum([0, *(len(text.encode()) + 1 for text in texts)]).tolist()
    rows = []
    for start in range(0, begins[-1], block):
        stop = min(start + block, begins[-1])
        ids: list[int] = []
        owners: list[int] = []
        for k, text in enumerate(texts):
            data, begin = text.encode(), begins[k]
            if begins[k + 1] <= start or begin >= stop:
                continue
            a, b = moved(data, start - begin), moved(data, stop - begin)
            mine = [1 + text_hash(word, 0) % 10**6 for word in split(data[a:b].decode())]
            if begin >= start and not ids:
                mine = [EOS, *mine]
            if begins[k + 1] <= stop:
                mine = [*mine, EOS]
            ids += mine
            owners += [k] * len(mine)
        rows.append((ids, owners))
    return rows


def moved(data: bytes, at: int) -> int:
    if at <= 0 or at >= len(data):
        return min(max(at, 0), len(data))
    for place in range(at, min(at + 64, len(data))):
        if data[place : place + 1].isspace() and not data[place - 1 : place].isspace():
            return place
    return next(p for p in range(at, len(data) + 1) if p == len(data) or data[p] & 0xC0 != 0x80)


texts = st.lists(st.text("ab é\n", min_size=1, max_size=90).filter(str.strip), min_size=1, max_size=12)


@settings(max_examples=40)
@given(texts, st.integers(3, 120), st.integers(1, 24), st.randoms(), st.sampled_from([10, 100, 1 << 16]))
def test_rows_are_blocks_of_the_text_laid_end_to_end(
    tmp_path_factory: pytest.TempPathFactory, written: list[str], block: int, length: int, shuffler: Any, stretch: int
) -> None:
    half = len(written) // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy_index, "_STRETCH_BYTES", stretch)
        index = index_of(tmp_path_factory.mktemp("lazy"), {"a.jsonl": written[:half], "b.jsonl": written[half:]})
    rows = LazyRows(index, Words(), length, block)
    assert isinstance(rows, Rows)
    expected = by_hand(written, block)
    assert rows.count == len(expected)
    picks = [shuffler.randrange(rows.count) for _ in range(6)]
    found = rows.assemble(np.array(picks))
    for r, k in enumerate(picks):
        ids, owners = expected[k][0][: length + 1], expected[k][1][: length + 1]
        pad = [0] * (length - max(0, len(ids) - 1))
        assert found.tokens[r].tolist() == ids[:-1] + pad
        assert found.targets[r].tolist() == ids[1:] + pad
        mine = np.flatnonzero(found.spans.row == r)
        covered = np.repeat(found.spans.document[mine], found.spans.length[mine]).tolist()
        assert covered == owners[1:] + [PADDING] * len(pad)
        assert found.spans.weight[mine].sum() == length - len(pad)


@settings(max_examples=30)
@given(texts, st.integers(1, 60))
def test_blocks_join_to_the_whole_text(
    tmp_path_factory: pytest.TempPathFactory, written: list[str], block: int
) -> None:
    """No character is lost or read twice between blocks; only what a row has no room for is."""
    index = index_of(tmp_path_factory.mktemp("lazy"), {"a.jsonl": written})
    words = Words()
    LazyRows(index, words, 1, block).assemble(np.arange(-(-index.bytes // block)))
    assert "".join(words.texts) == "".join(written)


def test_a_cut_never_parts_a_word_unless_it_is_long() -> None:
    data = ("word " * 20 + "x" * 200 + "é" * 100).encode()
    for at in range(len(data) + 1):
        place = lazy._snap(data, at)
        data[:place].decode()  # a cut lies between characters
        assert place >= at or at > len(data)
        if 0 < at < 90:
            assert data[place : place + 1] == b" "
    assert [lazy._snap(data, at) for at in range(300)] == sorted(lazy._snap(data, at) for at in range(300))


def test_the_index_is_of_one_side_and_the_sides_make_the_whole(tmp_path: Path) -> None:
    written = [f"document number {k} with some words" for k in range(400)]
    limit = 2**64 // 5
    train = index_of(tmp_path, {"a.jsonl": written}, Side(7, limit, held_out=False))
    held = index_of(tmp_path, {"a.jsonl": written}, Side(7, limit, held_out=True))
    assert train.documents + held.documents == 400
    assert held.documents == sum(text_hash(text, 7) < limit for text in written) > 0
    rows = LazyRows(held, Words(), 6, 40)
    seen = [written[rows.origin_of_document(d).row - 1] for d in range(held.documents)]
    assert seen == [text for text in written if text_hash(text, 7) < limit]


def make_stream(index: Index, length: int = 12) -> BatchStream:
    rows = LazyRows(index, Words(), length, 64)
    order = StreamOrder([MixturePhase(0, Mixture(("web",), (1,), 1))], {"web": rows.count}, 3)
    return BatchStream({"web": rows}, order, length, StepPositions([BatchPhase(0, 4)]))


def test_any_step_replays_and_its_documents_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_index, "_STRETCH_BYTES", 300)  # several in a file
    written = [f"text {k} of many words that follow each other" for k in range(50)]
    index = index_of(tmp_path, {"a.jsonl": written[:30], "b.jsonl.gz": written[30:]}, id_field="id")
    walked = make_stream(index)
    reached = [walked.batch(step) for step in range(10)]
    fresh = make_stream(Index(index.folder, index.files, index.source))
    assert np.array_equal(fresh.batch(7).tokens, reached[7].tokens)
    assert walked.step_count(7) == reached[7].count
    assert fresh.fingerprint == walked.fingerprint
    names = {f"a.jsonl-{k}" for k in range(30)} | {f"b.jsonl.gz-{k}" for k in range(20)}
    for share in walked.origins(3):
        assert share.document_id in names
        assert os.path.basename(share.file) == share.document_id.rpartition("-")[0]
        assert share.row == int(share.document_id.rpartition("-")[2]) + 1


def test_rows_come_from_memory_while_they_are_at_hand(tmp_path: Path) -> None:
    index = index_of(tmp_path, {"a.jsonl": ["some words to read"] * 40})
    words = Words()
    rows = LazyRows(index, words, 8, 64)
    rows.assemble(np.array([1, 2]))
    known = len(words.texts)
    rows.spans(np.array([2, 1]))
    assert len(words.texts) == known
    rows.assemble(np.array([3]))
    assert len(words.texts) > known


def test_an_index_is_made_once_and_a_copy_of_the_corpus_has_the_same_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"a.jsonl": ["one text", "another"], "b.jsonl": ["a third"]}
    first = index_of(tmp_path / "1", files)
    monkeypatch.setattr(lazy_index, "_index_part", None)
    again = build_index("web", first.files, first.source, tmp_path / "1" / "cache")  # nothing is read
    assert again.folder == first.folder
    monkeypatch.undo()
    copy = index_of(tmp_path / "2", files)
    assert copy.fingerprint == first.fingerprint and copy.folder != first.folder
    other = index_of(tmp_path / "3", {**files, "b.jsonl": ["a fourth"]})
    assert other.fingerprint != first.fingerprint


def test_a_killed_indexing_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, source = write(tmp_path / "corpus", {"a.jsonl": ["a b"] * 9, "b.jsonl": ["c d"] * 5})
    done = []

    def interrupted(function: Any, tasks: Any) -> Any:
        done.append(function(tasks[0]))
        raise KeyboardInterrupt

    divide, size = lazy_index.divide, max(file.size_bytes for file in found)  # one part for each file
    monkeypatch.setattr(lazy_index, "divide", lambda *a, **k: divide(*a, part_bytes=size, **{**k, "each": None}))
    with pytest.raises(KeyboardInterrupt):
        build_index("web", found, source, tmp_path / "cache", each=interrupted)
    read: list[str] = []
    original = lazy_index.read_part

    def noting(part: Any, *rest: Any) -> Any:
        read.append(part.name)
        return original(part, *rest)

    monkeypatch.setattr(lazy_index, "read_part", noting)
    index = build_index("web", found, source, tmp_path / "cache")
    assert index.documents == 14 and not any("a.jsonl" in name for name in read)
    assert not (index.folder / "parts").exists()
    expected = by_hand(["a b"] * 9 + ["c d"] * 5, 10)
    found_rows = LazyRows(index, Words(), 8, 10).assemble(np.arange(len(expected)))
    for k, (ids, _) in enumerate(expected):
        assert found_rows.targets[k, : len(ids) - 1].tolist() == ids[1:]


def test_a_block_is_chosen_so_that_nearly_every_row_is_filled(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    written = ["".join(" " + "x" * n for n in rng.integers(1, 9, size)) for size in rng.integers(20, 300, 400)]
    index = index_of(tmp_path, {"a.jsonl": written})
    length = 128
    chosen = choose_block(index, Words(), length)
    rows = LazyRows(index, Words(), length, chosen.block_bytes)
    spans = rows.spans(np.arange(rows.count))
    filled = np.bincount(spans.row, weights=spans.weight, minlength=rows.count) == length
    assert 0.6 < filled.mean() < 0.95
    padded = 1 - spans.weight.sum() / (rows.count * length)
    assert padded == pytest.approx(chosen.padding_share, abs=0.02)
    total = sum(len(split(text)) + 1 for text in written)
    cut = 1 - spans.weight.sum() / total
    assert cut == pytest.approx(chosen.cut_share, abs=0.04)
    assert chosen.bytes_per_token == pytest.approx(index.bytes / total, rel=0.1)
    note = cost_note(index, chosen, length)
    assert "never trained on" in note and f"{chosen.padding_share:.1%}" in note and "one file" not in note
    wider = choose_block(index, Words(), length, fill=1.0)
    assert wider.block_bytes >= chosen.block_bytes and wider.padding_share <= chosen.padding_share


def test_a_file_that_allows_no_seek_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "_LONG_SEEK_BYTES", 1000)
    text = " ".join(np.random.default_rng(0).integers(0, 10**9, 1000).astype(str).tolist())
    index = index_of(tmp_path, {"a.jsonl.gz": [text] * 12})
    [size] = index.stretches["size_bytes"].tolist()
    assert size > 1000
    note = cost_note(index, choose_block(index, Words(), 64), 64)
    assert f"a seek may cost one file of up to {human_bytes(size)}" in note


def test_one_document_larger_than_many_blocks(tmp_path: Path) -> None:
    text = "word " * 40_000
    index = index_of(tmp_path, {"a.jsonl": ["first", text, "last"]})
    rows = LazyRows(index, Words(), 32, 200)
    block = rows.assemble(np.array([500, 1, 999]))
    assert (block.tokens > 0).all() and (block.spans.document == 1).all()
    assert rows.origin_of_document(2).start == len("first") + 1 + len(text) + 1


@pytest.mark.parametrize("kind", ["parquet", "text"])
def test_other_formats_are_indexed_by_row_group_or_file(tmp_path: Path, kind: str) -> None:
    written = [f"document {k} of words" for k in range(40)]
    folder = tmp_path / "corpus"
    folder.mkdir()
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": written}), folder / "a.parquet", row_group_size=7)
    else:
        for k, text in enumerate(written):
            (folder / f"{k:02d}.txt").write_text(text)
    source = SourceSpec(path=[str(folder)])
    index = build_index("web", list_files(source), source, tmp_path / "cache")
    assert index.stretches["size_bytes"].size == (6 if kind == "parquet" else 40)
    expected = by_hand(written, 50)
    rows = LazyRows(index, Words(), 64, 50)
    found = rows.assemble(np.arange(rows.count))
    for k, (ids, _) in enumerate(expected):
        assert found.targets[k, : len(ids) - 1].tolist() == ids[1:]
    assert rows.origin_of_document(17).row == (18 if kind == "parquet" else 1)


def test_mistakes_are_told(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text('{"text": "one"}\nnot json\n')
    source = SourceSpec(path=[str(tmp_path / "corpus")])
    with pytest.raises(UserError, match=r"1 of 2 rows cannot be read and data\.bad_rows allows 0\.01"):
        build_index("web", list_files(source), source, tmp_path / "cache")
    index = build_index("web", list_files(source), source, tmp_path / "cache", bad_rows=0.5)
    assert (index.documents, index.bad_rows) == (1, 1)
    (tmp_path / "corpus" / "a.jsonl").write_text('{"text": "changed"}\n')
    with pytest.raises(UserError, match="changed since it was listed"):
        LazyRows(index, Words(), 4, 10).assemble(np.array([0]))
    (index.folder / "ends.bin").write_bytes(b"12345")
    with pytest.raises(UserError, match="5 bytes instead of 8"):
        Index(index.folder, index.files, index.source)
    (index.folder / "index.json").write_text("{}")
    with pytest.raises(UserError, match="not a whole index"):
        Index(index.folder, index.files, index.source)
    talk = SourceSpec(path=[str(tmp_path)], messages_field="messages")
    with pytest.raises(UserError, match="conversations are masked when data is prepared"):
        build_index("web", [], talk, tmp_path / "cache")
    empty = index_of(tmp_path / "empty", {"a.jsonl": ["  "]})
    with pytest.raises(UserError, match="'web' holds no text"):
        choose_block(empty, Words(), 8)
