"""DeepSpeed as a run's engine: its curve is that of one process without it, a veto leaves no trace, a checkpoint goes
from any stage to any other and to torch's own layouts. Two gloo processes on this machine."""

import importlib.metadata
import importlib.util
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # imported before the fork, once for all

from bessemer.errors import UserError
from bessemer.model.transformer import build_model
from bessemer.parallel.deepspeed import import_deepspeed, initialize_deepspeed
from bessemer.parallel.world import World
from bessemer.plan.decision import Plan
from bessemer.plan.search.layout import check_deepspeed, check_engine
from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

Ranks = Callable[..., list[Any]]
Curves = dict[str, list[float]]
STEPS = 50
SHAPE = ModelShape(vocab=96, layers=2, width=32, heads=2, kv_heads=1, head_dim=16, ffn=48)
KINDS = ["0", "1", "2", "3", "1 cpu", "2 cpu", "3 cpu"]

there = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
whole_run = [there, pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(900)]


def build_once(kind: str) -> None:
    """What DeepSpeed compiles when it is first used, before anything is forked: minutes on a fresh machine, and kept
    where torch keeps it outside of tests."""
    kept = Path("~/.cache/torch_extensions").expanduser() / f"py{sys.version_info.major}{sys.version_info.minor}_cpu"
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(kept))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    from deepspeed.accelerator import get_accelerator

    for name in ("ShareMemCommBuilder", *(["CPUAdamBuilder"] if "cpu" in kind else [])):
        get_accelerator().create_op_builder(name).load()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


def bare(parallel: dict[str, Any], **more: Any) -> RunSpec:
    """A spec whose data nobody reads."""
    needed = {"model": {"width": 32, "layers": 2, "heads": 2}, "data": {"sources": {"words": {"path": ["words.txt"]}}}}
    return RunSpec.model_validate({**needed, **more, "parallel": {"device": "cpu", **parallel}})


def asked(kind: str) -> dict[str, Any]:
    """ "2 cpu" is zero 2 with offload; "torch" is no DeepSpeed at all."""
    if kind == "torch":
        return {}
    zero, _, offload = kind.partition(" ")
    return {"engine": "deepspeed", "deepspeed": {"zero": int(zero), "offload": offload or "none"}}


def spec_of(folder: Path, name: str, kind: str, steps: int = STEPS, **more: Any) -> RunSpec:
    corpus = folder / "words.jsonl"
    if not corpus.exists():
        draw = random.Random(0)
        words = ["steel", "iron", "blast", "flame", "ore", "coke", "slag", "heat", "pour", "mould", "ingot", "forge"]
        lines = (json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(20, 120)))}) for _ in range(120))
        corpus.write_text("\n".join(lines) + "\n")
    data: dict[str, Any] = {
        "name": name, "runs": str(folder / "runs"), "precision": "fp32", "tokenizer": {"vocab": 300},
        "model": {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64},
        "data": {"sources": {"words": {"path": [str(corpus)]}}, "context": 32, "validation": 0.1},
        "budget": {"steps": steps, "batch": 256, "micro_batch": 2}, "optimizer": {"lr": 0.002, "layer_decay": 0.9},
        "schedule": {"kind": "cosine", "warmup": 2}, "evaluate": {"every": "25 steps"},
        "checkpoint": {"every": "25 steps"}, "parallel": {"device": "cpu", "threads": 1, **asked(kind)},
    }  # fmt: skip
    return RunSpec.model_validate(data | more)


def curves(ranks: Ranks, size: int, spec: RunSpec) -> Curves:
    """Train in so many processes; what was measured."""
    assert set(ranks(size, lambda: train(spec).kind)) == {"finished"}
    run = Run.existing(run_folder(spec))
    records = list(run.metrics())
    found = {key: [record[key] for record in records] for key in ("loss", "grad_norm", "lr")}
    return found | {"validation": [record["loss"] for record in run.validations()][-1:]}


