"""Weights that were saved as bf16 and the 16 bits that it lacks (`optimizer.NAME.remainder`), read as whole fp32 by who
keeps them so, and the other way round. What the bits mean is said in `optim/bits.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

HIGH = -0x10000  # the upper half of 32 bits


def other_halves(saved: Collection[str], state: dict[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """What to read instead of `state` where the two keep weights in different ways, and what to do then."""
    asked, split, whole = dict(state), list[str](), list[str]()
    for name, tensor in state.items():
        rest = _rest(name)
        if not name.startswith("model.") or (rest in saved) == (rest in state):
            continue
        asked[name] = torch.empty_like(tensor, dtype=torch.float32)
        if rest in saved:
            asked[rest] = torch.empty_like(tensor, dtype=torch.int16)
            split.append(name)
        else:
            del asked[rest]
            whole.append(name)

    def finish() -> None:
        for name in split:
            bits = asked[name].view(torch.int32) + asked[_rest(name)].to(torch.int32)
            state[name].copy_(bits.view(torch.float32))
        for name in whole:
            bits = asked[name].view(torch.int32)
            high = (bits + 0x8000) & HIGH
            state[name].copy_(high.view(torch.float32))
            state[_rest(name)].copy_(bits - high)

    return asked, finish


def _rest(name: str) -> str:
    return f"optimizer.{name.removeprefix('model.')}.remainder"
