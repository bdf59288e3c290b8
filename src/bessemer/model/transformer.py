"""The native decoder: RMSNorm, rotary attention with grouped queries, SwiGLU; pre-norm residual blocks.

The network knows nothing of losses or devices. `forward` gives hidden states; the loss head multiplies them with
`head_weight` itself (in chunks, without the logits in memory), and generation calls `logits`.
Legend: B batch, T time, W width, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

from bessemer.model.attention import Attention, LayerCache
from bessemer.model.rotary import RotaryTable
from bessemer.spec.shape import ModelShape


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, ffn, bias=False)
        self.up = nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x_BTW: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTW)) * self.up(x_BTW))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.ffn = SwiGLU(shape.width, shape.ffn)

    def forward(
        self, x_BTW: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        x_BTW = x_BTW + self.attention(self.attention_norm(x_BTW), rotary, mask, cache)
        return x_BTW + self.ffn(self.ffn_norm(x_BTW))


class Decoder(nn.Module):
    """A language model. Build it under `torch.device("meta")` to count or lay out without memory."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        if not shape.tied:
            self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        self.rotary = RotaryTable(shape.head_dim, shape.rope_theta)

    @property
    def head_weight(self) -> Tensor:
        """(V, W): the output embedding, which is the input one where they are tied."""
        return self.embedding.weight if self.shape.tied else self.head.weight

    def forward(
        self, tokens_BT: Tensor, mask_B1TT: Tensor | None = None, caches: list[LayerCache] | None = None
    ) -> Tensor:
        """Hidden states (B, T, W) after the last norm."""
        x_BTW = self.embedding(tokens_BT)
        start = caches[0].length if caches else 0
        cos, sin = self.rotary.get(start + tokens_BT.shape[1], x_BTW.device, _compute_dtype(x_BTW))
        rotary = (cos[start:], sin[start:])
        for i, block in enumerate(self.blocks):
            x_BTW = block(x_BTW, rotary, mask_B1TT, caches[i] if caches else None)
        return self.norm(x_BTW)

    def logits(self, hidden_BTW: Tensor) -> Tensor:
        return F.linear(hidden_BTW, self.head_weight)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The type that linear layers give: autocast's where it is on."""
    kind = x.device.type
    if kind == "meta":
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def init_weights(model: Decoder, seed: int) -> None:
    """N(0, 0.02), output projections of residual branches scaled by 1/sqrt(2 layers) (GPT-2), norms at 1.

    Each parameter draws from its own generator, seeded by its name: the values depend on neither order nor layout.
    """
    residual = 0.02 / math.sqrt(2 * model.shape.layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
            continue
        generator = torch.Generator(device=parameter.device)
        generator.manual_seed(xxhash.xxh3_64_intdigest(name.encode(), seed=seed) >> 1)
        std = residual if name.endswith(("attention.out.weight", "ffn.down.weight")) else 0.02
        nn.init.normal_(parameter, std=std, generator=generator)


def build(shape: ModelShape, device: torch.device | str, seed: int) -> Decoder:
    """A fresh model on a device, made without an intermediate copy."""
    with torch.device("meta"):
        model = Decoder(shape)
    model.to_empty(device=device)
    init_weights(model, seed)
    return model
