"""Detects hangs and slow ranks: the phase of the running step, each rank's own time, and the watchdog.

Own time. Ranks meet in collectives, so all their steps take as long as the slowest rank's. A rank's own work is what
comes before the first layer (data, host) and the layers' forward and backward passes. The collectives lie in between:
FSDP gathers a layer before its passes, DDP and some optimizers wait at the end. Tensor and context parallel peers wait
inside of layers and show the same pace.

Hangs. A hanging process blocks collectives, so each rank writes its report to the run's logs, where the others read it:
`logs/hang-rank-N.txt` holds a line of JSON and the stacks of all threads, `logs/collectives-rank-N.json` the last
collectives that torch recorded.

Watchdog time counts only while the process could run: a suspended machine leaves large gaps on the monotonic clock,
which are reported separately. Evaluations, saves and first steps may take long, but a frozen process is found early:
every rank writes a heartbeat after waiting for `least`, and checks those of the others a little later. A call that
holds the interpreter lock cannot be seen; collectives and device waits release it.
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

from bessemer.run.finding import Finding
from bessemer.spec.guard import HangSpec
from bessemer.storage import write_atomic


@dataclass
class PhaseTracker:
    """Step and phase of this process. All ranks pass the same phases, so the lowest `entered` count is behind."""

    step: int = -1
    phase: str = "start"
    entered: int = 0
    first_s: dict[str, float] = field(default_factory=dict)  # first entry of each phase

    def begin_step(self, step: int) -> None:
        self.step, self.entered, self.first_s = step, 0, {}
        self.enter_phase("begin")

    def enter_phase(self, phase: str) -> None:
        """Costs half a microsecond; called a dozen times per step."""
        self.phase = phase
        self.entered += 1
        self.first_s.setdefault(phase, time.perf_counter())

    def between_s(self, first: str, second: str) -> float:
        """Seconds between the first entries of two phases; 0 if the step lacks one."""
        if first not in self.first_s or second not in self.first_s:
            return 0.0
        return max(0.0, self.first_s[second] - self.first_s[first])


MEASURE_EVERY = 2  # steps: the hooks cost some microseconds per layer
REPORT_EVERY = 16  # steps between reports to the other ranks
Mark = float | torch.cuda.Event


def first_tensor(value: Any) -> Tensor | None:
    value = value[0] if isinstance(value, tuple) and value else value
    return value if isinstance(value, Tensor) else None


class StepPace:
    """One rank's own time per step. On a GPU it is read from events that have long completed."""

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device) -> None:
        self._blocks, self._device = list(blocks), device
        self._spans: list[tuple[Mark, Mark]] = []
        self._open: dict[tuple[int, str], Mark] = {}
        self._measured: list[tuple[float, list[tuple[Mark, Mark]]]] = []  # unread: host seconds and spans of a step

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
        """Hooks of one block. FSDP's hooks, which wait, were registered before and stay outside."""

        def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if torch.is_grad_enabled() and (entering := first_tensor(inputs)) is not None and entering.requires_grad:
                entering.register_hook(lambda _: self._end((i, "backward")))
            self._begin((i, "forward"))

        def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            self._end((i, "forward"))
            if torch.is_grad_enabled() and (leaving := first_tensor(output)) is not None and leaving.requires_grad:
                leaving.register_hook(lambda _: self._begin((i, "backward")))

        stack.callback(block.register_forward_pre_hook(before).remove)
        stack.callback(block.register_forward_hook(after).remove)

    @contextmanager
    def measuring(self, step: int) -> Iterator[None]:
        """Surrounds the passes of a step; only some steps are measured."""
        if step % MEASURE_EVERY:
            yield
            return
        self._spans, self._open = [], {}
        with ExitStack() as stack:
            for i, block in enumerate(self._blocks):
                self._hooks(i, block, stack)
            yield

    def end(self, step: int, phases: PhaseTracker) -> None:
        """After a step: adds the host's time before the first layer."""
        if step % MEASURE_EVERY == 0:
            self._measured.append((phases.between_s("begin", "forward"), self._spans))
            self._spans = []

    @staticmethod
    def due(step: int) -> bool:
        """Whether the pace is reported at this step. It is not a measured step, so no device is waited for."""
        return step % REPORT_EVERY == REPORT_EVERY - 1

    def read_own_s(self) -> float:
        """Median seconds of the steps measured since the last call; 0 if there are none."""
        seconds = [host_s + _seconds(spans) for host_s, spans in self._measured]
        self._measured = []
        return statistics.median(seconds) if seconds else 0.0


