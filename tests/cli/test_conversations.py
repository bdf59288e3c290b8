"""Questions that people ask a training engineer, asked of the commands; each number is checked by hand.

Other conversations are tests of their folders: a poisoned shard (session/test_seed_story.py), setting up DPO
(session/test_seed_preferences.py), a model that DPO made sycophantic (align/test_sycophantic_dpo.py), continued
pre-training in three phases (session/test_continue.py), AdamW with SAM (session/test_seed_optimisation.py), a loss that
oscillates after 10,000 steps and the log of a slow node of eight A100s (cli/test_diagnose.py).
"""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.conftest import Call

DAY = 86_400
A100_FLOPS, A100_BYTES = 312e12, 80e9
KNOWN_7B = 6_738_415_616  # 2 x 32,000 x 4,096 + 32 x (4 x 4,096^2 + 3 x 4,096 x 11,008 + 2 x 4,096) + 4,096


def answer(call: Call, *arguments: str) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.code == 0, result.err
    return dict(json.loads(result.out))


def decisions(facts: dict[str, Any]) -> dict[str, Any]:
    return {decision["key"]: decision["value"] for decision in facts["decisions"]}


def write_log(path: Path, steps: range, loss: Callable[[int], float], norm: Callable[[int], float]) -> str:
    noise = random.Random(1)
    lines = [
        f"step {s} | loss {loss(s) + noise.gauss(0, 0.015):.4f} | grad_norm {norm(s) * noise.uniform(0.9, 1.1):.3f} | "
        "lr 2.0e-04"
        for s in steps
    ]
    path.write_text("\n".join(lines))
    return str(path)


def top_finding(call: Call, log: str) -> dict[str, Any]:
    return dict(answer(call, "diagnose", log)["findings"][0])


def test_7b_on_100b_tokens_with_8_a100s(call: Call) -> None:
    """A month and not a week: 1.2 million tokens/s would be 19 times the peak of eight A100s."""
    facts = answer(call, "plan", "--model", "7b", "--tokens", "100B", "--gpus", "8xA100-80GB")
    assert facts["parameters"] == KNOWN_7B
    attention = 12 * 32 * 4096 * facts["context"]  # as PaLM counts it: all scores, forward and backward
    flops = 6 * (KNOWN_7B - 32_000 * 4096) + attention
    best = facts["best"]
    assert best["mfu"] == pytest.approx(best["tokens_per_s"] * flops / (8 * A100_FLOPS), rel=0.03)
    assert facts["training_s"] == pytest.approx(1e11 / best["tokens_per_s"], rel=0.01) and facts["wall_s"] > 25 * DAY
    assert facts["gpu_hours"] == pytest.approx(8 * facts["wall_s"] / 3600)
    chosen = decisions(facts)
    assert chosen["precision"] == "bf16" and chosen["parallel.dp_shard"] == 8
    assert chosen["steps"] == math.ceil(1e11 / chosen["budget.batch"])
    refused = call("plan", "--model", "7b", "--tokens", "100B", "--gpus", "8xA100-80GB", "--tokens-per-second", "1.2M")
    assert refused.code == 2 and "6.1 PFLOP/s each, 19 times" in refused.err
    each = 6 * KNOWN_7B * 1.2e6 / 8
    assert each == pytest.approx(6.1e15, rel=0.01) and each / A100_FLOPS == pytest.approx(19, abs=1)


def test_50k_tokens_per_second_on_8_gpus(call: Call) -> None:
    """For 7B they are more than the plan gives, and the hoped-for 150K are impossible; for 760M they are slow."""
    refused = call("plan", "--model", "7b", "--tokens", "100B", "--gpus", "8xA100-80GB", "--tokens-per-second", "150K")
    at_peak = 8 * A100_FLOPS / (6 * KNOWN_7B)
    assert refused.code == 2 and f"At the peak they reach {at_peak / 1000:.1f}K tokens/s" in refused.err
    slow = call("plan", "--model", "7b", "--tokens", "100B", "--gpus", "8xA100-80GB", "--tokens-per-second", "50K")
    assert slow.code == 2 and 50_000 / at_peak == pytest.approx(0.81, abs=0.01)
    small = answer(call, "plan", "--model", "760m", "--tokens", "15B", "--gpus", "8xA100-80GB")
    assert small["best"]["tokens_per_s"] > 4 * 50_000


