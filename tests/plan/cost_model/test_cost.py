"""What runs cost: hours, money, energy, data; and the arithmetic that is often got wrong."""

import json
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.plan.cost_model import cost
from bessemer.plan.cost_model.cost import load_prices
from bessemer.plan.cost_model.goodput import Reliability
from bessemer.plan.hardware import find_gpu

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"
NEVER = Reliability(failures_per_node_day=0, save_stall_s=0.001)


@pytest.fixture(autouse=True)
def nothing_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def work(gpu: str = "A100-80GB", gpus: int = 8, hours: float = 100) -> cost.Work:
    return cost.Work(gpu, gpus, hours * 3600, 7e9, 1e11)


def test_our_own_measured_rates() -> None:
    """The constants are those of the committed measurements."""
    read = {name: json.loads((RESULTS / f"2026-11-16-{name}.json").read_text()) for name in
            ("filters", "dedup", "tokenization")}  # fmt: skip
    assert read["filters"]["results"]["all four"]["ours"]["mb_per_s"] == cost.FILTER_MB_S
    assert read["dedup"]["steps"]["ours"]["mb_per_s"] == cost.DEDUP_MB_S
    threads = read["tokenization"]["machine"]["threads"]
    median = statistics.median(read["tokenization"]["kinds"]["bpe"]["mb_per_s"]["ours"])
    assert median / threads == cost.TOKENIZE_MB_S


def test_money_is_hours_times_price() -> None:
    prices = load_prices()
    price = prices.find("A100-80GB", "lambda", term="on_demand")[0]
    found = cost.cost_of(work(), price, prices, reliability=NEVER)
    assert found.gpu_hours == pytest.approx(800, rel=1e-4)
    assert found.usd == pytest.approx(800 * 2.79, rel=1e-4) and found.days == pytest.approx(100 / 24, rel=1e-4)


def test_failures_and_preemptions_cost() -> None:
    prices = load_prices()
    steady = prices.find("H100", "aws", "us-east-1", "on_demand")[0]
    spot = prices.find("H100", "aws", "us-east-1", "spot")[0]
    big = work("H100", 1024, 500)
    plain = cost.cost_of(big, steady, prices, reliability=NEVER)
    real = cost.cost_of(big, steady, prices)
    assert real.usd > plain.usd and real.wall_s > plain.wall_s
    preempted = cost.cost_of(big, spot, prices)
    assert preempted.wall_s > 5 * real.wall_s and "preempted" in preempted.notes[0]
    few = cost.cost_of(work("H100", 8), spot, prices)
    assert few.usd < cost.cost_of(work("H100", 8), steady, prices).usd


def test_storage_of_a_70b() -> None:
    """A full checkpoint is 840 GB: fp32 weights and two moments."""
    assert cost.storage_bytes(70e9, 1e12) == 3 * 840e9 + 4e12


def test_energy_and_carbon() -> None:
    """Llama 2 70B reports 1,720,320 A100-hours at 400 W: 688 MWh of GPUs, 291 t; hosts and cooling come on top."""
    gpu = find_gpu("A100-80GB")
    kwh = cost.energy_kwh(gpu, 1_720_320, pue=1.0)
    assert kwh / cost.HOST_FACTOR == pytest.approx(688_128)
    prices = load_prices()
    clean, dirty = (
        cost.cost_of(work(), prices.find("H100", "aws", region, "on_demand")[0], prices)
        for region in ("eu-north-1", "us-east-1")
    )
    assert clean.energy_kwh == pytest.approx(dirty.energy_kwh) and dirty.carbon_kg > 10 * clean.carbon_kg


def test_data_preparation() -> None:
    tokenizing = 4e11 / 1e6 / cost.TOKENIZE_MB_S / 3600
    assert tokenizing < cost.preparation_hours(1e11) < 50 * tokenizing


def test_ranking() -> None:
    prices = load_prices()
    found = cost.rank_offers(work("H100", 16, 110), prices)
    assert [way.usd for way in found] == sorted(way.usd for way in found)
    assert {way.price.provider for way in found} >= {"aws", "gcp", "azure", "coreweave", "lambda", "runpod"}
    assert all(way.price.most is None or way.price.most >= 16 for way in found)
    assert {way.price.term for way in found} == {"on_demand", "spot"}
    assert "modal" in {way.price.provider for way in cost.rank_offers(work("H100", 8), prices)}


@given(st.floats(1, 1e5), st.integers(1, 4096))
def test_more_work_costs_more(hours: float, gpus: int) -> None:
    prices = load_prices()
    price = prices.find("H100", "lambda", term="on_demand")[0]
    less, more = (cost.cost_of(work("H100", gpus, scale * hours), price, prices) for scale in (1, 2))
    assert more.usd == pytest.approx(2 * less.usd) and math.isfinite(more.carbon_kg)
