"""Products of layers in fp8 through torchao: 1.8 times the rate of bf16 on Hopper, for factors of 3 bits' mantissa.

The linear layers of blocks are converted in place. Their parameters stay the same objects of the same names, so
optimizers, checkpoints and exports know nothing of it. Each factor is scaled to fp8's range when it is cast: one scale
for a tensor, or one for each row, which is closer and slower. Without torch.compile the casts cost more than is won.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.errors import UserError
from bessemer.train.fp8_ffn import convert_ffn

RECIPES = {"fp8": "tensorwise", "fp8_rowwise": "rowwise"}
MULTIPLE = 16  # of every size of a product, which the hardware asks for
LEAST = 256  # a side of a weight below which the casts cost more than the product saves
# Blocks at each end that stay in bf16. The first reads embeddings, whose rare large entries cost a shared scale its
# resolution; the last one's error goes straight into the logits. NVIDIA's recipes keep both as well.
KEEP = 1
CAPABILITY = (8, 9)  # Ada and later


def convert(
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
    if not (names := converted(model)):
        raise UserError(
            f"precision: {precision} fits no layer: {len(blocks)} blocks less {keep} at each end, whose linear layers "
            f"must be multiples of {MULTIPLE} and at least {least} wide: write bf16, or a larger model"
        )
    return names


def converted(model: nn.Module) -> list[str]:
    """Names of the layers that compute in fp8."""
    return [name for name, module in model.named_modules() if isinstance(module, _layer_types()[1])]


def refuse_device(precision: str, device: torch.device) -> None:
    """A clear word where the device cannot multiply fp8."""
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if found is None or found < CAPABILITY:
        here = torch.cuda.get_device_name(device) if found else device.type
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