def test_8_a100s_but_only_3_times_as_fast(call: Call) -> None:
    """In one node they are nearly 8 times as fast. 3 times is a slow network: more than half of a step waits for it."""
    arguments = ["plan", "--model", "350m", "--tokens", "10B"]
    node = answer(call, *arguments, "--gpus", "8xA100-80GB")
    apart = [*arguments, "--gpus", "8 nodes of 1 A100-80GB", "--network", "10 Gb/s"]
    slow, one = answer(call, *apart), answer(call, *arguments, "--gpus", "1xA100-80GB")
    times = [facts["best"]["tokens_per_s"] / one["best"]["tokens_per_s"] for facts in (node, slow)]
    assert times == [pytest.approx(7.9, abs=0.4), pytest.approx(3.0, abs=0.6)]
    step = slow["best"]["step"]
    assert step["dp_s"] + step["pp_s"] + step["tp_s"] > step["total_s"] / 2
    text = call(*apart).out
    assert "scale" in text and "a step" in text


def test_8_nodes_of_a100s(call: Call) -> None:
    """Throughput of 64 GPUs: the layout, its MFU by hand, and what a slow network would cost."""
    arguments = ["plan", "--model", "13b", "--tokens", "1T", "--gpus", "8 nodes of 8 A100-80GB"]
    facts = answer(call, *arguments)
    best, layout = facts["best"], facts["best"]["layout"]
    assert math.prod(layout.values()) == 64 - facts["idle_gpus"] == 64
    flops = 6 * (facts["parameters"] - 32_000 * 5120) + 12 * 40 * 5120 * facts["context"]
    assert best["mfu"] == pytest.approx(best["tokens_per_s"] * flops / (64 * A100_FLOPS), rel=0.03)
    batch = decisions(facts)["budget.batch"]
    assert best["tokens_per_s"] == pytest.approx(batch / best["step"]["total_s"], rel=0.01)
    slow = answer(call, *arguments, "--network", "25 Gb/s")
    assert slow["best"]["tokens_per_s"] < 0.8 * best["tokens_per_s"] and slow["wall_s"] > facts["wall_s"]
    assert len(facts["next"]) == 2 and all(other["tokens_per_s"] <= best["tokens_per_s"] for other in facts["next"])


def test_from_7b_to_70b(call: Call) -> None:
    """1T tokens on 256 A100s are months. An answer of 15 hours divides by the 256 GPUs twice."""
    hours = 6 * 70e9 * 1e12 / (256 * A100_FLOPS * 0.38) / 3600
    assert hours == pytest.approx(3836, rel=0.01) and hours / 256 == pytest.approx(15, abs=0.1)
    small = answer(call, "plan", "--model", "7b", "--tokens", "1T", "--gpus", "256xA100-80GB")
    large = answer(call, "plan", "--model", "70b", "--tokens", "1T", "--gpus", "256xA100-80GB")
    by_hand = 6 * 70e9 * 1e12 / (256 * A100_FLOPS * large["best"]["mfu"])
    assert large["training_s"] == pytest.approx(by_hand, rel=0.1) and 80 * DAY < large["wall_s"] < 130 * DAY
    assert 7 < large["gpu_hours"] / small["gpu_hours"] < 14  # ten times the parameters
    assert decisions(large)["optimizer.lr"] < decisions(small)["optimizer.lr"]
    assert decisions(large)["budget.batch"] >= decisions(small)["budget.batch"]
    one_node = call("plan", "--model", "70b", "--tokens", "1T", "--gpus", "8xA100-80GB")
    assert one_node.code == 2 and "nothing fits" in one_node.err


def test_70b_with_monitoring_and_checkpoints(call: Call, tmp_path: Path) -> None:
    """The planned spec is complete: layout, save interval, guard; it is checked, and its cluster job is written."""
    spec = tmp_path / "seventy.yaml"
    facts = answer(call, "plan", "--model", "70b", "--tokens", "1T", "--gpus", "256xA100-80GB", "--write", str(spec))
    assert facts["best"]["memory_bytes"]["total"] < A100_BYTES * 1.01
    checked = call("spec", "check", str(spec), "--skip-paths")
    assert checked.code == 0, checked.err
    written = yaml.safe_load(spec.read_text())
    parallel = written["parallel"]
    assert parallel["dp_shard"] * parallel["tp"] * parallel["pp"] == 256 and written["checkpoint"]["every"]
    shown = yaml.safe_load(call("spec", "show", str(spec)).out)
    assert shown["guard"]["enabled"] is True and shown["optimizer"]["clip"] == 1.0
    assert facts["training_s"] < facts["wall_s"] < 1.05 * facts["training_s"]


def test_the_loss_went_from_2_5_to_15_at_step_5000(call: Call, tmp_path: Path) -> None:
    log = write_log(
        tmp_path / "spike.log", range(3000, 6000),
        lambda s: 15.0 if s == 5000 else 2.5 + 0.4 * math.exp(-(s - 3000) / 500), lambda s: 47.3 if s == 5000 else 0.9,
    )  # fmt: skip
    finding = top_finding(call, log)
    assert finding["rule"] == "bad_batch" and finding["step"] == 5000
    assert finding["evidence"]["value"] == pytest.approx(15.0, abs=0.1)
    assert finding["evidence"]["usual"] == pytest.approx(2.5, abs=0.05)
    assert finding["evidence"]["gradient_factor"] == pytest.approx(47.3 / 0.9, rel=0.3)
    assert "Replay the step" in finding["check"] and len(finding["alternatives"]) >= 2


