"""A small corpus with something for every step to do: two sources, several files, plain and compressed."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from bessemer.spec.data import DataSpec

TEXT = (
    "the of and to in that is was he for it with as his on be at by had not are but from or have an they which one "
    "you were her all she there would their we him been has when who will more no if out so said what up its about "
    "into than them can only other new some could time these two may then do first any my now such like our over man"
)
WORDS = TEXT.split()


def sentence(draw: random.Random) -> str:
    words = [draw.choice(WORDS) for _ in range(draw.randrange(6, 18))]
    return " ".join(words).capitalize() + "."


def text(draw: random.Random) -> str:
    lines = [" ".join(sentence(draw) for _ in range(draw.randrange(1, 5))) for _ in range(draw.randrange(2, 12))]
    return ("  \n" if draw.random() < 0.2 else "\n").join(lines)


def make_corpus(folder: Path, documents: int = 400, seed: int = 5) -> DataSpec:
    """`web` is JSONL in four files, one of them gzipped, with exact copies; `notes` is text files."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    texts: list[str] = []
    for number in range(4):
        lines = []
        for row in range(documents // 4):
            copied = texts and draw.random() < 0.1
            texts.append(draw.choice(texts) if copied else text(draw))
            record = {"text": texts[-1], "id": f"doc-{number}-{row}", "url": f"https://example.org/{number}/{row}"}
            lines.append(json.dumps(record))
        raw = ("\n".join(lines) + "\n").encode()
        if number == 3:
            (folder / "web-3.jsonl.gz").write_bytes(gzip.compress(raw, mtime=0))
        else:
            (folder / f"web-{number}.jsonl").write_bytes(raw)
    (folder / "notes").mkdir(exist_ok=True)
    for number in range(20):
        (folder / "notes" / f"{number:02d}.txt").write_text(text(draw))
    return DataSpec.model_validate(
        {
            "sources": {
                "web": {"path": [str(folder / "web-*.jsonl*")], "id_field": "id", "url_field": "url"},
                "notes": {"path": [str(folder / "notes")], "clean": [{"length": {"min_chars": 200}}]},
            },
            "clean": ["whitespace", {"length": {"min_chars": 300}}, "dedup_exact"],
            "validation": 0.05,
        }
    )


@pytest.fixture
def corpus_spec(tmp_path: Path) -> DataSpec:
    return make_corpus(tmp_path / "corpus")
