"""Readings of the machine while a run trains: GPU, processor, memory, disk and network, by a thread every few seconds.

The training thread only takes the newest numbers. Each process reads its own GPU; rank 0 writes `metrics/system.jsonl`,
and the GPU readings of all ranks travel with their pace. What a machine does not report is left out, never 0.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from bessemer.guard.alarm import Alarm
from bessemer.guard.machine import HEAT_OR_SUPPLY, POWER_CAP, ThrottleDetector
from bessemer.plan.cost_model.cost import list_price
from bessemer.train.job import Recorder

INTERVAL_S, JOIN_S = 5.0, 2.0
# Of each rank, in metrics/ranks.jsonl.
RANK_READINGS = (
    "gpu_busy_share", "gpu_temperature_c", "gpu_power_w", "gpu_clock_mhz", "gpu_max_clock_mhz", "gpu_throttle",
    "cpu_busy_share",
)  # fmt: skip
Readings = dict[str, float]


class GpuReader:
    """One NVIDIA GPU through NVML, from the package nvidia-ml-py. A reading takes about 12 us on an H200."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        nvml.nvmlInit()
        self._nvml = nvml
        self._gpu = gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)  # its name since 2023
        reasons = reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        self._calls: dict[str, Callable[[], float]] = {
            "gpu_busy_share": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            "gpu_memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
            "gpu_temperature_c": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "gpu_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "gpu_throttle": lambda: reasons(gpu),
        }
        self._constant: Readings = {}
        with contextlib.suppress(nvml.NVMLError):  # it takes 1.2 ms
            self._constant["gpu_max_clock_mhz"] = nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)

    def read(self) -> Readings:
        readings = dict(self._constant)
        for name, call in self._calls.items():
            with contextlib.suppress(self._nvml.NVMLError):  # this GPU does not report it
                readings[name] = call()
        if "gpu_throttle" in readings:  # the mean of these is the share of the time
            bits = int(readings["gpu_throttle"])
            readings["gpu_power_capped_share"] = float(bool(bits & POWER_CAP))
            readings["gpu_throttled_share"] = float(bool(bits & sum(HEAT_OR_SUPPLY)))
        return readings


