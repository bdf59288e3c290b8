"""Does the data path's memory grow with the corpus? Curates and tokenizes corpora of several sizes, reads at random.

    python benchmarks/data_memory.py --sizes 10MB,100MB,1GB
    python benchmarks/data_memory.py --sizes 1GB,3GB,10GB --clean --workers 2

Each size runs in a fresh process; the peak is of that process and its workers together. RssAnon is what counts: memory
of our own, without the pages of mapped files, which the system can drop at any time. The corpus is JSONL of about 4 KB
a document, made of lines of prose drawn from the Python library, one document in ten being an edited copy of
an earlier one. `--clean` filters and deduplicates (and leaves out the tokens); without it the corpus is tokenized.
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

import psutil

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
GATHERS = 2_000
ROWS, TOKENS = 16, 1025


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="10MB,100MB", help="corpus sizes, such as 10MB,100MB,1GB")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--sample", default="4MB", help="text to train the tokenizer on")
    parser.add_argument("--clean", action="store_true", help="filter and deduplicate instead of tokenizing")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", help="a JSON file for the results")
    parser.add_argument("--folder", help="where to work (default: a temporary folder)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        task = curate if arguments.clean else tokenize
        print(json.dumps(task(Path(arguments.child), arguments)))
        return
    results = []
    for size in arguments.sizes.split(","):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            write_corpus(Path(folder) / "corpus.jsonl", size_of(size))
            command = [sys.executable, __file__, "--child", folder, *sys.argv[1:]]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        results.append({"corpus": size, **found})
        print(json.dumps(results[-1]), flush=True)
    if arguments.out:
        about = {
            "date": time.strftime("%Y-%m-%d"),
            "command": "python " + " ".join(sys.argv),
            "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip(),
            "hardware": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "results": results,
        }  # fmt: skip
        Path(arguments.out).write_text(json.dumps(about, indent=1) + "\n")


def size_of(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]B)", text.strip().upper())
    if not match:
        raise SystemExit(f"size {text!r} should look like 100MB")
    return int(match[1]) * UNITS[match[2]]


def write_corpus(path: Path, size_bytes: int) -> None:
    library = Path(os.__file__).parent
    files = sorted(file for file in library.rglob("*.py") if "site-packages" not in file.parts)
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    lines = [line.strip() for text in texts for line in text.splitlines() if _is_prose(line)]
    draw = random.Random(0)
    recent: list[list[str]] = []
    written = number = 0
    with path.open("w", encoding="utf-8") as out:
        while written < size_bytes:
            if recent and draw.random() < 0.1:
                document = list(draw.choice(recent))
                document[draw.randrange(len(document))] = draw.choice(lines)
            else:
                document = draw.choices(lines, k=draw.randrange(20, 160))
            recent = [*recent[-99:], document]
            number += 1
            written += out.write(json.dumps({"id": str(number), "text": "\n".join(document)}) + "\n")


def _is_prose(line: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in line)
    return len(line.split()) >= 6 and letters > 0.9 * len(line)


def curate(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    from bessemer.data.curate.corpus import Corpus
    from bessemer.data.curate.engine import Meter, make_engine
    from bessemer.data.curate.passes import ValidationSplit
    from bessemer.data.read import list_files
    from bessemer.spec.data import DataSpec

    steps = ["whitespace", {"length": {"min_chars": 100}}, {"dedup_minhash": {"preset": "fineweb"}}]
    filters = ["gopher_quality", {"c4": {"line_end_punctuation": False}}, "fineweb"]
    sources = {"corpus": {"path": str(folder / "corpus.jsonl"), "id_field": "id"}}
    data = DataSpec.model_validate({"sources": sources, "clean": [*steps, *filters]})
    files = {name: list_files(source) for name, source in data.sources.items()}
    with PeakAnonymousMemory() as peak:
        start_s = time.perf_counter()
        engine = make_engine("local", arguments.workers)
        corpus = Corpus(data, files, folder / "cache", engine, Meter(lambda line: print(line, file=sys.stderr)))
        corpus.curate(ValidationSplit(0, 0.01))
        engine.close()
        seconds = time.perf_counter() - start_s
    stages = {
        stage.step: [tally.documents_in, tally.documents_out]
        for stage in corpus.stages
        for tally in stage.counts_by_source.values()
    }
    size = sum(state.reading.text_bytes for state in corpus.parts if state.reading)
    cache = sum(path.stat().st_size for path in (folder / "cache").rglob("*") if path.is_file())
    return {
        "peak_rss_anon_mb": round(peak.bytes / 1e6), "largest_process_mb": round(peak.largest / 1e6),
        "seconds": round(seconds, 1), "mb_per_s": round(size / 1e6 / seconds, 2), "documents": stages,
        "cache_mb": round(cache / 1e6),
    }  # fmt: skip


def tokenize(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    import numpy as np

    from bessemer.data.curate.engine import make_engine
    from bessemer.data.prepare import prepare
    from bessemer.spec.data import DataSpec, SourceSpec, TokenizerSpec

    data = DataSpec(sources={"corpus": SourceSpec(path=[str(folder / "corpus.jsonl")])}, validation=0.01)
    with PeakAnonymousMemory() as peak:
        start_s = time.perf_counter()
        engine = make_engine("local", arguments.workers)
        prepared = prepare(
            data, TokenizerSpec(sample=size_of(arguments.sample)), folder / "cache", arguments.vocab, seed=0,
            progress=lambda line: print(line, file=sys.stderr), engine=engine,
        )  # fmt: skip
        engine.close()
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
        "peak_rss_anon_mb": round(peak.bytes / 1e6), "largest_process_mb": round(peak.largest / 1e6),
        "seconds": round(prepare_s, 1),
        "mb_per_s": round(sum(store.text_bytes for store in stores) / 1e6 / prepare_s, 2),
        "documents": sum(store.documents for store in stores),
        "tokens": sum(store.tokens for store in stores),
        "gather_tokens_per_s": round(starts.size * TOKENS / gather_s),
    }  # fmt: skip


class PeakAnonymousMemory:
    """The highest RssAnon of this process and its children together, looked at every 20 ms; and of any one of them."""

    def __enter__(self) -> PeakAnonymousMemory:
        self.bytes = self.largest = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._stop.wait(0.02):
            sizes = [_anonymous(process.pid) for process in [me, *me.children(recursive=True)]]
            self.bytes, self.largest = max(self.bytes, sum(sizes)), max(self.largest, *sizes)


def _anonymous(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has just ended
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    main()
