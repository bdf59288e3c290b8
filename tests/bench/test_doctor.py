"""`bessemer doctor` on this machine, and its judgement of readings of others."""

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bessemer.bench.doctor import (
    GPU_FIELDS,
    check_network,
    check_store,
    check_variables,
    file_system,
    judge_gpus,
    judge_peers,
    judge_remapped_rows,
    judge_topology,
    output_of,
)
from bessemer.cli.main import app

HEALTHY = {
    "index": "0", "name": "NVIDIA H100", "driver_version": "570.1", "persistence_mode": "Enabled",
    "ecc.errors.uncorrected.volatile.total": "0", "clocks_event_reasons.active": "0x0000000000000000",
    "power.limit": "700.00", "power.default_limit": "700.00", "temperature.gpu": "40", "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
}  # fmt: skip


def test_this_machine(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])
    checks = json.loads(result.stdout)
    names = {check["name"] for check in checks}
    assert {"torch", "packages", "memory", "open files", "file system", "free space", "host name"} <= names
    assert result.exit_code == (1 if any(check["severity"] == "critical" for check in checks) else 0)
    assert all(check["fix"] for check in checks if check["severity"])
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_refused() -> None:
    result = CliRunner().invoke(app, ["doctor", "no-such-folder"])
    assert "no-such-folder: is not a folder" in str(result.exception)


@pytest.mark.parametrize(
    ("field", "value", "severity", "words"),
    [
        ("ecc.errors.uncorrected.volatile.total", "3", "critical", "3 uncorrected"),
        ("ecc.errors.uncorrected.volatile.total", "[N/A]", "", ""),
        ("persistence_mode", "Disabled", "note", "persistence"),
        ("clocks_event_reasons.active", "0x0000000000000040", "warning", "slowed down (0x40)"),
        ("clocks_event_reasons.active", "0x0000000000000004", "", ""),  # its power cap, which is usual under load
        ("power.limit", "400.00", "warning", "400.00 of 700.00 W"),
        ("pcie.link.width.current", "8", "warning", "8 of 16 lanes"),
    ],
)
def test_gpus(field: str, value: str, severity: str, words: str) -> None:
    row = HEALTHY | {field: value}
    problems = [check for check in judge_gpus(", ".join(row[name] for name in GPU_FIELDS)) if check.severity]
    assert [check.severity for check in problems] == ([severity] if severity else [])
    assert all(words in check.value and check.fix for check in problems)


def test_the_file_system_of_a_folder() -> None:
    mounts = "/dev/sda / ext4 rw 0 0\nhost:/x /data nfs4 rw 0 0\nnone /data/my\\040disk tmpfs rw 0 0\n"
    assert file_system(Path("/data/runs"), mounts) == "nfs4"
    assert file_system(Path("/data/my disk/a"), mounts) == "tmpfs"
    assert file_system(Path("/database"), mounts) == "ext4"


def test_a_port_in_use_and_slow_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert any(check.name == "port" and check.severity == "warning" for check in check_network(port))
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert [check.value for check in check_variables()] == ["CUDA_LAUNCH_BLOCKING=1"]


def test_a_missing_program_is_no_error() -> None:
    assert output_of("no-such-program-here") is None


def test_remapped_rows() -> None:
    checks = list(judge_remapped_rows("00:1, No, No\n00:2, Yes, No\n00:3, No, Yes\n00:4, [N/A], [N/A]\n"))
    assert [(check.name, check.severity) for check in checks] == [("GPU 1", "warning"), ("GPU 2", "critical")]


TOPOLOGY = """\
        GPU0    GPU1    GPU2    NIC0    CPU Affinity    NUMA Affinity
GPU0     X      NV18    {}     PXB     0-55            0
GPU1    NV18     X      {}     PXB     0-55            0
GPU2    {}     {}      X      SYS     56-111          1
NIC0    PXB     PXB     SYS      X
"""


@pytest.mark.parametrize(("link", "severity"), [("NV18", ""), ("SYS", "note")])
def test_topology(link: str, severity: str) -> None:
    (check,) = judge_topology(TOPOLOGY.format(*[link] * 4))
    assert check.severity == severity and bool(check.fix) == bool(severity)
    assert check.value == ("3 pairs by NV18" if link == "NV18" else "2 pairs by SYS, 1 pairs by NV18")


def test_peers() -> None:
    assert judge_peers([], 28).severity == ""
    assert "4 of 28 pairs" in judge_peers([(0, 4)] * 4, 28).value and judge_peers([(0, 4)], 28).fix


def test_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bessemer.bench.doctor.STORED_BYTES", 1 << 20)
    (check,) = check_store(f"file://{tmp_path}/store")
    assert check.severity in ("", "warning") and "writes" in check.value and "reads" in check.value
    assert list((tmp_path / "store").iterdir()) == [] == list(check_store(""))
    for url, word in ((f"file://{tmp_path}/file/below", "NotADirectory"), ("nosuchscheme://x", "nosuchscheme")):
        (tmp_path / "file").write_text("")
        (check,) = check_store(url)
        assert check.severity == "critical" and word in check.value and check.fix
