"""An encoder that reads a text and a decoder that writes another while looking at it (T5).

It is a `Decoder` with more blocks: `blocks` holds the encoder's first and then the decoder's, so that whatever walks
over blocks (sharding, freezing, statistics) finds all of them. Embedding, head and loss are the decoder's.
Legend: B batch, T decoder time, S encoder time, W width, N query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from bessemer.errors import UserError
from bessemer.model.attention import Attention, LayerCache, Place
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.block import Cache, TransformerBlock
from bessemer.model.layers import make_norm
from bessemer.model.positions import RelativeBias
from bessemer.model.transformer import Decoder
from bessemer.spec.shape import ModelShape

# What the two stacks are made for: no published encoder-decoder that we import has anything else.
_NEEDS: dict[str, Any] = {
    "positions": "relative", "causal": True, "norm_place": "pre", "parallel": "none", "qk_norm": "none",
    "attention_cap": None, "mla": None, "mamba": None, "windows": (0,), "blocks": (0, 0), "head_transform": False,
}  # fmt: skip


class EncoderOutput(NamedTuple):
    """What the encoder gives: hidden states, and which of them each position of the decoder may see (None: all)."""

    hidden_BSW: Tensor
    mask_B1TS: Tensor | None


class CrossCache(LayerCache):
    """Besides its own past, a block keeps the keys and values of the text that was read."""

    def __init__(self, read_BKSD: tuple[Tensor, Tensor], mask_B1TS: Tensor | None) -> None:
        super().__init__()
        self.read_BKSD, self.mask_B1TS = read_BKSD, mask_B1TS


class CrossAttention(Attention):
    """Queries from the decoder, keys and values from the encoder, no positions."""

    def keys(self, hidden_BSW: Tensor) -> tuple[Tensor, Tensor]:
        """k and v, both (B, K, S, D)."""
        k, v = (part(hidden_BSW).unflatten(-1, (-1, self.shape.head_dim)) for part in (self.key, self.value))
        return k.transpose(1, 2), v.transpose(1, 2)

    def look(self, x_BTW: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask_B1TS: Tensor | None) -> Tensor:
        q_BNTD = self.query(x_BTW).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        out_BNTD = F.scaled_dot_product_attention(
            q_BNTD, k_BKSD, v_BKSD, attn_mask=mask_B1TS, dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale, enable_gqa=q_BNTD.shape[1] != k_BKSD.shape[1],
        )  # fmt: skip
        return self.out(out_BNTD.transpose(1, 2).flatten(2))


class CrossBlock(TransformerBlock):
    """A decoder's layer: attention to its own past, then to the encoder, then the feed-forward part."""

    def __init__(self, shape: ModelShape, layer: int = 0) -> None:
        super().__init__(shape, layer)
        self.cross_norm, self.cross = make_norm(shape), CrossAttention(shape, layer)

    def forward(
        self, x_BTW: Tensor, place: Place, cache: Cache | None = None, read: EncoderOutput | None = None
    ) -> Tensor:
        x_BTW = x_BTW + self.mix(self.attention_norm(x_BTW), place, cache)
        if isinstance(cache, CrossCache):
            kv_BKSD, mask_B1TS = cache.read_BKSD, cache.mask_B1TS
        else:
            assert read is not None
            kv_BKSD, mask_B1TS = self.cross.keys(read.hidden_BSW), read.mask_B1TS
        x_BTW = x_BTW + self._drop(self.cross.look(self.cross_norm(x_BTW), *kv_BKSD, mask_B1TS))
        return x_BTW + self._drop(self.ffn(self.ffn_norm(x_BTW)))


class EncoderDecoder(Decoder):
    """Padding of the encoder has the document number -1, and nothing else sees it."""

    def __init__(self, shape: ModelShape) -> None:
        for name, value in _NEEDS.items():
            if (given := getattr(shape, name)) != value:
                raise UserError(f"model: an encoder-decoder with {name} {given!r} is not built; it must be {value!r}")
        super().__init__(shape)
        self.encoder_relative = RelativeBias(
            shape.relative_buckets, shape.relative_distance, shape.heads, bidirectional=True
        )
        self.encoder_norm = make_norm(shape)
        self.blocks.extend(CrossBlock(shape, layer) for layer in range(shape.decoder_layers))

    def read(
        self, tokens_BS: Tensor, documents_BS: Tensor | None = None, decoder_documents_BT: Tensor | None = None
    ) -> EncoderOutput:
        """The encoder. Without documents of its own the decoder sees all but padding, else the same document."""
        sight = AttentionMask(documents_BS, causal=False)
        x_BSW, S = self.embed(tokens_BS, sight), tokens_BS.shape[1]
        place = Place(sight, bias_1NTS=self.encoder_relative(S, S, x_BSW.device))
        for block in list(self.blocks)[: self.shape.layers]:
            x_BSW = block(x_BSW, place)
        return EncoderOutput(self.encoder_norm(x_BSW), cross_mask(documents_BS, decoder_documents_BT))

    def new_caches(self, tokens_BS: Tensor | None = None, documents_BS: Tensor | None = None) -> list[Cache]:
        """For generation: the text is read once, and its keys are kept in every block of the decoder."""
        if tokens_BS is None:
            raise UserError("an encoder-decoder writes after it has read: give it a text to read")
        read = self.read(tokens_BS, documents_BS)
        blocks: Any = list(self.blocks)[self.shape.layers :]
        return [CrossCache(block.cross.keys(read.hidden_BSW), read.mask_B1TS) for block in blocks]

    def forward(
        self,
        tokens_BT: Tensor,
        sight: AttentionMask | None = None,
        caches: list[Cache] | None = None,
        types_BT: Tensor | None = None,
        encoder_tokens_BS: Tensor | None = None,
        encoder_documents_BS: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (B, T, W) of the decoder; with caches of `new_caches` the encoder's part is in them."""
        sight, read, start = sight or AttentionMask(), None, caches[0].length if caches else 0
        sight.causal = True
        if caches is None:
            assert encoder_tokens_BS is not None, "nothing to read"
            read = self.read(encoder_tokens_BS, encoder_documents_BS, sight.documents_BT)
        x_BTW = self.embed(tokens_BT, sight, start)
        place = self.place(x_BTW, sight, start)
        for i, block in enumerate(list(self.blocks)[self.shape.layers :]):
            x_BTW = block(x_BTW, place, caches[i] if caches else None, read)
        return self.norm(x_BTW)


def cross_mask(encoder_BS: Tensor | None, decoder_BT: Tensor | None) -> Tensor | None:
    """(B, 1, T or 1, S) from document numbers, True where the decoder may look; None if everywhere. Documents of the
    decoder are known by the encoder's numbers: one that the encoder lacks would have nothing to look at."""
    if encoder_BS is None:
        assert decoder_BT is None, "the decoder's documents need the encoder's"
        return None
    if decoder_BT is None:
        return (encoder_BS >= 0)[:, None, None]
    return (decoder_BT[:, :, None] == encoder_BS[:, None])[:, None]
