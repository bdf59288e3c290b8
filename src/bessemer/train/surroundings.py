"""What the machine says of itself while a run is slower than planned: load of others, clocks, memory, utilisation."""

from __future__ import annotations

import subprocess

import psutil
import torch

from bessemer.plan.actual import Surroundings
from bessemer.plan.per_rank import CONTEXT


class Around:
    """Looks when it is called; processor times are those since the call before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._own_s = _own_seconds()
        self._all = psutil.cpu_times()

    def __call__(self) -> Surroundings:
        own_s, now = _own_seconds(), psutil.cpu_times()
        passed = sum(now) - sum(self._all)  # of all cores together
        busy = passed - sum(getattr(now, key, 0.0) - getattr(self._all, key, 0.0) for key in ("idle", "iowait"))
        others = max(0.0, busy - (own_s - self._own_s)) / passed if passed > 0 else None
        self._own_s, self._all = own_s, now
        if self.device.type != "cuda":
            return Surroundings(others_busy=others, clock=_host_clock())
        stats = torch.cuda.memory_stats(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        strange = total - free - torch.cuda.memory_reserved(self.device) - CONTEXT
        clock, used = _device_state(self.device)
        return Surroundings(others, clock, used, max(0, strange), int(stats.get("num_alloc_retries", 0)))


def _own_seconds() -> float:
    """Of this process and those it has started."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has ended meanwhile
            continue
        total += times.user + times.system
    return total


def _host_clock() -> float | None:
    """Of the highest; many virtual machines do not say."""
    try:
        found = psutil.cpu_freq()
    except (OSError, RuntimeError):
        return None
    return found.current / found.max if found and found.max else None


def _device_state(device: torch.device) -> tuple[float | None, float | None]:
    """Clock as a share of its highest, and utilisation, as NVIDIA's tool says; it takes about a tenth of a second."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    asked = "clocks.sm,clocks.max.sm,utilization.gpu"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader,nounits", "-i", f"GPU-{uuid}"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        now, most, busy = (float(word) for word in said.split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, None
    return now / most, busy / 100
