"""An exponential moving average (EMA) of the weights in float32, for evaluation and export.

It follows accepted updates only. The verdict is used on the device, so the average costs no host sync.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bessemer.dtensor import is_dtensor, local, wrap_shard
from bessemer.optim.guarded import Named


class Ema:
    """`average += (1 - d) * (weight - average)` with d = min(decay, (1 + n) / (10 + n)) after n accepted updates.

    The rising d lets the average forget the random initial weights. Costs four bytes per parameter.
    """

    def __init__(self, named: Named, decay: float) -> None:
        pairs = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.names = [name for name, _ in pairs]
        self.parameters = [parameter for _, parameter in pairs]
        self.decay = decay
        self.averages = [weight.float().clone() for weight in self.weights]
        self.updates = torch.zeros((), dtype=torch.int64, device=self.weights[0].device)

    @property
    def weights(self) -> list[Tensor]:
        """Local shards of sharded parameters, which are averaged like any others."""
        return [local(parameter.detach()) for parameter in self.parameters]

    @torch.no_grad()
    def restart(self) -> None:
        """Restart from the current weights, after loading a checkpoint without an average."""
        torch._foreach_copy_(self.averages, self.weights)
        self.updates.zero_()

    @torch.no_grad()
    def update(self, reject: Tensor) -> None:
        """Follow the weights after a step; a rejected one (`reject` is 1) leaves the average bit-identical."""
        rejected = reject.to(self.updates.device).bool()
        # 1 - d without cancellation; Apple's backend has no float64.
        share = (9.0 / (10 + self.updates)).clamp(min=1 - self.decay)
        changes = torch._foreach_sub([weight.float() for weight in self.weights], self.averages)
        torch._foreach_mul_(changes, share)
        for change in changes:  # masked, not multiplied by 0: NaN weights must not get in
            change.masked_fill_(rejected, 0.0)
        torch._foreach_add_(self.averages, changes)
        self.updates += ~rejected

    def state(self) -> dict[str, Tensor]:
        """The averages by parameter name and the update count, live: a checkpoint load writes into them."""
        pairs = zip(self.averages, self.parameters, strict=True)
        averages = [wrap_shard(average, p) if is_dtensor(p) else average for average, p in pairs]
        return {**dict(zip(self.names, averages, strict=True)), "updates": self.updates}

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Swaps the averaged weights into the model for a block and restores the originals bit for bit. Do not save
        inside."""
        originals = [weight.clone() for weight in self.weights]
        try:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.averages)
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, originals)
