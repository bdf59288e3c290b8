"""Incidents of several processes: the same trial, verdict, documents and losses as in one. What goes wrong in one of
them is judged by all."""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed.checkpoint  # noqa: F401  imported before the fork, once for all

from bessemer.data.stream.batches import Batch
from bessemer.data.stream.exclusions import read_exclusions
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.guard.judge import NONFINITE, REASONS
from bessemer.parallel.shard import local
from bessemer.parallel.world import World, join_process_group
from bessemer.plan.search.layout import Layout
from bessemer.run.directory import Run
from bessemer.session.replay import documents_of, try_step
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Job, Outcome
from bessemer.trial.measure import global_batches, local_share
from bessemer.trial.replay import Difference, tensor_differences

Ranks = Callable[..., list[Any]]
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "two shards": (2, {"dp_shard": 2}),
    "two replicas": (2, {"dp_replicate": 2}),
    "two by two": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "two columns": (2, {"dp_replicate": 1, "cp": 2}),
    "two tensors": (2, {"dp_replicate": 1, "tp": 2}),
}
WORDS = ["the", "steel", "was", "poured", "while", "blower", "watched", "flame", "and", "turned", "vessel", "low"]
STEPS, BAD, BAD_STEPS = 56, 40, 2
JUMP = 36  # the step that learns too fast


def layouts(*fast: str) -> list[Any]:
    names = [name for name in LAYOUTS if name != "one"]
    long = [pytest.mark.slow, pytest.mark.timeout(600)]  # a trial of tensors takes over a minute on a busy machine
    return [pytest.param(name, marks=[] if name in fast else long, id=name) for name in names]


