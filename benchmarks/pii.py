"""How fast is the search for personal data on one core, and how often is a find on real text a false one?

    python benchmarks/pii.py [FOLDER ...] [--show 20]

Without folders: prose is the manual that Python's `help` prints, code is the standard library. Processor time, best of
three runs, in one process. `--show` prints finds with the text around them, drawn at random, for a person to judge;
mind that on your own folders these are real people's data.
"""

from __future__ import annotations

import argparse
import gzip
import os
import platform
import random
import time
from pathlib import Path

from bessemer.data.curate.filters.pii import find_pii
from bessemer.spec.curate.dedup import PII_KINDS, PiiKind

LARGEST_BYTES = 32_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--show", type=int, default=0, help="finds of each kind to print")
    arguments = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, one process\n")
    corpora = {str(folder): read(folder) for folder in arguments.folders}
    for name, texts in (corpora or {"prose": manual(), "code": read(library())}).items():
        report(name, texts, arguments.show)


def library() -> Path:
    return Path(os.__file__).parent


def manual() -> list[str]:
    from pydoc_data import topics

    return list(topics.topics.values())


def read(folder: Path) -> list[str]:
    """The text files of a folder in a random order that is always the same, up to 32 MB."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "site-packages" not in path.parts)
    random.Random(0).shuffle(files)
    texts, size = [], 0
    for path in files:
        try:
            data = path.read_bytes()
            text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
        except (UnicodeDecodeError, OSError, EOFError):
            continue
        if "\0" not in text:
            texts.append(text)
            size += len(text)
        if size > LARGEST_BYTES:
            break
    return texts


def report(name: str, texts: list[str], show: int) -> None:
    size_mb = sum(len(text.encode()) for text in texts) / 1e6
    digits = sum(map(str.isdigit, "".join(texts))) / sum(map(len, texts))
    print(f"{name}: {len(texts):,} texts, {size_mb:.1f} MB, {digits:.1%} digits")
    for kinds in (PII_KINDS, *((kind,) for kind in PII_KINDS)):
        best_s = min(seconds(texts, kinds) for _ in range(3))
        found = sum(len(find_pii(text, kinds)) for text in texts)
        print(f"  {'all kinds' if len(kinds) > 1 else kinds[0]:12} {size_mb / best_s:8.1f} MB/s {found:8,} found")
    if show:
        samples(texts, show)


def seconds(texts: list[str], kinds: tuple[PiiKind, ...]) -> float:
    start_s = time.process_time()
    for text in texts:
        find_pii(text, kinds)
    return time.process_time() - start_s


def samples(texts: list[str], show: int) -> None:
    """Different values only: a maintainer's address in a thousand files is one find."""
    seen: dict[str, dict[str, str]] = {kind: {} for kind in PII_KINDS}
    for text in texts:
        for hit in find_pii(text, PII_KINDS):
            before, value, after = (
                text[max(0, hit.start - 50) : hit.start],
                text[hit.start : hit.end],
                text[hit.end : hit.end + 25],
            )
            around = f"{before}[[{value[:80]}]]{after}"
            seen[hit.kind].setdefault(hit.value, " ".join(around.split()))
    for kind, values in seen.items():
        print(f"\n{kind}: {len(values):,} different")
        for around in random.Random(0).sample(list(values.values()), min(show, len(values))):
            print("   ", around)


if __name__ == "__main__":
    main()
