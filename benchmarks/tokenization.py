"""Text to a token store on disk against the bare encode_batch of Hugging Face tokenizers, which keeps nothing.

Both get the same documents and tokenizer and all cores. Ours encodes, makes arrays, hashes and writes the store. It is
measured with tiktoken (where the tokenizer can be run by it) and without. Each round is a fresh process; rounds
alternate; medians are compared. The goal is 0.9 of the bare library's speed without tiktoken.

    python benchmarks/tokenization.py [--rounds 5] [--size 30MB] [--kinds bpe,unigram]
        [--write benchmarks/results/DATE-tokenization.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
GOAL = 0.9
WAYS = ("raw", "raw_fast", "ours", "ours_without_tiktoken")


def read_corpus(size_bytes: int) -> list[str]:
    """Source files of the Python library, over and over, with their lines in another order each time."""
    library = Path(os.__file__).parent
    files = sorted(file for file in library.rglob("*.py") if "site-packages" not in file.parts)
    random.Random(0).shuffle(files)
    texts, read, copy = [], 0, 0
    while read < size_bytes:
        for file in files:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            turn = copy * 37 % max(len(lines), 1)
            texts.append("".join(lines[turn:] + lines[:turn]))
            read += len(texts[-1].encode())
            if read >= size_bytes:
                break
        copy += 1
    return texts


def measure(way: str, tokenizer_file: Path, size_bytes: int, threads: int) -> float:
    """Bytes of text per second. Loading and the first use of every thread are not counted."""
    from bessemer.data.read.entry import Document
    from bessemer.data.store.writer import StoreWriter
    from bessemer.data.tokenizer.encode import encode_documents
    from bessemer.data.tokenizer.tokenizer import Tokenizer

    texts = read_corpus(size_bytes)
    total = sum(len(text.encode()) for text in texts)
    tokenizer = Tokenizer.load(tokenizer_file)
    if way == "ours_without_tiktoken":
        tokenizer.__dict__["fast"] = None
    if way.startswith("raw"):
        encode = tokenizer.inner.encode_batch_fast if way == "raw_fast" else tokenizer.inner.encode_batch
        encode(texts[:50], add_special_tokens=False)
        start_s = time.perf_counter()
        for first in range(0, len(texts), 1000):  # all at once would take 50 times the memory of the text
            encode(texts[first : first + 1000], add_special_tokens=False)
        return total / (time.perf_counter() - start_s)
    documents = [Document(text, "corpus", row) for row, text in enumerate(texts, start=1)]
    for _ in encode_documents(documents[:50], tokenizer, threads):
        pass
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.perf_counter()
        with StoreWriter(Path(folder) / "tokens", tokenizer.vocab_size, tokenizer.fingerprint) as writer:
            for document, ids, _ in encode_documents(documents, tokenizer, threads):
                text_bytes = len(document.text.encode())
                writer.add(ids, document.file, document.row, text_hash=0, text_bytes=text_bytes)
        return total / (time.perf_counter() - start_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", default="30MB")
    parser.add_argument("--kinds", default="bpe,unigram")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    match = re.fullmatch(r"(\d+)([KMG]B)", options.size.upper())
    if not match:
        raise SystemExit(f"size {options.size!r} should look like 30MB")
    size_bytes = int(match[1]) * UNITS[match[2]]
    if options.child:
        way, file = options.child
        print(json.dumps(measure(way, Path(file), size_bytes, options.threads)))
        return
    result = {"machine": describe(options.threads), "command": "python " + " ".join(sys.argv), "kinds": {}}
    for kind in options.kinds.split(","):
        result["kinds"][kind] = compare(kind, options, size_bytes)
    if options.write:
        options.write.write_text(json.dumps(result, indent=1) + "\n")


def compare(kind: str, options: argparse.Namespace, size_bytes: int) -> dict[str, object]:
    from bessemer.data.tokenizer.tokenizer import Tokenizer

    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        Tokenizer.train(read_corpus(2_000_000), options.vocab, kind=kind).save(file)
        for _ in range(options.rounds):
            for way in WAYS:
                command = [sys.executable, __file__, "--size", options.size, "--threads", str(options.threads)]
                environment = {**os.environ, "RAYON_NUM_THREADS": str(options.threads)}
                found = subprocess.run(
                    [*command, "--child", way, str(file)],
                    check=True,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
                speeds[way].append(json.loads(found.stdout) / 1e6)
    medians = {way: statistics.median(values) for way, values in speeds.items()}
    ratio = medians["ours_without_tiktoken"] / medians["raw"]
    print(f"{kind}: " + ", ".join(f"{way} {value:.2f} MB/s" for way, value in medians.items()))
    print(f"  without tiktoken {ratio:.2f} of encode_batch ({'met' if ratio >= GOAL else 'below the goal of'} {GOAL})")
    return {
        "mb_per_s": speeds,
        "ratio_of_medians": {way: medians[way] / medians["raw"] for way in WAYS},
        "goal_without_tiktoken": GOAL,
    }


def describe(threads: int) -> dict[str, object]:
    import tokenizers

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "tokenizers": tokenizers.__version__,
    }


if __name__ == "__main__":
    main()
