"""Encoder-decoder models (T5).

`EncoderDecoder` is a `Decoder` with more blocks: `blocks` holds the encoder's, then the decoder's, so that code that
iterates over blocks (sharding, freezing, statistics) covers both. Embedding, head and loss are the decoder's. Legend: B
batch, T decoder time, S encoder time, W width, N query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from bessemer.errors import UserError
from bessemer.model.attention import Attention, AttentionInputs, LayerCache
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.layers import RelativeBias, make_norm
from bessemer.model.transformer import Cache, Decoder, TransformerBlock
from bessemer.spec.shape import ModelShape

# The only settings that the two stacks support; published encoder-decoders have no others.
_REQUIRED: dict[str, Any] = {
    "positions": "relative", "causal": True, "norm_place": "pre", "parallel": "none", "qk_norm": "none",
    "attention_cap": None, "mla": None, "mamba": None, "windows": (0,), "blocks": (0, 0), "head_transform": False,
}  # fmt: skip


class EncoderOutput(NamedTuple):
    """The encoder's hidden states, and which of them each decoder position may attend to (None: all)."""

    hidden_BSW: Tensor
    mask_B1TS: Tensor | None


class CrossCache(LayerCache):
    """The key-value cache of a decoder block, with the keys and values of the encoder's output."""

    def __init__(self, encoded_BKSD: tuple[Tensor, Tensor], mask_B1TS: Tensor | None) -> None:
        super().__init__()
        self.encoded_BKSD, self.mask_B1TS = encoded_BKSD, mask_B1TS


class CrossAttention(Attention):
    """Queries from the decoder, keys and values from the encoder, no positions."""

    def encoder_keys(self, hidden_BSW: Tensor) -> tuple[Tensor, Tensor]:
        """k and v, both (B, K, S, D)."""
        k, v = (part(hidden_BSW).unflatten(-1, (-1, self.shape.head_dim)) for part in (self.key, self.value))
        return k.transpose(1, 2), v.transpose(1, 2)

    def attend_encoder(self, x_BTW: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask_B1TS: Tensor | None) -> Tensor:
        q_BNTD = self.query(x_BTW).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        out_BNTD = F.scaled_dot_product_attention(
            q_BNTD, k_BKSD, v_BKSD, attn_mask=mask_B1TS, dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale, enable_gqa=q_BNTD.shape[1] != k_BKSD.shape[1],
        )  # fmt: skip
        return self.out(out_BNTD.transpose(1, 2).flatten(2))


class CrossBlock(TransformerBlock):
    """A decoder layer: self-attention, cross-attention, feed-forward part."""

    def __init__(self, shape: ModelShape, layer: int = 0) -> None:
        super().__init__(shape, layer)
        self.cross_norm, self.cross = make_norm(shape), CrossAttention(shape, layer)

    def forward(
        self, x_BTW: Tensor, inputs: AttentionInputs, cache: Cache | None = None, encoded: EncoderOutput | None = None
    ) -> Tensor:
        x_BTW = x_BTW + self.mix(self.attention_norm(x_BTW), inputs, cache)
        if isinstance(cache, CrossCache):
            kv_BKSD, mask_B1TS = cache.encoded_BKSD, cache.mask_B1TS
        else:
            assert encoded is not None
            kv_BKSD, mask_B1TS = self.cross.encoder_keys(encoded.hidden_BSW), encoded.mask_B1TS
        x_BTW = x_BTW + self._drop(self.cross.attend_encoder(self.cross_norm(x_BTW), *kv_BKSD, mask_B1TS))
        return x_BTW + self._drop(self.ffn(self.ffn_norm(x_BTW)))


class EncoderDecoder(Decoder):
    """Encoder padding has the document number -1, and nothing else attends to it."""

    def __init__(self, shape: ModelShape) -> None:
        for name, value in _REQUIRED.items():
            if (actual := getattr(shape, name)) != value:
                raise UserError(f"model: an encoder-decoder supports only {name} {value!r}, not {actual!r}")
        super().__init__(shape)
        self.encoder_relative = RelativeBias(
            shape.relative_buckets, shape.relative_distance, shape.heads, bidirectional=True
        )
        self.encoder_norm = make_norm(shape)
        self.blocks.extend(CrossBlock(shape, layer) for layer in range(shape.decoder_layers))

    def encode(
        self, tokens_BS: Tensor, documents_BS: Tensor | None = None, decoder_documents_BT: Tensor | None = None
    ) -> EncoderOutput:
        """Runs the encoder. Without decoder documents, the decoder attends to all but padding; otherwise to the same
        document."""
        attention_mask = AttentionMask(documents_BS, causal=False)
        x_BSW, S = self.embed(tokens_BS, attention_mask), tokens_BS.shape[1]
        inputs = AttentionInputs(attention_mask, bias_1NTS=self.encoder_relative(S, S, x_BSW.device))
        for block in list(self.blocks)[: self.shape.layers]:
            x_BSW = block(x_BSW, inputs)
        return EncoderOutput(self.encoder_norm(x_BSW), cross_mask(documents_BS, decoder_documents_BT))

    def new_caches(self, tokens_BS: Tensor | None = None, documents_BS: Tensor | None = None) -> list[Cache]:
        """For generation: encodes the text once and caches its keys in every decoder block."""
        if tokens_BS is None:
            raise UserError("an encoder-decoder needs a text to encode before it generates")
        encoded = self.encode(tokens_BS, documents_BS)
        blocks: Any = list(self.blocks)[self.shape.layers :]
        return [CrossCache(block.cross.encoder_keys(encoded.hidden_BSW), encoded.mask_B1TS) for block in blocks]

    def forward(
        self, tokens_BT: Tensor, attention_mask: AttentionMask | None = None, caches: list[Cache] | None = None,
        types_BT: Tensor | None = None, encoder_tokens_BS: Tensor | None = None,
        encoder_documents_BS: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states (B, T, W) of the decoder. `caches` from `new_caches` include the encoder's output."""
        attention_mask, encoded, start = attention_mask or AttentionMask(), None, caches[0].length if caches else 0
        attention_mask.causal = True
        if caches is None:
            assert encoder_tokens_BS is not None, "no encoder input"
            encoded = self.encode(encoder_tokens_BS, encoder_documents_BS, attention_mask.documents_BT)
        x_BTW = self.embed(tokens_BT, attention_mask, start)
        inputs = self.attention_inputs(x_BTW, attention_mask, start)
        for i, block in enumerate(list(self.blocks)[self.shape.layers :]):
            x_BTW = block(x_BTW, inputs, caches[i] if caches else None, encoded)
        return self.norm(x_BTW)


def cross_mask(encoder_BS: Tensor | None, decoder_BT: Tensor | None) -> Tensor | None:
    """(B, 1, T or 1, S) from document numbers, True where the decoder may attend; None if everywhere. Decoder documents
    use the encoder's numbers; each must exist in the encoder's row."""
    if encoder_BS is None:
        assert decoder_BT is None, "the decoder's documents need the encoder's"
        return None
    if decoder_BT is None:
        return (encoder_BS >= 0)[:, None, None]
    return (decoder_BT[:, :, None] == encoder_BS[:, None])[:, None]
