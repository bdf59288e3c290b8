"""What a run costs: GPU-hours, money by provider and term, storage, energy, carbon, and the preparation of its data.

Prices come from a dated table (data/prices.yaml) that the user's own file extends and overrides. Each price has a
source and a date. A term without a listed price is the on-demand price times a usual factor, marked as an estimate.
Wall time is training time divided by the goodput (goodput.py).
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from bessemer.errors import UserError
from bessemer.plan.cost_model.goodput import Goodput, Reliability, goodput
from bessemer.plan.hardware import Gpu, find_gpu
from bessemer.spec.quantity import human_count

Term = Literal["on_demand", "spot", "1y", "3y"]
TERMS: tuple[Term, ...] = get_args(Term)
HOURS_PER_MONTH = 730.0
_SECTIONS = ("date", "sources", "terms", "preemptions_per_hour", "offers", "providers", "regions")
# A node draws more power than its GPUs: an 8 x H100 node drew at most 8.4 kW in training (Latif et al. 2024), 1.5 times
# the rated 5.6 kW of its GPUs.
HOST_FACTOR = 1.5
# MB of text per second on one core: benchmarks/results/2026-11-16-{filters,dedup,tokenization}.json. All filters of
# Gopher, C4 and FineWeb in one thread; MinHash signatures; BPE in two threads.
FILTER_MB_S = 2.1234272300297814
DEDUP_MB_S = 28.30403055570433
TOKENIZE_MB_S = 15.716546066820193 / 2
BYTES_PER_TOKEN = 4.0  # English text with 50,000 tokens and more; code and other languages have fewer
KEPT_SHARE = 0.3  # of raw web text after filters and dedup; DCLM and FineWeb kept less, curated sources more
TOKEN_BYTES = 4  # in a token store with a vocabulary above 65,536
CHECKPOINTS = 3  # that are stored
CHECKPOINT_BYTES = 12  # a parameter: fp32 weights and two moments
REQUEUE_S = 900.0  # until a spot machine is replaced: a guess


@dataclass(frozen=True)
class Price:
    """Dollars per GPU and hour. `estimate`: computed, or from a source that is no price list."""

    provider: str
    gpu: str
    region: str
    term: Term
    usd_hour: float
    source: str
    date: str
    estimate: bool
    most: int | None = None  # GPUs, if the offer is for single machines
    preemptions_per_hour: float = 0.0  # of one machine


@dataclass(frozen=True)
class Provider:
    storage_gb_month: float
    pue: float
    cpu_core_hour: float


@dataclass(frozen=True)
class Region:
    grams_kwh: float
    usd_kwh: float


@dataclass(frozen=True)
class PriceList:
    date: str
    prices: tuple[Price, ...]
    providers: Mapping[str, Provider]
    regions: Mapping[str, Region]

    def find(
        self, gpu: str | None = None, provider: str | None = None, region: str | None = None, term: Term | None = None
    ) -> list[Price]:
        """Matching offers, cheapest first. An unknown name is refused with the nearest one."""
        gpu = find_gpu(gpu).name if gpu else None
        if provider:
            provider = _check_name("provider", provider.lower(), {price.provider for price in self.prices})
        if region:
            region = _check_name("region", region.lower(), {price.region for price in self.prices})
        if term:
            _check_name("term", term, set(TERMS))
        wanted = {"gpu": gpu, "provider": provider, "region": region, "term": term}
        matching = [p for p in self.prices if all(v is None or getattr(p, key) == v for key, v in wanted.items())]
        return sorted(matching, key=lambda price: (price.usd_hour, price.provider, price.region))

    def region(self, name: str) -> Region:
        return self.regions.get(name) or self.regions["any"]

    def provider(self, name: str) -> Provider:
        return self.providers[_check_name("provider", name, set(self.providers))]


def user_file() -> Path:
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return config / "bessemer/prices.yaml"


def load_prices() -> PriceList:
    """The shipped table, extended and overridden by the user's file."""
    shipped = resources.files("bessemer.plan").joinpath("data/prices.yaml")
    path = user_file()
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return _read(shipped.read_text(encoding="utf-8"), text, str(path))


def list_price(machine: str) -> tuple[float | None, str]:
    """The lowest on-demand price of an hour of a GPU, and whose it is."""
    try:
        gpu = find_gpu(machine)
    except UserError:
        return None, ""
    prices = load_prices()
    offers = [price for price in prices.prices if price.gpu == gpu.name and price.term == "on_demand"]
    if not offers:
        return None, ""
    best = min(offers, key=lambda price: price.usd_hour)
    return best.usd_hour, f"lowest on-demand price, {best.provider} {best.region}, {best.date}"


