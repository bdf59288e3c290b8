"""The same bytes whoever does the work and however often it was killed: workers, kills, Ray."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from .conftest import make_corpus

STEPS = [
    "unicode", "whitespace", {"length": {"min_chars": 300}}, "gopher_repetition", "dedup_exact",
    {"dedup_minhash": {"preset": "fineweb"}}, "pii",
]  # fmt: skip


def write_spec(folder: Path, documents: int = 300, part: int = 60_000) -> Path:
    data = make_corpus(folder / "corpus", documents).model_dump(mode="json")
    data |= {"clean": STEPS, "part": part}
    spec = {"runs": "runs", "model": "1M", "tokenizer": {"vocab": 600}, "data": data}
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    return folder / "spec.yaml"


def command(spec: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "bessemer", "data", "prepare", str(spec), "--json", *more]


def prepare(spec: Path, *more: str) -> Path:
    """Runs the command beside the spec; the folder of the result."""
    done = subprocess.run(command(spec, *more), cwd=spec.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["page"]).parent


def wait_for(process: subprocess.Popen[bytes], folder: Path, pattern: str) -> None:
    """Until the process has made such a file, or has ended."""
    while process.poll() is None and not next(folder.glob(pattern), None):
        time.sleep(0.005)


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, str]]:
    """(the folder beside the spec, the spec, what one worker made)."""
    home = tmp_path_factory.mktemp("same")
    spec = write_spec(home)
    found = digests(prepare(spec, "--workers", "1"))
    assert any(name.endswith(".bin") for name in found) and "report.json" in found
    return home, spec, found


@pytest.mark.parametrize("workers", [2, 7])
def test_any_number_of_workers_gives_the_same_bytes(made, workers: int) -> None:
    home, spec, expected = made
    shutil.rmtree(home / "runs")
    assert digests(prepare(spec, "--workers", str(workers))) == expected


def test_a_kill_at_any_moment_loses_and_repeats_nothing(made) -> None:
    """Killed again and again at random moments of the work, each time going on with another number of workers."""
    home, spec, expected = made
    shutil.rmtree(home / "runs")
    draw, kills = random.Random(3), 0
    for _ in range(6):
        process = subprocess.Popen(
            command(spec, "--workers", str(draw.choice([1, 2, 3]))), cwd=home, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        wait_for(process, home / "runs" / ".data", ".*.lock")
        try:
            process.wait(timeout=0.5 * draw.random())
        except subprocess.TimeoutExpired:
            kills += 1
            os.killpg(process.pid, signal.SIGKILL)  # the workers at once, as a machine that goes down
            process.wait()
            for lock in (home / "runs" / ".data").glob(".*.lock"):
                lock.unlink()  # so that the next one's beginning can be seen
            continue
        break
    assert kills >= 2
    assert digests(prepare(spec, "--workers", "2")) == expected


# Forks a process that knows everything already, so that a trial costs the work alone.
KILLED = """
import os, signal, sys
from pathlib import Path
import pyarrow.ipc
from bessemer.data.curate.engine import Here
from bessemer.data.step import make_step
from bessemer.plan.decision import Plan
from bessemer.spec.load import load_spec
from bessemer.supervise.data import prepare_data

def trial(last):
    done, replace = 0, os.replace
    def counted(*paths):
        nonlocal done
        done += ".scratch-" not in str(paths[1])  # a judgement on all parts is one stretch
        if done == last:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*paths)
    os.replace = counted
    prepare_data(spec, Plan(), engine=Here())
    os._exit(0)

spec = load_spec(Path(sys.argv[1]), [])
for step in spec.data.clean:
    make_step(step, 0)
for kills in range(200):
    child = os.fork()
    if not child:
        trial(1 + kills * 5 % 13)
    if os.waitpid(child, 0)[1] == 0:
        break
print(kills)
"""


def test_a_kill_before_a_file_gets_its_name_does_no_harm(tmp_path: Path) -> None:
    """At nearly every place where something is taken for done: what was being written has no name yet."""
    spec = write_spec(tmp_path, documents=40, part=20_000)
    expected = digests(prepare(spec, "--workers", "1"))
    shutil.rmtree(tmp_path / "runs")
    script = [sys.executable, "-c", KILLED, str(spec)]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert 10 <= int(done.stdout) < 199
    assert digests(prepare(spec, "--workers", "1")) == expected


def test_workers_that_outlive_a_killed_parent_do_no_harm(made) -> None:
    home, spec, expected = made
    shutil.rmtree(home / "runs")
    process = subprocess.Popen(
        command(spec, "--workers", "2"), cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(process, home / "runs" / ".data", "steps/*/*")  # until they are at it
    process.kill()  # the parent alone
    process.wait()
    assert digests(prepare(spec, "--workers", "3")) == expected


@pytest.mark.slow
def test_ray_gives_the_same_bytes(made) -> None:
    pytest.importorskip("ray")
    home, spec, expected = made
    shutil.rmtree(home / "runs")
    assert digests(prepare(spec, "--engine", "ray", "--workers", "2")) == expected
