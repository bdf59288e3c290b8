"""AdamW, Adam and Lion for little memory: weights in bf16, moments in bf16 or 8 bits, state on the host.

A step is one function of flat pieces of tensors, in fp32 inside, which torch.compile makes one kernel of on a GPU. The
verdict and the divisor go into it: a rejected step leaves every byte as it was, without a word from the host.
"""

from __future__ import annotations

import importlib.util
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bessemer.errors import UserError
from bessemer.optim.bits import decoded, encoded, halves, joined, rounded
from bessemer.optim.offload import Shuttle, host_zeros
from bessemer.optim.parts import Place
from bessemer.spec.memory import BLOCK, MemorySpec
from bessemer.spec.optimizer import OptimizerSpec

SMALLEST_8BIT = 4096  # elements; smaller tensors keep fp32 moments, as in bitsandbytes and torchao
SMALLEST_OFFLOAD = 1 << 16  # elements; what is smaller is not worth the way
PIECE = 1 << 25  # elements updated at once: an embedding of 1B would need 16 GB of room on its way from the host
M, V = "exp_avg", "exp_avg_sq"


@dataclass(frozen=True)
class Rule:
    """The mathematics of a step, and how its results are kept."""

    name: str
    betas: tuple[float, float]
    eps: float

    @property
    def moments(self) -> tuple[str, ...]:
        return (M,) if self.name == "lion" else (M, V)


@dataclass(frozen=True)
class Piece:
    """Elements [start, end) of a tensor, with the key of their rounding and the place of the first under that key."""

    start: int
    end: int
    key: Tensor
    first: Tensor


def to_low_precision(model: nn.Module) -> None:
    """Keep matrices in bf16 from here on; vectors (norms, biases) are few and stay as they are."""
    for parameter in model.parameters():
        if parameter.ndim >= 2 and parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(torch.bfloat16)


def update(
    rule: Rule, weight: Tensor, grad: Tensor, state: dict[str, Tensor], count: Tensor, reject: Tensor, divisor: Tensor,
    lr: Tensor, decay: Tensor, key: Tensor, first: Tensor,
) -> None:  # fmt: skip
    """One step of a flat piece, unless `reject` is 1. `count` is that of the steps before, `first` the place of the
    piece's first element under its key; all numbers are tensors."""
    vetoed, after = reject.bool(), count + 1
    key = key ^ (after.to(torch.int32) * 0x3779B97)
    old = joined(weight, state["remainder"]) if "remainder" in state else weight.float()
    gradient = grad.float() / divisor
    if rule.name == "adam":
        gradient = gradient + decay * old
    else:
        old = old - lr * decay * old
    moments = {name: _load(state, name) for name in rule.moments}
    beta, slow = rule.betas
    if rule.name == "lion":
        step = torch.sign(torch.lerp(moments[M], gradient, 1 - beta))
        moments[M] = torch.lerp(moments[M], gradient, 1 - slow)
    else:
        moments[M] = torch.lerp(moments[M], gradient, 1 - beta)
        moments[V] = torch.lerp(moments[V], gradient * gradient, 1 - slow)
        denominator = (moments[V] / _unbiased(slow, after)).sqrt() + rule.eps
        step = moments[M] / _unbiased(beta, after) / denominator
    new, kept = old - lr * step, {}
    if "remainder" in state:
        new, kept["remainder"] = halves(new)
    elif weight.dtype == torch.bfloat16:
        new = rounded(new, key, first)
    for salt, name in enumerate(rule.moments, 1):
        kept |= _keep(state, name, moments[name], key + salt, first)
    weight.copy_(torch.where(vetoed, weight, new.to(weight.dtype)))
    for name, value in kept.items():  # chosen, not multiplied by 0, which would let NaN through
        state[name].copy_(torch.where(vetoed, state[name], value))


def _unbiased(beta: float, count: Tensor) -> Tensor:
    """1 - beta^count, without the digits that the subtraction would lose in fp32."""
    return -torch.expm1(count * (math.log(beta) if beta else -math.inf))


def _load(state: dict[str, Tensor], name: str) -> Tensor:
    held = state[name]
    return decoded(held, state[f"{name}_scale"], name == M) if held.dtype == torch.uint8 else held.float()


def _keep(state: dict[str, Tensor], name: str, value: Tensor, key: Tensor, first: Tensor) -> dict[str, Tensor]:
    """A moment as it is stored, rounded stochastically: to the nearest, a second moment with a beta of 0.999 would
    never fall, as the change of a step is smaller than half a digit."""
    held = state[name]
    if held.dtype == torch.uint8:
        codes, scale = encoded(value, name == M, key, first)
        return {name: codes, f"{name}_scale": scale}
    return {name: rounded(value, key, first).to(held.dtype) if held.dtype == torch.bfloat16 else value}


@cache
def _compiled() -> Callable[..., None]:
    # Pieces are flat, or rows of blocks, so that one graph serves tensors of all shapes.
    fused = torch.compile(update, dynamic=True, fullgraph=True)

    def run(*arguments: Any) -> None:
        # A graph for each kind of tensor, and none is in vain; betas and epsilon are constants in it.
        with torch._dynamo.config.patch(recompile_limit=64, specialize_float=True):
            fused(*arguments)

    return run


