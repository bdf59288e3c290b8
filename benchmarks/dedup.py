"""Deduplication: documents/s of ours and of others on one core, and whether its memory grows with the corpus.

Signatures with FineWeb's settings (5 words, 112 hashes) of the same real documents, each in a fresh process with one
thread: ours, datatrove, datasketch and rensa. The last two hash shingles that the caller makes; making them is counted,
as everyone has to, and also told apart. Then the stages after the signatures, on made-up keys with 30 % duplicates, for
as many documents as 1, 3 and 10 GB of text have: seconds, documents/s and peak RssAnon. Others are measured where they
are installed. The documents are the Python library's source and docs cut to about 3.6 KB, or a JSONL file's `text`.

    python benchmarks/dedup.py [--corpus web.jsonl] [--documents 5000] [--sizes 250K,750K,2.5M]
        [--write benchmarks/results/DATE-dedup.json]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

DOCUMENT_CHARS = 3600
SLOW = {"datatrove": 10, "datasketch": 4, "rensa": 2}  # measured on one in so many documents
PART_DOCUMENTS = 18_000  # about 64 MB of text
BANDS, ROWS, NGRAM = 14, 8, 5
BATCH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", help="JSONL with the documents in `text`")
    parser.add_argument("--documents", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="250K,750K,2.5M", help="documents for the later stages")
    parser.add_argument("--folder", help="where to work (default: a temporary folder)")
    parser.add_argument("--write", help="JSON file for the results")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, value = arguments.child
        print(json.dumps(stages(int(value), arguments.folder) if kind == "stages" else MEASURED[kind](Path(value))))
        return
    found: dict[str, Any] = {"machine": machine(), "command": " ".join(["python", *sys.argv])}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        texts = list(documents(arguments.corpus, arguments.documents))
        path = Path(folder) / "documents.json"
        path.write_text(json.dumps(texts))
        found["documents"] = {"number": len(texts), "mean_chars": statistics.mean(map(len, texts))}
        found["steps"] = {name: rounds(name, str(path), arguments) for name in MEASURED if available(name)}
        found["stages"] = [rounds("stages", str(size_of(size)), arguments) for size in arguments.sizes.split(",")]
    print(json.dumps(found, indent=1))
    if arguments.write:
        Path(arguments.write).write_text(json.dumps(found, indent=1) + "\n")


def size_of(text: str) -> int:
    return round(float(text.rstrip("KM")) * {"K": 1e3, "M": 1e6}.get(text[-1], 1))


def rounds(kind: str, value: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians over fresh processes with one thread each."""
    command = [sys.executable, __file__, "--child", kind, value]
    command += ["--folder", arguments.folder] if arguments.folder else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    made = []
    for _ in range(arguments.rounds):
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
        made.append(json.loads(out.splitlines()[-1]))
    print(f"{kind} {value}: {made}", file=sys.stderr, flush=True)
    return {name: statistics.median(one[name] for one in made) for name in made[0]}


def available(name: str) -> bool:
    package = name.split()[0]
    return package in ("ours", "simhash", "exact", "paragraphs", "substrings") or bool(
        importlib.util.find_spec(package)
    )


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    peers = {name: importlib.metadata.version(name) for name in ("numpy", *SLOW) if importlib.util.find_spec(name)}
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit, "cpu": cpu, "cores": os.cpu_count(), **peers}


def documents(corpus: str | None, count: int) -> Iterator[str]:
    if corpus:
        with open(corpus, encoding="utf-8") as file:
            for _, line in zip(range(count), file, strict=False):
                yield json.loads(line)["text"]
        return
    roots = [Path(os.__file__).parent, Path("/usr/share/doc")]
    files = [path for root in roots for pattern in ("*.py", "*.txt", "*.html") for path in root.rglob(pattern)]
    random.Random(0).shuffle(files)
    made = 0
    for path in files:
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for at in range(0, len(text) - DOCUMENT_CHARS + 1, DOCUMENT_CHARS):
            yield text[at : at + DOCUMENT_CHARS]
            made += 1
            if made == count:
                return


def rate(texts: Sequence[str], work: Callable[[Sequence[str]], Any], every: int = 1) -> dict[str, float]:
    """Documents/s of work on batches, after one to warm up."""
    texts = texts[::every]
    work(texts[:BATCH])
    start_s = time.perf_counter()
    for at in range(0, len(texts), BATCH):
        work(texts[at : at + BATCH])
    wall_s = time.perf_counter() - start_s
    return {"documents_per_s": len(texts) / wall_s, "mb_per_s": sum(map(len, texts)) / wall_s / 1e6}


def ours(path: Path) -> dict[str, float]:
    from bessemer.data.curate.dedup.near import Signer, band_keys, shingles

    texts = json.loads(path.read_text())
    signer = Signer("word", NGRAM, BANDS * ROWS, seed=1)
    made = rate(texts, lambda some: band_keys(signer.sign(some)[0], BANDS, ROWS))
    alone = rate(texts, lambda some: list(shingles(some, "word", NGRAM)))
    return {**made, "shingles_only_per_s": alone["documents_per_s"]}


def our_step(name: str) -> Callable[[Path], dict[str, float]]:
    def measure(path: Path) -> dict[str, float]:
        import numpy as np

        from bessemer.data.curate.step import is_global, make_step
        from bessemer.data.read.entry import Document
        from bessemer.spec.data import STEPS

        step = make_step(STEPS[f"dedup_{name}"](), 0)
        assert is_global(step)

        def collect(some: Sequence[str]) -> None:
            docs = [Document(text, "a.jsonl", row) for row, text in enumerate(some, 1)]
            step.collect(docs, np.arange(len(docs)))

        return rate(json.loads(path.read_text()), collect)

    return measure


