"""Attention in a ring against attention to whole rows, in double precision and with gradients; and whole runs."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # imported before the fork, once for all
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from torch import Tensor

from bessemer.errors import UserError
from bessemer.model.attention import attend
from bessemer.model.attention_mask import AttentionMask
from bessemer.parallel.context import RingAttention, UlyssesAttention, attend_block, block_gradients
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.plan.search.layout import Layout, decide_layout
from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import PRESETS

Ranks = Callable[..., list[Any]]
B, T, N, D = 2, 24, 4, 8
WORDS = ("steel", "iron", "blast", "flame", "ore", "coke", "slag", "heat", "pour", "mould", "ingot", "forge")
PACKED = torch.tensor([[0] * 5 + [1] * 11 + [2] * 8, [0] * 14 + [1] + [2] * 9])
SIGHTS: dict[str, tuple[Tensor | None, int, tuple[int, int]]] = {  # documents, window, blocks
    "causal": (None, 0, (0, 0)),
    "packed": (PACKED, 0, (0, 0)),
    "window": (None, 7, (0, 0)),
    "packed, window": (PACKED, 7, (0, 0)),
    "blocks": (PACKED, 0, (4, 1)),
    "packed, window, global": (PACKED, 5, (0, 0)),
}


def _whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise AssertionError("a ring never attends to whole rows")


def _attention(size: int, kind: str, kv: int, value: int = D, strip: int = 512) -> tuple[Tensor, ...]:
    """Output and gradients of q, k and v: of whole rows, or of this process's columns."""
    torch.manual_seed(0)
    documents, window, blocks = SIGHTS[kind]
    ring = RingAttention(None, dist.get_rank(), size, strip) if size > 1 else None
    part = ring.part(T) if ring else torch.arange(T)
    sizes = ((N, D), (kv, D), (kv, value))
    q, k, v = (torch.randn(B, T, *one, dtype=torch.float64)[:, part].clone().requires_grad_() for one in sizes)
    attention_mask = AttentionMask(documents, blocks=blocks, global_tokens=2 if "global" in kind else 0)
    if ring:
        out = ring.attend(q, k, v, attention_mask, window, D**-0.5, _whole)
    else:
        out = attend(q, k, v, attention_mask, window, D**-0.5, backend="math")
    (out.square() * torch.arange(T, dtype=torch.float64)[part, None, None]).sum().backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return out.detach(), q.grad, k.grad, v.grad


def _compare(ranks: Ranks, size: int, kind: str, kv: int, **more: Any) -> None:
    wanted = _attention(1, kind, kv, more.get("value", D))
    found = ranks(size, lambda: [x.numpy() for x in _attention(size, kind, kv, **more)])
    order = torch.cat([RingAttention(None, rank, size).part(T) for rank in range(size)])
    assert sorted(order.tolist()) == list(range(T))
    for i, want in enumerate(wanted):
        laid = torch.cat([torch.from_numpy(one[i]) for one in found], dim=1)
        torch.testing.assert_close(laid[:, order.argsort()], want)


