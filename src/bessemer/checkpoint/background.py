"""Saving in the background: a copy of the state that training cannot change, and a thread that writes it.

torch's writing, hashing and fsync release the GIL (the longest gap of a loop during 400 MB was 18 ms), and a thread
needs no shared memory. It is a daemon, so a run can exit at once: an unfinished save has no manifest and is swept at
the next start. Importing this loads no distributed checkpoint code.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

from bessemer.dtensor import is_dtensor, local, wrap_shard

Result = TypeVar("Result")
State = dict[str, Tensor]


def in_background(work: Callable[[], Result], name: str) -> Future[Result]:
    """Run `work` in a daemon thread; the future has its result or exception."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # DCP raises a BaseException
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def state_bytes(state: State) -> int:
    """Bytes that this process holds."""
    return sum(local(tensor).nbytes for tensor in state.values())


class Staging:
    """Host copies of a state, in memory that is reused from save to save: allocating it takes ten times as long as
    copying. It is pinned for GPU tensors, which makes the copy several times faster. Of a sharded tensor each process
    copies its shard."""

    def __init__(self) -> None:
        self._copies: State = {}

    @property
    def bytes(self) -> int:
        return state_bytes(self._copies)

    def copy(self, state: State) -> State:
        """The copy is complete on return; the next call overwrites it."""
        for name, tensor in state.items():
            copy = self._copies.get(name)
            if copy is None or not _same_layout(copy, tensor):
                copy = self._copies[name] = _host_memory(tensor)
            local(copy).copy_(local(tensor), non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in state.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return {name: self._copies[name] for name in state}


def _same_layout(a: Tensor, b: Tensor) -> bool:
    placements = [getattr(tensor, "placements", None) for tensor in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and placements[0] == placements[1]


def _host_memory(tensor: Tensor) -> Tensor:
    memory = _pinned(local(tensor))
    return wrap_shard(memory, tensor) if is_dtensor(tensor) else memory


def _pinned(tensor: Tensor) -> Tensor:
    memory = torch.empty(tensor.shape, dtype=tensor.dtype)
    if tensor.is_cuda and memory.numel():
        # torch's pinned allocator rounds up to powers of two: up to twice the memory for a large model.
        cudart = torch.cuda.cudart()
        address = memory.data_ptr()
        if int(cudart.cudaHostRegister(address, memory.nbytes, 1)) == 0:  # portable; unpinned memory works too
            weakref.finalize(memory, cudart.cudaHostUnregister, address)
    return memory
