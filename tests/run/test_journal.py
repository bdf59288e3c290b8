"""Journals: what was appended is read back, whatever a kill or a power cut left at the end."""

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bessemer.run.journal
from bessemer.run.journal import Journal, find_end, json_ready, last_record, last_records, read_records, to_number

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
records = st.dictionaries(st.text(max_size=5), values, max_size=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics" / "steps.jsonl"


def write(path: Path, *steps: int) -> None:
    journal = Journal(path)
    for step in steps:
        journal.append({"step": step})
    journal.close()


def steps_in(path: Path) -> list[int]:
    return [record["step"] for record in read_records(path)]


@given(st.lists(records, max_size=5))
@settings(max_examples=50)
def test_what_is_appended_is_read_back(tmp_path_factory: pytest.TempPathFactory, written: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("journal") / "x.jsonl"
    journal = Journal(path)
    for record in written:
        journal.append(record)
    journal.close()
    assert list(read_records(path)) == written
    assert last_record(path) == (written[-1] if written else None)
    assert path.read_bytes().count(b"\n") == len(written)  # one line each, whatever is in the text


def test_numbers_that_json_lacks_become_words_and_numbers_again(path: Path) -> None:
    journal = Journal(path)
    journal.append({"loss": math.nan, "all": [math.inf, {"low": -math.inf}], "pair": (1, 2)})
    (line,) = path.read_text().splitlines()
    found = json.loads(line, parse_constant=pytest.fail)  # strict JSON, for any reader
    assert found == {"loss": "nan", "all": ["inf", {"low": "-inf"}], "pair": [1, 2]}
    assert math.isnan(to_number(found["loss"]) or 0)
    assert to_number(found["all"][0]) == math.inf


@pytest.mark.parametrize(
    ("value", "result"), [(1, 1.0), (2.5, 2.5), ("inf", math.inf), (None, None), (True, None), ("x", None), ([1], None)]
)
def test_number(value: Any, result: float | None) -> None:
    assert to_number(value) == result


def test_text_of_any_kind_does_not_stop_a_run(path: Path) -> None:
    journal = Journal(path)
    odd_name = os.fsdecode(b"data/\xff\xfe.txt")  # a file name that is no UTF-8
    journal.append({"file": odd_name, "text": "a\nb\u2028c\0", "where": Path("x/y")})
    assert last_record(path) == {"file": odd_name, "text": "a\nb\u2028c\0", "where": "x/y"}


@pytest.mark.parametrize("torn", [b"{", b'{"step": 3', b'{"step": 3, "text": "' + b"x" * 20_000, b"\0" * 5000])
def test_a_torn_last_line_is_not_read_and_is_cut_by_the_next_writer(path: Path, torn: bytes) -> None:
    write(path, 0, 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert steps_in(path) == [0, 1, 2]
    assert last_record(path) == {"step": 2}
    journal = Journal(path)
    assert path.read_bytes() == whole
    journal.append({"step": 3})
    assert steps_in(path) == [0, 1, 2, 3]


def test_a_file_that_is_all_torn(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"step": 0')
    assert last_record(path) is None and steps_in(path) == []
    write(path, 5)
    assert path.read_text() == '{"step": 5}\n'


def test_lines_that_are_no_records_are_passed_over(path: Path) -> None:
    write(path, 0)
    with path.open("ab") as file:
        file.write(b"\0\0\0\0\n[1]\n\n\xff\xfe\n5\n")
    write(path, 1)
    with path.open("ab") as file:
        file.write(b"\0\0\0\0\nnull\n")
    assert steps_in(path) == [0, 1]
    assert last_record(path) == {"step": 1}
    journal = Journal(path)
    assert journal.cut(lambda record: record["step"] < 1) == 1
    assert steps_in(path) == [0]


@pytest.mark.parametrize("length", [0, 10, 8190, 8192, 50_000])
@pytest.mark.parametrize("count", [1, 2, 30])
def test_the_last_record_of_short_and_long_lines(path: Path, length: int, count: int) -> None:
    journal = Journal(path)
    for step in range(count):
        journal.append({"step": step, "text": "x" * length})
    assert last_record(path) == {"step": count - 1, "text": "x" * length}


def test_the_last_record_of_nothing(path: Path) -> None:
    assert last_record(path) is None
    write(path)
    assert path.exists() and last_record(path) is None
    path.write_bytes(b"\n\n")
    assert last_record(path) is None


def test_a_long_file_is_not_read_whole(path: Path) -> None:
    """A file with a hole of a gigabyte takes no time when it is read from the end."""
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(2**30)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"step": 1}\n{"step": 2}\n')
    assert last_record(path) == {"step": 2}


@pytest.mark.parametrize(("below", "kept"), [(0, []), (3, [0, 1, 2]), (5, [0, 1, 2, 3, 4]), (99, [0, 1, 2, 3, 4])])
def test_cut(path: Path, below: int, kept: list[int]) -> None:
    write(path, 0, 1, 2, 3, 4)
    journal = Journal(path)
    assert journal.cut(lambda record: record["step"] < below) == 5 - len(kept)
    assert steps_in(path) == kept
    journal.append({"step": below})
    assert steps_in(path) == [*kept, below]


def test_everything_after_the_first_refused_record_goes(path: Path) -> None:
    write(path, 0, 7, 1)
    assert Journal(path).cut(lambda record: record["step"] < 5) == 2
    assert steps_in(path) == [0]


def test_a_cut_of_a_long_journal_reads_only_its_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.parent.mkdir()
    path.write_text("".join(f'{{"step": {step}, "loss": 2.5}}\n' for step in range(200_000)))
    journal, parsed = Journal(path), []
    genuine = bessemer.run.journal.parse_record
    monkeypatch.setattr(bessemer.run.journal, "parse_record", lambda line: parsed.append(1) or genuine(line))
    assert journal.cut(lambda record: record["step"] < 199_900) == 100
    assert len(parsed) < 2_000
    assert last_record(path) == {"step": 199_899, "loss": 2.5}


@given(st.lists(st.integers(0, 40_000), max_size=8), st.integers(0, 8), st.binary(max_size=5))
def test_records_from_the_end_are_those_from_the_start(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], below: int, torn: bytes
) -> None:
    path = tmp_path_factory.mktemp("journal") / "x.jsonl"
    lines = [json.dumps({"step": step, "text": "x" * length}) + "\n" for step, length in enumerate(lengths)]
    path.write_bytes("".join(lines).encode() + torn.replace(b"\n", b""))
    assert last_records(path, 99) == list(read_records(path))
    assert find_end(path, lambda record: record["step"] < below)[1] == max(0, len(lengths) - below)
    Journal(path).cut(lambda record: record["step"] < below)
    assert path.read_text() == "".join(lines[:below])


def test_a_disk_that_takes_half_a_line_leaves_no_half_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path)
    journal.append({"step": 0})
    real_write, calls = os.write, []

    def full_disk(fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, data[:4])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_disk)
        with pytest.raises(OSError, match=r"No space left.*steps.jsonl"):
            journal.append({"step": 1})
        assert len(calls) == 2
        assert path.read_text() == '{"step": 0}\n'
        assert journal.fault == f"{path}: No space left on device" and journal.size_bytes == 24
    journal.append({"step": 2})  # room again
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n'
    assert journal.fault == ""