@cache
def _kernel() -> Callable[..., None] | None:
    """AdamW with nothing to round, by hand: faster than what is compiled. None where there is no Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from bessemer.optim.kernels import adamw

    return lambda rule, *arguments: adamw(rule.betas, rule.eps, *arguments[:-2])


class Lean(Optimizer):
    """The optimizer over all trained parameters. Takes the verdict as `found_inf` and the divisor as `grad_scale`, like
    torch's fused kernels; without them it always steps."""

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], named: Sequence[tuple[str, nn.Parameter]], spec: OptimizerSpec,
        memory: MemorySpec, seed: int = 0, places: Mapping[nn.Parameter, Place] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(groups, {"lr": 0.0})
        own = spec.settings()
        self.rule = Rule(spec.name, (own["betas"][0], own["betas"][1]), own.get("eps", 0.0))
        self.device = named[0][1].device
        places = places or {}
        self.pieces: dict[nn.Parameter, list[Piece]] = {}
        rooms: dict[str, int] = {}  # of what is offloaded, for the largest piece
        for name, parameter in named:
            place = places.get(parameter, Place(0, parameter.numel()))
            self.pieces[parameter] = self._cut(f"{seed}.{name}", place.first, parameter.numel())
            away = memory.offload_optimizer and parameter.numel() >= SMALLEST_OFFLOAD
            self.state[parameter] = self._fresh(name, parameter, memory, away, place)
            if away:
                share = min(1.0, PIECE / parameter.numel())
                held = {key: tensor for key, tensor in self.state[parameter].items() if key != "step"}
                rooms |= {key: max(rooms.get(key, 0), math.ceil(share * held[key].nbytes)) for key in held}
        self.shuttle = Shuttle(self.device, rooms) if rooms else None

    def _cut(self, name: str, first: int, size: int) -> list[Piece]:
        """The pieces of a tensor, or of a part that begins at `first` of a whole: cut where the whole is cut, so that
        its elements are rounded alike however it is divided. Keys are made once."""
        pieces = []
        for start in range(first - first % PIECE, first + size, PIECE):
            begin, end = max(start, first), min(start + PIECE, first + size)
            key = zlib.crc32(f"{name}.{start}".encode()) - (1 << 31)
            numbers = torch.tensor([key, begin - start], dtype=torch.int32, device=self.device).unbind()
            pieces.append(Piece(begin - first, end - first, *numbers))
        return pieces

    def _fresh(
        self, name: str, parameter: nn.Parameter, memory: MemorySpec, away: bool, place: Place
    ) -> dict[str, Tensor]:
        shape, size, whole = parameter.shape, parameter.numel(), place.size
        layout: dict[str, tuple[Sequence[int], torch.dtype]] = {}
        if parameter.dtype == torch.bfloat16 and memory.weights == "kahan":
            layout["remainder"] = shape, torch.int16
        in_blocks = memory.moments == "8bit" and whole >= SMALLEST_8BIT and whole % BLOCK == 0
        if in_blocks and (size % BLOCK or not place.even):
            raise UserError(
                f"memory.moments: 8bit keeps blocks of {BLOCK} numbers, which dividing {name} among these processes "
                "would cut: write bf16, or another parallel.dp_shard"
            )
        for moment in self.rule.moments:
            if in_blocks:
                layout |= {moment: (shape, torch.uint8), f"{moment}_scale": ((size // BLOCK,), torch.float32)}
            else:
                layout[moment] = shape, torch.bfloat16 if memory.moments == "bf16" else torch.float32
        make = host_zeros if away else torch.zeros
        made = {key: make(shape, dtype=dtype, device=self.device) for key, (shape, dtype) in layout.items()}
        return {"step": torch.zeros((), device=self.device), **made}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "no closure is ever given here"
        reject = torch.zeros((), device=self.device) if self.found_inf is None else self.found_inf
        divisor = torch.ones((), device=self.device) if self.grad_scale is None else self.grad_scale
        if self.shuttle:
            self.shuttle.begin()
        counts = []
        for group in self.param_groups:
            numbers = self.numbers(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter, parameter.grad, reject, divisor, *numbers)
                    counts.append(self.state[parameter]["step"])
        if counts:
            torch._foreach_add_(counts, [1 - reject] * len(counts))  # one tensor alone would be read by the host

    def numbers(self, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """A group's learning rate and decay on the device, by a fill rather than a copy, for which a GPU would wait."""
        lr, decay = (torch.full((), group[name], device=self.device) for name in ("lr", "weight_decay"))
        return lr, decay

    def step_one(
        self, parameter: nn.Parameter, grad: Tensor, reject: Tensor, divisor: Tensor, lr: Tensor, decay: Tensor
    ) -> None:
        """Step one parameter, by pieces; its count is the caller's."""
        state, total = self.state[parameter], parameter.numel()
        if not total:  # fewer rows than processes: this one has none
            return
        held = {name: tensor for name, tensor in state.items() if name != "step"}
        columns = BLOCK if any(tensor.dtype == torch.uint8 for tensor in held.values()) else 1
        weights, grads = parameter.detach().view(-1, columns), grad.contiguous().view(-1, columns)
        rows = {name: tensor.view(len(weights), -1) for name, tensor in held.items()}
        away = self.shuttle if total >= SMALLEST_OFFLOAD else None
        run = _compiled() if parameter.is_cuda else update
        fp32 = all(held[name].dtype == torch.float32 for name in self.rule.moments)
        if (
            parameter.is_cuda
            and self.rule.name == "adamw"
            and fp32
            and (parameter.dtype == torch.float32 or "remainder" in held)
        ):
            run = _kernel() or run
        for piece in self.pieces[parameter]:
            weight, gradient, part = weights, grads, rows
            if len(self.pieces[parameter]) > 1:
                at = slice(piece.start // columns, piece.end // columns)
                weight, gradient, part = weights[at], grads[at], {name: tensor[at] for name, tensor in rows.items()}
            with away.aboard(part) if away else nullcontext(part) as live:
                numbers = (reject, divisor, lr, decay, piece.key, piece.first)
                run(self.rule, weight, gradient, live, state["step"], *numbers)
