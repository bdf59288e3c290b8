"""What a step has to compute, by kind of layer: the sides of every product, ready to be timed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from bessemer.spec import count
from bessemer.spec.shape import ModelShape


@dataclass(frozen=True)
class Layer:
    """One kind of layer and how many there are. Products are (inputs, outputs, which side tensor parallelism divides);
    those of experts work on the tokens sent to them."""

    number: int
    products: tuple[tuple[int, int, str], ...]
    window: int  # keys a position sees; 0: all before it
    attends: bool
    ffn: int  # inner units a token passes, gate counted apart
    gated: bool
    parameters: int  # all, experts with them
    expert_products: tuple[tuple[int, int], ...] = ()
    experts: int = 0
    top_k: int = 0
    scan_flops: int = 0  # of a state space, for a token

    @property
    def expert_parameters(self) -> int:
        return self.experts * sum(into * out for into, out in self.expert_products)


@dataclass(frozen=True)
class Work:
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: tuple[Layer, ...]
    depth: int
    parameters: int
    ends: int  # parameters of embedding, positions and head
    tied: bool
    causal: bool
    pads_vocab: bool = True  # to a multiple that the hardware likes

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim


def gpt(width: int, depth: int, heads: int, vocab: int, positions: int, pads_vocab: bool = True) -> Work:
    """GPT-2's form, also MPT's and Megatron's: biases, LayerNorm, four times the width inside, learned positions, tied
    ends."""
    products = ((width, 3 * width, "out"), (width, width, "in"), (width, 4 * width, "out"), (4 * width, width, "in"))
    each = 12 * width**2 + 13 * width
    layer = Layer(depth, products, 0, True, 4 * width, False, each)
    ends = (vocab + positions) * width
    total = depth * each + ends + 2 * width
    head_dim = width // heads
    return Work(width, heads, heads, head_dim, vocab, (layer,), depth, total, ends, True, True, pads_vocab)


@lru_cache(maxsize=256)
def work_of(shape: ModelShape) -> Work:
    """Of any shape. An encoder-decoder's second stack is counted as layers of the same kind with a second attention."""
    kinds = Counter((shape.mixer(i), shape.window(i), shape.has_experts(i)) for i in range(shape.layers))
    found = count.parts(shape)
    ends = sum(found.get(part, 0) for part in ("embedding", "positions", "token types", "head"))
    depth = shape.layers + shape.decoder_layers
    layers = [_layer(shape, number, *kind) for kind, number in kinds.items()]
    if shape.decoder_layers:
        layers.append(_layer(shape, shape.decoder_layers, "attention", 0, False))
    kv = shape.heads if shape.mla else shape.kv_heads
    dim = (shape.key_dim + shape.mla.value_dim) // 2 if shape.mla else shape.head_dim
    return Work(
        shape.width, shape.heads, kv, dim, shape.vocab, tuple(layers), depth, shape.parameters, ends, shape.tied,
        shape.causal,
    )  # fmt: skip


def _layer(shape: ModelShape, number: int, mixer: str, window: int, experts: bool) -> Layer:
    width = shape.width
    products: list[tuple[int, int, str]] = []
    scan = 0
    if mixer == "mamba":
        assert shape.mamba is not None
        mamba = shape.mamba
        inner = mamba.heads * mamba.head_dim
        products += [(width, 2 * inner + 2 * mamba.groups * mamba.state + mamba.heads, "out"), (inner, width, "in")]
        scan = 4 * inner * mamba.state + 2 * mamba.chunk * (mamba.groups * mamba.state + inner)
    elif shape.mla is not None:
        mla, heads = shape.mla, shape.heads
        if mla.q_rank:
            products.append((width, mla.q_rank, "none"))
        products += [
            (mla.q_rank or width, heads * shape.key_dim, "out"),
            (width, mla.kv_rank + mla.rope_dim, "none"),
            (mla.kv_rank, heads * (mla.nope_dim + mla.value_dim), "out"),
            (heads * mla.value_dim, width, "in"),
        ]
    else:
        inner, kv = shape.attention_width, shape.kv_heads * shape.head_dim
        products += [(width, inner + 2 * kv, "out"), (inner, width, "in")]
    ffn, moe = 0, shape.moe
    routed: tuple[tuple[int, int], ...] = ()
    sides = 2 if shape.gated else 1
    if experts:
        assert moe is not None
        products.append((width, moe.experts, "none"))
        routed = ((width, sides * moe.ffn), (moe.ffn, width))
        if moe.shared:
            inner = moe.shared * moe.ffn
            products += [(width, sides * inner, "out"), (inner, width, "in")]
        ffn = moe.ffn * (moe.top_k + moe.shared)
    elif shape.ffn:
        products += [(width, sides * shape.ffn, "out"), (shape.ffn, width, "in")]
        ffn = shape.ffn
    number_of_experts, top_k = (moe.experts, moe.top_k) if experts and moe else (0, 0)
    dense = sum(into * out for into, out, _ in products) + 4 * width
    parameters = dense + number_of_experts * sum(into * out for into, out in routed)
    return Layer(
        number, tuple(products), window, mixer != "mamba", ffn, shape.gated, parameters, routed, number_of_experts,
        top_k, scan,
    )  # fmt: skip
