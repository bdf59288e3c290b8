"""Where this process is: step and phase, noted by the loop as it goes. What a hang is told by, and a slow rank.

How long a process works for itself in a step, without waiting for the others: what tells a slow one.

Processes of a run pass their collectives together, so all their steps take as long as the slowest's. Work of one's own
is what comes before the first layer (data, the host), and the layers' forward and backward passes. In between lie the
collectives: FSDP gathers a layer before its forward and its backward pass, DDP waits at the end, and some optimizers in
their step. Tensor and context parallel peers wait inside of layers and show the same pace.

Who waits for whom. Where processes hang, collectives hang too: each leaves its report as a file in the run's logs,
and any of them can read the others'.

`logs/hang-rank-N.txt` opens with a line of JSON, the stacks of all threads follow; the last collectives that torch
recorded are beside it in `logs/collectives-rank-N.json`.

The watchdog: says when a step does not end, with what every thread was doing. Of several processes it may also end
this one, so that a launcher starts all of them again; alone it never ends anything.

Time counts only while the watchdog could run: a suspended machine or a stopped process gives large gaps between its own
looks at the steady clock. Those are left out of a step's time and reported by themselves. Evaluations, saves and first
steps may take long, but a process that is frozen meanwhile is found early: each of several gives a sign of life when it
has waited for `least`, and those that wait look for the signs of the others a little later. What it cannot see is a
call that holds the interpreter's lock; collectives and device waits release it.
"""

from __future__ import annotations

import faulthandler
import json
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bessemer.run.directory import Finding
from bessemer.spec.guard import HangSpec
from bessemer.storage import write_atomic


@dataclass
class PhaseTracker:
    """`entered` counts phases of the step: all processes of a run pass the same ones, so the lowest is behind."""

    step: int = -1
    phase: str = "start"
    entered: int = 0
    first_s: dict[str, float] = field(default_factory=dict)  # when the step first came to a phase, on the steady clock

    def begin(self, step: int) -> None:
        """A step begins."""
        self.step, self.entered, self.first_s = step, 0, {}
        self.enter("begin")

    def enter(self, phase: str) -> None:
        """Half a microsecond: it is called a dozen times in a step."""
        self.phase = phase
        self.entered += 1
        self.first_s.setdefault(phase, time.perf_counter())

    def between_s(self, one: str, other: str) -> float:
        """Seconds from the first entry of one phase to that of another; 0 where the step has not both."""
        if one not in self.first_s or other not in self.first_s:
            return 0.0
        return max(0.0, self.first_s[other] - self.first_s[one])


MEASURED = 2  # every so many steps: the hooks cost some microseconds a layer
TOLD = 16  # steps between the words to the others: the median of what was measured since the last
Mark = float | torch.cuda.Event


def first_tensor(found: Any) -> Tensor | None:
    found = found[0] if isinstance(found, tuple) and found else found
    return found if isinstance(found, Tensor) else None


