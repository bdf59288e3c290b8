"""ModelShape: the architecture of a model as plain data, and its parameter, FLOP and cache counts. Needs no torch.

The model is built from a ModelShape and the planner counts from it. It is written to a run's model.json, and families
convert it to and from Hugging Face's config.json. Tests compare the counts with built modules.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Positions = Literal["rope", "learned", "sinusoidal", "alibi", "relative", "none"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "relu2"]
Scaling = Literal["none", "linear", "ntk", "dynamic", "yarn", "longrope", "llama3"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings, and their scaling beyond the context that the model was trained with."""

    theta: float = 10_000.0
    share: float = 1.0  # share of each head that is rotated
    interleaved: bool = False  # rotate adjacent pairs (GPT-J, DeepSeek) instead of halves (Llama)
    scaling: Scaling = "none"
    factor: float = 1.0
    original: int = 0  # the context before scaling
    low_freq: float = 1.0  # llama3: wavelengths above original / low_freq are fully scaled
    high_freq: float = 4.0  # llama3: wavelengths below original / high_freq are not scaled
    beta_fast: float = 32.0  # yarn: the same in rotations over the original context
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: round the ends of the ramp to whole dimensions
    attention_factor: float | None = None  # factor on cos and sin (yarn, longrope); None: the papers' formulas
    mscale: float = 0.0  # DeepSeek's variant of yarn
    mscale_all_dim: float = 0.0
    short: tuple[float, ...] = ()  # longrope: a divisor per frequency, up to the original context
    long: tuple[float, ...] = ()  # longrope: beyond the original context


