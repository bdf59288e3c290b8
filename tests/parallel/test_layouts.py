"""The same run over several processes: losses, norms and validations of every layout are those of one process, and a
checkpoint of any is continued by any other. Gloo on this machine, through the whole of `train`."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint  # noqa: F401  imported before the fork, once for all

from bessemer.run.directory import Run
from bessemer.spec.schema import RunSpec
from bessemer.supervise.session import run_folder, train

Ranks = Callable[..., list[Any]]
STEPS = 16
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "two replicas": (2, {"dp_replicate": 2}),
    "two shards": (2, {"dp_shard": 2}),
    "four replicas": (4, {"dp_replicate": 4}),
    "four shards": (4, {"dp_shard": 4}),
    "two by two": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "by itself": (2, {}),
    "three shards": (3, {"dp_shard": 3}),  # 8 rows among 3: the last has padding
    "four by two": (8, {"dp_replicate": 4, "dp_shard": 2}),
    "two by four": (8, {"dp_replicate": 2, "dp_shard": 4}),
}
CORE = ("two replicas", "two shards", "two by two")


def spec_of(folder: Path, name: str, layout: str, steps: int = STEPS, **more: Any) -> RunSpec:
    corpus = folder / "words.jsonl"
    if not corpus.exists():
        draw, words = (
            random.Random(0),
            ["steel", "iron", "blast", "flame", "ore", "coke", "slag", "heat", "pour", "mould", "ingot", "forge"],
        )
        lines = (json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(20, 120)))}) for _ in range(120))
        corpus.write_text("\n".join(lines) + "\n")
    data: dict[str, Any] = {
        "name": name, "runs": str(folder / "runs"), "precision": "fp32", "tokenizer": {"vocab": 300},
        "model": {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64},
        "data": {"sources": {"words": {"path": [str(corpus)]}}, "context": 32, "validation": 0.1},
        "budget": {"steps": steps, "batch": 256, "micro_batch": 2}, "optimizer": {"lr": 0.01},
        "schedule": {"kind": "constant", "warmup": 2}, "evaluate": {"every": "8 steps"},
        "checkpoint": {"every": "8 steps"},
        "parallel": {"device": "cpu", "threads": 1, **LAYOUTS[layout][1]},
    }  # fmt: skip
    return RunSpec.model_validate(data | more)


def run_on(ranks: Ranks, layout: str, spec: RunSpec) -> dict[str, list[float]]:
    """Train in as many processes as the layout has; the curves."""
    kinds = ranks(LAYOUTS[layout][0], lambda: train(spec).kind)
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
def alone(ranks: Ranks, folder: Path) -> dict[str, list[float]]:
    return run_on(ranks, "one", spec_of(folder, "one", "one"))


def same(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> None:
    """To what sums in another order cost over these steps: at most 2e-6 of the loss was seen."""
    assert len(found["loss"]) == STEPS
    for key, limit in {"loss": 1e-5, "accuracy": 4e-3, "grad_norm": 1e-3, "validation": 1e-5}.items():
        assert found[key] == pytest.approx(wanted[key], rel=limit, abs=limit), key


def slowly(names: Any, fast: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow, id=str(name)) for name in names]


@pytest.mark.parametrize("layout", slowly([name for name in LAYOUTS if name != "one"], CORE))
def test_every_layout_has_the_curve_of_one_process(
    ranks: Ranks, folder: Path, alone: dict[str, list[float]], layout: str
) -> None:
    same(run_on(ranks, layout, spec_of(folder, layout.replace(" ", "-"), layout)), alone)


RESHARDED = [(a, b) for a in list(LAYOUTS)[:6] for b in list(LAYOUTS)[:6] if a != b]
FAST_RESHARDED = (("one", "two shards"), ("two by two", "one"))


@pytest.mark.parametrize("change", slowly(RESHARDED, FAST_RESHARDED))
def test_a_checkpoint_of_any_layout_is_continued_by_any_other(
    ranks: Ranks, folder: Path, alone: dict[str, list[float]], change: tuple[str, str]
) -> None:
    before, after = change
    name = f"{before} then {after}".replace(" ", "-")
    run_on(ranks, before, spec_of(folder, name, before, steps=8))
    found = run_on(ranks, after, spec_of(folder, name, after))
    found["validation"] = [found["validation"][i] for i in (0, 1, -1)]  # the first half ended with one of its own
    same(found, alone)


def test_a_poisoned_row_is_vetoed_by_all_and_named(ranks: Ranks, folder: Path) -> None:
    """Whichever process has read it: the verdict comes from numbers of the whole step."""
    poison = folder / "noise.txt"
    poison.write_text("".join(map(chr, random.Random(0).choices(range(1, 32), k=2000))))
    words = spec_of(folder, "words", "one").data.model_dump()["sources"]
    sources = {**words, "noise": {"path": [str(poison)], "weight": 0.02}}
    spec = spec_of(
        folder, "poison", "two shards", budget={"steps": 160, "batch": 64}, guard={"loss_sigma": 5.0},
        data={"sources": sources, "context": 32, "validation": 0.1},
    )  # fmt: skip
    run_on(ranks, "two shards", spec)
    vetoes = list(Run.existing(run_folder(spec)).events("veto"))
    assert vetoes and all(veto["documents"][0]["file"] == str(poison) for veto in vetoes)
