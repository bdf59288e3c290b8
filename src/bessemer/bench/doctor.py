"""`bessemer doctor`: checks of this machine before a run. Each says what was read and, if it is wrong, the fix.

Nothing here needs a GPU. Limits: /dev/shm 8 GiB and 65,536 open files are what data loaders and NCCL need on a node of
eight GPUs; Docker's default /dev/shm has 64 MB.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from bessemer.errors import UserError

GIB = 1 << 30
SHM_BYTES, OPEN_FILES, FREE_BYTES, SLOW_WRITE = 8 * GIB, 65_536, 20 * GIB, 200e6  # SLOW_WRITE in bytes/s
WRITTEN_BYTES = 64 << 20
NFS = "small files are slow on NFS: keep data in large shards, and caches and environments on a local disk"
FOLDER_HINTS = {
    "nfs": NFS,
    "nfs4": NFS,
    "lustre": "stripe large checkpoints over several targets: `lfs setstripe -c 8 FOLDER`",
    "overlay": "a container's own layer is lost with it: mount a volume for runs and checkpoints",
    "tmpfs": "this folder is in memory: it fills the RAM and is lost at a reboot",
    "fuse": "a bucket or a remote folder behind FUSE: copy the token stores to a local disk, or train by `data.store`",
    "gpfs": "many small files load its metadata servers: keep data in large shards",
}
GPU_FIELDS = (
    "index", "name", "driver_version", "persistence_mode", "ecc.errors.uncorrected.volatile.total",
    "clocks_event_reasons.active", "power.limit", "power.default_limit", "temperature.gpu", "pcie.link.width.current",
    "pcie.link.width.max",
)  # fmt: skip
# Bits of clocks_event_reasons.active that slow a GPU down, and what to do.
THROTTLES = {
    0x8: "hardware slowdown: check power cables and cooling",
    0x20: "software thermal slowdown: check the cooling",
    0x40: "hardware thermal slowdown: check the cooling",
    0x80: "power brake: the power supply limits the GPU",
}
REMAPPED = "remapped_rows.pending,remapped_rows.failure"
STORED_BYTES, SLOW_STORE = 32 << 20, 50e6
HOST_LINKS = ("SYS", "NODE", "PHB")  # of `nvidia-smi topo -m`: through the processor, far from NVLink (NV18)
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "lightning", "peft", "trl", "datasets", "torchvision",
            "torchaudio", "flash-attn", "triton", "torchao", "numpy", "bessemer")  # fmt: skip
SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for: unset it unless you search an error",
    "NCCL_P2P_DISABLE": "GPUs exchange data through the host: unset it unless P2P hangs",
    "NCCL_IB_DISABLE": "nodes exchange data over TCP: unset it if there is InfiniBand",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL checks every collective: unset it for speed",
}


@dataclass(frozen=True)
class MachineCheck:
    """One reading. `severity` is "" if it is fine, else note, warning or critical."""

    name: str
    value: str
    severity: str = ""
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine_machine(folder: Path, port: int, store: str = "") -> list[MachineCheck]:
    """All checks; `folder` is where runs will be written, `port` that of torch.distributed, `store` an fsspec URL."""
    if not folder.is_dir():
        raise UserError(f"{folder}: is not a folder; name the one that runs are written to")
    parts: tuple[Callable[[], Iterator[MachineCheck]], ...] = (
        check_torch, check_packages, check_gpus, check_links, check_memory, check_limits, lambda: check_disk(folder),
        lambda: check_store(store), check_cache, check_numa, check_clock, lambda: check_network(port), check_variables,
    )  # fmt: skip
    return [check for part in parts for check in part()]


def output_of(*command: str) -> str | None:
    """What a program prints; None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def check_torch() -> Iterator[MachineCheck]:
    import torch

    cuda, visible = torch.version.cuda, torch.cuda.is_available()
    yield MachineCheck("torch", f"{torch.__version__}, CUDA {cuda or 'none'}, Python {platform.python_version()}")
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if driver and cuda is None:
        yield MachineCheck(
            "torch and GPU", "torch is built for the CPU, but there is a GPU", "critical",
            "install a CUDA build of torch from pytorch.org",
        )  # fmt: skip
    elif driver and not visible:
        yield MachineCheck(
            "torch and GPU", f"torch for CUDA {cuda} sees no GPU; driver {driver.splitlines()[0]}", "critical",
            f"update the driver to one that supports CUDA {cuda}, or install torch for an older CUDA; check "
            "CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    if visible:
        yield MachineCheck("NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def check_packages() -> Iterator[MachineCheck]:
    """Versions that the installed packages refuse of one another."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield MachineCheck("packages", "not checked: packaging is missing", "note", "pip install packaging")
        return
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    clashes = []
    for name in versions:
        for line in metadata.requires(name) or []:
            need = Requirement(line)
            if need.name not in versions or (need.marker is not None and not need.marker.evaluate({"extra": ""})):
                continue
            if not need.specifier.contains(versions[need.name], prereleases=True):
                clashes.append((name, need, versions[need.name]))
    for name, need, version in clashes:
        yield MachineCheck(
            "packages", f"{name} {versions[name]} wants {need.name}{need.specifier}, not {version}", "critical",
            f"pip install '{need.name}{need.specifier}' or another version of {name}",
        )  # fmt: skip
    if not clashes:
        yield MachineCheck("packages", ", ".join(f"{name} {version}" for name, version in versions.items()))


def check_gpus() -> Iterator[MachineCheck]:
    table = output_of("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")
    if table is None and (devices := output_of("nvidia-smi", "-L")):
        fix = "update the driver: its nvidia-smi does not know the fields that are read here"
        yield MachineCheck("GPU", f"{len(devices.splitlines())}, not examined", "note", fix)
    elif table is None:
        yield MachineCheck("GPU", "no NVIDIA GPU or no nvidia-smi", "note", "training will use the CPU")
    else:
        yield from judge_gpus(table)


def judge_gpus(table: str) -> Iterator[MachineCheck]:
    """Judge nvidia-smi's table of GPU_FIELDS, one line a GPU."""
    for line in table.strip().splitlines():
        row = dict(zip(GPU_FIELDS, (cell.strip() for cell in line.split(",")), strict=False))
        gpu, problems = f"GPU {row['index']}", []
        errors = row["ecc.errors.uncorrected.volatile.total"]
        if errors.isdigit() and int(errors):
            problems.append(("critical", f"{errors} uncorrected memory errors", "drain the node and reset the GPU"))
        if row["persistence_mode"] == "Disabled":
            problems.append(("note", "persistence mode is off", "sudo nvidia-smi -pm 1"))
        try:
            reasons = int(row["clocks_event_reasons.active"], 16)
        except ValueError:
            reasons = 0
        problems += [("warning", f"slowed down ({mask:#x})", fix) for mask, fix in THROTTLES.items() if reasons & mask]
        limit, default = row["power.limit"], row["power.default_limit"]
        if _number(limit) and _number(default) and _number(limit) < 0.95 * _number(default):
            fix = f"sudo nvidia-smi -i {row['index']} -pl {default.partition('.')[0]}"
            problems.append(("warning", f"power is limited to {limit} of {default} W", fix))
        width, most = row["pcie.link.width.current"], row["pcie.link.width.max"]
        if _number(width) < _number(most):
            problems.append(
                ("warning", f"PCIe runs {width} of {most} lanes", "reseat the card; check the riser and BIOS")
            )
        yield MachineCheck(gpu, f"{row['name']}, driver {row['driver_version']}, {row['temperature.gpu']} °C")
        for severity, value, fix in problems:
            yield MachineCheck(gpu, value, severity, fix)


def check_links() -> Iterator[MachineCheck]:
    """Remapped memory rows, and how the GPUs of this machine reach each other."""
    if rows := output_of("nvidia-smi", f"--query-remapped-rows=gpu_bus_id,{REMAPPED}", "--format=csv,noheader"):
        yield from judge_remapped_rows(rows)
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    yield judge_peers([pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)], len(pairs))
    if matrix := output_of("nvidia-smi", "topo", "-m"):
        yield from judge_topology(matrix)


def judge_remapped_rows(table: str) -> Iterator[MachineCheck]:
    for gpu, line in enumerate(table.strip().splitlines()):
        _, pending, failure = [*(cell.strip() for cell in line.split(",")), "", ""][:3]
        if failure in ("Yes", "1"):
            fix = "drain the node and have the GPU replaced"
            yield MachineCheck(f"GPU {gpu}", "remapping of a faulty memory row failed", "critical", fix)
        elif pending in ("Yes", "1"):
            fix = "reset the GPU before the run: nvidia-smi --gpu-reset"
            yield MachineCheck(f"GPU {gpu}", "a faulty memory row waits for a reset", "warning", fix)


def judge_peers(without: list[tuple[int, int]], pairs: int) -> MachineCheck:
    if not without:
        return MachineCheck("P2P", f"all {pairs} pairs of GPUs exchange data directly")
    value = f"{len(without)} of {pairs} pairs of GPUs exchange data through the host, such as {without[0]}"
    fix = "switch off ACS and IOMMU in the BIOS; in a virtual machine ask for passthrough of the complete board"
    return MachineCheck("P2P", value, "warning", fix)


def judge_topology(matrix: str) -> Iterator[MachineCheck]:
    """Judge the table of `nvidia-smi topo -m`."""
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", matrix).splitlines()]
    rows = [row for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    links = Counter(row[1 + b] for a, row in enumerate(rows) for b in range(a + 1, len(rows)))
    value = ", ".join(f"{count} pairs by {link}" for link, count in links.most_common())
    slow = sum(links[link] for link in HOST_LINKS)
    if not links:
        return
    if slow and slow < links.total():
        fix = "keep parallel.tp within the GPUs that NVLink joins; see `nvidia-smi topo -m`"
        yield MachineCheck("topology", value, "note", fix)
    elif slow:
        fix = "no NVLink: prefer data parallelism to parallel.tp, which exchanges data in every layer"
        yield MachineCheck("topology", value, "note", fix)
    else:
        yield MachineCheck("topology", value)


def check_store(url: str) -> Iterator[MachineCheck]:
    """Write, read and delete a file of an object store."""
    if not url:
        return
    from fsspec.core import url_to_fs

    content, name = os.urandom(STORED_BYTES), f"bessemer-doctor-{os.getpid()}.bin"
    try:
        files, root = url_to_fs(url)
        files.makedirs(root, exist_ok=True)
        began = time.perf_counter()
        files.pipe_file(f"{root}/{name}", content)
        written = time.perf_counter()
        files.invalidate_cache()
        same = files.cat_file(f"{root}/{name}") == content
        ended = time.perf_counter()
        files.rm_file(f"{root}/{name}")
    except Exception as error:  # each storage library has its own
        text = " ".join(f"{type(error).__name__}: {error}".split())
        fix = "correct the address or the credentials in the environment; s3:// needs s3fs, gs:// needs gcsfs"
        yield MachineCheck("object store", f"{url}: {text}", "critical", fix)
        return
    if not same:
        fix = "do not use it for checkpoints: something on the way changes data"
        yield MachineCheck("object store", f"{url} returned other bytes than were written", "critical", fix)
        return
    speeds = STORED_BYTES / (written - began), STORED_BYTES / (ended - written)
    slow = min(speeds) < SLOW_STORE
    fix = "use a bucket in the region of the machines, and data.store with a cache on a local disk" if slow else ""
    value = f"{url}: writes {speeds[0] / 1e6:.0f} MB/s, reads {speeds[1] / 1e6:.0f} MB/s in one stream"
    yield MachineCheck("object store", value, "warning" if slow else "", fix)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def check_memory() -> Iterator[MachineCheck]:
    import psutil

    total = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    if limit.isdigit() and int(limit) < total:
        yield MachineCheck(
            "memory", f"the container may use {int(limit) / GIB:.0f} of {total / GIB:.0f} GiB", "note",
            "processes beyond it are killed with -9; raise the container's limit if loaders or offload need more",
        )  # fmt: skip
    else:
        yield MachineCheck("memory", f"{total / GIB:.0f} GiB, {os.cpu_count()} cores")
    if Path("/dev/shm").is_dir():
        size = shutil.disk_usage("/dev/shm").total
        small = size < SHM_BYTES
        fix = "start the container with --shm-size=16g or --ipc=host: loaders die of bus errors" if small else ""
        yield MachineCheck("/dev/shm", f"{size / GIB:.2f} GiB", "warning" if small else "", fix)


def check_limits() -> Iterator[MachineCheck]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < OPEN_FILES
    yield MachineCheck(
        "open files", f"{soft}, at most {hard}", "note" if few else "", f"ulimit -n {OPEN_FILES}" if few else ""
    )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    infiniband = Path("/sys/class/infiniband").is_dir()
    if infiniband and locked != resource.RLIM_INFINITY:
        yield MachineCheck("locked memory", f"{locked} bytes", "critical", "ulimit -l unlimited, which RDMA needs")


def file_system(folder: Path, mounts: str) -> str:
    """The kind of the file system that holds a folder, from the lines of /proc/mounts."""
    best, kind = "", "unknown"
    for line in mounts.splitlines():
        point, name = [*line.split(), "", "", ""][1:3]
        point = point.replace("\\040", " ")
        if Path(point) in (folder, *folder.parents) and len(point) >= len(best):
            best, kind = point, name
    return kind


def check_disk(folder: Path) -> Iterator[MachineCheck]:
    folder = folder.resolve()
    mounts = Path("/proc/mounts")
    kind = file_system(folder, mounts.read_text()) if mounts.exists() else "unknown"
    hint = FOLDER_HINTS.get(kind.partition(".")[0], "")  # fuse.gcsfuse and others
    yield MachineCheck("file system", f"{folder}: {kind}", "note" if hint else "", hint)
    free = shutil.disk_usage(folder).free
    low = free < FREE_BYTES
    fix = "free some space: one checkpoint of a 7B model has 84 GB" if low else ""
    yield MachineCheck("free space", f"{free / GIB:.0f} GiB", "warning" if low else "", fix)
    if free < 4 * WRITTEN_BYTES:
        return
    try:
        speed = write_speed(folder)
    except OSError as error:
        yield MachineCheck("disk", f"cannot be written: {error.strerror}", "critical", "choose another folder")
        return
    slow = speed < SLOW_WRITE
    fix = "checkpoints will stall training: use a faster disk, or asynchronous saves" if slow else ""
    yield MachineCheck("disk", f"writes {speed / 1e6:.0f} MB/s", "warning" if slow else "", fix)


def write_speed(folder: Path) -> float:
    """Bytes per second of a file that is written and flushed to the disk."""
    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(WRITTEN_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return WRITTEN_BYTES / (time.perf_counter() - began)


def check_cache() -> Iterator[MachineCheck]:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    place = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK):
        yield MachineCheck(
            "Hugging Face cache", f"{cache}: not writable", "critical", "set HF_HOME to a folder of yours"
        )
    else:
        low = free < FREE_BYTES
        fix = "set HF_HOME to a larger disk" if low else ""
        yield MachineCheck("Hugging Face cache", f"{cache}: {free / GIB:.0f} GiB free", "warning" if low else "", fix)


def check_numa() -> Iterator[MachineCheck]:
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if nodes > 1:
        fix = "bind each rank to the node of its GPU: `numactl --cpunodebind=N --membind=N`; see `nvidia-smi topo -m`"
        yield MachineCheck("NUMA", f"{nodes} nodes", "note", fix)


def check_clock() -> Iterator[MachineCheck]:
    """The kernel's word on whether its clock is synchronized (adjtimex)."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(256))
    except (OSError, AttributeError):
        return
    if state == 5:  # TIME_ERROR
        fix = "start chronyd or systemd-timesyncd; logs of several nodes cannot be ordered otherwise"
        yield MachineCheck("clock", "not synchronized", "note", fix)
    elif state >= 0:
        yield MachineCheck("clock", "synchronized")


def check_network(port: int) -> Iterator[MachineCheck]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        fix = "add the host to DNS or /etc/hosts, or set MASTER_ADDR to an address"
        yield MachineCheck("host name", f"{name} does not resolve", "warning", fix)
    else:
        local = address.startswith("127.")
        fix = "several nodes: set MASTER_ADDR to an address that the others reach" if local else ""
        yield MachineCheck("host name", f"{name} is {address}", "note" if local else "", fix)
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError as error:
            fix = "end the process that holds it, or pass torchrun --master-port another one"
            yield MachineCheck("port", f"{port}: {error.strerror}", "warning", fix)
        else:
            yield MachineCheck("port", f"{port} is free")


def check_variables() -> Iterator[MachineCheck]:
    for name, fix in SLOW_VARIABLES.items():
        if (value := os.environ.get(name, "")) not in ("", "0", "OFF", "INFO"):
            yield MachineCheck("environment", f"{name}={value}", "warning", fix)
