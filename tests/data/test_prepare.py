"""Files become stores once, survive kills, and every token leads back to its row."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash

from bessemer.data.prepare import Prepared, prepare
from bessemer.data.store import TokenStore
from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.spec.data import DataSpec, SourceSpec, TokenizerSpec


def rows_of(count: int, topic: str = "water") -> list[str]:
    return [f"{topic} {i}: " + "the kettle sings\n" * (i % 7 + 1) for i in range(count)]


def write_rows(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(cache: Path, validation: float = 0.1, vocab: int = 300, seed: int = 0, **sources: Path) -> Prepared:
    data = DataSpec(
        sources={name: SourceSpec(path=[str(path)]) for name, path in sources.items()}, validation=validation
    )
    return prepare(data, TokenizerSpec(), cache, vocab, seed)


def texts_of(prepared: Prepared, store: TokenStore) -> list[str]:
    """Decoded documents, each of which must end with the one end of document it holds."""
    texts = []
    for i in range(store.documents):
        origin = store.origin_of_document(i)
        *tokens, end = store.slice(origin.start, origin.stop).tolist()
        assert end == prepared.tokenizer.eos_id and end not in tokens
        texts.append(prepared.tokenizer.decode(tokens))
    return texts


def state(prepared: Prepared) -> dict[str, str]:
    stores = {f"{name} train": store for name, store in prepared.train.items()}
    stores |= {f"{name} validation": store for name, store in prepared.validation.items()}
    return {name: store.fingerprint for name, store in stores.items()}


def test_every_document_comes_back_with_its_row(tmp_path: Path) -> None:
    texts = [*rows_of(100), "", "spells <|endoftext|> itself", "żółw \0 🐢"]
    path = write_rows(tmp_path / "a.jsonl", texts)
    prepared = run(tmp_path / "cache", web=path)
    found = {}
    for store in (prepared.train["web"], prepared.validation["web"]):
        assert store.tokenizer_fingerprint == prepared.tokenizer.fingerprint
        for i, text in enumerate(texts_of(prepared, store)):
            origin = store.origin_of_document(i)
            assert origin.file == str(path)
            assert origin.document_id == xxhash.xxh3_64_hexdigest(text.encode())
            found[origin.row] = text
    assert found == {row: text for row, text in enumerate(texts, start=1) if text}
    total = sum(store.text_bytes for store in (prepared.train["web"], prepared.validation["web"]))
    assert total == sum(len(text.encode()) for text in texts)


def test_equal_documents_fall_on_one_side(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows_of(60) * 2)
    prepared = run(tmp_path / "cache", validation=0.3, web=path)
    train = texts_of(prepared, prepared.train["web"])
    held_out = texts_of(prepared, prepared.validation["web"])
    assert not set(train) & set(held_out)
    assert 10 < len(held_out) < 70
    assert len(train) + len(held_out) == 120
    other = run(tmp_path / "cache", validation=0.3, seed=1, web=path)
    assert set(texts_of(other, other.validation["web"])) != set(held_out)


def test_held_out_text_does_not_train_the_tokenizer(tmp_path: Path) -> None:
    texts = rows_of(50)
    secret = min(texts, key=lambda text: xxhash.xxh3_64_intdigest(text.encode(), 0))
    plain = run(tmp_path / "plain", validation=0.01, web=write_rows(tmp_path / "a.jsonl", texts))
    assert texts_of(plain, plain.validation["web"]) == [secret]
    rest = [text for text in texts if text != secret]
    without = run(tmp_path / "without", validation=0, web=write_rows(tmp_path / "b.jsonl", rest))
    assert plain.tokenizer.fingerprint == without.tokenizer.fingerprint


@pytest.mark.parametrize("validation", [0.0001, 0.9999])
def test_a_tiny_source_has_something_on_both_sides(tmp_path: Path, validation: float) -> None:
    prepared = run(tmp_path / "cache", validation, web=write_rows(tmp_path / "a.jsonl", rows_of(4)))
    sides = {prepared.train["web"].documents, prepared.validation["web"].documents}
    assert sides == {1, 3}


def test_a_single_document_is_trained_on(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", ["a lonely document " * 20])
    many = write_rows(tmp_path / "many.jsonl", rows_of(40))
    prepared = run(tmp_path / "cache", 0.1, one=one, many=many)
    assert prepared.train["one"].documents == 1
    assert list(prepared.validation) == ["many"]
    with pytest.raises(UserError, match=r"data\.validation: no source has two different documents.*to 0"):
        run(tmp_path / "cache", 0.1, one=one)
    assert run(tmp_path / "cache", 0, one=one).validation == {}


def test_a_second_call_reuses_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows_of(40))
    first = run(tmp_path / "cache", web=path)
    monkeypatch.setattr("bessemer.data.prepare._build", lambda *rest: pytest.fail("built again"))
    second = run(tmp_path / "cache", web=path)
    assert (second.folder, state(second)) == (first.folder, state(first))
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint


def test_whatever_the_tokens_depend_on_makes_another_folder(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows_of(40))
    folders = {run(tmp_path / "cache", web=path).folder}
    folders.add(run(tmp_path / "cache", web=path, vocab=301).folder)
    folders.add(run(tmp_path / "cache", web=path, seed=1).folder)
    folders.add(run(tmp_path / "cache", web=path, validation=0.2).folder)
    folders.add(run(tmp_path / "cache", code=path).folder)
    write_rows(path, rows_of(40, topic="steam"))
    folders.add(run(tmp_path / "cache", web=path).folder)
    assert len(folders) == 6


def test_a_given_tokenizer_is_used(tmp_path: Path) -> None:
    Tokenizer.train(rows_of(40), 270, eos="</s>").save(tmp_path / "tokenizer.json")
    path = write_rows(tmp_path / "a.jsonl", rows_of(40))
    data = DataSpec(sources={"web": SourceSpec(path=[str(path)])}, validation=0.1)
    prepared = prepare(data, TokenizerSpec(path=str(tmp_path / "tokenizer.json")), tmp_path / "cache", 999, 0)
    assert (prepared.tokenizer.eos, prepared.tokenizer.vocab_size) == ("</s>", 270)
    assert len(texts_of(prepared, prepared.train["web"])) > 30


def test_the_same_documents_give_the_same_tokens_in_any_format(tmp_path: Path) -> None:
    plain = run(tmp_path / "cache", web=write_rows(tmp_path / "a.jsonl", rows_of(60)))
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert state(run(tmp_path / "cache", web=packed)) == state(plain)


def test_long_documents_are_encoded_in_pieces_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["".join(rows_of(200, topic)) for topic in ("water", "steam", "steel")]
    path = write_rows(tmp_path / "a.jsonl", texts)
    whole = run(tmp_path / "whole", web=path)
    monkeypatch.setattr("bessemer.data.prepare._PIECE_CHARS", 500)
    monkeypatch.setattr("bessemer.data.prepare._BATCH_CHARS", 1700)
    assert state(run(tmp_path / "pieces", web=path)) == state(whole)


def test_the_tokenizer_sample_is_bounded_and_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topics = [f"topic{i:03}" for i in range(100)]
    path = write_rows(tmp_path / "a.jsonl", [f"{topic} " + "x" * 990 for topic in topics])
    seen: list[str] = []
    train = Tokenizer.train

    def spy(texts: Any, vocab: int, eos: str) -> Tokenizer:
        seen.extend(texts)
        return train(seen, vocab, eos)

    monkeypatch.setattr(Tokenizer, "train", spy)
    data = DataSpec(sources={"web": SourceSpec(path=[str(path)])}, validation=0.01)
    prepare(data, TokenizerSpec(sample=10_000), tmp_path / "cache", 300, 0)
    assert 9_000 <= sum(map(len, seen)) <= 11_000
    assert {text[5] for text in seen} == set("0") and len({text[6] for text in seen}) >= 9


def test_a_bad_row_names_its_source_and_leaves_no_folder(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows_of(3))
    path.write_text(path.read_text() + '{"body": "b"}\n')
    with pytest.raises(UserError, match=r"source 'web': .*a\.jsonl:4: no field 'text'"):
        run(tmp_path / "cache", web=path)
    assert [entry.name for entry in (tmp_path / "cache").iterdir() if not entry.name.endswith(".lock")] == []


def test_a_source_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"source 'web': no text in 1 files, the first being .*a\.jsonl"):
        run(tmp_path / "cache", web=write_rows(tmp_path / "a.jsonl", ["", " \n"]))


def test_a_damaged_cache_says_what_to_delete(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows_of(40))
    first = run(tmp_path / "cache", web=path)
    with (first.folder / "web.train.bin").open("r+b") as file:
        file.truncate(10)
    with pytest.raises(UserError, match=f"web.train.bin .*delete the folder {first.folder} and run again"):
        run(tmp_path / "cache", web=path)
    shutil.rmtree(first.folder)
    assert state(run(tmp_path / "cache", web=path)) == state(first)


def test_files_that_change_while_they_are_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows_of(40))
    train = Tokenizer.train

    def touch(texts: Any, vocab: int, eos: str) -> Tokenizer:
        os.utime(path, ns=(1, 1))
        return train(texts, vocab, eos)

    monkeypatch.setattr(Tokenizer, "train", touch)
    with pytest.raises(UserError, match="files changed while they were read"):
        run(tmp_path / "cache", web=path)


def test_progress_lines_are_short_and_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bessemer.data.prepare._BATCH_CHARS", 100)
    clock = iter(range(10**6))
    monkeypatch.setattr(
        "bessemer.data.prepare.time", type("Clock", (), {"monotonic": lambda: next(clock) / 10})
    )
    said: list[str] = []
    path = write_rows(tmp_path / "a.jsonl", rows_of(100))
    data = DataSpec(sources={"web": SourceSpec(path=[str(path)])}, validation=0.1)
    prepare(data, TokenizerSpec(), tmp_path / "cache", 300, 0, said.append)
    rates = [line for line in said if line.startswith("tokenizing web ")]
    assert 5 <= len(rates) <= 11  # the clock ticks 0.1 s per document
    assert all(" % " in line and " MB/s eta " in line for line in rates)


SCRIPT = """
import sys
from pathlib import Path
from bessemer.data.prepare import prepare
from bessemer.spec.data import DataSpec, SourceSpec, TokenizerSpec
data = DataSpec(sources={"web": SourceSpec(path=[sys.argv[1]])}, validation=0.1)
print(prepare(data, TokenizerSpec(sample=200_000), Path(sys.argv[2]), 300, 0).train["web"].fingerprint)
"""


def start(path: Path, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", SCRIPT, path, cache], stdout=subprocess.PIPE, text=True)


def corpus(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "a.jsonl", ["".join(rows_of(200, f"topic {i}")) for i in range(150)])


def test_a_killed_process_leaves_nothing_mistaken_for_good(tmp_path: Path) -> None:
    path, cache = corpus(tmp_path), tmp_path / "cache"
    process = start(path, cache)
    while not any(part.stat().st_size for part in cache.glob("*.partial-*/web.train.bin")):
        assert process.poll() is None, "it finished before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(cache.glob("*.partial-*"))
    # Work on other data sweeps it up as well as the same work begun again.
    run(cache, web=write_rows(tmp_path / "b.jsonl", rows_of(40)))
    assert not list(cache.glob("*.partial-*"))
    again, fresh = start(path, cache).communicate()[0], start(path, tmp_path / "fresh").communicate()[0]
    assert again == fresh != ""


def test_two_processes_at_once_both_end_well(tmp_path: Path) -> None:
    path, cache = corpus(tmp_path), tmp_path / "cache"
    first, second = start(path, cache), start(path, cache)
    outputs = [process.communicate()[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert outputs[0] == outputs[1] != ""
    assert sorted(entry.suffix for entry in cache.iterdir()) == ["", ".lock"]


def test_without_file_locks_both_still_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*rest: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    path = write_rows(tmp_path / "a.jsonl", rows_of(40))
    train = Tokenizer.train
    inner: list[Prepared] = []

    def race(texts: Any, vocab: int, eos: str) -> Tokenizer:
        monkeypatch.setattr(Tokenizer, "train", train)
        inner.append(run(tmp_path / "cache", web=path))  # another process overtakes this one
        return train(texts, vocab, eos)

    monkeypatch.setattr(Tokenizer, "train", race)
    outer = run(tmp_path / "cache", web=path)
    assert state(outer) == state(inner[0])
    assert not list((tmp_path / "cache").glob("*.partial-*"))
