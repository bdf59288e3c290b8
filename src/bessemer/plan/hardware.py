"""The hardware catalogue: what GPUs, links and networks promise on paper (data/hardware.json, each with its source),
and the words a user writes for a cluster ("8xA100-80GB"). What `bessemer bench` measured on a machine goes before it.

What the planner knows of the machine: facts measured elsewhere, and the table of published peaks.

What a machine does at most: the numbers of `bessemer bench`, kept for each user and each kind of machine.

The planner and the profiler count from them; `bench/ceilings.py` measures them.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import warnings
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from math import gcd
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.storage import write_atomic

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


@dataclass(frozen=True)
class DataSheet:
    """A device's data sheet: dense FLOP/s in bf16 and fp8, and bytes a second of its memory. None: it has no such
    units, or variants of one name differ."""

    bf16: float
    fp8: float | None = None
    memory: float | None = None

    @property
    def tf32(self) -> float:
        return self.bf16 / 2  # on every device here that has it


# In TFLOP/s and GB/s, without sparsity; matched as words of the device's name, the first that fits: the special before
# the general. V100 and T4 have no bf16 units, theirs are fp16. MI250 and MI250X are of one of the card's two dies: each
# is a device of its own to torch. fp8 of GeForce is with fp32 accumulation.
SHEETS: tuple[tuple[str, float, float | None, float | None], ...] = (
    ("GB200", 2500, 5000, 8000), ("B200", 2250, 4500, 8000), ("GH200", 989, 1979, None),
    ("H200 NVL", 835, 1671, 4800), ("H200", 989, 1979, 4800),
    ("H100 PCIe", 756, 1513, 2000), ("H100 NVL", 835, 1671, 3900), ("H100", 989, 1979, 3350),
    ("H800", 989, 1979, None), ("H20", 148, 296, 4000),
    ("A100-SXM4-80GB", 312, None, 2039), ("A100 80GB PCIe", 312, None, 1935), ("A100-SXM4-40GB", 312, None, 1555),
    ("A100-PCIE-40GB", 312, None, 1555), ("A100", 312, None, None),
    ("A800", 312, None, None), ("A40", 150, None, 696), ("A30", 165, None, 933),
    ("A10G", 70, None, 600), ("A10", 125, None, 600),
    ("L40S", 362, 733, 864), ("L40", 181, 362, 864), ("L4", 121, 242, 300),
    ("RTX 6000 Ada", 364, 728, 960), ("A6000", 155, None, 768),
    ("RTX 5090", 209, 419, 1792), ("RTX 4090", 165, 330, 1008), ("RTX 3090", 71, None, 936),
    ("V100", 125, None, 900), ("T4", 65, None, None),
    ("MI325X", 1307, 2615, 6000), ("MI300X", 1307, 2615, 5300), ("MI250X", 191.5, None, 1600),
    ("MI250", 181, None, 1600),
)  # fmt: skip


def data_sheet(name: str) -> DataSheet | None:
    """Of the device of that name, or None when it is not in the table."""
    for key, bf16, fp8, memory in SHEETS:
        if re.search(rf"\b{key}\b", name, re.I):
            return DataSheet(bf16 * 1e12, fp8 and fp8 * 1e12, memory and memory * 1e9)
    return None


def published_peak(name: str) -> float | None:
    """Dense bf16 FLOP/s of that device, or None when it is not in the table."""
    return sheet.bf16 if (sheet := data_sheet(name)) else None


@dataclass(frozen=True)
class Machine:
    """One device as measured at start, or by `bessemer bench` before. `matmul` maps precision to measured FLOP/s."""

    device: str
    name: str
    memory_bytes: int
    threads: int
    matmul: dict[str, float] = field(default_factory=dict)
    training: dict[str, float] = field(
        default_factory=dict
    )  # precision -> tokens/s of a short stack of the run's shape
    source: str = "measured at start"

    def peak(self, precision: str) -> tuple[float, str]:
        """FLOP/s that utilisation is counted against, and where the number is from. That of fp8 is counted against
        bf16, as in every published table but a few: a faster precision should show as a higher utilisation."""
        counted = "bf16" if precision.startswith("fp8") else precision
        sheet = data_sheet(self.name) if self.device == "cuda" else None
        if sheet and counted in ("bf16", "fp16"):
            return sheet.bf16, f"data sheet of {self.name}"
        if sheet and counted == "tf32":
            return sheet.tf32, f"data sheet of {self.name}"
        # A device without bf16 has no rate for it, and fp16 is as fast where both are.
        measured = next(
            key for key in (counted, "bf16" if counted == "fp16" else "fp32", "fp32") if self.matmul.get(key)
        )
        return self.matmul[measured], f"{measured} matmul of this machine, {self.source}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


HEADER = f"{'what':<22} {'size':<20} {'rate':>16} {'sheet':>5}  note"


@dataclass(frozen=True)
class CeilingReading:
    """One rate. `key` says of what: matmul_bf16, attention_forward_64, attention_both_64, copy, to_device_pinned,
    disk_write, all_reduce and so on; sizes and kernels share one."""

    key: str
    size: str
    rate: float | None  # None: not measured, and `note` says why
    unit: str  # FLOP/s or B/s
    note: str = ""


@dataclass(frozen=True)
class Ceilings:
    device: str
    name: str
    count: int  # GPUs; on a CPU its threads
    date: str
    versions: dict[str, str]
    readings: tuple[CeilingReading, ...] = ()

    @property
    def source(self) -> str:
        return f"measured on {self.date[:10]} by bessemer bench"

    def best(self) -> dict[str, float]:
        """The highest rate of each key: the roofline."""
        ranked = sorted((reading.rate, reading.key) for reading in self.readings if reading.rate is not None)
        return {key: rate for rate, key in ranked}

    def matmul(self) -> dict[str, float]:
        """Precision -> FLOP/s."""
        return {key.removeprefix("matmul_"): rate for key, rate in self.best().items() if key.startswith("matmul_")}

    def line(self, reading: CeilingReading) -> str:
        """One row of the printed table, with the share of what the data sheet promises."""
        scale, prefix = next((pair for pair in ((1e12, "T"), (1e9, "G")) if (reading.rate or 0) >= pair[0]), (1e6, "M"))
        rate = "-" if reading.rate is None else f"{reading.rate / scale:,.4g} {prefix}{reading.unit}"
        peak = self._promised(reading.key)
        share = f"{reading.rate / peak:.0%}" if reading.rate and peak else ""
        return f"{reading.key.replace('_', ' '):<22} {reading.size:<20} {rate:>16} {share:>5}  {reading.note}".rstrip()

    def _promised(self, key: str) -> float | None:
        sheet = data_sheet(self.name) if self.device == "cuda" else None
        if sheet is None:
            return None
        known = {"matmul_fp8": sheet.fp8, "matmul_tf32": sheet.tf32, "copy": sheet.memory}
        like_bf16 = key in ("matmul_bf16", "matmul_fp16") or key.startswith("attention")
        return sheet.bf16 if like_bf16 else known.get(key)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Ceilings:
        data = json.loads(text)
        return Ceilings(**data | {"readings": tuple(CeilingReading(**reading) for reading in data["readings"])})


def ceilings_path(name: str, count: int, torch_version: str) -> Path:
    """Machines of one kind share a file: a cluster with one home folder is measured once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "bessemer/machines" / (re.sub(r"[^\w.+-]+", "-", f"{name} x{count} torch {torch_version}") + ".json")


def store_ceilings(ceilings: Ceilings, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, ceilings.to_json())
    except OSError as fault:
        fix = "set XDG_CACHE_HOME to a folder of yours, or use --no-save"
        raise UserError(f"{path}: cannot be written ({fault.strerror}): {fix}") from fault


def load_ceilings(path: Path) -> Ceilings | None:
    """None where nothing was measured. A damaged file is told of and passed over: a run must start without it."""
    try:
        return Ceilings.from_json(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as fault:
        warnings.warn(f"{path}: not readable ({fault}): run bessemer bench again", stacklevel=2)
        return None
