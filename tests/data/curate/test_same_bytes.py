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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import make_corpus

STEPS = [
    "unicode", "whitespace", {"length": {"min_chars": 300}}, "gopher_repetition", "dedup_exact",
    {"dedup_minhash": {"preset": "fineweb"}}, "pii",
]  # fmt: skip


def write_spec(folder: Path, documents: int = 300, part: int = 60_000, clean: Sequence[Any] = STEPS) -> Path:
    data = make_corpus(folder / "corpus", documents).model_dump(mode="json")
    data |= {"clean": clean, "part": part}
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


@pytest.mark.slow  # test_faults.py compares what two workers and one made, after a kill
@pytest.mark.parametrize("workers", [2, 7])
def test_any_number_of_workers_gives_the_same_bytes(made, workers: int) -> None:
    home, spec, expected = made
    shutil.rmtree(home / "runs")
    assert digests(prepare(spec, "--workers", str(workers))) == expected


@pytest.mark.slow
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


# Forks a process that knows everything already, so that a trial costs the work alone. Each trial ends before the first
# name given, or behind the first deletion, at which none has ended yet.
KILLED = """
import os, signal, sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
import pyarrow.ipc
from bessemer.data.curate.engine import LocalEngine
from bessemer.data.curate.step import make_step
from bessemer.plan.decision import Plan
from bessemer.spec.load import load_spec
from bessemer.session.data import prepare_data

def end_at(name):
    # The decisions of a global step are one stretch; temporary files have another name in every trial.
    if name not in ended_at and ".scratch-" not in name and not name.endswith(".tmp"):
        record.write_text("\\n".join([*ended_at, name]))
        os.kill(os.getpid(), signal.SIGKILL)

def replaced(replace, source, target):
    end_at(str(target))
    replace(source, target)

def deleted(delete, path, **more):
    delete(path, **more)
    end_at(str(path))

def listed(scandir, path="."):
    # What is deleted goes in whatever order the file system has: here by suffix, so that of every part something is
    # gone long before what tells that it is done.
    entries = scandir(path)
    return nullcontext(sorted(entries, key=suffix, reverse=True)) if isinstance(path, int) else entries

def suffix(entry):
    return Path(entry.name).suffix

spec = load_spec(Path(sys.argv[1]), [])
for part in (spec.data, *spec.data.sources.values()):
    for step in part.clean:
        make_step(step, 0)
pyarrow.RecordBatch.from_pydict({"a": [0]})  # loads whatever that needs
record, status, kills = Path("ended_at"), signal.SIGKILL, -1
record.touch()
os.replace, os.scandir = partial(replaced, os.replace), partial(listed, os.scandir)
os.unlink, os.rmdir = partial(deleted, os.unlink), partial(deleted, os.rmdir)
while status == signal.SIGKILL:
    kills += 1
    ended_at = record.read_text().splitlines()
    child = os.fork()
    if not child:
        prepare_data(spec, Plan(), engine=LocalEngine())
        os._exit(0)
    status = os.waitpid(child, 0)[1]
print(kills)
sys.exit(status != 0)
"""


@pytest.mark.slow  # some 170 trials, each with writes synced to the disk
@pytest.mark.timeout(600)
def test_a_kill_between_any_two_changes_of_names_does_no_harm(tmp_path: Path) -> None:
    """Killed once at every place where something gets its name, or where what is no longer needed is deleted."""
    spec = write_spec(tmp_path, 20, 15_000, ["whitespace", "dedup_exact"])
    expected = digests(prepare(spec, "--workers", "1"))
    shutil.rmtree(tmp_path / "runs")
    script = [sys.executable, "-c", KILLED, str(spec)]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
    assert digests(prepare(spec, "--workers", "1")) == expected


@pytest.mark.slow
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
