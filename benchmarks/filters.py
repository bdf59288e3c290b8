"""Documents/s and MB/s on one core of Gopher's, C4's and FineWeb's filters: ours, and datatrove's on the same.

    python benchmarks/filters.py --datatrove PYTHON [--write benchmarks/results/DATE-filters.json]

PYTHON is an interpreter that has datatrove and spacy (they need not be in ours); without it only ours is measured.
Every measurement is a fresh process with one thread. Documents come in batches through the steps as in `bessemer data`.
A rate is over the second half of the documents, which the process has not seen before; `from_cold` is over all. Time is
the process's own CPU time, so that other work on the machine disturbs less; on an idle one it is the time on the clock.
`chain` is FineWeb's order, each step getting what the one before kept; `all four` gives every document to every step.
The documents are pages of documentation found on this machine, or the rows of --jsonl.
"""

from __future__ import annotations

import argparse
import gzip
import html
import inspect
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

FILTERS = ("gopher_repetition", "gopher_quality", "c4", "fineweb")
MEASURED = (*FILTERS, "all four", "chain")
BATCH = 500
GOAL = 20  # times datatrove
SUFFIXES = (".md", ".rst", ".txt", ".py", ".gz", ".html")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datatrove", help="a Python that has datatrove and spacy")
    parser.add_argument("--documents", type=int, default=6000)
    parser.add_argument("--slow-documents", type=int, default=600, help="how many of them datatrove gets")
    parser.add_argument("--chars", type=int, default=3600, help="mean size of a document")
    parser.add_argument("--jsonl", type=Path, help="rows with a text field, instead of what is found here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, help="also write the result to this JSON file")
    parser.add_argument("--child", nargs=3, metavar=("SIDE", "FILTER", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        side, name, file = options.child
        texts = [json.loads(line)["text"] for line in Path(file).read_text(encoding="utf-8").splitlines()]
        print(json.dumps(measure(SIDES[side](name), texts)))
        return
    texts = rows(options.jsonl) if options.jsonl else pages(options.documents, options.chars)
    texts = texts[: options.documents]
    mean = sum(map(len, texts)) / len(texts)
    print(f"{len(texts):,} documents of {mean:,.0f} characters; datatrove gets {options.slow_documents:,} of them\n")
    print(f"{'filter':18} {'ours docs/s':>12} {'MB/s':>7} {'datatrove':>10} {'times':>7}")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        everything = write(Path(folder) / "all.jsonl", texts)
        some = write(Path(folder) / "some.jsonl", texts[: options.slow_documents])
        for name in MEASURED:
            found = {"ours": rounds(options.rounds, sys.executable, "ours", name, everything)}
            if options.datatrove:
                found["datatrove"] = rounds(1, options.datatrove, "datatrove", name, some)
                found["times"] = found["ours"]["documents_per_s"] / found["datatrove"]["documents_per_s"]
            results[name] = found
            ours, peer = found["ours"], found.get("datatrove", {}).get("documents_per_s", float("nan"))
            rate = ours["documents_per_s"]
            print(f"{name:18} {rate:12,.0f} {ours['mb_per_s']:7.1f} {peer:10,.1f} {rate / peer:7.1f}", flush=True)
    if options.write:
        record = {
            "machine": machine(options.datatrove),
            "command": " ".join(["python", *sys.argv]),
            "documents": {
                "number": len(texts),
                "mean_chars": mean,
                "given_to_datatrove": options.slow_documents if options.datatrove else 0,
            },
            "goal_times_datatrove": GOAL,
            "results": results,
        }
        options.write.write_text(json.dumps(record, indent=1) + "\n")


Judge = Callable[[list[str]], int]  # how many of a batch's documents stay


def ours(name: str) -> Judge:
    from bessemer.data.curate.step import Drop, make_step
    from bessemer.data.read.entry import Document
    from bessemer.spec.data import STEPS

    settings: dict[str, dict[str, Any]] = {"c4": {"line_end_punctuation": False}}
    steps = [make_step(STEPS[step](**settings.get(step, {})), seed=0) for step in chosen(name)]

    def judge(texts: list[str]) -> int:
        documents = [Document(text, "benchmark", i) for i, text in enumerate(texts)]
        for step in steps:
            outcomes = step.apply(documents)
            if name == "chain":
                pairs = zip(documents, outcomes, strict=True)
                documents = [
                    Document(outcome, document.file, document.row) if isinstance(outcome, str) else document
                    for document, outcome in pairs
                    if not isinstance(outcome, Drop)
                ]
        return len(documents) if name == "chain" else sum(not isinstance(outcome, Drop) for outcome in outcomes)

    return judge


def datatrove(name: str) -> Judge:
    from datatrove.data import Document
    from datatrove.pipeline import filters

    made = {
        "gopher_repetition": filters.GopherRepetitionFilter,
        "gopher_quality": filters.GopherQualityFilter,
        "c4": lambda: filters.C4QualityFilter(filter_no_terminal_punct=False),
        "fineweb": filters.FineWebQualityFilter,
    }
    steps = [made[step]() for step in chosen(name)]

    def judge(texts: list[str]) -> int:
        stay = 0
        for text in texts:
            document = Document(text=text, id="benchmark")
            for step in steps:
                stays = step.filter(document) is True
                if name == "chain" and not stays:
                    break
                if name != "chain":
                    document = Document(text=text, id="benchmark")
            stay += stays
        return stay

    return judge


SIDES: dict[str, Callable[[str], Judge]] = {"ours": ours, "datatrove": datatrove}


def chosen(name: str) -> tuple[str, ...]:
    return (name,) if name in FILTERS else FILTERS


def measure(judge: Judge, texts: list[str]) -> dict[str, float]:
    judge(["A first document loads what has to be loaded. " * 3])
    half = len(texts) // 2
    stay = 0
    marks = [time.process_time()]
    for part in (texts[:half], texts[half:]):
        for i in range(0, len(part), BATCH):
            stay += judge(part[i : i + BATCH])
        marks.append(time.process_time())
    later_s = marks[2] - marks[1]
    return {
        "documents_per_s": (len(texts) - half) / later_s,
        "mb_per_s": sum(len(text.encode()) for text in texts[half:]) / 1e6 / later_s,
        "from_cold_documents_per_s": len(texts) / (marks[2] - marks[0]),
        "kept": stay,
    }


def rounds(number: int, python: str, side: str, name: str, file: Path) -> dict[str, float]:
    """The median round, by documents/s."""
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    found = []
    for _ in range(number):
        command = [python, "-P", __file__, "--child", side, name, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads)
        if done.returncode:
            sys.exit(f"{side} {name} failed:\n{done.stdout}\n{done.stderr}")
        found.append(json.loads(done.stdout.strip().splitlines()[-1]))
    rate = statistics.median_low(entry["documents_per_s"] for entry in found)
    return next(entry for entry in found if entry["documents_per_s"] == rate)


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def rows(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def pages(number: int, chars: int) -> list[str]:
    """Pages of about `chars` characters, cut at ends of lines; which ones depends on the names of the files only."""
    found: list[str] = []
    places = [*(Path(sysconfig.get_paths()[key]) for key in ("stdlib", "purelib")), Path("/usr/share/doc")]
    for left, place in enumerate(places, start=-len(places)):
        files = sorted(file for file in place.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        random.Random(place.name).shuffle(files)
        fresh = (page for file in files for page in islice(cut(read(file), chars), 4))
        found += islice(fresh, (number - len(found)) // -left)
    random.Random(0).shuffle(found)
    return found


def read(file: Path) -> str:
    """The prose in a file: all of it, without tags if it has them; of source code what is between triple quotes."""
    try:
        text = (gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()).decode()
    except (OSError, EOFError, UnicodeDecodeError):
        return ""
    if "\0" in text or len(text) > 4 * 10**6 or ".json" in file.suffixes:
        return ""
    if file.suffix == ".py":
        return "\n\n".join(inspect.cleandoc(found) for found in re.findall(r'"""(.*?)"""', text, re.DOTALL))
    return html.unescape(re.sub(r"<[^>]{0,1000}>", "", text)) if file.suffix == ".html" else text


def cut(text: str, chars: int) -> Iterator[str]:
    start = 0
    while len(text) - start > chars // 2:
        end = text.find("\n", start + chars - 40)
        end = len(text) if end < 0 else end
        if text[start:end].strip() and end - start < 2 * chars:
            yield text[start:end]
        start = end + 1


def machine(peer: str | None) -> dict[str, object]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    versions = "from importlib.metadata import version as v; print(v('datatrove'), v('spacy'))"
    asked = subprocess.run([peer, "-c", versions], capture_output=True, text=True).stdout.split() if peer else []
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "threads": 1,
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "datatrove": asked[0] if asked else None,
        "spacy": asked[1] if asked else None,
    }


if __name__ == "__main__":
    main()
