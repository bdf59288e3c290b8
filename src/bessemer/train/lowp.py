"""Products of layers in fp8 through torchao: 1.8 times the rate of bf16 on Hopper, for factors of 3 bits' mantissa.

The linear layers of blocks are converted in place. Their parameters stay the same objects of the same names, so
optimizers, checkpoints and exports know nothing of it. Each factor is scaled to fp8's range when it is cast: one scale
for a tensor, or one for each row, which is closer and slower. Without torch.compile the casts cost more than is won.

A gated feed-forward part in fp8 as one function, with the same arithmetic as torchao's layers, one by one.

Nearly all that fp8 costs beside its products is here: of a step of 1B parameters on an H200 45 ms went into casts, most
of them around SwiGLU (docs/decisions.md). As one function gate and up are one product with one scale, SwiGLU is cast as
it is computed, and what the backward pass needs in columns is turned by a kernel that is made for it.

Legend: R rows (tokens), W width, F inner width, G twice that: gate and up side by side.

The loss scale of fp16, whose smallest number is 6e-8: gradients are computed of the loss times a factor as large as
they can bear, and divided by it in the optimizer's own pass. All on the device, without a host sync.

The rules are those of torch.amp.GradScaler: an overflow withholds the step and halves the scale, 2,000 good steps in a
row double it.
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
MULTIPLE = 16  # of every size of a product, which the hardware asks for
LEAST = 256  # a side of a weight below which the casts cost more than the product saves
# Blocks at each end that stay in bf16. The first reads embeddings, whose rare large entries cost a shared scale its
# resolution; the last one's error goes straight into the logits. NVIDIA's recipes keep both as well.
KEEP = 1
CAPABILITY = (8, 9)  # Ada and later


def convert_to_fp8(
    model: nn.Module, precision: str, device: torch.device, keep: int = KEEP, least: int = LEAST, emulate: bool = False
) -> list[str]:
    """Convert what of the model's blocks gains by it; the names of the layers. To be called before torch.compile.

    `keep` blocks at either end stay as they are. With `emulate` the products run in fp32 on rounded factors, on any
    device.
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
    """Names of the layers that compute in fp8."""
    return [name for name, module in model.named_modules() if isinstance(module, _layer_types()[1])]


def refuse_device(precision: str, device: torch.device) -> None:
    """A clear word where the device cannot multiply fp8."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < CAPABILITY:
        here = torch.cuda.get_device_name(device) if capability else device.type
        raise UserError(f"precision: {precision} needs a GPU with fp8 (Ada, Hopper, later), this is {here}: write bf16")


def _torchao(precision: str) -> Any:
    logging.getLogger("torchao").setLevel(logging.ERROR)  # of its extensions that do not load, fp8 uses none
    try:
        import torchao.float8 as float8
    except ImportError as error:
        raise UserError(f"precision: {precision} needs torchao: pip install 'bessemer[fp8]' ({error})") from None
    return float8


def _config(precision: str, emulate: bool) -> Any:
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig

    # torchao's recipes as they stand: gradients are e5m2 with one scale a tensor and e4m3 with one a row; only the
    # forward product accumulates fast, since 14 bits are too few for sums over the tokens of a batch.
    return replace(Float8LinearConfig.from_recipe_name(RECIPES[precision]), emulate=emulate)


@cache
def _layer_types() -> tuple[type[nn.Module], type[nn.Module]]:
    """torchao's layer; and ours, which is in fp8 where autocast is on and the sizes allow, and a plain linear layer
    elsewhere: a step that is run again in fp32 is fp32 throughout, and a row of any length can be evaluated."""
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    class Fp8Linear(Float8Linear):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            kind, rows = x.device.type, x.shape[:-1]
            if not torch.is_autocast_enabled(kind) or rows.numel() % MULTIPLE:
                return F.linear(x, self.weight, self.bias)
            # torchao asks for CUDA's autocast alone. Flat, as its backward pass has it: torch.compile then sees one
            # cast for both passes and for all layers that read the same tensor (q, k, v; gate, up), where it saw two.
            x_RK = x.to(torch.get_autocast_dtype(kind)).reshape(-1, x.shape[-1])
            y_RN: Tensor = matmul_with_hp_or_float8_args.apply(
                x_RK, self.weight.t(), self.linear_mm_config, self.config
            )
            return (y_RN if self.bias is None else y_RN + self.bias.to(y_RN.dtype)).view(*rows, -1)

    return Float8Linear, Fp8Linear


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2  # of values; of gradients, which range wider
TILE_MULTIPLE = 64  # of all sizes: the kernels' tiles
TINY = 1e-12


def _times(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What x is multiplied by before it is cast."""
    return (torch.finfo(dtype).max / x.abs().amax().float().clamp(min=TINY)).reshape(1)