@pytest.fixture(scope="module")
def alone(ranks: Ranks, folder: Path) -> Curves:
    """The native run of one process."""
    return curves(ranks, 1, spec_of(folder, "one", "torch"))


def same(found: Curves, wanted: Curves) -> None:
    """To what sums in another order cost: 1.4e-7 of the loss and 9e-7 of the norm were seen. With five times this
    learning rate they grow to 4e-3 within 50 steps, also between one process and two replicas without DeepSpeed."""
    assert len(found["loss"]) == STEPS
    for key, limit in {"loss": 5e-6, "grad_norm": 1e-4, "lr": 1e-12, "validation": 5e-6}.items():
        assert found[key] == pytest.approx(wanted[key], rel=limit, abs=limit), key


class TestRuns:
    """Whole runs, through `train`."""

    pytestmark = whole_run

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_curve_is_that_of_one_process_without_it(
        self, ranks: Ranks, folder: Path, alone: Curves, kind: str
    ) -> None:
        build_once(kind)
        same(curves(ranks, 2, spec_of(folder, f"zero-{kind}".replace(" ", "-"), kind)), alone)

    @pytest.mark.parametrize(
        "change",
        [("2", "2"), ("3", "3"), ("3 cpu", "3 cpu"), ("2", "torch"), ("torch", "3"), ("3", "1"), ("2 cpu", "3")],
        ids="-".join,
    )
    def test_a_checkpoint_is_continued_by_any_other(
        self, ranks: Ranks, folder: Path, alone: Curves, change: tuple[str, str]
    ) -> None:
        """By the same two processes, by one of torch's, from one of torch's: the curve is that of the unbroken run."""
        before, after = change
        build_once(before + after)
        name = f"from {before} to {after}".replace(" ", "-")
        schedule = {"kind": "constant", "warmup": 2}
        unbroken = curves(ranks, 1, spec_of(folder, f"{name}-whole", "torch", schedule=schedule))
        first = spec_of(folder, name, before, steps=25, schedule=schedule)
        curves(ranks, 1 if before == "torch" else 2, first)
        found = curves(ranks, 1 if after == "torch" else 2, spec_of(folder, name, after, schedule=schedule))
        same(found, unbroken)

    def test_a_poisoned_row_is_vetoed_and_named(self, ranks: Ranks, folder: Path) -> None:
        build_once("2")
        poison = folder / "noise.txt"
        poison.write_text("".join(map(chr, random.Random(0).choices(range(1, 32), k=2000))))
        words = spec_of(folder, "words", "torch").data.model_dump()["sources"]
        sources = {**words, "noise": {"path": [str(poison)], "weight": 0.02}}
        spec = spec_of(
            folder, "poison", "2", budget={"steps": 160, "batch": 64}, guard={"loss_sigma": 5.0},
            data={"sources": sources, "context": 32, "validation": 0.1},
            optimizer={"lr": 0.01}, schedule={"kind": "constant", "warmup": 2},  # fast enough to know noise from words
        )  # fmt: skip
        curves(ranks, 2, spec)
        vetoes = list(Run.existing(run_folder(spec)).events("veto"))
        assert vetoes and all(veto["documents"][0]["file"] == str(poison) for veto in vetoes)

    @pytest.mark.parametrize("kind", ["2", "3"])
    def test_recomputed_activations_and_an_average_change_nothing(
        self, ranks: Ranks, folder: Path, alone: Curves, kind: str
    ) -> None:
        build_once(kind)
        more: dict[str, Any] = {"memory": {"activations": "full"}}
        if kind == "2":
            optimizer = {"lr": 0.002, "layer_decay": 0.9, "ema": 0.9}
            native = curves(ranks, 1, spec_of(folder, "average", "torch", optimizer=optimizer))
            same(curves(ranks, 2, spec_of(folder, "average-2", "2", optimizer=optimizer, **more)), native)
        else:
            same(curves(ranks, 2, spec_of(folder, "again-3", kind, **more)), alone)


