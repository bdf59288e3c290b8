"""Optimizer state in the host's memory, fetched piece by piece for its update and brought back.

The update itself stays on the GPU: its verdict too, and what travels are 2 bytes a parameter each way (8-bit moments)
to 10 (fp32 moments and kahan's). On a CPU update fp32 state would cross the host's own memory bus several times
(28 bytes a parameter read and written), and every format would need a second step. Both directions go at once, in
streams of their own, beside the arithmetic.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from bessemer.errors import UserError

SLOTS = 3  # one on its way in, one being updated, one on its way out


def host_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory, which a GPU copies from and to behind the program's back.

    Each tensor has pages of its own: torch's page-locked allocator rounds up to powers of two, up to twice the memory.
    """
    if device.type != "cuda":
        return torch.zeros(shape, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)  # a hundred GB of small pages would take a minute to lock
    tensor = torch.frombuffer(pages, dtype=dtype).view(tuple(shape))
    cudart, address = torch.cuda.cudart(), tensor.data_ptr()
    if int(cudart.cudaHostRegister(address, size, 1)) != 0:
        raise UserError(
            f"memory.offload_optimizer: the host refuses to lock {size / 2**20:.0f} MiB more: free some of its memory, "
            "or write memory.moments: 8bit"
        )
    weakref.finalize(pages, cudart.cudaHostUnregister, address)
    return tensor


class HostOffload:
    """Room on the device for the state of three pieces, and the way there and back. On a CPU: plain copies. Each tensor
    of a piece has memory of its own: torch does not compile a step that changes two types in one."""

    def __init__(self, device: torch.device, piece_bytes: dict[str, int]) -> None:
        self.slots = [
            {name: torch.empty(size, dtype=torch.uint8, device=device) for name, size in piece_bytes.items()}
            for _ in range(SLOTS)
        ]
        self.device, self.next = device, 0
        self.streams = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else None
        self.free: list[torch.cuda.Event | None] = [None] * SLOTS

    def begin(self) -> None:
        """Before the first piece of a step: what the last step brought back may be fetched again once it is there."""
        if self.streams:
            self.streams[0].wait_stream(self.streams[1])

    def settle(self) -> None:
        """Wait until the host's memory holds everything: before anyone reads it."""
        if self.streams:
            self.streams[1].synchronize()

    @contextmanager
    def aboard(self, host: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The tensors on the device for a block, which changes them in place; then back to the host.

        Python is far ahead of the device: a slot is only filled when the piece before in it has left.
        """
        slot, self.next = self.next, (self.next + 1) % SLOTS
        rooms = self.slots[slot]
        live = {n: rooms[n][: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for n, tensor in host.items()}
        if self.streams and (left := self.free[slot]):
            self.streams[0].wait_event(left)
        with self._on(0):
            for name, tensor in host.items():
                live[name].copy_(tensor, non_blocking=True)
        if self.streams:
            torch.cuda.current_stream(self.device).wait_stream(self.streams[0])
        yield live
        if self.streams:
            self.streams[1].wait_stream(torch.cuda.current_stream(self.device))
        with self._on(1):
            for name, tensor in host.items():
                tensor.copy_(live[name], non_blocking=True)
        if self.streams:
            self.free[slot] = self.streams[1].record_event()

    def _on(self, direction: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.streams[direction]) if self.streams else nullcontext()