@pytest.mark.parametrize("kind", SIGHTS)
@pytest.mark.parametrize(
    ("size", "kv"), [pytest.param(2, 4, marks=pytest.mark.slow), (3, 2), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_a_ring_attends_as_whole_rows_do(ranks: Ranks, size: int, kind: str, kv: int) -> None:
    _compare(ranks, size, kind, kv)


@pytest.mark.parametrize("kind", ["packed", "packed, window"])
def test_a_ring_in_strips_does_too(ranks: Ranks, kind: str) -> None:
    _compare(ranks, 2, kind, 2, strip=2)


def test_a_ring_of_values_of_another_size(ranks: Ranks) -> None:
    _compare(ranks, 2, "packed", 4, value=6)


def test_a_ring_is_longer_than_the_number_of_heads(ranks: Ranks) -> None:
    _compare(ranks, 6, "packed", 1)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_process_of_a_ring_has_as_much_to_see(size: int) -> None:
    length = 16 * size
    seen = [int((RingAttention(None, rank, size).part(length) + 1).sum()) for rank in range(size)]
    assert len(set(seen)) == 1
    ends = [int((UlyssesAttention(None, rank, size).part(length) + 1).sum()) for rank in range(size)]
    assert ends[-1] > 1.4 * ends[0]


def test_tiles_skip_what_no_row_sees() -> None:
    """Short documents: of 64 x 64 pairs in strips of 4 only those near the diagonal are looked at."""
    length, size = 64, 4
    documents = torch.arange(length)[None] // 4
    looked = 0
    for rank in range(size):
        ring = RingAttention(None, rank, size, strip=4)
        for source in range(size):
            tiles = list(ring.tiles(AttentionMask(documents), 0, length, source))
            assert not tiles or source == rank
            looked += sum(len(range(16)[tile.queries]) * len(range(16)[tile.keys]) for tile in tiles)
    assert looked == length * 4


def test_tiles_that_are_seen_wholly_have_no_mask() -> None:
    documents = torch.tensor([[0] * 20 + [1] * 44])
    tiles = [
        t
        for source in range(4)
        for t in RingAttention(None, 1, 4, strip=4).tiles(AttentionMask(documents), 0, 64, source)
    ]
    assert {tile.masked is None for tile in tiles} == {True, False}


KINDS: list[tuple[str, str]] = [("cpu", "cpu")]
if torch.cuda.is_available():
    KINDS += [("cuda", "flash"), ("cuda", "efficient")]


@pytest.mark.parametrize(("device", "name"), KINDS)
@pytest.mark.parametrize("how", ["all", "causal", "mask"])
def test_kernels_of_blocks_do_what_plain_torch_does(device: str, name: str, how: str) -> None:
    """Of two blocks merged the gradients come from the log-sum-exp of both; a row of the mask sees nothing."""
    if name == "flash" and how == "mask":
        pytest.skip("flash has no masks")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, grad = (torch.randn(2, 4, 40, 64, device=device, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(2, 2, 40, 64, device=device, dtype=dtype) for _ in range(2))
    mask = None
    if how == "mask":
        mask = torch.rand(2, 1, 40, 40, device=device) > 0.5
        mask[0, 0, 3] = False
    found = attend_block(q, k, v, mask, how == "causal", 0.125, name)
    wanted = attend_block(q, k, v, mask, how == "causal", 0.125, "plain")
    close = {"rtol": 2e-2, "atol": 2e-2} if device == "cuda" else {"rtol": 1e-4, "atol": 1e-5}
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.float(), other.float(), **close)
    lse = torch.logaddexp(wanted[1], torch.full_like(wanted[1], 3.0))  # as if there were another block
    out = (wanted[0] * (wanted[1] - lse).exp()[..., None]).to(dtype)
    rest = (grad, q, k, v, out, lse, mask, how == "causal", 0.125)
    for one, other in zip(block_gradients(*rest, name), block_gradients(*rest, "plain"), strict=True):
        torch.testing.assert_close(one.float(), other.float(), **close)


def spec_of(folder: Path, name: str, model: Any = None, more: Any = None, **parallel: Any) -> RunSpec:
    more = dict(more or {})
    corpus = folder / "words.jsonl"
    if not corpus.exists():
        draw = random.Random(0)
        lines = (json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(5, 120)))}) for _ in range(120))
        corpus.write_text("\n".join(lines) + "\n")
    shape = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 64}
    sources = {"words": {"path": [str(corpus)]}} | more.pop("sources", {})
    data = {
        "name": name, "runs": str(folder / "runs"), "precision": "fp32", "tokenizer": {"vocab": 300},
        "model": shape | (model or {}),
        "data": {"sources": sources, "context": 32, "validation": 0.1},
        "budget": {"steps": 12, "batch": 256, "micro_batch": 2}, "optimizer": {"lr": 0.01},
        "schedule": {"kind": "constant", "warmup": 2}, "evaluate": {"every": "6 steps"},
        "checkpoint": {"every": "6 steps"}, "memory": parallel.pop("memory", {}),
        "parallel": {"device": "cpu", "threads": 1, **parallel},
    }  # fmt: skip
    return RunSpec.model_validate(data | more)


def _curves(ranks: Ranks, size: int, spec: RunSpec) -> dict[str, list[float]]:
    assert set(ranks(size, lambda: train(spec).kind)) == {"finished"}
    run = Run.existing(run_folder(spec))
    found = {key: [record[key] for record in run.metrics()] for key in ("loss", "grad_norm", "accuracy")}
    return found | {"validation": [record["loss"] for record in run.validations()]}