@dataclass(frozen=True)
class Moe:
    """A mixture of experts instead of the feed-forward part."""

    experts: int
    top_k: int
    ffn: int  # inner size of one expert
    shared: int = 0  # experts that every token passes, as one feed-forward part of shared * ffn
    dense_layers: tuple[int, ...] = ()  # layers with a plain feed-forward part
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True  # the chosen weights sum to one
    scale: float = 1.0  # of the chosen weights, after that
    groups: int = 1  # experts are chosen from the top_groups best groups
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    choice_bias: bool = False  # a routing bias that balances the load (DeepSeek-V3)
    bias_rate: float = 1e-3
    capacity: float | None = None  # tokens per expert as a multiple of the even share; None: no token is dropped
    balance: float = 0.01  # weight of the balance loss
    router_z: float = 0.0  # weight of the router's z-loss


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: low-rank keys and values, with positions on a separate part of each head."""

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None  # None: queries are not compressed


@dataclass(frozen=True)
class Mamba:
    """A selective state-space layer (Mamba-2). Its inner width is heads * head_dim."""

    heads: int
    head_dim: int = 64
    state: int = 128
    groups: int = 1
    conv: int = 4
    chunk: int = 128  # affects speed, not results: 64 to 128 were fastest on a CPU
    conv_bias: bool = True
    bias: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))


@dataclass(frozen=True)
class ModelShape:
    """A transformer, by default a decoder with RMSNorm, rotary grouped-query attention and SwiGLU."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # 0: no feed-forward layer
    tied: bool = True
    norm_eps: float = 1e-5
    # attention
    qk_norm: Literal["none", "head", "full"] = "none"  # per head, or over all heads (OLMo 2)
    attention_scale: float | None = None  # scale of the logits; None: head_dim ** -0.5
    attention_cap: float | None = None  # cap * tanh(logits / cap)
    windows: tuple[int, ...] = (0,)  # attention windows, repeated over the layers; 0: full attention
    blocks: tuple[int, int] = (0, 0)  # block-sparse: block size, and how many previous blocks a position attends to
    global_tokens: int = 0  # first positions of a document that windows and blocks do not limit (Longformer)
    causal: bool = True
    positions: Positions = "rope"
    max_positions: int = 0  # of learned positions; otherwise the stated maximum context
    rope: Rope = Rope()
    local_theta: float | None = None  # unscaled rotary base of layers with a window (Gemma 3)
    relative_buckets: int = 32  # T5's relative position bias
    relative_distance: int = 128
    alibi_rounded: bool = False  # slope * key position in bfloat16, scaled as the logits are (Falcon-RW)
    mla: Mla | None = None
    # block
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0  # added to the stored weight of norms (Gemma: 1)
    norm_place: Literal["pre", "post", "sandwich", "branch"] = "pre"  # branch: on the output of each branch (OLMo 2)
    parallel: Literal["none", "one_norm", "two_norms"] = "none"  # attention and feed-forward read the same input
    activation: Activation = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    moe: Moe | None = None
    mixers: tuple[Literal["attention", "mamba"], ...] = ("attention",)  # repeated over the layers
    mamba: Mamba | None = None
    # ends
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    token_types: int = 0
    head_bias: bool = False
    head_transform: bool = False  # BERT: a layer, an activation and a norm before the output embedding
    logit_cap: float | None = None
    logit_scale: float = 1.0
    labels: int = 0  # a classifier: the head has this many outputs instead of one for each token
    pooler: bool = False  # BERT: a layer and a tanh before the classes of a text
    decoder_layers: int = 0  # encoder-decoder (T5): `layers` are those of the encoder
    wrapped: str = ""  # config.json of a model that transformers runs; the fields above are approximate
    wrapped_parameters: int = 0  # its parameter count

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_dim(self) -> int:
        """Size of the queries and keys of one head."""
        return self.mla.nope_dim + self.mla.rope_dim if self.mla else self.head_dim

    @property
    def parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        return sum(parameter_counts(self).values())

    def flops_per_token(self, context: int) -> int:
        """Training FLOPs per token, forward and backward: 6 N + 12 L d T, attention in full (the PaLM convention)."""
        return flops_per_token(self, context)

    def window(self, layer: int) -> int:
        return self.windows[layer % len(self.windows)]

    def mixer(self, layer: int) -> str:
        return self.mixers[layer % len(self.mixers)]

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    def layer_rope(self, layer: int) -> Rope:
        """Layers with a window may have another base, which is never scaled."""
        if self.local_theta is not None and self.window(layer):
            return Rope(theta=self.local_theta, share=self.rope.share, interleaved=self.rope.interleaved)
        return self.rope

    @property
    def position_limit(self) -> int | None:
        """Most positions that the model can compute at all; None for any number."""
        return self.max_positions or None if self.positions == "learned" or self.wrapped else None

    @property
    def outputs(self) -> int:
        """Rows of the head."""
        return self.labels or self.vocab

    def to_dict(self) -> dict[str, Any]:
        """Without newer fields that are not used, so that older files stay as they were."""
        unused = {"labels", "pooler"} if not self.labels else set()
        unused |= set() if self.global_tokens else {"global_tokens"}
        return {key: value for key, value in asdict(self).items() if key not in unused}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> ModelShape:
        """The inverse of `to_dict`, also for a dict from JSON."""
        parts = {"rope": Rope, "moe": Moe, "mla": Mla, "mamba": Mamba}
        return ModelShape(
            **{
                key: parts[key](**{name: _frozen(item) for name, item in value.items()})
                if key in parts and value is not None
                else _frozen(value)
                for key, value in data.items()
            }
        )


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _decoder(
    width: int, layers: int, heads: int, kv_heads: int, ffn: int, theta: float = 1e4, **more: Any
) -> ModelShape:
    return ModelShape(0, width, layers, heads, kv_heads, width // heads, ffn, rope=Rope(theta=theta), **more)


# Named by their size with the usual vocabulary (2K at 1M ... 128K at 70B).
PRESETS: dict[str, ModelShape] = {
    "1M": _decoder(128, 4, 4, 2, 352),
    "3M": _decoder(192, 6, 6, 2, 512),
    "10M": _decoder(320, 6, 5, 5, 864),
    "30M": _decoder(512, 8, 8, 4, 1408),
    "60M": _decoder(640, 10, 10, 5, 1728),
    "125M": _decoder(768, 12, 12, 12, 2048),
    "350M": _decoder(1024, 24, 16, 16, 2816),
    "760M": _decoder(1536, 24, 16, 16, 4096),
    "1B": _decoder(2048, 16, 32, 8, 8192, 500_000.0),
    "3B": _decoder(3072, 28, 24, 8, 8192, 500_000.0),
    "7B": _decoder(4096, 32, 32, 32, 11008, tied=False),
    "8B": _decoder(4096, 32, 32, 8, 14336, 500_000.0, tied=False),
    "13B": _decoder(5120, 40, 40, 40, 13824, tied=False),
    "34B": _decoder(8192, 48, 64, 8, 22016, 1_000_000.0, tied=False),
    "70B": _decoder(8192, 80, 64, 8, 28672, 500_000.0, tied=False),
}
ALIASES = {
    "llama-7b": "7B",
    "llama-13b": "13B",
    "llama-3-8b": "8B",
    "llama-3-70b": "70B",
    "llama-3.2-1b": "1B",
    "llama-3.2-3b": "3B",
    "gpt2-small": "125M",
}


def preset(name: str) -> ModelShape | None:
    """The shape of that name, ignoring case, with vocabulary 0; None if unknown."""
    by_lower = {key.lower(): key for key in PRESETS}
    key = by_lower.get(name.lower()) or ALIASES.get(name.lower())
    return PRESETS[key] if key else None


def with_vocab(shape: ModelShape, vocab: int) -> ModelShape:
    return replace(shape, vocab=vocab)


def parameter_counts(shape: ModelShape) -> dict[str, int]:
    """Parameters by part, in the order of the forward pass; parts without parameters are left out."""
    if shape.wrapped:
        return {"wrapped": shape.wrapped_parameters}
    norm = 2 if shape.norm == "layer" else 1
    counts = {
        "embedding": shape.vocab * shape.width,
        "positions": _positions(shape),
        "token types": shape.token_types * shape.width,
        "attention": 0, "state space": 0, "feed-forward": 0, "router": 0, "experts": 0, "shared experts": 0,
        "norms": norm * shape.width * shape.embedding_norm,
    }  # fmt: skip
    for layer in range(shape.layers):
        _add_layer(counts, shape, layer, norm, crosses=False)
    for layer in range(shape.decoder_layers):
        _add_layer(counts, shape, layer, norm, crosses=True)
    ends = (shape.norm_place != "post") + (shape.decoder_layers > 0)
    counts["norms"] += norm * shape.width * ends
    transform = (shape.width + 1) * shape.width + norm * shape.width if shape.head_transform else 0
    transform += (shape.width + 1) * shape.width * shape.pooler
    counts["head"] = (0 if shape.tied else shape.outputs * shape.width) + shape.outputs * shape.head_bias + transform
    return {name: number for name, number in counts.items() if number}


def layer_counts(shape: ModelShape, layer: int) -> dict[str, int]:
    """Parameters of one layer by part; those of a decoder with cross-attention come after the others."""
    parts = ("attention", "state space", "feed-forward", "router", "experts", "shared experts", "norms")
    counts, crosses = dict.fromkeys(parts, 0), layer >= shape.layers
    _add_layer(counts, shape, layer - shape.layers * crosses, 2 if shape.norm == "layer" else 1, crosses)
    return counts


def _positions(shape: ModelShape) -> int:
    if shape.positions == "relative":
        return shape.relative_buckets * shape.heads * (2 if shape.decoder_layers else 1)
    return shape.max_positions * shape.width if shape.positions == "learned" else 0


def _add_layer(counts: dict[str, int], shape: ModelShape, layer: int, norm: int, crosses: bool) -> None:
    width = shape.width
    if shape.mixer(layer) == "mamba":
        counts["state space"] += _mamba(shape)
    else:
        counts["attention"] += _attention(shape, norm) * (2 if crosses else 1)
    experts, dense = shape.has_experts(layer), shape.ffn > 0
    norms = 2 if shape.norm_place == "sandwich" else 1
    branches = 1 + (experts or dense) * (shape.parallel != "one_norm") + crosses
    counts["norms"] += norm * width * norms * branches
    matrices = 3 if shape.gated else 2
    if experts:
        assert shape.moe is not None
        moe = shape.moe
        counts["router"] += moe.experts * width
        counts["experts"] += moe.experts * matrices * width * moe.ffn
        counts["shared experts"] += moe.shared * matrices * width * moe.ffn
    elif dense:
        biases = (matrices - 1) * shape.ffn + width if shape.ffn_bias else 0
        counts["feed-forward"] += matrices * width * shape.ffn + biases


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
    mixed = inner + 2 * mamba.groups * mamba.state  # channels of the convolution
    biases = mamba.bias * (inner + mixed + mamba.heads + shape.width)
    return _mamba_matrices(shape) + biases + mixed * (mamba.conv + mamba.conv_bias) + 3 * mamba.heads + inner


def _mamba_matrices(shape: ModelShape) -> int:
    assert shape.mamba is not None
    mamba, inner = shape.mamba, shape.mamba.heads * shape.mamba.head_dim
    return (3 * inner + 2 * mamba.groups * mamba.state + mamba.heads) * shape.width


def active_parameters(shape: ModelShape) -> int:
    """Active parameters per token: only the experts that it is routed to."""
    counts = parameter_counts(shape)
    total = sum(counts.values())
    return total - _idle(shape, counts) if shape.moe else total


def _idle(shape: ModelShape, counts: dict[str, int]) -> int:
    assert shape.moe is not None
    return counts.get("experts", 0) * (shape.moe.experts - shape.moe.top_k) // shape.moe.experts


def matmul_parameters(shape: ModelShape) -> int:
    """Parameters in matrix products per token. Excludes embeddings, norms, biases and short convolutions (0.004 % of
    a 7B model, 0.1 % of GPT-2)."""
    if shape.wrapped:
        return active_parameters(shape) - shape.vocab * shape.width * (not shape.tied)
    counts = parameter_counts(shape)
    mixers = sum(
        _mamba_matrices(shape) if shape.mixer(layer) == "mamba" else _attention_matrices(shape)
        for layer in range(shape.layers)
    )
    mixers += shape.decoder_layers * 2 * _attention_matrices(shape)
    dense = sum(not shape.has_experts(layer) for layer in range(shape.layers)) + shape.decoder_layers
    ffn = dense * (3 if shape.gated else 2) * shape.width * shape.ffn
    routed = sum(counts.get(part, 0) for part in ("router", "experts", "shared experts"))
    head = shape.width * (shape.outputs + shape.width * (shape.head_transform + shape.pooler))
    return mixers + ffn + head + routed - (_idle(shape, counts) if shape.moe else 0)


def flops_per_token(shape: ModelShape, context: int) -> int:
    """Training FLOPs per token, forward and backward: 6 N + 12 L d T with attention in full; windows bound the keys.
    Tests compare it with torch's FLOP counter for every family."""
    total = 6 * matmul_parameters(shape)
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
    """Bytes of the KV cache of one sequence. Windows bound it, latent attention counts its compressed form, and a state
    space has a fixed-size float32 state. An encoder-decoder also caches an input of the same length."""
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
        cached = min(tokens, shape.window(layer) or tokens)
        per = shape.mla.kv_rank + shape.mla.rope_dim if shape.mla else 2 * shape.kv_heads * shape.head_dim
        total += cached * per
    return total * bytes_per_value
