"""AlertWatcher: reads a run's events and metrics, and sends one message for each incident.

It detects nothing that the guard judges: events and alarms are the run's own, rules are the user's. Messages wait in a
saved outbox until they are delivered, so a lost network delays them and a restart repeats none.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import IO, Any

from bessemer.errors import UserError
from bessemer.observe.alerts.incidents import AlertIncident, Incidents, MetricRule, event_incident
from bessemer.observe.alerts.message import body_of, deliver, open_route, title_of
from bessemer.observe.tail import JournalTail
from bessemer.observe.watched import describe_event
from bessemer.run.control import ControlRequest, write_request
from bessemer.run.directory import Run
from bessemer.run.journal import Record, to_number
from bessemer.spec.observers import ENDS, AlertsSpec
from bessemer.storage import lock_file, write_atomic

MOST_WAITING = 200  # messages in the outbox; then the oldest are dropped


class AlertWatcher:
    """The alerts of one run, an observer like the trackers. `clock` gives the time of rules."""

    name = "alerts"

    def __init__(self, run: Run, spec: AlertsSpec, clock: Callable[[], float] = time.time) -> None:
        self.run, self.spec, self.interval_s, self._clock = run, spec, spec.every, clock
        self.path = run.folder / "trackers" / "alerts.json"
        self._routes: list[tuple[Any, set[str]]] = []
        self._rules = [MetricRule(rule) for rule in spec.rules]
        self._lock: IO[str] | None = None

    def acquire(self) -> bool:
        """Become the only process that sends alerts of this run, from the saved position on."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self.path.with_suffix(".lock").open("w")
        if not lock_file(self._lock, wait=False):
            self._lock.close()
            return False
        self._routes = [(open_route(route.to), set(route.on)) for route in self.spec.routes]
        saved = json.loads(self.path.read_text()) if self.path.exists() else {}
        marks = saved.get("marks", {})
        self._steps = JournalTail(self.run.steps_path, marks.get("steps"))
        self._validation = JournalTail(self.run.validation_path, marks.get("validation"))
        self._events = JournalTail(self.run.events_path, marks.get("events"))
        self._incidents = Incidents(saved.get("incidents", {}))
        self._outbox: list[dict[str, Any]] = saved.get("outbox", [])
        started = list(self.run.events("started"))[-1:] if not saved else []
        # What happened before the first start with alerts is not news.
        self._from_time: float = max((to_number(e.get("time")) or 0.0 for e in started), default=0.0)
        self._from_step: float = max((to_number(e.get("step")) or 0.0 for e in started), default=0.0)
        self._alive = bool(saved.get("alive", False))
        return True

    def _save(self) -> None:
        tails = {"steps": self._steps, "validation": self._validation, "events": self._events}
        content = {
            "marks": {name: tail.marks for name, tail in tails.items()}, "incidents": self._incidents.open,
            "outbox": self._outbox, "alive": self._alive,
        }  # fmt: skip
        write_atomic(self.path, json.dumps(content), durable=False)

    def forward(self) -> int:
        """Look at what is new, and deliver what waits; the number of messages. ConnectionError if one waits on."""
        cuts = [tail.was_cut() for tail in (self._steps, self._validation)]
        if any(cuts):
            for rule in self._rules:
                rule.clear()
        self._events.was_cut()
        before = self._steps.offset, self._validation.offset, self._events.offset
        incidents = [*self._read_events(), *self._read_metrics(self._steps), *self._read_metrics(self._validation)]
        if incidents:
            self._post(incidents)
        if before != (self._steps.offset, self._validation.offset, self._events.offset):
            self._save()
        return self._deliver()

    def _read_events(self) -> list[AlertIncident]:
        incidents = []
        while events := self._events.read():
            for event in events:
                kind = event.get("kind")
                self._alive = kind == "started" or (self._alive and kind not in ENDS)
                if (to_number(event.get("time")) or 0.0) >= self._from_time:
                    incidents += self._new(event_incident(event, describe_event(event)), self.spec.quiet)
            self._events.advance()
        # A rollback says what its vetoes say.
        kinds = {incident.kinds[0] for incident in incidents}
        return [incident for incident in incidents if incident.kinds[0] != "veto" or "rollback" not in kinds]

    def _new(self, incident: AlertIncident, quiet_s: float) -> list[AlertIncident]:
        return [incident] if self._incidents.is_new(incident.key, incident.time, quiet_s) else []

    def _read_metrics(self, tail: JournalTail) -> list[AlertIncident]:
        incidents = []
        while records := tail.read():
            for record in records:
                if (to_number(record.get("step")) or 0.0) >= self._from_step:
                    incidents += self._apply_rules(record, tail is self._validation)
            tail.advance()
        return incidents

    def _apply_rules(self, record: Record, validation: bool) -> list[AlertIncident]:
        incidents = []
        for rule in self._rules:
            if rule.validation != validation or (mean := rule.holds(record)) is None:
                continue
            quiet_s = rule.spec.quiet or self.spec.quiet
            for incident in self._new(rule.incident(record, mean, self._clock()), quiet_s):
                incidents.append(self._act(rule, incident))
        return incidents

    def _act(self, rule: MetricRule, incident: AlertIncident) -> AlertIncident:
        """Ask the run for what the rule says, once an incident."""
        action = rule.spec.action
        if action == "message":
            return incident
        try:
            write_request(self.run, ControlRequest.make(action, who=f"the alert rule {rule.spec.when}"))
            note = f"the run was asked to {action}"
        except UserError as error:
            note = f"the run could not be asked to {action}: {error}"
        return AlertIncident(incident.kinds, incident.title, f"{incident.text}\n{note}", incident.step, incident.time,
                        incident.metric)  # fmt: skip

    def _post(self, incidents: list[AlertIncident]) -> None:
        """Put one message for each route that wants any of them into the outbox."""
        for number, (_, wanted) in enumerate(self._routes):
            chosen = [one for one in incidents if "all" in wanted or wanted.intersection(one.kinds)]
            if chosen:
                message = {"route": number, "title": title_of(self.run, chosen), "body": body_of(self.run, chosen)}
                self._outbox.append(message)
        self._outbox = self._outbox[-MOST_WAITING:]
        self._save()  # before delivery: a kill repeats no action

    def _deliver(self) -> int:
        waiting, self._outbox, failed = self._outbox, [], dict[int, str]()
        for message in waiting:
            number = message["route"]
            if number >= len(self._routes):  # the spec has fewer routes now
                continue
            if number not in failed:
                url = os.environ.get(self.spec.routes[number].to, "")
                reason = deliver(self._routes[number][0], url, message["title"], message["body"])
                if not reason:
                    continue
                failed[number] = reason
            self._outbox.append(message)
        if waiting:
            self._save()
        if failed:
            reasons = "; ".join(f"{self.spec.routes[number].to}: {failed[number]}" for number in sorted(failed))
            raise ConnectionError(f"{len(self._outbox)} messages wait, they were not taken by {reasons}")
        return len(waiting)

    def fail(self) -> None:
        """Nothing to drop: what was not delivered waits in the outbox."""

    def finish(self, state: str) -> None:
        """A run that ended without an event of its end was killed, or lost its machine."""
        if self._alive and state == "interrupted":
            self._alive = False
            step = self._steps.steps
            text = "the process of the run is gone, without a word: killed, out of memory, or the machine went down"
            if new := self._new(AlertIncident(("died",), "died", text, step, self._clock()), self.spec.quiet):
                self._post(new)
                self._deliver()
        self._save()

    def release(self) -> None:
        if self._lock:
            self._lock.close()