@pytest.fixture(scope="module")
def same(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Compares a run in a ring with one process, which trains each model once."""
    folder = tmp_path_factory.mktemp("ring")

    @cache
    def alone(model: str) -> dict[str, list[float]]:
        return _curves(ranks, 1, spec_of(folder, f"one-{abs(hash(model))}", model=json.loads(model)))

    def compare(name: str, size: int, model: Any = None, **parallel: Any) -> None:
        spec = spec_of(folder, name.replace(" ", "-"), model=model, context="ring", **parallel)
        _compare_curves(_curves(ranks, size, spec), alone(json.dumps(model or {})))

    return compare


def _compare_curves(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> None:
    assert len(found["loss"]) == len(wanted["loss"]) == 12
    for key, limit in {"loss": 1e-5, "accuracy": 4e-3, "grad_norm": 1e-3, "validation": 1e-5}.items():
        assert found[key] == pytest.approx(wanted[key], rel=limit, abs=limit), key


@pytest.mark.slow
def test_a_run_in_a_ring_has_the_curve_of_one_process(same: Callable[..., None]) -> None:
    same("two", 2, cp=2)


MORE: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "four": (4, {"cp": 4}, {}),
    "more than heads": (4, {"cp": 4}, {"heads": 2, "kv_heads": 1}),
    "shards": (4, {"cp": 2, "dp_shard": 2}, {}),
    "tensors": (4, {"cp": 2, "tp": 2}, {}),
    "stages": (4, {"cp": 2, "pp": 2}, {}),
    "windows": (2, {"cp": 2}, {"windows": [6, 0], "local_theta": 1000.0}),
    "learned positions": (2, {"cp": 2}, {"positions": "learned"}),
    "sinusoidal positions": (4, {"cp": 4}, {"positions": "sinusoidal"}),
    "computed again": (2, {"cp": 2, "memory": {"activations": "full"}}, {}),
    "products kept": (2, {"cp": 2, "memory": {"activations": "selective"}}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_other_runs_in_a_ring_do_too(same: Callable[..., None], case: str) -> None:
    size, parallel, model = MORE[case]
    same(case, size, model, **parallel)


@pytest.mark.slow
def test_a_vetoed_step_of_a_ring_names_its_documents(ranks: Ranks, tmp_path: Path) -> None:
    """Each process has an early and a late piece of every row, and says what it lost there: together it is the loss of
    the step. Not compared with one process: so few rows part from it by a tenth in 137 steps, in any layout."""
    poison = tmp_path / "noise.txt"
    poison.write_text("".join(map(chr, random.Random(0).choices(range(1, 32), k=2000))))
    noise = {"noise": {"path": [str(poison)], "weight": 0.02}}
    more = {"sources": noise, "budget": {"steps": 160, "batch": 64}, "guard": {"loss_sigma": 5.0}}
    spec = spec_of(tmp_path, "poison", more=more, cp=2, context="ring")
    _curves(ranks, 2, spec)
    vetoes = list(Run.existing(run_folder(spec)).events("veto"))
    assert vetoes
    for veto in vetoes:
        found = veto["documents"]
        assert found[0]["file"] == str(poison) and sum(one["tokens"] for one in found) == 64
        assert sum(one["tokens"] * one["mean_loss"] for one in found) / 64 == pytest.approx(veto["loss"], rel=1e-4)


@pytest.mark.parametrize("kind", [RingAttention, UlyssesAttention])
def test_parts_of_rows_are_laid_together_again(kind: type[UlyssesAttention]) -> None:
    rows = torch.arange(48).view(2, 24).numpy()
    parts = [rows[:, kind(None, rank, 3).part(24).numpy()] for rank in range(3)]
    assert (kind(None, 0, 3).whole(parts) == rows).all()


def _planned(cp: int, tokens: int = 4096, cap: float | None = None, dropout: float = 0.0, **parallel: Any) -> Layout:
    asked = {
        "name": "x", "model": "1M", "data": {"sources": {"a": "x"}}, "dropout": {"attention": dropout},
        "precision": "bf16", "parallel": {"cp": cp, "context": "ring", **parallel},
    }  # fmt: skip
    shape = replace(PRESETS["1B"], vocab=32_000, attention_cap=cap)
    machine = Machine("cuda", "NVIDIA H200", 150 * 10**9, 8, {"fp32": 1.0, "bf16": 2.0})
    return decide_layout(RunSpec.model_validate(asked), shape, tokens, machine, cp, Plan())


def test_the_plan_lets_a_ring_be_longer_than_heads() -> None:
    assert _planned(64).cp == 64 and _planned(3, tokens=4098).cp == 3
    with pytest.raises(UserError, match=r"64 does not divide 32 heads .* 16 or 32, or parallel.context: ring"):
        _planned(64, context="ulysses")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"cp": 3}, r"parallel.cp: 3 does not divide 4096 tokens of a row in two parts .*: write 1, or 2 on"),
        ({"cp": 2, "cap": 50.0}, r"parallel.context: a ring has no soft caps .*: write ulysses"),
        ({"cp": 2, "dropout": 0.1}, r"parallel.context: a ring has no dropout.attention: write ulysses"),
    ],
    ids=str,
)
def test_what_a_ring_cannot_do_is_refused_with_the_fix(more: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        _planned(**more)
