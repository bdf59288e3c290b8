"""kill -9 at any moment of a save: what is committed verifies, and nothing else counts."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from bessemer.checkpoint.manifest import NAME
from bessemer.checkpoint.shelf import Shelf

KILLS = 15


def test_every_committed_checkpoint_verifies_after_kills(tmp_path):
    script = Path(__file__).with_name("saves_for_ever.py")
    command = [sys.executable, str(script), str(tmp_path), str(KILLS), "7"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(command, check=True, timeout=100, env=environment)

    shelf = Shelf(tmp_path / "checkpoints")
    committed = shelf.committed()
    assert committed
    for folder, manifest in committed:
        state = {"x": torch.zeros(40_000), "step": torch.tensor(0)}
        assert shelf.load(folder, state).step == manifest.step
        assert state["step"] == manifest.step and bool((state["x"] == manifest.step).all())

    leftovers = [path for path in shelf.folder.iterdir() if not (path / NAME).exists()]
    assert leftovers, "no kill fell into a save: the test proved nothing"
    assert sorted(shelf.sweep()) == sorted(path.name for path in leftovers)
    assert shelf.committed() == committed
