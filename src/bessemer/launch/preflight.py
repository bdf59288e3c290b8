"""`bessemer doctor --nodes`: the doctor on every node of a cluster, by srun or SSH, and how the nodes differ.

A node that differs from the others is the usual cause of a job that hangs at its first collective, computes other
numbers on some ranks, or waits for one slow disk.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from bessemer.errors import UserError

HOST = re.compile(r"(?!-)[\w.@-]+")
SSH_CONNECTIONS = 32  # at once
LIMIT_S = 300  # for all nodes: a node that hangs is named instead of waited for
SLOWER = 0.5  # of the median speed
SPEED = re.compile(r"(writes|reads) ([\d.]+) MB/s")
# Readings in which healthy nodes differ, and parts of them that change between two readings of one node.
OWN = ("host name", "free space", "Hugging Face cache")
CHANGING = re.compile(r", \d+ °C")
FIXES = {
    "torch": "install the same versions everywhere: one container image or one environment on a shared disk",
    "GPU": "take nodes with the same GPUs and driver, or leave the odd ones out",
    "file system": "mount the same disk under this path on every node: ranks share checkpoints",
}
CRITICAL = ("torch", "NCCL", "packages", "torch and GPU", "GPUs")


@dataclass(frozen=True)
class NodeReport:
    """The readings of one node (as `bessemer doctor --json` prints them), or why there are none."""

    node: str
    checks: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    @property
    def problems(self) -> list[dict[str, Any]]:
        return [check for check in self.checks if check["severity"]]


@dataclass(frozen=True)
class NodeDifference:
    """A reading that is not the same on all nodes: the most frequent value with its nodes, and that of the others."""

    name: str
    usual: str
    usual_nodes: int
    others: dict[str, str]
    severity: str
    fix: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine_nodes(nodes: str, folder: str, port: int, srun_options: str = "") -> list[NodeReport]:
    """`nodes` is a number of nodes, which srun starts, or names of hosts with commas, which SSH reaches."""
    doctor = [sys.executable, "-m", "bessemer", "doctor", folder, "--port", str(port), "--json"]
    if nodes.strip().isdecimal():
        if int(nodes) < 1:
            raise UserError("--nodes 0: write the number of nodes, such as --nodes 4")
        return _by_srun(int(nodes), doctor, srun_options)
    if srun_options:
        raise UserError("--srun-options: is for srun, which takes a number: --nodes 4")
    hosts = [host.strip() for host in nodes.split(",") if host.strip()]
    for host in hosts:
        if not HOST.fullmatch(host):
            raise UserError(f"--nodes {host}: write a number of nodes (Slurm) or names of hosts, such as gpu1,me@gpu2")
    if doubled := [host for host, count in Counter(hosts).items() if count > 1]:
        raise UserError(f"--nodes: {doubled[0]} is named twice")
    if not hosts:
        raise UserError("--nodes: names no node; write --nodes 4 (Slurm) or --nodes gpu1,gpu2 (SSH)")
    return _by_ssh(hosts, doctor)


def _by_ssh(hosts: Sequence[str], doctor: Sequence[str]) -> list[NodeReport]:
    client = shlex.split(os.environ.get("SSH", "ssh -o BatchMode=yes -o ConnectTimeout=15"))
    if shutil.which(client[0]) is None:
        raise UserError(f"{client[0]} is not installed here: install it, or run `bessemer doctor` on each node")
    command = f"cd {shlex.quote(os.getcwd())} && {shlex.join(doctor)}"
    with ThreadPoolExecutor(min(SSH_CONNECTIONS, len(hosts))) as pool:
        return list(pool.map(lambda host: _one_host(host, [*client, host, command]), hosts))


def _one_host(host: str, command: list[str]) -> NodeReport:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return NodeReport(host, error=f"no answer within {LIMIT_S} s")
    return _read_report(host, done.stdout, done.stderr or f"exit code {done.returncode}")


def _by_srun(nodes: int, doctor: Sequence[str], options: str) -> list[NodeReport]:
    """One task on each node; --label marks each line with its task."""
    if shutil.which("srun") is None:
        raise UserError(f"--nodes {nodes}: srun is not installed here; name the hosts for SSH: --nodes gpu1,gpu2")
    # As in a job's script: no binding, so that the doctor sees what a run on the complete node would.
    # The doctor exits with 1 for a critical reading, which must not end the tasks of other nodes.
    command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--label", "--cpu-bind=none"]
    command += ["--kill-on-bad-exit=0", "--wait=0"]
    try:
        done = subprocess.run(
            [*command, *shlex.split(options), *doctor], capture_output=True, text=True, errors="replace",
            timeout=LIMIT_S if "SLURM_JOB_ID" in os.environ else None,  # else it may wait in the queue
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(f"srun: no answer of all nodes within {LIMIT_S} s: look for hung nodes with sinfo") from None
    outputs, errors = _by_task(done.stdout), _by_task(done.stderr)
    if not outputs:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"srun failed: {lines[-1]} (the command was: {shlex.join([*command, *doctor])})")
    tasks = range(max(nodes, max(outputs) + 1))
    return [_read_report(f"task {task}", outputs.get(task, ""), errors.get(task, "no output")) for task in tasks]


def _by_task(text: str) -> dict[int, str]:
    lines: dict[int, list[str]] = defaultdict(list)
    for line in text.splitlines():
        if match := re.match(r"\s*(\d+): ?(.*)", line):
            lines[int(match[1])].append(match[2])
    return {task: "\n".join(parts) for task, parts in lines.items()}


def _read_report(node: str, output: str, error: str) -> NodeReport:
    """The list after whatever a login shell prints before it."""
    start = re.search(r"^\[", output, re.M)
    try:
        checks = json.loads(output[start.start() :]) if start else None
    except json.JSONDecodeError:
        checks = None
    if not isinstance(checks, list):
        return NodeReport(node, error=(error.strip().splitlines() or ["no output"])[-1])
    host = next((check["value"] for check in checks if check["name"] == "host name"), "").split(" ")[0]
    return NodeReport(host if host and node.startswith("task ") else node, checks)


def compare_nodes(reports: Sequence[NodeReport]) -> list[NodeDifference]:
    """Readings that differ between the nodes, and nodes whose disk is much slower than the others'."""
    read = [report for report in reports if report.checks]
    if len(read) < 2:
        return []
    readings = {report.node: _comparable(report) for report in read}
    names = dict.fromkeys(name for values in readings.values() for name in values)
    differences = []
    for name in names:
        values = {node: readings[node].get(name, "nothing") for node in readings}
        usual, count = Counter(values.values()).most_common(1)[0]
        others = {node: _apart(value, usual) for node, value in values.items() if value != usual}
        if others:
            shown = _apart(usual, next(value for value in values.values() if value != usual))
            severity = "critical" if name in CRITICAL else "warning"
            group = "GPU" if name.startswith("GPU") else "torch" if name in CRITICAL else name
            fix = FIXES.get(group, "make the nodes alike, or leave the odd ones out")
            differences.append(NodeDifference(name, shown, count, others, severity, fix))
    return [*differences, *_slow_nodes(read)]


