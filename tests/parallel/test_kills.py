"""SIGKILL of workers and of whole nodes under torch's elastic agent: all start again from the last checkpoint, losses
are those of an unbroken run, and every row is trained on exactly once in the lineage that survives."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from bessemer.run.directory import Run
from bessemer.session.session import run_folder
from bessemer.spec.load import dump_spec
from bessemer.spec.schema import RunSpec

Spec = Callable[..., RunSpec]
CPU = {"device": "cpu", "threads": 1}


def agent(worker: Any, spec: RunSpec, folder: Path, size: int, restarts: int) -> None:
    """torchrun's agent, in this process. Workers are forked from a server that has imported everything and has no other
    threads, so that a start takes a second and not ten."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(worker.__file__).parent)}
    multiprocessing.set_forkserver_preload(
        [worker.__name__, "bessemer.session.session", "torch.distributed.checkpoint"]
    )
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=size, run_id=spec.name, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=restarts, start_method="forkserver", monitor_interval=0.05,
    )  # fmt: skip
    elastic_launch(config, worker.train)(spec, folder)


Process = multiprocessing.process.BaseProcess


def start(worker: Any, spec: RunSpec, folder: Path, size: int, restarts: int = 0) -> Process:
    process = multiprocessing.get_context("fork").Process(target=agent, args=(worker, spec, folder, size, restarts))
    process.start()
    return process


def workers_of(agent_pid: int) -> set[int]:
    """Children of the server, which is a child of the agent."""
    servers = psutil.Process(agent_pid).children()
    return {child.pid for server in servers if server.is_running() for child in server.children()}


def losses(run: Run) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in run.metrics()]


def saving(run: Run) -> bool:
    """Whether a save is under way: a folder without its manifest."""
    return any(not (path / "manifest.json").exists() for path in run.checkpoints.glob("step-*"))


