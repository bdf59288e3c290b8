"""The hardware catalogue: what GPUs, links and networks promise on paper (data/hardware.json, each with its source),
and the words a user writes for a cluster ("8xA100-80GB"). What `bessemer bench` measured on a machine goes before it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from math import gcd
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.ceilings import Ceilings, ceilings_path, load_ceilings

MOST_GPUS = 1_000_000
FORMS = "write it as 8xA100-80GB, '64 x H100' or '2 nodes of 8 A100'"


@dataclass(frozen=True)
class Gpu:
    """One device. Rates are per second; `link` is one direction between a GPU and its neighbours in the node."""

    name: str
    generation: str
    memory_bytes: int
    memory_bandwidth: float
    watts: float
    link_name: str
    link_bandwidth: float
    node: int  # GPUs of a usual node
    network_name: str
    network_bandwidth: float  # of all adapters of a usual node, one direction
    peaks: dict[str, float] = field(hash=False)  # precision -> dense FLOP/s
    source: str = ""

    def peak(self, precision: str) -> float:
        """Dense FLOP/s. fp8_rowwise and the like are their first word; what the device lacks is refused."""
        word = precision.split("_")[0]
        if word not in self.peaks:
            raise UserError(f"precision: {self.name} has no {word} units: write one of {', '.join(self.peaks)}")
        return self.peaks[word]


@dataclass(frozen=True)
class Cluster:
    """`count` GPUs of one kind in equal nodes. `measured` are rates of `bessemer bench` by key, where there are any."""

    gpu: Gpu
    count: int
    per_node: int
    network_bandwidth: float  # of a node
    network_name: str = ""
    measured: dict[str, float] = field(default_factory=dict, hash=False, compare=False)
    source: str = "data sheets"
    constants: str = ""  # whose network constants of data/steptime.json are taken; "": the defaults
    slower: float = 1.0  # by which runs here took longer than predicted
    slower_error: float = 0.0  # how far apart they lay
    slower_source: str = ""

    @property
    def nodes(self) -> int:
        return self.count // self.per_node

    def __str__(self) -> str:
        inside = f"{self.count} x {self.gpu.name}"
        if self.nodes == 1:
            return inside
        rate = self.network_bandwidth * 8 / 1e9
        return f"{inside} in {self.nodes} nodes of {self.per_node} ({self.network_name} {rate:,.0f} Gb/s a node)"


def user_file() -> Path:
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return config / "bessemer/hardware.json"


def _plain(name: str) -> str:
    """Letters and digits alone: 'NVIDIA A100-SXM4-80GB' and 'a100 sxm4 80gb' are one."""
    return re.sub(r"nvidia|geforce|tesla|amd|instinct|[^a-z0-9]", "", name.lower())


def _gpu(entry: dict[str, Any], place: str) -> Gpu:
    try:
        return Gpu(
            name=entry["name"],
            generation=entry["generation"],
            memory_bytes=int(entry["memory_gb"] * 2**30),
            memory_bandwidth=entry["memory_gb_s"] * 1e9,
            watts=entry["watts"],
            link_name=entry["link"],
            link_bandwidth=entry["link_gb_s"] * 1e9,
            node=entry["node"],
            network_name=entry["network"],
            network_bandwidth=entry["network_gbit_s"] * 1e9 / 8,
            peaks={key: rate * 1e12 for key, rate in entry["peaks_tflops"].items()},
            source=entry.get("source", place),
        )
    except (KeyError, TypeError, AttributeError) as fault:
        example = "write it as the entries of the catalogue that ships with bessemer"
        name = entry.get("name", "?") if isinstance(entry, dict) else entry
        raise UserError(f"{place}: GPU {name}: {fault} is missing or not a number: {example}") from fault


@cache
def _read(text: str, place: str) -> tuple[dict[str, Gpu], dict[str, str], dict[str, float]]:
    try:
        data = json.loads(text)
        entries = data["gpus"]
    except (ValueError, KeyError, TypeError) as fault:
        raise UserError(f'{place}: not a catalogue ({fault}): write {{"gpus": [...]}} or remove the file') from fault
    found = [_gpu(entry, place) for entry in entries]
    names = {_plain(gpu.name): gpu.name for gpu in found}
    names |= {_plain(other): e["name"] for e in entries for other in e.get("aliases", ()) if _plain(other) not in names}
    ports = {key: rate for key, rate in data.get("adapters_gbit_s", {}).items() if not key.startswith("_")}
    return {gpu.name: gpu for gpu in found}, names, ports


def _catalogue() -> tuple[dict[str, Gpu], dict[str, str], dict[str, float]]:
    """GPUs by name, names by plain name, Gb/s by network. The user's file adds and replaces."""
    shipped = resources.files("bessemer.plan").joinpath("data/hardware.json")
    gpus, names, ports = _read(_shipped_text(str(shipped)), "hardware.json")
    own = user_file()
    if not own.exists():
        return gpus, names, ports
    more = _read(own.read_text(), str(own))
    return gpus | more[0], names | more[1], ports | more[2]


