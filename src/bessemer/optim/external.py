"""Optimizers of the pytorch-optimizer package, by name: `optimizer.name: pytorch_optimizer.Prodigy`.

They step on the host's verdict. Their state is made before the first step, and the numbers that they keep in their
parameter groups (step counts, Prodigy's distance) become tensors of the state, so that a checkpoint has all of it. One
that needs a closure, or whose rejected step leaves a trace, is refused by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bessemer.errors import UserError

PREFIX = "pytorch_optimizer."
OURS = ("lr", "lr_scale", "factor", "weight_decay", "params")  # keys of a group that Bessemer sets


def find_class(name: str) -> type[Optimizer]:
    """The class of `pytorch_optimizer.NAME`. Refuses a name that is no optimizer there."""
    try:
        package = importlib.import_module("pytorch_optimizer")
    except ImportError:
        raise UserError(f"optimizer.name: {name} needs pytorch-optimizer: pip install 'bessemer[optimizers]'") from None
    kind = getattr(package, name.removeprefix(PREFIX), None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer) and hasattr(kind, "init_group")):
        raise UserError(f"optimizer.name: {name} is no optimizer of pytorch-optimizer")
    return kind


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in group.items() if isinstance(v, (int, float)) and not isinstance(v, bool) and k not in OURS}


def changing_numbers(kind: type[Optimizer], arguments: Mapping[str, Any]) -> list[str]:
    """Which numbers of a parameter group a step changes, found by stepping one matrix."""
    weight = nn.Parameter(torch.ones(8, 6))
    optimizer = kind([weight], **{"lr": 0.1, **arguments})
    before: dict[str, float] = {}
    for _ in range(3):
        weight.grad = torch.full_like(weight, 0.5)
        optimizer.step()
        before = before or {k: v for k, v in optimizer.defaults.items() if k in _numbers(optimizer.defaults)}
    after = _numbers(optimizer.param_groups[0])
    return sorted(key for key, value in after.items() if before.get(key) != value)


class GroupNumbers(Optimizer):
    """Keeps the changing numbers of each group as tensors in the state of its first parameter."""

    changing: tuple[str, ...] = ()

    def make_state(self) -> None:
        """The state that the first step would make."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
            self.init_group(group)  # type: ignore[attr-defined]
            for parameter in group["params"]:
                parameter.grad = None
                for key, value in list(self.state[parameter].items()):
                    if not isinstance(value, Tensor):
                        raise RuntimeError(f"keeps {key} as {type(value).__name__}, which no checkpoint holds")
            first = self.state[group["params"][0]]
            for key in self.changing:
                first[f"group_{key}"] = torch.tensor(float(group.get(key) or 0.0), dtype=torch.float64)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first = self.state[group["params"][0]]
            for key in self.changing:
                value = float(first[f"group_{key}"])
                group[key] = int(value) if isinstance(group.get(key), int) else value
        super().step()
        for group in self.param_groups:
            first = self.state[group["params"][0]]
            for key in self.changing:
                first[f"group_{key}"].fill_(float(group[key]))


def external_optimizer(name: str, groups: list[dict[str, Any]], arguments: Mapping[str, Any]) -> Optimizer:
    """The optimizer over the groups, with its state made."""
    kind = find_class(name)
    combined = type(kind.__name__, (GroupNumbers, kind), {"changing": tuple(changing_numbers(kind, arguments))})
    optimizer = combined(groups, lr=0.0, **arguments)
    optimizer.make_state()
    return optimizer
