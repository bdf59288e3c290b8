"""Frozen weights in NF4 that are divided over the ranks of `dp_shard`: each rank holds some blocks of every matrix.

FSDP2 leaves them alone, since packed codes are no parameters that it could cast. The codes and 8-bit scales of a
transformer block are views of one buffer of bytes, which one all-gather completes. The gathered bytes of one block are
held at a time: its forward pass, its recomputation and its backward pass read them, and the next block replaces them.
The 32-bit maxima of blocks of scales (0.05 % of the bytes) are on every rank.

A product finds its bytes by the number of its gatherer, so that autograd and torch.compile hold none of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from bessemer.model.quantized import BLOCK, NF4Tensor, dense_from, is_quantized, quantize

CODES = BLOCK // 2  # bytes of a block
ALIGNED = 16  # bytes at which a matrix begins


@dataclass(frozen=True)
class MatrixPlace:
    """Where a rank holds its part of a matrix: from byte `at` of its transformer block's buffer on, `share` blocks of
    64 numbers, first their codes and then their scales."""

    block: int
    at: int
    share: int
    maxima: Tensor
    offset: Tensor


class CodeGatherer:
    """The bytes of a model's matrices, block by block. `held` is the one whose bytes of all ranks are in memory."""

    _numbers = itertools.count()
    by_number: ClassVar[WeakValueDictionary[int, CodeGatherer]] = WeakValueDictionary()

    def __init__(self, group: Any) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.number = next(self._numbers)
        self.by_number[self.number] = self
        self.buffers: list[Tensor] = []  # this rank's bytes of each block
        self.matrices: list[MatrixPlace] = []
        self.held: tuple[int, Tensor] | None = None

    def add(self, block: int, weights: Sequence[Tensor], device: torch.device) -> list[ShardedNF4]:
        """Memory for the matrices of a transformer block."""
        shares = [-(-math.prod(weight.shape) // (BLOCK * self.size)) for weight in weights]
        sizes = [-(-share * (CODES + 1) // ALIGNED) * ALIGNED for share in shares]
        buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self.buffers.append(buffer)
        assert len(self.buffers) == block + 1
        made, at = [], 0
        for weight, share, size in zip(weights, shares, sizes, strict=True):
            template = NF4Tensor.zeros(weight.shape, weight.dtype, torch.device("meta"))
            parts = {
                "codes": buffer[at : at + share * CODES],
                "scales": buffer[at + share * CODES : at + share * (CODES + 1)],
                "maxima": torch.zeros(template.maxima.shape, device=device), "offset": torch.zeros((), device=device),
            }  # fmt: skip
            self.matrices.append(MatrixPlace(block, at, share, parts["maxima"], parts["offset"]))
            place = (self.number, len(self.matrices) - 1)
            made.append(ShardedNF4(parts, weight.shape, weight.dtype, place))
            at += size
        return made

    def complete(self, index: int, numbers: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The parts of a matrix of that many numbers, from all ranks. Collective unless its block is held."""
        place = self.matrices[index]
        if self.held is None or self.held[0] != place.block:
            local = self.buffers[place.block]
            self.held = None  # freed before the next is allocated
            full = local.new_empty(self.size * local.numel())
            dist.all_gather_into_tensor(full, local, group=self.group)
            self.held = place.block, full.view(self.size, -1)
        bytes_PL, blocks = self.held[1], -(-numbers // BLOCK)
        scales_at = place.at + place.share * CODES
        codes = bytes_PL[:, place.at : scales_at].reshape(-1)[: blocks * CODES]
        scales = bytes_PL[:, scales_at : scales_at + place.share].reshape(-1)[:blocks]
        return codes, scales, place.maxima, place.offset


@torch.library.custom_op("bessemer::nf4_sharded_product", mutates_args=())
def nf4_sharded_product(x: Tensor, number: int, index: int, rows: int, columns: int, transposed: bool) -> Tensor:
    """x W^T, or x W if `transposed`, with the matrix of a gatherer."""
    parts = CodeGatherer.by_number[number].complete(index, rows * columns)
    weight_OI = dense_from(*parts, rows, columns, x.dtype)
    return x @ weight_OI if transposed else F.linear(x, weight_OI)


@nf4_sharded_product.register_fake
def _(x, number, index, rows, columns, transposed):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], columns if transposed else rows))


@register_flop_formula(torch.ops.bessemer.nf4_sharded_product)
def _flops(x_shape: Any, *sizes: Any, **_: Any) -> int:
    rows, columns, _transposed = sizes[2:5]
    return 2 * math.prod(x_shape[:-1]) * int(rows) * int(columns)


def _save_place(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.place = inputs[1:]


def _input_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    number, index, rows, columns, transposed = ctx.place
    return nf4_sharded_product(grad, number, index, rows, columns, not transposed), *[None] * 5


nf4_sharded_product.register_autograd(_input_gradient, setup_context=_save_place)


class ShardedNF4(NF4Tensor):
    """This rank's blocks of a matrix, with the shape of the whole. `place` is the number of its gatherer, and its own
    there. Products and dense values are collective."""

    @staticmethod
    def __new__(cls, parts: dict[str, Tensor], shape: Any, dtype: torch.dtype, place: tuple[int, int]) -> ShardedNF4:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=parts["codes"].device)  # type: ignore

    def __init__(self, parts: dict[str, Tensor], shape: Any, dtype: torch.dtype, place: tuple[int, int]) -> None:
        super().__init__(parts, shape, dtype)
        self.place = place

    @property
    def gatherer(self) -> CodeGatherer:
        return CodeGatherer.by_number[self.place[0]]

    @property
    def ranks(self) -> int:
        return self.gatherer.size

    def alike(self, parts: dict[str, Tensor]) -> NF4Tensor:
        return ShardedNF4(parts, self.shape, self.dtype, self.place)

    def own(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of a quantized matrix, filled up with zeros at the end."""
        first, count = self.gatherer.rank * self.scales.numel(), self.scales.numel()
        cut = {"codes": slice(first * CODES, (first + count) * CODES), "scales": slice(first, first + count)}
        own = {name: parts[name][cut[name]] for name in cut}
        own = {name: F.pad(part, (0, getattr(self, name).numel() - part.numel())) for name, part in own.items()}
        return {**parts, **own}

    def quantized_like(self, weight: Tensor) -> dict[str, Tensor]:
        self.gatherer.held = None  # its bytes may be those that are replaced
        return self.own(quantize(weight.to(self.device)))

    def gathered(self) -> NF4Tensor:
        """The matrix of all ranks. Collective."""
        parts = self.gatherer.complete(self.place[1], self.shape.numel())
        names = ("codes", "scales", "maxima", "offset")
        return NF4Tensor({n: p.clone() for n, p in zip(names, parts, strict=True)}, self.shape, self.dtype)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.gathered().dense(dtype)

    def linear(self, x: Tensor) -> Tensor:
        rows, columns = self.shape
        y: Tensor = nf4_sharded_product(x, *self.place, rows, columns, False)
        return y

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return super().__tensor_flatten__()[0], (self.shape, self.dtype, self.place)


def divide_in_nf4(model: Any, names: Sequence[str], group: Any, device: torch.device) -> None:
    """Put the weights of these linear layers, which are on the meta device, in NF4 on the ranks of a group. The values
    come later; no rank allocates more than its part."""
    gatherer = CodeGatherer(group)
    model.code_gatherer = gatherer  # keeps it alive
    blocks: dict[str, list[nn.Linear]] = {}
    for name in names:
        blocks.setdefault(".".join(name.split(".")[:2]), []).append(model.get_submodule(name))
    for number, layers in enumerate(blocks.values()):
        for layer, held in zip(layers, gatherer.add(number, [layer.weight for layer in layers], device), strict=True):
            layer.weight = nn.Parameter(held, requires_grad=False)


@contextmanager
def without_quantized(model: nn.Module) -> Iterator[None]:
    """The model without its weights in NF4 inside the block, for what treats all others alike."""
    held = [(m, n, p) for m in model.modules() for n, p in m._parameters.items() if p is not None and is_quantized(p)]
    for module, name, _ in held:
        module._parameters[name] = None
    try:
        yield
    finally:
        for module, name, parameter in held:
            module._parameters[name] = parameter