def steps_of(kind: str, steps: list[str], clip: float = 0.5) -> dict[str, torch.Tensor]:
    """Weights and moments after these steps of two micro-batches each, in this process of several."""
    world = World(dist.get_rank(), dist.get_world_size())
    spec = bare(asked(kind))
    model = build_model(SHAPE, "cpu", seed=1)
    optimizer = initialize_deepspeed(model, spec, world, micro_rows=2)
    for step in steps:
        draw = torch.Generator().manual_seed(int(step[0]) * 100 + world.rank)
        for last in (False, True):
            tokens = torch.randint(96, (2, 8), generator=draw)
            hidden = model(tokens)
            loss = torch.nn.functional.cross_entropy((hidden @ model.head_weight.T).flatten(0, 1), tokens.flatten())
            if step.endswith("nan") and world.rank == 1:  # one process's alone
                loss = loss * float("nan")
            optimizer.backward(loss, last)
        norm = world.add(optimizer.square()).sqrt().float()
        assert bool(norm.isfinite()) != step.endswith("nan")
        if step.endswith("dropped"):  # at an incident: nobody steps at all
            optimizer.discard()
            continue
        reject = torch.tensor(float(step.endswith(("nan", "veto"))))
        optimizer.step(0.01, reject, (norm / clip).clamp(min=1.0))
    state = {f"model.{name}": tensor.clone() for name, tensor in optimizer.weights(model).items()}
    return state | {name: tensor.clone() for name, tensor in optimizer.state().items()}


def trace_of_a_veto(kind: str) -> tuple[list[str], list[str], float]:
    """What differs, bit for bit, where vetoed and dropped steps stand between; what never moved; the counts."""
    plain = steps_of(kind, ["1", "2", "3"])
    vetoed = steps_of(kind, ["9 nan", "1", "8 veto", "2", "7 dropped", "9 nan", "3"])
    first = steps_of(kind, [])
    differs = [name for name in plain if not torch.equal(plain[name], vetoed[name])]
    still = [name for name in plain if torch.equal(plain[name], first[name])]
    return differs, still, float(next(value for name, value in plain.items() if name.endswith(".step")))


@there
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_vetoed_step_leaves_no_bit_behind(ranks: Ranks, kind: str) -> None:
    """Also before the first update, and where only one process's gradients were not numbers."""
    build_once(kind)
    for differs, still, count in ranks(2, trace_of_a_veto, kind):
        assert not differs
        assert not still
        assert count == 3.0


def put_back_and_read(kind: str) -> list[str]:
    world = World(dist.get_rank(), dist.get_world_size())
    spec = bare(asked(kind))
    odd = ModelShape(vocab=95, layers=1, width=30, heads=3, kv_heads=1, head_dim=10, ffn=47)  # parts need padding
    model = build_model(odd, "cpu", seed=1)
    optimizer = initialize_deepspeed(model, spec, world, micro_rows=2)
    state = optimizer.targets(model)
    for number, (name, tensor) in enumerate(state.items()):
        tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(number)) if tensor.ndim else 7.0)
        assert name.startswith(("model.", "optimizer."))
    wanted = {name: tensor.clone() for name, tensor in state.items()}
    optimizer.apply_loaded(model, state)
    found = {f"model.{name}": tensor for name, tensor in optimizer.weights(model).items()}
    found |= {f"optimizer.{name}": tensor for name, tensor in optimizer.state().items()}
    assert set(found) == set(wanted)
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


