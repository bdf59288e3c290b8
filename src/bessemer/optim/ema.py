"""A running average of the weights (EMA), in float32, beside the model: what evaluation and export may use instead.

It follows accepted updates only. The verdict is used on the device, so that an average costs no host sync.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bessemer.optim.guarded import Named
from bessemer.optim.low_memory import held, of_whole


class Ema:
    """`average += (1 - d) * (weight - average)` with d = min(decay, (1 + n) / (10 + n)) after n accepted updates.

    The rising d lets the average forget the first, random weights. Costs four bytes a parameter.
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
        """Of divided parameters the parts that lie here, which are averaged as any others."""
        return [held(parameter.detach()) for parameter in self.parameters]

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again from the weights as they are now: after a load from a checkpoint that has no average."""
        torch._foreach_copy_(self.averages, self.weights)
        self.updates.zero_()

    @torch.no_grad()
    def update(self, reject: Tensor) -> None:
        """Follow the weights after a step; a rejected one (`reject` is 1) leaves the average bit-untouched."""
        rejected = reject.to(self.updates.device).bool()
        # 1 - d, without the digits that the subtraction would lose; Apple's backend has no float64 to save them.
        share = (9.0 / (10 + self.updates)).clamp(min=1 - self.decay)
        change = torch._foreach_sub([weight.float() for weight in self.weights], self.averages)
        torch._foreach_mul_(change, share)
        for difference in change:  # chosen, not multiplied by 0: weights that are NaN already must not get in
            difference.masked_fill_(rejected, 0.0)
        torch._foreach_add_(self.averages, change)
        self.updates += ~rejected

    def state(self) -> dict[str, Tensor]:
        """The averages by parameter name and the count of updates, live: a checkpoint's load writes into them."""
        whole = (of_whole(average, p) for average, p in zip(self.averages, self.parameters, strict=True))
        return {**dict(zip(self.names, whole, strict=True)), "updates": self.updates}

    @contextmanager
    def swap(self) -> Iterator[None]:
        """The averaged weights in the model for a block, then its own ones again, bit for bit. Do not save inside."""
        own = [weight.clone() for weight in self.weights]
        try:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.averages)
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, own)
