"""What asynchronous saves are made of: a copy of the state that training cannot touch, and a thread to write it.

A thread and not a process: torch's writing, hashing and fsync leave Python's lock to the training (the longest gap that
a loop saw while 400 MB were written was 18 ms), and the copy needs no shared memory. It is a daemon, so that leaving at
once means at once: an unfinished save has no manifest and is swept at the next start.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

from bessemer.dtensor import is_dtensor

Result = TypeVar("Result")
State = dict[str, Tensor]


def in_background(work: Callable[[], Result], name: str) -> Future[Result]:
    """Run `work` in a daemon thread; the future has its result or whatever it raised."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # DCP's exception is a BaseException
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _here(tensor: Tensor) -> Tensor:
    """What this process holds of it; the same memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def state_bytes(state: State) -> int:
    """Of what this process holds of it."""
    return sum(_here(tensor).numel() * tensor.element_size() for tensor in state.values())


class Staging:
    """Host copies of a state, in memory that is kept from save to save: to touch it for the first time takes ten times
    as long as to copy. For a GPU's tensors it is page-locked, which makes the copy several times as fast. Of a tensor
    that is divided among processes each copies its part, and the copy is a part of the same whole."""

    def __init__(self) -> None:
        self._held: State = {}

    @property
    def bytes(self) -> int:
        return state_bytes(self._held)

    def copy(self, state: State) -> State:
        """The copy is complete when this returns; it is overwritten by the next call."""
        for name, tensor in state.items():
            held = self._held.get(name)
            if held is None or not _alike(held, tensor):
                held = self._held[name] = _host_memory(tensor)
            _here(held).copy_(_here(tensor), non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in state.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return {name: self._held[name] for name in state}


def _alike(held: Tensor, tensor: Tensor) -> bool:
    places = [getattr(one, "placements", None) for one in (held, tensor)]
    return held.shape == tensor.shape and held.dtype == tensor.dtype and places[0] == places[1]


def _host_memory(tensor: Tensor) -> Tensor:
    memory = _locked(_here(tensor))
    if not is_dtensor(tensor):
        return memory
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # Built by hand: torch's own way would move it to the mesh's device.
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
    return DTensor(memory, spec, requires_grad=False)


def _locked(tensor: Tensor) -> Tensor:
    memory = torch.empty(tensor.shape, dtype=tensor.dtype)
    if tensor.is_cuda and memory.numel():
        # torch's own page-locked allocator rounds up to powers of two: up to twice the memory for a large model.
        cudart = torch.cuda.cudart()
        address, size = memory.data_ptr(), memory.numel() * memory.element_size()
        if int(cudart.cudaHostRegister(address, size, 1)) == 0:  # portable; if refused, the memory serves as it is
            weakref.finalize(memory, cudart.cudaHostUnregister, address)
    return memory
