"""The native language model: embeddings, blocks, a norm and a head, as its `ModelShape` describes.

The network knows nothing of losses or devices. `forward` returns hidden states; the loss multiplies them with
`head_weight` itself (in chunks, without all logits in memory), and generation calls `logits`. Legend: B batch, T time,
W width, V vocabulary.

One transformer layer: a token mixer (attention or Mamba-2) and a feed-forward part, with their norms.

Weight initialisation, independent of order and parallel layout: each parameter has its own generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

from bessemer.model.attention import Attention, AttentionInputs, LatentAttention, LayerCache, Rotary
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.layers import (
    ACTIVATIONS,
    FeedForward,
    RelativeBias,
    RMSNorm,
    RotaryTable,
    alibi_bias,
    alibi_rounded,
    alibi_slopes,
    make_norm,
    sinusoidal,
)
from bessemer.model.mamba import Mamba2, MambaCache, init_mamba
from bessemer.model.moe import MixtureOfExperts
from bessemer.model.quantized import is_quantized
from bessemer.model.virtual_tokens import VirtualTokens, prepend_prompt
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


class Pooler(nn.Module):
    """BERT's layer and tanh before the classes of a text."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.linear = nn.Linear(shape.width, shape.width)

    def forward(self, x_BTW: Tensor) -> Tensor:
        return torch.tanh(self.linear(x_BTW))


class LayerChain(Protocol):
    """All blocks and the final norm as one compiled function, for the inputs that it supports."""

    def serves_all(self, model: Decoder, x_BTW: Tensor) -> bool: ...
    def through(self, model: Decoder, x_BTW: Tensor, inputs: AttentionInputs) -> Tensor: ...


