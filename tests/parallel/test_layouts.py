"""The same run over several processes: losses, norms and validations of every layout are those of one process, and a
checkpoint of any is continued by any other. Gloo on this machine, through the whole of `train`."""

import json
import random
import shutil
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint  # imported before the fork, once for all
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401

from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.schema import RunSpec

Ranks = Callable[..., list[Any]]
STEPS, SHORT = 50, 8
# Over fifty steps: at 0.002 this model of twelve words breaks at step 45 (gradient norm 60 after 0.6), and the guard
# rolls it back with a trial whose length is the clock's; at 0.01 last digits grow to the third by step 40.
GENTLE = {"lr": 0.001}
Asked, Curves = dict[str, Any], dict[str, list[float]]
LAYOUTS: dict[str, tuple[int, Asked]] = {
    "one": (1, {}),
    "two shards": (2, {"dp_shard": 2}),
    "tensors": (2, {"tp": 2}),
    "stages": (2, {"pp": 2}),
    "columns and shards": (4, {"cp": 2, "dp_shard": 2}),
    "two by two": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "two replicas": (2, {"dp_replicate": 2}),
    "one, divided": (1, {"shard": {"alone": True}}),
    "columns": (2, {"cp": 2}),
    "by itself": (2, {}),
    "four replicas": (4, {"dp_replicate": 4}),
    "four shards": (4, {"dp_shard": 4}),
    "three shards": (3, {"dp_shard": 3}),  # 8 rows among 3: the last has padding
    "four by two": (8, {"dp_replicate": 4, "dp_shard": 2}),
    "two by four": (8, {"dp_replicate": 2, "dp_shard": 4}),
    "kept gathered": (2, {"dp_shard": 2, "shard": {"reshard": "never", "layers": 2, "prefetch": 2}}),
    "tensors, rows whole": (2, {"tp": 2, "sequence": False}),
    "four tensors": (4, {"tp": 4}),
    "four columns": (4, {"cp": 4}),  # more than key-value heads
    "tensors and shards": (4, {"tp": 2, "dp_shard": 2}),
    "tensors and columns": (4, {"tp": 2, "cp": 2}),
    "stages, all forward first": (2, {"pp": 2, "pipeline": {"schedule": "gpipe"}}),
    "stages in turns": (2, {"pp": 2, "pipeline": {"schedule": "interleaved"}}),
    "stages without bubbles": (2, {"pp": 2, "pipeline": {"schedule": "zero_bubble"}}),
    "four stages": (4, {"pp": 4}),
    "stages and replicas": (4, {"pp": 2, "dp_replicate": 2}),
    "stages and tensors": (4, {"pp": 2, "tp": 2}),
    "stages and columns": (4, {"pp": 2, "cp": 2}),
    "stages, tensors and shards": (8, {"pp": 2, "tp": 2, "dp_shard": 2}),
    "replicas, columns and tensors": (8, {"dp_replicate": 2, "cp": 2, "tp": 2}),
    "replicas, shards and tensors": (8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
    "stages in turns and shards": (4, {"pp": 2, "dp_shard": 2, "pipeline": {"schedule": "interleaved"}}),
}
EXPERTS: dict[str, tuple[int, Asked]] = {
    "experts in shards": (2, {"dp_shard": 2}),
    "divided experts": (2, {"ep": 2}),
    "four parts of experts": (4, {"ep": 4}),
    "replicas of divided experts": (4, {"ep": 2, "dp_replicate": 2}),
    "stages of divided experts": (4, {"ep": 2, "pp": 2}),
}
# Two shards, tensors and stages continue a checkpoint of another layout below, with the same curve; two replicas have
# it in test_replicas.py.
CORE = ("one, divided", "columns", "divided experts")
MODEL = {"width": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 64}
MOE = {"experts": 4, "top_k": 2, "ffn": 32, "shared": 1, "dense_layers": [0], "balance": 0.05, "choice_bias": True}


def model_of(layout: str) -> Asked:
    if layout in EXPERTS:
        return {**MODEL, "moe": MOE}
    return MODEL | {"kv_heads": max(2, LAYOUTS[layout][1].get("tp", 1))}  # every process has one


def spec_of(folder: Path, name: str, layout: str, steps: int = STEPS, **more: Any) -> RunSpec:
    corpus = folder / "words.jsonl"
    if not corpus.exists():
        draw, words = (
            random.Random(0),
            ["steel", "iron", "blast", "flame", "ore", "coke", "slag", "heat", "pour", "mould", "ingot", "forge"],
        )
        lines = (json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(20, 120)))}) for _ in range(120))
        corpus.write_text("\n".join(lines) + "\n")
    asked, often = (LAYOUTS | EXPERTS)[layout][1], "4 steps" if steps < STEPS else "25 steps"
    rows = 8 // (asked.get("dp_replicate", 1) * asked.get("dp_shard", 1))
    # Two micro-batches, whose gradients are summed, or one for each stage. With experts their size counts: see there.
    model = more.pop("model", model_of(layout))
    micro = 2 if "moe" in model else rows // max(2, asked.get("pp", 1))
    data: dict[str, Any] = {
        "name": name, "runs": str(folder / "runs"), "precision": "fp32", "tokenizer": {"vocab": 300},
        "model": model,
        "data": {"sources": {"words": {"path": [str(corpus)]}}, "context": 32, "validation": 0.1},
        "budget": {"steps": steps, "batch": 256, "micro_batch": max(1, micro)}, "optimizer": {"lr": 0.01},
        "schedule": {"kind": "constant", "warmup": 2}, "evaluate": {"every": often},
        "checkpoint": {"every": often},
        "parallel": {"device": "cpu", "threads": 1, **asked},
    }  # fmt: skip
    return RunSpec.model_validate(data | more)


