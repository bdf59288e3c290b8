"""Frozen weights in NF4 with double quantization, as in QLoRA (Dettmers et al. 2023).

A weight is cut into blocks of 64 numbers. Each block has its largest magnitude, and each number is the nearest of 16
levels, the quantiles of a normal distribution. The magnitudes, less their mean, are quantized too: to 8 bits in blocks
of 256. That is 4 + 8/64 + 32/(64 * 256) = 4.127 bits a number. Codes and levels are those of bitsandbytes.

`NF4Tensor` takes the place of a layer's weight. A product makes the dense matrix, multiplies and frees it, in the
forward pass and once more in the backward pass, as an operator that torch.compile does not look into: a graph that saw
the dense matrix would save it. Copies of the same dtype hold the same codes; every other operation sees the dense
values.
Legend: O and I outputs and inputs, B blocks, M blocks of blocks.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from bessemer.errors import UserError
from bessemer.spec.quantity import human_bytes

NF4 = "nf4"  # as the spec and manifests name it
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BLOCK, OUTER_BLOCK = 64, 256
CHUNK = 1 << 24  # numbers that are quantized at a time
PARTS = ("codes", "scales", "maxima", "offset")


def dynamic_levels() -> list[float]:
    """The 256 values of the signed 8-bit type with a dynamic exponent (Dettmers 2016): for each decimal exponent from
    -6 to 0 the middles of 1, 2, 4, ... 64 parts of [0.1, 1] with both signs, and 0 and 1."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        middles = (10.0 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += [sign * middle for middle in middles for sign in (1, -1)]
    return sorted(values)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The 16 and the 256 levels on a device."""
    return torch.tensor(LEVELS, device=device), torch.tensor(dynamic_levels(), device=device)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _pairs(device: torch.device) -> Tensor:
    """(256, 2): the two numbers of each byte, the first in the upper four bits."""
    levels, byte = _tables(device)[0], torch.arange(256, device=device)
    return torch.stack((levels[byte >> 4], levels[byte & 15]), dim=1)


def _nearest(values: Tensor, levels: Tensor) -> Tensor:
    return torch.bucketize(values, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)


def _rows(flat: Tensor, size: int) -> Tensor:
    """Rows of `size` numbers, the last filled up with zeros."""
    return F.pad(flat, (0, -len(flat) % size)).view(-1, size)


def quantize(weight: Tensor) -> dict[str, Tensor]:
    """The parts of a weight, on its device: codes (two in a byte), scales of blocks (8 bits), maxima of blocks of
    scales, and the offset, their mean, that was subtracted from the scales."""
    levels, dynamic = _tables(weight.device)
    codes, scales = [], []
    for chunk in weight.detach().reshape(-1).split(CHUNK):
        rows_B64 = _rows(chunk.float(), BLOCK)
        scale_B = rows_B64.abs().amax(dim=1)
        digits = _nearest(rows_B64 / scale_B.clamp(min=torch.finfo(torch.float32).tiny)[:, None], levels).view(-1, 2)
        codes.append(digits[:, 0] << 4 | digits[:, 1])
        scales.append(scale_B)
    scale_B = torch.cat(scales)
    offset = scale_B.double().mean().float()
    rows_M = _rows(scale_B - offset, OUTER_BLOCK)
    maxima_M = rows_M.abs().amax(dim=1)
    unit_M = rows_M / maxima_M.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes_B = _nearest(unit_M, dynamic).view(-1)[: len(scale_B)].contiguous()
    return {"codes": torch.cat(codes), "scales": codes_B, "maxima": maxima_M, "offset": offset}


def dense_from(
    codes: Tensor, scales: Tensor, maxima: Tensor, offset: Tensor, rows: int, columns: int, dtype: Any
) -> Tensor:
    """The numbers that the parts stand for: multiplied in fp32, then rounded to the dtype."""
    if codes.device.type == "cuda" and _has_triton():
        from bessemer.model.kernels import dequantize_nf4

        levels, dynamic = _tables(codes.device)
        flat = dequantize_nf4(codes, scales, maxima, offset, levels, dynamic, rows * columns, dtype)
    else:
        dynamic = _tables(codes.device)[1]
        scale_B = dynamic[scales.int()] * maxima.repeat_interleave(OUTER_BLOCK)[: len(scales)] + offset
        values_B64 = _pairs(codes.device)[codes.int()].view(-1, BLOCK)
        flat = (values_B64 * scale_B[:, None]).to(dtype).view(-1)[: rows * columns]
    return flat.view(rows, columns)


@torch.library.custom_op("bessemer::nf4_dense", mutates_args=())
def nf4_dense(
    codes: Tensor, scales: Tensor, maxima: Tensor, offset: Tensor, rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    return dense_from(codes, scales, maxima, offset, rows, columns, dtype)


@nf4_dense.register_fake
def _(codes, scales, maxima, offset, rows, columns, dtype):  # type: ignore[no-untyped-def]
    return codes.new_empty((rows, columns), dtype=dtype)


@torch.library.custom_op("bessemer::nf4_product", mutates_args=())
def nf4_product(
    x: Tensor, codes: Tensor, scales: Tensor, maxima: Tensor, offset: Tensor, rows: int, columns: int, transposed: bool
) -> Tensor:
    """x W^T, or x W if `transposed`, in the dtype of x. Holds the dense weight while it multiplies."""
    weight_OI = dense_from(codes, scales, maxima, offset, rows, columns, x.dtype)
    return x @ weight_OI if transposed else F.linear(x, weight_OI)


@nf4_product.register_fake
def _(x, codes, scales, maxima, offset, rows, columns, transposed):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], columns if transposed else rows))


@register_flop_formula(torch.ops.bessemer.nf4_product)
def _flops(x_shape: Any, *sizes: Any, **_: Any) -> int:
    """Without it, selective recomputation would take these products to cost nothing."""
    rows, columns, _transposed = sizes[4:7]
    return 2 * math.prod(x_shape[:-1]) * int(rows) * int(columns)


def _save_weight(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:5])
    ctx.sizes = inputs[5:]


def _input_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, columns, transposed = ctx.sizes
    return nf4_product(grad, *ctx.saved_tensors, rows, columns, not transposed), *[None] * 7


nf4_product.register_autograd(_input_gradient, setup_context=_save_weight)


class NF4Tensor(Tensor):
    """A frozen matrix in NF4, with the shape of the dense one. `dtype` is that of its values for operations other than
    products, which use the dtype of their input. `copy_` quantizes."""

    codes: Tensor
    scales: Tensor
    maxima: Tensor
    offset: Tensor

    @staticmethod
    def __new__(cls, parts: dict[str, Tensor], shape: torch.Size, dtype: torch.dtype) -> NF4Tensor:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=parts["codes"].device)  # type: ignore

    def __init__(self, parts: dict[str, Tensor], shape: torch.Size, dtype: torch.dtype) -> None:
        for name in PARTS:
            setattr(self, name, parts[name])

    @classmethod
    def of(cls, weight: Tensor, device: torch.device | None = None) -> NF4Tensor:
        """A matrix quantized on a device, by default its own."""
        return cls(quantize(weight.to(device or weight.device)), weight.shape, weight.dtype)

    @classmethod
    def zeros(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> NF4Tensor:
        """Memory for a matrix of that shape."""
        blocks = -(-math.prod(shape) // BLOCK)
        sizes = {"codes": blocks * BLOCK // 2, "scales": blocks, "maxima": -(-blocks // OUTER_BLOCK)}
        types = {"codes": torch.uint8, "scales": torch.uint8, "maxima": torch.float32}
        parts = {name: torch.zeros(size, dtype=types[name], device=device) for name, size in sizes.items()}
        return cls(parts | {"offset": torch.zeros((), device=device)}, shape, dtype)

    @property
    def parts(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in PARTS}

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor."""
        rows, columns = self.shape
        values: Tensor = nf4_dense(*self.parts.values(), rows, columns, dtype or self.dtype)
        return values

    def alike(self, parts: dict[str, Tensor]) -> NF4Tensor:
        """The same matrix from other tensors."""
        return NF4Tensor(parts, self.shape, self.dtype)

    def quantized_like(self, weight: Tensor) -> dict[str, Tensor]:
        """The parts that this tensor would hold of a weight."""
        return quantize(weight.to(self.device))

    def linear(self, x: Tensor) -> Tensor:
        """x W^T in the dtype of x."""
        rows, columns = self.shape
        y: Tensor = nf4_product(x, *self.parts.values(), rows, columns, False)
        return y

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias, in autocast's dtype if it is enabled, else in that of x."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        y = self.linear(x.to(dtype))
        return y if bias is None else y + bias.to(dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(PARTS), (self.shape, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> NF4Tensor:
        return cls(parts, *meta)

    def _stable_hash_for_caching(self) -> str:  # of compiled graphs, by torch
        return f"{NF4} {tuple(self.shape)} {self.dtype}"

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"NF4Tensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and isinstance(args[1], NF4Tensor):
            return args[1].product(args[0], *args[2:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        aten, first = torch.ops.aten, args[0] if args else None
        if isinstance(first, NF4Tensor):
            if func in (aten.detach.default, aten.alias.default):
                return first.alike(first.parts)
            same_dtype = (kwargs or {}).get("dtype") in (None, first.dtype)
            if func is aten.clone.default or (func is aten._to_copy.default and same_dtype):
                device = (kwargs or {}).get("device") or first.device
                parts = {name: part.to(device, copy=True) for name, part in first.parts.items()}
                return first.alike(parts)
            if func is aten.copy_.default:
                same = type(args[1]) is type(first)
                source = args[1].parts if same else first.quantized_like(args[1])
                for name, part in first.parts.items():
                    part.copy_(source[name])
                return first
            if func._schema.is_mutable:
                raise TypeError(f"{func}: a weight in NF4 is frozen; only copy_ writes to it")
        dense = torch.utils._pytree.tree_map_only(NF4Tensor, NF4Tensor.dense, (args, kwargs or {}))
        return func(*dense[0], **dense[1])


def is_quantized(tensor: Tensor) -> bool:
    return isinstance(tensor, NF4Tensor)


def stored_tensors(tensor: Tensor) -> tuple[Tensor, ...]:
    """The plain tensors that hold a tensor's memory."""
    return tuple(tensor.parts.values()) if isinstance(tensor, NF4Tensor) else (tensor,)


def stored_bytes(tensor: Tensor) -> int:
    return sum(part.nbytes for part in stored_tensors(tensor))


def rounded_to_nf4(tensor: Tensor) -> Tensor:
    """The values of a tensor that is held in NF4, in its dtype."""
    return NF4Tensor.of(tensor).dense()


def same_codes(held: Tensor, weight: Tensor) -> bool:
    """Whether a weight in NF4 is that weight, quantized."""
    assert isinstance(held, NF4Tensor)
    return all(torch.equal(held.parts[name], part) for name, part in held.quantized_like(weight).items())


def allocate_in_nf4(model: nn.Module, names: Iterable[str], device: torch.device) -> None:
    """Allocate a model that is on the meta device, with the weights of these linear layers in NF4. The values come
    later; the dense weights are never allocated."""
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear) and layer.weight.is_meta
        held = NF4Tensor.zeros(layer.weight.shape, layer.weight.dtype, device)
        layer.weight = nn.Parameter(held, requires_grad=False)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def describe_quantized(model: nn.Module) -> str:
    """How many weights are quantized and what that saves."""
    held = [parameter for parameter in model.parameters() if is_quantized(parameter)]
    stored, dense = sum(map(stored_bytes, held)), sum(p.numel() * p.element_size() for p in held)
    size = f"{human_bytes(stored)} instead of {human_bytes(dense)}"
    if (ranks := getattr(held[0], "ranks", 1)) > 1:
        size = f"{human_bytes(stored)} on each of {ranks} processes, {human_bytes(dense)} in full"
    return f"{len(held)} frozen matrices in 4 bits with double quantization: {size}"


def check_quantized(model: nn.Module, quantized: Iterable[str], checkpoint: str) -> None:
    """Refuses a resume whose base is held in another form: the run would compute something else."""
    held = {name for name, parameter in model.named_parameters() if is_quantized(parameter)}
    if different := held ^ set(quantized):
        before, now = ("in full", NF4) if min(different) in held else (NF4, "in full")
        raise UserError(f"adapter.base: {checkpoint} was trained with its base {before}, not {now}: put base back, or "
                        "name a new run")  # fmt: skip
