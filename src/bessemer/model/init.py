"""First weights. Each parameter draws from its own generator, seeded by its name: the values depend on neither order
nor layout.

gpt      N(0, 0.02), output projections of residual branches divided by sqrt(2 layers) (GPT-2)
depth    the same, divided by sqrt(2 (layer + 1)): later layers begin smaller
small    N(0, sqrt(2 / 5 width)), outputs 2 / (layers sqrt(width)) (Nguyen and Salazar; GPT-NeoX)
xavier   variance 2 / (fan in + fan out)
kaiming  variance 2 / fan in
mup      variance 1 / fan in for hidden matrices; learning rates and the head are scaled to go with it (docs/models.md)

Weights in half precision as float32 for a while: a step that is run again in full precision needs all of it so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import xxhash
from torch import Tensor, nn

from bessemer.model.layers import RMSNorm
from bessemer.model.mamba import Mamba2, init_mamba
from bessemer.spec.shape import ModelShape

OUTPUTS = ("out.weight", "ffn.down.weight", "ffn.down", "shared.down.weight")  # of residual branches
EMBEDDINGS = ("embedding.weight", "position.weight", "types.weight", "relative.weight")


def generator_for(name: str, seed: int, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device=device)
    return generator.manual_seed(xxhash.xxh3_64_intdigest(name.encode(), seed=seed) >> 1)


def init_weights(model: nn.Module, seed: int, kind: str = "gpt", under: str = "") -> None:
    """Fill every parameter and buffer of a model that has only been laid out, or those whose names begin so."""
    shape: ModelShape = model.shape  # type: ignore[assignment]
    done: set[Tensor] = set()
    for prefix, module in model.named_modules():
        if not f"{prefix}.".startswith(under):
            continue
        if isinstance(module, RMSNorm):
            nn.init.constant_(module.weight, 1.0 - module.offset)
            done.add(module.weight)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
            done.update(module.parameters())
        elif isinstance(module, Mamba2):
            init_mamba(module, generator_for(prefix, seed, next(module.parameters()).device))
            done.update([*module.parameters(recurse=False), *module.conv.parameters()])
    for name, buffer in model.named_buffers():
        if name.startswith(under):
            nn.init.zeros_(buffer)
    for name, parameter in model.named_parameters():
        if parameter in done or not name.startswith(under):
            continue
        if parameter.ndim == 1:
            nn.init.zeros_(parameter)  # biases
        else:
            nn.init.normal_(
                parameter, std=deviation(name, parameter, shape, kind),
                generator=generator_for(name, seed, parameter.device),
            )  # fmt: skip


def deviation(name: str, parameter: Tensor, shape: ModelShape, kind: str) -> float:
    """Standard deviation of a matrix."""
    layers, fan_out, fan_in = shape.layers + shape.decoder_layers, parameter.shape[-2], parameter.shape[-1]
    output = name.endswith(OUTPUTS)
    if (
        kind == "gpt" and shape.decoder_layers
    ):  # attention there is not scaled, so T5 begins otherwise (Mesh TensorFlow)
        if name.endswith(("embedding.weight", "head.weight")):
            return 1.0
        if name.endswith("relative.weight"):
            return shape.width**-0.5
        return (fan_in * (shape.head_dim if name.endswith("query.weight") else 1)) ** -0.5
    if name.endswith((*EMBEDDINGS, "head.weight")):
        return math.sqrt(2 / (5 * shape.width)) if kind == "small" else 0.02
    if kind == "small":
        return 2 / (layers * math.sqrt(shape.width)) if output else math.sqrt(2 / (5 * shape.width))
    if kind == "xavier":
        return math.sqrt(2 / (fan_in + fan_out))
    if kind == "kaiming":
        return math.sqrt(2 / fan_in)
    if kind == "mup":
        return fan_in**-0.5 / (math.sqrt(2 * layers) if output else 1.0)
    if not output:
        return 0.02
    layer = int(name.split(".")[1]) if kind == "depth" and name.startswith("blocks.") else layers - 1
    return 0.02 / math.sqrt(2 * (layer + 1))


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Costs four bytes a weight; none where the weights are float32 already. Gradients do not outlast it."""
    half = [p for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    held = [parameter.data for parameter in half]
    try:
        for parameter in half:
            parameter.grad, parameter.data = None, parameter.data.float()
        yield
    finally:
        for parameter, data in zip(half, held, strict=True):
            parameter.grad, parameter.data = None, data
