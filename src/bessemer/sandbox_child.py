"""Runs inside the child process of `sandbox.py`, with the standard library alone: isolates itself, then runs the code.

This process, the supervisor and the code are three: the supervisor is process 1 of the code's own process table, so the
code can neither signal it nor outlive it.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import stat
import sys
import time
from contextlib import suppress
from typing import Any

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_NAMESPACES = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_SYS_MOUNT_SETATTR, _AT_RECURSIVE, _ATTR_RDONLY = 442, 0x8000, 1
_MNT_DETACH = 2
_SET_PDEATHSIG, _CAPBSET_DROP, _SET_SUBREAPER, _NO_NEW_PRIVS = 1, 24, 36, 38
_FIRST_UID, _UIDS = 61184, 4000  # systemd's range of dynamic users
_ROOT_BYTES = 1 << 20
_POLL_S = 0.02
WORK = "/sandbox"  # no interpreter is installed there

Config = dict[str, Any]


class NotPermitted(Exception):
    """The machine lets this user isolate nothing."""


def main(path: str, status_fd: int) -> None:
    with open(path) as file:
        config = json.load(file)
    os.unlink(path)
    status: dict[str, Any] = {}
    try:
        status = _run(config)
    except NotPermitted as error:
        status = {"not_permitted": str(error)}
    except Exception as error:  # reported to the parent, which raises it
        status = {"fault": f"{type(error).__name__}: {error}"}
    os.write(status_fd, json.dumps(status).encode())


def _run(config: Config) -> dict[str, Any]:
    if sys.platform == "linux":
        _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if not config["isolate"]:
        if sys.platform == "linux":
            _prctl(_SET_SUBREAPER, 1)
        return _supervise(config, config["work"], None)
    uid = _unshare()
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        try:
            _prctl(_SET_PDEATHSIG, signal.SIGKILL)
            _build_root(config, uid)
            status = _supervise(config, WORK, uid)
        except OSError as error:
            status = {"not_permitted": f"{error}"}
        except Exception as error:
            status = {"fault": f"{type(error).__name__}: {error}"}
        os.write(writer, json.dumps(status).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(first, 0)
    return dict(json.loads(text)) if text else {"status": "killed", "code": None, "enforced": []}


def _unshare() -> int | None:
    """New namespaces. As root, the code gets a user of its own, which is returned; otherwise a namespace of users."""
    if sys.platform != "linux":
        raise NotPermitted(f"{sys.platform} has no namespaces")
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0 and _libc().unshare(_NAMESPACES) == 0:
        return _FIRST_UID + os.getpid() % _UIDS
    _check(_libc().unshare(_NAMESPACES | _NEWUSER), "namespaces")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError as error:
            raise NotPermitted(f"{name}: {error}") from None
    return None


def _build_root(config: Config, uid: int | None) -> None:
    """A file system with the interpreter alone, read-only, and an empty folder in memory to work in."""
    root = config["root"]
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, f"size={_ROOT_BYTES},mode=755")
    for path in config["visible"]:
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT, 0o600))
        _mount(path, target, None, _BIND | _REC)
        device = stat.S_ISCHR(os.stat(path).st_mode)
        _set_flags(target, _NOSUID | (0 if device else _ATTR_RDONLY | _NODEV))
    os.makedirs(root + "/proc")
    with suppress(NotPermitted):  # in containers that hide a part of it; the code does without
        _mount("proc", root + "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    if not os.path.lexists(root + "/tmp"):
        os.symlink(WORK, root + "/tmp")
    os.mkdir(root + WORK)
    options = f"size={config['folder_bytes']},nr_inodes=4096,mode=700"
    _mount("tmpfs", root + WORK, "tmpfs", _NOSUID | _NODEV, options + (f",uid={uid},gid={uid}" if uid else ""))
    os.chdir(root)
    _check(_libc().pivot_root(b".", b"."), "pivot_root")
    _check(_libc().umount2(b".", _MNT_DETACH), "umount")
    _set_flags("/", _ATTR_RDONLY, recursive=False)


def _supervise(config: Config, folder: str, uid: int | None) -> dict[str, Any]:
    """Starts the code and ends it and all its processes at the limits."""
    isolated = config["isolate"]
    enforced = ["time", "file size"] + (["network", "files", "processes"] if isolated else [])
    code: int | None = None
    start_s, worker = time.monotonic(), os.fork()
    if worker == 0:
        try:
            _start(config, folder, uid)
        except BaseException as error:
            os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
        os._exit(126)
    enforced += ["memory"] if sys.platform == "linux" else []
    while True:
        pid, wait_status = os.waitpid(worker, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(wait_status)
            status = "timeout" if code == -signal.SIGXCPU else "ended"
            break
        resident_bytes, cpu_s = _usage() if isolated else (0, 0.0)
        if cpu_s > config["time_s"] or time.monotonic() - start_s > config["wall_s"]:
            status = "timeout"
            break
        if resident_bytes > config["memory_bytes"]:
            status = "memory"
            break
        time.sleep(min(_POLL_S, 0.002 + (time.monotonic() - start_s) / 10))
    _kill_all(worker, isolated)
    return {"status": status, "code": code, "enforced": enforced}


def _start(config: Config, folder: str, uid: int | None) -> None:
    """Gives up every privilege and becomes the code's interpreter."""
    os.setsid()
    os.chdir(folder)
    with open("main.py", "w") as file:
        file.write(config["code"])
    if sys.platform == "linux":
        _libc()  # loaded before memory is limited
        if config["isolate"]:
            for capability in range(64):
                _libc().prctl(_CAPBSET_DROP, capability, 0, 0, 0)
        _prctl(_NO_NEW_PRIVS, 1)
    if uid is not None:
        os.chown("main.py", uid, uid)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    seconds = math.ceil(config["time_s"]) + 1
    limits = {
        resource.RLIMIT_CPU: seconds, resource.RLIMIT_FSIZE: config["file_bytes"], resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 128, resource.RLIMIT_AS: config["memory_bytes"],
    }  # fmt: skip
    if config["isolate"]:
        limits[resource.RLIMIT_NPROC] = config["processes"]
    for which, value in limits.items():
        try:
            resource.setrlimit(which, (value, value))
        except (ValueError, OSError):  # macOS has no limit of memory
            if which != resource.RLIMIT_AS or sys.platform == "linux":
                raise
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    os.closerange(3, 4096)
    os.execve(config["command"][0], [*config["command"], "main.py"], environment)


