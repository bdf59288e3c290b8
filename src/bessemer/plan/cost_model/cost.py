"""What GPUs, storage and electricity cost: a dated table that ships (data/prices.yaml) and the user's own over it.

Every price says from where and when it is. Terms without a listed price are the price on demand times a usual factor,
and marked as estimates.

What a run costs: GPU-hours, money by provider and term, storage, energy and carbon, and the preparation of its data.

C = 6 N D FLOPs, or what the shape counts; hours = C / (GPUs x peak x MFU), divided by the share of the time that is
kept (plan/cost_model/goodput.py). All that is not arithmetic is a named constant with its source.
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
PROVIDERS = ("modal", "lambda", "runpod", "aws", "gcp", "azure", "coreweave")
HOURS_PER_MONTH = 730.0
_SECTIONS = ("date", "sources", "terms", "preemptions_per_hour", "offers", "providers", "regions")


@dataclass(frozen=True)
class Price:
    """Dollars for one GPU and hour. `estimate`: computed, or from a source that is no price list."""

    provider: str
    gpu: str
    region: str
    term: Term
    usd_hour: float
    source: str
    date: str
    estimate: bool
    most: int | None = None  # GPUs of one machine, where several cannot be joined
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
        """Offers that fit, cheapest first; a name that is unknown is refused with the nearest."""
        gpu = find_gpu(gpu).name if gpu else None
        if provider:
            provider = _known("provider", provider.lower(), {price.provider for price in self.prices})
        if region:
            region = _known("region", region.lower(), {price.region for price in self.prices})
        if term:
            _known("term", term, set(TERMS))
        wanted = {"gpu": gpu, "provider": provider, "region": region, "term": term}
        found = [p for p in self.prices if all(v is None or getattr(p, key) == v for key, v in wanted.items())]
        return sorted(found, key=lambda price: (price.usd_hour, price.provider, price.region))

    def region(self, name: str) -> Region:
        return self.regions.get(name) or self.regions["any"]

    def provider(self, name: str) -> Provider:
        return self.providers[_known("provider", name, set(self.providers))]


def user_file() -> Path:
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return config / "bessemer/prices.yaml"


def load_prices(own: Path | None = None) -> PriceList:
    """The shipped table with the user's file laid over it; `own` names another file than the usual one."""
    shipped = resources.files("bessemer.plan").joinpath("data/prices.yaml")
    path = own or user_file()
    if own is not None and not own.exists():
        raise UserError(f"{own}: no such file; write prices in the form of {shipped}")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return _read(shipped.read_text(encoding="utf-8"), text, str(path))


@cache
def _read(shipped: str, own: str, place: str) -> PriceList:
    data = _parse(shipped, "prices.yaml")
    if own.strip():
        data = _laid_over(data, _parse(own, place), place)
    prices = [price for offer in data["offers"] for price in _prices(offer, data, place)]
    try:
        providers = {name: Provider(**entry) for name, entry in data["providers"].items()}
        regions = {
            name: Region(float(entry["grams_kwh"]), float(entry["usd_kwh"])) for name, entry in data["regions"].items()
        }
    except (TypeError, KeyError, ValueError) as fault:
        raise UserError(f"{place}: providers or regions: {fault}: write them as the shipped table does") from None
    return PriceList(str(data["date"]), tuple(prices), providers, regions)


