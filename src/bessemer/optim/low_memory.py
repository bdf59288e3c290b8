"""AdamW, Adam and Lion with little memory: bf16 or split weights, bf16 or 8-bit moments, optimizer state in host
memory.

A step is one function of flat pieces of tensors, in fp32 inside, which torch.compile fuses into one kernel on a GPU.
Verdict and divisor are its inputs: a rejected step leaves every byte unchanged, without the host. Rounding works on
bits, since a compiler may remove a cast to bf16 and back. Sharded parameters are stepped shard by shard, and their
state is saved as DTensors, which any other layout can load.

The update of offloaded state also runs on the GPU, with its verdict: 2 bytes per parameter (8-bit moments) to 10 (fp32
moments and split weights) travel each way. A CPU update of fp32 state would move 28 bytes per parameter through host
memory and need a second implementation of each format.
"""

from __future__ import annotations

import importlib.util
import math
import mmap
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bessemer.dtensor import is_dtensor, local
from bessemer.errors import UserError
from bessemer.spec.optimizer import BLOCK, MemorySpec, OptimizerSpec

HIGH_BITS = -0x10000  # the upper 16 of 32 bits: sign, exponent and mantissa of a bf16


def hash_bits(x: Tensor) -> Tensor:
    """A 32-bit hash (lowbias32, from Wellons' hash prospector); int32 products wrap around."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def random_bits(like: Tensor, key: Tensor, first: Tensor | int = 0) -> Tensor:
    """16 random bits per element, a pure function of its index and the key: a resumed run rounds identically on any
    device, and there is no generator state to save. `first` is the index of the first element."""
    # Cast to 32 bits only after adding a value from memory: with dynamic sizes torch 2.11 compiles an int32 arange into
    # 64 bits, and products would not wrap around.
    indices = torch.arange(like.numel(), device=like.device).view(like.shape) + first + key.long()
    return hash_bits(hash_bits(indices.to(torch.int32)) ^ key) & 0xFFFF


def stochastic_round(x: Tensor, key: Tensor, first: Tensor | int = 0) -> Tensor:
    """fp32 to a bf16 neighbour, rounding up with probability equal to the fraction: unbiased."""
    bits = (x.view(torch.int32) + random_bits(x, key, first)) & HIGH_BITS
    return torch.where(x.isfinite(), bits.view(torch.float32), x)


def split_weights(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as its nearest bf16 (still of dtype fp32) and the missing low bits as int16; `join_weights` is the
    inverse."""
    bits = x.view(torch.int32)
    high = (bits + 0x8000) & HIGH_BITS  # ties round up, so the difference always fits 16 bits
    return torch.where(x.isnan(), x, high.view(torch.float32)), (bits - high).to(torch.int16)


def join_weights(weight: Tensor, remainder: Tensor) -> Tensor:
    return (weight.float().view(torch.int32) + remainder.to(torch.int32)).view(torch.float32)


def quantize(x: Tensor, signed: bool, key: Tensor, first: Tensor | int = 0) -> tuple[Tensor, Tensor]:
    """8-bit codes, and the largest magnitude of each block (a row of x) as its scale.

    Codes are evenly spaced in the cube root, for second moments in the sixth root: both are cube roots of a gradient's
    size. Unlike the dynamic maps of bitsandbytes and torchao this needs no table search, and it is more precise on a
    real model's moments (nearest rounding changes the update m / sqrt(v) by 1.4 % instead of 2.1 %), more so for wide
    blocks. Rounding is stochastic: with nearest rounding small second moments rise and never fall. A positive value
    never becomes 0, since the update would be divided by epsilon.
    """
    scale = x.abs().amax(1, keepdim=True)
    unit, chance = x / scale.clamp(min=torch.finfo(torch.float32).tiny), random_bits(x, key, first) / 0x10000
    if signed:
        codes = (unit.abs().pow(1 / 3) * 127 + chance).floor() * unit.sign() + 128
    else:
        codes = torch.where(x > 0, (unit.pow(1 / 6) * 255 + chance).floor().clamp(min=1), 0.0)
    return codes.to(torch.uint8), scale