@cache
def _shipped_text(path: str) -> str:
    return Path(path).read_text()


def gpus() -> dict[str, Gpu]:
    """The whole catalogue by name."""
    return dict(_catalogue()[0])


def find_gpu(name: str) -> Gpu:
    """By its name, an alias or what the driver calls it; an unknown one is refused with the nearest."""
    known, names, _ = _catalogue()
    plain = _plain(name)
    if plain in names:
        return known[names[plain]]
    near = difflib.get_close_matches(plain, names, n=3, cutoff=0.5)
    words = list(dict.fromkeys(names[key] for key in near)) or list(known)
    raise UserError(
        f"GPU {name.strip()!r} is not in the catalogue: write {', '.join(words)}, or add it to {user_file()}"
    )


def parse_cluster(text: str, network: str | None = None) -> Cluster:
    """From "8xA100-80GB", "64 x H100", "2 nodes of 8 A100", "2x8xH100" or "A100". Nodes are the usual ones of that GPU
    unless they are written; `network` is such as "100 Gb/s", "InfiniBand NDR" or "8 x HDR" for a node."""
    words = text.strip()
    number = r"(-?[\d,_]+(?:\.\d+)?)"
    times = r"\s*[x×*]\s*"
    patterns = (
        rf"{number}\s*nodes?\s*(?:of|with|{times})\s*{number}(?:{times}|\s+)(?P<name>.+)",
        rf"{number}{times}{number}{times}(?P<name>.+)",
        rf"{number}(?:{times}(?=.*[a-z]|\d{{4}})|\s+(?=.*[a-z]))(?P<name>.+)",
        rf"(?P<name>.*[a-z].*?)(?<!rt){times}{number}",  # but "RTX 4090" is a name
        r"(?P<name>.*[a-z].*)",
    )
    for pattern in patterns:
        if match := re.fullmatch(pattern, words, re.I):
            numbers = [_count(group, words) for group in match.groups() if group and group != match["name"]]
            gpu = find_gpu(match["name"].removesuffix("s") if _unknown_plural(match["name"]) else match["name"])
            return _cluster(gpu, numbers, words, network)
    raise UserError(f"GPUs {text!r}: no name and number found: {FORMS}")


def _unknown_plural(name: str) -> bool:
    names = _catalogue()[1]
    return name.endswith("s") and _plain(name) not in names and _plain(name[:-1]) in names


def _count(word: str, text: str) -> int:
    value = float(word.replace(",", "").replace("_", ""))
    if value != int(value) or not 1 <= value <= MOST_GPUS:
        raise UserError(f"GPUs {text!r}: {word} is no number from 1 to {MOST_GPUS:,}: {FORMS}")
    return int(value)


def _cluster(gpu: Gpu, numbers: list[int], text: str, network: str | None) -> Cluster:
    nodes, inside = numbers if len(numbers) == 2 else (0, 0)
    count = nodes * inside or (numbers[0] if numbers else 1)
    if count > MOST_GPUS:
        raise UserError(f"GPUs {text!r}: {count:,} is more than {MOST_GPUS:,}: {FORMS}")
    per_node = inside or usual_per_node(gpu, count)
    bandwidth, name = (gpu.network_bandwidth, gpu.network_name) if network is None else parse_network(network)
    return Cluster(gpu, count, per_node, bandwidth, name)


def usual_per_node(gpu: Gpu, count: int) -> int:
    """GPUs of each node where only their number is known: those of a usual node, or where these do not divide it, the
    largest equal nodes that are no larger."""
    return next(size for size in range(min(gpu.node, count), 0, -1) if count % size == 0)


