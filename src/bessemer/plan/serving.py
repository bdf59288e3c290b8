"""Serving as it is asked for in a few words, and the answer as a person reads it and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bessemer.plan.hardware import gpus, parse_cluster
from bessemer.plan.prices import load_prices
from bessemer.plan.serve import Demand, Serving, parse_wait, rank_serving
from bessemer.plan.show import WIDTH
from bessemer.spec.quantity import human_bytes, human_count
from bessemer.spec.shape import ModelShape

SHOWN = 8


def demand_of(rps: float, prompt: int, answer: int, ttft: str | None, tpot: str | None) -> Demand:
    """With waits as people write them, such as 500ms."""
    usual = Demand(1)
    first, between = parse_wait("--ttft", ttft), parse_wait("--tpot", tpot)
    return Demand(rps, prompt, answer, first or usual.ttft_s, between or usual.tpot_s)


def ways_to_serve(shape: ModelShape, demand: Demand, where: str | None) -> list[Serving]:
    """On the GPU type that is named, or on all that are rented on demand; the cheapest first."""
    prices = load_prices()
    rented = {price.gpu for price in prices.prices if price.term == "on_demand"}
    # The fastest first: what even that cannot do is told of it.
    fastest = sorted(gpus().values(), key=lambda gpu: -gpu.memory_bandwidth)
    types = [parse_cluster(where).gpu] if where else [gpu for gpu in fastest if gpu.name in rented]
    return rank_serving(shape, demand, types, prices)


def serving_lines(shape: ModelShape, demand: Demand, ways: list[Serving]) -> list[str]:
    best = ways[0]
    shown = [
        f"{human_count(shape.parameters)} parameters, {demand.rps:g} requests/s of {demand.prompt:,} tokens and "
        f"{demand.answer:,} answered; first token within {1000 * demand.ttft_s:.0f} ms, then "
        f"{1000 * demand.tpot_s:.0f} ms a token",
        "",
        f"  take     {best.gpus} x {best.gpu} in {best.precision}: {best.replicas} replica"
        f"{'s' * (best.replicas > 1)} of {best.tensor_parallel}, each for {best.rps_per_replica:.3g} requests/s",
        f"  waits    {1000 * best.ttft_s:.0f} ms to the first token, {1000 * best.tpot_s:.1f} ms a token, "
        f"{best.sequences} requests at once in a replica (memory holds {best.most_sequences})",
        f"  cache    {human_bytes(best.cache_bytes_per_token)} a token",
    ]
    shown += [f"  setting  {key}: {str(value).lower()}" for key, value in best.settings(demand).items()]
    shown.append("  basis    a roofline at shares of the data sheet that engines usually reach; not measured here")
    seen: set[tuple[str, str]] = set()
    for way in ways:
        if way.price is None or (way.gpu, way.precision) in seen or len(seen) == SHOWN:
            continue
        seen.add((way.gpu, way.precision))
        shown.append(
            f"  cost     ${way.usd_per_million:.3f} a million tokens (${way.usd_per_million_output:.2f} of output), "
            f"${way.usd_hour:,.2f} an hour: {way.gpus} x {way.gpu} {way.precision}, {way.price.provider} "
            f"{way.price.region} (prices of {way.price.date})"[:WIDTH]
        )
    return shown


def serving_json(shape: ModelShape, demand: Demand, ways: list[Serving]) -> dict[str, Any]:
    told = [{**asdict(way), "gpus": way.gpus, "settings": way.settings(demand)} for way in ways]
    return {"parameters": shape.parameters, "demand": asdict(demand), "best": told[0], "ways": told}
