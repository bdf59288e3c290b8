"""Hardware that the planner knows: the catalogue of GPUs and networks (data/hardware.json, with sources), clusters as
users write them ("8xA100-80GB"), the local machine, and the rates that `bessemer bench` measured.

Measured rates take precedence over data sheets. bench/ceilings.py measures them; each user keeps one file per kind of
machine.
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
HEADER = f"{'what':<22} {'size':<20} {'rate':>16} {'sheet':>5}  note"


@dataclass(frozen=True)
class Gpu:
    """One GPU type. Rates are per second; the link is one direction between a GPU and its neighbours in the node."""

    name: str
    generation: str
    memory_bytes: int
    memory_bandwidth: float
    watts: float
    link_name: str
    link_bandwidth: float
    node: int  # GPUs in a usual node
    network_name: str
    network_bandwidth: float  # of all adapters of a usual node, one direction
    peaks: dict[str, float] = field(hash=False)  # precision -> dense FLOP/s
    source: str = ""

    def peak(self, precision: str) -> float:
        """Dense FLOP/s; fp8_rowwise counts as fp8. Refuses a precision that the GPU does not support."""
        precision = precision.split("_")[0]
        if precision not in self.peaks:
            raise UserError(f"precision: {self.name} has no {precision} units: write one of {', '.join(self.peaks)}")
        return self.peaks[precision]


@dataclass(frozen=True)
class Cluster:
    """`count` GPUs of one type in equal nodes. `measured` has the rates of `bessemer bench` by key, if there are
    any."""

    gpu: Gpu
    count: int
    per_node: int
    network_bandwidth: float  # of a node
    network_name: str = ""
    measured: dict[str, float] = field(default_factory=dict, hash=False, compare=False)
    source: str = "data sheets"
    constants: str = ""  # the network constants of data/steptime.json to use; "": the defaults
    slower: float = 1.0  # measured over predicted step time of earlier runs
    slower_error: float = 0.0  # the spread of those runs
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


def _normalize(name: str) -> str:
    """Letters and digits only: 'NVIDIA A100-SXM4-80GB' and 'a100 sxm4 80gb' are the same."""
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
    except (KeyError, TypeError, AttributeError) as error:
        example = "write it as the entries of the catalogue that ships with bessemer"
        name = entry.get("name", "?") if isinstance(entry, dict) else entry
        raise UserError(f"{place}: GPU {name}: {error} is missing or not a number: {example}") from error


@cache
def _read(text: str, place: str) -> tuple[dict[str, Gpu], dict[str, str], dict[str, float]]:
    try:
        data = json.loads(text)
        entries = data["gpus"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'{place}: not a catalogue ({error}): write {{"gpus": [...]}} or remove the file') from error
    gpus = [_gpu(entry, place) for entry in entries]
    names = {_normalize(gpu.name): gpu.name for gpu in gpus}
    names |= {
        _normalize(other): e["name"]
        for e in entries
        for other in e.get("aliases", ())
        if _normalize(other) not in names
    }
    ports = {key: rate for key, rate in data.get("adapters_gbit_s", {}).items() if not key.startswith("_")}
    return {gpu.name: gpu for gpu in gpus}, names, ports


def _catalogue() -> tuple[dict[str, Gpu], dict[str, str], dict[str, float]]:
    """GPUs by name, names by normalized name, Gb/s by network. The user's file adds entries and replaces them."""
    gpus, names, ports = _read(_shipped(), "hardware.json")
    user = user_file()
    if not user.exists():
        return gpus, names, ports
    more = _read(user.read_text(), str(user))
    return gpus | more[0], names | more[1], ports | more[2]


@cache
def _shipped() -> str:
    return resources.files("bessemer.plan").joinpath("data/hardware.json").read_text()


def gpu_catalogue() -> dict[str, Gpu]:
    """The catalogue by name."""
    return dict(_catalogue()[0])


def find_gpu(name: str) -> Gpu:
    """By name, alias or driver name. An unknown name is refused with the nearest ones."""
    gpus, names, _ = _catalogue()
    key = _normalize(name)
    if key in names:
        return gpus[names[key]]
    near = difflib.get_close_matches(key, names, n=3, cutoff=0.5)
    words = list(dict.fromkeys(names[match] for match in near)) or list(gpus)
    raise UserError(
        f"GPU {name.strip()!r} is not in the catalogue: write {', '.join(words)}, or add it to {user_file()}"
    )


