"""What does it cost to compare prepared data with its digests: all of it, and as a run reads it?

    python benchmarks/verify_data.py --save

Shards of random tokens are written to a temporary folder. Measured: reading all of it with `bessemer data verify`'s
function, from memory and after the kernel was asked to drop the pages; and rows at random, each chunk's first time
(compared) and a second time over the same rows (not compared again). Every measurement is repeated; rates from memory
are by the processor's time of this process, so that other work on the machine matters less. What 100 GB would take is
computed from the median and says so.
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
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bessemer.data.store.digests import CHUNK_BYTES
from bessemer.data.store.token_store import TokenStore
from bessemer.data.store.writer import StoreWriter
from bessemer.data.verify import verify

VOCAB, DOCUMENT_TOKENS, LARGE_BYTES = 50_000, 1000, 100e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--shard-bytes", type=int, default=10**9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the shards are written (default: a temporary folder)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-verify-data.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        prefixes = [write_shard(folder / f"shard{k}", arguments.shard_bytes, k) for k in range(arguments.shards)]
        size_bytes = sum(path.stat().st_size for path in folder.iterdir())
        whole = [timed(lambda: list(verify(folder, lambda size: None))) for _ in range(arguments.rounds)]
        cold = [after_dropping(folder, lambda: list(verify(folder, lambda s: None))) for _ in range(arguments.rounds)]
        rows = {length: measure_rows(prefixes, length, arguments.rounds) for length in (2048, 8192)}
        digest_bytes = sum(path.stat().st_size for path in folder.glob("*.chunks"))
    memory_rate = size_bytes / statistics.median(cpu_s for cpu_s, _ in whole)
    cold_rate = size_bytes / statistics.median(wall_s for _, wall_s in cold)
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, other work running",
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "xxhash": xxhash.VERSION},
        "chunk_bytes": CHUNK_BYTES,
        "bytes": size_bytes,
        "digest_bytes": digest_bytes,
        "whole_from_memory": [{"cpu_s": cpu_s, "wall_s": wall_s} for cpu_s, wall_s in whole],
        "whole_from_disk": [{"cpu_s": cpu_s, "wall_s": wall_s} for cpu_s, wall_s in cold],
        "median_bytes_per_cpu_s_from_memory": round(memory_rate),
        "median_bytes_per_s_from_disk": round(cold_rate),
        "computed_s_for_100_gb": {
            "from_memory": round(LARGE_BYTES / memory_rate, 1),
            "from_this_disk": round(LARGE_BYTES / cold_rate, 1),
        },
        "random_rows": rows,
    }
    print(json.dumps({key: value for key, value in report.items() if key != "random_rows"}, indent=1))
    print(json.dumps(rows, indent=1))
    if arguments.save:
        path = Path(__file__).parent / "results" / f"{report['date']}-verify-data.json"
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {path}")


def write_shard(prefix: Path, size_bytes: int, seed: int) -> str:
    random = np.random.default_rng(seed)
    with StoreWriter(prefix, VOCAB, "") as writer:
        while writer.tokens * 2 < size_bytes:
            for document in random.integers(0, VOCAB, (1000, DOCUMENT_TOKENS), dtype=np.uint16):
                writer.add(document, "/corpus", 1, 1, 1)
    return str(prefix)


def measure_rows(prefixes: list[str], length: int, rounds: int) -> dict[str, Any]:
    """Microseconds of processor time for a row: its chunks compared, and read again."""
    first_us, again_us, compared_bytes = [], [], []
    for seed in range(rounds):
        store = TokenStore(prefixes)
        for k in range(len(prefixes)):
            store.shard(k)
        starts = np.random.default_rng(seed).integers(0, store.tokens - length, 2000)
        batches = np.split(starts, 250)

        def read(store: TokenStore = store, batches: list[Any] = batches) -> None:
            for batch in batches:
                store.gather(batch, length)

        first_us.append(timed(read)[0] / starts.size * 1e6)
        again_us.append(timed(read)[0] / starts.size * 1e6)
        chunks = sum(int(store.shard(k)._checked["bin"]._good.sum()) for k in range(len(prefixes)))
        compared_bytes.append(chunks * CHUNK_BYTES / starts.size)
    return {
        "row_bytes": 2 * length,
        "compared_bytes_per_row": round(statistics.median(compared_bytes)),
        "first_read_us": first_us,
        "later_read_us": again_us,
        "median_first_read_us": round(statistics.median(first_us), 1),
        "median_later_read_us": round(statistics.median(again_us), 1),
        "median_tokens_per_s_when_all_is_compared": round(length / statistics.median(first_us) * 1e6),
    }


def timed(work: Callable[[], object]) -> tuple[float, float]:
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return time.process_time() - cpu, time.perf_counter() - began


def after_dropping(folder: Path, work: Callable[[], object]) -> tuple[float, float]:
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return timed(work)


if __name__ == "__main__":
    main()
