"""The linear layers of a block that share an input, and the layer before, which can divide that input by factors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bessemer.model.attention import Attention
from bessemer.model.layers import FeedForward, RMSNorm
from bessemer.model.transformer import TransformerBlock


@dataclass
class InputGroup:
    """`layers` by their names in the block. `source` is the norm or linear layer whose outputs are their inputs; None
    if something else lies between. `kv_heads`: an attention output, whose inputs of heads that share values are tied.
    """

    layers: dict[str, nn.Linear]
    source: nn.Module | None = None
    kv_heads: int = 0
    head_dim: int = 0

    @property
    def name(self) -> str:
        return "+".join(name.removeprefix("attention.") for name in self.layers)

    @property
    def weight(self) -> Tensor:
        """All rows of the layers: they are quantized together."""
        return torch.cat([layer.weight.data for layer in self.layers.values()])

    def tie(self, x_I: Tensor) -> Tensor:
        """The mean over the query heads that share a value head."""
        if not self.kv_heads:
            return x_I
        x_KND = x_I.view(self.kv_heads, -1, self.head_dim)
        return x_KND.mean(1, keepdim=True).expand_as(x_KND).flatten()

    @torch.no_grad()
    def divide_source(self, factor_I: Tensor) -> None:
        """Divides what the source puts out, so that the layers may be multiplied by the factors."""
        source = self.source
        assert source is not None
        if isinstance(source, nn.Linear):
            if self.kv_heads:
                factor_I = factor_I.view(self.kv_heads, -1, self.head_dim)[:, 0].flatten()
            source.weight.div_(factor_I[:, None])
        elif isinstance(source, RMSNorm):
            source.weight.copy_((source.weight + source.offset) / factor_I - source.offset)
        else:
            assert isinstance(source, nn.LayerNorm)
            source.weight.div_(factor_I)
        bias = getattr(source, "bias", None)
        if bias is not None:
            bias.div_(factor_I)


def input_groups(block: TransformerBlock) -> list[InputGroup]:
    """All linear layers of a block, consumers before their sources: a source is divided before it is quantized."""
    return list(_groups(block))


def _groups(block: TransformerBlock) -> Iterator[InputGroup]:
    shape, attention = block.shape, getattr(block, "attention", None)
    ffn = block.ffn if block.has_ffn else None
    normed = shape.norm_place in ("pre", "sandwich")
    first: dict[str, nn.Linear] = {}
    if isinstance(ffn, FeedForward):
        yield InputGroup({"ffn.down": ffn.down}, ffn.up if ffn.gate is not None else None)
        first = {"ffn.up": ffn.up} if ffn.gate is None else {"ffn.gate": ffn.gate, "ffn.up": ffn.up}
        if shape.parallel != "one_norm":
            yield InputGroup(first, block.ffn_norm if normed else None)
            first = {}
    if type(attention) is Attention:
        yield InputGroup({"attention.out": attention.out}, attention.value, shape.kv_heads, shape.head_dim)
        projections = {name: getattr(attention, name) for name in ("query", "key", "value")}
        layers = {f"attention.{name}": layer for name, layer in projections.items()} | first
        yield InputGroup(layers, block.attention_norm if normed else None)
        return
    for name, layer in block.named_modules():  # latent attention, Mamba
        if isinstance(layer, nn.Linear) and not name.startswith("ffn."):
            yield InputGroup({name: layer})
    if first:
        yield InputGroup(first)
