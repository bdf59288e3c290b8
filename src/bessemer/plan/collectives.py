"""How long processes take to exchange numbers: latency and bandwidth of rings, trees and two-level schemes over links
inside a node and adapters between nodes.

The cost of sending b bytes over one hop is latency + b / bandwidth (Hockney 1994; Thakur et al. 2005 for the
algorithms). Several groups of one kind work at the same time and share their node's adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from bessemer.errors import UserError


@dataclass(frozen=True)
class Fabric:
    """What the processes are joined by. Bandwidths are bytes a second in one direction."""

    per_node: int
    link: float  # of one GPU inside its node
    network: float  # of one node
    link_latency_s: float = 3e-6
    network_latency_s: float = 8e-6

    def __post_init__(self) -> None:
        if self.per_node < 1 or self.link <= 0 or self.network <= 0:
            raise UserError(f"network: a node needs GPUs and bandwidths above zero, not {self}")


@dataclass(frozen=True)
class Group:
    """`size` processes that talk; `inside` of them sit in each of `nodes` nodes; `rivals` such groups share a node's
    adapters."""

    size: int
    inside: int
    nodes: int
    rivals: float


ALONE = Group(1, 1, 1, 1)


def group(size: int, stride: int, fabric: Fabric) -> Group:
    """Of every stride-th process: neighbours (stride 1) fill a node first."""
    if size <= 1:
        return ALONE
    inside = max(1, min(size, fabric.per_node // stride))
    nodes = ceil(size / inside)
    return Group(size, inside, nodes, fabric.per_node / inside if nodes > 1 else 1)


def bandwidth(who: Group, fabric: Fabric) -> float:
    """Of a ring through the group: its slowest hop."""
    between = fabric.network / who.rivals
    return min(fabric.link, between) if who.nodes > 1 else fabric.link


def latency(who: Group, fabric: Fabric) -> float:
    return fabric.network_latency_s if who.nodes > 1 else fabric.link_latency_s


def ring_pass(size: float, who: Group, fabric: Fabric) -> float:
    """Half of a ring all-reduce: `size` bytes, n - 1 hops of 1 / n each."""
    n = who.size
    hops = n - who.nodes
    lag = hops * fabric.link_latency_s + (who.nodes - 1) * fabric.network_latency_s
    return (n - 1) / n * size / bandwidth(who, fabric) + lag


def two_level_pass(size: float, who: Group, fabric: Fabric) -> float:
    """Half of an all-reduce in two levels: inside the nodes, then each part among its peers in the others."""
    inside, nodes = who.inside, who.nodes
    near = (inside - 1) / inside * size / fabric.link + (inside - 1) * fabric.link_latency_s
    far = (nodes - 1) / nodes * size / inside / (fabric.network / who.rivals / inside)
    return near + far + (nodes - 1) * fabric.network_latency_s


def tree_reduce(size: float, who: Group, fabric: Fabric) -> float:
    """All-reduce up and down a tree of nodes (a chain inside each), in pieces: all bytes pass twice."""
    depth = ceil(log2(who.nodes)) if who.nodes > 1 else 0
    lag = depth * fabric.network_latency_s + (who.inside - 1) * fabric.link_latency_s
    return 2 * (size / bandwidth(who, fabric) + lag)


def all_reduce(size: float, who: Group, fabric: Fabric) -> float:
    """Every process ends with the sum of `size` bytes; the fastest way, as NCCL's tuner takes."""
    if who.size == 1:
        return 0.0
    ring = 2 * ring_pass(size, who, fabric)
    if who.nodes == 1:
        return ring
    return min(ring, 2 * two_level_pass(size, who, fabric), tree_reduce(size, who, fabric))


def all_gather(size: float, who: Group, fabric: Fabric) -> float:
    """Every process ends with all `size` bytes, of which it had its part."""
    if who.size == 1:
        return 0.0
    ring = ring_pass(size, who, fabric)
    return ring if who.nodes == 1 else min(ring, two_level_pass(size, who, fabric))


def reduce_scatter(size: float, who: Group, fabric: Fabric) -> float:
    """Every process ends with its part of the sum of `size` bytes: an all-gather backwards."""
    return all_gather(size, who, fabric)


def all_to_all(size: float, who: Group, fabric: Fabric) -> float:
    """Every process sends `size` bytes, an equal part to each other one."""
    n = who.size
    if n == 1:
        return 0.0
    near = (who.inside - 1) / n * size / fabric.link
    # Every GPU of a node sends at once, so each has its share of the adapters.
    far = (n - who.inside) / n * size / (fabric.network / fabric.per_node) if who.nodes > 1 else 0.0
    return max(near, far) + latency(who, fabric) * ceil(log2(n))


def point_to_point(size: float, stride: int, fabric: Fabric) -> float:
    """`size` bytes to the process `stride` further on, while the others of the node do the same."""
    if stride >= fabric.per_node:
        return size / (fabric.network / fabric.per_node) + fabric.network_latency_s
    return size / fabric.link + fabric.link_latency_s
