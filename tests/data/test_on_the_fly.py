"""Data that is only indexed: which documents each side has, and what the tokenizer is trained on.

Runs over it are in tests/supervise/test_feed.py, its rows in test_lazy.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bessemer.data.curate.ledger import text_hash
from bessemer.data.lazy_index import Index
from bessemer.data.on_the_fly import Indexed, index_sources
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.spec.data import DataSpec, TokenizerSpec

TEXTS = [f"Heat {i} of the day: " + "the converter roars. " * (i % 9 + 1) for i in range(200)]


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def index(cache: Path, validation: float = 0.2, spec: TokenizerSpec | None = None, **sources: Path) -> Indexed:
    data = DataSpec.model_validate(
        {
            "sources": {name: str(path) for name, path in sources.items()},
            "validation": validation,
            "tokenize": "on_the_fly",
        }
    )
    return index_sources(data, spec or TokenizerSpec(), cache, 300, 0)


def documents(index: Index) -> list[str]:
    """Those of the index's own side, in order."""
    found = []
    starts = [*index.stretches["document"].tolist(), index.documents]
    for stretch in range(index.stretches["text"].size):
        own = set(index.ordinal[starts[stretch] : starts[stretch + 1]].tolist())
        found += [document.text for k, document in enumerate(index.read(stretch)) if k in own]
    return found


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The texts that each training of a tokenizer was given."""
    train, seen = Tokenizer.train, []

    def spy(texts: Any, *rest: Any, **more: Any) -> Tokenizer:
        seen.append(list(texts))
        return train(seen[-1], *rest, **more)

    monkeypatch.setattr(Tokenizer, "train", spy)
    return seen


def test_the_sides_are_those_of_the_hash_and_make_the_whole(tmp_path: Path) -> None:
    found = index(tmp_path / "cache", web=write(tmp_path / "a.jsonl", TEXTS))
    held_out = [text for text in TEXTS if text_hash(text, 0) < int(0.2 * 2**64)]
    assert 20 < len(held_out) < 60
    assert documents(found.validation["web"]) == held_out
    assert documents(found.train["web"]) == [text for text in TEXTS if text not in held_out]


def test_held_out_text_does_not_train_the_tokenizer(tmp_path: Path, sampled: list[list[str]]) -> None:
    found = index(tmp_path / "cache", web=write(tmp_path / "a.jsonl", TEXTS))
    assert sampled == [documents(found.train["web"])]


def test_without_validation_there_is_one_side(tmp_path: Path) -> None:
    found = index(tmp_path / "cache", 0, web=write(tmp_path / "a.jsonl", TEXTS))
    assert found.validation == {} and documents(found.train["web"]) == TEXTS


def test_a_second_call_reads_and_trains_nothing(
    tmp_path: Path, sampled: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    first = index(tmp_path / "cache", web=path)
    monkeypatch.setattr("bessemer.data.lazy_index.read_part", lambda *rest: pytest.fail("read again"))
    second = index(tmp_path / "cache", web=path)
    assert len(sampled) == 1
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert second.train["web"].fingerprint == first.train["web"].fingerprint


def test_another_tokenizer_or_other_text_is_trained_anew(tmp_path: Path, sampled: list[list[str]]) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    folders = {index(tmp_path / "cache", web=path).folder}
    folders.add(index(tmp_path / "cache", spec=TokenizerSpec(eos="</s>"), web=path).folder)
    folders.add(index(tmp_path / "cache", spec=TokenizerSpec(special=["<x>"]), web=path).folder)
    write(path, [text.upper() for text in TEXTS])
    folders.add(index(tmp_path / "cache", web=path).folder)
    assert len(folders) == len(sampled) == 4


def test_the_sample_is_bounded_spread_and_shared_by_size(tmp_path: Path, sampled: list[list[str]]) -> None:
    big = write(tmp_path / "big.jsonl", [f"big{i:04} " + "ä" * 500 for i in range(900)])  # 14 stretches of 64 kB
    small = write(tmp_path / "small.jsonl", [f"small{i:04} " + "x" * 1000 for i in range(100)])
    index(tmp_path / "cache", 0, TokenizerSpec(sample=300_000), big=big, small=small)
    [texts] = sampled
    sizes = {name: sum(len(t.encode()) for t in texts if t.startswith(name)) for name in ("big", "small")}
    assert 200_000 < sum(sizes.values()) <= 310_000
    assert sizes["big"] / sizes["small"] == pytest.approx(9, rel=0.5)
    rows = [int(text[3:7]) for text in texts if text.startswith("big")]
    assert min(rows) == 0 and max(rows) > 800


def test_a_given_tokenizer_is_used_and_a_source_without_files_is_named(tmp_path: Path) -> None:
    Tokenizer.train(TEXTS, 280, eos="</s>").save(tmp_path / "tokenizer.json")
    path = write(tmp_path / "a.jsonl", TEXTS)
    found = index(tmp_path / "cache", spec=TokenizerSpec(path=str(tmp_path / "tokenizer.json")), web=path)
    assert (found.tokenizer.eos, found.tokenizer.vocab_size) == ("</s>", 280)
    with pytest.raises(UserError, match=r"source 'web': .*none\.jsonl"):
        index(tmp_path / "cache", web=tmp_path / "none.jsonl")


def test_files_that_are_not_utf8_or_cannot_be_reached_are_warned_about(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for i in range(4):
        (data / f"{i}.txt").write_bytes(f"{i} été à la façade".encode("latin-1" if i else "utf-8"))
    (data / "gone.txt").symlink_to("/nowhere/gone.txt")
    made, cached = (index(tmp_path / "cache", notes=data) for _ in range(2))
    skipped, undecodable = made.notes
    assert f"{data}/gone.txt is a symbolic link to /nowhere/gone.txt" in skipped
    assert "3 documents are not valid UTF-8" in undecodable and "not UTF-8 (byte 2)" in undecodable
    assert cached.notes == made.notes