@there
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_put_back_is_what_is_read(ranks: Ranks, kind: str) -> None:
    build_once(kind)
    assert ranks(2, put_back_and_read, kind) == [[], []]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"parallel": {"dp_shard": 2}}, "parallel.dp_shard: DeepSpeed divides by parallel.deepspeed.zero"),
    ({"parallel": {"dp_replicate": 4}}, "parallel.dp_replicate: there are 2 processes: write 2"),
    ({"parallel": {"deepspeed": {"zero": 0, "offload": "cpu"}}}, "parallel.deepspeed.offload: cpu needs divided"),
    ({"parallel": {"deepspeed": {"zero": 2, "offload": "nvme"}}}, "parallel.deepspeed.offload: nvme needs zero: 3"),
    ({"parallel": {"deepspeed": {"zero": 3, "offload": "nvme"}}}, "parallel.deepspeed.folder: offload: nvme needs"),
    ({"parallel": {"deepspeed": {"folder": "/local"}}}, "parallel.deepspeed.folder: offload is none"),
    ({"parallel": {"replicas": {"compress": "bf16"}}}, "parallel.replicas: for engine: torch"),
    ({"parallel": {"shard": {"layers": 2}}}, "parallel.shard: for engine: torch"),
    ({"parallel": {"pipeline": {"schedule": "gpipe"}}}, "parallel.pipeline: for engine: torch"),
    ({"memory": {"moments": "8bit"}}, "memory: weights, moments, offload_optimizer and update are for engine: torch"),
    ({"memory": {"offload_activations": True}}, "memory.offload_activations: for engine: torch"),
    ({"precision": "fp8"}, "precision: fp8 is for engine: torch"),
    ({"optimizer": {"name": "soap"}}, "optimizer.name: soap on shards"),
    (
        {"optimizer": {"name": "muon"}, "parallel": {"deepspeed": {"zero": 0}}},
        "optimizer.name: muon has AdamW beside it, and DeepSpeed steps one optimizer",
    ),
    ({"optimizer": {"veto": "select"}}, "optimizer.veto: select"),
    ({"optimizer": {"ema": 0.99}, "parallel": {"deepspeed": {"zero": 3}}}, "optimizer.ema: parallel.deepspeed.zero: 3"),
    ({"compile": "block", "parallel": {"deepspeed": {"zero": 3}}}, "compile: parallel.deepspeed.zero: 3 gathers"),
]


@pytest.mark.parametrize(("asks", "words"), REFUSED, ids=[words.split(" ")[0] for _, words in REFUSED])
def test_what_it_does_not_do_is_refused_in_one_line(asks: dict[str, Any], words: str) -> None:
    more = {key: value for key, value in asks.items() if key != "parallel"}
    spec = bare({"engine": "deepspeed", **asks.get("parallel", {})}, **more)
    with pytest.raises(UserError) as refused:
        check_deepspeed(spec, SHAPE, 2, Plan())
    assert str(refused.value).startswith(words)
    assert "\n" not in str(refused.value)


def test_its_keys_without_it_are_refused() -> None:
    with pytest.raises(UserError, match=r"^parallel\.deepspeed: parallel\.engine is torch: write engine: deepspeed"):
        check_engine(bare({"deepspeed": {"zero": 3}}).parallel)
    check_engine(bare({}).parallel)


def test_the_plan_says_what_is_divided_and_what_the_guard_lacks() -> None:
    plan = Plan()
    check_deepspeed(bare({"engine": "deepspeed", "deepspeed": {"zero": 3, "offload": "cpu"}}), SHAPE, 2, plan)
    told = {key: decision.reason for key, decision in plan.decisions.items()}
    assert told["parallel.deepspeed.zero"] == "weights, gradients and moments divided among 2 processes"
    assert told["parallel.deepspeed.offload"] == "weights and moments stay in host memory between uses"
    assert "without layer statistics" in told["guard"]


@pytest.mark.parametrize("version", [None, "0.12.6", "1.0.0"])
def test_a_missing_or_untried_version_is_one_line(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(_: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    words = "deepspeed needs `pip install" if version is None else f"deepspeed {version} is untested: pip install"
    with pytest.raises(UserError, match=f"^parallel.engine: {words}"):
        import_deepspeed(torch.device("cpu"))