def _cast(x: Tensor, times: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return (x.float() * times).clamp(-most, most).to(dtype)


def _joined(parts: tuple[Tensor, ...], times: Tensor, dim: int) -> Tensor:
    """Side by side in e4m3. Cast first, so that no copy in bf16 is made; as bytes, since a CPU joins no fp8."""
    return torch.cat([_cast(part, times, E4M3).view(torch.uint8) for part in parts], dim).view(E4M3)


def _product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, fast: bool = False) -> Tensor:
    """a @ b of fp8 in bf16: a in rows, b in columns. `fast` sums in 14 bits, too few for sums over tokens."""
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
    """Gradients of `gated`'s input in e5m2, in rows and in columns, their scale; and its output in columns."""
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
    """x times a number: of a gradient in rows, of a value nothing; and in columns."""
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
    """As one function where autocast is on, sizes are whole tiles and nobody listens to its layers."""

    def forward(self, x_BTW: Tensor) -> Tensor:
        kind, rows = x_BTW.device.type, x_BTW.shape[:-1]
        if not torch.is_autocast_enabled(kind) or rows.numel() % TILE_MULTIPLE or self._heard():
            return super().forward(x_BTW)
        assert self.gate is not None
        x_RW = x_BTW.to(torch.get_autocast_dtype(kind)).reshape(-1, x_BTW.shape[-1])
        y_RW: Tensor = _Gated.apply(x_RW, self.gate.weight, self.up.weight, self.down.weight)
        return y_RW.view(*rows, -1)

    def _heard(self) -> bool:
        if torch.compiler.is_compiling():  # compiled blocks serve nobody who listens
            return False
        return any(layer._forward_hooks or layer._forward_pre_hooks for layer in self.children())


def convert_ffn(module: nn.Module, layer: type[nn.Module]) -> None:
    """Have feed-forward parts whose layers are all of the given type run as one function, if they are SwiGLU."""
    for part in module.modules():
        if type(part) is not FeedForward or part.activate is not F.silu:
            continue
        layers = list(part.children())
        fits = all(isinstance(one, layer) and one.bias is None for one in layers) and len(layers) == 3
        if fits and all(size % TILE_MULTIPLE == 0 for size in part.up.weight.shape):
            part.__class__ = Fp8FeedForward


START, GROWTH, BACKOFF, GOOD_STEPS = 65536.0, 2.0, 0.5, 2000
OVERFLOW = "fp16 overflow"  # why a step was withheld, in its record


class LossScale:
    """The present scale. A fixed one never changes, and is the spec's: a checkpoint does not keep it."""

    def __init__(self, initial: str | float, device: torch.device) -> None:
        """`asked` is "dynamic" or a number."""
        self.dynamic = initial == "dynamic"
        start = START if self.dynamic else float(initial)
        if not 0 < start < float("inf"):
            raise UserError(f"loss_scale: {start:g} does not scale: write dynamic, or a number such as 1024")
        self.scale = torch.full((), start, device=device)
        self.good = torch.zeros((), dtype=torch.int32, device=device)  # steps in a row without an overflow

    @torch.no_grad()
    def update(self, norm: Tensor) -> Tensor:
        """After a step, from the norm of its gradients: 1 if they overflowed, else 0. Every rank has the same norm, so
        all of them go on with the same scale."""
        overflow = (~torch.isfinite(norm)).float()
        if self.dynamic:
            torch._amp_update_scale_(self.scale, self.good, overflow, GROWTH, BACKOFF, GOOD_STEPS)
        return overflow

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, live: a load writes into it."""
        return {"scale": self.scale, "good": self.good} if self.dynamic else {}


@contextmanager
def scaled(scaling: LossScale | None, parameters: Iterable[torch.nn.Parameter]) -> Iterator[Tensor | float]:
    """The factor for losses whose backward pass runs inside; gradients are afterwards as without it, and so are those
    that were there before. Costs two passes over them, so the loop divides in the optimizer instead."""
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
