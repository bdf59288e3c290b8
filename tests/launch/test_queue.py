"""The queue of a shared box: order, free GPUs, dead owners; with real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bessemer.errors import UserError
from bessemer.launch.local import Queue, Ticket, idle_gpus
from bessemer.run.directory import Run
from bessemer.spec.load import dump_spec
from bessemer.spec.schema import RunSpec


def box(*busy: int, gpus: int = 4) -> Callable[[], dict[int, bool]]:
    """A machine with GPUs, some of which a stranger uses."""
    return lambda: {gpu: gpu not in busy for gpu in range(gpus)}


def started(turn: Ticket | str) -> Ticket:
    assert isinstance(turn, Ticket), turn
    return turn


def test_first_come_first_served_and_nobody_overtakes(tmp_path: Path) -> None:
    queue = Queue(tmp_path, box())
    small, large, tiny = queue.join("small", 2), queue.join("large", 4), queue.join("tiny", 1)
    assert started(queue.try_start(small)).held == (0, 1)
    assert queue.try_start(large) == "first in line, for 4 GPUs; 2 are free"
    assert str(queue.try_start(tiny)).startswith("behind 1 in line, first large of ")  # though two GPUs are free
    queue.leave(small)
    assert started(queue.try_start(large)).held == (0, 1, 2, 3)
    queue.leave(large)
    assert started(queue.try_start(tiny)).held == (0,)
    assert [(ticket.name, ticket.running) for ticket in queue.tickets()] == [("tiny", True)]


def test_a_gpu_that_a_stranger_uses_is_not_free(tmp_path: Path) -> None:
    queue = Queue(tmp_path, box(0, 2))
    assert started(queue.try_start(queue.join("run", 2))).held == (1, 3)


def test_runs_on_the_cpu_take_turns_beside_those_on_gpus(tmp_path: Path) -> None:
    queue = Queue(tmp_path, box())
    first, second, third = queue.join("a", 0), queue.join("b", 1), queue.join("c", 0)
    assert started(queue.try_start(first)).running and started(queue.try_start(second)).held == (0,)
    assert str(queue.try_start(third)).startswith("for a of ")
    queue.leave(first)
    assert started(queue.try_start(third)).running


def test_the_place_of_a_dead_owner_is_free(tmp_path: Path) -> None:
    queue = Queue(tmp_path, box())
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    holding = queue.join("holding", 4)
    me = json.loads((tmp_path / "00000001.json").read_text())
    theirs = {
        **me,
        "pid": child.pid,
        "started": psutil.Process(child.pid).create_time(),
        "running": True,
        "held": [0, 1, 2, 3],
    }
    (tmp_path / "00000001.json").write_text(json.dumps(theirs))
    mine = queue.join("mine", 1)
    assert holding.number < mine.number
    assert queue.try_start(mine) == "first in line, for 1 GPUs; 0 are free"
    child.kill()
    child.wait()
    assert started(queue.try_start(mine)).held == (0,)
    assert [ticket.name for ticket in queue.tickets()] == ["mine"]


def test_a_ticket_that_cannot_be_read_blocks_nobody(tmp_path: Path) -> None:
    queue = Queue(tmp_path, box())
    (tmp_path / "00000007.json").write_text('{"half')
    ticket = queue.join("run", 1)
    assert ticket.number == 8 and started(queue.try_start(ticket)).held == (0,)


def test_more_gpus_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--gpus 9: this machine has 4"):
        Queue(tmp_path, box()).join("run", 9)


@pytest.mark.gpu
def test_the_gpus_of_this_machine_are_found() -> None:
    torch = pytest.importorskip("torch")
    assert len(idle_gpus()) >= torch.cuda.device_count() > 0


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_runs_one_after_the_other(tmp_path: Path, spec: RunSpec) -> None:
    """The second waits for the first, which is cancelled, saves and makes room."""
    environment = {**os.environ, "BESSEMER_QUEUE": str(tmp_path / "queue")}
    processes = {}
    for name, steps in (("long", 100_000), ("short", 30)):
        path = tmp_path / f"{name}.yaml"
        changed = {"name": name, "budget": spec.budget.model_copy(update={"steps": steps})}
        path.write_text(dump_spec(spec.model_copy(update=changed)))
        command = [sys.executable, "-m", "bessemer", "launch", str(path), "--on", "local"]
        processes[name] = subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        until = time.monotonic() + 60
        while not (tmp_path / "runs" / name / "launch" / "job.json").exists():
            assert time.monotonic() < until
            time.sleep(0.1)
    long, short = Run(tmp_path / "runs" / "long"), Run(tmp_path / "runs" / "short")
    try:
        until = time.monotonic() + 60
        while not list(long.events("started")):
            assert time.monotonic() < until
            time.sleep(0.2)
        listed = subprocess.run(
            [sys.executable, "-m", "bessemer", "launch", "queue"], env=environment, capture_output=True, text=True
        ).stdout.splitlines()
        assert [line.split()[1:2] + line.split()[4:5] for line in listed[1:]] == [
            ["long", "running"],
            ["short", "waiting"],
        ]
        assert not short.events_path.exists()
        processes["long"].send_signal(signal.SIGTERM)
        told, _ = processes["short"].communicate(timeout=60)
        assert processes["short"].returncode == 0 and "waiting for long of " in told
    finally:
        for process in processes.values():
            process.kill()
    assert long.state == "interrupted" and short.state == "finished"
    assert [event["reason"] for event in long.events("interrupted")] == ["SIGTERM"]