def parse_cluster(text: str, network: str | None = None) -> Cluster:
    """From "8xA100-80GB", "64 x H100", "2 nodes of 8 A100", "2x8xH100" or "A100". Without a node size, nodes are the
    usual ones of that GPU. `network` is the bandwidth of a node: "100 Gb/s", "InfiniBand NDR" or "8 x HDR"."""
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
    raise UserError(f"GPUs {text!r}: no GPU name and number: {FORMS}")


def _unknown_plural(name: str) -> bool:
    names = _catalogue()[1]
    return name.endswith("s") and _normalize(name) not in names and _normalize(name[:-1]) in names


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
    """GPUs per node if only the total is known: those of a usual node, or the largest smaller number that divides
    it."""
    return next(size for size in range(min(gpu.node, count), 0, -1) if count % size == 0)


def resize(cluster: Cluster, count: int) -> Cluster:
    """The same kind of cluster with another number of GPUs."""
    if cluster.per_node == usual_per_node(cluster.gpu, cluster.count):
        return replace(cluster, count=count, per_node=usual_per_node(cluster.gpu, count))
    return replace(cluster, count=count, per_node=count if count < cluster.per_node else gcd(cluster.per_node, count))


def usable_subclusters(cluster: Cluster, unit: int = 1) -> list[Cluster]:
    """The cluster and the parts of it that a run may use with the rest idle, largest first. Each has a multiple of
    `unit` GPUs: halves, every number to 32, and four sizes per doubling above, within the existing nodes.

    A cluster with twice the GPUs has the same subclusters and more, so its best one is never worse.
    """
    counts = {cluster.count >> k for k in range(cluster.count.bit_length()) if cluster.count % (1 << k) == 0}
    sizes = {*range(1, 33), *(m << k for m in (4, 5, 6, 7) for k in range(3, cluster.count.bit_length()))}
    nodes = max(cluster.nodes, -(-cluster.count // cluster.gpu.node))
    for size in sizes:
        if (count := size * unit) <= cluster.count and resize(cluster, count).nodes <= nodes:
            counts.add(count)
    return [resize(cluster, count) if count < cluster.count else cluster
            for count in sorted(counts, reverse=True) if count % unit == 0]  # fmt: skip


def parse_network(text: str) -> tuple[float, str]:
    """Bytes per second of a node and the network's name, from "100 Gb/s", "100GbE", "InfiniBand NDR" or "8 x HDR"."""
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
    raise UserError(f"network {text!r} is unknown: write Gb/s of a node (such as 400 Gb/s), or {words}")


def with_ceilings(cluster: Cluster, ceilings: Ceilings | None) -> Cluster:
    """The same cluster with measured rates, if they were measured on this GPU type."""
    if ceilings is None or ceilings.device != "cuda" or not same_gpu(cluster.gpu, ceilings.name):
        return cluster
    return replace(cluster, measured=ceilings.best(), source=ceilings.source)


def without_measurements(cluster: Cluster) -> Cluster:
    """The same cluster by its data sheets only."""
    return Cluster(
        cluster.gpu, cluster.count, cluster.per_node, cluster.network_bandwidth, cluster.network_name,
        constants=cluster.constants,
    )  # fmt: skip


def saved_ceilings(gpu: Gpu) -> Ceilings | None:
    """The newest measurement of this GPU type that this user has saved."""
    folder = ceilings_path("any", 1, "any").parent
    saved = [ceilings for path in sorted(folder.glob("*.json")) if (ceilings := load_ceilings(path))]
    return max((c for c in saved if same_gpu(gpu, c.name)), key=lambda ceilings: ceilings.date, default=None)


def same_gpu(gpu: Gpu, name: str) -> bool:
    """Whether a device of this driver name is of that GPU type."""
    gpus, names, _ = _catalogue()
    key = _normalize(name)
    return key in names and gpus[names[key]].name == gpu.name


@dataclass(frozen=True)
class DataSheet:
    """Dense FLOP/s in bf16 and fp8, and bytes per second of memory. None: no such units, or variants of the name
    differ."""

    bf16: float
    fp8: float | None = None
    memory: float | None = None

    @property
    def tf32(self) -> float:
        return self.bf16 / 2  # true of every device in the table that has it


@cache
def data_sheets() -> list[tuple[str, float, float | None, float | None]]:
    """Name, bf16 and fp8 TFLOP/s, and memory GB/s of each entry of the catalogue."""
    return [tuple(row) for row in json.loads(_shipped())["data_sheets"]["rows"]]


def data_sheet(name: str) -> DataSheet | None:
    """The data sheet of a device name: the first entry whose words are in it; None if there is none."""
    for key, bf16, fp8, memory in data_sheets():
        if re.search(rf"\b{key}\b", name, re.I):
            return DataSheet(bf16 * 1e12, fp8 and fp8 * 1e12, memory and memory * 1e9)
    return None


@dataclass(frozen=True)
class Machine:
    """The local device, measured at start or earlier by `bessemer bench`. `matmul` maps precision to FLOP/s."""

    device: str
    name: str
    memory_bytes: int
    threads: int
    matmul: dict[str, float] = field(default_factory=dict)
    # precision -> tokens/s of a few layers of the run's shape
    training: dict[str, float] = field(default_factory=dict)
    source: str = "measured at start"

    def peak(self, precision: str) -> tuple[float, str]:
        """The FLOP/s that utilisation (MFU) refers to, and its source. For fp8 it is the bf16 peak, as in most
        published tables: a faster precision shows as a higher utilisation."""
        counted = "bf16" if precision.startswith("fp8") else precision
        sheet = data_sheet(self.name) if self.device == "cuda" else None
        if sheet and counted in ("bf16", "fp16"):
            return sheet.bf16, f"data sheet of {self.name}"
        if sheet and counted == "tf32":
            return sheet.tf32, f"data sheet of {self.name}"
        # A device without bf16 has no rate for it; fp16 is as fast on devices that have both.
        measured = next(
            key for key in (counted, "bf16" if counted == "fp16" else "fp32", "fp32") if self.matmul.get(key)
        )
        return self.matmul[measured], f"{measured} matmul of this machine, {self.source}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class CeilingReading:
    """One measured rate. `key` is what was measured: matmul_bf16, attention_forward_64, attention_both_64, copy,
    to_device_pinned, disk_write, all_reduce, ... Readings of several sizes and kernels share a key."""

    key: str
    size: str
    rate: float | None  # None: not measured; `note` says why
    unit: str  # FLOP/s or B/s
    note: str = ""


@dataclass(frozen=True)
class Ceilings:
    device: str
    name: str
    count: int  # GPUs, or threads of a CPU
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
        """One row of the printed table, with the share of the data sheet's rate."""
        scale, prefix = next((pair for pair in ((1e12, "T"), (1e9, "G")) if (reading.rate or 0) >= pair[0]), (1e6, "M"))
        rate = "-" if reading.rate is None else f"{reading.rate / scale:,.4g} {prefix}{reading.unit}"
        peak = self._sheet_rate(reading.key)
        share = f"{reading.rate / peak:.0%}" if reading.rate and peak else ""
        return f"{reading.key.replace('_', ' '):<22} {reading.size:<20} {rate:>16} {share:>5}  {reading.note}".rstrip()

    def _sheet_rate(self, key: str) -> float | None:
        sheet = data_sheet(self.name) if self.device == "cuda" else None
        if sheet is None:
            return None
        rates = {"matmul_fp8": sheet.fp8, "matmul_tf32": sheet.tf32, "copy": sheet.memory}
        like_bf16 = key in ("matmul_bf16", "matmul_fp16") or key.startswith("attention")
        return sheet.bf16 if like_bf16 else rates.get(key)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Ceilings:
        data = json.loads(text)
        return Ceilings(**data | {"readings": tuple(CeilingReading(**reading) for reading in data["readings"])})


def ceilings_path(name: str, count: int, torch_version: str) -> Path:
    """Machines of one kind share a file, so a cluster with a shared home folder is measured once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "bessemer/machines" / (re.sub(r"[^\w.+-]+", "-", f"{name} x{count} torch {torch_version}") + ".json")


def store_ceilings(ceilings: Ceilings, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, ceilings.to_json())
    except OSError as error:
        fix = "set XDG_CACHE_HOME to a folder of yours, or use --no-save"
        raise UserError(f"{path}: cannot be written ({error.strerror}): {fix}") from error


def load_ceilings(path: Path) -> Ceilings | None:
    """None if nothing was measured. A damaged file causes a warning, not an error: a run can start without it."""
    try:
        return Ceilings.from_json(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        warnings.warn(f"{path}: not readable ({error}): run bessemer bench again", stacklevel=2)
        return None
