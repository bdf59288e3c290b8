"""Training in low precision: linear layers in fp8, and the loss scale of fp16.

fp8 matmuls (through torchao) are 1.8 times as fast as bf16 on Hopper, on factors with a 3-bit mantissa. The linear
layers of blocks are converted in place and keep their parameters and names, so optimizers, checkpoints and exports do
not notice. Each factor is scaled to fp8's range when it is cast: with one scale per tensor, or one per row, which is
more accurate and slower. Without torch.compile the casts cost more than the matmuls gain.

A SwiGLU feed-forward part runs as one function with the arithmetic of torchao's layers. Of a step of 1B parameters on
an H200 45 ms went into casts, most of them around SwiGLU (docs/decisions.md): here gate and up are one matmul with one
scale, SwiGLU is cast as it is computed, and a kernel transposes what the backward pass needs in columns.

Legend: R rows (tokens), W width, F inner width, G twice that: gate and up concatenated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.errors import UserError
from bessemer.model.layers import FeedForward

RECIPES = {"fp8": "tensorwise", "fp8_rowwise": "rowwise"}
MULTIPLE = 16  # of every matmul size, required by the hardware
LEAST = 256  # smallest side of a weight; below it the casts cost more than the matmul gains
# Blocks at each end that stay in bf16, as in NVIDIA's recipes: rare large embeddings cost a shared scale its
# resolution, and the last block's error goes straight into the logits.
KEEP = 1
CAPABILITY = (8, 9)  # Ada and later


def convert_to_fp8(
    model: nn.Module, precision: str, device: torch.device, keep: int = KEEP, least: int = LEAST, emulate: bool = False
) -> list[str]:
    """Convert the linear layers of the model's blocks that gain from fp8; their names. Call it before torch.compile.

    `keep` blocks at either end stay unchanged. With `emulate` matmuls run in fp32 on rounded factors, on any device.
    """
    if not emulate:
        refuse_device(precision, device)
    float8 = _torchao(precision)
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        raise UserError(f"precision: {precision} is for native models, this one is another library's: write bf16")
    inner = range(keep, len(blocks) - keep)

    def fits(layer: nn.Module, name: str) -> bool:
        parts = name.split(".")
        if parts[0] != "blocks" or int(parts[1]) not in inner or "router" in parts:
            return False
        sizes = (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else ()
        return all(size % MULTIPLE == 0 and size >= least for size in sizes)

    float8.convert_to_float8_training(model, module_filter_fn=fits, config=_config(precision, emulate))
    theirs, ours = _layer_types()
    for module in model.modules():
        if isinstance(module, theirs):
            module.__class__ = ours
    if precision == "fp8":
        convert_ffn(model, ours)
    if not (names := fp8_layers(model)):
        raise UserError(
            f"precision: {precision} fits no layer: {len(blocks)} blocks less {keep} at each end, whose linear layers "
            f"must be multiples of {MULTIPLE} and at least {least} wide: write bf16, or a larger model"
        )
    return names


def fp8_layers(model: nn.Module) -> list[str]:
    """Names of the fp8 layers."""
    return [name for name, module in model.named_modules() if isinstance(module, _layer_types()[1])]


def refuse_device(precision: str, device: torch.device) -> None:
    """Raise UserError if the device has no fp8 matmuls."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < CAPABILITY:
        name = torch.cuda.get_device_name(device) if capability else device.type
        raise UserError(f"precision: {precision} needs a GPU with fp8 (Ada, Hopper, later), this is {name}: write bf16")


def _torchao(precision: str) -> Any:
    logging.getLogger("torchao").setLevel(logging.ERROR)  # warnings about extensions that fp8 does not use
    try:
        import torchao.float8 as float8
    except ImportError as error:
        raise UserError(f"precision: {precision} needs torchao: pip install 'bessemer[fp8]' ({error})") from None
    return float8


