"""Who does the work: this process, a pool of processes, or a Ray cluster. All give the same results in any number. A
task is small (a part's description and where to write); what it makes goes to disk, and only a few numbers come
back.

Progress of long work on data: how much, how fast, how long yet; at most one line a second.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from bessemer.errors import UserError

Work = Callable[[Any], Any]  # a module-level function; tasks and results can be pickled


class Engine(Protocol):
    """Runs a function on every task. A task's `name` is what a message calls it."""

    @property
    def workers(self) -> int: ...

    def run(self, function: Work, tasks: Sequence[Any], /) -> Iterator[tuple[int, Any]]:
        """(index of the task, its result) as they come. The first failure ends it; finished tasks stay finished."""
        ...

    def close(self) -> None: ...


def each(engine: Engine, function: Work, tasks: Sequence[Any]) -> list[Any]:
    """All results in the order of the tasks."""
    results = dict(engine.run(function, tasks))
    return [results[i] for i in range(len(tasks))]


class LocalEngine:
    """No other process: for small work, and for a debugger."""

    workers = 1

    def run(self, function: Work, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for i, task in enumerate(tasks):
            yield i, function(task)

    def close(self) -> None:
        return


class ProcessPool:
    """So many processes on this machine. They are started afresh, since a fork of a process with threads may hang."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._processes: list[_Worker] = []

    def run(self, function: Work, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        while len(self._processes) < min(self.workers, len(tasks)):
            self._processes.append(_Worker())
        waiting = iter(enumerate(tasks))
        busy: dict[Any, tuple[_Worker, int]] = {}
        idle = list(self._processes)
        try:
            while True:
                while idle and (following := next(waiting, None)) is not None:
                    worker, (i, task) = idle.pop(), following
                    worker.send(function, task)
                    busy[worker.pipe] = worker, i
                if not busy:
                    return
                for pipe in multiprocessing.connection.wait(list(busy)):
                    worker, i = busy.pop(pipe)
                    yield i, worker.result(task_name(tasks[i]))
                    idle.append(worker)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for worker in self._processes:
            worker.stop()
        self._processes.clear()


class _Worker:
    """One process and the pipe to it. The pipe closes with this process, whatever ends it, and the worker leaves."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        lifeline, self._lifeline = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(theirs, lifeline), daemon=True)
        with _main_hidden():
            self._process.start()
        theirs.close()
        lifeline.close()

    def send(self, function: Work, task: Any) -> None:
        self.pipe.send((function, task))

    def result(self, name: str) -> Any:
        try:
            said = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            raise UserError(_death(self._process.exitcode, name)) from None
        return taken(said, name)

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()
        self._lifeline.close()


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """A child would run the caller's main module again: a script without a guard would start itself."""
    main = sys.modules["__main__"]
    own = main.__dict__
    kept: dict[str, Any] = {key: own.pop(key) for key in ("__file__", "__spec__") if key in own}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(kept)


def task_name(task: Any) -> str:
    return str(getattr(task, "name", task))


def answer(function: Work, task: Any) -> tuple[str, Any]:
    """A task's result or its error, in a form that travels."""
    try:
        return "done", function(task)
    except UserError as error:
        return "refused", str(error)
    except Exception:
        return "failed", traceback.format_exc()


def taken(said: tuple[str, Any], name: str) -> Any:
    """The result in an answer; its error is raised here."""
    kind, value = said
    if kind == "done":
        return value
    raise UserError(value) if kind == "refused" else RuntimeError(f"{name}: {value}")


def _death(code: int | None, name: str) -> str:
    if code is not None and code < 0:
        kind = signal.Signals(-code).name
        why = "most likely out of memory; use fewer workers" if kind == "SIGKILL" else "run it again"
        return f"{name}: the worker was ended by {kind}: {why}. The next run goes on from what was finished"
    return f"{name}: the worker left with code {code}. What was finished is kept; run it again"


def _serve(pipe: Connection, lifeline: Connection) -> None:
    """A worker's life: a task, its result, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    # One thread each, for whatever library would take all cores.
    os.environ.update({"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    threading.Thread(target=_leave_with_parent, args=(lifeline,), daemon=True).start()
    while True:
        try:
            function, task = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(answer(function, task))


def _leave_with_parent(lifeline: Connection) -> None:
    try:
        lifeline.recv()
    except (EOFError, OSError):
        os._exit(1)


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_engine(kind: str, workers: int | None, address: str | None = None) -> Engine:
    """`local` or `ray`. Without a number, one worker per core."""
    if kind == "ray":
        return RayEngine(address, workers)
    count = workers or cores()
    return ProcessPool(count) if count > 1 else LocalEngine()


class RayEngine:
    """A running cluster by its address, or a local one started here, through Ray Data; `workers` bounds the tasks at a
    time. Files and the cache have to lie where every node reaches them. Ray runs a task again when its node dies: that
    is harmless, since a task's output appears at once and is the same every time."""

    def __init__(self, address: str | None = None, workers: int | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise UserError("--engine ray needs Ray: pip install 'bessemer[ray]'") from None
        self._ray = ray
        self._started = not ray.is_initialized()
        if self._started:
            try:
                ray.init(
                    address=address, num_cpus=workers if address is None else None, log_to_driver=False,
                    include_dashboard=False if address is None else None, logging_level=logging.ERROR,
                )  # fmt: skip
            except (ConnectionError, RuntimeError, ValueError) as error:
                place = f"at {address}" if address else "here"
                fix = "give the address of a running one, and RAY_AUTH_MODE as it was started with"
                raise UserError(f"no Ray cluster {place} ({error}); {fix}") from error
        self.workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))

    def run(self, function: Work, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        if not tasks:
            return
        import ray.data

        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = False
        rows = [{"i": i, "task": pickle.dumps((function, task))} for i, task in enumerate(tasks)]
        made = ray.data.from_items(rows, override_num_blocks=len(rows)).map(_run, concurrency=self.workers)
        for row in made.iter_rows():
            yield row["i"], taken(pickle.loads(row["answer"]), task_name(tasks[row["i"]]))

    def close(self) -> None:
        if self._started:
            self._ray.shutdown()


def _run(row: dict[str, Any]) -> dict[str, Any]:
    """On a node. Errors travel back as values, since Ray would wrap them out of recognition."""
    return {"i": row["i"], "answer": pickle.dumps(answer(*pickle.loads(row["task"])))}


Say = Callable[[str], None]


class Meter:
    """Lines such as `tokenizing web 41 % 12.3 MB/s eta 90 s`."""

    def __init__(self, say: Say | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.say: Say = say or (lambda line: None)
        self._clock = clock
        self.start("", 0)

    def start(self, what: str, total_bytes: int) -> None:
        self._what, self._total_bytes, self._done_bytes = what, total_bytes, 0
        self._start_s = self._last_s = self._clock()

    def counting(self, texts: Iterable[str], what: str, total_bytes: int, then: str) -> Iterator[str]:
        """The texts as they are read; `then` is said after the last."""
        self.start(what, total_bytes)
        for text in texts:
            yield text
            self.advance(len(text))
        self.say(then)

    def advance(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        now_s = self._clock()
        if now_s - self._last_s < 1:
            return
        self._last_s = now_s
        rate = self._done_bytes / (now_s - self._start_s)
        share = min(1.0, self._done_bytes / max(self._total_bytes, 1))
        rest_bytes = max(0, self._total_bytes - self._done_bytes)
        left = f" eta {rest_bytes / rate:.0f} s" if rate else ""  # files may be empty
        self.say(f"{self._what} {100 * share:.0f} % {rate / 1e6:.1f} MB/s{left}")