def run_on(ranks: Ranks, layout: str, spec: RunSpec) -> Curves:
    """Train in as many processes as the layout has; the curves."""
    kinds = ranks((LAYOUTS | EXPERTS)[layout][0], lambda: train(spec).kind)
    assert set(kinds) == {"finished"}
    run = Run.existing(run_folder(spec))
    records = list(run.metrics())
    return {
        "loss": [record["loss"] for record in records],
        "accuracy": [record["accuracy"] for record in records],
        "grad_norm": [record["grad_norm"] for record in records],
        "validation": [record["loss"] for record in run.validations()],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def alone(ranks: Ranks, folder: Path) -> Callable[[int, str], Curves]:
    """The curves of one process, of so many steps, of the model that a layout has; trained once for each model."""

    @cache
    def run(steps: int, model: str) -> Curves:
        more = {"optimizer": GENTLE} if steps == STEPS else {}
        name = f"one-{steps}-{zlib.crc32(model.encode())}"
        spec = spec_of(folder, name, "one", steps=steps, model=json.loads(model), **more)
        curves = run_on(ranks, "one", spec)
        assert not list(Run.existing(run_folder(spec)).events("veto")), "a run in trouble compares nothing"
        return curves

    return lambda steps, layout: run(steps, json.dumps(model_of(layout)))


@pytest.fixture(scope="module")
def begun(ranks: Ranks, folder: Path) -> Callable[[str], Path]:
    """The folder of the first half of a short run under a layout, trained once for all that continue it."""

    @cache
    def run(layout: str) -> Path:
        spec = spec_of(folder, named(f"{layout} begun"), layout, steps=SHORT // 2)
        run_on(ranks, layout, spec)
        return run_folder(spec)

    return run


def same(found: Curves, wanted: Curves, loss: float = 2e-6) -> None:
    """To what sums in another order cost over these steps: 2e-7 of a loss and 1e-6 of a norm were measured, and ten
    times that is allowed for. An accuracy may differ by one of a step's 256 tokens."""
    assert len(found["loss"]) == len(wanted["loss"])
    for key, limit in {"loss": loss, "accuracy": 4e-3, "grad_norm": 5 * loss, "validation": loss}.items():
        assert found[key] == pytest.approx(wanted[key], rel=limit, abs=limit), key


def named(layout: str) -> str:
    return layout.replace(" ", "-").replace(",", "")


@pytest.mark.parametrize("layout", CORE)
def test_the_core_layouts_have_the_curve_of_one_process(ranks: Ranks, folder: Path, alone: Any, layout: str) -> None:
    same(run_on(ranks, layout, spec_of(folder, named(layout), layout, SHORT)), alone(SHORT, layout))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_every_layout_has_the_curve_of_one_process(ranks: Ranks, folder: Path, alone: Any, layout: str) -> None:
    spec = spec_of(folder, f"{named(layout)}-long", layout, optimizer=GENTLE)
    same(run_on(ranks, layout, spec), alone(STEPS, layout))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_have_the_curve_of_one_process(ranks: Ranks, folder: Path, alone: Any, layout: str) -> None:
    """Their balance loss is a mean over a micro-batch, which is the same rows everywhere, and their biases count all.
    Sooner or later a token between two experts goes to the other one: one did in a validation, which moved by 8e-6."""
    spec = spec_of(folder, f"{named(layout)}-long", layout, optimizer=GENTLE)
    same(run_on(ranks, layout, spec), alone(STEPS, layout), loss=5e-5)


RESHARDED = [(a, b) for a in list(LAYOUTS)[:6] for b in list(LAYOUTS)[:6] if a != b]
LONG = (pytest.mark.slow, pytest.mark.timeout(900))
FAST_RESHARDED = (("one", "two shards"), ("tensors", "stages"))


@pytest.mark.parametrize(
    "change",
    [pytest.param(pair, marks=() if pair in FAST_RESHARDED else LONG, id=" to ".join(pair))
     for pair in RESHARDED],
)  # fmt: skip
def test_a_checkpoint_of_any_layout_is_continued_by_any_other(
    ranks: Ranks, folder: Path, begun: Callable[[str], Path], alone: Any, change: tuple[str, str]
) -> None:
    before, after = change
    spec = spec_of(folder, named(f"{before} then {after}"), after, steps=SHORT)
    shutil.copytree(begun(before), run_folder(spec))
    same(run_on(ranks, after, spec), alone(SHORT, after))
    starts = [start["step"] for start in Run.existing(run_folder(spec)).events("started")]
    assert starts == [0, SHORT // 2]


@pytest.mark.slow
def test_a_poisoned_row_is_vetoed_by_all_and_named(ranks: Ranks, folder: Path) -> None:
    """Whichever process has read it: the verdict comes from numbers of the whole step."""
    poison = folder / "noise.txt"
    poison.write_text("".join(map(chr, random.Random(0).choices(range(1, 32), k=2000))))
    words = spec_of(folder, "words", "one").data.model_dump()["sources"]
    sources = {**words, "noise": {"path": [str(poison)], "weight": 0.02}}
    spec = spec_of(
        folder, "poison", "two shards", budget={"steps": 160, "batch": 64},
        guard={"loss_sigma": 5.0, "trial": {"enabled": False}},
        data={"sources": sources, "context": 32, "validation": 0.1},
        model={"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64},
    )  # fmt: skip
    run_on(ranks, "two shards", spec)
    vetoes = list(Run.existing(run_folder(spec)).events("veto"))
    assert vetoes and all(veto["documents"][0]["file"] == str(poison) for veto in vetoes)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "asked",
    [{"dp_shard": 2}, {"dp_shard": 2, "shard": {"reshard": "always"}}, {"tp": 2}],
    ids=["shards", "always", "tp"],
)
def test_passes_without_an_update_leave_no_old_weights_behind(
    ranks: Ranks, tiny_spec: Callable[..., RunSpec], asked: Asked
) -> None:
    """Suspect steps are examined between backward and update, and averages are evaluated between two steps."""
    more: dict[str, Any] = {
        "guard": {"warmup": 8, "window": 16, "suspect_sigma": 0.01, "trial": {"budget": "600s", "share": "100%"}},
        "optimizer": {**GENTLE, "ema": 0.9},
        "evaluate": {"every": "5 steps", "tokens": 256}, "budget": {"steps": 24, "batch": 256, "micro_batch": 2},
        "schedule": {"kind": "constant", "warmup": 0},
    }  # fmt: skip
    parallel = {"device": "cpu", "threads": 1}
    more["model"] = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 64}
    alone, divided = tiny_spec("one", **more), tiny_spec("two", **more, parallel={**parallel, **asked})
    ranks(1, train, alone)
    ranks(2, train, divided)
    runs = [Run(run_folder(spec)) for spec in (alone, divided)]
    assert min(sum(event["kind"] == "examined" for event in run.events()) for run in runs) > 1
    one, two = ([record["loss"] for record in run.metrics()] for run in runs)
    assert two == pytest.approx(one, rel=1e-5)
