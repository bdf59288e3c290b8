"""Our torchrun: exit codes, what it prints, workers that end with it. The workers are small programs without torch."""

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bessemer.parallel import agent
from bessemer.parent import PARENT

WORKER = """
import os, signal, sys, time
from bessemer.parent import end_with_parent
end_with_parent()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
open(f"pid-{os.environ['RANK']}.tmp", "w").write(str(os.getpid()))
os.rename(f"pid-{os.environ['RANK']}.tmp", f"pid-{os.environ['RANK']}")
"""
Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Fork an agent with two workers from this process, which has torch; its pid. Its stderr goes to `log`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(PARENT, raising=False)

    def run(program: str) -> int:
        (tmp_path / "worker.py").write_text(WORKER + program)
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            log = sys.stdout = sys.stderr = Path("log").open("w", buffering=1)  # noqa: SIM115  until it exits
            os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
            for logger in [logging.getLogger(name) for name in logging.root.manager.loggerDict if name[:5] == "torch"]:
                for handler in logger.handlers:
                    if isinstance(handler, logging.StreamHandler):
                        handler.setStream(log)
            sys.argv = ["agent", "--standalone", "--nproc-per-node=2", "worker.py"]
            agent.main()
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        finally:
            os._exit(code)

    return run


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def workers(folder: Path) -> list[psutil.Process]:
    until = time.monotonic() + 60
    while not all((folder / f"pid-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < until, (folder / "log").read_text()
        time.sleep(0.05)
    return [psutil.Process(int((folder / f"pid-{rank}").read_text())) for rank in range(2)]


OTHER_SIGNALS = ((signal.SIGUSR1, 138), (signal.SIGINT, 130))


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHER_SIGNALS)],
)
def test_a_signal_is_passed_on_and_told_by_the_exit_code(
    start: Start, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    noted = f"signal.signal({int(number)}, lambda *_: (open('got-' + os.environ['RANK'], 'w'), sys.exit(3)))\n"
    pid = start(noted + "time.sleep(60)")
    workers(tmp_path)
    time.sleep(0.3)  # the handler comes a moment after the file
    os.kill(pid, number)
    assert exit_code(pid) == code
    assert sorted(path.name for path in tmp_path.glob("got-*")) == ["got-0", "got-1"]
    assert (tmp_path / "log").read_text() == ""


def test_a_refusal_keeps_its_code_and_gets_no_banner(start: Start, tmp_path: Path) -> None:
    pid = start("print('tp: 3 does not divide', file=sys.stderr) if os.environ['RANK'] == '0' else 0\nsys.exit(2)")
    assert exit_code(pid) == 2
    assert (tmp_path / "log").read_text() == "tp: 3 does not divide\n"


def test_a_killed_worker_is_named(start: Start, tmp_path: Path) -> None:
    pid = start("time.sleep(60)")
    workers(tmp_path)[1].kill()
    assert exit_code(pid) == 1
    log = (tmp_path / "log").read_text()
    assert "rank 1 (process" in log and "SIGKILL; no restarts are left" in log and "Traceback" not in log


def test_workers_end_when_the_agent_is_killed(start: Start, tmp_path: Path) -> None:
    pid = start("time.sleep(60)")
    left = workers(tmp_path)
    os.kill(pid, signal.SIGKILL)
    assert exit_code(pid) == -signal.SIGKILL
    _, alive = psutil.wait_procs(left, timeout=20)
    alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert not alive
