"""Two network namespaces joined by a cable (a veth pair) as two hosts, with a torchrun on each. The cable is pulled for
a few seconds, and for longer than the processes are patient."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.load import dump_spec
from bessemer.spec.schema import RunSpec

Spec = Callable[..., RunSpec]
ADDRESSES = ("10.213.7.1", "10.213.7.2")
STEPS, ROWS = 120, 8


def ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip())


class Hosts:
    """Two namespaces and what joins them, named for this process so that tests can run beside each other."""

    def __init__(self) -> None:
        self.names = [f"bsm{os.getpid()}{end}" for end in "ab"]
        self.started: list[subprocess.Popen[bytes]] = []

    def make(self) -> None:
        for name in self.names:
            ip(f"netns add {name}")
        a, b = self.names
        ip(f"link add {a} netns {a} type veth peer name {b} netns {b}")
        for name, address in zip(self.names, ADDRESSES, strict=True):
            ip(f"-n {name} addr add {address}/24 dev {name}")
            self.link(name, up=True)
            ip(f"-n {name} link set lo up")

    def link(self, name: str, up: bool) -> None:
        ip(f"-n {name} link set {name} {'up' if up else 'down'}")

    def cut(self, seconds: float, done: Callable[[], int]) -> int:
        """The cable is out for so long; how much is done in the last seconds of it, when nothing more is under way."""
        self.link(self.names[1], up=False)
        time.sleep(2)
        before = done()
        time.sleep(seconds - 2)
        after = done()
        self.link(self.names[1], up=True)
        return after - before

    def torchrun(self, which: int, script: str, spec: Path, folder: Path) -> subprocess.Popen[bytes]:
        name = self.names[which]
        command = [
            "ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
            "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29400",
            "--rdzv-id=hosts", f"--local-addr={ADDRESSES[which]}", f"--rdzv-conf=is_host={int(which == 0)}",
            script, str(spec), str(folder),
        ]  # fmt: skip
        with (folder / f"host-{which}.txt").open("ab") as out:
            process = subprocess.Popen(
                command, env=os.environ | {"GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": "1"},
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                agent = psutil.Process(process.pid)
                for each in [agent, *agent.children(recursive=True)]:  # workers have sessions of their own
                    each.kill()
            process.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2) to make network namespaces with")
    made = Hosts()
    try:
        made.make()
    except OSError as error:
        made.close()
        pytest.skip(f"network namespaces cannot be made here: {error}")
    yield made
    made.close()


def losses(run: Run) -> list[float]:
    return [record["loss"] for record in run.metrics()]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("cut_s", "starts"), [(5.0, 1), (30.0, 2)], ids=["5 s", "beyond the patience"])
def test_a_cut_link_loses_no_row(
    worker: Any,
    ranks: Callable[..., list[Any]],
    hosts: Hosts,
    tiny_spec: Spec,
    tmp_path: Path,
    cut_s: float,
    starts: int,
) -> None:
    """Patience is 15 s. A cut of 5 s is waited out; after one of 30 s both have started again."""
    more = {"budget": {"steps": STEPS, "batch": 32 * ROWS}, "checkpoint": {"every": "10 steps"}}
    parallel = {"device": "cpu", "threads": 1, "dp_replicate": 2, "patience": "15s"}
    spec, path, folder = tiny_spec("hosts", parallel=parallel, **more), tmp_path / "spec.yaml", tmp_path / "rows"
    path.write_text(dump_spec(spec))
    folder.mkdir()
    run = Run(run_folder(spec))
    agents = [hosts.torchrun(which, worker.__file__, path, folder) for which in range(2)]

    def said() -> str:
        return "\n".join((folder / f"host-{which}.txt").read_text()[-3000:] for which in range(2))

    deadline = time.monotonic() + 150
    while len(losses(run)) < STEPS // 4:
        assert time.monotonic() < deadline and all(agent.poll() is None for agent in agents), said()
        time.sleep(0.02)
    assert hosts.cut(cut_s, lambda: len(losses(run))) == 0  # it stands still
    done = len(losses(run))
    assert [agent.wait(timeout=300) for agent in agents] == [0, 0], said()
    assert done < STEPS, "the run was over before the link was back"
    assert len(list(run.events("started"))) == starts
    whole = tiny_spec("whole", parallel=parallel, **more)
    assert set(ranks(2, lambda: Session(whole).train().kind)) == {"finished"}
    assert losses(run) == pytest.approx(losses(Run(run_folder(whole))), rel=1e-6) and len(losses(run)) == STEPS
    counts = worker.trained_on(folder, STEPS)
    assert set(counts) == set(range(STEPS * ROWS)) and set(counts.values()) == {1}
