"""Readings of the machine: what is written, what is left out, and when a clock is held down."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from bessemer.guard.machine import CAPPED_READINGS, THROTTLED_S, ThrottleDetector
from bessemer.run.directory import RunWriter
from bessemer.train import readings
from bessemer.train.rank_report import RANK_STATS, by_rank
from bessemer.train.readings import RANK_READINGS, Efficiency, GpuReader, HostReader, SystemReadings


class Nvml(SimpleNamespace):
    """Stands for pynvml: one GPU, which does not report its utilisation."""

    class NVMLError(Exception): ...

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def __init__(self, bits: int) -> None:
        def refuse(gpu: str) -> Any:
            raise self.NVMLError("not supported")

        super().__init__(
            nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid, nvmlDeviceGetUtilizationRates=refuse,
            nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=1 << 30),
            nvmlDeviceGetTemperature=lambda gpu, sensor: 61 if sensor == 0 else -1,
            nvmlDeviceGetPowerUsage=lambda gpu: 700_000, nvmlDeviceGetClockInfo=lambda gpu, kind: 1400,
            nvmlDeviceGetMaxClockInfo=lambda gpu, kind: 1980,
            nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: bits,  # an older package
        )  # fmt: skip


def test_a_gpu_tells_what_it_has_and_nothing_else() -> None:
    assert GpuReader(Nvml(0x4), "GPU-1").read() == {
        "gpu_memory_bytes": 1 << 30, "gpu_temperature_c": 61, "gpu_power_w": 700.0, "gpu_clock_mhz": 1400,
        "gpu_max_clock_mhz": 1980, "gpu_throttle": 4, "gpu_power_capped_share": 1.0, "gpu_throttled_share": 0.0,
    }  # fmt: skip
    assert GpuReader(Nvml(0x40), "GPU-1").read()["gpu_throttled_share"] == 1.0


def test_a_disk_that_does_not_answer_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise OSError(116, "Stale file handle", path)

    reader = HostReader(str(tmp_path))
    assert "disk_free_bytes" in reader.read()
    monkeypatch.setattr(psutil, "disk_usage", refuse)
    read = reader.read()
    assert "disk_free_bytes" not in read
    assert read["ram_bytes"] > 0


def test_rates_of_the_host_are_differences_over_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)  # a container without /proc/diskstats
    reader = HostReader(str(tmp_path))
    reader._before |= {"net_send": psutil.net_io_counters().bytes_sent - 4_000_000, "net_receive": 1 << 60}
    reader._before_s = time.monotonic() - 2
    now = psutil.cpu_times()
    reader._cpu = now._replace(user=now.user - 3, idle=now.idle - 1)
    monkeypatch.setattr(psutil, "cpu_times", lambda: now)
    read = reader.read()
    assert "cpu_busy_share" not in reader.read()  # the processor's counters have not moved
    assert 1_900_000 <= read["net_send_bytes_per_s"] <= 12_000_000
    assert read["net_receive_bytes_per_s"] == 0  # the counter began again
    assert "disk_read_bytes_per_s" not in read and not any("disk_write" in name for name in read)
    assert 0 < read["process_ram_bytes"] < read["ram_bytes"] < psutil.virtual_memory().total
    assert read["disk_free_bytes"] > 0 and read["cpu_busy_share"] == pytest.approx(0.75)


def test_tokens_per_joule_and_dollar_by_hand() -> None:
    efficiency = Efficiency(tokens=1000, now_s=0.0, usd_hour=3.6)
    assert efficiency.read(1000, 5.0, 100.0) == {}  # a long step
    assert efficiency.read(3000, 10.0, 300.0) == {"tokens_per_joule": 1.0, "tokens_per_usd": 2000 / 0.01}
    assert efficiency.read(500, 15.0, 300.0) == {}  # a rollback
    assert efficiency.read(1500, 20.0, None) == {"tokens_per_usd": 1000 / 0.005}  # a rank without power
    assert efficiency.read(4500, 25.0, 300.0)["tokens_per_joule"] == 2.0
    assert Efficiency(0, 0.0, None).read(100, 1.0, None) == {}


def run_detector(detector: ThrottleDetector, count: int, bits: int, clock: float, start: int = 0) -> list[str]:
    alarms = []
    for i in range(start, start + count):
        alarms += detector.readings(i, 5.0 * i, [bits], [clock], [1980.0])
    return [alarm.finding.symptom for alarm in alarms]


def test_heat_is_reported_once_after_a_minute() -> None:
    detector = ThrottleDetector(["a"])
    assert run_detector(detector, int(THROTTLED_S / 5), 0x20, 1841.0) == []
    (symptom,) = run_detector(detector, 100, 0x20, 1841.0, start=12)
    assert symptom.startswith("throttled, -7%: the SM clock is 1,841 MHz instead of 1,980, held by its temperature")
    assert run_detector(ThrottleDetector(["a"]), 100, 0x1, 300.0) == []  # idle
    assert run_detector(ThrottleDetector(["a"]), 100, 0x20, 1960.0) == []  # costs nothing


def test_a_power_limit_is_judged_by_the_clock_that_the_run_holds_under_it() -> None:
    detector = ThrottleDetector(["a"])
    assert run_detector(detector, CAPPED_READINGS, 0x4, 1450.0) == []  # as on every busy large GPU
    (symptom,) = run_detector(detector, 50, 0x4, 1300.0, start=CAPPED_READINGS)
    assert symptom.startswith("throttled, -10%") and "1,450, held by its power limit" in symptom


def test_a_rank_is_named_against_its_peers() -> None:
    detector = ThrottleDetector(["a", "a", "b", "b"])
    clocks = [1450.0, 1440.0, 1450.0, 1200.0]
    alarms = [a for i in range(30) for a in detector.readings(i, 5.0 * i, [4.0] * 4, clocks, [1980.0] * 4)]
    assert len(alarms) == 1 and "rank 3 (b)" in alarms[0].finding.symptom
    assert alarms[0].kind == "throttled" and alarms[0].severity == "warning"
    assert ThrottleDetector(["a", "b"]).readings(0, 0.0, [None, 4], [None, 1400], [None, 1980]) == []


def test_readings_of_ranks_are_lists_without_what_none_has() -> None:
    nan = math.nan
    slots = [0.1, 0.0, 5.0, 0.0, *[nan] * 6, 0.5, 0.2, 0.0, 6.0, 0.0, nan, nan, 300.0, *[nan] * 3, 0.25]
    assert len(slots) == 2 * len(RANK_STATS) and len(RANK_READINGS) == 7
    assert by_rank(slots) == {
        "own_s": [0.1, 0.2], "data_wait_s": [0.0, 0.0], "memory_bytes": [5, 6], "bubble_s": [0.0, 0.0],
        "gpu_power_w": [None, 300.0], "cpu_busy_share": [0.5, 0.25],
    }  # fmt: skip


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SystemReadings]:
    gpu = GpuReader(Nvml(0x20), "GPU-1")
    monkeypatch.setattr(readings, "open_gpu", lambda device: gpu)

    def make(hosts: list[str], main: bool = True) -> SystemReadings:
        run = RunWriter(tmp_path / "run")
        recorder: Any = SimpleNamespace(run=run, history=[{"step": 6}], progress=SimpleNamespace(tokens=0))
        return SystemReadings(recorder, torch.device("cpu"), hosts, main)

    return make


def test_the_thread_writes_and_ends_at_once(
    system: Callable[..., SystemReadings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readings, "INTERVAL_S", 0.01)
    sampler = system(["a"])
    with sampler:
        while len(sampler._recorder.run.system_path.read_bytes().splitlines()) < 3:
            time.sleep(0.01)
    monkeypatch.setattr(readings, "INTERVAL_S", 1000.0)
    with system_again(sampler):
        pass  # does not wait for the interval
    text = sampler._recorder.run.system_path.read_text()
    assert '"step": 7' in text and '"gpu_power_w": 700.0' in text and "nan" not in text


def system_again(sampler: SystemReadings) -> SystemReadings:
    return SystemReadings(sampler._recorder, torch.device("cpu"), ["a"], True)


def test_alarms_of_one_process_and_of_several(system: Callable[..., SystemReadings]) -> None:
    alone = system(["a"])
    assert alone.alarms(0, None, 100.0) == []  # nothing was read yet
    alone.read()
    assert sum(len(alone.alarms(step, None, 100.0 + step)) for step in range(80)) == 1
    several = system_of_two(alone)
    ranks = {name: [None, None] for name in RANK_READINGS} | {
        "gpu_power_w": [400.0, 300.0], "gpu_throttle": [0.0, 32.0], "gpu_clock_mhz": [1900.0, 1000.0],
        "gpu_max_clock_mhz": [1980.0, 1980.0],
    }  # fmt: skip
    assert several.alarms(0, None, 0.0) == [] and several.alarms(0, {"own_s": [1.0, 1.0]}, 0.0) == []
    found = [a for now in range(0, 100, 10) for a in several.alarms(now, ranks, float(now))]
    assert len(found) == 1 and "rank 1 (b)" in found[0].finding.symptom and several._rank_power_w == 700.0


def system_of_two(alone: SystemReadings) -> SystemReadings:
    return SystemReadings(alone._recorder, torch.device("cpu"), ["a", "b"], True)
