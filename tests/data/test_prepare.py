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

import bessemer.data.prepare as prepare_module
from bessemer.data.curate.engine import Meter
from bessemer.data.prepare import Prepared, prepare
from bessemer.data.store.token_store import TokenStore
from bessemer.data.tokenizer.tokenizer import Tokenizer
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


def flip_bit(path: Path, at: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 4
    path.write_bytes(data)


def test_files_that_are_not_utf8_or_cannot_be_reached_are_warned_about(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for i in range(4):
        (data / f"{i}.txt").write_bytes(f"{i} été à la façade".encode("latin-1" if i else "utf-8"))
    (data / "gone.txt").symlink_to("/nowhere/gone.txt")
    made, cached = (run(tmp_path / "cache", notes=data) for _ in range(2))
    skipped, undecodable = made.notes
    assert "'notes': skipped" in skipped and f"{data}/gone.txt is a symbolic link to /nowhere/gone.txt" in skipped
    assert "'notes': 3 documents are not valid UTF-8" in undecodable
    assert f"{data}/1.txt: not UTF-8 (byte 2)" in undecodable
    assert cached.notes == made.notes


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
    monkeypatch.setattr("bessemer.data.prepare._Job", lambda *rest: pytest.fail("built again"))
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
    cuts: list[int] = []
    cut = Tokenizer.cut

    def counted(self: Tokenizer, text: str, size: int) -> Any:
        pieces = list(cut(self, text, size))
        cuts.append(len(pieces))
        return iter(pieces)

    monkeypatch.setattr(Tokenizer, "cut", counted)
    monkeypatch.setattr("bessemer.data.tokenizer.encode._PIECE_CHARS", 500)
    monkeypatch.setattr("bessemer.data.tokenizer.encode._BATCH_CHARS", 1700)
    assert state(run(tmp_path / "pieces", web=path)) == state(whole)
    assert min(cuts) > 5


@pytest.mark.parametrize("part", [64 << 20, 12_000])
def test_the_tokenizer_sample_is_bounded_and_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    topics = [f"topic{i:03}" for i in range(100)]
    path = write_rows(tmp_path / "a.jsonl", [f"{topic} " + "x" * 990 for topic in topics])
    seen: list[str] = []
    train = Tokenizer.train

    def spy(texts: Any, *rest: Any, **more: Any) -> Tokenizer:
        seen.extend(texts)
        return train(seen, *rest, **more)

    monkeypatch.setattr(Tokenizer, "train", spy)
    data = DataSpec(sources={"web": SourceSpec(path=[str(path)])}, validation=0.01, part=part)
    prepare(data, TokenizerSpec(sample=10_000), tmp_path / "cache", 300, 0)
    assert 9_000 <= sum(map(len, seen)) <= 11_000
    assert {text[5] for text in seen} == set("0") and len({text[6] for text in seen}) >= 9


def test_the_sample_reads_only_so_much_of_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of a thousandth must not cost a second reading of the corpus."""
    path = write_rows(tmp_path / "a.jsonl", [f"row {i} " + "x" * 990 for i in range(400)])
    read: list[int] = []
    sample = prepare_module._Job._sample

    def watched(self: Any, sources: Any) -> Any:
        monkeypatch.setattr(self.corpus, "documents", counted(self.corpus.documents))
        return sample(self, sources)

    def counted(documents: Any) -> Any:
        def each(state: Any) -> Any:
            for found in documents(state):
                read.append(found[0])
                yield found

        return each

    monkeypatch.setattr(prepare_module._Job, "_sample", watched)
    data = DataSpec(sources={"web": SourceSpec(path=[str(path)])}, validation=0, part=50_000)
    prepare(data, TokenizerSpec(sample=4_000), tmp_path / "cache", 257, 0)
    assert 0.05 * 400 <= len(read) <= 0.25 * 400  # 16 times the hundredth that is wanted


def test_a_bad_row_names_its_source_and_what_stays_is_for_going_on(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows_of(3))
    whole = path.read_text()
    path.write_text(whole + '{"body": "b"}\n')
    with pytest.raises(UserError, match=r"source 'web': .*a\.jsonl:4: no field 'text'"):
        run(tmp_path / "cache", web=path)
    left = {entry.name for entry in (tmp_path / "cache").iterdir() if not entry.name.endswith(".lock")}
    assert {name.partition(".")[2] for name in left - {"steps", "copies"}} == {"partial"}
    path.write_text(whole)
    prepared = run(tmp_path / "cache", web=path)
    assert {name for name in left if name.startswith(prepared.folder.name)} == set()  # other files, other name
    assert state(prepared) == state(run(tmp_path / "fresh", web=path))


def test_a_source_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"source 'web': no text in 1 files, the first being .*a\.jsonl"):
        run(tmp_path / "cache", web=write_rows(tmp_path / "a.jsonl", ["", " \n"]))


def test_a_damaged_cache_says_what_to_delete(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows_of(40))
    first = run(tmp_path / "cache", web=path)
    with (first.folder / "web.train.00000.bin").open("r+b") as file:
        file.truncate(10)
    damaged = run(tmp_path / "cache", web=path).train["web"]  # shards are opened when they are first read
    with pytest.raises(
        UserError, match=f"web.train.00000.bin.*delete the folder {first.folder} and prepare the data again"
    ):
        damaged.slice(0, 5)
    for name in ("web.train.00000.json", "prepared.json", "tokenizer.json"):
        whole = (first.folder / name).read_bytes()
        (first.folder / name).write_text("{}" if name == "prepared.json" else "{")
        with pytest.raises(UserError, match=rf"{name}.* delete the folder {first.folder} and prepare the data again"):
            run(tmp_path / "cache", web=path)
        (first.folder / name).unlink()
        with pytest.raises(UserError, match=rf"{name}.* delete the folder {first.folder} and prepare the data again"):
            run(tmp_path / "cache", web=path)
        (first.folder / name).write_bytes(whole)
    shutil.rmtree(first.folder)
    assert state(run(tmp_path / "cache", web=path)) == state(first)


@pytest.mark.parametrize(
    ("changed_in", "told"),
    [
        ("Tokenizer.train", r"a\.jsonl: cannot be read \(it has changed since it was listed; run again"),
        ("tokenize_part", "files changed while they were read; run again when they are complete"),
    ],
)
def test_files_that_change_while_they_are_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed_in: str, told: str
) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows_of(40))
    unchanged = path.stat().st_mtime_ns
    genuine = Tokenizer.train if changed_in == "Tokenizer.train" else prepare_module.tokenize_part

    def touch(*rest: Any, **more: Any) -> Any:
        result = genuine(*rest, **more)
        os.utime(path, ns=(1, 1))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(f"bessemer.data.prepare.{changed_in}", touch)
        with pytest.raises(UserError, match=told):
            run(tmp_path / "cache", web=path)
    assert not list((tmp_path / "cache").glob("*/prepared.json"))
    os.utime(path, ns=(unchanged, unchanged))
    assert state(run(tmp_path / "cache", web=path)) == state(run(tmp_path / "fresh", web=path))


def test_a_kill_while_refused_work_is_deleted_leaves_nothing_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows_of(40))
    unchanged = path.stat().st_mtime_ns
    tokenize_part = prepare_module.tokenize_part

    def touch(task: Any) -> int:
        tokens = tokenize_part(task)
        os.utime(path, ns=(1, 1))
        return tokens

    def killed(folder: Path) -> None:
        for file in folder.rglob("*.json"):
            file.unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "tokenize_part", touch)
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cache", web=path)
    os.utime(path, ns=(unchanged, unchanged))  # as the files were, so the same data
    assert state(run(tmp_path / "cache", web=path)) == state(run(tmp_path / "fresh", web=path))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("000003.train.json", marks=pytest.mark.slow), "000003.train.bin",
        pytest.param("000003.done", marks=pytest.mark.slow), "../tokenizer.json",
    ],
)  # fmt: skip
def test_what_was_damaged_while_the_job_was_down_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows_of(100))
    data = DataSpec(sources={"web": SourceSpec(path=[str(path)])}, validation=0.1, part=300)

    def killed(*rest: Any) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "merge", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(data, TokenizerSpec(), tmp_path / "cache", 300, 0)
    [parts] = (tmp_path / "cache").glob("*.partial/parts")
    flip_bit(parts / name)
    again, fresh = (prepare(data, TokenizerSpec(), tmp_path / which, 300, 0) for which in ("cache", "fresh"))
    for file in again.folder.iterdir():
        assert file.read_bytes() == (fresh.folder / file.name).read_bytes()


def test_progress_lines_are_short_and_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(prepare_module, "Meter", lambda say: Meter(say, lambda: next(clock) / 10))
    said: list[str] = []
    path = write_rows(tmp_path / "a.jsonl", rows_of(100))
    data = DataSpec(sources={"web": SourceSpec(path=[str(path)])}, validation=0.1, part=300)
    prepare(data, TokenizerSpec(), tmp_path / "cache", 300, 0, said.append)
    [report] = (tmp_path / "cache").glob("*/report.json")
    parts = json.loads(report.read_text())["sources"]["web"]["parts"]
    assert parts > 20
    for what in ("reading", "tokenizing"):
        rates = [line for line in said if line.startswith(f"{what} ")]
        assert parts // 10 - 1 <= len(rates) <= parts // 10 + 1  # the clock ticks 0.1 s per part
        assert all(" % " in line and " MB/s eta " in line and len(line) < 60 for line in rates)
    training = [line.removeprefix("training a tokenizer of 300 tokens") for line in said if "tokenizer" in line]
    assert training[0] == " on at most 64 MB of text" and training[-1] == ": choosing them"
    assert len(training) > 2 and all(line.startswith(": reading ") and " % " in line for line in training[1:-1])


def test_progress_over_empty_files_has_no_rate_to_divide_by() -> None:
    said: list[str] = []
    clock = iter([0.0, 0.0, 2.0, 4.0])
    meter = Meter(said.append, lambda: next(clock))
    meter.start("reading", 4_000_000)
    meter.advance(0)
    meter.advance(2_000_000)
    assert said == ["reading 0 % 0.0 MB/s", "reading 50 % 0.5 MB/s eta 4 s"]


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
    while not list(cache.glob("*.partial/parts/*.train.bin")):
        assert process.poll() is None, "it finished before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    [partial] = cache.glob("*.partial")
    assert not partial.with_suffix("").exists()
    trained = (partial / "tokenizer.json").stat().st_mtime_ns
    # Work on other data leaves it for going on with.
    run(cache, web=write_rows(tmp_path / "b.jsonl", rows_of(40)))
    assert partial.exists()
    again, fresh = start(path, cache).communicate()[0], start(path, tmp_path / "fresh").communicate()[0]
    assert again == fresh != ""
    assert not list(cache.glob("*.partial*"))
    done = partial.with_suffix("")
    assert (done / "tokenizer.json").stat().st_mtime_ns == trained  # what was finished was not done again
    for file in done.iterdir():
        assert file.read_bytes() == (tmp_path / "fresh" / done.name / file.name).read_bytes()


def test_two_processes_at_once_both_end_well(tmp_path: Path) -> None:
    path, cache = corpus(tmp_path), tmp_path / "cache"
    first, second = start(path, cache), start(path, cache)
    outputs = [process.communicate()[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert outputs[0] == outputs[1] != ""
    kept = {entry.name for entry in cache.iterdir()} - {"steps", "copies"}
    assert sorted(Path(name).suffix for name in kept) == ["", ".lock"]


def test_without_file_locks_both_still_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*rest: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    path = write_rows(tmp_path / "a.jsonl", rows_of(40))
    train = Tokenizer.train
    inner: list[Prepared] = []

    def race(*rest: Any, **more: Any) -> Tokenizer:
        monkeypatch.setattr(Tokenizer, "train", train)
        inner.append(run(tmp_path / "cache", web=path))  # another process overtakes this one
        return train(*rest, **more)

    monkeypatch.setattr(Tokenizer, "train", race)
    outer = run(tmp_path / "cache", web=path)
    assert state(outer) == state(inner[0])
    assert not list((tmp_path / "cache").glob("*.partial*"))
