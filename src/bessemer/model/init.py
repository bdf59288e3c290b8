"""Weight initialisation, independent of order and parallel layout: each parameter has its own generator."""

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

RESIDUAL_OUTPUTS = ("out.weight", "ffn.down.weight", "ffn.down", "shared.down.weight")
EMBEDDINGS = ("embedding.weight", "position.weight", "types.weight", "relative.weight")


def generator_for(name: str, seed: int, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device=device)
    return generator.manual_seed(xxhash.xxh3_64_intdigest(name.encode(), seed=seed) >> 1)


def init_weights(model: nn.Module, seed: int, kind: str = "gpt", under: str = "") -> None:
    """Initialise every parameter and buffer, or those whose names start with `under`. Each parameter draws from its own
    generator, seeded by its name. Kinds:

    gpt      N(0, 0.02), output projections of residual branches divided by sqrt(2 layers) (GPT-2)
    depth    the same, divided by sqrt(2 (layer + 1)): later layers start smaller
    small    N(0, sqrt(2 / 5 width)), outputs 2 / (layers sqrt(width)) (Nguyen and Salazar; GPT-NeoX)
    xavier   variance 2 / (fan in + fan out)
    kaiming  variance 2 / fan in
    mup      variance 1 / fan in for hidden matrices; learning rates and the head are scaled to match (docs/models.md)
    """
    shape: ModelShape = model.shape  # type: ignore[assignment]
    initialised: set[Tensor] = set()
    for prefix, module in model.named_modules():
        if not f"{prefix}.".startswith(under):
            continue
        if isinstance(module, RMSNorm):
            nn.init.constant_(module.weight, 1.0 - module.offset)
            initialised.add(module.weight)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
            initialised.update(module.parameters())
        elif isinstance(module, Mamba2):
            init_mamba(module, generator_for(prefix, seed, next(module.parameters()).device))
            initialised.update([*module.parameters(recurse=False), *module.conv.parameters()])
    for name, buffer in model.named_buffers():
        if name.startswith(under):
            nn.init.zeros_(buffer)
    for name, parameter in model.named_parameters():
        if parameter in initialised or not name.startswith(under):
            continue
        if parameter.ndim == 1:
            nn.init.zeros_(parameter)  # biases
        else:
            nn.init.normal_(
                parameter, std=standard_deviation(name, parameter, shape, kind),
                generator=generator_for(name, seed, parameter.device),
            )  # fmt: skip


def standard_deviation(name: str, parameter: Tensor, shape: ModelShape, kind: str) -> float:
    layers, fan_out, fan_in = shape.layers + shape.decoder_layers, parameter.shape[-2], parameter.shape[-1]
    output = name.endswith(RESIDUAL_OUTPUTS)
    if kind == "gpt" and shape.decoder_layers:  # T5: its attention is unscaled, so the weights are (Mesh TensorFlow)
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
    """Half-precision weights as float32 inside the block, to repeat a step in full precision. Costs four bytes per
    half-precision weight. Gradients do not survive the block."""
    half = [p for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    originals = [parameter.data for parameter in half]
    try:
        for parameter in half:
            parameter.grad, parameter.data = None, parameter.data.float()
        yield
    finally:
        for parameter, data in zip(half, originals, strict=True):
            parameter.grad, parameter.data = None, data
