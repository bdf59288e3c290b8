"""How fast is each attention backend, and how far off? One layer, forward and backward, against the reference.

    python benchmarks/attention.py --save FILE
    python benchmarks/attention.py --only packed-128-8192 --compile   # fills torch's cache, for several at once

16,384 tokens a batch, width 2048, four query heads to a key-value head, bfloat16 (float32 on a CPU, and small). Also
said: memory beyond the tensors themselves, and whether two runs gave the same bits.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bessemer.model.attention import BACKENDS
from bessemer.model.attention_backends import BackendTiming, candidates
from bessemer.spec.shape import ModelShape

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {},
    "window": {"windows": (1024,)},
    "cap": {"attention_cap": 50.0},
}
SIZES = [(head_dim, context) for context in (8192, 2048) for head_dim in (128, 64)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", help="such as packed-128-8192")
    parser.add_argument("--backends", nargs="*", default=list(BACKENDS))
    parser.add_argument("--compile", action="store_true", help="run flex once and measure nothing")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    report: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "results": {},
    }
    for kind, (head_dim, context) in ((kind, size) for size in SIZES for kind in KINDS):
        title = f"{kind}-{head_dim}-{context}"
        if arguments.only and title not in arguments.only:
            continue
        report["results"][title] = measure(kind, head_dim, context, device, arguments)
        if arguments.save:  # after each: what is measured stays when time runs out
            arguments.save.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure(
    kind: str, head_dim: int, context: int, device: torch.device, arguments: argparse.Namespace
) -> dict[str, Any]:
    heads, tokens, dtype = 2048 // head_dim, 16_384, torch.bfloat16
    if device.type == "cpu":
        heads, context, tokens, dtype = 4, context // 32, context // 16, torch.float32
    shape = ModelShape(0, heads * head_dim, 1, heads, heads // 4, head_dim, 0)
    shape = replace(shape, **KINDS[kind])
    window, packed = shape.window(0), kind == "packed"
    trial = BackendTiming(shape, window, context, tokens // context, dtype, device, packed)
    fit = candidates(shape, device, dtype, packed, context)
    if kind == "plain" and device.type == "cuda":
        fit.append("flex")  # which the choice leaves out there: is that right?
    if context > 2048:
        fit.remove("math")  # logits in full
    lines: dict[str, Any] = {}
    for name in ["flex"] if arguments.compile else [name for name in arguments.backends if name in fit]:
        try:
            lines[name] = line(trial, name, device)
        except Exception as fault:
            lines[name] = {"failed": str(fault).strip()[:300]}
        print(f"{kind:8} D {head_dim:3} T {context:5} {name:9} {lines[name]}", flush=True)
    return lines


def line(trial: BackendTiming, name: str, device: torch.device) -> dict[str, Any]:
    began = time.perf_counter()
    error = trial.error(name)
    first_s = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    first, second = trial.run(name), trial.run(name)
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    peak_mb = (torch.cuda.max_memory_allocated() - held) / 2**20 if device.type == "cuda" else 0.0
    del first, second
    return {
        "ms": round(trial.seconds(name, 0.15) * 1e3, 3), "error": float(f"{error:.2e}"), "same_bits": same,
        "peak_mb": round(peak_mb), "first_s": round(first_s, 2),
    }  # fmt: skip


if __name__ == "__main__":
    main()
