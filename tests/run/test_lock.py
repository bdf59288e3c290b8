"""Two processes never write one run: real processes, a real kill -9, a recycled pid, and another host's owner."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bessemer.errors import UserError
from bessemer.run import lock as lock_module
from bessemer.run.lock import STALE_S, Lock, Owner, is_alive, read_owner

HOLD = """
import sys, time
from pathlib import Path
from bessemer.run.lock import Lock
lock = Lock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
lock.release()
"""

Holder = subprocess.Popen[str]


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[[], Holder]]:
    """Starts a process that holds the run's lock until its standard input is closed."""
    started: list[Holder] = []

    def start() -> Holder:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def write_owner(folder: Path, owner: Owner, silence_s: float = 0.0) -> None:
    path = folder / "owner.json"
    path.write_text(json.dumps(asdict(owner)))
    os.utime(path, (time.time() - silence_s,) * 2)


def test_the_second_process_is_refused_with_host_and_pid(tmp_path: Path, hold: Callable[[], Holder]) -> None:
    holder = hold()
    with pytest.raises(UserError) as refused:
        Lock(tmp_path).acquire()
    assert f"process {holder.pid} on {socket.gethostname()} since 2" in str(refused.value)
    assert "another name" in str(refused.value) and "\n" not in str(refused.value)
    # The refusal left the holder's lock alone, and a released lock is free for the next.
    holder.communicate("")
    lock = Lock(tmp_path)
    lock.acquire()
    assert lock.previous_owner is None
    lock.release()
    assert read_owner(tmp_path) is None


def test_after_kill_9_the_lock_is_taken_and_says_from_whom(tmp_path: Path, hold: Callable[[], Holder]) -> None:
    holder = hold()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock = Lock(tmp_path)
    lock.acquire()
    assert lock.previous_owner is not None and lock.previous_owner.pid == holder.pid
    owner = read_owner(tmp_path)
    assert owner is not None and owner.pid == os.getpid()
    lock.release()


def test_a_killed_process_whose_parent_has_not_looked_yet_is_dead(tmp_path: Path, hold: Callable[[], Holder]) -> None:
    holder = hold()
    holder.send_signal(signal.SIGKILL)
    while Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    lock = Lock(tmp_path)
    lock.acquire()
    assert lock.previous_owner is not None and lock.previous_owner.pid == holder.pid
    lock.release()


def test_the_owner_file_alone_keeps_others_out(tmp_path: Path, hold: Callable[[], Holder]) -> None:
    """On a file system without locks: the lock file is of no use, the living owner still counts."""
    holder = hold()
    (tmp_path / "lock").unlink()
    with pytest.raises(UserError, match=f"process {holder.pid}"):
        Lock(tmp_path).acquire()


def test_a_recycled_pid_is_not_its_former_owner(tmp_path: Path, hold: Callable[[], Holder]) -> None:
    """The process with that pid lives, but it began at another time."""
    holder = hold()
    owner = read_owner(tmp_path)
    assert owner is not None and is_alive(owner, tmp_path)
    (tmp_path / "lock").unlink()
    former = replace(owner, started=owner.started - 1000)
    write_owner(tmp_path, former)
    assert not is_alive(former, tmp_path)
    lock = Lock(tmp_path)
    lock.acquire()
    assert lock.previous_owner == former
    lock.release()
    assert holder.poll() is None


def test_my_own_pid_in_an_old_file_is_not_me(tmp_path: Path) -> None:
    """In containers every first process has pid 1."""
    write_owner(tmp_path, replace(Owner.this_process(), started=1.0))
    lock = Lock(tmp_path)
    lock.acquire()
    assert lock.previous_owner is not None
    lock.release()


def test_one_process_cannot_hold_it_twice(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    lock.acquire()
    with pytest.raises(UserError, match=f"process {os.getpid()}"):
        Lock(tmp_path).acquire()
    # The attempt must not have dropped the kernel's lock: another process is still refused by it.
    (tmp_path / "owner.json").unlink()
    code = "import sys; from pathlib import Path; from bessemer.run.lock import Lock; Lock(Path(sys.argv[1])).acquire()"
    other = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert other.returncode == 1 and "is being written by another process" in other.stderr
    lock.release()
    lock.release()  # a second time does nothing
    lock.acquire()
    lock.release()


def test_another_host_with_a_fresh_heartbeat_is_alive(tmp_path: Path) -> None:
    owner = Owner("other-host", 12, 1.0, time.time())
    write_owner(tmp_path, owner, silence_s=STALE_S - 60)
    assert is_alive(owner, tmp_path)
    with pytest.raises(UserError, match=r"process 12 on other-host .*last heartbeat 6\d s ago; after 120 s"):
        Lock(tmp_path).acquire()


def test_another_host_that_fell_silent_is_dead(tmp_path: Path) -> None:
    owner = Owner("other-host", os.getpid(), 1.0, time.time())
    write_owner(tmp_path, owner, silence_s=STALE_S + 60)
    assert not is_alive(owner, tmp_path)
    lock = Lock(tmp_path)
    lock.acquire()
    assert lock.previous_owner == owner
    lock.release()


def test_the_heartbeat_beats_while_the_lock_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.01)
    lock = Lock(tmp_path)
    lock.acquire()
    path = tmp_path / "owner.json"
    os.utime(path, (1, 1))
    deadline = time.monotonic() + 60
    while path.stat().st_mtime == 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert path.stat().st_mtime > 1
    lock.release()
    time.sleep(0.03)
    write_owner(tmp_path, Owner("other-host", 1, 1.0, 1.0), silence_s=500)
    before = path.stat().st_mtime
    time.sleep(0.05)
    assert path.stat().st_mtime == before  # a released lock beats no longer


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"host": "x"}', b'{"host": "x", "pid": "y", "started": 1, "since": 1}', b"\xff\xfe",
     b'{"host": "x", "pid": 1e99, "started": 1, "since": 1}', b'{"host": "x", "pid": 1, "started": 1, "since": 1e99}'],
)  # fmt: skip
def test_half_an_owner_file_is_no_owner(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "owner.json").write_bytes(content)
    assert read_owner(tmp_path) is None
    lock = Lock(tmp_path)
    lock.acquire()
    lock.release()


def test_two_that_start_together_are_one_writer(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from bessemer.run.lock import Lock\n"
        "sys.stdin.readline()\n"
        "Lock(Path(sys.argv[1])).acquire(); print('held', flush=True); sys.stdin.read()\n"
    )
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in pair:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = []
    for process in pair:
        assert process.stdout is not None
        said.append(process.stdout.readline())
    for process in pair:
        process.communicate()
    assert sorted(said) == ["", "held\n"]
