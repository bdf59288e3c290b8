"""A folder with a tiny run's spec and text, and clients of a server for it."""

import os
import random
import sys
from pathlib import Path

import pytest

import bessemer

pytest.importorskip("mcp")
from mcp import StdioServerParameters

SOURCE = str(Path(bessemer.__file__).parents[1])  # this very package, wherever the process starts
SPEC = """\
name: tiny
model: {width: 32, layers: 1, heads: 2}
tokenizer: {vocab: 300}
data: {sources: {text: {path: data/}}, context: 32, validation: 10%}
budget: {steps: 30, batch: 256}
optimizer: {lr: 3e-3}
precision: fp32
parallel: {device: cpu}
lints: {silence: [data_repeated]}
"""


def write_project(folder: Path) -> None:
    draw = random.Random(0)
    words = ["the", "cat", "dog", "sat", "on", "a", "mat", "and", "ran", "to", "see", "old", "red", "hat"]
    (folder / "data").mkdir()
    for number in range(20):
        text = "\n".join(" ".join(draw.choice(words) for _ in range(30)) + "." for _ in range(20))
        (folder / "data" / f"{number}.txt").write_text(text)
    (folder / "tiny.yaml").write_text(SPEC)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    write_project(folder)
    return folder


def environment(**more: str) -> dict[str, str]:
    """What a client passes on to a server that it starts."""
    return {"PYTHONPATH": SOURCE, "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **more}


def over_stdio(folder: Path, *options: str, **variables: str) -> StdioServerParameters:
    arguments = ["-m", "bessemer", "mcp", "--root", str(folder), *options]
    return StdioServerParameters(command=sys.executable, args=arguments, env=environment(**variables))