@cache
def _read(shipped: str, user: str, place: str) -> PriceList:
    data = _parse(shipped, "prices.yaml")
    if user.strip():
        data = _merge(data, _parse(user, place), place)
    prices = [price for offer in data["offers"] for price in _prices(offer, data, place)]
    try:
        providers = {name: Provider(**entry) for name, entry in data["providers"].items()}
        regions = {
            name: Region(float(entry["grams_kwh"]), float(entry["usd_kwh"])) for name, entry in data["regions"].items()
        }
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{place}: providers or regions: {error}: write them as the shipped table does") from None
    return PriceList(str(data["date"]), tuple(prices), providers, regions)


def _parse(text: str, place: str) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
    try:
        data = yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = f"{place}:{line + 1}" if line is not None else place
        raise UserError(f"{where}: not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise UserError(f"{place}: expected a mapping with {', '.join(_SECTIONS)}")
    for key in data:
        if key not in _SECTIONS:
            raise UserError(f"{place}: {key}: unknown key; known here: {', '.join(_SECTIONS)}")
    return data


def _merge(base: dict[str, Any], user: dict[str, Any], place: str) -> dict[str, Any]:
    """The user's offers replace those of the same provider, GPU and region; mappings merge key by key."""
    out = dict(base)
    for key in ("sources", "terms", "preemptions_per_hour", "providers", "regions"):
        more = user.get(key) or {}
        if not isinstance(more, dict):
            raise UserError(f"{place}: {key}: expected a mapping")
        if key == "providers":  # a new provider inherits the defaults
            more = {n: {**base[key].get(n, base[key]["own"]), **entry} for n, entry in more.items()}
        if key == "regions":
            more = {n: {**base[key].get(n, base[key]["any"]), **entry} for n, entry in more.items()}
        out[key] = {**base[key], **more}
    offers = user.get("offers") or []
    if not isinstance(offers, list) or not all(isinstance(offer, dict) for offer in offers):
        raise UserError(f"{place}: offers: expected a list of mappings with provider, gpu, region and on_demand")
    added = {_offer_key(offer, place): {"source": "own", "own": True, **offer} for offer in offers}
    shipped = [offer for offer in base["offers"] if _offer_key(offer, place) not in added]
    out["sources"] = {"own": {"date": user.get("date", "undated"), "address": place}, **out["sources"]}
    out["offers"] = [*shipped, *added.values()]
    out["date"] = user.get("date", base["date"])
    return out


def _offer_key(offer: Mapping[str, Any], place: str) -> tuple[str, str, str]:
    for key in ("provider", "gpu"):
        if not isinstance(offer.get(key), str):
            raise UserError(f"{place}: offers: {dict(offer)}: {key} is missing: write {key}: NAME")
    return str(offer["provider"]).lower(), find_gpu(str(offer["gpu"])).name, str(offer.get("region", "any")).lower()


def _prices(offer: Mapping[str, Any], data: Mapping[str, Any], place: str) -> list[Price]:
    provider, gpu, region = _offer_key(offer, place)
    factors = data["terms"].get(provider, {})
    on_demand = offer.get("on_demand")
    prices = []
    for term in TERMS:
        listed = offer.get(term)
        source = str(offer.get(f"{term}_source", offer.get("source", "own")))
        if source not in data["sources"]:
            raise UserError(
                f"{place}: offers: source {source!r} of {provider} {gpu} is not under sources: add it there"
            )
        facts = data["sources"][source]
        usd, estimate = listed, bool(facts.get("estimate"))
        address = f"{facts['address']}"
        if listed is None:
            firm = offer.get("own") or offer.get("preemptible") or offer.get("reserved") is False
            if term not in factors or on_demand is None or firm:
                continue
            usd, estimate = on_demand * factors[term], True
            address = f"on demand times {factors[term]:g}, a usual price of this term"
        if isinstance(usd, bool) or not isinstance(usd, int | float) or not usd > 0:
            raise UserError(f"{place}: offers: {provider} {gpu} {region}: {term} {usd!r}: write dollars above 0")
        preempted = term == "spot" or bool(offer.get("preemptible"))
        rate = data["preemptions_per_hour"].get(provider, 0.05) if preempted else 0.0
        most = offer.get("most")
        prices.append(
            Price(provider, gpu, region, term, float(usd), address, str(facts["date"]), estimate, most, float(rate))
        )
    if not prices:
        raise UserError(f"{place}: offers: {provider} {gpu} {region} has no price: write on_demand: DOLLARS")
    return prices


def _check_name(kind: str, name: str, names: set[str]) -> str:
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"{kind} {name!r} is not in the price table: there are {', '.join(sorted(names))}{hint}")


@dataclass(frozen=True)
class Work:
    """A run on one GPU type: the number of GPUs, and the seconds that it trains if nothing fails."""

    gpu: str
    gpus: int
    seconds: float
    parameters: float
    tokens: float
    per_node: int = 8

    @property
    def nodes(self) -> int:
        return max(1, math.ceil(self.gpus / self.per_node))


