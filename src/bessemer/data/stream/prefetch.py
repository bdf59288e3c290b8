"""The next steps' batches, assembled in threads while a step trains; for a GPU, in memory that it can copy from."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import numpy as np

from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.errors import UserError

_HORIZON = 8  # steps beyond those being assembled whose shards are fetched, where they lie afar


class Prefetch:
    """Assembles the next `depth` steps' micro-batches in threads while a step trains; close it, or use `with`.

    One thread keeps up with all but very large or slow reads (100 M tokens/s and more from memory); more of them
    overlap the waiting for disks. With `pin`, the arrays lie in page-locked memory, which needs CUDA: a copy to the
    GPU can then run by itself, and `tensor.pin_memory()` finds nothing left to do.
    """

    def __init__(
        self,
        stream: BatchStream | IterableStream,
        micro_rows: int,
        dp_rank: int = 0,
        dp_world: int = 1,
        depth: int = 2,
        threads: int = 1,
        pin: bool = False,
    ) -> None:
        if pin:
            _check_pinning()
        self.stream, self.depth, self.pin = stream, depth, pin
        self.wait_s = 0.0  # how long the last get waited
        self._micro_rows, self._rank = micro_rows, (dp_rank, dp_world)
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="batches")
        self._ahead: dict[int, Future[list[Batch]]] = {}
        self._expected = -1  # the last step that the stream was told of
        # A copy to the GPU may still read from a batch that the caller has dropped.
        self._given: deque[list[Batch]] = deque(maxlen=2)

    def get(self, step: int) -> list[Batch]:
        """The step's micro-batches; the `depth` after it are started. A step out of turn starts afresh. What went wrong
        while assembling a step is raised here, for that step, and asking again tries again."""
        began = time.perf_counter()
        if step not in self._ahead:
            self._forget()
        for ahead in range(step, step + 1 + self.depth):
            if ahead not in self._ahead:
                self._ahead[ahead] = self._threads.submit(self._assemble, ahead)
        for passed in [key for key in self._ahead if key < step]:
            self._ahead.pop(passed).cancel()
        batches = self._ahead.pop(step).result()
        if self.pin:
            self._given.append(batches)
        self.wait_s = time.perf_counter() - began
        return batches

    def close(self) -> None:
        """Waits for what is being assembled, and drops the rest."""
        self._forget()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._given.clear()

    def _assemble(self, step: int) -> list[Batch]:
        for coming in range(max(step, self._expected) + 1, step + 1 + _HORIZON):
            self._expected = coming
            self.stream.expect(coming, *self._rank)
        batches = self.stream.micro_batches(step, self._micro_rows, *self._rank)
        return [pinned(batch) for batch in batches] if self.pin else batches

    def _forget(self) -> None:
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()
        self._expected = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pinned(batch: Batch) -> Batch:
    """A copy in page-locked memory. Every array has its own allocation, so that torch knows when copies from it end."""
    import torch

    def copy(array: np.ndarray) -> np.ndarray:
        tensor = torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, pin_memory=True)
        locked = tensor.numpy()
        locked[...] = array
        return locked

    large = ("tokens", "targets", "weights", "documents")
    return dataclasses.replace(batch, **{name: copy(getattr(batch, name)) for name in large})


def _check_pinning() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError("batches can be pinned for a CUDA GPU only, and this machine has none: use pin=False")
