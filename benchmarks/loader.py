"""How many tokens a second does one core turn into batches, from memory, with documents and weights filled in?

    python benchmarks/loader.py --save

Stores of random tokens are written to a temporary folder, so the pages are in memory when they are read. Documents are
of ordinary length (500 to 1,500 tokens) and short (10 to 30); rows are cut from the store as it lies, or packed by best
fit; with and without a mask; from one store, and from 64 shards. The best of some rounds counts, by the processor's
time of this process, so that other work on the machine matters less. Also: what writing, joining and packing cost.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.data.store.token_store import TokenStore
from bessemer.data.store.writer import StoreWriter, merge
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.data.stream.packing import best_fit, open_best_fit
from bessemer.data.stream.rows import ConcatRows, Rows
from bessemer.spec.mixture import quantise

LENGTHS = {"ordinary": (500, 1500), "short": (10, 30)}
VOCAB, SHARDS = 50_000, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=32_000_000, help="tokens in a store")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=64, help="rows in a batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-loader.json")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for documents in LENGTHS:
            for mask in (False, True):
                results += measure(Path(folder), documents, mask, arguments)
        costs = side_costs(Path(folder))
    report = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "context": arguments.context,
        "rows": arguments.rows,
        "tokens": arguments.tokens,
        "results": results,
        "costs": costs,
    }
    for name, value in costs.items():
        print(f"{name}: {value:,.3g}")
    if arguments.save:
        path = Path(__file__).parent / "results" / f"{report['date']}-loader.json"
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {path}")


def measure(folder: Path, documents: str, mask: bool, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    name = f"{documents}{'-masked' if mask else ''}"
    parts, whole = [], folder / name
    for k in range(SHARDS):
        parts.append(write_store(folder / f"{name}-{k}", LENGTHS[documents], arguments.tokens // SHARDS, mask, k))
    merge(parts, whole)
    results = []
    for shards, store in ((1, TokenStore(whole)), (SHARDS, TokenStore(parts))):
        packed = open_best_fit(store, arguments.context, folder / f"{name}.pack")
        sources: dict[str, Rows] = {"concat": ConcatRows(store, arguments.context), "best_fit": packed}
        for packing, rows in sources.items():
            rate = tokens_per_s(rows, arguments)
            results.append(
                {
                    "documents": documents,
                    "packing": packing,
                    "mask": mask,
                    "shards": shards,
                    "tokens_per_s": round(rate),
                    **({"padding": round(packed.index.padding_share, 5)} if packing == "best_fit" else {}),
                }
            )
            print(
                f"{documents:>9} {packing:>9} {'masked' if mask else '':>7} {shards:>3} shards: "
                f"{rate / 1e6:>5.0f} M tokens/s",
                flush=True,
            )
    return results


def write_store(prefix: Path, lengths: tuple[int, int], tokens: int, mask: bool, seed: int) -> str:
    random = np.random.default_rng(seed)
    with StoreWriter(prefix, VOCAB, "") as writer:
        while writer.tokens < tokens:
            length = int(random.integers(*lengths))
            kept = random.integers(0, 2, length) if mask else None
            writer.add(random.integers(0, VOCAB, length), "/corpus", 1, 1, length, mask=kept)
    return str(prefix)


def tokens_per_s(rows: Rows, arguments: argparse.Namespace) -> float:
    order = StreamOrder([MixturePhase(0, quantise({"a": 1.0}))], {"a": rows.count}, seed=0)
    stream = BatchStream({"a": rows}, order, arguments.context, StepPositions([BatchPhase(0, arguments.rows)]))
    steps = max(1, min(40, rows.count // arguments.rows))
    stream.batch(0)

    def read() -> None:
        for step in range(steps):
            stream.batch(step)

    best_s = min(timed(read) for _ in range(arguments.rounds))
    return steps * arguments.rows * arguments.context / best_s


def timed(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def side_costs(folder: Path) -> dict[str, float]:
    random = np.random.default_rng(0)
    documents = [random.integers(0, VOCAB, 1000).astype(np.uint16) for _ in range(1000)]
    lengths = np.clip(random.lognormal(6.3, 1.0, 10_000_000).astype(np.int64), 1, 2048)

    def write() -> None:
        with StoreWriter(folder / "written", VOCAB, "") as writer:
            for document in documents * 20:
                writer.add(document, "/corpus", 1, 1, 1)

    parts = sorted(str(path)[: -len(".json")] for path in folder.glob("ordinary-[0-9]*.json"))
    joined_bytes = sum(os.path.getsize(f"{part}.bin") for part in parts)
    join_s = timed(lambda: merge(parts, folder / "joined"))
    many = parts * (10_000 // len(parts))
    return {
        "write_us_per_document_of_1000_tokens": timed(write) / 20_000 * 1e6,
        "join_bytes_per_s": joined_bytes / join_s,
        "pack_s_for_10_million_documents": timed(lambda: best_fit(lengths, 2048)),
        f"open_s_for_{len(many)}_shards": timed(lambda: TokenStore(many)),
    }


if __name__ == "__main__":
    main()
