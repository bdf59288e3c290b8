"""What a step wrote is read back as it was, and appears only when complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bessemer.data.curate.ledger import (
    DocumentChange,
    LedgerWriter,
    StepCounts,
    read_changes,
    read_counts,
    read_json,
    write_json,
)
from bessemer.data.curate.step import Drop
from bessemer.data.read.entry import Document
from bessemer.errors import UserError


def test_touches_come_back_in_order_over_many_batches(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path / "k")
    changes = [
        DocumentChange(n, n % 2 == 0, None if n % 2 == 0 else "é" * 3_000 + str(n), None, '{"a": 1}')
        for n in range(4000)
    ]
    for change in changes:
        writer.add(change)
    assert not (tmp_path / "k.json").exists()  # nothing is there before the commit
    writer.commit()
    assert list(read_changes(tmp_path / "k")) == changes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k.arrow", "k.json"]


def test_the_same_touches_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        writer = LedgerWriter(tmp_path / name / "k")
        writer.counts.dropped(Document("text", "f", 3), Drop("too short", 4.0), 4)
        for number in range(100):
            writer.add(DocumentChange(number, False, f"text {number}", None, None))
        writer.commit()
    for suffix in (".arrow", ".json"):
        assert (tmp_path / f"a/k{suffix}").read_bytes() == (tmp_path / f"b/k{suffix}").read_bytes()


def test_a_step_that_touched_nothing_has_only_its_counts(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path / "k")
    writer.counts.documents_in = 7
    writer.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["k.json"]
    assert list(read_changes(tmp_path / "k")) == []
    assert read_counts(tmp_path / "k").documents_in == 7


def test_discarding_leaves_nothing(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path / "k")
    for number in range(2000):
        writer.add(DocumentChange(number, False, "x" * 4000, None, None))
    writer.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "flipped", "deleted", "another's"])
def test_a_damaged_ledger_is_named(tmp_path: Path, damage: str) -> None:
    for name in ("k", "other"):
        writer = LedgerWriter(tmp_path / name)
        writer.counts.documents_in = 1
        writer.add(DocumentChange(len(name), True, None, None, None))
        writer.commit()
    path = tmp_path / "k.arrow"
    whole = path.read_bytes()
    path.write_bytes(
        {"cut": whole[:-20], "flipped": whole[:-1] + bytes([whole[-1] ^ 1]), "deleted": b""}.get(
            damage, (tmp_path / "other.arrow").read_bytes()
        )
    )
    if damage == "deleted":
        path.unlink()
    with pytest.raises(UserError, match=r"k\.arrow: (damaged|missing).*run again"):
        list(read_changes(tmp_path / "k"))


def test_a_ledger_of_an_earlier_version_is_read_and_missed(tmp_path: Path) -> None:
    """Its counts have no digest, but say whether there was anything to write."""
    writer = LedgerWriter(tmp_path / "k")
    writer.counts.documents_in = 1
    writer.add(DocumentChange(0, True, None, None, None))
    writer.commit()
    counts = read_json(tmp_path / "k.json")
    (tmp_path / "k.json").write_text(json.dumps({key: counts[key] for key in StepCounts.__dataclass_fields__}))
    assert len(list(read_changes(tmp_path / "k"))) == 1
    (tmp_path / "k.arrow").unlink()
    with pytest.raises(UserError, match=r"k\.arrow: missing"):
        list(read_changes(tmp_path / "k"))


def test_counts_under_another_name_are_damaged(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"documents": 1})
    assert read_json(tmp_path / "a.json") == {"documents": 1}
    (tmp_path / "b.json").write_bytes((tmp_path / "a.json").read_bytes())
    with pytest.raises(UserError, match=r"b\.json: damaged \(its content is not what was written\)"):
        read_json(tmp_path / "b.json")


def test_tallies_of_parts_add_up() -> None:
    documents = [Document("a" * n, "file", n) for n in range(1, 31)]
    whole, first, second = StepCounts(), StepCounts(), StepCounts()
    for document in documents:
        drop = Drop("short" if document.row < 20 else "long", float(document.row))
        for tally in (whole, first if document.row <= 11 else second):
            tally.dropped(document, drop, document.row)
            tally.labelled({"language": "en" if document.row % 3 else "de", "quality": 0.5})
    first.add(second)
    assert first.to_json() == whole.to_json()
    assert whole.reasons["short"] == [19, sum(range(1, 20))]
    assert len(whole.examples["long"]) == 3
    assert whole.labels == {"language": {"en": 20, "de": 10}, "quality": {"sum": 15.0, "count": 30}}