def _kill_all(worker: int, isolated: bool) -> None:
    """The end of process 1 ends the others; without a process table of their own, descendants come to this process,
    one generation after the other."""
    if isolated:
        return
    for _ in range(1000):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker, signal.SIGKILL)
        children = []
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                children = [int(pid) for pid in file.read().split()]
        except OSError:  # not Linux, or a kernel without the list
            pass
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _usage() -> tuple[int, float]:
    """Of all processes in this table but this one: memory without what they share with files, and time of the
    processor, that of ended children included."""
    pages, ticks = 0, 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/statm") as file:
                    _, resident, shared = file.read().split()[:3]
                with open(f"/proc/{name}/stat") as file:
                    ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:15]))
                pages += int(resident) - int(shared)
            except OSError:  # it has ended
                continue
    return pages * resource.getpagesize(), ticks / os.sysconf("SC_CLK_TCK")


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    _check(_libc().prctl(option, value, 0, 0, 0), "prctl")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    _check(_libc().mount(*texts, ctypes.c_ulong(flags), options.encode() or None), f"mounting {target}")


def _set_flags(path: str, flags: int, recursive: bool = True) -> None:
    """Adds flags to a mount; those it has cannot be taken away by accident, as remounting would."""
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    call = _libc().syscall(
        _SYS_MOUNT_SETATTR, -100, path.encode(), _AT_RECURSIVE if recursive else 0, ctypes.byref(attributes), 32
    )
    _check(call, f"read-only {path}")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise NotPermitted(f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
