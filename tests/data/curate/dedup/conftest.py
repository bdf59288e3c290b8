"""Running a global step over documents as the real runner does: parts, batches, files, rulings."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.data.curate.step import Arrays, Collected, Drop, GlobalStep, Outcome
from bessemer.data.read.entry import Document


def serial(function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
    return [function(task) for task in tasks]


@dataclass
class Ran:
    """What a step did to a corpus."""

    outcomes: list[Outcome]
    summary: dict[str, Any]
    decisions_by_part: list[Arrays]

    @property
    def dropped(self) -> list[int]:
        return [i for i, outcome in enumerate(self.outcomes) if isinstance(outcome, Drop)]

    def texts(self, before: Sequence[str]) -> list[str | None]:
        return [
            None if isinstance(one, Drop) else text if one is None else one
            for text, one in zip(before, self.outcomes, strict=True)
        ]


def documents(texts: Sequence[str], **more: Sequence[Any]) -> list[Document]:
    made = [Document(text, "a.jsonl", row) for row, text in enumerate(texts, 1)]
    for name, values in more.items():
        for document, value in zip(made, values, strict=True):
            setattr(document, name, value)
    return made


def collect(
    step: GlobalStep, docs: Sequence[Document], folder: Path, parts: int = 1, batch: int = 1000, gaps: int = 0
) -> list[Collected]:
    """Writes what the step collects; with `gaps`, every so many ordinals one is missing, as after an earlier step."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for part, (some, ordinals, count) in enumerate(divide(docs, parts, gaps)):
        gathered: dict[str, list[Any]] = {}
        for at in range(0, len(some), batch):
            for name, array in step.collect(some[at : at + batch], ordinals[at : at + batch]).items():
                gathered.setdefault(name, []).append(array)
        path = folder / f"{part}.npz"
        with open(path, "wb") as file:
            np.savez(file, **{name: np.concatenate(arrays) for name, arrays in gathered.items()})
        found.append(Collected(part, path, "web", count))
    return found


def divide(docs: Sequence[Document], parts: int, gaps: int) -> Iterator[tuple[list[Document], Any, int]]:
    edges = [len(docs) * i // parts for i in range(parts + 1)]
    for start, stop in pairwise(edges):
        ordinals = np.arange(stop - start, dtype=np.int64)
        if gaps:
            ordinals = ordinals + ordinals // gaps
        yield list(docs[start:stop]), ordinals, int(ordinals[-1]) + 1 if ordinals.size else 0


def run_step(
    step: GlobalStep, docs: Sequence[Document], parts: int = 1, batch: int = 1000, gaps: int = 0, each: Any = serial
) -> Ran:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        collected = collect(step, docs, folder / "collected", parts, batch, gaps)
        (folder / "scratch").mkdir()
        made, summary = step.resolve(collected, folder / "scratch", each)
        decisions_by_part = [{key: np.array(array) for key, array in decisions.items()} for decisions in made]
    assert len(decisions_by_part) == len(collected)
    outcomes: list[Outcome] = []
    for (some, ordinals, _), decisions in zip(divide(docs, parts, gaps), decisions_by_part, strict=True):
        for at in range(0, len(some), batch):
            outcomes += step.apply(some[at : at + batch], ordinals[at : at + batch], decisions)
    return Ran(outcomes, summary, decisions_by_part)


@pytest.fixture(scope="session", name="run_step")
def run_step_fixture() -> Any:
    return run_step


@pytest.fixture(scope="session", name="documents")
def documents_fixture() -> Any:
    return documents


@pytest.fixture(scope="session", name="collect")
def collect_fixture() -> Any:
    return collect


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    """`run_all` over two processes that were started afresh, as the real pool's are."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        yield lambda function, tasks: list(executor.map(function, tasks))
