"""What does it cost that every update can be withheld? Each optimizer on each veto path, against the optimizer bare.

    OMP_NUM_THREADS=1 python benchmarks/veto_cost.py --device cpu --save
    python benchmarks/veto_cost.py --device cuda --model 125M --rows 8 --context 1024 --precision bf16 --save

Whole training steps of a native model on random tokens are timed, since a host read costs what it stalls: forward,
backward, clipping, then the update with no veto (bare) or on a path. Bare is the fastest kernel that torch has, with a
division of its own for clipping, which the fused path does not need. Variants take turns, so that a slow moment of the
machine meets all of them; the median of the differences counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bessemer.model.transformer import Decoder, build_model
from bessemer.optim.choose import VETO_PATHS, make_optimizer, veto_fault
from bessemer.optim.guarded import FUSED, HOST, GuardedOptimizer, clip_divisor
from bessemer.spec.optimizer import SETTINGS, OptimizerSpec
from bessemer.spec.shape import preset, with_vocab
from bessemer.train.compile import compute_in
from bessemer.train.device import synchronize
from bessemer.train.objective import Pretrain
from bessemer.train.speed import random_batch

VOCAB = 8192
QUEUED = 4  # steps between two waits, as a host that runs ahead of its GPU has them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--model", default="1M", help="a preset, such as 1M or 125M")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--precision", default="fp32", help="fp32 or bf16")
    parser.add_argument("--steps", type=int, default=30, help="timed rounds of each variant")
    parser.add_argument("--optimizers", nargs="*", default=list(SETTINGS))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-veto-cost-DEVICE.json")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    results = [result for name in arguments.optimizers for result in measure(name, device, arguments)]
    report = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "command": {key: value for key, value in vars(arguments).items() if key != "save"},
        "results": results,
    }
    if arguments.save:
        path = Path(__file__).parent / "results" / f"{report['date']}-veto-cost-{device.type}.json"
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(path)


def measure(name: str, device: torch.device, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One line a path; all variants of one optimizer take turns on models of their own."""
    paths = [path for path in VETO_PATHS.values() if veto_fault(spec_of(name), path, device) is None]
    variants = {"bare": variant(name, None, paths, device, arguments)}
    variants |= {path: variant(name, path, paths, device, arguments) for path in paths}
    # On a CPU the time of this process alone, so that other work on the machine matters less.
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {key: [] for key in variants}
    for turn in range(arguments.steps + 3):
        for key, step in variants.items():
            began = clock()
            step()
            if turn >= 3:  # allocations, kernel selection
                times[key].append((clock() - began) / QUEUED)
    bare_ms = statistics.median(times["bare"]) * 1e3
    lines = []
    for path in paths:
        differences = [a - b for a, b in zip(times[path], times["bare"], strict=True)]
        cost_ms = statistics.median(differences) * 1e3
        lines.append({
            "optimizer": name, "path": path, "bare_step_ms": round(bare_ms, 3), "cost_ms": round(cost_ms, 3),
            "cost_percent": round(100 * cost_ms / bare_ms, 2),
        })  # fmt: skip
        cost = f"{cost_ms:+8.3f} ms {100 * cost_ms / bare_ms:+7.2f} %"
        print(f"{name:10} {path:16} bare step {bare_ms:8.2f} ms   veto {cost}", flush=True)
    return lines


def spec_of(name: str, **rest: Any) -> OptimizerSpec:
    return OptimizerSpec.model_validate({"name": name, **rest})


def variant(
    name: str, path: str | None, paths: list[str], device: torch.device, arguments: argparse.Namespace
) -> Callable[[], None]:
    """A function that trains a few steps, queued one after the other, and waits for them."""
    shape = preset(arguments.model)
    assert shape is not None, f"no preset {arguments.model}"
    model: Decoder = build_model(with_vocab(shape, VOCAB), device, seed=0)
    used = path or (FUSED if FUSED in paths else HOST)
    word = next(word for word, known in VETO_PATHS.items() if known == used)
    optimizer = make_optimizer(model.named_parameters(), spec_of(name, veto=word))
    objective = Pretrain(cross_documents=False)
    feed = objective.feed(random_batch(VOCAB, arguments.rows, arguments.context), device)

    def run() -> None:
        for _ in range(QUEUED):
            with compute_in(arguments.precision, device):
                loss = objective.loss(model, feed, arguments.rows * arguments.context).loss
            loss.backward()
            norm = optimizer.grad_norm()
            divisor = clip_divisor(norm, 1.0)
            if path is None:
                bare(optimizer, divisor)
            else:
                optimizer.step(1e-4, (~norm.isfinite()).float(), divisor)
        synchronize(device)

    return run


def bare(optimizer: GuardedOptimizer, divisor: torch.Tensor) -> None:
    """Clip and step as any loop would, without a verdict."""
    torch._foreach_div_([p.grad for p in optimizer.parameters if p.grad is not None], divisor)
    for part in optimizer.optimizers:
        for group in part.param_groups:
            group["lr"] = 1e-4
        part.step()
    for parameter in optimizer.parameters:
        parameter.grad = None


if __name__ == "__main__":
    main()
