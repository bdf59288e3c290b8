"""What a shared prompt saves: a step of DPO with `share_prefix` on and off, in turns, on the same pairs and weights.

    python benchmarks/share_prefix.py --device cpu --width 256 --layers 4 --pairs 4 --prompt 512 --answer 64 256 512

A step is forward and backward of all pairs in one micro-batch, without a reference (simpo), as with a stored one. On a
CPU the time is that of the processor, not of the clock: other programs do not change it much.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bessemer.align.dpo import Dpo
from bessemer.data.store.token_store import TokenStore
from bessemer.data.store.writer import StoreWriter
from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.groups import GroupRows
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.model.attention_backends import set_backend
from bessemer.model.transformer import build_model
from bessemer.spec.mixture import quantise
from bessemer.spec.preference import DpoSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.compile import compute_in
from bessemer.train.device import synchronize


def write_pairs(prefix: Path, vocab: int, pairs: int, prompt: int, answer: int) -> TokenStore:
    draw = np.random.default_rng(0)
    with StoreWriter(prefix, vocab, "benchmark") as writer:
        for pair in range(pairs):
            shared = draw.integers(1, vocab, prompt)
            for side in (0, 1):
                tokens = np.concatenate([shared, [side + 1], draw.integers(1, vocab, answer - 2), [0]])
                mask = (np.arange(tokens.size) >= prompt).astype(np.uint8)
                fields = {"group": np.array([pair], np.int64), "chosen": np.array([1 - side], np.int32)}
                writer.add(tokens, "benchmark", pair + 1, pair, 5, mask=mask, fields=fields)
    return TokenStore(str(prefix))


def batch_of(rows: GroupRows) -> Batch:
    order = StreamOrder([MixturePhase(0, quantise({"a": 1.0}))], {"a": rows.count}, seed=0)
    return BatchStream({"a": rows}, order, rows.length, StepPositions([BatchPhase(0, rows.count)])).batch(0)


def measure(options: argparse.Namespace, answer: int) -> dict[str, Any]:
    device = torch.device(options.device)
    heads = options.width // 64
    shape = ModelShape(options.vocab, options.width, options.layers, heads, heads, 64, 4 * options.width)
    model = build_model(shape, device, 0)
    set_backend(model, options.backend)
    objective = Dpo(DpoSpec(loss="simpo"))
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        store = write_pairs(Path(folder) / "pairs", options.vocab, options.pairs, options.prompt, answer)
        sizes = {False: 2 * (options.prompt + answer), True: options.prompt + 2 * answer}
        batches = {share: batch_of(GroupRows(store, sizes[share], share=share)) for share in sizes}
        seconds: dict[bool, list[float]] = {False: [], True: []}
        losses, peaks = {}, {}
        for _ in range(options.repeats + 1):
            for share, batch in batches.items():
                model.zero_grad()
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                synchronize(device)
                began = clock()
                feed = objective.feed(batch, device)
                with compute_in(options.precision, device):
                    terms = objective.loss(model, feed, feed.count)
                terms.loss.backward()
                synchronize(device)
                seconds[share].append(clock() - began)
                losses[share] = terms.loss.item()
                if device.type == "cuda":
                    peaks[share] = torch.cuda.max_memory_allocated()
    names = {False: "separate", True: "shared"}
    medians = {names[share]: statistics.median(values[1:]) for share, values in seconds.items()}
    return {
        "answer_tokens": answer, "columns": {names[share]: size for share, size in sizes.items()},
        "seconds": {names[share]: values[1:] for share, values in seconds.items()}, "median_s": medians,
        "ratio": medians["separate"] / medians["shared"], "peak_bytes": {names[k]: v for k, v in peaks.items()},
        "loss": {names[share]: loss for share, loss in losses.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("width", 256),
        ("layers", 4),
        ("vocab", 4096),
        ("pairs", 4),
        ("prompt", 512),
        ("repeats", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--answer", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    hardware = (
        torch.cuda.get_device_name()
        if options.device == "cuda"
        else f"{platform.machine()}, {os.cpu_count()} cores, one thread"
    )
    settings = {key: str(value) for key, value in vars(options).items() if key != "out"}
    cases = [measure(options, answer) for answer in options.answer]
    result = {
        "command": " ".join(["python", *sys.argv]), "date": datetime.now(UTC).date().isoformat(), "commit": commit,
        "hardware": hardware, "torch": torch.__version__, "settings": settings, "cases": cases,
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1))
    for case in cases:
        print({key: case[key] for key in ("answer_tokens", "columns", "median_s", "ratio", "loss", "peak_bytes")})


if __name__ == "__main__":
    main()
