"""Pre-registered tasks: a run with `evaluate.tasks` records what it will be scored on before it trains.

The event holds a hash of each task's file and of how it is asked. A later start with other tasks, and a later
evaluation, are compared with it, so that nobody chooses the questions after seeing the answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.run.directory import Run

EVENT = "tasks_registered"


def registered_hashes(place: Path) -> tuple[dict[str, str], int] | None:
    """The hashes that a run registered first, and the step before which it did; None if it registered nothing."""
    if not (place / "events.jsonl").exists():
        return None
    events = list(Run(place).events(EVENT))
    return (dict(events[0]["hashes"]), int(events[0]["step"])) if events else None


def check_registration(place: Path, hashes: Mapping[str, str]) -> bool:
    """Whether the run is still to register. Refuses tasks that changed since."""
    if (before := registered_hashes(place)) is None:
        return True
    for name, value in before[0].items():
        if hashes.get(name) != value:
            changed = "is not asked any more" if name not in hashes else f"changed: {hashes[name]}, was {value}"
            raise UserError(
                f"evaluate.tasks: {name} {changed}. The run registered its tasks before step {before[1]}: put it back, "
                "or start a run with another name"
            )
    return False


def compare_registration(place: Path, hashes: Mapping[str, str]) -> dict[str, Any]:
    """A line for the record of an evaluation: which of its tasks are those that the run registered."""
    if (before := registered_hashes(place)) is None:
        return {}
    same = [name for name, value in hashes.items() if before[0].get(name) == value]
    changed = [name for name, value in hashes.items() if name in before[0] and before[0][name] != value]
    later = [name for name in hashes if name not in before[0]]
    parts = [f"before step {before[1]}: {', '.join(same)}"] if same else []
    parts += [f"CHANGED since: {', '.join(changed)}"] if changed else []
    parts += [f"not registered: {', '.join(later)}"] if later else []
    return {"registered": "; ".join(parts)}
