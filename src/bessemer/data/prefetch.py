"""The next steps' batches, assembled in a thread while a step trains."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from bessemer.data.stream import Batch, BatchStream


class Prefetch:
    """Assembles the next steps' micro-batches in one thread while a step trains; close it, or use `with`."""

    def __init__(
        self, stream: BatchStream, micro_rows: int, dp_rank: int = 0, dp_world: int = 1, depth: int = 2
    ) -> None:
        self.stream, self.depth = stream, depth
        self.wait_s = 0.0  # how long the last get waited
        self._cut = micro_rows, dp_rank, dp_world
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: dict[int, Future[list[Batch]]] = {}

    def get(self, step: int) -> list[Batch]:
        """The step's micro-batches; the `depth` after it are started. A step out of turn starts afresh."""
        began = time.perf_counter()
        if step not in self._ahead:
            self._forget()
        for ahead in range(step, step + 1 + self.depth):
            if ahead not in self._ahead:
                self._ahead[ahead] = self._thread.submit(self.stream.micro_batches, ahead, *self._cut)
        for passed in [key for key in self._ahead if key < step]:
            self._ahead.pop(passed).cancel()
        batches = self._ahead.pop(step).result()
        self.wait_s = time.perf_counter() - began
        return batches

    def close(self) -> None:
        self._forget()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _forget(self) -> None:
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
