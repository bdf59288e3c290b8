"""torch.profiler traces of any framework: idle GPU, exposed communication, data loading, small kernels."""

from __future__ import annotations

import re
from typing import Any

from bessemer.run.finding import Cause, Finding

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_COMMUNICATION = re.compile(r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE)
_LOADING = re.compile(r"enumerate\(DataLoader\)#|DataLoader.*__next__|_next_data")
_SYNCHRONIZE = re.compile(r"cudaStreamSynchronize|cudaDeviceSynchronize|aten::item|_local_scalar_dense")
IDLE, LOADING, EXPOSED, SMALL_US, SMALL_SHARE, COPIES = 0.2, 0.1, 0.15, 10.0, 0.8, 0.1
FEWEST_SMALL = 1000  # kernels

Interval = tuple[float, float]


def is_trace(content: Any) -> bool:
    """Whether a JSON value is a Chrome trace."""
    return isinstance(content, dict) and isinstance(content.get("traceEvents"), list)


def _merge(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in _merge(intervals))


def _events(content: dict[str, Any]) -> list[tuple[str, str, Interval]]:
    """(category, name, interval) of the complete events; malformed ones are left out."""
    events = []
    for event in content["traceEvents"]:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        start, duration = event.get("ts"), event.get("dur")
        if isinstance(start, int | float) and isinstance(duration, int | float):
            events.append((str(event.get("cat", "")), str(event.get("name", "")), (float(start), start + duration)))
    return events


def measure_trace(content: dict[str, Any]) -> dict[str, float]:
    """Shares of the profiled time (from the first to the last GPU event), without those that the trace cannot tell."""
    events = _events(content)
    device = [(name, span) for category, name, span in events if category in _DEVICE]
    if not device:
        return {}
    start, end = min(span[0] for _, span in device), max(span[1] for _, span in device)
    total = end - start or 1.0
    compute = [span for name, span in device if not _COMMUNICATION.search(name) and not name.startswith("Mem")]
    moved = [span for name, span in device if _COMMUNICATION.search(name)]
    copies = [span for name, span in device if name.startswith("Mem")]
    kernels = sorted(span[1] - span[0] for name, span in device if not name.startswith("Mem"))
    host = [(category, name, (max(span[0], start), min(span[1], end))) for category, name, span in events
            if category not in _DEVICE and span[1] > start and span[0] < end]  # fmt: skip
    loading = [span for _, name, span in host if _LOADING.search(name)]
    return {
        "seconds": total / 1e6,
        "idle": 1 - _length([span for _, span in device]) / total,
        "communication": _length(moved) / total,
        "exposed_communication": (_length(compute + copies + moved) - _length(compute + copies)) / total,
        "copies": (_length(compute + copies) - _length(compute)) / total,
        "data_loading": _length(loading) / total,
        "synchronizations": float(sum(1 for _, name, _ in host if _SYNCHRONIZE.search(name))),
        "kernels": float(len(kernels)),
        "small_kernels": sum(1 for us in kernels if us < SMALL_US) / max(1, len(kernels)),
        "median_kernel_us": kernels[len(kernels) // 2] if kernels else 0.0,
    }


def judge_trace(content: dict[str, Any]) -> list[Finding]:
    """Where the GPU's time is lost; none if it computes nearly always."""
    shares = measure_trace(content)
    if not shares:
        cause = Cause("no_gpu_events", "It was recorded on a CPU, or without ProfilerActivity.CUDA.", 0.9, "",
                      "profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])")  # fmt: skip
        return [Finding.of_causes("the trace has no GPU events", [cause], severity="note")]
    evidence = {name: round(value, 4) for name, value in shares.items()}
    findings = []
    if shares["idle"] > IDLE:
        symptom = f"the GPU is idle for {shares['idle']:.0%} of {shares['seconds']:.3g} s"
        findings.append(
            Finding.of_causes(symptom, _idle_causes(shares), evidence=evidence, severity="warning")
        )  # fmt: skip
    if shares["exposed_communication"] > EXPOSED:
        cause = Cause("slow_communication", "Collectives run while nothing is computed: they are not overlapped, or "
                      "the network is slow for this layout.", 0.85, "nccl-tests on the same hosts; NCCL_DEBUG=INFO: "
                      "is it NET/Socket where it should be NET/IB?", "Larger micro-batch or accumulation with "
                      "`no_sync`; shard within the node and replicate between (HSDP); FSDP's prefetch; ZeRO-2 in "
                      "place of 3.")  # fmt: skip
        symptom = f"{shares['exposed_communication']:.0%} of the time is communication that hides behind nothing"
        findings.append(Finding.of_causes(symptom, [cause], evidence=evidence, severity="warning"))
    if shares["copies"] > COPIES:
        cause = Cause("host_copies", "Copies between host and GPU are not overlapped: unpinned batches or "
                      "offloading.", 0.75,
                      "Memcpy rows of the trace: HtoD in every step?", "`pin_memory=True` and `.to(device, "
                      "non_blocking=True)`; no offload if memory allows.")  # fmt: skip
        findings.append(Finding.of_causes(f"{shares['copies']:.0%} of the time is copying", [cause], evidence=evidence,
                                          severity="warning"))  # fmt: skip
    return findings


def _idle_causes(shares: dict[str, float]) -> list[Cause]:
    causes = [
        Cause("host_bound", "The host prepares work more slowly than the GPU does it: Python between steps, logging, "
              "checkpoints.", 0.35, "What runs on the main thread in the gaps of the trace?",
              "`torch.compile(model)`, fewer `.item()` and prints.")]  # fmt: skip
    if shares["data_loading"] > LOADING:
        causes.append(
            Cause("slow_data", f"The loop waits for the DataLoader for {shares['data_loading']:.0%} of the time.", 0.85,
                  "Time one epoch of the loader alone.", "`num_workers=8, prefetch_factor=4, "
                  "persistent_workers=True`; tokenize before training.")
        )  # fmt: skip
    if shares["kernels"] > FEWEST_SMALL and shares["small_kernels"] > SMALL_SHARE:
        causes.append(
            Cause("small_kernels", f"{shares['small_kernels']:.0%} of {shares['kernels']:,.0f} kernels last under "
                  f"{SMALL_US:.0f} µs: launching them costs more than running them.", 0.75,
                  "Median kernel " + f"{shares['median_kernel_us']:.1f} µs.", "`torch.compile(model)` "
                  "(mode='reduce-overhead' uses CUDA graphs), fused optimizers (`optim='adamw_torch_fused'`), a "
                  "larger micro-batch.")
        )  # fmt: skip
    if shares["synchronizations"] > 20 * max(1.0, shares["seconds"]):
        causes.append(
            Cause("host_synchronisation", f"{shares['synchronizations']:,.0f} synchronisations in "
                  f"{shares['seconds']:.3g} s stop the host until the GPU is done.", 0.5,
                  "`torch.cuda.set_sync_debug_mode('warn')` names the lines.",
                  "Collect losses on the GPU, and read them every 10 steps.")
        )  # fmt: skip
    return causes
