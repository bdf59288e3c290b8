"""Runs untrusted Python, such as code that a model wrote, in a child process with limits.

With isolation (Linux namespaces, as root or where users may create them) the code has no network, sees no file but the
interpreter's, no process but its own, and writes only to a folder in memory. Without it only limits hold: time, file
size, and memory of a process; the code could then read the user's files and use the network, so the caller must ask
for that. In both, the environment is empty, and all processes are killed at the end. `SandboxResult.enforced` lists
what held. None of this withstands an attack on the kernel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from bessemer.errors import UserError

_CHILD = Path(__file__).with_name("sandbox_child.py")
_WALL = 4.0  # times the limit of processor time
_GRACE_S = 30.0  # for the start of the child on a busy machine
_VISIBLE = (
    "/usr", "/bin", "/sbin", "/lib", "/lib64", "/nix/store", "/gnu/store", "/etc/ld.so.cache", "/etc/alternatives",
    "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom",
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """`time_s` bounds the time of the processor, so that a busy machine fails no program; a program that waits has four
    times as long. `memory_bytes` bounds each process, and with isolation all together; `file_bytes` bounds each file,
    output too, and `folder_bytes` all of them. `isolate`: refuse to run where isolation is not possible."""

    time_s: float = 5.0
    memory_bytes: int = 512 * 2**20
    processes: int = 16
    file_bytes: int = 16 * 2**20
    folder_bytes: int = 64 * 2**20
    output_bytes: int = 2**20
    isolate: bool = True


@dataclass(frozen=True)
class SandboxResult:
    """`status`: ended, timeout, memory or killed; `exit_code` is set if it ended (negative: by that signal)."""

    status: str
    exit_code: int | None
    stdout: str
    stderr: str
    enforced: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


class NoIsolation(UserError):
    """The machine does not let this user isolate processes."""


def run_python(code: str, stdin: str = "", limits: Limits | None = None, packages: bool = False) -> SandboxResult:
    """Runs a program. `packages`: it may import the packages of this environment, not only the standard library.

    Raises NoIsolation where isolation is asked for and impossible. Costs about 60 ms besides the program's own time."""
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="bessemer-sandbox-") as folder:
        config = _config(code, limits, packages, Path(folder))
        status, outputs = _run_child(config, stdin, limits, Path(folder))
    if reason := status.get("not_permitted"):
        raise NoIsolation(
            f"this machine cannot isolate untrusted code ({reason}): run as a user who may create namespaces, "
            "or in a container with CAP_SYS_ADMIN"
        )
    if fault := status.get("fault"):
        raise RuntimeError(f"the sandbox failed: {fault}")
    stdout, stderr = (data[: limits.output_bytes].decode(errors="replace") for data in outputs)
    return SandboxResult(status["status"], status["code"], stdout, stderr, tuple(status["enforced"]))


def check_isolation(limits_only: bool = False, key: str = "") -> None:
    """Refuses a machine without isolation, unless `limits_only`. `key` is the setting that allows it, if any."""
    if not limits_only and (reason := _missing_isolation()):
        other = f"; or set {key}: limits, with which code that the model writes can read your files and use the network"
        raise UserError(reason + (other if key else ""))


@lru_cache(maxsize=1)
def _missing_isolation() -> str:
    try:
        run_python("")
    except NoIsolation as error:
        return str(error)
    return ""


def _config(code: str, limits: Limits, packages: bool, folder: Path) -> dict[str, Any]:
    interpreter = sys.executable if packages else os.path.realpath(sys.executable)
    prefixes = [sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), *([sys.prefix] if packages else [])]
    visible = [path for path in _VISIBLE if os.path.lexists(path)]
    for prefix in map(os.path.realpath, prefixes):
        if not any(Path(prefix).is_relative_to(os.path.realpath(path)) for path in visible):
            visible.append(prefix)
    for name in ("root", "work"):
        (folder / name).mkdir()
    return {
        **asdict(limits), "wall_s": _WALL * limits.time_s, "code": code, "visible": visible,
        "root": str(folder / "root"), "work": str(folder / "work"),
        "command": [interpreter, "-I", "-B", *([] if packages else ["-S"])],
    }  # fmt: skip


def _run_child(
    config: dict[str, Any], stdin: str, limits: Limits, folder: Path
) -> tuple[dict[str, Any], tuple[bytes, bytes]]:
    (folder / "config.json").write_text(json.dumps(config))
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        source.write(stdin.encode(errors="replace"))
        source.seek(0)
        command = [sys.executable, "-I", "-S", "-B", str(_CHILD), str(folder / "config.json"), str(writer)]
        process = subprocess.Popen(
            command, stdin=source, stdout=output, stderr=errors, pass_fds=[writer], env={},
            start_new_session=True,
        )  # fmt: skip
        os.close(writer)
        try:
            process.wait(_WALL * limits.time_s + _GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                process.kill()  # its supervisor dies with it, and with that the code
                process.wait()
        with os.fdopen(reader, "rb") as file:
            text = file.read()
        for stream in (output, errors):
            stream.seek(0)
        data = output.read(limits.output_bytes), errors.read(limits.output_bytes)
    return (json.loads(text) if text else {"status": "killed", "code": None, "enforced": []}), data
