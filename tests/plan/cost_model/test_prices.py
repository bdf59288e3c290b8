"""The price table: complete, dated, sourced, and the user's own over it."""

from pathlib import Path

import pytest
import yaml

from bessemer.errors import UserError
from bessemer.plan.cost_model import cost as table
from bessemer.plan.cost_model.cost import TERMS, PriceList, load_prices
from bessemer.plan.hardware import gpu_catalogue


@pytest.fixture(autouse=True)
def nothing_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


PROVIDERS = ("modal", "lambda", "runpod", "aws", "gcp", "azure", "coreweave")


def with_user_file(text: str) -> PriceList:
    table.user_file().parent.mkdir(parents=True)
    table.user_file().write_text(text)
    return load_prices()


def test_every_provider_and_term_is_there() -> None:
    found = load_prices()
    assert {price.provider for price in found.prices} == set(PROVIDERS)
    assert {price.term for price in found.prices} == set(TERMS)
    known = gpu_catalogue()
    for price in found.prices:
        assert price.gpu in known and 0.05 < price.usd_hour < 40
        assert price.source and price.date[:3] == "202"
        assert price.provider in found.providers and price.region in found.regions


def test_terms_are_cheaper_than_on_demand_and_marked_where_computed() -> None:
    found = load_prices()
    for price in found.prices:
        if price.term == "on_demand":
            continue
        same = found.find(price.gpu, price.provider, price.region, "on_demand")
        assert len(same) == 1 and price.usd_hour < same[0].usd_hour
        assert price.estimate or "times" not in price.source
    assert all(price.preemptions_per_hour > 0 for price in found.prices if price.term == "spot")


def test_known_prices() -> None:
    found = load_prices()
    assert found.find("H100", "aws", "us-east-1", "on_demand")[0].usd_hour == 6.88  # p5.48xlarge, $55.04 for 8
    assert found.find("H100 SXM", "coreweave", term="on_demand")[0].usd_hour == pytest.approx(49.24 / 8)
    assert found.find("B200", "aws", "us-east-1", "on_demand")[0].usd_hour == pytest.approx(113.9328 / 8)
    cheapest = found.find("A100-80GB", term="on_demand")
    assert [price.usd_hour for price in cheapest] == sorted(price.usd_hour for price in cheapest)


def test_the_user_s_file_replaces_and_adds() -> None:
    text = """
date: 2027-01-01
offers:
  - {provider: aws, gpu: H100, region: us-east-1, on_demand: 1.5}
  - {provider: basement, gpu: RTX 4090, region: here, on_demand: 0.1}
providers: {basement: {pue: 1.1}}
regions: {here: {grams_kwh: 20}}
"""
    found = with_user_file(text)
    mine = found.find("H100", "aws", "us-east-1", "on_demand")
    assert [price.usd_hour for price in mine] == [1.5] and mine[0].date == "2027-01-01"
    assert found.find("H100", "aws", "us-east-1") == mine  # nothing is guessed beside one's own price
    assert found.find("H100", "aws", "us-west-2", "on_demand")[0].usd_hour == 6.88
    assert found.find(provider="basement")[0].gpu == "RTX 4090" and found.provider("basement").pue == 1.1
    assert found.region("here").grams_kwh == 20 and found.region("nowhere").grams_kwh > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("offers: [", "not YAML"),
        ("- 1", "expected a mapping"),
        ("ofers: []", "unknown key"),
        ("offers: [{gpu: H100, on_demand: 1}]", "provider is missing"),
        ("offers: [{provider: aws, gpu: H9000, on_demand: 1}]", "H9000"),
        ("offers: [{provider: aws, gpu: H100, on_demand: -1}]", "above 0"),
        ("offers: [{provider: aws, gpu: H100}]", "no price"),
        ("offers: [{provider: aws, gpu: H100, on_demand: cheap}]", "above 0"),
        ("offers: [{provider: aws, gpu: H100, on_demand: 1, source: rumour}]", "rumour"),
        ("providers: [1]", "expected a mapping"),
    ],
)
def test_bad_files_are_one_line(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        with_user_file(text)
    assert "\n" not in str(caught.value)


def test_unknown_names_get_the_nearest() -> None:
    found = load_prices()
    with pytest.raises(UserError, match="did you mean lambda"):
        found.find(provider="lamda")
    with pytest.raises(UserError, match="did you mean us-east-1"):
        found.find(region="us-east-11")


def test_every_source_is_named_and_dated() -> None:
    data = yaml.safe_load((Path(table.__file__).parents[1] / "data/prices.yaml").read_text())
    used = {offer[key] for offer in data["offers"] for key in offer if key == "source" or key.endswith("_source")}
    used |= {region["source"] for region in data["regions"].values()}
    assert used <= set(data["sources"])
    assert all(source["date"] and source["address"] for source in data["sources"].values())