def _parse(text: str, place: str) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where libyaml is there
    try:
        data = yaml.load(text, Loader=loader)
    except yaml.YAMLError as fault:
        line = getattr(getattr(fault, "problem_mark", None), "line", None)
        where = f"{place}:{line + 1}" if line is not None else place
        raise UserError(f"{where}: not YAML: {str(fault).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise UserError(f"{place}: expected a mapping with {', '.join(_SECTIONS)}")
    for key in data:
        if key not in _SECTIONS:
            raise UserError(f"{place}: {key}: unknown key; known here: {', '.join(_SECTIONS)}")
    return data


def _laid_over(base: dict[str, Any], own: dict[str, Any], place: str) -> dict[str, Any]:
    """The user's offers replace those of the same provider, GPU and region; mappings are merged key by key."""
    out = dict(base)
    for key in ("sources", "terms", "preemptions_per_hour", "providers", "regions"):
        more = own.get(key) or {}
        if not isinstance(more, dict):
            raise UserError(f"{place}: {key}: expected a mapping")
        if key == "providers":  # a new provider may say only what differs from a usual one
            more = {n: {**base[key].get(n, base[key]["own"]), **entry} for n, entry in more.items()}
        if key == "regions":
            more = {n: {**base[key].get(n, base[key]["any"]), **entry} for n, entry in more.items()}
        out[key] = {**base[key], **more}
    offers = own.get("offers") or []
    if not isinstance(offers, list) or not all(isinstance(offer, dict) for offer in offers):
        raise UserError(f"{place}: offers: expected a list of mappings with provider, gpu, region and on_demand")
    named = {_name(offer, place): {"source": "own", "own": True, **offer} for offer in offers}
    kept = [offer for offer in base["offers"] if _name(offer, place) not in named]
    out["sources"] = {"own": {"date": own.get("date", "undated"), "address": place}, **out["sources"]}
    out["offers"] = [*kept, *named.values()]
    out["date"] = own.get("date", base["date"])
    return out


def _name(offer: Mapping[str, Any], place: str) -> tuple[str, str, str]:
    for key in ("provider", "gpu"):
        if not isinstance(offer.get(key), str):
            raise UserError(f"{place}: offers: {dict(offer)}: {key} is missing: write {key}: NAME")
    return str(offer["provider"]).lower(), find_gpu(str(offer["gpu"])).name, str(offer.get("region", "any")).lower()


def _prices(offer: Mapping[str, Any], data: Mapping[str, Any], place: str) -> list[Price]:
    provider, gpu, region = _name(offer, place)
    factors = data["terms"].get(provider, {})
    on_demand = offer.get("on_demand")
    found = []
    for term in TERMS:
        written = offer.get(term)
        source = str(offer.get(f"{term}_source", offer.get("source", "own")))
        if source not in data["sources"]:
            raise UserError(
                f"{place}: offers: source {source!r} of {provider} {gpu} is not under sources: add it there"
            )
        facts = data["sources"][source]
        usd, estimate = written, bool(facts.get("estimate"))
        told = f"{facts['address']}"
        if written is None:
            firm = offer.get("own") or offer.get("preemptible") or offer.get("reserved") is False
            if term not in factors or on_demand is None or firm:
                continue
            usd, estimate = on_demand * factors[term], True
            told = f"on demand times {factors[term]:g}, a usual price of this term"
        if isinstance(usd, bool) or not isinstance(usd, int | float) or not usd > 0:
            raise UserError(f"{place}: offers: {provider} {gpu} {region}: {term} {usd!r}: write dollars above 0")
        preempted = term == "spot" or bool(offer.get("preemptible"))
        rate = data["preemptions_per_hour"].get(provider, 0.05) if preempted else 0.0
        most = offer.get("most")
        found.append(
            Price(provider, gpu, region, term, float(usd), told, str(facts["date"]), estimate, most, float(rate))
        )
    if not found:
        raise UserError(f"{place}: offers: {provider} {gpu} {region} has no price: write on_demand: DOLLARS")
    return found


def _known(kind: str, name: str, known: set[str]) -> str:
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"{kind} {name!r} is not in the price table: there are {', '.join(sorted(known))}{hint}")


# A node draws more than its GPUs: an 8 x H100 node was seen at 8.4 kW at most while training (Latif et al. 2024), 1.5
# times the 5.6 kW of its GPUs on paper.
HOST_FACTOR = 1.5
# Our own rates on one core, MB of text a second: benchmarks/results/2026-11-16-{filters,dedup,tokenization}.json.
# Filters: all four of Gopher, C4 and FineWeb in one thread; dedup: MinHash signatures; tokenization: BPE, two threads.
FILTER_MB_S = 2.1234272300297814
DEDUP_MB_S = 28.30403055570433
TOKENIZE_MB_S = 15.716546066820193 / 2
BYTES_PER_TOKEN = 4.0  # English text with 50,000 tokens and more; code and other languages have fewer
KEPT_SHARE = 0.3  # of raw web text after filters and dedup; DCLM and FineWeb kept less, curated sources more
TOKEN_BYTES = 4  # in a token store with a vocabulary above 65,536
CHECKPOINT_BYTES = 12  # a parameter: fp32 weights and two moments
REQUEUE_S = 900.0  # until a spot machine is replaced: a guess, longer when GPUs are scarce


@dataclass(frozen=True)
class Work:
    """A run on one kind of GPU: how many, and how long they compute if nothing fails."""

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
class Storage:
    """What is kept: bytes of checkpoints and data, for the length of the run."""

    checkpoint_bytes: float
    checkpoints: int
    data_bytes: float

    @property
    def bytes(self) -> float:
        return self.checkpoint_bytes * self.checkpoints + self.data_bytes


@dataclass(frozen=True)
class Preparation:
    """Curation and tokenization of the text, on CPU cores."""

    text_bytes: float
    core_hours: Mapping[str, float]

    @property
    def total_core_hours(self) -> float:
        return sum(self.core_hours.values())


@dataclass(frozen=True)
class Cost:
    """One way to run it. `usd` is all of it; the parts are in `parts`."""

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


def work_seconds(compute: float, gpus: int, peak: float, mfu: float) -> float:
    """Seconds for `compute` FLOPs on `gpus` GPUs of `peak` FLOP/s at that utilisation."""
    if gpus < 1:
        raise UserError(f"GPUs: {gpus} is none: write at least 1")
    if not 0 < mfu <= 1:
        raise UserError(f"MFU: {mfu:g} is no share: write one between 0 and 1, such as 0.4")
    if not (compute > 0 and peak > 0):
        raise UserError(f"compute {compute:g} at a peak of {peak:g}: both must lie above 0")
    return compute / (gpus * peak * mfu)


