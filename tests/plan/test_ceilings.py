"""What `bessemer bench` keeps: the same after a round trip, one file for each kind of machine, a table to read."""

import stat
from pathlib import Path

import pytest

from bessemer.errors import UserError
from bessemer.plan.hardware import HEADER, CeilingReading, Ceilings, ceilings_path, load_ceilings, store_ceilings

READINGS = (
    CeilingReading("matmul_bf16", "8192x8192x8192", 809e12, "FLOP/s"),
    CeilingReading("matmul_bf16", "32768x2048x2048", 742e12, "FLOP/s"),
    CeilingReading("matmul_fp8", "8192x8192x8192", 1529e12, "FLOP/s"),
    CeilingReading("matmul_tf32", "8192x8192x8192", 400e12, "FLOP/s"),
    CeilingReading("matmul_fp32", "8192x8192x8192", 52e12, "FLOP/s"),
    CeilingReading("attention_both_64", "4x4096x32x64", 235e12, "FLOP/s", "flash"),
    CeilingReading("attention_both_64", "4x4096x32x64", 376e12, "FLOP/s", "cudnn"),
    CeilingReading("copy", "1024 MiB", 4.23e12, "B/s", "read and written"),
    CeilingReading("disk_write", "512 MiB", 0.4e9, "B/s"),
    CeilingReading("all_reduce", "", None, "B/s", "one GPU: nothing to connect"),
)
H200 = Ceilings("cuda", "NVIDIA H200", 1, "2026-11-16T09:00:00+00:00", {"torch": "2.11.0"}, READINGS)


def test_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "kept.json"
    assert load_ceilings(path) is None
    store_ceilings(H200, path)
    assert load_ceilings(path) == H200 and Ceilings.from_json(H200.to_json()) == H200


def test_the_roofline_is_the_best_of_each() -> None:
    assert H200.best() == {
        "matmul_bf16": 809e12, "matmul_fp8": 1529e12, "matmul_tf32": 400e12, "matmul_fp32": 52e12,
        "attention_both_64": 376e12, "copy": 4.23e12, "disk_write": 0.4e9,
    }  # fmt: skip
    assert H200.matmul() == {"bf16": 809e12, "fp8": 1529e12, "tf32": 400e12, "fp32": 52e12}


def test_the_table_has_the_share_of_the_data_sheet() -> None:
    rows = [H200.line(reading).split() for reading in READINGS]
    assert rows[0] == ["matmul", "bf16", "8192x8192x8192", "809", "TFLOP/s", "82%"]
    assert rows[2][-3:] == ["1,529", "TFLOP/s", "77%"]  # of 1979, not of the bf16 peak
    assert rows[3][-1] == "81%" and rows[4][-1] == "TFLOP/s"  # the sheet says nothing of plain fp32
    assert rows[6][-4:] == ["376", "TFLOP/s", "38%", "cudnn"]
    assert H200.line(READINGS[7]).split()[3:6] == ["4.23", "TB/s", "88%"]
    assert rows[8][-2:] == ["400", "MB/s"]
    assert H200.line(READINGS[9]).split()[:2] == ["all", "reduce"] and rows[9][-1] == "connect"
    ends = {H200.line(reading).index("FLOP/s") for reading in READINGS if reading.unit == "FLOP/s"}
    assert ends == {HEADER.index("rate") + len("rate") - len("FLOP/s")}


def test_a_cpu_with_a_gpus_name_has_no_data_sheet() -> None:
    cpu = Ceilings("cpu", "NVIDIA H200", 2, "2026-11-16", {}, READINGS)
    assert "%" not in cpu.line(READINGS[0])


def test_each_kind_of_machine_has_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = ceilings_path("Intel(R) Xeon(R) CPU @ 2.0/3 GHz", 8, "2.11.0+cu130")
    assert path == tmp_path / "bessemer/machines/Intel-R-Xeon-R-CPU-2.0-3-GHz-x8-torch-2.11.0+cu130.json"
    others = [
        ceilings_path("A", 1, "2"),
        ceilings_path("A", 2, "2"),
        ceilings_path("A", 1, "3"),
        ceilings_path("B", 1, "2"),
    ]
    assert len(set(others)) == 4
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert ceilings_path("A", 1, "2").is_relative_to(Path.home() / ".cache")


def test_a_folder_that_cannot_be_written_is_said_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"XDG_CACHE_HOME.*--no-save"):
        store_ceilings(H200, tmp_path / "file" / "kept.json")


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    store_ceilings(H200, path)
    path.chmod(stat.S_IRUSR)  # replaced, not written into
    store_ceilings(Ceilings("cpu", "x", 1, "", {}), path)
    assert load_ceilings(path) == Ceilings("cpu", "x", 1, "", {}) and [p.name for p in tmp_path.iterdir()] == [
        "kept.json"
    ]
