"""The native language model: embeddings, blocks, a norm and a head, as its `ModelShape` describes.

The network knows nothing of losses or devices. `forward` returns hidden states; the loss multiplies them with
`head_weight` itself (in chunks, without all logits in memory), and generation calls `logits`. Legend: B batch, T time,
W width, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.model.attention import Place, Rotary
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.block import Cache, TransformerBlock
from bessemer.model.init import init_weights
from bessemer.model.layers import (
    ACTIVATIONS,
    RelativeBias,
    RotaryTable,
    alibi_bias,
    alibi_rounded,
    alibi_slopes,
    make_norm,
    sinusoidal,
)
from bessemer.spec.shape import ModelShape


class Embedding(nn.Embedding):
    """nn.Embedding without random values on the meta device, where drawing them imports torch._dynamo."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class HeadTransform(nn.Module):
    """BERT's dense layer and norm before the output embedding."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(shape.width, shape.width), make_norm(shape)
        self.activate = ACTIVATIONS[shape.activation]

    def forward(self, x_BTW: Tensor) -> Tensor:
        return self.norm(self.activate(self.linear(x_BTW)))


class LayerChain(Protocol):
    """All blocks and the final norm as one compiled function, for the inputs that it supports."""

    def serves_all(self, model: Decoder, x_BTW: Tensor) -> bool: ...
    def through(self, model: Decoder, x_BTW: Tensor, place: Place) -> Tensor: ...


class Decoder(nn.Module):
    """A language model. Build it under `torch.device("meta")` to count parameters without allocating memory."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape, self.dropout = shape, 0.0
        self.chain: LayerChain | None = None
        self._table: Tensor | None = None
        self.embedding = Embedding(shape.vocab, shape.width)
        if shape.positions == "learned":
            self.position = Embedding(shape.max_positions, shape.width)
        if shape.positions == "relative":
            self.relative = RelativeBias(
                shape.relative_buckets, shape.relative_distance, shape.heads, bidirectional=not shape.causal
            )
        if shape.token_types:
            self.types = Embedding(shape.token_types, shape.width)
        if shape.embedding_norm:
            self.embedding_norm = make_norm(shape)
        self.blocks = nn.ModuleList(TransformerBlock(shape, layer) for layer in range(shape.layers))
        if shape.norm_place != "post":
            self.norm = make_norm(shape)
        if shape.head_transform:
            self.transform = HeadTransform(shape)
        if not shape.tied:
            self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        self.head_bias = nn.Parameter(torch.zeros(shape.vocab)) if shape.head_bias else None
        rotated = shape.mla.rope_dim if shape.mla else shape.head_dim
        windowed = [layer for layer in range(shape.layers) if shape.window(layer)]
        self.rotary = RotaryTable(rotated, shape.rope) if shape.positions == "rope" else None
        has_local = shape.positions == "rope" and shape.local_theta is not None and windowed
        self.local_rotary = RotaryTable(rotated, shape.layer_rope(windowed[0])) if has_local else None

    @property
    def head_weight(self) -> Tensor:
        """(V, W): the output embedding; the input embedding if they are tied."""
        return self.embedding.weight if self.shape.tied else self.head.weight

    def new_caches(self) -> list[Cache]:
        return [block.new_cache() for block in self.blocks]  # type: ignore[operator]

    def embed(
        self, tokens_BT: Tensor, attention_mask: AttentionMask, start: int = 0, types_BT: Tensor | None = None
    ) -> Tensor:
        """The first block's input."""
        shape = self.shape
        x_BTW = self.embedding(tokens_BT)
        if shape.embedding_scale != 1.0:
            x_BTW = x_BTW * torch.tensor(shape.embedding_scale, dtype=x_BTW.dtype)  # rounded like the weights
        if shape.positions in ("learned", "sinusoidal"):
            positions_BT = attention_mask.positions(start, tokens_BT.shape[1], tokens_BT.device)
            if shape.positions == "learned":
                x_BTW = x_BTW + self.position(positions_BT)
            else:
                table_TW = self._sinusoidal_table(attention_mask.row_length(start, tokens_BT.shape[1]), x_BTW)
                x_BTW = x_BTW + table_TW[positions_BT]
        if shape.token_types:
            x_BTW = x_BTW + self.types(torch.zeros_like(tokens_BT) if types_BT is None else types_BT)
        if shape.embedding_norm:
            x_BTW = self.embedding_norm(x_BTW)
        if x_BTW.device.type == "cuda":  # a residual stream in half precision saves 6 ms of a 1B step
            x_BTW = x_BTW.to(compute_dtype(x_BTW))
        return F.dropout(x_BTW, self.dropout, self.training) if self.dropout else x_BTW

    def _sinusoidal_table(self, length: int, like: Tensor) -> Tensor:
        """Cached while length, dtype and device fit."""
        table = self._table
        if table is None or len(table) < length or table.dtype != like.dtype or table.device != like.device:
            self._table = table = sinusoidal(1 << (length - 1).bit_length(), self.shape.width).to(
                like.device, like.dtype
            )
        return table

    def place(self, x_BTW: Tensor, attention_mask: AttentionMask, start: int = 0, length: int | None = None) -> Place:
        """The inputs shared by all blocks. `length` is the number of columns if `x_BTW` holds only some of them."""
        T = length or x_BTW.shape[1]
        S, columns = attention_mask.row_length(start, T), attention_mask.local_columns(start, T, x_BTW.device)
        bias_1NTS = None
        if self.shape.positions == "alibi":
            slopes_N = alibi_slopes(self.shape.heads).to(x_BTW.device)
            if self.shape.alibi_rounded:
                positions_BS = attention_mask.positions(0, S, x_BTW.device)
                bias_1NTS = alibi_rounded(slopes_N, positions_BS).to(x_BTW.dtype) * self.shape.head_dim**-0.5
            else:
                bias_1NTS = alibi_bias(slopes_N, x_BTW.shape[1], S)
        elif self.shape.positions == "relative":
            bias_1NTS = self.relative(x_BTW.shape[1], S, x_BTW.device)

        def table(rotary: RotaryTable | None) -> Rotary | None:
            if rotary is None:
                return None
            cos, sin = rotary.get(S, x_BTW.device, compute_dtype(x_BTW))
            return cos[columns], sin[columns]

        return Place(attention_mask, table(self.rotary), table(self.local_rotary), bias_1NTS)

    def forward(
        self, tokens_BT: Tensor, attention_mask: AttentionMask | None = None, caches: list[Cache] | None = None,
        types_BT: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states (B, T, W) that the head multiplies."""
        attention_mask = attention_mask or AttentionMask()
        attention_mask.causal, attention_mask.blocks = self.shape.causal, self.shape.blocks
        start = caches[0].length if caches else 0
        x_BTW = self.embed(tokens_BT, attention_mask, start, types_BT)
        place = self.place(x_BTW, attention_mask, start)
        if self.chain is not None and not caches and self.chain.serves_all(self, x_BTW):
            x_BTW = self.chain.through(self, x_BTW, place)
        else:
            for i, block in enumerate(self.blocks):
                x_BTW = block(x_BTW, place, caches[i] if caches else None)
            if self.shape.norm_place != "post":
                x_BTW = self.norm(x_BTW)
        return self.transform(x_BTW) if self.shape.head_transform else x_BTW

    def logits(self, hidden_BTW: Tensor) -> Tensor:
        logits = F.linear(hidden_BTW, self.head_weight, self.head_bias)
        if self.shape.logit_scale != 1.0:
            logits = logits * self.shape.logit_scale
        cap = self.shape.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a linear layer's output: autocast's if enabled."""
    kind = x.device.type
    if kind == "meta":
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def network(shape: ModelShape) -> Decoder:
    """The module of a shape, with uninitialised or transformers-initialised weights."""
    if shape.wrapped:
        from bessemer.model.wrapped import WrappedModel

        return WrappedModel(shape)
    if shape.decoder_layers:
        from bessemer.model.encoder_decoder import EncoderDecoder

        return EncoderDecoder(shape)
    return Decoder(shape)


def build(
    shape: ModelShape, device: torch.device | str, seed: int, init: str = "gpt", matrices: torch.dtype = torch.float32
) -> Decoder:
    """A newly initialised model on a device, built without an intermediate copy. Vectors (norms, biases) are always
    float32. On "meta" nothing is allocated; the weights come later."""
    with torch.device("meta"):
        model = network(shape)
    for parameter in model.parameters():
        if parameter.ndim >= 2 and matrices != torch.float32:
            parameter.data = parameter.data.to(matrices)
    if str(device) == "meta":
        return model
    # Like `to_empty`, whose `empty_like` of meta tensors imports sympy.
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    if not shape.wrapped:  # transformers initialises those
        init_weights(model, seed, init)
    return model
