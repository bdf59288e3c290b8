"""Numbers in few bits: bf16 by stochastic rounding, fp32 split in two halves, blocks of moments in 8 bits.

All of it is arithmetic on whole tensors that torch.compile fuses into an optimizer's step. Where digits are taken away
it works on the bits: a compiler may leave out a cast to bf16 and back, and the rounding with it.

A parameter that is divided among processes, as the part that this one holds: a step that goes element by element is
taken on the part as on any tensor. Saved state is given back as parts of a whole, which any other layout can read.

AdamW, Adam and Lion for little memory: weights in bf16, moments in bf16 or 8 bits, state on the host.

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

from bessemer.dtensor import is_dtensor
from bessemer.errors import UserError
from bessemer.optim.offload import HostOffload, host_zeros
from bessemer.spec.optimizer import BLOCK, MemorySpec, OptimizerSpec

HIGH = -0x10000  # the upper half of 32 bits: sign, exponent and mantissa of a bf16


def mixed(x: Tensor) -> Tensor:
    """A hash of 32 bits (lowbias32, of Wellons' hash prospector); int32 products wrap around."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def noise(like: Tensor, key: Tensor, first: Tensor | int = 0) -> Tensor:
    """16 random bits for each element, a pure function of its place and the key: a run that resumes rounds as it would
    have, on any device, and there is no generator's state to save. `first` is the place of the first element."""
    # Down to 32 bits only after a number from memory: torch 2.11 compiles an int32 arange into 64 bits where pieces are
    # of any size, and then products do not wrap around.
    places = torch.arange(like.numel(), device=like.device).view(like.shape) + first + key.long()
    return mixed(mixed(places.to(torch.int32)) ^ key) & 0xFFFF


def rounded(x: Tensor, key: Tensor, first: Tensor | int = 0) -> Tensor:
    """fp32 to a bf16 neighbour, up with the probability of what is below it: right on average."""
    bits = (x.view(torch.int32) + noise(x, key, first)) & HIGH
    return torch.where(x.isfinite(), bits.view(torch.float32), x)


def split_weights(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as its nearest bf16 (still of type fp32) and the bits that are missing, as int16; `joined` undoes it."""
    bits = x.view(torch.int32)
    high = (bits + 0x8000) & HIGH  # a tie goes up: then the difference always fits 16 bits
    return torch.where(x.isnan(), x, high.view(torch.float32)), (bits - high).to(torch.int16)


def join_weights(weight: Tensor, remainder: Tensor) -> Tensor:
    return (weight.float().view(torch.int32) + remainder.to(torch.int32)).view(torch.float32)


def encoded(x: Tensor, signed: bool, key: Tensor, first: Tensor | int = 0) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits, and the largest magnitude of each block, a row of x, as its scale.

    Codes are spaced evenly in the cube root, of a second moment in the sixth: both are cube roots of a gradient's size.
    Against the dynamic maps of bitsandbytes and torchao there is no table to search, and a step of the map is finer on
    a real model's moments (the update m / sqrt(v) to the nearest is 1.4 % off against 2.1 %), the more so the wider a
    block is spread. They are rounded stochastically: to the nearest, small second moments rise and never fall. And one
    above 0 never becomes 0: the update would be divided by epsilon.
    """
    scale = x.abs().amax(1, keepdim=True)
    unit, chance = x / scale.clamp(min=torch.finfo(torch.float32).tiny), noise(x, key, first) / 0x10000
    if signed:
        codes = (unit.abs().pow(1 / 3) * 127 + chance).floor() * unit.sign() + 128
    else:
        codes = torch.where(x > 0, (unit.pow(1 / 6) * 255 + chance).floor().clamp(min=1), 0.0)
    return codes.to(torch.uint8), scale


def decoded(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    root = (codes.float() - 128) / 127 if signed else codes.float() / 255
    cube = root * root * root
    return cube * scale if signed else cube * cube * scale


@dataclass(frozen=True)
class ShardPlace:
    """Of a part in its whole."""

    first: int  # index of its first element, counted flat
    size: int  # elements of the whole
    even: bool = True  # every process holds equally many rows


@torch.no_grad()
def held(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor; the same memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def part_of(parameter: nn.Parameter) -> nn.Parameter:
    """What an optimizer is given instead of a divided parameter; a whole one stays as it is."""
    return nn.Parameter(held(parameter)) if is_dtensor(parameter) else parameter


def place_of(parameter: Tensor) -> ShardPlace:
    if not is_dtensor(parameter):
        return ShardPlace(0, parameter.numel())
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = parameter.device_mesh, parameter.placements
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    first = sum(at * step for at, step in zip(offset, parameter.stride(), strict=True))
    by_rows, parts = True, 1
    for dimension, placement in enumerate(placements):
        if placement.is_shard():
            by_rows &= type(placement) is Shard and placement.dim == 0
            parts *= mesh.size(dimension)
    return ShardPlace(first, parameter.numel(), parts == 1 or (by_rows and parameter.shape[0] % parts == 0))


def of_whole(tensor: Tensor, parameter: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """A part of state beside a part of a parameter, as a part of the whole's state; the same memory. `shape` is that of
    the whole state, where it is not the parameter's. Built by hand: `from_local` would move what lies on the host."""
    if not is_dtensor(parameter):
        return tensor
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    size = torch.Size(parameter.shape if shape is None else shape)
    strides = torch.empty(size, device="meta").stride()
    meta = TensorMeta(size, strides, tensor.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(tensor, spec, requires_grad=False)


SMALLEST_8BIT = 4096  # elements; smaller tensors keep fp32 moments, as in bitsandbytes and torchao
SMALLEST_OFFLOAD = 1 << 16  # elements; what is smaller is not worth the way
PIECE = 1 << 25  # elements updated at once: an embedding of 1B would need 16 GB of room on its way from the host
M, V = "exp_avg", "exp_avg_sq"


@dataclass(frozen=True)
class UpdateRule:
    """The mathematics of a step, and how its results are kept."""

    name: str
    betas: tuple[float, float]
    eps: float

    @property
    def moments(self) -> tuple[str, ...]:
        return (M,) if self.name == "lion" else (M, V)


@dataclass(frozen=True)
class StatePiece:
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
    rule: UpdateRule, weight: Tensor, grad: Tensor, state: dict[str, Tensor], count: Tensor,
    reject: Tensor, divisor: Tensor,
    lr: Tensor, decay: Tensor, key: Tensor, first: Tensor,
) -> None:  # fmt: skip
    """One step of a flat piece, unless `reject` is 1. `count` is that of the steps before, `first` the place of the
    piece's first element under its key; all numbers are tensors."""
    vetoed, after = reject.bool(), count + 1
    key = key ^ (after.to(torch.int32) * 0x3779B97)
    old = join_weights(weight, state["remainder"]) if "remainder" in state else weight.float()
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
        new, kept["remainder"] = split_weights(new)
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


class LowMemoryOptimizer(Optimizer):
    """The optimizer over all trained parameters. Takes the verdict as `found_inf` and the divisor as `grad_scale`, like
    torch's fused kernels; without them it always steps."""

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], named: Sequence[tuple[str, nn.Parameter]], spec: OptimizerSpec,
        memory: MemorySpec, seed: int = 0, places: Mapping[nn.Parameter, ShardPlace] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(groups, {"lr": 0.0})
        own = spec.settings()
        self.rule = UpdateRule(spec.name, (own["betas"][0], own["betas"][1]), own.get("eps", 0.0))
        self.device = named[0][1].device
        places = places or {}
        self.pieces: dict[nn.Parameter, list[StatePiece]] = {}
        rooms: dict[str, int] = {}  # of what is offloaded, for the largest piece
        for name, parameter in named:
            place = places.get(parameter, ShardPlace(0, parameter.numel()))
            self.pieces[parameter] = self._cut(f"{seed}.{name}", place.first, parameter.numel())
            away = memory.offload_optimizer and parameter.numel() >= SMALLEST_OFFLOAD
            self.state[parameter] = self._fresh(name, parameter, memory, away, place)
            if away:
                share = min(1.0, PIECE / parameter.numel())
                held = {key: tensor for key, tensor in self.state[parameter].items() if key != "step"}
                rooms |= {key: max(rooms.get(key, 0), math.ceil(share * held[key].nbytes)) for key in held}
        self.shuttle = HostOffload(self.device, rooms) if rooms else None

    def _cut(self, name: str, first: int, size: int) -> list[StatePiece]:
        """The pieces of a tensor, or of a part that begins at `first` of a whole: cut where the whole is cut, so that
        its elements are rounded alike however it is divided. Keys are made once."""
        pieces = []
        for start in range(first - first % PIECE, first + size, PIECE):
            begin, end = max(start, first), min(start + PIECE, first + size)
            key = zlib.crc32(f"{name}.{start}".encode()) - (1 << 31)
            numbers = torch.tensor([key, begin - start], dtype=torch.int32, device=self.device).unbind()
            pieces.append(StatePiece(begin - first, end - first, *numbers))
        return pieces

    def _fresh(
        self, name: str, parameter: nn.Parameter, memory: MemorySpec, away: bool, place: ShardPlace
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
