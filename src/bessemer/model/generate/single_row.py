"""Decoding of a single row of a Llama-like model on a GPU, in six kernels a layer.

One row reads every weight once and computes little: what counts is that memory is never idle. Norms, rotary positions,
the write into the cache, the gate and the residual sums are parts of the products (`row_kernels`), and each kernel
requests its first weights while the one before still runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bessemer.model.generate.cache import SlotKV
from bessemer.model.layers import RMSNorm
from bessemer.model.transformer import Embedding
from bessemer.spec.shape import ModelShape

if TYPE_CHECKING:
    from bessemer.model.generate.compiled import CompiledDecoding


def can_fuse(decoding: CompiledDecoding) -> bool:
    """Whether the kernels compute this model: pre-norm blocks of RMSNorm, plain rotary attention and SwiGLU, weights of
    one half-precision type, no biases or adapters."""
    model = decoding.model
    blocks: Any = list(model.blocks)
    if not _plain(model.shape) or type(model.embedding) is not Embedding or model.head_bias is not None:
        return False
    if any(joined is None for joined in (*decoding.qkv, *decoding.gate_up)):
        return False
    layers = [layer for block in blocks for layer in (block.attention.out, block.ffn.down)]
    norms = [model.norm, *(norm for block in blocks for norm in (block.attention_norm, block.ffn_norm))]
    weights = [model.embedding.weight, model.head_weight, *(layer.weight for layer in layers)]
    weights += [joined[0] for joined in (*decoding.qkv, *decoding.gate_up) if joined is not None]
    return (
        all(type(layer) is nn.Linear for layer in layers)
        and all(type(norm) is RMSNorm and not norm.offset for norm in norms)
        and all(type(w.data) is Tensor and w.dtype == model.head_weight.dtype for w in weights)
        and all(w.stride(1) == 1 and w.shape[1] % 16 == 0 for w in weights)
    )


def _plain(shape: ModelShape) -> bool:
    unusual = (
        shape.norm_offset, shape.qkv_bias, shape.out_bias, shape.ffn_bias, shape.rope.interleaved, shape.local_theta,
        shape.embedding_norm, shape.token_types, shape.head_bias, shape.head_transform, shape.logit_cap, shape.pooler,
        shape.mla, shape.moe,
    )  # fmt: skip
    usual = (
        shape.norm == "rms" and shape.norm_place == "pre" and shape.parallel == "none" and shape.qk_norm == "none",
        shape.positions == "rope" and shape.rope.share == 1 and shape.activation == "silu" and shape.gated,
        shape.embedding_scale == 1 and shape.logit_scale == 1 and shape.head_dim & (shape.head_dim - 1) == 0,
    )
    return not any(unusual) and all(usual)


class SingleRowDecoding:
    """One token of one slot through all blocks, with the joined weights of `CompiledDecoding`."""

    def __init__(self, decoding: CompiledDecoding) -> None:
        self.decoding, self.model = decoding, decoding.model
        device = self.model.head_weight.device
        # programmatic dependent launch
        self.overlap = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)

    def run(self, slots_B: Tensor, token_S: Tensor, position_S: Tensor, caches: list[SlotKV], positions: int) -> Tensor:
        """Logits (1, V) after the slot's last token. `positions` is the size of its cache."""
        from bessemer.model.generate import row_kernels as kernels
        from bessemer.model.generate.kernels import decode_attention

        model, overlap, starts_B = self.model, self.overlap, position_S[slots_B]
        x_W = kernels.begin(model.embedding.weight, token_S, slots_B, overlap)
        assert model.rotary is not None
        self.rotary = rotary = model.rotary.get(positions, x_W.device, x_W.dtype)  # a graph needs it to stay
        blocks: Any = list(model.blocks)
        for block, qkv, gate_up, cache in zip(blocks, self.decoding.qkv, self.decoding.gate_up, caches, strict=True):
            attention, ffn, keys, values = block.attention, block.ffn, cache.keys, cache.values
            assert qkv is not None and gate_up is not None and keys is not None and values is not None
            first, second = block.attention_norm, block.ffn_norm
            q_ND = kernels.query_key_value(
                x_W, first.weight, first.eps, qkv[0], keys, values, rotary, slots_B, position_S, model.shape.heads,
                overlap,
            )  # fmt: skip
            out_1NE = decode_attention(
                q_ND[None], keys, values, slots_B, starts_B, attention.window, attention.scale,
                model.shape.attention_cap, overlap,
            )  # fmt: skip
            kernels.add_product("out", out_1NE.view(-1), attention.out.weight, x_W, overlap)
            h_F = kernels.gated(x_W, second.weight, second.eps, gate_up[0], overlap)
            kernels.add_product("down", h_F, ffn.down.weight, x_W, overlap)
        norm: Any = model.norm
        return kernels.head(x_W, norm.weight, norm.eps, model.head_weight, overlap)[None]
