"""How much memory does a conversion take, with its numeric gate, in both directions?

    python benchmarks/convert.py --preset 1B --out benchmarks/results/DATE-convert.json

Writes a Llama folder with random bf16 weights, converts it to a native checkpoint and back with `bessemer export
--check layers`, each in a process of its own whose anonymous memory is sampled (RssAnon: what the page cache cannot
take back), and compares all tensors of the first and the last folder. Needs room for three copies of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.model.families.folder import HfFolder, hf_tensors, write_folder
from bessemer.model.families.llama import LLAMA
from bessemer.model.transformer import Decoder
from bessemer.spec.shape import ModelShape, preset

SAMPLE_EVERY_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="1B")
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: a temporary folder)")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the result")
    arguments = parser.parse_args()
    named = preset(arguments.preset)
    assert named is not None, f"no preset {arguments.preset}"
    shape = ModelShape(**{**named.__dict__, "vocab": arguments.vocab, "max_positions": 8192})
    needed, place = 3 * 2 * shape.parameters, arguments.folder or Path(tempfile.gettempdir())
    assert shutil.disk_usage(place).free > 1.2 * needed, f"{place}: needs {1.2 * needed / 1e9:.0f} GB"
    with tempfile.TemporaryDirectory(dir=place) as work:
        first, native, last = (Path(work) / name for name in ("first", "native", "last"))
        write_random(first, shape)
        found: dict[str, Any] = {
            "date": datetime.now(UTC).date().isoformat(), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__, "threads": os.environ.get("OMP_NUM_THREADS", "all"),
            "parameters": shape.parameters, "bytes": sum(path.stat().st_size for path in first.iterdir()),
            "to_bessemer": convert(first, native, "bessemer"), "to_hf": convert(native, last, "hf"),
        }  # fmt: skip
        one, other = HfFolder(first), HfFolder(last)
        assert one.tensors.keys() == other.tensors.keys()
        found["same_bytes"] = all(torch.equal(one.read(name), other.read(name)) for name in one.tensors)
    print(json.dumps(found, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    peak = max(found[key]["peak_rss_anon_bytes"] for key in ("to_bessemer", "to_hf"))
    sys.exit(0 if found["same_bytes"] and peak < 3e9 else "over 3 GB, or not the same bytes")


def write_random(folder: Path, shape: ModelShape) -> None:
    """One tensor in memory at a time."""
    with torch.device("meta"):
        state = {name: tensor.to(torch.bfloat16) for name, tensor in Decoder(shape).state_dict().items()}
    plan = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in hf_tensors(state.__getitem__, shape, LLAMA)]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for name, size, dtype in plan:
            noise = torch.empty(size, dtype=dtype).normal_(0, 0.02, generator=generator)
            yield name, noise + 1 if len(size) == 1 else noise

    write_folder(folder, plan, tensors(), {"config.json": LLAMA.config(shape)})


def convert(source: Path, out: Path, to: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bessemer", "export", str(source), "--to", to, "--out", str(out)]
    start, peak = time.monotonic(), 0
    process = subprocess.Popen([*command, "--check", "layers"], stdout=subprocess.PIPE, text=True)
    while process.poll() is None:
        peak = max(peak, rss_anon_bytes(process.pid))
        time.sleep(SAMPLE_EVERY_S)
    assert process.stdout is not None
    said = process.stdout.read()
    assert process.returncode == 0, said
    checked = next(line for line in said.splitlines() if line.startswith("checked"))
    return {"peak_rss_anon_bytes": peak, "seconds": round(time.monotonic() - start, 1), "gate": checked}


def rss_anon_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has just ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))


if __name__ == "__main__":
    main()
