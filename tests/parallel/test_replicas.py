"""The keys of `parallel.replicas` on two processes: what is exact has the curve of one, what is not says so."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.parallel.replicas import assign_owners
from bessemer.plan.decision import Plan
from bessemer.plan.search.layout import Layout, record_replicas
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Job

from .test_layouts import LAYOUTS, run_on, same, spec_of

Ranks = Callable[..., list[Any]]
STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def alone(ranks: Ranks, folder: Path) -> dict[str, list[float]]:
    return run_on(ranks, "one", spec_of(folder, "one", "one", STEPS))


def spec_with(folder: Path, name: str, layout: str = "two replicas", steps: int = STEPS, **replicas: Any) -> RunSpec:
    parallel = {"device": "cpu", "threads": 1, **LAYOUTS[layout][1], "replicas": replicas}
    passes = {"micro_batch": 4} if replicas.get("static_graph") else {"micro_batch": 2}
    return spec_of(folder, name, layout, steps, parallel=parallel, budget={"steps": steps, "batch": 256, **passes})


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"bucket_mb": 1}, marks=pytest.mark.slow),
        pytest.param({"static_graph": True}, marks=pytest.mark.slow),
        pytest.param({"divide_optimizer": True}, marks=pytest.mark.slow),  # saved whole, below, with the same curve
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_changes_no_number(
    ranks: Ranks, folder: Path, alone: dict[str, list[float]], asked: dict[str, Any]
) -> None:
    same(run_on(ranks, "two replicas", spec_with(folder, f"exact-{next(iter(asked))}", **asked)), alone)


def test_bf16_rounds_what_is_sent(ranks: Ranks, folder: Path, alone: dict[str, list[float]]) -> None:
    """Three digits of each gradient: losses of 12 steps stay within a part in a thousand (5e-5 was seen)."""
    spec = spec_with(folder, "bf16", compress="bf16")
    found = run_on(ranks, "two replicas", spec)
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-3)
    assert found["loss"][1:] != pytest.approx(alone["loss"][1:], rel=2e-6)
    decided = Plan.from_json((run_folder(spec) / "plan.json").read_text()).decisions
    assert "changes the losses" in decided["parallel.replicas.compress"].reason


@pytest.mark.slow
def test_powersgd_learns_as_well(ranks: Ranks, folder: Path, alone: dict[str, list[float]]) -> None:
    """Three exact steps, then matrices of rank 2 (1e-4 of the loss was seen). The norm shows that they are sums."""
    found = run_on(ranks, "two replicas", spec_with(folder, "powersgd", compress="powersgd", rank=2))
    assert found["loss"][:4] == pytest.approx(alone["loss"][:4], rel=1e-5)
    assert found["loss"][4:] != pytest.approx(alone["loss"][4:], rel=1e-5)
    fell, falls = (curve["loss"][0] - curve["loss"][-1] for curve in (found, alone))
    assert fell == pytest.approx(falls, rel=0.02)
    assert sum(found["grad_norm"]) == pytest.approx(sum(alone["grad_norm"]), rel=0.2)


def judged(spec: RunSpec, poisoned: tuple[int, ...]) -> dict[str, Any]:
    """Train with NaN gradients on the last process at those steps; weights and moments before and after each."""
    kept: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    class Poison:
        hooks: ClassVar[list[Any]] = []

        def before_step(self, job: Job, step: int) -> None:
            while self.hooks:
                self.hooks.pop().remove()
            if step in poisoned and job.world.rank == 1:  # before DDP sees the gradient
                weight = max(job.engine.optimizer.parameters, key=torch.Tensor.numel)
                self.hooks.append(weight.register_hook(lambda gradient: gradient * math.nan))

        def after_backward(self, job: Job, step: int) -> None: ...

        def lr(self, step: int, planned: float) -> float:
            return planned

    class Attached:
        def attach(self, job: Job, tokenizer: Any) -> None:
            job.faults = Poison()
            genuine = job.engine.optimizer.step

            def step(lr: float, reject: torch.Tensor, divisor: torch.Tensor) -> None:
                def now() -> list[torch.Tensor]:
                    return [t.clone() for t in (*job.engine.model.parameters(), *job.engine.optimizer.state().values())]

                before = now()
                genuine(lr, reject, divisor)
                if bool(reject):
                    kept.append((before, now()))

            job.engine.optimizer.step = step  # type: ignore[method-assign]

    outcome = Session(spec, faults=Attached()).train()
    same_bits = all(torch.equal(a, b) for before, after in kept for a, b in zip(before, after, strict=True))
    return {"kind": outcome.kind, "vetoed": len(kept), "same": same_bits}


@pytest.mark.parametrize(
    "asked",
    [{"divide_optimizer": True}, pytest.param({"compress": "powersgd", "rank": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_veto_leaves_everything_and_the_run_goes_on(ranks: Ranks, folder: Path, asked: dict[str, Any]) -> None:
    """A gradient that is NaN must not come back through what PowerSGD remembers of it."""
    spec = spec_with(folder, f"veto-{next(iter(asked))}", **asked)
    guard = spec.guard.model_copy(update={"trial": spec.guard.trial.model_copy(update={"enabled": False})})
    spec = spec.model_copy(update={"guard": guard})
    for found in ranks(2, lambda: judged(spec, (6, 7))):
        assert found == {"kind": "finished", "vetoed": 2, "same": True}
    records = list(Run.existing(run_folder(spec)).metrics())
    assert [record["step"] for record in records if record["veto"]] == [6, 7]
    assert all(math.isfinite(record["loss"]) for record in records)
    assert records[-1]["loss"] < records[5]["loss"]


@pytest.mark.parametrize(
    "change",
    [
        ("two replicas", "one"),
        pytest.param(("one", "two replicas"), marks=pytest.mark.slow),
        pytest.param(("two replicas", "two shards"), marks=pytest.mark.slow),
    ],
)
def test_a_divided_optimizer_is_saved_whole(
    ranks: Ranks, folder: Path, alone: dict[str, list[float]], change: tuple[str, str]
) -> None:
    before, after = change
    name = f"divided {before} {after}".replace(" ", "-")

    def spec(layout: str, steps: int) -> RunSpec:
        asked = {"divide_optimizer": True} if "shards" not in layout else {}
        return spec_with(folder, name, layout, steps, **asked)

    run_on(ranks, before, spec(before, 8))  # where an evaluation is due
    found = run_on(ranks, after, spec(after, STEPS))
    same(found, alone)


def held_moments(spec: RunSpec) -> int:
    counted: list[int] = []

    class Count:
        def attach(self, job: Job, tokenizer: Any) -> None:
            counted.append(sum(tensor.numel() for tensor in job.engine.optimizer.state().values() if tensor.ndim))

    Session(spec, faults=Count()).train()
    return counted[0]


def test_each_replica_holds_about_half_of_the_moments(ranks: Ranks, folder: Path) -> None:
    (whole,) = ranks(1, lambda: held_moments(spec_with(folder, "whole", "one", 4)))
    parts = ranks(2, lambda: held_moments(spec_with(folder, "parts", steps=4, divide_optimizer=True)))
    assert sum(parts) == whole
    assert max(parts) < 0.6 * whole


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50), st.integers(1, 8))
def test_shares_are_even_to_one_tensor(sizes: list[int], among: int) -> None:
    owners = assign_owners(sizes, among)
    held = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == each) for each in range(among)]
    assert sum(held) == sum(sizes)
    assert max(held) - min(held) <= max(sizes)


@pytest.mark.parametrize(
    ("asked", "layout", "words"),
    [
        ({"compress": "bf16"}, Layout(2, 2), "parallel.replicas.compress: .*parallel.dp_shard is 2.*dp_shard: 1"),
        ({"divide_optimizer": True}, Layout(1, 4), "parallel.replicas.divide_optimizer: .*parallel.dp_shard is 4"),
        ({"bucket_mb": 50}, replace(Layout(2), tp=2), "parallel.replicas.bucket_mb: .*parallel.tp is 2"),
    ],
)
def test_refused_where_a_replica_is_divided(tmp_path: Path, asked: dict[str, Any], layout: Layout, words: str) -> None:
    with pytest.raises(UserError, match=words):
        record_replicas(spec_with(tmp_path, "x", **asked), layout, Plan())


def test_a_static_graph_takes_its_rows_in_one_pass(ranks: Ranks, folder: Path) -> None:
    spec = spec_with(folder, "passes", static_graph=True)
    spec = spec.model_copy(update={"budget": spec.budget.model_copy(update={"micro_batch": 2})})
    with pytest.raises(AssertionError, match=r"static_graph: a process takes 4 rows of a step in passes of 2.*micro_b"):
        run_on(ranks, "two replicas", spec)


def test_one_process_takes_the_same_spec(tmp_path: Path) -> None:
    plan = Plan()
    record_replicas(spec_with(tmp_path, "x", compress="powersgd", divide_optimizer=True), Layout(), plan)
    assert not plan.decisions
