"""The watchdog: says when a step does not end, with what every thread was doing. Of several processes it may also end
this one, so that a launcher starts all of them again; alone it never ends anything.

Time counts only while the watchdog could run: a suspended machine or a stopped process gives large gaps between its own
looks at the steady clock. Those are left out of a step's time and reported by themselves. Evaluations, saves and first
steps may take long, but a process that is frozen meanwhile is found early: each of several gives a sign of life when it
has waited for `least`, and those that wait look for the signs of the others a little later. What it cannot see is a
call that holds the interpreter's lock; collectives and device waits release it.
"""

from __future__ import annotations

import faulthandler
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from bessemer.run.finding import Finding
from bessemer.spec.detect import HangSpec

RECENT = 256  # beats that the limit is learnt from
SIGN_GRACE_S = 5.0  # for the signs of life of the others
SLOWER = 1.5  # times the longest recent step: such a step is still no reason to look for frozen processes


@dataclass(frozen=True)
class Hang:
    """A step that has not ended: its number as last beaten, for how long, the limit, and the stacks of all threads."""

    step: int
    waited_s: float
    limit_s: float
    stacks: str

    def finding(self) -> Finding:
        return Finding(
            f"no step has ended for {self.waited_s:.0f} s after step {self.step} (limit {self.limit_s:.0f} s)",
            {"step": self.step, "waited_s": self.waited_s, "limit_s": self.limit_s, "stacks": self.stacks},
            "a collective that one rank never joined, storage that does not answer, or a deadlock",
            0.7,
            "the stacks show where each thread waits; look at the rank that waits elsewhere than the others",
        )


def all_stacks() -> str:
    """What every thread is doing, as faulthandler writes it (it needs a real file)."""
    with tempfile.TemporaryFile(mode="w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


class Peers(Protocol):
    """The other processes of a run, as far as they can be seen without a collective."""

    def give_sign(self, beat: int) -> None:
        """This process is alive and waits for the end of what follows its beat of this number."""
        ...

    def frozen(self, beat: int) -> bool:
        """Whether a process has given no sign since that beat."""
        ...


class Watchdog:
    """`beat` after each step; `on_hang` is called once per hang, from the watchdog's thread, and `on_end` when it has
    lasted `end` longer. `on_pause` gets the step and the seconds for which this process did not run. Use it as a
    context."""

    def __init__(
        self,
        spec: HangSpec,
        on_hang: Callable[[Hang], None],
        clock: Callable[[], float] = time.monotonic,
        poll_s: float | None = None,
        on_end: Callable[[Hang], None] | None = None,
        on_pause: Callable[[int, float], None] | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.spec, self._on_hang, self._on_end, self._clock = spec, on_hang, on_end, clock
        self._poll_s = poll_s if poll_s is not None else min(1.0, spec.least / 10)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._intervals: deque[float] = deque(maxlen=RECENT)
        self._on_pause, self._peers = on_pause, peers
        self._waited_s, self._looked_s, self._paused_s = 0.0, clock(), 0.0
        self._signed, self._checked = False, False
        self._beats = 0  # the same in every process of a run
        self._hung = 0  # steps in a row
        self._long, self._said, self._step = True, False, -1
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @property
    def limit_s(self) -> float:
        """How long the running step may take."""
        if self._long or not self._intervals:
            return self.spec.first
        return max(self.spec.least, self.spec.factor * max(self._intervals))

    @property
    def check_s(self) -> float:
        """When to look for the signs of the others. All give theirs after `least`, whatever their own steps took."""
        usual = SLOWER * max(self._intervals, default=0.0)
        return max(self.spec.least, usual) + min(SIGN_GRACE_S, self.spec.least)

    def beat(self, step: int, long: bool = False) -> None:
        """A step has ended. `long`: what follows (evaluation, save) may take as long as a first step; not learnt."""
        with self._lock:
            self._count()
            if not self._long:
                self._hung = self._hung + 1 if self._said else 0
                if self._hung != 1:  # one hang is no measure of a step, two in a row are the new pace
                    self._intervals.append(self._waited_s)
            self._waited_s, self._long, self._said, self._step = 0.0, long, False, step
            self._signed, self._checked = False, False
            self._beats += 1

    def look(self) -> None:
        """One look at the clock; the thread does it every second."""
        with self._lock:
            self._count()
            step, beat, waited_s, limit_s = self._step, self._beats, self._waited_s, self.limit_s
            end = self._said and self.spec.end is not None and waited_s > limit_s + self.spec.end
            new = not self._said and waited_s > limit_s
            sign = not self._signed and waited_s > self.spec.least
            check_s = self.check_s
            check = not self._checked and not self._said and not new and waited_s > check_s
            self._said, self._signed, self._checked = self._said or new, self._signed or sign, self._checked or check
            paused_s, self._paused_s = self._paused_s, 0.0
        if paused_s and self._on_pause:
            self._on_pause(step, paused_s)
        if self._peers and sign:
            self._peers.give_sign(beat)
        if self._peers and check and self._peers.frozen(beat):
            with self._lock:
                new = self._beats == beat and not self._said  # it may have gone on meanwhile
                self._said, limit_s = self._said or new, check_s
        if new:
            self._on_hang(Hang(step, waited_s, limit_s, all_stacks()))
        elif end and self._on_end:
            self._on_end(Hang(step, waited_s, limit_s, all_stacks()))

    def _count(self) -> None:
        now = self._clock()
        gap_s = max(0.0, now - self._looked_s)
        if gap_s > max(self.spec.least, 2 * self._poll_s):
            self._paused_s += gap_s
        self._waited_s += min(gap_s, 2 * self._poll_s)
        self._looked_s = now

    def _watch(self) -> None:
        while not self._stop.wait(self._poll_s):
            self.look()

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
