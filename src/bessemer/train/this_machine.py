"""What `bessemer plan SPEC` needs of the machine it runs on: its GPUs in the catalogue's words, or a plan by a short
measurement."""

from __future__ import annotations

import torch

from bessemer.plan.asked import Asked
from bessemer.plan.hardware import gpus, same_gpu
from bessemer.plan.history import history_path, load_records
from bessemer.plan.local import LocalPlan, plan_here
from bessemer.spec.parallel import ParallelSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import bench_count, measure, name_and_memory, pick_device, use_threads
from bessemer.train.speed import rate_here


def catalogued_gpus(parallel: ParallelSpec) -> str | None:
    """Such as "8 x H100"; None where a run here would use another device."""
    device = pick_device(parallel)
    if device.type != "cuda":
        return None
    name = name_and_memory(device)[0]
    known = next((gpu.name for gpu in gpus().values() if same_gpu(gpu, name)), None)
    return known and f"{torch.cuda.device_count()} x {known}"


def plan_measured(asked: Asked) -> LocalPlan:
    """The plan for this machine; takes a few seconds, in which short runs of the model's shape are timed."""
    use_threads(asked.spec.parallel)
    device = pick_device(asked.spec.parallel)
    machine = measure(device)

    def rate_of(shape: ModelShape, context: int, precision: str) -> float | None:
        if shape.wrapped or shape.decoder_layers:  # not built from its shape alone, or not fed with plain rows
            return None
        return rate_here(shape, context, precision, device, machine.matmul["fp32"])

    records = load_records(history_path(machine.name, bench_count(device), torch.__version__))
    return plan_here(asked, machine, rate_of, records)