def _seconds(spans: Iterable[tuple[Mark, Mark]]) -> float:
    total = 0.0
    for start, end in spans:
        if isinstance(start, torch.cuda.Event):
            assert isinstance(end, torch.cuda.Event)
            total += start.elapsed_time(end) / 1000
        else:
            assert isinstance(end, float)
            total += end - start
    return total


GRACE_S = 5.0  # for the reports of the other ranks


@dataclass(frozen=True)
class WaitReport:
    """Where one rank was when its step did not end."""

    start: float  # of the run's processes, to tell reports of earlier starts apart
    rank: int
    host: str
    pid: int
    step: int
    phase: str
    entered: int  # phases of the step
    collectives: int  # entered so far; 0 if not counted
    collective: str  # description of the last one
    waited_s: float

    @property
    def progress(self) -> tuple[int, int, int]:
        return self.step, self.entered, self.collectives

    @property
    def place(self) -> str:
        return f"step {self.step}, {self.phase}"


def wait_report_path(logs: Path, rank: int) -> Path:
    return logs / f"hang-rank-{rank}.txt"


def write_wait_report(logs: Path, report: WaitReport, stacks: str, collectives: str = "") -> None:
    """Writes the report for the other ranks and for later analysis."""
    logs.mkdir(parents=True, exist_ok=True)
    if collectives:
        write_atomic(logs / f"collectives-rank-{report.rank}.json", collectives)
    write_atomic(wait_report_path(logs, report.rank), f"{json.dumps(asdict(report))}\n\n{stacks}")


def write_heartbeat(logs: Path, rank: int, start: float, beat: int) -> None:
    """Records that this rank is alive and waits since its beat of this number."""
    logs.mkdir(parents=True, exist_ok=True)
    write_atomic(logs / f"alive-rank-{rank}.json", json.dumps([start, beat]), durable=False)


def ranks_without_heartbeat(logs: Path, size: int, start: float, beat: int) -> list[int]:
    """Ranks without a heartbeat since that beat of this start."""
    silent = []
    for rank in range(size):
        try:
            heartbeat = json.loads((logs / f"alive-rank-{rank}.json").read_text())
        except (OSError, ValueError):
            heartbeat = None
        if heartbeat != [start, beat]:
            silent.append(rank)
    return silent


def read_wait_reports(logs: Path, size: int, start: float) -> list[WaitReport]:
    """The reports of this start that exist."""
    reports = []
    for rank in range(size):
        try:
            with wait_report_path(logs, rank).open(encoding="utf-8") as file:
                report = WaitReport(**json.loads(file.readline()))
        except (OSError, ValueError, TypeError):
            continue
        if report.start == start:
            reports.append(report)
    return reports


def collect_wait_reports(logs: Path, size: int, start: float, grace_s: float = GRACE_S) -> list[WaitReport]:
    """All reports, or those that arrive in time: a frozen process or a lost host writes none."""
    give_up = time.monotonic() + grace_s
    while len(reports := read_wait_reports(logs, size, start)) < size and time.monotonic() < give_up:
        time.sleep(0.05)
    return reports


