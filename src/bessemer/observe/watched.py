"""Whether a run that another process writes has ended, and its events as lines."""

from __future__ import annotations

from bessemer.observe.format import event_line
from bessemer.run.directory import Run
from bessemer.run.journal import Record
from bessemer.run.lock import is_alive, read_owner


def has_ended(run: Run) -> str:
    """The state in which a run ended; empty while it runs. Cheap while it runs: the events are not read."""
    owner = read_owner(run.folder)
    if owner is not None and is_alive(owner, run.folder):
        return ""
    state = run.state
    return "" if state == "running" else state


def describe_event(event: Record) -> str:
    """The line that a terminal shows; events that a kill or an edit damaged have only their reason or kind."""
    try:
        line = event_line(event)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        line = None
    return line or str(event.get("reason") or event.get("kind", ""))
