"""The process that follows a run for its trackers and alerts: started by the session or by `watch forward`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from bessemer.errors import UserError
from bessemer.observe.alerts.message import open_route
from bessemer.observe.alerts.watcher import AlertWatcher
from bessemer.observe.trackers.forward import Following, Forwarder, Observer, follow
from bessemer.observe.trackers.tracker import make_tracker
from bessemer.observe.watched import has_ended
from bessemer.run.directory import Run
from bessemer.spec.load import load_spec
from bessemer.spec.observers import TRACKERS, TrackerSpec
from bessemer.spec.schema import RunSpec

PATIENCE_S = 600.0  # after the run's end, for a tracker that does not answer
END_WAIT_S = 10.0  # of a session for the last deliveries
LOG = "logs/trackers.log"
LOCK_POLL_S = 1.0


def observers_of(run: Run, names: Sequence[str] = ()) -> list[Observer]:
    """The observers in a run's spec, or those of the names: trackers that the spec does not have get defaults."""
    spec = load_spec(run.folder / "spec.yaml")
    by_name: dict[str, Observer] = {tracker.to: Forwarder(run, tracker) for tracker in spec.trackers}
    if spec.alerts:
        by_name[AlertWatcher.name] = AlertWatcher(run, spec.alerts)
    for name in names:
        if name not in by_name and name not in TRACKERS:
            raise UserError(f"--to {name}: no such tracker; use {', '.join(TRACKERS)}, or alerts if the spec has them")
        by_name.setdefault(name, Forwarder(run, TrackerSpec.model_validate({"to": name})))
    if not by_name:
        raise UserError(f"{run.folder}: its spec has neither trackers nor alerts; name one, such as --to tensorboard")
    return [by_name[name] for name in dict.fromkeys(names or by_name)]


def follow_run(
    run: Run, observers: Sequence[Observer], say: Callable[[str], None], patience_s: float = PATIENCE_S
) -> dict[str, Following]:
    """Follow a run with each observer in a thread of its own, until it has ended and all is delivered."""
    stop, results = threading.Event(), dict[str, Following]()

    def work(observer: Observer) -> None:
        try:
            if not _acquire(observer, run, stop):
                results[observer.name] = Following(error=f"{observer.name}: another process forwards this run to it")
                return
            results[observer.name] = follow(observer, run, patience_s, stop, say)
        except UserError as error:
            results[observer.name] = Following(error=str(error))
        finally:
            observer.release()

    threads = [threading.Thread(target=work, args=(observer,), name=observer.name) for observer in observers]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        stop.set()  # Ctrl-C: the positions are saved
    return results


def _acquire(observer: Observer, run: Run, stop: threading.Event) -> bool:
    """While the run trains, the process of an earlier start may still be delivering: it is waited for."""
    while not observer.acquire():
        if has_ended(run) or stop.wait(LOCK_POLL_S):
            return False
    return True


def check_observers(spec: RunSpec) -> None:
    """UserError if a library or a secret that the observers need is missing."""
    for tracker in spec.trackers:
        make_tracker(tracker.to).check(tracker)
    for route in spec.alerts.routes if spec.alerts else ():
        open_route(route.to)


class ObserverProcess:
    """The observers of a session, in a process of their own that outlives it until all is delivered."""

    def __init__(self, spec: RunSpec, main: bool, say: Callable[[str], None]) -> None:
        self._needed = main and bool(spec.trackers or spec.alerts)
        self._say, self._folder = say, Path()
        self._process: subprocess.Popen[bytes] | None = None
        if self._needed:
            check_observers(spec)

    def start(self, folder: Path) -> None:
        """Start the process, once the run has its files and its first event."""
        if not self._needed:
            return
        self._folder = folder
        # A worker of torchrun ends with its parent; this process does not.
        environment = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_RUN_ID"}
        command = [sys.executable, "-m", "bessemer", "watch", "forward", str(folder)]
        with (folder / LOG).open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def __enter__(self) -> ObserverProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait a moment for the last deliveries: in a container all processes end with this one."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_WAIT_S)
        if self._process.poll() is None:
            self._say(f"trackers  still sending; if this machine goes away: bessemer watch forward {self._folder}")
        elif self._process.returncode:
            self._say(f"trackers  not all was delivered, see {self._folder / LOG}")