def open_gpu(device: torch.device) -> GpuReader | None:
    """The reader of a CUDA device; None on other devices, and without nvidia-ml-py."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        return GpuReader(pynvml, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:  # no driver library, or a GPU that the container hides
        return None


class HostReader:
    """Processor, memory, disk and network of this host, and what this process takes of them. About 0.5 ms."""

    def __init__(self, folder: str) -> None:
        self._folder, self._process = folder, psutil.Process()
        self._before, self._before_s = self._counters(), time.monotonic()
        self._cpu = psutil.cpu_times()

    def read(self) -> Readings:
        memory, cpu, cpu_before = psutil.virtual_memory(), psutil.cpu_times(), self._cpu
        self._cpu = cpu
        readings: Readings = {
            "ram_bytes": memory.total - memory.available,
            "process_ram_bytes": self._process.memory_info().rss,
        }
        with contextlib.suppress(OSError):  # a network file system that is away for a moment
            readings["disk_free_bytes"] = psutil.disk_usage(self._folder).free
        if (all_s := sum(cpu) - sum(cpu_before)) > 0:  # psutil's own share is 0 at each thread's first call
            idle_s = sum(getattr(cpu, key, 0.0) - getattr(cpu_before, key, 0.0) for key in ("idle", "iowait"))
            readings["cpu_busy_share"] = round(min(1.0, max(0.0, 1 - idle_s / all_s)), 4)
        counters, now_s = self._counters(), time.monotonic()
        passed_s = max(now_s - self._before_s, 1e-6)
        for name in counters.keys() & self._before.keys():
            # A counter falls when an interface or a disk goes away.
            readings[f"{name}_bytes_per_s"] = round(max(0, counters[name] - self._before[name]) / passed_s)
        self._before, self._before_s = counters, now_s
        return readings

    def _counters(self) -> dict[str, int]:
        counters: dict[str, int] = {}
        if disk := psutil.disk_io_counters():
            counters |= {"disk_read": disk.read_bytes, "disk_write": disk.write_bytes}
        if network := psutil.net_io_counters():
            counters |= {"net_receive": network.bytes_recv, "net_send": network.bytes_sent}
        with contextlib.suppress(psutil.Error, AttributeError):  # macOS has none
            own = self._process.io_counters()
            counters |= {"process_read": own.read_bytes, "process_write": own.write_bytes}
        return counters


class Efficiency:
    """Tokens per joule and per dollar since the tokens last grew. Steps may be longer than the interval."""

    def __init__(self, tokens: int, now_s: float, usd_hour: float | None) -> None:
        self._tokens, self._since_s, self._read_s, self._usd_hour = tokens, now_s, now_s, usd_hour
        self._joules: float | None = 0.0

    def read(self, tokens: int, now_s: float, power_w: float | None) -> Readings:
        """`power_w` is of all GPUs; without it energy is unknown until the next growth."""
        known = self._joules is not None and power_w is not None
        self._joules = self._joules + power_w * (now_s - self._read_s) if known else None  # type: ignore[operator]
        self._read_s = now_s
        trained, passed_s, joules = tokens - self._tokens, now_s - self._since_s, self._joules
        if trained == 0:
            return {}
        self._tokens, self._since_s, self._joules = tokens, now_s, 0.0
        if trained < 0:  # the run went back
            return {}
        readings = {"tokens_per_joule": trained / joules} if joules else {}
        if self._usd_hour and passed_s > 0:
            readings["tokens_per_usd"] = trained / (passed_s * self._usd_hour / 3600)
        return readings


class SystemReadings:
    """The thread of one process. `latest` is what it read last; only rank 0 writes."""

    def __init__(self, recorder: Recorder, device: torch.device, hosts: list[str], main: bool) -> None:
        self.latest: Readings = {}
        self._recorder, self._main, self._ranks = recorder, main, len(hosts)
        self._gpu, self._host = open_gpu(device), HostReader(str(recorder.run.folder))
        usd_hour = list_price(torch.cuda.get_device_name(device))[0] if device.type == "cuda" else None
        price = None if usd_hour is None else usd_hour * self._ranks
        self._efficiency = Efficiency(recorder.progress.tokens, time.monotonic(), price)
        self._throttle = ThrottleDetector(hosts)
        self._rank_power_w: float | None = None
        self._judged_s = 0.0
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._work, name="readings", daemon=True)

    def __enter__(self) -> SystemReadings:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(JOIN_S)  # a network file system that hangs must not hold the end of the run

    def _work(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self.read()

    def read(self) -> None:
        """Read everything once; rank 0 writes it."""
        readings = {**(self._gpu.read() if self._gpu else {}), **self._host.read()}
        self.latest = readings
        if not self._main:
            return
        history, now_s = self._recorder.history, time.monotonic()
        power_w = readings.get("gpu_power_w") if self._ranks == 1 else self._rank_power_w
        derived = self._efficiency.read(self._recorder.progress.tokens, now_s, power_w)
        step = history[-1]["step"] + 1 if history else 0
        self._recorder.run.system_record({"step": step, "time": round(time.time(), 1), **readings, **derived})

    def of_rank(self) -> list[float]:
        """This rank's RANK_READINGS; NaN where there is none."""
        return [self.latest.get(name, math.nan) for name in RANK_READINGS]

    def alarms(self, step: int, ranks: dict[str, list[Any]] | None, now_s: float) -> list[Alarm]:
        """Whether power or heat hold a GPU's clock down. `ranks` are the readings that came with the pace of all ranks;
        one process needs none."""
        if not self._main:
            return []
        if self._ranks > 1:
            if not ranks or "gpu_throttle" not in ranks:
                return []
            power = ranks.get("gpu_power_w", [None])
            self._rank_power_w = None if None in power else sum(power)
        elif now_s - self._judged_s < INTERVAL_S or "gpu_throttle" not in self.latest:
            return []
        else:
            ranks = {name: [self.latest.get(name)] for name in RANK_READINGS}
        self._judged_s = now_s
        clocks = (ranks.get(name, [None] * self._ranks) for name in ("gpu_clock_mhz", "gpu_max_clock_mhz"))
        return self._throttle.readings(step, now_s, ranks["gpu_throttle"], *clocks)
