"""Run by test_killed_saves.py: saves and thins without end, in children that are killed at random moments.

Arguments: the folder, the number of kills, a seed. A child writes the step down after each save that returned.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint  # once, here, and not in every child

from bessemer.checkpoint.manifest import Manifest
from bessemer.checkpoint.shelf import Shelf


def save_for_ever(folder: Path, done: Path, step: int) -> None:
    shelf = Shelf(folder)
    while True:
        state = {"x": torch.full((40_000,), float(step)), "step": torch.tensor(step)}
        manifest = Manifest(step, 0, "f", {}, "s", [], [], {}, 1, "cpu", {}, time.time())
        newest = shelf.save(state, manifest)
        with done.open("a") as file:
            file.write(f"{step}\n")
        shelf.thin(newest, keep_last=3, keep_best=False)
        step += 1


def main() -> None:
    folder, kills, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    for number in range(kills):
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(folder / "checkpoints", folder / "done", 1000 * number)
            finally:
                os._exit(1)
        while not (folder / "checkpoints" / f"step-{1000 * number:08d}.a1").exists():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.12))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child ended by itself"
        done = (folder / "done").read_text().split() if (folder / "done").exists() else []
        steps = {manifest.step for _, manifest in Shelf(folder / "checkpoints").committed()}
        assert not done or int(done[-1]) in steps, (
            f"the save of step {done[-1]} had returned; there are {steps}"
        )


main()
