"""The same work on a Ray cluster, through Ray Data. Files and the cache have to lie where every node reaches them.

A task is a part, exactly as in the pool of one machine, so the results are the same bytes. Ray runs a task again
when its node dies; that is harmless, since a task's output appears at once and is the same every time.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from bessemer.data.curate.engine import Work, answer, taken, task_name
from bessemer.errors import UserError


class RayEngine:
    """A running cluster by its address, or a local one started here. `workers` bounds the tasks at a time."""

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
