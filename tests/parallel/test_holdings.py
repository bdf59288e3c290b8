"""What each process holds is counted from the tensors that lie there, and a large one that stayed whole is named."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from bessemer.observe.format import describe_processes, format_ranks, rank_memory_table
from bessemer.parallel.shard import left_whole, local_rank_memory
from bessemer.parallel.world import World
from bessemer.plan.decision import Plan
from bessemer.run.directory import LAYOUT, Run
from bessemer.session.session import Session, run_folder, train
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Job
from bessemer.train.rank_report import balance

from .test_layouts import LAYOUTS, run_on, spec_of

Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("holdings")


class Part(nn.Module):
    """An embedding that nobody divides by tensor parallelism, and matrices that are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, 512)
        self.up, self.down = nn.Linear(512, 1024, bias=False), nn.Linear(1024, 512, bias=False)
        self.norm = nn.Linear(512, 1)


def on_a_mesh(shard: int, tensor: int) -> dict[str, Any]:
    model = Part()
    mesh = init_device_mesh("cpu", (shard, tensor), mesh_dim_names=("dp_shard", "tp"))
    if tensor > 1:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": ColwiseParallel()})
    if shard > 1:
        fully_shard(model, mesh=mesh["dp_shard"])
    world = World(rank=torch.distributed.get_rank(), size=shard * tensor)
    moments = {f"{name}.exp_avg": torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    return local_rank_memory(world, model.named_parameters(), moments).to_json()


def test_both_ways_of_dividing_at_once(ranks: Ranks) -> None:
    """FSDP over tensor parallel weights gives strided parts of a mesh of two dimensions."""
    found = ranks(4, on_a_mesh, 2, 2)
    matrices, embedding, norm = 2 * 512 * 1024, 4096 * 512, 512 + 1
    for each in found:
        weights = each["weights"]
        assert weights["whole"]["numbers"] == 0
        assert each["moments"]["divided"] == weights["divided"] == each["gradients"]["divided"]
        (words,) = each["left_whole"]
        assert words.startswith("embedding.weight (4.19 MB, 80% of") and "in 2 shards while others are in 4" in words
    held = sum(each["weights"]["divided"]["numbers"] for each in found)
    assert held == matrices + 2 * (embedding + norm)


def test_what_tensor_parallelism_leaves_whole_is_named(ranks: Ranks) -> None:
    for each in ranks(2, on_a_mesh, 1, 2):
        assert each["weights"]["whole"]["numbers"] == 4096 * 512 + 513
        assert each["weights"]["divided"] == {"tensors": 2, "numbers": 512 * 1024, "bytes": 4 * 512 * 1024}
        (words,) = each["left_whole"]
        assert "in one piece while others are in 2" in words


def test_nothing_is_said_of_whole_replicas_or_small_tensors(ranks: Ranks) -> None:
    assert [each["left_whole"] for each in ranks(2, on_a_mesh, 2, 1)] == [[], []]
    model = Part()
    assert left_whole(model.named_parameters(), sum(parameter.nbytes for parameter in model.parameters())) == []


@pytest.mark.parametrize(
    "layout", ["two shards", *(pytest.param(name, marks=pytest.mark.slow) for name in ("two replicas", "two by two"))]
)
def test_the_run_keeps_the_table(ranks: Ranks, folder: Path, layout: str) -> None:
    size, degrees = LAYOUTS[layout]
    spec = spec_of(folder, f"held-{layout.replace(' ', '-')}", layout, steps=4, optimizer={"lr": 0.01, "ema": 0.9})
    run_on(ranks, layout, spec)
    run = Run.existing(run_folder(spec))
    written = json.loads((run.folder / LAYOUT).read_text())
    assert {key: written["layout"][key] for key in degrees} == degrees
    total = next(run.events("started"))["parameters"]
    copies, divided = degrees.get("dp_replicate", 1), "dp_shard" in degrees
    for kind, numbers in {"weights": 1, "gradients": 1, "moments": 2, "averages": 1}.items():
        held = [each[kind]["divided" if divided else "whole"] for each in written["ranks"]]
        # Beside them lie the counts of steps, a number for each tensor.
        assert sum(each["numbers"] for each in held) == pytest.approx(numbers * total * copies, rel=1e-3)
    assert len(written["ranks"]) == size
    assert "parallel.held" in Plan.from_json((run.folder / "plan.json").read_text()).decisions
    assert "moments" in (run.folder / "logs" / "rank-0.log").read_text()


def test_a_divided_optimizer_shows(ranks: Ranks, folder: Path) -> None:
    parallel = {"device": "cpu", "threads": 1, "dp_replicate": 2, "replicas": {"divide_optimizer": True}}
    spec = spec_of(folder, "held-zero-1", "two replicas", steps=4, parallel=parallel)
    ranks(2, lambda: train(spec).kind)
    found = json.loads((run_folder(spec) / LAYOUT).read_text())["ranks"]
    total = next(Run(run_folder(spec)).events("started"))["parameters"]
    assert [each["weights"]["whole"]["numbers"] for each in found] == [total, total]
    assert [each["moments"]["whole"]["numbers"] for each in found] == [0, 0]
    assert sum(each["moments"]["divided"]["numbers"] for each in found) == pytest.approx(2 * total, rel=0.01)


def test_one_process_has_no_table(ranks: Ranks, folder: Path) -> None:
    spec: RunSpec = spec_of(folder, "held-one", "one", steps=4)
    run_on(ranks, "one", spec)
    assert not (run_folder(spec) / LAYOUT).exists()


def test_processes_that_hold_the_same_share_a_line() -> None:
    amount = {"divided": {"tensors": 1, "numbers": 1_200_000, "bytes": 4_800_000},
              "whole": {"tensors": 1, "numbers": 64, "bytes": 256}}  # fmt: skip
    nothing = {how: {"tensors": 0, "numbers": 0, "bytes": 0} for how in ("divided", "whole")}
    ranks = [
        {"rank": rank, "weights": amount, "gradients": amount, "moments": nothing, "averages": nothing,
         "bytes": 9_600_512 + (rank == 5) * 10**6}
        for rank in range(6)
    ]  # fmt: skip
    table = rank_memory_table(ranks)
    assert table[0].split() == ["ranks", "weights", "gradients", "total"]
    assert table[1].startswith("0-4") and "1.2M divided + 64 whole, 4.8 MB" in table[1]
    assert len(table) == 3 and table[2].startswith("5")
    assert format_ranks([5, 0, 1, 3]) == "0-1, 3, 5"


@pytest.mark.slow
def test_every_few_steps_each_tells_how_it_keeps_up(ranks: Ranks, folder: Path) -> None:
    """One process that sleeps has most to do, by its own clock and in the balance."""

    def slow(spec: RunSpec) -> str:
        class Sleepy:
            def attach(self, job: Job, tokenizer: Any) -> None:
                if job.world.rank == 1:
                    job.engine.model.blocks[0].ffn.register_forward_pre_hook(lambda *_: time.sleep(0.15))

        return Session(spec, faults=Sleepy()).train().kind

    spec = spec_of(folder, "paces", "two replicas", steps=17)
    assert ranks(2, lambda: slow(spec)) == ["finished", "finished"]
    run = Run.existing(run_folder(spec))
    told = list(run.ranks())
    assert [record["step"] for record in told] == [15]
    for record in told:
        first, second = record["own_s"]
        assert second > first + 0.1  # two passes of a step
        assert record["balance"] == pytest.approx(2 * second / (first + second), rel=1e-3)
        assert len(record["data_wait_s"]) == 2 and min(record["memory_bytes"]) > 1e6
    assert [record["step"] for record in run.metrics() if "balance" in record] == [15]
    text = "\n".join(describe_processes(json.loads((run.folder / LAYOUT).read_text()), told[-1]))
    assert "processes: 2 (dp_replicate 2)" in text and "at step 15, the slowest rank has 1." in text
    assert text.splitlines()[-2].startswith("1 ")  # the slow one first
    again = spec.model_copy(update={"budget": spec.budget.model_copy(update={"steps": 33})})
    ranks(2, lambda: slow(again))
    assert [record["step"] for record in run.ranks()] == [15, 31]


@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=64))
def test_balance_is_the_slowest_against_the_mean(own_s: list[float]) -> None:
    found = balance(own_s)
    assert found is not None and 0.999 <= found <= len(own_s)
    assert balance([0.0] * len(own_s)) is None