def resized(cluster: Cluster, count: int) -> Cluster:
    """The same kind of cluster with another number of GPUs, as if that had been asked for."""
    if cluster.per_node == usual_per_node(cluster.gpu, cluster.count):
        return replace(cluster, count=count, per_node=usual_per_node(cluster.gpu, count))
    return replace(cluster, count=count, per_node=count if count < cluster.per_node else gcd(cluster.per_node, count))


def usable_parts(cluster: Cluster, unit: int = 1) -> list[Cluster]:
    """The cluster, and what a run may use of it while the rest is idle; largest first. Each has a multiple of `unit`
    GPUs: halves, every number to 32 and four in each doubling beyond, in the nodes that there are.

    The parts of a cluster are among those of one with twice the GPUs, so the best of them is never worse there.
    """
    counts = {cluster.count >> k for k in range(cluster.count.bit_length()) if cluster.count % (1 << k) == 0}
    sizes = {*range(1, 33), *(m << k for m in (4, 5, 6, 7) for k in range(3, cluster.count.bit_length()))}
    nodes = max(cluster.nodes, -(-cluster.count // cluster.gpu.node))
    for size in sizes:
        if (count := size * unit) <= cluster.count and resized(cluster, count).nodes <= nodes:
            counts.add(count)
    return [resized(cluster, count) if count < cluster.count else cluster
            for count in sorted(counts, reverse=True) if count % unit == 0]  # fmt: skip


def parse_network(text: str) -> tuple[float, str]:
    """Bytes a second of a node, and its name: "100 Gb/s", "100GbE", "InfiniBand NDR", "8 x HDR"."""
    ports = _catalogue()[2]
    match = re.fullmatch(r"\s*(?:(\d+)\s*[x×*]\s*)?(.+?)\s*", text)
    assert match or not text.strip()
    times, rest = (int(match[1] or 1), match[2]) if match else (1, text)
    if rate := re.fullmatch(r"([\d.]+)\s*(?:gb/?s|gbit/?s|gbps|gbe|g)?", rest, re.I):
        value = float(rate[1]) * times
        if 0 < value < 1e6:
            return value * 1e9 / 8, "Ethernet" if "gbe" in rest.lower() else "network"
    plain = {re.sub(r"[^a-z0-9]", "", key.lower()): key for key in ports}
    plain |= {re.sub(r"infiniband", "", key): name for key, name in plain.items() if key != "infiniband"}
    word = re.sub(r"[^a-z0-9]", "", rest.lower())
    if word in plain and times:
        return ports[plain[word]] * times * 1e9 / 8, plain[word]
    near = difflib.get_close_matches(word, plain, n=2, cutoff=0.3)
    words = ", ".join(dict.fromkeys(plain[key] for key in near)) or ", ".join(ports)
    raise UserError(f"network {text!r} is not known: write Gb/s of a node (such as 400 Gb/s), or {words}")


def with_ceilings(cluster: Cluster, ceilings: Ceilings | None) -> Cluster:
    """The same cluster with measured rates, if they were measured on this kind of GPU."""
    if ceilings is None or ceilings.device != "cuda" or not same_gpu(cluster.gpu, ceilings.name):
        return cluster
    return replace(cluster, measured=ceilings.best(), source=ceilings.source)


def catalogued(cluster: Cluster) -> Cluster:
    """The same cluster without anything that was measured of it."""
    return Cluster(
        cluster.gpu, cluster.count, cluster.per_node, cluster.network_bandwidth, cluster.network_name,
        constants=cluster.constants,
    )  # fmt: skip


def kept_ceilings(gpu: Gpu) -> Ceilings | None:
    """The newest measurement of this kind of GPU that this user keeps."""
    folder = ceilings_path("any", 1, "any").parent
    found = [
        kept for path in sorted(folder.glob("*.json")) if (kept := load_ceilings(path)) and same_gpu(gpu, kept.name)
    ]
    return max(found, key=lambda kept: kept.date, default=None)


def same_gpu(gpu: Gpu, name: str) -> bool:
    """Whether a device that calls itself so is of that kind."""
    known, names, _ = _catalogue()
    plain = _plain(name)
    return plain in names and known[names[plain]].name == gpu.name