def _comparable(report: NodeReport) -> dict[str, str]:
    values: dict[str, list[str]] = defaultdict(list)
    for check in report.checks:
        name = "GPUs" if re.fullmatch(r"GPU \d+", check["name"]) else check["name"]
        if name in OWN or SPEED.search(check["value"]) or (name == "GPUs" and check["severity"]):
            continue  # a GPU's problems are reported with the node's other problems
        values[name].append(CHANGING.sub("", check["value"]))
    return {name: _counted(parts) for name, parts in values.items()}


def _counted(parts: list[str]) -> str:
    """Eight equal GPUs are one line."""
    return "; ".join(part if count == 1 else f"{count} x {part}" for part, count in Counter(parts).items())


def _apart(value: str, other: str) -> str:
    """The parts of a list (packages with versions) that the other one lacks."""
    parts = [part for part in value.split(", ") if part not in other.split(", ")]
    return ", ".join(parts) or value


def _slow_nodes(reports: Sequence[NodeReport]) -> list[NodeDifference]:
    speeds: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for report in reports:
        for check in report.checks:
            for verb, speed in SPEED.findall(check["value"]):
                speeds[check["name"], verb][report.node] = float(speed)
    differences = []
    for (name, verb), of_node in speeds.items():
        median = statistics.median(of_node.values())
        slow = {node: f"{verb} {speed:.0f} MB/s" for node, speed in of_node.items() if speed < SLOWER * median}
        if slow:
            fix = "check the mount and the network of these nodes: every save waits for the slowest"
            usual = f"{verb} {median:.0f} MB/s"
            differences.append(NodeDifference(name, usual, len(of_node) - len(slow), slow, "warning", fix))
    return differences
