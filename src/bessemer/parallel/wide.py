"""Replicas whose weights are kept in bf16 and whose gradients add up in fp32. DDP's buckets have the type of the
weights, and refuse any other: here each gradient is sent as soon as it is known, in fp32, and the backward pass ends
when all of them have arrived.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class WideSums:
    """Adds up the gradients of a model over a group. All processes run the same graph, and so send in one order."""

    def __init__(self, model: nn.Module, group: Any) -> None:
        self.group, self.now = group, True
        self.under_way: list[tuple[Tensor, Tensor, Any]] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._ready)
        model.set_requires_gradient_sync = self.switch  # type: ignore[assignment]

    def switch(self, now: bool) -> None:
        """Whether the next backward pass sends; see `shard.send_gradients`."""
        self.now = now

    @torch.no_grad()
    def _ready(self, parameter: Tensor) -> None:
        if not self.now or parameter.grad is None:
            return
        if not self.under_way:
            torch.autograd.Variable._execution_engine.queue_callback(self._arrive)  # type: ignore[attr-defined]
        wide = parameter.grad.float()  # itself, where it is fp32 already
        self.under_way.append((parameter.grad, wide, dist.all_reduce(wide, group=self.group, async_op=True)))

    @torch.no_grad()
    def _arrive(self) -> None:
        for gradient, wide, work in self.under_way:
            work.wait()
            if wide is not gradient:
                gradient.copy_(wide)
        self.under_way = []