def _config(precision: str, emulate: bool) -> Any:
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig

    # torchao's own recipes: gradients are e5m2 with tensorwise scales and e4m3 with rowwise ones; only the forward
    # matmul uses fast accumulation, since 14 bits are too few for sums over tokens.
    return replace(Float8LinearConfig.from_recipe_name(RECIPES[precision]), emulate=emulate)


@cache
def _layer_types() -> tuple[type[nn.Module], type[nn.Module]]:
    """torchao's layer; and ours, which uses fp8 under autocast if the sizes allow and is a plain linear layer
    otherwise: a trial in fp32 is fp32 throughout, and rows of any length can be evaluated."""
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    class Fp8Linear(Float8Linear):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            kind, rows = x.device.type, x.shape[:-1]
            if not torch.is_autocast_enabled(kind) or rows.numel() % MULTIPLE:
                return F.linear(x, self.weight, self.bias)
            # torchao reads only CUDA's autocast. Flat, as in its backward pass: torch.compile then sees one cast for
            # both passes and for all layers that read the same tensor (q, k, v; gate, up), instead of two.
            x_RK = x.to(torch.get_autocast_dtype(kind)).reshape(-1, x.shape[-1])
            y_RN: Tensor = matmul_with_hp_or_float8_args.apply(
                x_RK, self.weight.t(), self.linear_mm_config, self.config
            )
            return (y_RN if self.bias is None else y_RN + self.bias.to(y_RN.dtype)).view(*rows, -1)

    return Float8Linear, Fp8Linear


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2  # for values; for gradients, which need more range
TILE_MULTIPLE = 64  # of all sizes, for the kernels' tiles
TINY = 1e-12


