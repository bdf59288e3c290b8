"""How several processes end together: one line for a mistake that all of them meet, one step for a signal to any."""

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli import main
from bessemer.parallel.world import World
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.load import dump_spec
from bessemer.spec.schema import RunSpec

Ranks = Callable[..., list[Any]]
Spec = Callable[..., RunSpec]


def command(*arguments: str) -> tuple[Any, str]:
    """Exit code and standard error of `bessemer ARGUMENTS` in this process."""
    sys.argv, printed = ["bessemer", *arguments], io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        try:
            main.run()
        except SystemExit as left:
            return left.code, printed.getvalue()
    return 0, printed.getvalue()


def train(ranks: Ranks, folder: Path, spec: RunSpec) -> list[tuple[Any, str]]:
    path = folder / "spec.yaml"
    path.write_text(dump_spec(spec))
    return ranks(2, lambda: command("train", str(path), "--plain"))


def test_a_refused_layout_is_one_line_of_one_rank_and_leaves_no_run(
    ranks: Ranks, tiny_spec: Spec, tmp_path: Path
) -> None:
    spec = tiny_spec("refused", parallel={"device": "cpu", "threads": 1, "tp": 2})
    line = "parallel.tp: 2 does not divide 2 heads, 1 key-value heads and 64 inner units: write 1\n"
    assert train(ranks, tmp_path, spec) == [(2, line), (2, "")]
    assert not run_folder(spec).exists()


def test_a_mistake_that_all_ranks_meet_later_is_one_line(ranks: Ranks, tiny_spec: Spec, tmp_path: Path) -> None:
    """The rows of a pass are only known when the data is."""
    parallel = {"device": "cpu", "threads": 1, "dp_replicate": 2, "replicas": {"static_graph": True}}
    (code, line), other = train(ranks, tmp_path, tiny_spec("late", parallel=parallel))
    assert code == 2 and line.startswith("parallel.replicas.static_graph: a process takes 4 rows") and other == (2, "")
    assert line.count("\n") == 1


def test_a_mistake_in_the_rows_that_rank_0_read_is_one_line(ranks: Ranks, tiny_spec: Spec, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "How hot?"}, {"role": "assistant", "content": "Very hot.", "weight": 0}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{json.dumps({'messages': turns})}\n" * 8)
    data = {"sources": {"chats": {"path": [str(rows)]}}, "context": 64, "validation": 0}
    (code, line), other = train(ranks, tmp_path, tiny_spec("rows", objective="sft", data=data))
    assert code == 2 and "[nothing_trained]" in line and line.count("\n") == 1 and other == (2, "")


def test_a_mistake_that_one_rank_meets_is_said_by_it(
    ranks: Ranks, tiny_spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bessemer.parallel.world.ERROR_S", 0.5)

    def work() -> bool:
        world = World(rank=int(os.environ["RANK"]), size=2)
        same = world.rank_0_reports_same_error(f"rank {world.rank} has no room") if world.rank == 1 else False
        time.sleep(1.0 if world.rank == 0 else 0.0)  # the store has to be there
        return same

    assert ranks(2, work) == [False, False]


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_signal_to_one_rank_ends_all_at_the_same_step_for_its_reason(
    ranks: Ranks, tiny_spec: Spec, when: str
) -> None:
    """Also one that comes while the message of a step is under way: the others do not know of it yet."""
    parallel = {"device": "cpu", "threads": 1, "dp_replicate": 2}
    spec = tiny_spec(f"signal-{when}", parallel=parallel)

    def work() -> tuple[str, str, int]:
        session = Session(spec)
        sums, messages = World.sums, []

        def signalled(world: World, numbers: Any) -> list[float]:
            messages.append(1)
            if world.rank == 1 and len(messages) == 6:
                if when == "before":
                    session.interrupt.signal = "SIGTERM"
                    return sums(world, numbers)
                found = sums(world, numbers)
                session.interrupt.signal = "SIGTERM"
                return found
            return sums(world, numbers)

        World.sums = signalled  # type: ignore[method-assign]
        outcome = session.train()
        return outcome.kind, outcome.reason, outcome.step

    first, second = ranks(2, work)
    assert first == second and first[:2] == ("interrupted", "SIGTERM") and first[2] < 24
    assert [event["reason"] for event in Run.existing(run_folder(spec)).events("interrupted")] == ["SIGTERM"]
