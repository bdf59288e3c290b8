"""`bessemer doctor --nodes`: what differs between nodes, srun and SSH by stand-ins that run the doctor here, and (slow)
a real sshd."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import bessemer
from bessemer.cli.main import app
from bessemer.errors import UserError
from bessemer.launch.preflight import NodeReport, compare_nodes, examine_nodes

from .test_ssh import SSHD
from .test_ssh import host as host  # the fixture

SOURCE = str(Path(bessemer.__file__).parents[1])


def check(name: str, value: str, severity: str = "") -> dict[str, Any]:
    return {"name": name, "value": value, "severity": severity, "fix": "do something" if severity else ""}


def node(name: str, gpus: int = 8, disk: int = 900, temperature: int = 40, **values: str) -> NodeReport:
    checks = [check(key.replace("_", " "), value) for key, value in {"torch": "2.13, CUDA 13.0", **values}.items()]
    checks += [check(f"GPU {i}", f"NVIDIA H100, driver 580.1, {temperature + i} °C") for i in range(gpus)]
    checks += [check("host name", f"{name} is 10.0.0.9"), check("disk", f"writes {disk} MB/s")]
    return NodeReport(name, [*checks, check("free space", f"{disk} GiB")])


def test_equal_nodes_have_no_differences() -> None:
    assert compare_nodes([node("a"), node("b", temperature=60, disk=800), node("c")]) == []
    assert compare_nodes([node("a"), NodeReport("b", error="no route to host")]) == []


@pytest.mark.parametrize(
    ("odd", "name", "usual", "other", "severity"),
    [
        (node("c", torch="2.12, CUDA 13.0"), "torch", "2.13", "2.12", "critical"),
        (node("c", gpus=7), "GPUs", "8 x NVIDIA H100", "7 x NVIDIA H100", "critical"),
        (node("c", disk=100), "disk", "writes 900 MB/s", "writes 100 MB/s", "warning"),
        (node("c", clock="not synchronized"), "clock", "nothing", "not synchronized", "warning"),
    ],
)
def test_the_odd_node_is_named(odd: NodeReport, name: str, usual: str, other: str, severity: str) -> None:
    (difference,) = compare_nodes([node("a"), node("b"), odd])
    assert (difference.name, difference.severity) == (name, severity) and difference.fix
    assert usual in difference.usual and list(difference.others) == ["c"] and other in difference.others["c"]


def test_only_the_packages_that_differ_are_shown() -> None:
    lists = ("torch 2.13, numpy 2.4, peft 0.21", "torch 2.13, numpy 2.4, peft 0.21", "torch 2.13, numpy 2.3, peft 0.21")
    (difference,) = compare_nodes([node(name, packages=value) for name, value in zip("abc", lists, strict=True)])
    assert (difference.usual, difference.others) == ("numpy 2.4", {"c": "numpy 2.3"})


@pytest.mark.parametrize(
    ("nodes", "options", "message"),
    [
        ("0", "", "--nodes 0"),
        ("gpu1,gpu1", "", "named twice"),
        ("-oProxyCommand=x", "", "write a number of nodes"),
        ("gpu1;reboot", "", "write a number of nodes"),
        (",", "", "names no node"),
        ("gpu1", "--gpus 8", "is for srun"),
    ],
)
def test_wrong_nodes_are_refused(nodes: str, options: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        examine_nodes(nodes, ".", 29500, options)


# Each stands for its client: a login banner, the readings of three nodes of which the last has another torch.
READINGS = [json.dumps(node(name, torch=version).checks, indent=1) for name, version in
            (("n0", "2.13"), ("n1", "2.13"), ("n2", "2.12"))]  # fmt: skip


def write_client(path: Path, body: str) -> Path:
    path.write_text(f"#!{sys.executable}\nimport json, sys\nREADINGS = {READINGS!r}\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"""
open({str(tmp_path / "arguments")!r}, "w").write(json.dumps(sys.argv[1:]))
for task, text in enumerate(READINGS):
    for line in text.splitlines():
        print(f"{{task}}: {{line}}")
print("3: slurmstepd: error: no such folder", file=sys.stderr)
"""
    write_client(tmp_path / "srun", body)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    result = CliRunner().invoke(
        app, ["doctor", "/scratch", "--nodes", "4", "--srun-options", "--partition gpu", "--json"]
    )
    answer = json.loads(result.stdout)
    assert result.exit_code == 1 and answer["ready"] is False
    assert [entry["node"] for entry in answer["nodes"]] == ["n0", "n1", "n2", "task 3"]
    assert answer["nodes"][3]["error"] == "slurmstepd: error: no such folder"
    (difference,) = answer["differences"]
    assert difference["name"] == "torch" and difference["others"] == {"n2": "2.12"}
    arguments = json.loads((tmp_path / "arguments").read_text())
    assert {"--nodes=4", "--ntasks-per-node=1", "--label", "--partition", "gpu", "/scratch"} <= set(arguments)


def test_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
if sys.argv[1] == "lost":
    sys.exit("ssh: connect to host lost port 22: No route to host")
assert "-m bessemer doctor" in sys.argv[2]
print("Welcome to the cluster")
print(READINGS[int(sys.argv[1][-1])])
"""
    monkeypatch.setenv("SSH", str(write_client(tmp_path / "client", body)))
    same = CliRunner().invoke(app, ["doctor", "--nodes", "gpu0,gpu1"])
    assert same.exit_code == 0 and "2 of 2 nodes examined, 0 differences" in same.stdout
    result = CliRunner().invoke(app, ["doctor", "--nodes", "gpu0,gpu1,gpu2,lost"])
    assert result.exit_code == 1
    assert "lost: not examined: ssh: connect to host lost port 22: No route to host" in result.stdout
    assert "torch differs: 2 of 3 nodes: 2.13" in result.stdout and "gpu2: 2.12" in result.stdout


def test_without_slurm_the_hosts_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"srun is not installed here; name the hosts"):
        examine_nodes("2", ".", 29500)


@pytest.mark.slow
@pytest.mark.skipif(not SSHD, reason="no sshd: apt install openssh-server")
def test_a_real_host(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (report,) = examine_nodes(host, str(tmp_path), 29500)
    assert report.node == host and report.error == ""
    assert {"torch", "packages", "disk", "host name"} <= {entry["name"] for entry in report.checks}
    (missing,) = examine_nodes(host, str(tmp_path / "missing"), 29500)
    assert "is no folder" in missing.error
