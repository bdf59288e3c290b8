"""The sandbox against code that attacks it: each attack is one that works outside of it."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bessemer.sandbox import Limits, NoIsolation, run_python

LIMITS = Limits(time_s=10.0)
WEAK = Limits(time_s=10.0, isolate=False)
SHORT = Limits(time_s=0.5)  # for programs that end at their limit
ALIVE = "marker-of-the-sandbox-test"


@pytest.fixture(scope="module", autouse=True)
def _isolation() -> None:
    try:
        run_python("")
    except NoIsolation as error:
        pytest.skip(str(error))


@pytest.fixture
def server() -> Iterator[tuple[int, list[str]]]:
    """A server on this machine, and who has connected."""
    visits: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, peer = listener.accept()
                except OSError:
                    return
                visits.append(str(peer))
                connection.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1], visits
        listener.shutdown(socket.SHUT_RDWR)


def alive() -> list[str]:
    """Processes whose command line has the marker."""
    commands = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            commands.append(Path(f"/proc/{pid}/cmdline").read_text())
        except OSError:
            continue
    return [command for command in commands if ALIVE in command]


def test_a_program() -> None:
    result = run_python("import sys\nprint(input()[::-1]); print('x', file=sys.stderr)", stdin="abc\n", limits=LIMITS)
    assert result.ok and result.status == "ended" and (result.stdout, result.stderr) == ("cba\n", "x\n")
    assert set(result.enforced) == {"time", "memory", "processes", "file size", "network", "files"}
    assert run_python("raise SystemExit(3)", limits=LIMITS).exit_code == 3
    assert "ZeroDivisionError" in run_python("1/0", limits=LIMITS).stderr


@pytest.mark.parametrize("limits", [SHORT, Limits(time_s=0.5, isolate=False)], ids=["isolated", "limits"])
def test_endless_loops_end(limits: Limits) -> None:
    assert run_python("while True: pass", limits=limits).status == "timeout"
    result = run_python("import time; print('begun', flush=True); time.sleep(60)", limits=limits)
    assert result.status == "timeout" and result.stdout == "begun\n" and not result.ok


def test_a_signal_handler_does_not_stop_the_time_limit() -> None:
    code = (
        "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\n"
    )
    assert run_python(code + "while True: pass", limits=SHORT).status == "timeout"


def test_a_fork_bomb_is_bounded_and_leaves_nothing() -> None:
    code = (
        "import os, sys\ncount = 0\n"
        "try:\n    while True:\n"
        "        if os.fork() == 0:\n"
        f"            os.execv(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(50) #{ALIVE}'])\n"
        "        count += 1\n"
        "except OSError as error:\n    print(count, type(error).__name__, flush=True)\n"
    )
    result = run_python(code, limits=LIMITS)
    assert result.stdout.split()[1] == "BlockingIOError" and 1 <= int(result.stdout.split()[0]) <= 16
    assert alive() == []
    bomb = run_python("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n", limits=SHORT)
    assert bomb.status == "timeout"


@pytest.mark.parametrize("limits", [LIMITS, WEAK], ids=["isolated", "limits"])
def test_a_daemon_does_not_survive(limits: Limits) -> None:
    """Double fork with new sessions, the way daemons leave their parents."""
    code = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execv(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(50) #{ALIVE}'])\n"
        "    time.sleep(50)\n"
        "time.sleep(0.3); print('done')\n"
    )
    assert run_python(code, limits=limits).stdout == "done\n"
    assert alive() == []


@pytest.mark.parametrize("limits", [LIMITS, WEAK], ids=["isolated", "limits"])
def test_memory(limits: Limits) -> None:
    assert "MemoryError" in run_python("x = bytearray(2**31)", limits=limits).stderr


def test_memory_of_all_processes_together() -> None:
    code = (
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        x = bytearray(b'x') * (60 << 20)\n"
        "        time.sleep(30)\ntime.sleep(30)"
    )
    limits = Limits(time_s=10.0, memory_bytes=200 << 20)
    assert run_python(code, limits=limits).status == "memory"


def test_files_are_bounded() -> None:
    big = "with open('big', 'wb') as f:\n    for _ in range(100): f.write(b'x' * (1 << 20))\n"
    assert "File too large" in run_python(big, limits=LIMITS).stderr
    many = "for n in range(100):\n    with open(str(n), 'wb') as f: f.write(b'x' * (8 << 20))\n"
    assert "No space left" in run_python(many, limits=LIMITS).stderr
    result = run_python("while True: print('x' * 10000)", limits=LIMITS)
    assert len(result.stdout) == LIMITS.output_bytes and not result.ok


def test_no_network(server: tuple[int, list[str]]) -> None:
    port, visits = server
    attack = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('connected')"
    assert "OSError" in (result := run_python(attack, limits=LIMITS)).stderr and not result.ok
    lookup = run_python("import socket; print(socket.gethostbyname('example.org'))", limits=LIMITS)
    assert not lookup.ok and visits == []
    # The attack works where nothing stops it, and the result says so.
    weak = run_python(attack, limits=WEAK)
    assert weak.stdout == "connected\n" and "network" not in weak.enforced and len(visits) == 1


@pytest.mark.parametrize("limits", [LIMITS, WEAK], ids=["isolated", "limits"])
def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch, limits: Limits) -> None:
    monkeypatch.setenv("SECRET_TOKEN", ALIVE)
    result = run_python("import os; print(sorted(os.environ), os.environ)", limits=limits)
    assert result.ok and "SECRET" not in result.stdout and ALIVE not in result.stdout


def test_files_outside_cannot_be_read_or_written(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text(ALIVE)
    reading = f"print(open({str(secret)!r}).read())"
    assert "FileNotFoundError" in run_python(reading, limits=LIMITS).stderr
    assert ALIVE in run_python(reading, limits=WEAK).stdout  # readable without isolation, as the documentation says
    for target in (
        str(tmp_path / "new"),
        "/new",
        "/usr/new",
        sys.base_prefix + "/new",
        os.__file__,
        "/proc/sys/kernel/x",
    ):
        result = run_python(f"open({target!r}, 'a').write('x')", limits=LIMITS)
        assert not result.ok, target
    listed = run_python("import os; print(*(f for f in os.listdir('/') if not os.path.islink('/' + f)))", limits=LIMITS)
    assert set(listed.stdout.split()) <= {
        "usr",
        "lib",
        "lib64",
        "bin",
        "sbin",
        "etc",
        "dev",
        "proc",
        "sandbox",
        "nix",
    } | {Path(prefix).parts[1] for prefix in (sys.base_prefix, os.path.realpath(sys.executable))}
    assert list(tmp_path.iterdir()) == [secret]


def test_other_processes_cannot_be_seen_or_signalled() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", f"input() #{ALIVE}"], stdin=subprocess.PIPE) as victim:
        seen = run_python(
            "import os\nfor p in filter(str.isdigit, os.listdir('/proc')): print(p, open(f'/proc/{p}/cmdline').read())"
        )
        assert seen.ok and len(seen.stdout.splitlines()) == 2 and ALIVE not in seen.stdout
        for code in (f"import os; os.kill({victim.pid}, 9)", "import os; os.kill(-1, 9)", "import os; os.kill(1, 9)"):
            run_python(code, limits=LIMITS)
            assert victim.poll() is None
        victim.communicate(b"\n")
    assert victim.returncode == 0


def test_privileges_are_gone() -> None:
    status = run_python("print(open('/proc/self/status').read())", limits=LIMITS).stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["NoNewPrivs"] == "1"
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    escape = "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\n"
    for call in ("c.umount2(b'/sandbox', 2)", "c.mount(b'tmpfs', b'/usr', b'tmpfs', 0, None)", "c.chroot(b'/proc')"):
        assert run_python(f"{escape}raise SystemExit(10 + ({call} == 0))", limits=LIMITS).exit_code == 10


def test_packages_are_visible_only_if_asked() -> None:
    code = "import numpy; print(numpy.arange(3).sum())"
    assert "ModuleNotFoundError" in run_python(code, limits=LIMITS).stderr
    assert run_python(code, packages=True, limits=Limits(time_s=20.0)).stdout == "3\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_without_root() -> None:
    """The same for an ordinary user, in a namespace of users: the code sees the user's id and nothing else."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\nfrom bessemer.sandbox import run_python\n"
        "r = run_python('import os, socket; print(os.getuid(), os.path.exists(\"/home\"));'"
        " 'socket.create_connection((\"127.0.0.1\", 9), 1)')\nprint(r.stdout, r.stderr, r.enforced)\n"
    )
    source = str(Path(__file__).parents[1] / "src")

    def run(interpreter: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [interpreter, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, user=65533, group=65533, extra_groups=[], env={},
            cwd="/",
        )  # fmt: skip

    for interpreter in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            if run(interpreter, "-c", f"open({source + '/bessemer/sandbox.py'!r}); import tomllib").returncode == 0:
                break
        except OSError:
            continue
    else:
        pytest.skip("no interpreter that other users may run")
    result = run(interpreter, "-c", code, source)
    if "cannot isolate" in result.stderr:
        pytest.skip("users may not create namespaces on this machine")
    assert "65533 False" in result.stdout and "Network is unreachable" in result.stdout, result.stderr
    assert "'network'" in result.stdout