def _times(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor on x before it is cast."""
    return (torch.finfo(dtype).max / x.abs().amax().float().clamp(min=TINY)).reshape(1)


def _cast(x: Tensor, times: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return (x.float() * times).clamp(-most, most).to(dtype)


def _joined(parts: tuple[Tensor, ...], times: Tensor, dim: int) -> Tensor:
    """Concatenated in e4m3. Cast first, to avoid a bf16 copy; as bytes, since CPUs cannot concatenate fp8."""
    return torch.cat([_cast(part, times, E4M3).view(torch.uint8) for part in parts], dim).view(E4M3)


def _product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, fast: bool = False) -> Tensor:
    """fp8 a @ b in bf16, a row-major, b column-major. `fast` accumulates in 14 bits, too few for sums over tokens."""
    if a.is_cuda:
        return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast)
    with torch.autocast(a.device.type, enabled=False):
        return ((a.float() * a_scale) @ (b.float() * b_scale)).bfloat16()


@torch.library.custom_op("bessemer::fp8_gated", mutates_args=())
def gated(gu_RG: Tensor) -> tuple[Tensor, Tensor]:
    """SwiGLU in e4m3 and its scale."""
    if gu_RG.is_cuda:
        from bessemer.train import kernels

        return kernels.gated(gu_RG, E4M3)
    g_RF, u_RF = gu_RG.float().chunk(2, dim=1)
    h_RF = F.silu(g_RF) * u_RF
    times = _times(h_RF, E4M3)
    return _cast(h_RF, times, E4M3), 1 / times


@gated.register_fake
def _(gu_RG: Tensor) -> tuple[Tensor, Tensor]:
    rows, both = gu_RG.shape
    return gu_RG.new_empty(rows, both // 2, dtype=E4M3), gu_RG.new_empty(1, dtype=torch.float32)


@torch.library.custom_op("bessemer::fp8_gate_gradients", mutates_args=())
def gate_gradients(dh_RF: Tensor, gu_RG: Tensor, h_scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `gated`'s input in e5m2, row-major and transposed, their scale; and its output transposed."""
    if dh_RF.is_cuda:
        from bessemer.train import kernels

        return kernels.gate_gradients(dh_RF, gu_RG, h_scale, E5M2, E4M3)
    g_RF, u_RF = gu_RG.float().chunk(2, dim=1)
    dh, sigmoid = dh_RF.float(), torch.sigmoid(g_RF)
    d_RG = torch.cat((dh * u_RF * sigmoid * (1 + g_RF * (1 - sigmoid)), dh * g_RF * sigmoid), dim=1)
    times = _times(d_RG, E5M2)
    out_RG = _cast(d_RG, times, E5M2)
    h_FR = _cast((g_RF * sigmoid * u_RF).t(), 1 / h_scale, E4M3)
    return out_RG, out_RG.t().contiguous(), 1 / times, h_FR.contiguous()


@gate_gradients.register_fake
def _(dh_RF: Tensor, gu_RG: Tensor, h_scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, both = gu_RG.shape
    turned = gu_RG.new_empty(both // 2, rows, dtype=E4M3)
    scale = gu_RG.new_empty(1, dtype=torch.float32)
    return gu_RG.new_empty(rows, both, dtype=E5M2), gu_RG.new_empty(both, rows, dtype=E5M2), scale, turned


@torch.library.custom_op("bessemer::fp8_turned", mutates_args=())
def turned(x_RW: Tensor, times: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """x times a factor: row-major (only for gradients), and transposed."""
    dtype = E5M2 if gradient else E4M3
    if x_RW.is_cuda:
        from bessemer.train import kernels

        return kernels.turned(x_RW, times, dtype, gradient)
    out_RW = _cast(x_RW, times, dtype)
    return (out_RW if gradient else out_RW.new_empty(0, x_RW.shape[1])), out_RW.t().contiguous()


@turned.register_fake
def _(x_RW: Tensor, times: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    (rows, width), dtype = x_RW.shape, E5M2 if gradient else E4M3
    return x_RW.new_empty(rows if gradient else 0, width, dtype=dtype), x_RW.new_empty(width, rows, dtype=dtype)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RW: Tensor, gate_FW: Tensor, up_FW: Tensor, down_WF: Tensor) -> Tensor:  # type: ignore[override]
        x_times, down_times = _times(x_RW, E4M3), _times(down_WF, E4M3)
        both_times = torch.minimum(_times(gate_FW, E4M3), _times(up_FW, E4M3))
        both_GW = _joined((gate_FW, up_FW), both_times, 0)
        gu_RG = _product(_cast(x_RW, x_times, E4M3), both_GW.t(), 1 / x_times, 1 / both_times, fast=True)
        h_RF, h_scale = gated(gu_RG)
        ctx.save_for_backward(x_RW, gate_FW, up_FW, down_WF, gu_RG, h_scale, x_times, both_times, down_times)
        return _product(h_RF, _cast(down_WF, down_times, E4M3).t(), h_scale, 1 / down_times, fast=True)

    @staticmethod
    def backward(ctx: Any, dy_RW: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        x_RW, gate_FW, up_FW, down_WF, gu_RG, h_scale, x_times, both_times, down_times = ctx.saved_tensors
        dy_RW, inner = dy_RW.contiguous(), gate_FW.shape[0]
        dy_times = _times(dy_RW, E5M2)
        dy8_RW, dy8_WR = turned(dy_RW, dy_times, True)
        down_FW = _cast(down_WF.t(), down_times, E4M3).contiguous()
        dh_RF = _product(dy8_RW, down_FW.t(), 1 / dy_times, 1 / down_times)
        d_RG, d_GR, d_scale, h_FR = gate_gradients(dh_RF, gu_RG, h_scale)
        both_WG = _joined((gate_FW.t(), up_FW.t()), both_times, 1)
        dx_RW = _product(d_RG, both_WG.t(), d_scale, 1 / both_times)
        _, x_WR = turned(x_RW, x_times, False)
        d_both_GW = _product(d_GR, x_WR.t(), d_scale, 1 / x_times).to(gate_FW.dtype)
        d_down_WF = _product(dy8_WR, h_FR.t(), 1 / dy_times, h_scale).to(down_WF.dtype)
        return dx_RW, d_both_GW[:inner], d_both_GW[inner:], d_down_WF


class Fp8FeedForward(FeedForward):
    """One function under autocast if the sizes are full tiles and no layer has hooks."""

    def forward(self, x_BTW: Tensor) -> Tensor:
        kind, rows = x_BTW.device.type, x_BTW.shape[:-1]
        if not torch.is_autocast_enabled(kind) or rows.numel() % TILE_MULTIPLE or self._has_hooks():
            return super().forward(x_BTW)
        assert self.gate is not None
        x_RW = x_BTW.to(torch.get_autocast_dtype(kind)).reshape(-1, x_BTW.shape[-1])
        y_RW: Tensor = _Gated.apply(x_RW, self.gate.weight, self.up.weight, self.down.weight)
        return y_RW.view(*rows, -1)

    def _has_hooks(self) -> bool:
        if torch.compiler.is_compiling():  # compiled blocks are only used without hooks
            return False
        return any(layer._forward_hooks or layer._forward_pre_hooks for layer in self.children())


def convert_ffn(module: nn.Module, layer: type[nn.Module]) -> None:
    """Make SwiGLU feed-forward parts whose layers are all of the given type run as one function."""
    for part in module.modules():
        if type(part) is not FeedForward or part.activate is not F.silu:
            continue
        layers = list(part.children())
        fits = all(isinstance(child, layer) and child.bias is None for child in layers) and len(layers) == 3
        if fits and all(size % TILE_MULTIPLE == 0 for size in part.up.weight.shape):
            part.__class__ = Fp8FeedForward


START, GROWTH, BACKOFF, GOOD_STEPS = 65536.0, 2.0, 0.5, 2000
OVERFLOW = "fp16 overflow"  # reason in the record of a step that was not applied


class LossScale:
    """The loss scale of fp16, whose smallest number is 6e-8, by the rules of torch.amp.GradScaler: an overflow skips
    the update and halves the scale, 2,000 good steps in a row double it. All on the device without a host sync;
    gradients are unscaled in the optimizer's own pass. A fixed scale comes from the spec and is not in checkpoints."""

    def __init__(self, initial: str | float, device: torch.device) -> None:
        """`initial` is "dynamic" or a number."""
        self.dynamic = initial == "dynamic"
        start = START if self.dynamic else float(initial)
        if not 0 < start < float("inf"):
            raise UserError(f"loss_scale: {start:g} does not scale: write dynamic, or a number such as 1024")
        self.scale = torch.full((), start, device=device)
        self.good = torch.zeros((), dtype=torch.int32, device=device)  # steps in a row without an overflow

    @torch.no_grad()
    def update(self, norm: Tensor) -> Tensor:
        """Update the scale after a step from its gradient norm, the same on every rank; 1 if it overflowed, else 0."""
        overflow = (~torch.isfinite(norm)).float()
        if self.dynamic:
            torch._amp_update_scale_(self.scale, self.good, overflow, GROWTH, BACKOFF, GOOD_STEPS)
        return overflow

    def state(self) -> dict[str, Tensor]:
        """Tensors of a checkpoint, live: a load writes into them."""
        return {"scale": self.scale, "good": self.good} if self.dynamic else {}


@contextmanager
def scaled(scaling: LossScale | None, parameters: Iterable[torch.nn.Parameter]) -> Iterator[Tensor | float]:
    """The factor for losses whose backward pass runs inside. Gradients, new and old, are unscaled on exit. Costs two
    passes over them; training unscales in the optimizer instead."""
    if scaling is None:
        yield 1.0
        return
    parameters = list(parameters)
    _multiply(parameters, scaling.scale)
    yield scaling.scale
    _multiply(parameters, 1.0 / scaling.scale)


def _multiply(parameters: Iterable[torch.nn.Parameter], factor: Tensor) -> None:
    if gradients := [p.grad for p in parameters if p.grad is not None]:
        torch._foreach_mul_(gradients, factor)