def wait_for(found: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def kill_one(agent_pid: int, run: Run, draw: random.Random, seen: set[int], size: int, when: str) -> bool:
    """SIGKILL of a random worker of the newest start: while it starts, in a step or in a save; whether in a save."""
    workers = lambda: workers_of(agent_pid) - seen  # noqa: E731
    wait_for(lambda: len(workers()) == size, "the workers were not started again")
    pids, starts = workers(), len(list(run.events("started")))
    if when == "start":
        time.sleep(draw.uniform(0.0, 1.5))
    else:
        wait_for(lambda: len(list(run.events("started"))) > starts or not pids <= workers(), "it did not start")
        done = len(losses(run)) + draw.randint(1, 12)
        wait_for(lambda: len(losses(run)) >= done, "no step was done")
    if when == "save":
        wait_for(lambda: saving(run), "nothing was saved")
    seen |= pids
    os.kill(draw.choice(sorted(pids)), signal.SIGKILL)
    return saving(run)


def same(run: Run, whole: Run, steps: int) -> None:
    (at, found), (wanted_at, wanted) = (zip(*losses(each), strict=True) for each in (run, whole))
    assert list(at) == list(wanted_at) == list(range(steps))
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("kills", [pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
@pytest.mark.distributed
def test_killed_workers_start_again_with_every_row_exactly_once(
    worker: Any, tiny_spec: Spec, tmp_path: Path, kills: int
) -> None:
    steps, size, rows = 240, 4, 8
    more = {
        "parallel": CPU | {"dp_replicate": 2, "dp_shard": 2}, "budget": {"steps": steps, "batch": 32 * rows},
        "checkpoint": {"every": "5 steps"}, "evaluate": {"every": "50 steps"}, "optimizer": {"lr": 0.003},
    }  # fmt: skip
    whole, broken = tiny_spec("whole", **more), tiny_spec("broken", **more)
    start(worker, whole, tmp_path / "whole-rows", size).join()
    run, reference = Run(run_folder(broken)), Run(run_folder(whole))
    assert len(losses(reference)) == steps
    launcher = start(worker, broken, tmp_path / "rows", size, restarts=kills + 2)
    assert launcher.pid
    draw, seen, within = random.Random(kills), set(), 0
    for number in range(kills):
        when = ("save", "step", "start")[number % 3]
        within += kill_one(launcher.pid, run, draw, seen, size, when)
        print(f"kill {number} in a {when}: {len(losses(run))} steps done", flush=True)
    launcher.join()
    assert launcher.exitcode == 0 and run.state == "finished"
    starts = len(list(run.events("started")))
    print(f"{kills} kills, {within} within a save, {starts} starts, {len(list(run.events('metrics_cut')))} cuts")
    assert within >= kills // 4
    same(run, reference, steps)
    counts = worker.trained_on(tmp_path / "rows", steps)
    assert set(counts) == set(range(steps * rows)) and set(counts.values()) == {1}
    assert counts == worker.trained_on(tmp_path / "whole-rows", steps)


# --- Two agents as two nodes, by torchrun itself


def node(script: str, spec: Path, folder: Path, port: int, first: bool, **more: str) -> subprocess.Popen[str]:
    """One torchrun, with workers of its own."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=kills", "--local-addr=localhost",
        f"--rdzv-conf=is_host={int(first)},last_call_timeout=3,keep_alive_interval=1",
        script, str(spec), str(folder),
    ]  # fmt: skip
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **more}
    out = (folder / f"node-{'first' if first else 'second'}.txt").open("a")
    return subprocess.Popen(command, env=os.environ | quiet, stdout=out, stderr=subprocess.STDOUT, text=True)


def kill_all(process: subprocess.Popen[Any]) -> None:
    """The agent and its workers, which have sessions of their own."""
    found = psutil.Process(process.pid)
    for each in [found, *found.children(recursive=True)]:
        each.kill()


def free_port() -> int:
    import socket

    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        return int(taken.getsockname()[1])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_a_killed_node_is_done_without_and_the_run_goes_on(worker: Any, tiny_spec: Spec, tmp_path: Path) -> None:
    """The second of two nodes dies with its workers: the first goes on with its own two, which read all rows."""
    steps, rows = 200, 8
    folder = tmp_path / "rows"
    folder.mkdir()
    more = {"budget": {"steps": steps, "batch": 32 * rows}, "checkpoint": {"every": "10 steps"}, "parallel": CPU}
    more |= {"optimizer": {"lr": 0.001}}  # other sums in another order: larger steps make more of that
    spec, path = tiny_spec("node", **more), tmp_path / "spec.yaml"
    path.write_text(dump_spec(spec))
    run, port = Run(run_folder(spec)), free_port()
    nodes = [node(worker.__file__, path, folder, port, first) for first in (True, False)]
    try:
        said = lambda: (folder / "node-first.txt").read_text()[-3000:]  # noqa: E731
        wait_for(lambda: run.steps_path.exists() and len(losses(run)) >= 40, said())
        kill_all(nodes[1])
        assert nodes[0].wait(timeout=300) == 0, said()
    finally:
        for process in nodes:
            if process.poll() is None:
                kill_all(process)
            process.wait()
    sizes = [len(list(folder.glob(f"start-{start:03d}-*"))) for start in range(2)]
    assert sizes == [4, 2] and len(list(run.events("started"))) == 2
    alone = tiny_spec("alone", **more)
    start(worker, alone, tmp_path / "alone-rows", 1).join()
    found = [loss for _, loss in losses(run)]
    assert found == pytest.approx([loss for _, loss in losses(Run(run_folder(alone)))], rel=1e-3)
    counts = worker.trained_on(folder, steps)
    assert set(counts) == set(range(steps * rows)) and set(counts.values()) == {1}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_bessemer_train_starts_killed_workers_again_by_itself(tiny_spec: Spec, tmp_path: Path) -> None:
    budget, checkpoint = {"steps": 300, "batch": 256}, {"every": "10 steps"}
    more = {"parallel": CPU | {"dp_replicate": 2}, "budget": budget, "checkpoint": checkpoint}
    found = {}
    for name in ("whole", "broken"):
        spec, path = tiny_spec(name, **more), tmp_path / f"{name}.yaml"
        path.write_text(dump_spec(spec))
        found[name] = run = Run(run_folder(spec))
        command = [sys.executable, "-m", "bessemer", "train", str(path), "--plain"]
        process = subprocess.Popen(
            command, env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        if name == "broken":
            wait_for(lambda run=run: run.steps_path.exists() and len(losses(run)) >= 30, "no steps")
            rank_0 = int((run.folder / "owner.json").read_text().split('"pid": ')[1].split(",")[0])
            os.kill(rank_0, signal.SIGKILL)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output[-3000:]
    same(found["broken"], found["whole"], 300)
    assert len(list(found["broken"].events("started"))) == 2
    (taken,) = found["broken"].events("lock_taken")
    assert "died without releasing the lock" in taken["reason"]
    assert any(event["from_step"] % 10 == 0 for event in found["broken"].events("metrics_cut"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_refused_run_is_said_once_and_not_tried_again(tiny_spec: Spec, tmp_path: Path) -> None:
    """What only the data shows: two processes are started, and refuse."""
    spec, path = tiny_spec("refused", parallel=CPU | {"dp_replicate": 2}), tmp_path / "refused.yaml"
    (tmp_path / "words.jsonl").write_text("")
    path.write_text(dump_spec(spec))
    command = [sys.executable, "-m", "bessemer", "train", str(path), "--plain"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"})
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (refused,) = Run(run_folder(spec)).events("refused")
    said = [line for line in (done.stdout + done.stderr).splitlines() if refused["reason"] in line]
    assert len(said) == 1
