"""Serving: caches, latencies against hand arithmetic, and wishes that cannot be met."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.plan.cost_model import serving
from bessemer.plan.cost_model.cost import load_prices
from bessemer.plan.cost_model.serving import ServingDemand, cache_per_token, rank_serving, serve
from bessemer.plan.hardware import find_gpu, gpu_catalogue
from bessemer.spec.shape import Mla, ModelShape, preset, with_vocab

LLAMA_7B, LLAMA_8B, LLAMA_70B = (
    with_vocab(preset(name), vocab)
    for name, vocab in (("7B", 32_000), ("8B", 128_256), ("70B", 128_256))  # type: ignore[arg-type]
)
H100 = find_gpu("H100")


@pytest.fixture(autouse=True)
def nothing_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_cache_of_a_token() -> None:
    """2 x layers x KV heads x head size x bytes."""
    assert cache_per_token(LLAMA_7B) == 2 * 32 * 32 * 128 * 2
    assert cache_per_token(LLAMA_7B) * 8192 == pytest.approx(4.3e9, rel=0.01)  # 8K tokens, d 4096, 32 layers, bf16
    assert cache_per_token(LLAMA_8B) * 8192 == pytest.approx(1.07e9, rel=0.01)  # with 8 of 32 KV heads
    assert cache_per_token(LLAMA_70B) == 327_680
    latent = ModelShape(1000, 2048, 10, 16, 16, 128, 4096, mla=Mla(512, 128, 64, 128))
    assert cache_per_token(latent) == 10 * (512 + 64) * 2


def test_one_request_reads_the_weights_once_a_token() -> None:
    found = serve(LLAMA_8B, ServingDemand(0.01), H100)[0]
    read_s = serving.weight_bytes(LLAMA_8B, "bf16") / (H100.memory_bandwidth * serving.DECODE_SHARE)
    assert found.tensor_parallel == 1 and found.replicas == 1 and found.sequences == 1
    assert found.tpot_s == pytest.approx(read_s + serving.STEP_S, rel=0.03)
    assert found.ttft_s > 2 * LLAMA_8B.parameters * 1000 / H100.peak("bf16")


def test_seventy_billion_in_16_bits_wants_four_h100() -> None:
    """141 GB of weights do not fit into one or two cards of 80 GB."""
    splits = {way.tensor_parallel for way in serve(LLAMA_70B, ServingDemand(1), H100)}
    assert min(splits) == 4
    assert min(way.tensor_parallel for way in serve(LLAMA_70B, ServingDemand(1), H100, ("fp8",))) == 2


@settings(deadline=None, max_examples=30)
@given(st.floats(0.1, 500), st.sampled_from(["A100-80GB", "H100", "H200", "L40S"]))
def test_promises_are_kept_and_load_is_carried(rps: float, name: str) -> None:
    demand = ServingDemand(rps, tpot_s=0.06)
    for way in serve(LLAMA_8B, demand, find_gpu(name)):
        assert way.ttft_s <= demand.ttft_s and way.tpot_s <= demand.tpot_s
        assert way.sequences <= way.most_sequences + 1 and way.replicas * way.rps_per_replica >= rps * 0.999


def test_more_requests_never_need_fewer_gpus() -> None:
    needed = [serve(LLAMA_8B, ServingDemand(rps), H100)[0].gpus for rps in (1, 10, 30, 100, 1000)]
    assert needed == sorted(needed) and needed[-1] > needed[0]


def test_ranking_by_price() -> None:
    demand = ServingDemand(50)
    found = rank_serving(LLAMA_8B, demand, list(gpu_catalogue().values()), load_prices())
    assert [way.usd_hour for way in found] == sorted(way.usd_hour for way in found)
    best = found[0]
    assert best.price and best.usd_hour == pytest.approx(best.gpus * best.price.usd_hour)
    assert best.usd_per_million_output == pytest.approx(best.usd_hour / (50 * 3600 * demand.answer / 1e6))
    assert 0.01 < best.usd_per_million_output < 5
    told = best.settings(demand)
    assert told["tensor_parallel_size"] == best.tensor_parallel and told["max_model_len"] == 2048


@pytest.mark.parametrize(
    ("demand", "gpu", "said"),
    [
        (ServingDemand(1, tpot_s=0.004), "A100-80GB", "--tpot"),
        (ServingDemand(1), "T4", "do not fit"),
        (ServingDemand(1, prompt=100_000, ttft_s=0.05), "H200", "--ttft"),
    ],
)
def test_impossible_wishes_get_the_arithmetic(demand: ServingDemand, gpu: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        serve(LLAMA_70B, demand, find_gpu(gpu))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="serving"):
        rank_serving(LLAMA_70B, demand, [find_gpu(gpu)], load_prices(), precisions=("bf16",))


@pytest.mark.parametrize("wish", [{"rps": 0}, {"rps": 1, "prompt": -1}, {"rps": 1, "ttft_s": float("nan")}])
def test_nonsense_is_one_line(wish: dict[str, float]) -> None:
    with pytest.raises(UserError, match="above 0"):
        ServingDemand(**wish)  # type: ignore[arg-type]
