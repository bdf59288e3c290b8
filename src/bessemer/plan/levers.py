"""What would change a plan most: twice the GPUs, the next generation of them, eight bits, each planned in full; and how
many times faster than one GPU it is."""

from __future__ import annotations

from dataclasses import replace

from bessemer.errors import UserError
from bessemer.plan.asked import Asked
from bessemer.plan.hardware import Cluster, Gpu, find_gpu, resized
from bessemer.plan.proposal import Proposal, propose_for
from bessemer.plan.search import Kept, search
from bessemer.spec.quantity import human_time

NEXT = {"pascal": "V100-32GB", "volta": "A100-80GB", "turing": "A100-80GB", "ampere": "H100", "ada": "H100",
        "hopper": "B200"}  # fmt: skip


def levers(proposal: Proposal) -> list[tuple[str, Proposal]]:
    """Other plans for the same tokens, the fastest first. What does not fit, or would need what is settled to change,
    is left out."""
    asked, cluster = proposal.asked, proposal.given
    ways: list[tuple[str, Asked, Cluster]] = [("twice the GPUs", asked, resized(cluster, 2 * cluster.count))]
    if newer := NEXT.get(cluster.gpu.generation.lower()):
        ways.append((f"{cluster.count} x {newer}", asked, _newer(cluster, find_gpu(newer))))
    if cluster.count == 1 and "fp8" in cluster.gpu.peaks and proposal.wish.precision == "bf16":
        spec = asked.spec.model_copy(update={"precision": "fp8"})
        ways.append(("precision fp8", replace(asked, spec=spec), cluster))
    found = []
    for name, other, where in ways:
        try:
            found.append((name, propose_for(other, where)))
        except UserError:  # the settled degrees or rows do not suit it, or it does not fit
            continue
    sooner = [item for item in found if item[1].wall_s < proposal.wall_s or item[1].wish.precision == "fp8"]
    return sorted(sooner, key=lambda item: item[1].wall_s)


def _newer(cluster: Cluster, gpu: Gpu) -> Cluster:
    """As many in as many nodes; their usual network, unless another was written."""
    usual = cluster.network_bandwidth == cluster.gpu.network_bandwidth
    rate, name = (
        (gpu.network_bandwidth, gpu.network_name) if usual else (cluster.network_bandwidth, cluster.network_name)
    )
    return Cluster(gpu, cluster.count, cluster.per_node, rate, name)


def speed_up(proposal: Proposal) -> float | None:
    """How many times one GPU's speed; None where one cannot hold the model."""
    cluster = proposal.wish.cluster
    alone = replace(proposal.wish, cluster=replace(cluster, count=1, per_node=1), kept=Kept())
    found = search(alone)
    return proposal.best.tokens_per_s / found.best.tokens_per_s if found.ranked else None


def lever_lines(proposal: Proposal) -> list[str]:
    shown, count = [], proposal.wish.cluster.count
    if count > 1 and (times := speed_up(proposal)):
        shown.append(
            f"  scale   {times:,.3g} times one {proposal.wish.cluster.gpu.name}, {times / count:.0%} of {count}"
        )
    for name, other in levers(proposal):
        money = ""
        if other.costs and proposal.costs:
            money = f", from ${other.costs[0].usd:,.0f} instead of ${proposal.costs[0].usd:,.0f}"
        shown.append(f"  change  {name}: {human_time(other.wall_s)} instead of {human_time(proposal.wall_s)}{money}")
    return shown