def _ranks(numbers: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 1 and 3`, `ranks 0, 1, 2, 3 and 60 more`."""
    shown = [str(number) for number in numbers[:8]]
    if len(numbers) > len(shown):
        shown.append(f"{len(numbers) - len(shown)} more")
    if len(shown) == 1:
        return f"rank {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def describe_hang(reports: Sequence[WaitReport], hosts: Sequence[str]) -> str:
    """One line: which ranks are behind, and which wait for them where."""
    silent = sorted(set(range(len(hosts))) - {report.rank for report in reports})
    parts = []
    if silent:
        names = f"{_ranks(silent)} ({', '.join(sorted({hosts[rank] for rank in silent}))})"
        parts.append(f"{names} gives no sign: frozen, ended, or its host is unreachable")
    behind = min((report.progress for report in reports), default=None)
    late = [report for report in reports if report.progress == behind]
    others = [report for report in reports if report.progress != behind]
    if others and not silent:
        for report in late[:4]:
            parts.append(f"rank {report.rank} ({report.host}) is still in {report.place}")
        it = "it" if len(late) == 1 else "them"
    else:
        others, it = list(reports), "it" if len(silent) == 1 else "them"
    places: dict[str, list[int]] = {}
    for report in others:
        places.setdefault(report.place, []).append(report.rank)
    waiting = [f"{_ranks(ranks)} in {place}" for place, ranks in places.items()]
    if not parts:
        return f"all {len(hosts)} ranks wait in {'; '.join(places)}: for the network, or for a device"
    if waiting:
        parts.append(f"waiting for {it}: {', '.join(waiting)}")
    return "; ".join(parts)


RECENT = 256  # beats that the limit is learnt from
HEARTBEAT_GRACE_S = 5.0
SLOWER = 1.5  # times the longest recent step: before that, heartbeats are not checked


@dataclass(frozen=True)
class Hang:
    """A step that has not ended: the last finished step, seconds waited, the limit, and the stacks of all threads."""

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
            "the stacks show where each thread waits; look at the rank that waits in another place than the others",
        )


def all_stacks() -> str:
    """The stacks of all threads, as faulthandler writes them (it needs a real file)."""
    with tempfile.TemporaryFile(mode="w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


class HangPeers(Protocol):
    """The other ranks of a run, as far as they can be seen without a collective."""

    def write_heartbeat(self, beat: int) -> None:
        """This rank is alive and waits since its beat of this number."""
        ...

    def frozen(self, beat: int) -> bool:
        """Whether some rank has written no heartbeat since that beat."""
        ...


class Watchdog:
    """Call `beat` after each step. `on_hang` is called once per hang, in the watchdog's thread, and `on_end` when it
    has lasted `end` longer (among several ranks, to let the launcher restart all). `on_pause` gets the step and the
    seconds for which the process did not run. Use it as a context."""

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
        self._waited_s, self._checked_s, self._paused_s = 0.0, clock(), 0.0
        self._heartbeat_sent, self._peers_checked = False, False
        self._beats = 0  # equal on all ranks
        self._hung = 0  # consecutive steps that hung
        self._long, self._reported, self._step = True, False, -1
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @property
    def limit_s(self) -> float:
        """Time limit of the running step."""
        if self._long or not self._intervals:
            return self.spec.first
        return max(self.spec.least, self.spec.factor * max(self._intervals))

    @property
    def check_s(self) -> float:
        """When to check the heartbeats of the others, which are written after `least`."""
        usual = SLOWER * max(self._intervals, default=0.0)
        return max(self.spec.least, usual) + min(HEARTBEAT_GRACE_S, self.spec.least)

    def beat(self, step: int, long: bool = False) -> None:
        """A step has ended. `long`: what follows (evaluation, save) may take as long as a first step."""
        with self._lock:
            self._count()
            if not self._long:
                self._hung = self._hung + 1 if self._reported else 0
                if self._hung != 1:  # one hang is an outlier, two in a row are the new pace
                    self._intervals.append(self._waited_s)
            self._waited_s, self._long, self._reported, self._step = 0.0, long, False, step
            self._heartbeat_sent, self._peers_checked = False, False
            self._beats += 1

    def check(self) -> None:
        """Checks the clock once; the thread does it every second."""
        with self._lock:
            self._count()
            step, beat, waited_s, limit_s = self._step, self._beats, self._waited_s, self.limit_s
            end = self._reported and self.spec.end is not None and waited_s > limit_s + self.spec.end
            new = not self._reported and waited_s > limit_s
            sign = not self._heartbeat_sent and waited_s > self.spec.least
            check_s = self.check_s
            check = not self._peers_checked and not self._reported and not new and waited_s > check_s
            self._reported |= new
            self._heartbeat_sent |= sign
            self._peers_checked |= check
            paused_s, self._paused_s = self._paused_s, 0.0
        if paused_s and self._on_pause:
            self._on_pause(step, paused_s)
        if self._peers and sign:
            self._peers.write_heartbeat(beat)
        if self._peers and check and self._peers.frozen(beat):
            with self._lock:
                new = self._beats == beat and not self._reported  # the step may have ended in the meantime
                self._reported, limit_s = self._reported or new, check_s
        if new:
            self._on_hang(Hang(step, waited_s, limit_s, all_stacks()))
        elif end and self._on_end:
            self._on_end(Hang(step, waited_s, limit_s, all_stacks()))

    def _count(self) -> None:
        now = self._clock()
        gap_s = max(0.0, now - self._checked_s)
        if gap_s > max(self.spec.least, 2 * self._poll_s):
            self._paused_s += gap_s
        self._waited_s += min(gap_s, 2 * self._poll_s)
        self._checked_s = now

    def _watch(self) -> None:
        while not self._stop.wait(self._poll_s):
            self.check()

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