class Decoder(nn.Module):
    """A language model. Build it under `torch.device("meta")` to count parameters without allocating memory."""

    lockstep = False  # generation: tensor-parallel ranks run every pass together

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape, self.dropout = shape, 0.0
        self.chain: LayerChain | None = None
        self.prompt: VirtualTokens | None = None  # of prompt tuning
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
        self.transform = HeadTransform(shape) if shape.head_transform else Pooler(shape) if shape.pooler else None
        if not shape.tied:
            self.head = nn.Linear(shape.width, shape.outputs, bias=False)
        self.head_bias = nn.Parameter(torch.zeros(shape.outputs)) if shape.head_bias else None
        rotated = shape.mla.rope_dim if shape.mla else shape.head_dim
        windowed = [layer for layer in range(shape.layers) if shape.window(layer)]
        self.rotary = RotaryTable(rotated, shape.rope) if shape.positions == "rope" else None
        has_local = shape.positions == "rope" and shape.local_theta is not None and windowed
        self.local_rotary = RotaryTable(rotated, shape.layer_rope(windowed[0])) if has_local else None

    @property
    def head_weight(self) -> Tensor:
        """(V, W): the output embedding; the input embedding if they are tied; of a classifier, its classes."""
        module = self.embedding if self.shape.tied else self.head
        trained: Tensor | None = getattr(module, "active_weight", None)  # of adapters
        return module.weight if trained is None else trained

    @property
    def virtual(self) -> int:
        """Virtual tokens before every document: of prompt or prefix tuning."""
        if self.prompt is not None:
            return self.prompt.count
        first: VirtualTokens | None = getattr(getattr(self.blocks[0], "attention", None), "prefix", None)
        return first.count if first is not None else 0

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

    def attention_inputs(
        self, x_BTW: Tensor, attention_mask: AttentionMask, start: int = 0, length: int | None = None
    ) -> AttentionInputs:
        """The inputs shared by all blocks. `length` is the number of columns if `x_BTW` holds only some of them."""
        T = length or x_BTW.shape[1]
        S, columns = attention_mask.row_length(start, T), attention_mask.rotary_columns(start, T, x_BTW.device)
        bias_1NTS = None
        if self.shape.positions == "alibi":
            slopes_N = alibi_slopes(self.shape.heads).to(x_BTW.device)
            if self.shape.alibi_rounded:
                positions_BS = attention_mask.key_positions(S, x_BTW.device)
                bias_1NTS = alibi_rounded(slopes_N, positions_BS).to(x_BTW.dtype) * self.shape.head_dim**-0.5
            elif attention_mask.starts_B is not None:
                query_BT1 = attention_mask.positions(0, T, x_BTW.device)[..., None]
                distance_BTS = torch.arange(S, device=x_BTW.device) - query_BT1
                bias_1NTS = -slopes_N[:, None, None] * distance_BTS.abs()[:, None]
            else:
                bias_1NTS = alibi_bias(slopes_N, x_BTW.shape[1], S)
        elif self.shape.positions == "relative" and attention_mask.starts_B is not None:
            bias_1NTS = self.relative.of_queries(attention_mask.positions(0, T, x_BTW.device), S)
        elif self.shape.positions == "relative":
            bias_1NTS = self.relative(x_BTW.shape[1], S, x_BTW.device)

        def table(rotary: RotaryTable | None) -> Rotary | None:
            if rotary is None:
                return None
            cos, sin = rotary.get(S + attention_mask.virtual, x_BTW.device, compute_dtype(x_BTW))
            return cos[columns], sin[columns]

        return AttentionInputs(attention_mask, table(self.rotary), table(self.local_rotary), bias_1NTS)

    def forward(
        self, tokens_BT: Tensor, attention_mask: AttentionMask | None = None, caches: list[Cache] | None = None,
        types_BT: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states (B, T, W) that the head multiplies."""
        attention_mask = attention_mask or AttentionMask()
        attention_mask.configure(self.shape)
        start = caches[0].length if caches else 0
        attention_mask.virtual = self.virtual
        x_BTW = self.embed(tokens_BT, attention_mask, start, types_BT)
        prompted = self.prompt is not None and attention_mask.virtual > 0 and not caches
        if prompted:
            assert self.prompt is not None
            x_BTW, attention_mask = prepend_prompt(self.prompt, x_BTW, attention_mask, self)
        inputs = self.attention_inputs(x_BTW, attention_mask, start)
        if self.chain is not None and not caches and self.chain.serves_all(self, x_BTW):
            x_BTW = self.chain.through(self, x_BTW, inputs)
        else:
            for i, block in enumerate(self.blocks):
                x_BTW = block(x_BTW, inputs, caches[i] if caches else None)
            if self.shape.norm_place != "post":
                x_BTW = self.norm(x_BTW)
        if prompted:
            x_BTW = x_BTW[:, -tokens_BT.shape[1] :].contiguous()
        return x_BTW if self.transform is None else self.transform(x_BTW)

    def equal_on_all_ranks(self, number: int) -> bool:
        """Whether all ranks that run in lockstep call this with the same number."""
        return True

    def logits(self, hidden_BTW: Tensor, product: Callable[..., Tensor] = F.linear) -> Tensor:
        logits = product(hidden_BTW, self.head_weight, self.head_bias)
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


def make_module(shape: ModelShape) -> Decoder:
    """The module of a shape, with uninitialised or transformers-initialised weights."""
    if shape.wrapped:
        from bessemer.model.wrapped import WrappedModel

        return WrappedModel(shape)
    if shape.decoder_layers:
        from bessemer.model.encoder_decoder import EncoderDecoder

        return EncoderDecoder(shape)
    return Decoder(shape)


def build_model(
    shape: ModelShape, device: torch.device | str, seed: int, init: str = "gpt", matrices: torch.dtype = torch.float32
) -> Decoder:
    """A newly initialised model on a device, built without an intermediate copy. Vectors (norms, biases) are always
    float32. On "meta" nothing is allocated; the weights come later."""
    with torch.device("meta"):
        model = make_module(shape)
    for parameter in model.parameters():
        if parameter.ndim >= 2 and matrices != torch.float32:
            parameter.data = parameter.data.to(matrices)
    if str(device) == "meta":
        return model
    if shape.wrapped:  # its weights are loaded later
        return model.to_empty(device=device)
    # Like `to_empty`, whose `empty_like` of meta tensors imports sympy.
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    init_weights(model, seed, init)
    return model


Cache = LayerCache | MambaCache
ProjectedInputs = tuple[Tensor | None, Tensor, Tensor, Tensor]


class Compiled(Protocol):
    """Compiled versions of `TransformerBlock.enter` and `leave`. The attention kernel runs between them, uncompiled, so
    that no mask or document length is part of a graph."""

    def serves(self, block: TransformerBlock, x_BTW: Tensor) -> bool: ...
    def enter(self, block: TransformerBlock, x_BTW: Tensor, rotary: Rotary | None) -> ProjectedInputs: ...
    def leave(self, block: TransformerBlock, x_BTW: Tensor, h_BTW: Tensor | None, out_BTNE: Tensor) -> Tensor: ...


class TransformerBlock(nn.Module):
    """`attention_norm` and `ffn_norm` precede their branch (with `norm_place: post` they follow the residual sum);
    `attention_out_norm` and `ffn_out_norm` normalise a branch's output."""

    def __init__(self, shape: ModelShape, layer: int = 0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, 0.0
        self.compiled: Compiled | None = None
        before, after = shape.norm_place != "branch", shape.norm_place in ("sandwich", "branch")
        if before:
            self.attention_norm = make_norm(shape)
        if shape.mixer(layer) == "mamba":
            assert shape.mamba is not None
            self.mamba = Mamba2(shape.width, shape.mamba, shape.norm_eps)
        else:
            self.attention = LatentAttention(shape, layer) if shape.mla else Attention(shape, layer)
        self.has_attention = shape.mixer(layer) == "attention"
        if after:
            self.attention_out_norm = make_norm(shape)
        self.has_ffn = shape.ffn > 0 or shape.has_experts(layer)
        if not self.has_ffn:
            return
        if before and shape.parallel != "one_norm":
            self.ffn_norm = make_norm(shape)
        if shape.has_experts(layer):
            assert shape.moe is not None
            self.ffn: nn.Module = MixtureOfExperts(shape.width, shape.moe, shape.activation, shape.gated)
        else:
            self.ffn = FeedForward(shape.width, shape.ffn, shape.activation, shape.gated, shape.ffn_bias)
        if after:
            self.ffn_out_norm = make_norm(shape)

    def new_cache(self) -> Cache:
        return LayerCache() if self.has_attention else self.mamba.new_cache()

    def mix(self, x_BTW: Tensor, inputs: AttentionInputs, cache: Cache | None) -> Tensor:
        if self.has_attention:
            assert not isinstance(cache, MambaCache)
            return self._drop(self.attention(x_BTW, inputs, cache))
        assert not isinstance(cache, LayerCache)
        return self._drop(self.mamba(x_BTW, inputs.attention_mask, cache))

    def feed(self, x_BTW: Tensor, router_mask_BT: Tensor | None) -> Tensor:
        if isinstance(self.ffn, MixtureOfExperts):
            return self._drop(self.ffn(x_BTW, router_mask_BT))
        return self._drop(self.ffn(x_BTW))

    def _drop(self, x_BTW: Tensor) -> Tensor:
        return F.dropout(x_BTW, self.dropout, self.training) if self.dropout else x_BTW

    def mixer_input(self, x_BTW: Tensor) -> Tensor:
        return x_BTW if self.shape.norm_place in ("post", "branch") else self.attention_norm(x_BTW)

    def finish(
        self, x_BTW: Tensor, h_BTW: Tensor | None, mixed_BTW: Tensor, router_mask_BT: Tensor | None,
        feed: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Everything after the mixer, whose input was `h_BTW`. `feed` replaces the feed-forward part."""
        norm_place = self.shape.norm_place
        feed = self.feed if feed is None else feed
        if self.shape.parallel != "none":
            g_BTW = h_BTW if self.shape.parallel == "one_norm" else self.ffn_norm(x_BTW)
            assert g_BTW is not None
            return x_BTW + mixed_BTW + feed(g_BTW, router_mask_BT)
        if norm_place == "post":
            x_BTW = self.attention_norm(x_BTW + mixed_BTW)
            return self.ffn_norm(x_BTW + feed(x_BTW, router_mask_BT))
        after = norm_place in ("sandwich", "branch")
        x_BTW = x_BTW + (self.attention_out_norm(mixed_BTW) if after else mixed_BTW)
        if not self.has_ffn:
            return x_BTW
        fed_BTW = feed(x_BTW if norm_place == "branch" else self.ffn_norm(x_BTW), router_mask_BT)
        return x_BTW + (self.ffn_out_norm(fed_BTW) if after else fed_BTW)

    def enter(self, x_BTW: Tensor, rotary: Rotary | None) -> ProjectedInputs:
        """From the block's input to attention's: q, k, v and the normed input (None if nothing else reads it, as its
        gradient would be zeros)."""
        h_BTW = self.mixer_input(x_BTW)
        return h_BTW if self.shape.parallel == "one_norm" else None, *self.attention.project(h_BTW, rotary)

    def leave(self, x_BTW: Tensor, h_BTW: Tensor | None, out_BTNE: Tensor) -> Tensor:
        """From attention's output to the block's output."""
        return self.finish(x_BTW, h_BTW, self._drop(self.attention.out(out_BTNE.flatten(2))), None)

    def forward(self, x_BTW: Tensor, inputs: AttentionInputs, cache: Cache | None = None) -> Tensor:
        if self.compiled is not None and cache is None and self.compiled.serves(self, x_BTW):
            h_BTW, q_BTND, k_BTKD, v_BTKE = self.compiled.enter(self, x_BTW, self.attention.rotary(inputs))
            out_BTNE = self.attention.attend(q_BTND, k_BTKD, v_BTKE, inputs)
            return self.compiled.leave(self, x_BTW, h_BTW, out_BTNE)
        h_BTW = self.mixer_input(x_BTW)
        return self.finish(x_BTW, h_BTW, self.mix(h_BTW, inputs, cache), inputs.attention_mask.router_mask_BT)


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
    zero     variance 1 / fan in; output projections and an untied head start at 0: each layer starts as the identity
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
        if parameter in initialised or not name.startswith(under) or is_quantized(parameter):
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
    if kind == "zero" and name.endswith("head.weight"):
        return 0.0
    if name.endswith((*EMBEDDINGS, "head.weight")):
        return math.sqrt(2 / (5 * shape.width)) if kind == "small" else 0.02
    if kind == "small":
        return 2 / (layers * math.sqrt(shape.width)) if output else math.sqrt(2 / (5 * shape.width))
    if kind == "xavier":
        return math.sqrt(2 / (fan_in + fan_out))
    if kind == "kaiming":
        return math.sqrt(2 / fan_in)
    if kind == "zero":
        return 0.0 if output else fan_in**-0.5
    if kind == "mup":
        return fan_in**-0.5 / (math.sqrt(2 * layers) if output else 1.0)
    if not output:
        return 0.02
    layer = int(name.split(".")[1]) if kind == "depth" and name.startswith("blocks.") else layers - 1
    return 0.02 / math.sqrt(2 * (layer + 1))


@contextmanager
def weights_in_fp32(model: nn.Module) -> Iterator[None]:
    """Half-precision weights as float32 inside the block, to repeat a step in full precision. Costs four bytes per
    half-precision weight. Gradients do not survive the block. Quantized weights multiply in any precision."""
    halves = (torch.bfloat16, torch.float16)
    half = [p for p in model.parameters() if p.dtype in halves and not is_quantized(p)]
    originals = [parameter.data for parameter in half]
    try:
        for parameter in half:
            parameter.grad, parameter.data = None, parameter.data.float()
        yield
    finally:
        for parameter, data in zip(half, originals, strict=True):
            parameter.grad, parameter.data = None, data
