"""What GPUs, storage and electricity cost: a dated table that ships (data/prices.yaml) and the user's own over it.

Every price says from where and when it is. Terms without a listed price are the price on demand times a usual factor,
and marked as estimates.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from bessemer.errors import UserError
from bessemer.plan.hardware import find_gpu

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
