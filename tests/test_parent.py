"""A process ends when the one that started it is killed; tried with small processes that never import torch."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

# Starts the child with the program below and waits for it; writes the child's pid first.
STARTER = """
import os, subprocess, sys
from bessemer.parent import child_environment
environment = {environment}
child = subprocess.Popen([sys.executable, "-c", {program!r}], env=environment)
print(child.pid, flush=True)
child.wait()
"""
TIED = "from bessemer.parent import end_with_parent; end_with_parent(); print('tied', flush=True)\n"
SLEEP = "import time; time.sleep(60)"

Start = Callable[..., tuple[subprocess.Popen[str], psutil.Process]]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[psutil.Process] = []

    def run(program: str, environment: str = "child_environment()") -> tuple[subprocess.Popen[str], psutil.Process]:
        code = STARTER.format(program=program, environment=environment)
        starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        made.append(psutil.Process(starter.pid))
        assert starter.stdout is not None
        child = psutil.Process(int(starter.stdout.readline()))
        made.append(child)
        assert starter.stdout.readline() == "tied\n"
        return starter, child

    yield run
    for process in made:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def ends(process: psutil.Process) -> bool:
    """A process whose starter is dead stays a zombie where nobody adopts orphans."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("environment", ["child_environment()", "{**os.environ, 'TORCHELASTIC_RUN_ID': 'x'}"])
def test_a_child_ends_with_its_parent(start: Start, environment: str) -> None:
    starter, child = start(TIED + SLEEP, environment)
    starter.send_signal(signal.SIGKILL)
    assert ends(child)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_a_stopped_child_ends_too(start: Start) -> None:
    starter, child = start(TIED + SLEEP)
    child.suspend()
    starter.send_signal(signal.SIGKILL)
    assert ends(child)


def test_a_program_that_takes_the_childs_place_stays_tied(start: Start) -> None:
    follows = "import os, sys; from bessemer.parent import keep_parent; keep_parent(); "
    follows += f"os.execv(sys.executable, [sys.executable, '-c', {TIED + SLEEP!r}])"
    starter, child = start(TIED + follows)
    assert starter.stdout is not None and starter.stdout.readline() == "tied\n"
    starter.send_signal(signal.SIGKILL)
    assert ends(child)


def test_a_parent_that_died_before_is_noticed() -> None:
    environment = {**os.environ, "BESSEMER_PARENT_PID": "1"}
    done = subprocess.run([sys.executable, "-c", TIED], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "has died; exiting" in done.stderr and "tied" not in done.stdout


def test_a_grandchild_and_a_program_of_the_users_own_are_not_tied() -> None:
    inner = TIED + "import os, threading; print(os.environ.get('BESSEMER_PARENT_PID'), threading.active_count())"
    outer = f"{TIED}import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    environment = {**os.environ, "BESSEMER_PARENT_PID": str(os.getpid())}
    printed = subprocess.run([sys.executable, "-c", outer], env=environment, capture_output=True, text=True).stdout
    assert printed == "tied\ntied\nNone 1\n"


def test_processes_that_we_start_are_tied() -> None:
    """Every Popen of a Python program of ours passes `child_environment`; exceptions start no Python of ours. The
    sandbox has an empty environment, and its child asks the kernel to end with its parent. The observers of a run
    outlive it until everything is delivered, and then end by themselves. The doctor of other nodes starts there."""
    source = Path(__file__).parents[1] / "src" / "bessemer"
    starts = {
        path.relative_to(source).as_posix(): path.read_text().count("child_environment(")
        for path in source.rglob("*.py")
        if "sys.executable" in path.read_text() and "subprocess." in path.read_text()
    }
    assert starts.pop("observe/observers.py") == 0
    assert starts.pop("launch/preflight.py") == 0
    assert starts.pop("sandbox.py") == 0 and "_SET_PDEATHSIG" in (source / "sandbox_child.py").read_text()
    assert starts and all(starts.values()), starts