@pytest.mark.parametrize("step", range(6))
def test_a_cut_reaches_the_records_that_wait_in_memory(path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path)
    for at in range(3):
        journal.append({"step": at})
    with monkeypatch.context() as patch:
        patch.setattr(journal, "_write", lambda _: os.read(2**20, 1))
        for at in (3, 4):
            with pytest.raises(OSError, match="Bad file"):
                journal.append({"step": at})
        assert journal.cut(lambda record: record["step"] < step) == max(0, 5 - step)
    journal.append({"step": 9})
    assert [record["step"] for record in read_records(path)] == [*range(min(step, 5)), 9]


def test_the_last_records_are_found_from_the_end(path: Path) -> None:
    journal = Journal(path)
    for step in range(3000):
        journal.append({"step": step})
    for count in (1, 32, 2999, 3000, 4000):
        assert [record["step"] for record in last_records(path, count)] == list(range(3000))[-count:]
    assert last_records(path.with_name("none"), 3) == []


def test_a_killed_writer_leaves_whole_records(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from bessemer.run.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for step in range(10**9):\n"
        "    journal.append({'step': step, 'text': 'x' * (step % 5000)})\n"
        "    if step == 300: print('far enough', flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    writer.kill()
    writer.wait()
    writer.stdout.close()
    steps = steps_in(path)
    assert len(steps) > 300 and steps == list(range(len(steps)))
    last = last_record(path)
    assert last is not None and last["step"] == steps[-1]


def test_json_ready_leaves_its_input_alone() -> None:
    record = {"loss": math.nan, 1: [2]}
    assert json_ready(record) == {"loss": "nan", "1": [2]}
    assert math.isnan(record["loss"])  # type: ignore[arg-type]