class StepPace:
    """One process's own time. A GPU's is read from events that have long passed when they are asked for."""

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device) -> None:
        self._blocks, self._device = list(blocks), device
        self._spans: list[tuple[Mark, Mark]] = []
        self._open: dict[tuple[int, str], Mark] = {}
        self._measured: list[tuple[float, list[tuple[Mark, Mark]]]] = []  # not yet read

    def _now(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _begin(self, key: tuple[int, str]) -> None:
        self._open[key] = self._now()

    def _end(self, key: tuple[int, str]) -> None:
        if key in self._open:
            self._spans.append((self._open.pop(key), self._now()))

    def _hooks(self, i: int, block: nn.Module, stack: ExitStack) -> None:
        """Around one block: FSDP's own hooks, which wait, were there before and stay outside."""

        def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if torch.is_grad_enabled() and (given := first_tensor(inputs)) is not None and given.requires_grad:
                given.register_hook(lambda _: self._end((i, "backward")))
            self._begin((i, "forward"))

        def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            self._end((i, "forward"))
            if torch.is_grad_enabled() and (made := first_tensor(output)) is not None and made.requires_grad:
                made.register_hook(lambda _: self._begin((i, "backward")))

        stack.callback(block.register_forward_pre_hook(before).remove)
        stack.callback(block.register_forward_hook(after).remove)

    @contextmanager
    def measuring(self, step: int) -> Iterator[None]:
        """Around the passes of a step; of most nothing is measured."""
        if step % MEASURED:
            yield
            return
        self._spans, self._open = [], {}
        with ExitStack() as stack:
            for i, block in enumerate(self._blocks):
                self._hooks(i, block, stack)
            yield

    def end(self, step: int, where: PhaseTracker) -> None:
        """After a step: with the host's part of it, before the first layer, from the phases' times."""
        if step % MEASURED == 0:
            self._measured.append((where.between_s("begin", "forward"), self._spans))
            self._spans = []

    @staticmethod
    def due(step: int) -> bool:
        """Whether this step's words to the others hold the pace: one that was not measured itself, so that no device
        is waited for."""
        return step % TOLD == TOLD - 1

    def own_s(self) -> float:
        """Seconds of a step, the median of what was measured since the last call; 0 if nothing was."""
        found = [host_s + _seconds(spans) for host_s, spans in self._measured]
        self._measured = []
        return statistics.median(found) if found else 0.0


def _seconds(spans: Iterable[tuple[Mark, Mark]]) -> float:
    total = 0.0
    for begun, ended in spans:
        if isinstance(begun, torch.cuda.Event):
            assert isinstance(ended, torch.cuda.Event)
            total += begun.elapsed_time(ended) / 1000
        else:
            assert isinstance(ended, float)
            total += ended - begun
    return total


GRACE_S = 5.0  # for the reports of the others, whose limits differ by a look at the clock


@dataclass(frozen=True)
class WaitReport:
    """What one rank was in when its step did not end."""

    start: float  # of the run's processes: a report of an earlier start says nothing of this one
    rank: int
    host: str
    pid: int
    step: int
    phase: str
    entered: int  # phases of the step
    collectives: int  # that it has entered so far; 0 where nobody counts them
    collective: str  # the last one, in words
    waited_s: float

    @property
    def progress(self) -> tuple[int, int, int]:
        return self.step, self.entered, self.collectives

    @property
    def place(self) -> str:
        return f"step {self.step}, {self.phase}"


def report_path(logs: Path, rank: int) -> Path:
    return logs / f"hang-rank-{rank}.txt"


def leave_report(logs: Path, report: WaitReport, stacks: str, collectives: str = "") -> None:
    """For the other ranks and for whoever looks later."""
    logs.mkdir(parents=True, exist_ok=True)
    if collectives:
        write_atomic(logs / f"collectives-rank-{report.rank}.json", collectives)
    write_atomic(report_path(logs, report.rank), f"{json.dumps(asdict(report))}\n\n{stacks}")


def give_sign(logs: Path, rank: int, start: float, beat: int) -> None:
    """A sign of life of a process that waits for the end of what follows its beat of this number."""
    logs.mkdir(parents=True, exist_ok=True)
    write_atomic(logs / f"alive-rank-{rank}.json", json.dumps([start, beat]), durable=False)


def without_sign(logs: Path, size: int, start: float, beat: int) -> list[int]:
    """The ranks that have given no sign of life since that beat of this start."""
    silent = []
    for rank in range(size):
        try:
            seen = json.loads((logs / f"alive-rank-{rank}.json").read_text())
        except (OSError, ValueError):
            seen = None
        if seen != [start, beat]:
            silent.append(rank)
    return silent


def read_reports(logs: Path, size: int, start: float) -> list[WaitReport]:
    """Those of this start that are there."""
    found = []
    for rank in range(size):
        try:
            with report_path(logs, rank).open(encoding="utf-8") as file:
                report = WaitReport(**json.loads(file.readline()))
        except (OSError, ValueError, TypeError):
            continue
        if report.start == start:
            found.append(report)
    return found


def wait_for_reports(logs: Path, size: int, start: float, grace_s: float = GRACE_S) -> list[WaitReport]:
    """All of them, or those that came in time: a frozen process or a lost host leaves none."""
    give_up = time.monotonic() + grace_s
    while len(found := read_reports(logs, size, start)) < size and time.monotonic() < give_up:
        time.sleep(0.05)
    return found


def _ranks(numbers: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 1 and 3`, `ranks 0, 1, 2, 3 and 60 more`."""
    shown = [str(number) for number in numbers[:8]]
    if len(numbers) > len(shown):
        shown.append(f"{len(numbers) - len(shown)} more")
    if len(shown) == 1:
        return f"rank {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def who_waits(reports: Sequence[WaitReport], hosts: Sequence[str]) -> str:
    """In one line: who is behind, and who waits for it where."""
    silent = sorted(set(range(len(hosts))) - {report.rank for report in reports})
    words = []
    if silent:
        said = f"{_ranks(silent)} ({', '.join(sorted({hosts[rank] for rank in silent}))})"
        words.append(f"{said} gives no sign: frozen, ended, or its host is out of reach")
    behind = min((report.progress for report in reports), default=None)
    late = [report for report in reports if report.progress == behind]
    others = [report for report in reports if report.progress != behind]
    if others and not silent:
        for report in late[:4]:
            words.append(f"rank {report.rank} ({report.host}) is still in {report.place}")
        it = "it" if len(late) == 1 else "them"
    else:
        others, it = list(reports), "it" if len(silent) == 1 else "them"
    places: dict[str, list[int]] = {}
    for report in others:
        places.setdefault(report.place, []).append(report.rank)
    waiting = [f"{_ranks(ranks)} in {place}" for place, ranks in places.items()]
    if not words:
        return f"all {len(hosts)} ranks wait in {'; '.join(places)}: for the network, or for a device"
    if waiting:
        words.append(f"waiting for {it}: {', '.join(waiting)}")
    return "; ".join(words)


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


class HangPeers(Protocol):
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
        peers: HangPeers | None = None,
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
