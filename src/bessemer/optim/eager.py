"""torch's optimizers without their torch.compile wrappers. The first call of a wrapped method imports torch._dynamo,
which takes 1.7 s on one core; no optimizer is compiled here. The wrapped functions run as they are: no number changes.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer


class Eager(Optimizer):
    """Comes before an optimizer in a class's bases."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        inspect.unwrap(Optimizer.add_param_group)(self, param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return inspect.unwrap(super().step.__func__)(self, closure)  # type: ignore[attr-defined]


def eager(kind: type[Optimizer]) -> type[Optimizer]:
    """The same optimizer, under the same name."""
    return type(kind.__name__, (Eager, kind), {})
