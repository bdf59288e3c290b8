"""How long a process works for itself in a step, without waiting for the others: what tells a slow one.

Processes of a run pass their collectives together, so all their steps take as long as the slowest's. Work of one's own
is what comes before the first layer (data, the host), and the layers' forward and backward passes. In between lie the
collectives: FSDP gathers a layer before its forward and its backward pass, DDP waits at the end, and some optimizers in
their step. Tensor and context parallel peers wait inside of layers and show the same pace.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.guard.whereabouts import Whereabouts

MEASURED = 2  # every so many steps: the hooks cost some microseconds a layer
TOLD = 16  # steps between the words to the others: the median of what was measured since the last
Mark = float | torch.cuda.Event


def first_tensor(found: Any) -> Tensor | None:
    found = found[0] if isinstance(found, tuple) and found else found
    return found if isinstance(found, Tensor) else None


class Pace:
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

    def end(self, step: int, where: Whereabouts) -> None:
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