def write_shards(folder: Path, poisoned: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """Two files of documents; the poisoned rows of one of them are noise."""
    draw = random.Random(0)
    folder.mkdir(exist_ok=True)
    for name in ("web-0016", "web-0017"):
        lines = []
        for row in range(1, 801):
            text = " ".join(draw.choice(WORDS) for _ in range(40))
            if name == "web-0017" and row in poisoned:
                noise = random.Random(row)
                text = "".join(chr(noise.randrange(0x4E00, 0x9FFF)) for _ in range(120))
            lines.append(json.dumps({"text": text}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def spec_of(folder: Path, name: str, layout: str, **more: Any) -> RunSpec:
    """The tokenizer is of the clean files and nothing is held out: the same documents come at the same steps."""
    poisoned = (folder / "poisoned").exists() and "poison" in name
    tokenizer = folder / "runs" / "clean" / "tokenizer.json"
    spec: dict[str, Any] = {
        "name": name, "runs": str(folder / "runs"), "precision": "fp32",
        "model": {"width": 32, "layers": 1, "heads": 2}, "optimizer": {"lr": 1e-2},
        "tokenizer": {"path": str(tokenizer)} if poisoned else {"vocab": 320},
        "budget": {"steps": STEPS, "batch": 16 * 48, "micro_batch": 4},
        "data": {
            "context": 48, "validation": 0, "packing": "pad", "padding": {"long": "truncate"},
            "sources": {"web": str(folder / ("poisoned" if poisoned else "shards") / "*.jsonl")},
        },
        "guard": {"warmup": 16, "window": 32}, "checkpoint": {"every": 8},
        "parallel": {"device": "cpu", "threads": 1, **LAYOUTS[layout][1]},
    }  # fmt: skip
    return RunSpec.model_validate(spec | more)


class Faults:
    """One step's gradients of one process go wrong, once."""

    def __init__(self, step: int, rank: int, value: float) -> None:
        self.step, self.rank, self.value, self.done = step, rank, value, False

    def attach(self, job: Job, tokenizer: Tokenizer) -> None:
        job.faults = self

    def before_step(self, job: Job, step: int) -> None: ...

    def after_backward(self, job: Job, step: int) -> None:
        if step == self.step and job.world.rank == self.rank and not self.done:
            self.done = True
            for parameter in job.engine.model.parameters():
                assert parameter.grad is not None
                local(parameter.grad).mul_(self.value)

    def lr(self, step: int, planned: float) -> float:
        return planned


class Jump(Faults):
    """One step learns far too fast: damage that only a rollback undoes."""

    def after_backward(self, job: Job, step: int) -> None: ...

    def lr(self, step: int, planned: float) -> float:
        if step != self.step or self.done:
            return planned
        self.done = True
        return planned * self.value


def run_on(ranks: Ranks, layout: str, spec: RunSpec, make: Callable[[], Any] = lambda: None) -> Run:
    def work() -> Outcome:
        return Session(spec, faults=make()).train()

    outcomes = ranks(LAYOUTS[layout][0], work)
    assert {(outcome.kind, outcome.step) for outcome in outcomes} == {("finished", spec.budget.steps)}
    return Run.existing(run_folder(spec))


def told(run: Run, kind: str, *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(event[key] for key in keys) for event in run.events(kind)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("incidents")
    write_shards(folder / "shards")
    return folder


def same_losses(run: Run, alone: Run, within: float) -> None:
    """To what rounding grows to over these steps: at a learning rate of 0.004 to 0.1 %, at 0.01 to some percent."""
    found, wanted = ([record["loss"] for record in one.metrics() if not record["veto"]] for one in (run, alone))
    assert len(found) == len(wanted)
    assert found == pytest.approx(wanted, rel=within)


def going_back(copies: str) -> dict[str, Any]:
    return {"guard": {"warmup": 16, "window": 32, "copies": copies}, "optimizer": {"lr": 4e-3}}


def jumps() -> Jump:
    return Jump(JUMP, 0, 100.0)


@pytest.fixture(scope="module")
def rolled_back(folder: Path, ranks: Ranks) -> Callable[[str], Run]:
    """One process's run, with copies in memory or without."""

    @cache
    def run(copies: str) -> Run:
        return run_on(ranks, "one", spec_of(folder, f"back-{copies}-one", "one", **going_back(copies)), jumps)

    return run


@pytest.fixture(scope="module")
def poisoned(folder: Path, ranks: Ranks) -> tuple[set[int], Run]:
    """A clean run tells which documents the bad steps read; those of one file are poisoned for the others."""
    run_on(ranks, "one", spec_of(folder, "clean", "one"))
    rows: set[int] = set()
    for step in range(BAD, BAD + BAD_STEPS):
        found = documents_of(folder / "runs" / "clean", step)
        rows |= {document["row"] for document in found if document["file"].endswith("web-0017.jsonl")}
    write_shards(folder / "poisoned", rows)
    return rows, run_on(ranks, "one", spec_of(folder, "poison-one", "one"))


@pytest.mark.parametrize("layout", layouts())
def test_a_poisoned_file_is_convicted_as_by_one_process(
    ranks: Ranks, folder: Path, poisoned: tuple[set[int], Run], layout: str
) -> None:
    rows, alone = poisoned
    run = run_on(ranks, layout, spec_of(folder, f"poison-{layout}".replace(" ", "-"), layout))
    assert told(run, "veto", "step") == told(alone, "veto", "step") == [(BAD + k,) for k in range(BAD_STEPS)]
    assert {verdict for (verdict,) in told(run, "trial", "verdict")} == {"data"}
    assert told(run, "trial", "step", "verdict", "convicted") == told(alone, "trial", "step", "verdict", "convicted")
    assert {(entry.file, entry.row) for entry in read_exclusions(run.folder / "exclusions.jsonl")} == {
        (entry.file, entry.row) for entry in read_exclusions(alone.folder / "exclusions.jsonl")
    }
    assert {entry.row for entry in read_exclusions(run.folder / "exclusions.jsonl")} == rows
    report = json.loads((run.folder / "reports" / f"anomaly-{BAD:06d}.json").read_text())
    assert report["trial"]["verdict"] == "data" and report["recovery"]["rejoined_at"] is not None
    same_losses(run, alone, 0.05)
    # By hand, in one process: its last digits are not those of several, which is no fault of the hardware.
    assert try_step(run.folder, BAD).trial.verdict == "data"


@pytest.mark.parametrize("layout", layouts("two shards"))
def test_a_gradient_of_one_process_that_was_not_computed_is_the_hardwares(
    ranks: Ranks, folder: Path, layout: str
) -> None:
    spec = spec_of(folder, f"nan-{layout}".replace(" ", "-"), layout, budget={"steps": 26, "batch": 384})
    run = run_on(ranks, layout, spec, lambda: Faults(20, LAYOUTS[layout][0] - 1, float("nan")))
    (trial,) = run.events("trial")
    assert (trial["step"], trial["verdict"], trial["state_healthy"]) == (20, "hardware", True)
    assert told(run, "veto", "step", "reason") == [(20, REASONS[NONFINITE])]


@pytest.mark.slow
def test_one_process_has_the_same_verdict(ranks: Ranks, folder: Path) -> None:
    spec = spec_of(folder, "nan-one", "one", budget={"steps": 26, "batch": 384})
    run = run_on(ranks, "one", spec, lambda: Faults(20, 0, float("nan")))
    assert told(run, "trial", "step", "verdict", "state_healthy") == [(20, "hardware", True)]


@pytest.mark.parametrize("copies", ["auto", "off"])
@pytest.mark.parametrize("layout", layouts())
def test_a_rollback_leads_to_the_losses_of_one_process(
    ranks: Ranks, folder: Path, rolled_back: Callable[[str], Run], layout: str, copies: str
) -> None:
    spec = spec_of(folder, f"back-{copies}-{layout}".replace(" ", "-"), layout, **going_back(copies))
    run, alone = run_on(ranks, layout, spec, jumps), rolled_back(copies)
    assert told(run, "trial", "step", "verdict") == told(alone, "trial", "step", "verdict")
    back = told(run, "rollback", "step", "to_step", "origin")
    assert back == told(alone, "rollback", "step", "to_step", "origin") and len(back) == 1
    assert (back[0][2] == "memory") == (copies == "auto") and back[0][1] <= JUMP
    assert told(run, "scene_saved", "step") and (run.folder / "scenes").is_dir()
    same_losses(run, alone, 2e-3)


def test_what_one_process_holds_differently_is_known_to_all(ranks: Ranks) -> None:
    """Replicas of a part count once, and a part that differs is one of the whole."""

    def compared() -> dict[str, Difference]:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        world = join_process_group(torch.device("cpu"))
        mesh = init_device_mesh("cpu", (2,))
        whole = {"model.parts": torch.ones(6, 2), "model.same": torch.ones(3), "optimizer.count": torch.ones(4)}
        places = {"model.parts": Shard(0), "model.same": Replicate(), "optimizer.count": Replicate()}
        state = {name: distribute_tensor(tensor, mesh, [places[name]]) for name, tensor in whole.items()}
        found = {name: local(tensor).clone() for name, tensor in state.items()}
        found["optimizer.count"][0] = 3.0  # in both
        if world.rank == 1:
            found["model.parts"][2, 1] = float("nan")
        return tensor_differences(found, state, world)

    for result in ranks(2, compared):
        assert list(result) == ["model.parts", "optimizer.count"]
        assert (result["model.parts"].elements, result["model.parts"].of) == (1, 12)
        assert result["model.parts"].largest == float("inf")
        assert result["optimizer.count"] == Difference(1, 4, 2.0, 2.0, 1.0)


def test_the_rows_of_a_step_fall_to_the_processes_that_had_them_and_others_fill_up_with_padding() -> None:
    stream = SimpleNamespace(micro_batches=lambda step, rows, rank, of: [_batch(10 * rank + k) for k in range(2)])
    worlds = [_world(rank) for rank in range(2)]
    engine: Any = SimpleNamespace(world=worlds[0], plan=SimpleNamespace(micro_rows=1))
    whole = global_batches(engine, stream, 0)
    shares = [local_share(world, whole) for world in worlds]
    assert [[int(batch.positions[0]) for batch in share] for share in shares] == [[0, 1], [10, 11]]
    shares = [local_share(world, whole[:3]) for world in worlds]
    assert [[int(batch.positions[0]) for batch in share] for share in shares] == [[0, 1], [10, -1]]
    padding = shares[1][1]
    assert padding.count == 0 and not padding.tokens.any() and padding.tokens.shape == (1, 4)


def _batch(position: int) -> Batch:
    ids, rows = np.full((2, 4), 7), np.full(2, position)
    return Batch(ids, ids, np.ones((2, 4), np.float32), np.zeros((2, 4), np.int32), rows, rows * 0, rows)


def _world(rank: int) -> World:
    world = World(rank, 2, layout=Layout(dp_replicate=2))
    world.mesh = SimpleNamespace(get_local_rank=lambda name: rank if name == "dp_replicate" else 0)  # type: ignore[assignment]
    return world
