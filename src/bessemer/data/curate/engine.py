"""Runs tasks in this process, a pool of processes or a Ray cluster, with the same results whatever the number of
workers. A task is small (a part and where to write); its output goes to disk and only a few numbers come back. `Meter`
reports the progress of long work on data, at most one line a second."""

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


class CurationEngine(Protocol):
    """Runs a function on every task. Messages call a task by its `name`."""

    @property
    def workers(self) -> int: ...

    def run(self, function: Work, tasks: Sequence[Any], /) -> Iterator[tuple[int, Any]]:
        """Yields (index of the task, its result) as tasks finish. The first failure ends it; finished tasks stay
        finished."""
        ...

    def close(self) -> None: ...


def run_all(engine: CurationEngine, function: Work, tasks: Sequence[Any]) -> list[Any]:
    """All results in the order of the tasks."""
    results = dict(engine.run(function, tasks))
    return [results[i] for i in range(len(tasks))]


class LocalEngine:
    """Runs tasks in this process: for small work and for debugging."""

    workers = 1

    def run(self, function: Work, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for i, task in enumerate(tasks):
            yield i, function(task)

    def close(self) -> None:
        return


class ProcessPool:
    """A pool of spawned processes: forking a process with threads may hang."""

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
                while idle and (next_task := next(waiting, None)) is not None:
                    worker, (i, task) = idle.pop(), next_task
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
    """One process and the pipe to it. The worker exits when its lifeline closes, however this process ends."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        lifeline, self._lifeline = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(theirs, lifeline), daemon=True)
        with _hide_main_module():
            self._process.start()
        theirs.close()
        lifeline.close()

    def send(self, function: Work, task: Any) -> None:
        self.pipe.send((function, task))

    def result(self, name: str) -> Any:
        try:
            return unwrap_answer(self.pipe.recv(), name)
        except (EOFError, ConnectionResetError):
            self._process.join(5)
        code = self._process.exitcode
        if code is None or code >= 0:
            raise UserError(f"{name}: the worker exited with code {code}. Finished work is kept; run it again")
        kind = signal.Signals(-code).name
        fix = "most likely out of memory; use fewer workers" if kind == "SIGKILL" else "run it again"
        raise UserError(f"{name}: the worker was killed by {kind}: {fix}. The next run continues from finished work")

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()
        self._lifeline.close()


@contextlib.contextmanager
def _hide_main_module() -> Iterator[None]:
    """Hides the main module from spawned children, which would run it again: a script without a guard would start
    itself."""
    main = sys.modules["__main__"]
    namespace = main.__dict__
    hidden: dict[str, Any] = {key: namespace.pop(key) for key in ("__file__", "__spec__") if key in namespace}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


def task_name(task: Any) -> str:
    return str(getattr(task, "name", task))


def run_task(function: Work, task: Any) -> tuple[str, Any]:
    """A task's result or its error, in a picklable form."""
    try:
        return "done", function(task)
    except UserError as error:
        return "refused", str(error)
    except Exception:
        return "failed", traceback.format_exc()


def unwrap_answer(answer: tuple[str, Any], name: str) -> Any:
    """The result of an answer; raises its error."""
    kind, value = answer
    if kind == "done":
        return value
    raise UserError(value) if kind == "refused" else RuntimeError(f"{name}: {value}")


def _serve(pipe: Connection, lifeline: Connection) -> None:
    """The main loop of a worker: runs tasks until the pipe closes."""

    def exit_with_parent() -> None:
        try:
            lifeline.recv()
        except (EOFError, OSError):
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its workers
    # One thread per worker for libraries that would use all cores.
    os.environ.update({"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    threading.Thread(target=exit_with_parent, daemon=True).start()
    while True:
        try:
            function, task = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(run_task(function, task))


def available_cores() -> int:
    """The number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_engine(kind: str, workers: int | None, address: str | None = None) -> CurationEngine:
    """`local` or `ray`. The default number of workers is one per core."""
    if kind == "ray":
        return RayEngine(address, workers)
    count = workers or available_cores()
    return ProcessPool(count) if count > 1 else LocalEngine()


class RayEngine:
    """A running cluster by its address, or a local one, through Ray Data; `workers` limits the concurrent tasks. Files
    and the cache must be reachable from every node. Ray reruns the tasks of a failed node, which is safe: a task's
    output appears atomically and is the same every time."""

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
                fix = "give the address of a running one, and the RAY_AUTH_MODE that it was started with"
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
        answers = ray.data.from_items(rows, override_num_blocks=len(rows)).map(_run_on_ray, concurrency=self.workers)
        for row in answers.iter_rows():
            yield row["i"], unwrap_answer(pickle.loads(row["answer"]), task_name(tasks[row["i"]]))

    def close(self) -> None:
        if self._started:
            self._ray.shutdown()


def _run_on_ray(row: dict[str, Any]) -> dict[str, Any]:
    """Runs on a node. Errors travel back as values, because Ray would wrap them."""
    return {"i": row["i"], "answer": pickle.dumps(run_task(*pickle.loads(row["task"])))}


Say = Callable[[str], None]


class Meter:
    """Prints lines such as `tokenizing web 41 % 12.3 MB/s eta 90 s`."""

    def __init__(self, say: Say | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.say: Say = say or (lambda line: None)
        self._clock = clock
        self.start("", 0)

    def start(self, label: str, total_bytes: int) -> None:
        self._label, self._total_bytes, self._done_bytes = label, total_bytes, 0
        self._start_s = self._last_s = self._clock()

    def counting(self, texts: Iterable[str], label: str, total_bytes: int, then: str) -> Iterator[str]:
        """Passes the texts through, counting them; prints `then` after the last."""
        self.start(label, total_bytes)
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
        left = f" eta {rest_bytes / rate:.0f} s" if rate else ""  # zero while only empty files were read
        self.say(f"{self._label} {100 * share:.0f} % {rate / 1e6:.1f} MB/s{left}")
