"""What a checkpoint keeps of its run's own files: spec, plan, metrics and events as they stood at the save.

One zip, `run.zip`, in the checkpoint's folder and hashed by its manifest. A resume compares the run's files with it, so
that a lost or altered record is found, and puts the copy in its place. About 70 bytes and 3 microseconds a step.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bessemer.run.journal import Journal, number, parse_record

NAME = "run.zip"
SPEC, PLAN = "spec.yaml", "plan.json"  # read by a resume, and not appended to


@dataclass(frozen=True)
class Snapshot:
    """A run's journals, by their path in its folder, with their sizes at one moment."""

    folder: Path
    journals: Mapping[str, tuple[Journal, int]]

    def pack(self) -> bytes:
        """The zip. The journals may have grown since; what came later is left out."""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
            for name in (SPEC, PLAN):
                if (path := self.folder / name).exists():
                    file.write(path, name)
            for name, (journal, size_bytes) in self.journals.items():
                file.writestr(name, journal.read(size_bytes))
        return packed.getvalue()


def read_snapshot(checkpoint: Path) -> dict[str, bytes]:
    """The files in a checkpoint's copy, which its manifest must have verified; empty for checkpoints without one."""
    path = checkpoint / NAME
    if not path.exists():
        return {}
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def put_back(journal: Journal, saved: bytes) -> str:
    """Make a journal hold exactly what was saved of it. What was wrong with it; empty if it only had grown."""
    current = journal.path.read_bytes()
    grown = current.startswith(saved)
    if not grown:
        journal.replace(saved)
    journal.truncate(len(saved))
    return "" if grown else _difference(current, saved)


def put_back_start(journal: Journal, saved: bytes) -> str:
    """The same for a journal that goes on over a resume: records later than the saved ones stay."""
    current = journal.path.read_bytes()
    if current.startswith(saved):
        return ""
    old, lines = saved.splitlines(keepends=True), current.splitlines(keepends=True)
    known = set(old)
    last = max((i for i, line in enumerate(lines) if line in known), default=-1)
    saved_s = max((_time(line) for line in old), default=0.0)
    later = [line for line in lines[last + 1 :] if _time(line) >= saved_s]
    journal.replace(saved + b"".join(later))
    return _difference(current, saved)


def _time(line: bytes) -> float:
    record = parse_record(line)
    return (number(record.get("time")) or 0.0) if record else -1.0


def _difference(current: bytes, saved: bytes) -> str:
    lines, present = saved.splitlines(), set(current.splitlines())
    missing = sum(line not in present for line in lines)
    what = f"{missing:,} of the {len(lines):,} records" if missing else f"the order of {len(lines):,} records"
    return f"{what} that the checkpoint counts {'were' if missing != 1 else 'was'} missing or altered"