def curator_settings(path: Path) -> dict[str, float]:
    from bessemer.data.curate.dedup.near import Signer, band_keys

    signer = Signer("char", 24, 20 * 13, seed=1)
    return rate(json.loads(path.read_text()), lambda some: band_keys(signer.sign(some)[0], 20, 13), every=4)


def datatrove(path: Path) -> dict[str, float]:
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
    from datatrove.utils.hashing import HashConfig

    # FineWeb's: 5 words, 14 x 8 by default, and SHA-1 (its default, xxhash, fails with xxhash 4).
    config = MinhashConfig(hash_config=HashConfig(precision=64, hash_fc="sha1"))
    with tempfile.TemporaryDirectory() as folder:
        step = MinhashDedupSignature(folder, config)
        sign = lambda some: [step.get_signature(step.get_shingles(text)) for text in some]  # noqa: E731
        return rate(json.loads(path.read_text()), sign, SLOW["datatrove"])


def plain_shingles(text: str) -> list[str]:
    words = text.lower().split()
    return [" ".join(words[i : i + NGRAM]) for i in range(max(len(words) - NGRAM + 1, 1))]


def datasketch(path: Path) -> dict[str, float]:
    from datasketch import MinHash

    def sign(some: Sequence[str]) -> None:
        for text in some:
            MinHash(num_perm=BANDS * ROWS).update_batch([one.encode() for one in plain_shingles(text)])

    return with_shingles(json.loads(path.read_text()), sign, SLOW["datasketch"])


def rensa(path: Path) -> dict[str, float]:
    from rensa import RMinHash

    def sign(some: Sequence[str]) -> None:
        for text in some:
            sketch = RMinHash(num_perm=BANDS * ROWS, seed=1)
            sketch.update(plain_shingles(text))
            sketch.digest()

    return with_shingles(json.loads(path.read_text()), sign, SLOW["rensa"])


def with_shingles(texts: Sequence[str], sign: Callable[[Sequence[str]], None], every: int) -> dict[str, float]:
    alone = rate(texts, lambda some: [plain_shingles(text) for text in some], every)
    return {**rate(texts, sign, every), "shingles_only_per_s": alone["documents_per_s"]}


MEASURED: dict[str, Callable[[Path], dict[str, float]]] = {
    "ours": ours,
    "ours curator": curator_settings,
    "exact": our_step("exact"),
    "simhash": our_step("simhash"),
    "paragraphs": our_step("paragraphs"),
    "substrings": our_step("substrings"),
    "datatrove": datatrove,
    "datasketch": datasketch,
    "rensa": rensa,
}


def stages(count: int, folder: str | None) -> dict[str, float]:
    """Grouping, clusters and rulings of so many documents' keys, in one process."""
    from data_memory import PeakAnonymousMemory

    from bessemer.data.curate.dedup.near import DedupMinhash
    from bessemer.spec.curate.dedup import DedupMinhashSpec

    seconds: dict[str, float] = {}

    def each(function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
        start_s = time.perf_counter()
        results = [function(task) for task in tasks]
        seconds[f"{function.__name__}_s"] = time.perf_counter() - start_s
        return results

    with tempfile.TemporaryDirectory(dir=folder) as name:
        collected = made_up_keys(count, Path(name))
        (Path(name) / "scratch").mkdir()
        with PeakAnonymousMemory() as peak:
            start_s = time.perf_counter()
            rulings, summary = DedupMinhash(DedupMinhashSpec(), 0).resolve(collected, Path(name) / "scratch", each)
            dropped = sum(ruling["ordinal"].size for ruling in rulings)
            wall_s = time.perf_counter() - start_s
        assert dropped == summary["duplicates"]
    rest_s = wall_s - sum(seconds.values())
    return {
        "documents": count, "duplicates": dropped, **seconds, "clusters_and_rulings_s": rest_s, "resolve_s": wall_s,
        "documents_per_s": count / wall_s, "peak_rss_anon_mb": peak.bytes / 1e6,
    }  # fmt: skip


def made_up_keys(count: int, folder: Path) -> list[Any]:
    """What a corpus with 30 % duplicates would have collected, part by part."""
    import numpy as np

    from bessemer.data.curate.dedup.shuffle import note_places
    from bessemer.data.curate.step import Collected
    from bessemer.data.read.entry import Document
    from bessemer.data.stream.order import mix

    draw = np.random.default_rng(0)
    parts = []
    for part, first in enumerate(range(0, count, PART_DOCUMENTS)):
        number = np.arange(first, min(first + PART_DOCUMENTS, count))
        copied = (draw.random(number.size) < 0.3) & (number > 0)
        of = np.where(copied, draw.integers(0, np.maximum(number, 1)), number)
        keys = mix(mix(of)[:, None] + np.arange(BANDS, dtype=np.uint64))
        ordinals = number - first
        places = note_places([Document("", "a.jsonl", i + 1) for i in number.tolist()], ordinals)
        path = folder / f"{part}.npz"
        with open(path, "wb") as file:
            np.savez(file, ordinal=ordinals, key=keys, **places)
        parts.append(Collected(part, path, "made up", number.size))
    return parts


if __name__ == "__main__":
    main()