def impossible(parameters: float, tokens_per_s: float, gpus: int, gpu: Gpu, precision: str = "bf16") -> str | None:
    """The arithmetic that shows a wish to be impossible, in words; None where it is not."""
    needed = 6 * parameters * tokens_per_s / gpus
    peak = gpu.peak(precision)
    if needed <= peak:
        return None
    most = gpus * peak / (6 * parameters)
    usual = 0.45 * most
    return (
        f"{human_count(tokens_per_s)} tokens/s of a model of {human_count(parameters)} parameters are "
        f"{6 * parameters * tokens_per_s:.2g} FLOP/s (6 for each parameter and token); {gpus} x {gpu.name} would have "
        "to "
        f"give {needed / 1e15:.1f} PFLOP/s each, {needed / peak:.0f} times their {precision} peak of "
        f"{peak / 1e12:.0f} TFLOP/s. At the peak they reach {human_count(most)} tokens/s, at a usual 45 % of it "
        f"{human_count(usual)}"
    )


def storage_of(parameters: float, tokens: float, checkpoints: int = 3, bytes_per_parameter: float = 0.0) -> Storage:
    """Full checkpoints and the token store."""
    per = bytes_per_parameter or CHECKPOINT_BYTES
    return Storage(per * parameters, checkpoints, TOKEN_BYTES * tokens)


def preparation_of(tokens: float, curated: bool = False, bytes_per_token: float = BYTES_PER_TOKEN) -> Preparation:
    """Core-hours until `tokens` are in a store: raw text is filtered and deduplicated first, curated text is not."""
    kept = tokens * bytes_per_token
    hours = {"tokenize": kept / 1e6 / TOKENIZE_MB_S / 3600}
    if curated:
        return Preparation(kept, hours)
    raw = kept / KEPT_SHARE
    hours |= {"filter": raw / 1e6 / FILTER_MB_S / 3600, "dedup": raw / 1e6 / DEDUP_MB_S / 3600}
    return Preparation(raw, hours)


def energy_kwh(gpu: Gpu, gpu_hours: float, pue: float) -> float:
    """Of the whole centre: the GPUs at their rated power, their hosts, and the cooling."""
    return gpu.watts / 1000 * HOST_FACTOR * pue * gpu_hours


def cost_of(
    work: Work,
    price: Price,
    prices: PriceList,
    storage: Storage | None = None,
    preparation: Preparation | None = None,
    reliability: Reliability | None = None,
) -> Cost:
    """Money, time, energy and carbon of a run at one offer, with what failures and preemptions add."""
    reliability = reliability or Reliability()
    notes = []
    if price.preemptions_per_hour:
        reliability = replace(reliability, preemptions_per_node_hour=price.preemptions_per_hour, requeue_s=REQUEUE_S)
        notes.append(f"preempted about every {1 / (price.preemptions_per_hour * work.nodes):.2g} h")
    if price.estimate:
        notes.append("the price is an estimate")
    lost = goodput(work.nodes, reliability)
    wall = lost.wall_s(work.seconds)
    hours = work.gpus * wall / 3600
    provider, region = prices.provider(price.provider), prices.region(price.region)
    gpu = find_gpu(work.gpu)
    parts = {"gpus": hours * price.usd_hour}
    if storage:
        months = wall / 3600 / HOURS_PER_MONTH
        parts["storage"] = storage.bytes / 1e9 * provider.storage_gb_month * months
    if preparation:
        parts["data"] = preparation.total_core_hours * provider.cpu_core_hour
    used = energy_kwh(gpu, hours, provider.pue) if math.isfinite(hours) else math.inf
    if price.provider == "own":
        parts["electricity"] = used * region.usd_kwh
    return Cost(price, hours, wall, lost, parts, used, _carbon(used, region), tuple(notes))


def rank(
    works: Mapping[str, Work],
    prices: PriceList,
    terms: tuple[Term, ...] = ("on_demand", "spot"),
    providers: tuple[str, ...] | None = None,
    deadline_s: float | None = None,
    budget_usd: float | None = None,
    storage: Storage | None = None,
    preparation: Preparation | None = None,
    reliability: Reliability | None = None,
) -> list[Cost]:
    """Every GPU type, provider and region that can hold the run, cheapest first; `works` has one run for each GPU type.

    Left out: offers of single machines for runs of several, ways past the deadline or above the budget, and spot where
    preemptions leave less than a tenth of the time.
    """
    found = []
    for name, work in works.items():
        for term in terms:
            for price in prices.find(gpu=name, term=term):
                if providers and price.provider not in providers:
                    continue
                if price.most is not None and work.gpus > price.most:
                    continue
                cost = cost_of(work, price, prices, storage, preparation, reliability)
                if cost.goodput.share < 0.1 or (deadline_s and cost.wall_s > deadline_s):
                    continue
                if budget_usd and cost.usd > budget_usd:
                    continue
                found.append(cost)
    return sorted(found, key=lambda cost: (cost.usd, cost.wall_s))


def _carbon(kwh: float, region: Region) -> float:
    return kwh * region.grams_kwh / 1000
