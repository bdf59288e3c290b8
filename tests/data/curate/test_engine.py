"""The pool: results in any number of workers, errors that name the task, workers that never outlive their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil
import pytest

from bessemer.data.curate.engine import LocalEngine, ProcessPool, run_all
from bessemer.errors import UserError


@dataclass(frozen=True)
class Job:
    number: int

    @property
    def name(self) -> str:
        return f"part {self.number}"


def square(job: Job) -> int:
    return job.number**2


def refuse_the_third(job: Job) -> int:
    if job.number == 3:
        raise UserError("part 3: its row 7 is bad")
    return job.number


def fail_the_third(job: Job) -> int:
    return 1 // (3 - job.number)


def die_at_the_third(job: Job) -> int:
    if job.number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return job.number


def pid_of(job: Job) -> int:
    time.sleep(0.05)
    return os.getpid()


JOBS = [Job(number) for number in range(7)]


@pytest.fixture(scope="module")
def pool():
    with_three = ProcessPool(3)
    yield with_three
    with_three.close()


def test_results_come_back_in_the_order_of_the_tasks(pool: ProcessPool) -> None:
    assert run_all(pool, square, JOBS) == run_all(LocalEngine(), square, JOBS) == [number**2 for number in range(7)]


def test_the_work_is_done_in_other_processes(pool: ProcessPool) -> None:
    pids = set(run_all(pool, pid_of, JOBS))
    assert os.getpid() not in pids and len(pids) == 3


def test_a_refusal_comes_back_as_it_was_said() -> None:
    with pytest.raises(UserError, match=r"^part 3: its row 7 is bad$"):
        run_all(ProcessPool(2), refuse_the_third, JOBS)


def test_a_fault_names_the_task_and_shows_the_trace() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)^part 3: .*fail_the_third.*ZeroDivisionError"):
        run_all(ProcessPool(2), fail_the_third, JOBS)


def test_a_worker_killed_for_memory_names_the_task_and_the_way_out() -> None:
    pool = ProcessPool(2)
    with pytest.raises(UserError, match=r"part 3: the worker was killed by SIGKILL: most likely out of memory"):
        run_all(pool, die_at_the_third, JOBS)
    assert run_all(pool, square, JOBS)[3] == 9  # the pool works again
    pool.close()


def test_no_tasks_start_no_process() -> None:
    assert run_all(ProcessPool(4), square, []) == []


SCRIPT = """
import sys, time
from bessemer.data.curate.engine import ProcessPool
def main():
    pool = ProcessPool(2)
    for _ in pool.run(time.sleep, [30, 30, 30]): pass
print("begun", flush=True)
main()  # not guarded by __name__, as in many a script
"""


def test_workers_leave_when_the_parent_is_killed(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    deadline = time.monotonic() + 30
    workers: list[psutil.Process] = []
    while len(workers) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        workers = [
            child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())
        ]
    assert len(workers) == 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    assert process.stdout.read() == ""  # the script did not run again in its workers
