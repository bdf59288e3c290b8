"""Run by test_killed_saves.py: a run that trains and saves without end, in children that are killed at random moments.

Arguments: the folder, the number of kills, a seed. Each child resumes from what the one before left, as a run does;
every other one saves asynchronously. What it holds to is checked after each kill.
"""

import mmap
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint  # once, here, and not in every child

from bessemer.checkpoint.manifest import NAME
from bessemer.checkpoint.store import CheckpointStore
from bessemer.parallel.world import World
from bessemer.spec.schema import CheckpointSpec
from bessemer.train.job import Progress
from bessemer.train.saver import CheckpointSaver

INTERVAL = 5  # steps between saves
EMPTY = {"x": torch.zeros(40_000), "step": torch.tensor(0)}


class Told:
    """Numbers that outlive the child: the last save begun, the last one it was told of."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 16)

    def write(self, place: int, step: int) -> None:
        self.memory[8 * place : 8 * place + 8] = struct.pack("q", step)

    def read(self) -> tuple[int, int]:
        begun, saved = struct.unpack("qq", self.memory[:16])
        return begun, saved


def resume(checkpoint_store: CheckpointStore) -> tuple[int, dict[str, torch.Tensor]]:
    """The newest checkpoint that there is; one that is broken fails the test."""
    state = {name: tensor.clone() for name, tensor in EMPTY.items()}
    for folder in checkpoint_store.newest_first():
        checkpoint_store.load(folder, state)
        break
    step = int(state["step"])
    assert bool((state["x"] == step).all()), f"the state of step {step} is torn"
    return step, state


def train_for_ever(folder: Path, told: Told, asynchronous: bool) -> None:
    checkpoint_store = CheckpointStore(folder)
    checkpoint_store.sweep()
    step, state = resume(checkpoint_store)

    def event(kind: str, **details: object) -> None:
        assert kind == "saved", details
        told.write(1, details["step"])  # type: ignore[arg-type]

    def begin() -> dict[str, torch.Tensor]:
        told.write(0, step)  # the saver has waited for the save before, and takes the state now
        return state

    job = SimpleNamespace(
        world=World(),
        spec=SimpleNamespace(checkpoint=CheckpointSpec(asynchronous=asynchronous), guard=SimpleNamespace(enabled=True)),
        engine=SimpleNamespace(device=torch.device("cpu"), base=None),
        data=SimpleNamespace(
            stream=SimpleNamespace(fingerprint="f", identity={}, steps=SimpleNamespace(segments=[], batch_phases=[]))
        ),
        recorder=SimpleNamespace(
            run=SimpleNamespace(
                sync=lambda: None, unwritten="", snapshot=lambda: SimpleNamespace(pack=lambda: b"records" * 100)
            ),
            progress=Progress(),
            event=event,
        ),
        state=begin,
        guard_state=dict,
    )
    saver = CheckpointSaver(checkpoint_store, "s")
    while True:
        for name in state:
            state[name] += 1  # in place, as an optimizer does, whoever is writing
        step += 1
        saver.poll(job)
        if step % INTERVAL == 0:
            saver.save(job, step, None)


def start(folder: Path, told: Told, asynchronous: bool) -> int:
    """A child, once it has begun to save."""
    begun, _ = told.read()
    child = os.fork()
    if child == 0:
        try:
            train_for_ever(folder, told, asynchronous)
        finally:
            os._exit(1)
    while told.read()[0] == begun and not os.waitpid(child, os.WNOHANG)[0]:
        time.sleep(0.001)
    return child


def main() -> None:
    folder, kills, rng = Path(sys.argv[1]) / "checkpoints", int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    told, began_s, save_s, unfinished = Told(), time.monotonic(), 0.05, 0
    for number in range(kills):
        child = start(folder, told, asynchronous=number % 2 == 1)
        if number == 0:  # how long a save takes here: the kills have to fall into them
            while told.read()[1] < 4 * INTERVAL:
                time.sleep(0.001)
            save_s = (time.monotonic() - began_s) / 4
        time.sleep(rng.uniform(0, 2 * save_s))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child ended by itself"
        unfinished += any(not (path / NAME).exists() for path in folder.iterdir())
        step, _ = resume(CheckpointStore(folder))
        begun, saved = told.read()
        assert step >= saved, f"the save of step {saved} was told of; the newest is {step}"
        assert step >= begun - INTERVAL, f"step {begun} was being saved; the newest is {step}"
        told.write(0, step)  # the next child goes on from here
    assert unfinished > kills // 10, f"{unfinished} of {kills} kills fell into a save: that proves little"
    print(f"{unfinished} of {kills} kills fell into a save; the run reached step {step}")


main()