def test_spikes_after_1000_steps(call: Call, tmp_path: Path) -> None:
    """Every 137 steps: the period is named, and with it the second suspect, data that comes in an order."""
    bad = [s for s in range(1001, 3000) if s % 137 == 0]
    log = write_log(
        tmp_path / "spikes.log", range(3000), lambda s: 2.0 + 6 * math.exp(-s / 400) + 4 * (s in bad),
        lambda s: 26.0 if s in bad else 0.8,
    )  # fmt: skip
    finding = top_finding(call, log)
    assert finding["rule"] == "bad_batch" and finding["evidence"]["steps"] == bad and len(bad) == 14
    assert finding["evidence"]["period"] == 137
    assert finding["alternatives"][0]["name"] == "data_ordered"


def test_13b_diverged_at_50247(call: Call, tmp_path: Path) -> None:
    """From 2.1 to 8.3 and not back: no batch explains that, so the first cause is damage, the next a rate too high."""
    log = write_log(
        tmp_path / "diverged.log", range(49_000, 50_800), lambda s: 2.1 if s < 50_247 else 8.3,
        lambda s: 0.7 if s < 50_247 else 12.0,
    )  # fmt: skip
    finding = top_finding(call, log)
    assert finding["step"] == 50_247 and finding["severity"] == "critical"
    assert finding["rule"] in ("weights_damaged", "lr_too_high", "diverged")
    names = [finding["rule"], *(cause["name"] for cause in finding["alternatives"])]
    assert {"weights_damaged", "lr_too_high", "bad_batch"} <= set(names) and names[0] != "bad_batch"
    assert finding["evidence"]["last"] == pytest.approx(8.3, abs=0.1)


def test_attention_for_long_contexts(call: Call) -> None:
    """What a conversation caches: 4.3 GB at 8,192 tokens with 32 heads of keys, a quarter of it with 8."""
    eight_heads = 2 * 32 * 8 * 128 * 2  # keys and values x layers x heads x width x bytes of bf16
    facts = answer(call, "plan", "memory", "inference", "--model", "llama-8b", "--gpus", "H100", "--context", "131072")
    assert facts["memory_bytes"]["cache"] / facts["rows"] == pytest.approx(eight_heads * 131_072)
    full = answer(call, "plan", "memory", "inference", "--model", "llama-7b", "--gpus", "H100", "--context", "8192")
    per_conversation = full["memory_bytes"]["cache"] / full["rows"]
    assert per_conversation == pytest.approx(4 * eight_heads * 8192) == pytest.approx(4.29e9, rel=0.01)
    arguments = ["plan", "--model", "8b", "--tokens", "10B", "--gpus", "8xH100", "--set"]
    long = answer(call, *arguments, "data.context=131072")
    short = answer(call, *arguments, "data.context=8192")
    assert long["best"]["layout"]["cp"] > 1 == short["best"]["layout"]["cp"]
    assert long["best"]["tokens_per_s"] < short["best"]["tokens_per_s"] / 2  # attention grows with the context


def test_10k_requests_per_second_under_100_ms(call: Call) -> None:
    """The first token within 100 ms takes about a thousand GPUs; a whole answer within 100 ms is impossible."""
    facts = answer(call, "plan", "serve", "--model", "7b", "--rps", "10000", "--ttft", "100ms", "--tpot", "30ms")
    best = facts["best"]
    assert best["ttft_s"] < 0.1 and best["tpot_s"] < 0.03
    assert best["replicas"] == math.ceil(10_000 / best["rps_per_replica"])
    in_flight = best["rps_per_replica"] * (best["ttft_s"] + 250 * best["tpot_s"])  # Little's law
    assert best["sequences"] == pytest.approx(in_flight, abs=2) and best["sequences"] < best["most_sequences"]
    assert best["cache_bytes_per_token"] == 2 * 32 * 32 * 128 * 2
    assert best["usd_hour"] == pytest.approx(best["gpus"] * best["price"]["usd_hour"], rel=0.01)
    million_answers_s = 1e6 / (10_000 * 250)
    assert best["usd_per_million_output"] == pytest.approx(best["usd_hour"] * million_answers_s / 3600, rel=0.01)
    refused = call("plan", "serve", "--model", "7b", "--rps", "10000", "--ttft", "50ms", "--tpot", "0.2ms")
    assert refused.code == 2 and len(refused.err.strip().splitlines()) == 1
