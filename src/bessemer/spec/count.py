"""The arithmetic of a shape: parameters by part, all and active, FLOPs and cache. Without torch.

Tests compare the counts with built modules, so that plan and model cannot disagree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bessemer.spec.shape import ModelShape


def parts(shape: ModelShape) -> dict[str, int]:
    """Parameters by what they do, in the order of the forward pass; parts that a shape lacks are left out."""
    if shape.wrapped:
        return {"wrapped": shape.wrapped_parameters}
    norm = 2 if shape.norm == "layer" else 1
    found = {
        "embedding": shape.vocab * shape.width,
        "positions": _positions(shape),
        "token types": shape.token_types * shape.width,
        "attention": 0, "state space": 0, "feed-forward": 0, "router": 0, "experts": 0, "shared experts": 0,
        "norms": norm * shape.width * shape.embedding_norm,
    }  # fmt: skip
    for layer in range(shape.layers):
        _add_layer(found, shape, layer, norm, crosses=False)
    for layer in range(shape.decoder_layers):
        _add_layer(found, shape, layer, norm, crosses=True)
    ends = (shape.norm_place != "post") + (shape.decoder_layers > 0)
    found["norms"] += norm * shape.width * ends
    transform = (shape.width + 1) * shape.width + norm * shape.width if shape.head_transform else 0
    found["head"] = (0 if shape.tied else shape.vocab * shape.width) + shape.vocab * shape.head_bias + transform
    return {name: number for name, number in found.items() if number}


def _positions(shape: ModelShape) -> int:
    if shape.positions == "relative":
        return shape.relative_buckets * shape.heads * (2 if shape.decoder_layers else 1)
    return shape.max_positions * shape.width if shape.positions == "learned" else 0


def _add_layer(found: dict[str, int], shape: ModelShape, layer: int, norm: int, crosses: bool) -> None:
    width = shape.width
    if shape.mixer(layer) == "mamba":
        found["state space"] += _mamba(shape)
    else:
        found["attention"] += _attention(shape, norm) * (2 if crosses else 1)
    experts, dense = shape.has_experts(layer), shape.ffn > 0
    norms = 2 if shape.norm_place == "sandwich" else 1
    branches = 1 + (experts or dense) * (shape.parallel != "one_norm") + crosses
    found["norms"] += norm * width * norms * branches
    matrices = 3 if shape.gated else 2
    if experts:
        assert shape.moe is not None
        moe = shape.moe
        found["router"] += moe.experts * width
        found["experts"] += moe.experts * matrices * width * moe.ffn
        found["shared experts"] += moe.shared * matrices * width * moe.ffn
    elif dense:
        biases = (matrices - 1) * shape.ffn + width if shape.ffn_bias else 0
        found["feed-forward"] += matrices * width * shape.ffn + biases


def _attention(shape: ModelShape, norm: int) -> int:
    inner, kv, out = shape.attention_width, shape.kv_heads * shape.head_dim, shape.width * shape.out_bias
    if shape.mla is not None:
        mla = shape.mla
        waists = mla.kv_rank + (mla.q_rank or 0)  # each has a norm
        biases = shape.qkv_bias * (waists + mla.rope_dim) + out
        return _attention_matrices(shape) + waists + biases
    norms = {"none": 0, "head": 2 * shape.head_dim, "full": inner + kv}[shape.qk_norm] * norm
    return _attention_matrices(shape) + shape.qkv_bias * (inner + 2 * kv) + out + norms


def _attention_matrices(shape: ModelShape) -> int:
    width, heads = shape.width, shape.heads
    if shape.mla is None:
        return width * (2 * shape.attention_width + 2 * shape.kv_heads * shape.head_dim)
    mla = shape.mla
    query = heads * shape.key_dim * (mla.q_rank or width) + (mla.q_rank or 0) * width
    keys = (mla.kv_rank + mla.rope_dim) * width + mla.kv_rank * heads * (mla.nope_dim + mla.value_dim)
    return query + keys + width * heads * mla.value_dim


def _mamba(shape: ModelShape) -> int:
    assert shape.mamba is not None
    mamba = shape.mamba
    inner = mamba.heads * mamba.head_dim
    mixed = inner + 2 * mamba.groups * mamba.state  # what the convolution runs over
    biases = mamba.bias * (inner + mixed + mamba.heads + shape.width)
    return _mamba_matrices(shape) + biases + mixed * (mamba.conv + mamba.conv_bias) + 3 * mamba.heads + inner


def _mamba_matrices(shape: ModelShape) -> int:
    assert shape.mamba is not None
    mamba, inner = shape.mamba, shape.mamba.heads * shape.mamba.head_dim
    return (3 * inner + 2 * mamba.groups * mamba.state + mamba.heads) * shape.width


def active(shape: ModelShape) -> int:
    """Parameters that work on one token: of the experts only those it is sent to."""
    found = parts(shape)
    total = sum(found.values())
    return total - _idle(shape, found) if shape.moe else total


def _idle(shape: ModelShape, found: dict[str, int]) -> int:
    assert shape.moe is not None
    return found.get("experts", 0) * (shape.moe.experts - shape.moe.top_k) // shape.moe.experts


def multiplied(shape: ModelShape) -> int:
    """Parameters in a matrix product for every token. Embeddings are only looked up; norms, biases and short
    convolutions are no products either (0.004 % of a 7B model, 0.1 % of GPT-2)."""
    if shape.wrapped:
        return active(shape) - shape.vocab * shape.width * (not shape.tied)
    found = parts(shape)
    mixers = sum(
        _mamba_matrices(shape) if shape.mixer(layer) == "mamba" else _attention_matrices(shape)
        for layer in range(shape.layers)
    )
    mixers += shape.decoder_layers * 2 * _attention_matrices(shape)
    dense = sum(not shape.has_experts(layer) for layer in range(shape.layers)) + shape.decoder_layers
    ffn = dense * (3 if shape.gated else 2) * shape.width * shape.ffn
    routed = sum(found.get(part, 0) for part in ("router", "experts", "shared experts"))
    head = shape.width * (shape.vocab + shape.width * shape.head_transform)
    return mixers + ffn + head + routed - (_idle(shape, found) if shape.moe else 0)


def flops_per_token(shape: ModelShape, context: int) -> int:
    """Training FLOPs per token, forward and backward: 6 N + 12 L d T with attention in full; windows bound the keys.
    Tests hold it to torch's own counter for every family."""
    total = 6 * multiplied(shape)
    value_dim = shape.mla.value_dim if shape.mla else shape.head_dim
    for layer in range(shape.layers):
        if shape.mixer(layer) == "attention":
            keys = min(context, shape.window(layer) or context)
            total += 6 * shape.heads * (shape.key_dim + value_dim) * keys
        else:
            assert shape.mamba is not None
            mamba, chunk = shape.mamba, min(shape.mamba.chunk, context)
            inner = mamba.heads * mamba.head_dim
            total += 12 * inner * mamba.state + 6 * chunk * (mamba.groups * mamba.state + inner)
    return total + 12 * shape.decoder_layers * 2 * shape.attention_width * context


def cache_bytes(shape: ModelShape, tokens: int, bytes_per_value: int = 2) -> int:
    """Cache of one sequence; a window bounds it, a latent waist is counted as what could be kept, and a state space
    keeps a state of fixed size in float32. An encoder-decoder keeps as much of a text as long that it reads."""
    if shape.decoder_layers:
        return shape.decoder_layers * 2 * tokens * 2 * shape.kv_heads * shape.head_dim * bytes_per_value
    total = 0
    for layer in range(shape.layers):
        if shape.mixer(layer) == "mamba":
            assert shape.mamba is not None
            mamba, inner = shape.mamba, shape.mamba.heads * shape.mamba.head_dim
            values = inner * mamba.state + (mamba.conv - 1) * (inner + 2 * mamba.groups * mamba.state)
            total += 4 * values // bytes_per_value
            continue
        kept = min(tokens, shape.window(layer) or tokens)
        per = shape.mla.kv_rank + shape.mla.rope_dim if shape.mla else 2 * shape.kv_heads * shape.head_dim
        total += kept * per
    return total * bytes_per_value
