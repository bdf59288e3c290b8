"""The report's numbers against hand-computed ones, and each piece of advice where it is due."""

from dataclasses import replace

import pytest

from bessemer.observe.profile import (
    ATTENTION,
    DATA,
    HEAD,
    IDLE,
    MATMUL,
    MEMORY,
    OPTIMIZER,
    OTHER,
    PARTS,
    Kernel,
    ProfiledStep,
    ProfileFacts,
    advice,
    as_json,
    as_text,
    attention_flops,
    rows_of,
)
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

ASKED = {"name": "a", "model": {"width": 16}, "data": {"sources": {"a": "a.txt"}}}
SPEC = RunSpec.model_validate(ASKED)
TWICE = RunSpec.model_validate(ASKED | {"memory": {"activations": "full"}})
SLOW = {"matmul_bf16": 2000e12}
# d 2048, 16 layers, 32 heads, 8 of keys, ffn 8192, vocabulary 128,256: 60.8 M products a layer, 262.7 M in the head.
SHAPE = ModelShape(vocab=128256, width=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, tied=False)
CEILINGS = {"matmul_bf16": 809e12, "matmul_fp32": 50e12, "attention_both_64": 376e12, "copy": 4.23e12}
FACTS = ProfileFacts(
    SPEC, SHAPE, "NVIDIA H200", "bf16", context=4096, rows=8, micro_rows=8, steps=3, plain_step_s=0.5,
    flops_per_token=SHAPE.flops_per_token(4096), peak_flops=989e12, memory_bytes=70 << 30, memory_limit=140 << 30,
    update_bytes=28 * 1_498_482_688, ceilings=CEILINGS,
)  # fmt: skip


def of(device: bool = True, compiled: bool = True, **ms: float) -> ProfiledStep:
    """Three steps, each of 500 ms with so many of parts; the rest is other."""
    given = {part: ms.get(part.replace(" ", "_").replace("-", "_"), 0.0) * 3e3 for part in PARTS}
    given[OTHER] = 1.5e6 - sum(given.values())
    return ProfiledStep(1.5e6, given, {"forward": given[IDLE]}, [Kernel("nvjet", MATMUL, 300, 9e5)], device, compiled)


def test_rates_are_work_over_time() -> None:
    time = of(matmul=285, attention=70, loss_head=80, optimizer=15, memory_bound=50)
    rows = {row.part: row for row in rows_of(time, FACTS)}
    tokens = 8 * 4096
    layers = 16 * (2048 * (2048 + 512 + 512) + 2048 * 2048 + 3 * 2048 * 8192)
    assert rows[MATMUL].ms == pytest.approx(285) and rows[MATMUL].share == pytest.approx(0.57)
    assert rows[MATMUL].rate == pytest.approx(6 * layers * tokens / 0.285)
    assert rows[MATMUL].of_ceiling == pytest.approx(rows[MATMUL].rate / 809e12)
    assert rows[HEAD].rate == pytest.approx(6 * 128256 * 2048 * tokens / 0.080)
    assert rows[ATTENTION].rate == pytest.approx(16 * 7 * 2 * 2048 * 2048.5 * tokens / 0.070)
    assert rows[OPTIMIZER].rate == pytest.approx(28 * 1_498_482_688 / 0.015) and rows[OPTIMIZER].unit == "B/s"
    assert rows[MEMORY].rate is None and DATA not in rows


def test_attention_counts_the_keys_that_are_seen() -> None:
    shape = replace(SHAPE, layers=1, heads=1, head_dim=1, kv_heads=1)
    assert attention_flops(shape, 4) == pytest.approx(14 * (1 + 2 + 3 + 4) / 4)  # 4 forward, 10 backward
    assert attention_flops(replace(shape, windows=(2,)), 4) == pytest.approx(14 * (1 + 2 + 2 + 2) / 4)
    assert attention_flops(replace(shape, causal=False), 4) == pytest.approx(14 * 4)


def test_a_good_step_is_left_alone() -> None:
    good = of(matmul=260, attention=70, loss_head=80, optimizer=15, memory_bound=70, idle=5)
    assert advice(good, FACTS) == ["nothing stands out: products, attention and the loss head take 82% of the step"]


@pytest.mark.parametrize(
    ("time", "changes", "words"),
    [
        (of(data_wait=60), {}, ["data wait is 12%", "faster disk"]),
        (of(idle=100, compiled=False), {}, ["waits for the host for 20%", "most in forward", "compile: block"]),
        (of(idle=100), {"rows": 32, "memory_bytes": 40 << 30}, ["budget.micro_batch: 16"]),
        (of(idle=100), {"rows": 32, "memory_bytes": 90 << 30}, ["a larger model"]),
        (of(idle=150, device=False), {}, ["Python takes 30%"]),
        (of(copies=50), {}, ["copies take 10%", "memory.offload"]),
        (of(optimizer=100), {}, ["optimizer takes 20%", "budget.batch"]),
        (of(norm_and_guard=50), {}, ["norm and guard takes 10%"]),
        (of(matmul=500), {"precision": "fp32"}, ["products in fp32 take 100%", "16.2x", "precision: bf16"]),
        (of(matmul=500), {"ceilings": SLOW}, ["matmul reaches 19%", "in 100% of the step", "larger widths"]),
        (of(matmul=500), {"ceilings": SLOW, "shape": replace(SHAPE, ffn=8190)}, ["ffn 8190 is not a multiple of 64"]),
        (of(matmul=500), {"ceilings": SLOW, "spec": TWICE}, ["memory.activations repeats products"]),
        (of(attention=100), {}, ["attention takes 20%", "half as many of 128"]),
        (of(loss_head=150), {}, ["the loss head takes 30%", "128,256 tokens", "tokenizer.vocab"]),
        (of(memory_bound=175, compiled=False), {}, ["memory-bound kernels take 35%", "compile: block fuses"]),
    ],
)  # fmt: skip
def test_what_to_do_first(time: ProfiledStep, changes: dict[str, object], words: list[str]) -> None:
    first = advice(time, replace(FACTS, **changes))[0]
    assert all(word in first for word in words), first


def test_the_largest_gain_comes_first() -> None:
    found = advice(of(data_wait=20, idle=200, optimizer=60), FACTS)
    assert [text.split()[0] for text in found] == ["the", "optimizer", "data"]


def test_the_text_says_what_the_json_holds() -> None:
    found = as_json(of(matmul=410, attention=70, idle=20), FACTS)
    assert found["tokens_per_s"] == 8 * 4096 / 0.5
    assert found["mfu"] == pytest.approx(8 * 4096 / 0.5 * SHAPE.flops_per_token(4096) / 989e12)
    assert sum(row["ms"] for row in found["parts"]) == pytest.approx(found["profiled_step_ms"])
    text = as_text(found)
    for words in ("65,536 tokens/s", "3 steps on NVIDIA H200 in bf16", "82.0%", "idle in forward 20.00 ms", "nvjet"):
        assert words in text
    assert "TFLOP/s" in text and "of what this device does" in text and "1. " in text


def test_a_wrapped_model_has_no_rates_of_parts() -> None:
    wrapped = replace(FACTS, shape=replace(SHAPE, wrapped="{}", wrapped_parameters=10))
    assert {row.part for row in rows_of(of(matmul=400, attention=70, optimizer=10), wrapped) if row.rate} == {OPTIMIZER}