@dataclass(frozen=True)
class Cost:
    """The cost of a run at one offer. `usd` is the sum of `parts`."""

    price: Price
    gpu_hours: float
    wall_s: float
    goodput: Goodput
    parts: Mapping[str, float]
    energy_kwh: float
    carbon_kg: float
    notes: tuple[str, ...] = field(default=())

    @property
    def usd(self) -> float:
        return sum(self.parts.values())

    @property
    def days(self) -> float:
        return self.wall_s / 86_400


def explain_impossible(
    parameters: float, tokens_per_s: float, gpus: int, gpu: Gpu, precision: str = "bf16"
) -> str | None:
    """The arithmetic that shows that GPUs cannot reach a throughput; None if they can."""
    flops = 6 * parameters * tokens_per_s
    peak = gpu.peak(precision)
    if flops / gpus <= peak:
        return None
    most = gpus * peak / (6 * parameters)
    return (
        f"{human_count(tokens_per_s)} tokens/s of a model of {human_count(parameters)} parameters are {flops:.2g} "
        f"FLOP/s (6 for each parameter and token); {gpus} x {gpu.name} would have to give {flops / gpus / 1e15:.1f} "
        f"PFLOP/s each, {flops / gpus / peak:.0f} times their {precision} peak of {peak / 1e12:.0f} TFLOP/s. At the "
        f"peak they reach {human_count(most)} tokens/s, at a usual 45 % of it {human_count(0.45 * most)}"
    )


def storage_bytes(parameters: float, tokens: float) -> float:
    """Full checkpoints and the token store."""
    return CHECKPOINT_BYTES * parameters * CHECKPOINTS + TOKEN_BYTES * tokens


def preparation_hours(tokens: float) -> float:
    """CPU core-hours to tokenize, filter and deduplicate raw text until `tokens` tokens are in a store."""
    text_mb = tokens * BYTES_PER_TOKEN / 1e6
    raw_mb = tokens * BYTES_PER_TOKEN / KEPT_SHARE / 1e6
    return text_mb / TOKENIZE_MB_S / 3600 + raw_mb / FILTER_MB_S / 3600 + raw_mb / DEDUP_MB_S / 3600


def energy_kwh(gpu: Gpu, gpu_hours: float, pue: float) -> float:
    """Energy of the GPUs at rated power, their hosts, and the cooling."""
    return gpu.watts / 1000 * HOST_FACTOR * pue * gpu_hours


def cost_of(
    work: Work, price: Price, prices: PriceList, stored_bytes: float = 0.0, core_hours: float = 0.0,
    reliability: Reliability | None = None,
) -> Cost:  # fmt: skip
    """Money, time, energy and carbon of a run at one offer, including failures and preemptions."""
    reliability = reliability or Reliability()
    notes = []
    if price.preemptions_per_hour:
        reliability = replace(reliability, preemptions_per_node_hour=price.preemptions_per_hour, requeue_s=REQUEUE_S)
        notes.append(f"preempted about every {1 / (price.preemptions_per_hour * work.nodes):.2g} h")
    if price.estimate:
        notes.append("the price is an estimate")
    expected = goodput(work.nodes, reliability)
    wall = expected.wall_s(work.seconds)
    hours = work.gpus * wall / 3600
    provider, region = prices.provider(price.provider), prices.region(price.region)
    gpu = find_gpu(work.gpu)
    parts = {"gpus": hours * price.usd_hour}
    if stored_bytes:
        months = wall / 3600 / HOURS_PER_MONTH
        parts["storage"] = stored_bytes / 1e9 * provider.storage_gb_month * months
    if core_hours:
        parts["data"] = core_hours * provider.cpu_core_hour
    energy = energy_kwh(gpu, hours, provider.pue) if math.isfinite(hours) else math.inf
    if price.provider == "own":
        parts["electricity"] = energy * region.usd_kwh
    return Cost(price, hours, wall, expected, parts, energy, energy * region.grams_kwh / 1000, tuple(notes))


def rank_offers(work: Work, prices: PriceList, stored_bytes: float = 0.0, core_hours: float = 0.0) -> list[Cost]:
    """On-demand and spot offers that can hold the run, cheapest first. Left out: offers of single machines that are too
    small, and spot where preemptions leave less than a tenth of the time."""
    costs = [
        cost_of(work, price, prices, stored_bytes, core_hours)
        for term in ("on_demand", "spot")
        for price in prices.find(gpu=work.gpu, term=term)
        if price.most is None or work.gpus <= price.most
    ]
    return sorted((c for c in costs if c.goodput.share >= 0.1), key=lambda cost: (cost.usd, cost.wall_s))
