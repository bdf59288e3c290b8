"""kill -9 at any moment of a save, synchronous or not: what is committed verifies, and nothing else counts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bessemer.checkpoint.manifest import NAME, verify
from bessemer.checkpoint.store import CheckpointStore


@pytest.mark.parametrize("kills", [8, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(400)])])
def test_no_kill_leaves_a_broken_checkpoint_or_costs_more_than_an_interval(tmp_path, kills):
    script = Path(__file__).with_name("saves_for_ever.py")
    command = [sys.executable, str(script), str(tmp_path), str(kills), "7"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(command, check=True, timeout=300, env=environment)

    checkpoint_store = CheckpointStore(tmp_path / "checkpoints")
    committed = checkpoint_store.committed()
    assert len(committed) >= 2 and committed[-1][1].step > kills, "the run hardly went on"
    for folder, _ in committed:
        verify(folder)
    leftovers = [path for path in checkpoint_store.folder.iterdir() if not (path / NAME).exists()]
    assert sorted(checkpoint_store.sweep()) == sorted(path.name for path in leftovers)
    assert checkpoint_store.committed() == committed
