"""The time of a step: published runs it was not fitted to, its accounts, and what must never be."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.plan.cost_model.operators import gpt, step_work
from bessemer.plan.cost_model.step_time import StepSetup, step_time
from bessemer.plan.hardware import parse_cluster
from bessemer.plan.search.layout import Layout
from bessemer.spec.shape import PRESETS, Mamba, Moe, with_vocab

SEVEN = with_vocab(PRESETS["7B"], 32_000)
PLAIN = StepSetup(step_work(SEVEN), Layout(dp_shard=8), 4, 64, 2048)
NODE = parse_cluster("8xA100-80GB")

# Korthikanti et al. 2022, table 5 (none of it is in the fit): h, L, a, stages, interleaved, rows of a micro-batch,
# rows, GPUs; seconds with full recomputation, and with sequence parallelism and selective recomputation.
KORTHIKANTI = {
    "22B": (6144, 48, 64, 1, 1, 4, 4, 8, 1.42, 1.10),
    "175B": (12288, 96, 96, 8, 3, 1, 64, 64, 18.13, 13.75),
    "530B": (20480, 105, 128, 35, 3, 1, 280, 280, 49.05, 37.83),
    "1T": (25600, 128, 160, 64, 1, 1, 512, 512, 94.42, 71.49),
}
# Tokens/s on one H200 (benchmarks/results/2026-11-17-gpu-speed-*.json).
H200 = {
    ("1B", 8, 4096, "bf16"): 65_214,
    ("3B", 4, 4096, "bf16"): 27_248,
    ("1B", 8, 4096, "fp8"): 79_808,
    ("3B", 4, 4096, "fp8"): 34_411,
    ("125M", 64, 1024, "bf16"): 556_399,
}


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_steps_of_megatron_that_the_fit_has_not_seen(name: str) -> None:
    h, L, a, pp, virtual, micro, rows, gpus, full_s, selective_s = KORTHIKANTI[name]
    plain = StepSetup(
        gpt(h, L, a, 51_200, 2048), Layout(tp=8, pp=pp), micro, rows, 2048, "fp16", "full", "unfused", "megatron",
        virtual,
    )  # fmt: skip
    cluster = parse_cluster(f"{gpus}xA100")
    assert step_time(plain, cluster).total_s == pytest.approx(full_s, rel=0.12)
    better = replace(plain, recompute="selective", sequence_parallel=True)
    assert step_time(better, cluster).total_s == pytest.approx(selective_s, rel=0.12)


@pytest.mark.parametrize("key", H200)
def test_steps_on_one_h200(key: tuple[str, int, int, str]) -> None:
    name, micro, context, precision = key
    shape = replace(with_vocab(PRESETS[name], 50_304 if name == "125M" else 128_256), tied=name == "125M")
    setup = StepSetup(step_work(shape), Layout(), micro, micro, context, precision, attention="cudnn")
    found = step_time(setup, parse_cluster("1xH200"))
    assert micro * context / found.total_s == pytest.approx(H200[key], rel=0.04)


def test_the_parts_add_up() -> None:
    found = step_time(PLAIN, NODE)
    assert found.total_s == pytest.approx(sum(found.parts.values()))
    assert all(part >= 0 for part in found.parts.values()) and 0 < found.error < 1 and found.basis
    assert found.to_dict()["total_s"] == found.total_s


def test_work_counts_what_the_shape_counts() -> None:
    for shape in (SEVEN, with_vocab(PRESETS["1B"], 128_256), with_vocab(PRESETS["70B"], 128_256)):
        work = step_work(shape)
        inside = sum(layer.number * layer.parameters for layer in work.layers)
        assert inside + work.ends == pytest.approx(shape.parameters, rel=1e-3)
        multiplied = sum(layer.number * into * out for layer in work.layers for into, out, _ in layer.products)
        tokens_flops = 6 * (multiplied + shape.vocab * shape.width)
        attention = 12 * shape.layers * shape.width * 2048
        assert tokens_flops + attention == pytest.approx(shape.flops_per_token(2048), rel=1e-3)


def test_the_bubble_is_that_of_the_schedule() -> None:
    """Stages of equal length: (p - 1) / m of the work of the stages, less by interleaving."""
    work = gpt(4096, 32, 32, 50_304, 2048)
    setup = StepSetup(work, Layout(pp=8), 1, 64, 2048, framework="megatron")
    cluster = parse_cluster("8xA100")
    found, woven = step_time(setup, cluster), step_time(replace(setup, virtual=4), cluster)
    assert woven.bubble_s == pytest.approx(found.bubble_s / 4)
    one_stage = found.bubble_s / 7
    assert found.compute_s + found.tp_s + found.stall_s > 64 * one_stage
    longer = step_time(replace(setup, global_batch=128), cluster)
    assert longer.bubble_s == pytest.approx(found.bubble_s)


def test_recomputing_costs_at_most_a_third() -> None:
    none, some, full = (
        step_time(replace(PLAIN, recompute=how), NODE).compute_s for how in ("none", "selective", "full")
    )  # type: ignore[arg-type]
    assert none < some < full < 4 / 3 * none


def test_tensor_parallelism_across_nodes_is_dear() -> None:
    work = step_work(with_vocab(PRESETS["70B"], 128_256))
    cluster = parse_cluster("16xH100")
    inside = step_time(StepSetup(work, Layout(dp_shard=2, tp=8), 1, 16, 4096), cluster)
    across = step_time(StepSetup(work, Layout(tp=16), 1, 16, 4096), cluster)
    assert across.tp_s > 2 * inside.tp_s


def test_eight_gpus_on_a_slow_link_are_not_eight_times_as_fast() -> None:
    """The question of one of the first users: 8 GPUs only 3 times as fast as one."""
    work = step_work(with_vocab(PRESETS["1B"], 128_256))
    one = step_time(StepSetup(work, Layout(), 2, 2, 2048), parse_cluster("1xA100-80GB-PCIe")).total_s
    slow = step_time(
        StepSetup(work, Layout(dp_replicate=8), 2, 16, 2048), parse_cluster("8 nodes of 1 A100-80GB-PCIe", "10 Gb/s")
    )
    fast = step_time(StepSetup(work, Layout(dp_replicate=8), 2, 16, 2048), NODE)
    assert 8 * one / slow.total_s < 4 < 7 < 8 * one / fast.total_s
    assert slow.dp_s > slow.compute_s


def test_experts_and_state_spaces_are_timed_with_a_wide_error_bar() -> None:
    moe = replace(with_vocab(PRESETS["1B"], 32_000), moe=Moe(experts=8, top_k=2, ffn=8192))
    mamba = replace(with_vocab(PRESETS["1B"], 32_000), mixers=("mamba", "attention"), mamba=Mamba(heads=64))
    plain = step_work(with_vocab(PRESETS["1B"], 32_000))
    dense = step_time(StepSetup(plain, Layout(dp_shard=8), 2, 16, 2048, framework="fsdp"), NODE)
    for shape in (moe, mamba):
        found = step_time(StepSetup(step_work(shape), Layout(dp_shard=8), 2, 16, 2048, framework="fsdp"), NODE)
        assert math.isfinite(found.total_s) and found.error > dense.error
    spread = StepSetup(step_work(moe), Layout(dp_shard=8, ep=8), 2, 16, 2048)
    assert step_time(spread, NODE).tp_s > 0


def test_measured_rates_go_before_the_catalogue() -> None:
    slower = replace(NODE, measured={"matmul_bf16": 100e12})
    assert step_time(PLAIN, slower).compute_s > 1.5 * step_time(PLAIN, NODE).compute_s


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layout": Layout(dp_shard=4)}, "multiply to 4, and there are 8"),
        ({"layout": Layout(dp_shard=1, tp=8), "work": gpt(4096, 32, 20, 32_000, 2048)}, "does not divide 20 heads"),
        ({"layout": Layout(pp=8), "virtual": 8}, "stages for 32 layers"),
        ({"global_batch": 60}, "write 64"),
        ({"micro_batch": 0}, "above zero"),
        ({"precision": "fp8"}, "has no fp8"),
        ({"precision": "fp12"}, "has no fp12"),
    ],
)
def test_impossible_configurations_are_refused_with_the_fix(change: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        step_time(replace(PLAIN, **change), NODE)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=60)
@given(
    tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4]), dp=st.sampled_from([1, 2, 8, 64]),
    replicas=st.sampled_from([1, 2]), micro=st.integers(1, 8), batches=st.integers(1, 16),
    framework=st.sampled_from(["megatron", "fsdp", "compiled"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    more=st.floats(1, 8),
)  # fmt: skip
def test_better_hardware_is_never_slower_and_more_work_never_faster(
    tp: int, pp: int, dp: int, replicas: int, micro: int, batches: int, framework: str, recompute: str, more: float
) -> None:
    layout = Layout(replicas, dp, tp, 1, pp)
    setup = StepSetup(
        PLAIN.work, layout, micro, micro * batches * layout.dp, 2048, "bf16", recompute, "flash", framework
    )  # type: ignore[arg-type]  # fmt: skip
    nodes = max(1, layout.size // 8)
    cluster = parse_cluster(f"{nodes} nodes of {layout.size // nodes} A100")
    found = step_time(setup, cluster).total_s
    gpu = cluster.gpu
    better = [
        replace(cluster, network_bandwidth=cluster.network_bandwidth * more),
        replace(cluster, gpu=replace(gpu, link_bandwidth=gpu.link_bandwidth * more)),
        replace(cluster, gpu=replace(gpu, memory_bandwidth=gpu.memory_bandwidth * more)),
        replace(cluster, gpu=replace(gpu, peaks={key: rate * more for key, rate in gpu.peaks.items()})),
    ]
    for one in better:
        assert step_time(setup, one).total_s <= found * (1 + 1e-9)
    assert step_time(replace(setup, global_batch=2 * setup.global_batch), cluster).total_s > found
    assert step_time(replace(setup, context=4096), cluster).total_s > found
    assert step_time(replace(setup, recompute="full"), cluster).total_s >= found * (1 - 1e-9)