def dequantize(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    root = (codes.float() - 128) / 127 if signed else codes.float() / 255
    cube = root * root * root
    return cube * scale if signed else cube * cube * scale


@dataclass(frozen=True)
class ShardPlace:
    """Where a shard lies in its full tensor."""

    first: int  # flat index of its first element
    size: int  # elements of the full tensor
    even: bool = True  # every process holds the same number of rows


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """What an optimizer gets instead of a sharded parameter; an unsharded one is returned unchanged."""
    return nn.Parameter(local(parameter.detach())) if is_dtensor(parameter) else parameter


def shard_place(parameter: Tensor) -> ShardPlace:
    if not is_dtensor(parameter):
        return ShardPlace(0, parameter.numel())
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = parameter.device_mesh, parameter.placements
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    first = sum(index * stride for index, stride in zip(offset, parameter.stride(), strict=True))
    by_rows, shards = True, 1
    for dimension, placement in enumerate(placements):
        if placement.is_shard():
            by_rows &= type(placement) is Shard and placement.dim == 0
            shards *= mesh.size(dimension)
    return ShardPlace(first, parameter.numel(), shards == 1 or (by_rows and parameter.shape[0] % shards == 0))


MIN_8BIT_SIZE = 4096  # elements; smaller tensors keep fp32 moments, as in bitsandbytes and torchao
MIN_OFFLOAD_SIZE = 1 << 16  # elements; smaller tensors are not worth the transfer
PIECE_SIZE = 1 << 25  # elements updated at once: a 1B embedding in one piece would need a 16 GB buffer
M, V = "exp_avg", "exp_avg_sq"


@dataclass(frozen=True)
class UpdateRule:
    """The optimizer and its constants."""

    name: str
    betas: tuple[float, float]
    eps: float

    @property
    def moments(self) -> tuple[str, ...]:
        return (M,) if self.name == "lion" else (M, V)


@dataclass(frozen=True)
class StatePiece:
    """Elements [start, end) of a tensor, with their rounding key and the index of the first one under that key."""

    start: int
    end: int
    key: Tensor
    first: Tensor


def to_low_precision(model: nn.Module) -> None:
    """Convert matrices to bf16; vectors (norms, biases) are small and keep their dtype."""
    for parameter in model.parameters():
        if parameter.ndim >= 2 and parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(torch.bfloat16)


def update(
    rule: UpdateRule, weight: Tensor, grad: Tensor, state: dict[str, Tensor], count: Tensor,
    reject: Tensor, divisor: Tensor,
    lr: Tensor, decay: Tensor, key: Tensor, first: Tensor,
) -> None:  # fmt: skip
    """One step of a flat piece, unless `reject` is 1. `count` is the number of earlier steps, `first` the index of the
    piece's first element under its key; all numbers are tensors."""
    vetoed, after = reject.bool(), count + 1
    key = key ^ (after.to(torch.int32) * 0x3779B97)
    weight_fp32 = join_weights(weight, state["remainder"]) if "remainder" in state else weight.float()
    gradient = grad.float() / divisor
    if rule.name == "adam":
        gradient = gradient + decay * weight_fp32
    else:
        weight_fp32 = weight_fp32 - lr * decay * weight_fp32
    moments = {name: _read_moment(state, name) for name in rule.moments}
    beta1, beta2 = rule.betas
    if rule.name == "lion":
        step = torch.sign(torch.lerp(moments[M], gradient, 1 - beta1))
        moments[M] = torch.lerp(moments[M], gradient, 1 - beta2)
    else:
        moments[M] = torch.lerp(moments[M], gradient, 1 - beta1)
        moments[V] = torch.lerp(moments[V], gradient * gradient, 1 - beta2)
        denominator = (moments[V] / _bias_correction(beta2, after)).sqrt() + rule.eps
        step = moments[M] / _bias_correction(beta1, after) / denominator
    new, stored = weight_fp32 - lr * step, {}
    if "remainder" in state:
        new, stored["remainder"] = split_weights(new)
    elif weight.dtype == torch.bfloat16:
        new = stochastic_round(new, key, first)
    for salt, name in enumerate(rule.moments, 1):
        stored |= _store_moment(state, name, moments[name], key + salt, first)
    weight.copy_(torch.where(vetoed, weight, new.to(weight.dtype)))
    for name, value in stored.items():  # selected, not multiplied by 0, which would let NaN through
        state[name].copy_(torch.where(vetoed, state[name], value))


def _bias_correction(beta: float, count: Tensor) -> Tensor:
    """1 - beta^count without fp32 cancellation."""
    return -torch.expm1(count * (math.log(beta) if beta else -math.inf))


def _read_moment(state: dict[str, Tensor], name: str) -> Tensor:
    moment = state[name]
    return dequantize(moment, state[f"{name}_scale"], name == M) if moment.dtype == torch.uint8 else moment.float()


def _store_moment(state: dict[str, Tensor], name: str, value: Tensor, key: Tensor, first: Tensor) -> dict[str, Tensor]:
    """A moment in its storage format, rounded stochastically: with nearest rounding a second moment with beta 0.999
    would never fall, since a step changes it by less than half a digit."""
    dtype = state[name].dtype
    if dtype == torch.uint8:
        codes, scale = quantize(value, name == M, key, first)
        return {name: codes, f"{name}_scale": scale}
    return {name: stochastic_round(value, key, first).to(dtype) if dtype == torch.bfloat16 else value}


@cache
def _compiled_update() -> Callable[..., None]:
    # Pieces are flat, or rows of blocks, so that one graph fits tensors of all shapes.
    fused = torch.compile(update, dynamic=True, fullgraph=True)

    def run(*arguments: Any) -> None:
        # One graph per kind of tensor; betas and epsilon are constants in it.
        with torch._dynamo.config.patch(recompile_limit=64, specialize_float=True):
            fused(*arguments)

    return run


@cache
def _triton_adamw() -> Callable[..., None] | None:
    """The hand-written AdamW kernel, which rounds nothing and is faster than the compiled update. None without
    Triton."""
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
        settings = spec.settings()
        self.rule = UpdateRule(spec.name, (settings["betas"][0], settings["betas"][1]), settings.get("eps", 0.0))
        self.device = named[0][1].device
        places = places or {}
        self.pieces: dict[nn.Parameter, list[StatePiece]] = {}
        buffer_bytes: dict[str, int] = {}  # of offloaded state, for the largest piece
        for name, parameter in named:
            place = places.get(parameter, ShardPlace(0, parameter.numel()))
            self.pieces[parameter] = self._split(f"{seed}.{name}", place.first, parameter.numel())
            offloaded = memory.offload_optimizer and parameter.numel() >= MIN_OFFLOAD_SIZE
            self.state[parameter] = self._initial_state(name, parameter, memory, offloaded, place)
            if offloaded:
                share = min(1.0, PIECE_SIZE / parameter.numel())
                for key, tensor in self.state[parameter].items():
                    if key != "step":
                        buffer_bytes[key] = max(buffer_bytes.get(key, 0), math.ceil(share * tensor.nbytes))
        self.offload = HostOffload(self.device, buffer_bytes) if buffer_bytes else None

    def _split(self, name: str, first: int, size: int) -> list[StatePiece]:
        """The pieces of a tensor, or of a shard that starts at `first` of the full tensor: split at the full tensor's
        piece borders, so that rounding does not depend on the sharding. Keys are created once."""
        pieces = []
        for start in range(first - first % PIECE_SIZE, first + size, PIECE_SIZE):
            begin, end = max(start, first), min(start + PIECE_SIZE, first + size)
            key = zlib.crc32(f"{name}.{start}".encode()) - (1 << 31)
            key_and_first = torch.tensor([key, begin - start], dtype=torch.int32, device=self.device).unbind()
            pieces.append(StatePiece(begin - first, end - first, *key_and_first))
        return pieces

    def _initial_state(
        self, name: str, parameter: nn.Parameter, memory: MemorySpec, offloaded: bool, place: ShardPlace
    ) -> dict[str, Tensor]:
        shape, size = parameter.shape, parameter.numel()
        layout: dict[str, tuple[Sequence[int], torch.dtype]] = {}
        if parameter.dtype == torch.bfloat16 and memory.weights == "kahan":
            layout["remainder"] = shape, torch.int16
        in_blocks = memory.moments == "8bit" and place.size >= MIN_8BIT_SIZE and place.size % BLOCK == 0
        if in_blocks and (size % BLOCK or not place.even):
            raise UserError(
                f"memory.moments: 8bit uses blocks of {BLOCK} numbers, which this sharding of {name} would split: "
                "write bf16, or another parallel.dp_shard"
            )
        for moment in self.rule.moments:
            if in_blocks:
                layout |= {moment: (shape, torch.uint8), f"{moment}_scale": ((size // BLOCK,), torch.float32)}
            else:
                layout[moment] = shape, torch.bfloat16 if memory.moments == "bf16" else torch.float32
        zeros = host_zeros if offloaded else torch.zeros
        tensors = {key: zeros(shape, dtype=dtype, device=self.device) for key, (shape, dtype) in layout.items()}
        return {"step": torch.zeros((), device=self.device), **tensors}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "closures are not supported"
        reject = torch.zeros((), device=self.device) if self.found_inf is None else self.found_inf
        divisor = torch.ones((), device=self.device) if self.grad_scale is None else self.grad_scale
        if self.offload:
            self.offload.begin()
        counts = []
        for group in self.param_groups:
            scalars = self.scalars(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_parameter(parameter, parameter.grad, reject, divisor, *scalars)
                    counts.append(self.state[parameter]["step"])
        if counts:
            torch._foreach_add_(counts, [1 - reject] * len(counts))  # a single tensor would sync with the host

    def scalars(self, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """A group's learning rate and decay on the device, filled rather than copied, which would sync."""
        lr, decay = (torch.full((), group[name], device=self.device) for name in ("lr", "weight_decay"))
        return lr, decay

    def step_parameter(
        self, parameter: nn.Parameter, grad: Tensor, reject: Tensor, divisor: Tensor, lr: Tensor, decay: Tensor
    ) -> None:
        """Step one parameter piece by piece; the caller updates its count."""
        state, total = self.state[parameter], parameter.numel()
        if not total:  # fewer rows than processes
            return
        moments = {name: tensor for name, tensor in state.items() if name != "step"}
        columns = BLOCK if any(tensor.dtype == torch.uint8 for tensor in moments.values()) else 1
        weights, grads = parameter.detach().view(-1, columns), grad.contiguous().view(-1, columns)
        rows = {name: tensor.view(len(weights), -1) for name, tensor in moments.items()}
        offload = self.offload if total >= MIN_OFFLOAD_SIZE else None
        run = _compiled_update() if parameter.is_cuda else update
        exact = parameter.dtype == torch.float32 or "remainder" in moments
        exact &= all(moments[name].dtype == torch.float32 for name in self.rule.moments)
        if parameter.is_cuda and self.rule.name == "adamw" and exact:
            run = _triton_adamw() or run
        for piece in self.pieces[parameter]:
            weight, gradient, part = weights, grads, rows
            if len(self.pieces[parameter]) > 1:
                at = slice(piece.start // columns, piece.end // columns)
                weight, gradient, part = weights[at], grads[at], {name: tensor[at] for name, tensor in rows.items()}
            with offload.on_device(part) if offload else nullcontext(part) as live:
                scalars = (reject, divisor, lr, decay, piece.key, piece.first)
                run(self.rule, weight, gradient, live, state["step"], *scalars)


SLOTS = 3  # one being fetched, one being updated, one being written back


def host_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in pinned host memory for asynchronous copies.

    Each tensor has its own pages: torch's pinned allocator rounds up to powers of two, up to twice the memory.
    """
    if device.type != "cuda":
        return torch.zeros(shape, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)  # locking a hundred GB of small pages would take a minute
    tensor = torch.frombuffer(pages, dtype=dtype).view(tuple(shape))
    cudart, address = torch.cuda.cudart(), tensor.data_ptr()
    if int(cudart.cudaHostRegister(address, size, 1)) != 0:
        raise UserError(
            f"memory.offload_optimizer: cannot pin another {size / 2**20:.0f} MiB of host memory: free some, or write "
            "memory.moments: 8bit"
        )
    weakref.finalize(pages, cudart.cudaHostUnregister, address)
    return tensor


class HostOffload:
    """Device buffers for the state of three pieces, and the copies between host and device, on their own streams.
    On a CPU: plain copies. Each state tensor has its own buffer: torch cannot compile a step that mutates two
    dtypes in one."""

    def __init__(self, device: torch.device, piece_bytes: dict[str, int]) -> None:
        self.slots = [
            {name: torch.empty(size, dtype=torch.uint8, device=device) for name, size in piece_bytes.items()}
            for _ in range(SLOTS)
        ]
        self.device, self.next = device, 0
        self.streams = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else None
        self.free: list[torch.cuda.Event | None] = [None] * SLOTS

    def begin(self) -> None:
        """Called before the first piece of a step: fetching waits until the last step's results are on the host."""
        if self.streams:
            self.streams[0].wait_stream(self.streams[1])

    def synchronize(self) -> None:
        """Wait until host memory is up to date. Call it before reading."""
        if self.streams:
            self.streams[1].synchronize()

    @contextmanager
    def on_device(self, host: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The tensors on the device for a block, which changes them in place; copied back to the host afterwards.

        Python runs far ahead of the device: a slot is filled only after its previous piece has been written back.
        """
        slot, self.next = self.next, (self.next + 1) % SLOTS
        buffers = self.slots[slot]
        live = {n: buffers[n][: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for n, tensor in host.items()}
        if self.streams and (free := self.free[slot]):
            self.streams[0].wait_event(free)
        with self._stream(0):
            for name, tensor in host.items():
                live[name].copy_(tensor, non_blocking=True)
        if self.streams:
            torch.cuda.current_stream(self.device).wait_stream(self.streams[0])
        yield live
        if self.streams:
            self.streams[1].wait_stream(torch.cuda.current_stream(self.device))
        with self._stream(1):
            for name, tensor in host.items():
                tensor.copy_(live[name], non_blocking=True)
        if self.streams:
            self.free[slot] = self.streams[1].record_event()

    def _stream(self, direction: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.streams[direction]) if self.streams else nullcontext()
