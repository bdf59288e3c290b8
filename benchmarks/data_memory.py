"""Does the data path's memory grow with the corpus? Prepares corpora of several sizes and reads them at random.

    python benchmarks/data_memory.py --sizes 10MB,100MB,1GB

Each size runs in a fresh process. RssAnon is what counts: memory of our own, without the pages of mapped files, which
the system can drop at any time. The corpus is JSONL made of the Python standard library's source, every copy of a
file with its lines in another order, so that no two documents are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
GATHERS = 2_000
ROWS, TOKENS = 16, 1025


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="10MB,100MB", help="corpus sizes, such as 10MB,100MB,1GB")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--sample", default="4MB", help="text to train the tokenizer on")
    parser.add_argument("--folder", help="where to work (default: a temporary folder)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(Path(arguments.child), arguments.vocab, size_of(arguments.sample))))
        return
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; vocab {arguments.vocab:,}, "
        f"tokenizer sample {arguments.sample}, {GATHERS:,} gathers of {ROWS} x {TOKENS} tokens\n"
    )
    print(
        f"{'corpus':>8} {'documents':>10} {'tokens':>13} {'peak RssAnon MB':>16} {'prepare s':>10} {'MB/s':>6} "
        f"{'gather Mtok/s':>14}"
    )
    for size in arguments.sizes.split(","):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            write_corpus(Path(folder) / "corpus.jsonl", size_of(size))
            command = [
                sys.executable,
                __file__,
                "--child",
                folder,
                "--vocab",
                str(arguments.vocab),
                "--sample",
                arguments.sample,
            ]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        print(
            f"{size:>8} {found['documents']:>10,} {found['tokens']:>13,} {found['peak_mb']:>16.0f} "
            f"{found['prepare_s']:>10.1f} {found['text_mb'] / found['prepare_s']:>6.2f} "
            f"{found['gather_tokens_per_s'] / 1e6:>14.0f}",
            flush=True,
        )


def size_of(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]B)", text.strip().upper())
    if not match:
        raise SystemExit(f"size {text!r} should look like 100MB")
    return int(match[1]) * UNITS[match[2]]


def write_corpus(path: Path, size_bytes: int) -> None:
    library = Path(os.__file__).parent
    files = sorted(file for file in library.rglob("*.py") if "site-packages" not in file.parts)
    random.Random(0).shuffle(files)  # so that a small corpus has large files too
    written = copy = 0
    with path.open("w", encoding="utf-8") as out:
        while written < size_bytes:
            for file in files:
                lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
                turn = copy * 37 % max(len(lines), 1)
                text = f"# {file.name}, copy {copy}\n" + "".join(lines[turn:] + lines[:turn])
                written += out.write(json.dumps({"id": copy, "text": text}) + "\n")
                if written >= size_bytes:
                    break
            copy += 1


def measure(folder: Path, vocab: int, sample_bytes: int) -> dict[str, float]:
    import numpy as np

    from bessemer.data.prepare import prepare
    from bessemer.spec.schema import DataSpec, SourceSpec, TokenizerSpec

    data = DataSpec(sources={"corpus": SourceSpec(path=[str(folder / "corpus.jsonl")])}, validation=0.01)
    with PeakAnonymousMemory() as peak:
        start_s = time.perf_counter()
        prepared = prepare(
            data, TokenizerSpec(sample=sample_bytes), folder / "cache", vocab, seed=0,
            progress=lambda line: print(line, file=sys.stderr),
        )  # fmt: skip
        prepare_s = time.perf_counter() - start_s
        store = prepared.train["corpus"]
        starts = np.random.default_rng(0).integers(0, store.tokens - TOKENS, (GATHERS, ROWS))
        start_s = time.perf_counter()
        for row in starts:
            store.gather(row, TOKENS)
            store.document_of(row)
        gather_s = time.perf_counter() - start_s
    stores = [store, *prepared.validation.values()]
    return {
        "peak_mb": peak.bytes / 1e6,
        "prepare_s": prepare_s,
        "documents": sum(store.documents for store in stores),
        "tokens": sum(store.tokens for store in stores),
        "text_mb": sum(store.text_bytes for store in stores) / 1e6,
        "gather_tokens_per_s": starts.size * TOKENS / gather_s,
    }


class PeakAnonymousMemory:
    """The highest RssAnon seen by a thread that looks every 10 ms."""

    def __enter__(self) -> PeakAnonymousMemory:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            status = Path("/proc/self/status").read_text()
            found = re.search(r"RssAnon:\s+(\d+) kB", status)
            assert found, "this system does not report RssAnon"
            self.bytes = max(self.bytes, int(found[1]) * 1024)


if __name__ == "__main__":
    main()
