"""`--profile` over two processes: a trace of each rank, their parts and their collectives in one report."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bessemer.observe.profile import COMMUNICATION, read_trace, step_time
from bessemer.observe.view import RunView
from bessemer.session.inspect import ProfileSession
from bessemer.session.session import run_folder
from bessemer.spec.schema import RunSpec

Ranks, Spec = Callable[..., list[Any]], Callable[..., RunSpec]


def test_two_ranks_are_profiled_together(ranks: Ranks, tiny_spec: Spec) -> None:
    spec = tiny_spec("two", guard={"look_every": 4})

    def work() -> str:
        session = ProfileSession(spec, RunView(), steps=2)
        assert session.train().reason == "profiled"
        return session.text

    first, second = ranks(2, work)
    folder = run_folder(spec) / "profile"
    assert "gloo all_reduce" in first and second == "" and (folder / "profile.txt").read_text() == first
    profile = json.loads((folder / "profile.json").read_text())
    assert [rank["rank"] for rank in profile["ranks"]] == [0, 1] and profile["memory_peak"] == {}
    for rank in profile["ranks"]:
        time = step_time(read_trace(folder / f"trace-rank-{rank['rank']}.json.gz"))
        assert rank["parts_ms"][COMMUNICATION] == pytest.approx(time.parts[COMMUNICATION] / 2e3)
    reduced = next(row for row in profile["collectives"] if row["name"] == "gloo all_reduce")
    assert reduced["calls"] >= 1 and reduced["wait_ms"] is not None and 0 <= reduced["wait_ms"] < reduced["ms"]
    assert [path.name for path in Path(spec.runs).iterdir() if path.name.startswith(".profile")] == []
    assert not (run_folder(spec) / "events.jsonl").exists()  # the run has not begun
