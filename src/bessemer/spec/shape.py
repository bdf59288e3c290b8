"""A network described: every choice that its mathematics depends on, without torch.

The model is built from this and the planner counts from it (spec/count.py), so the two cannot disagree. A description
is plain data: it is written to a run's model.json, and families translate it to and from Hugging Face's config.json.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from bessemer.spec import count

Positions = Literal["rope", "learned", "sinusoidal", "alibi", "relative", "none"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "relu2"]
Scaling = Literal["none", "linear", "ntk", "dynamic", "yarn", "longrope", "llama3"]


@dataclass(frozen=True)
class Rope:
    """Rotary positions and how they are stretched beyond the context that the model was trained with."""

    theta: float = 10_000.0
    share: float = 1.0  # of a head that is rotated
    interleaved: bool = False  # pairs of neighbours (GPT-J, DeepSeek) rather than of halves (Llama)
    scaling: Scaling = "none"
    factor: float = 1.0
    original: int = 0  # the context before scaling
    low_freq: float = 1.0  # llama3: wavelengths beyond original / low_freq are stretched in full
    high_freq: float = 4.0  # and those below original / high_freq not at all
    beta_fast: float = 32.0  # yarn: the same by rotations in the original context
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: whole dimensions as borders of the ramp
    attention_factor: float | None = None  # cos and sin times this (yarn, longrope); None: by the papers' formulas
    mscale: float = 0.0  # yarn as DeepSeek has it
    mscale_all_dim: float = 0.0
    short: tuple[float, ...] = ()  # longrope: a divisor for each frequency, up to the original context
    long: tuple[float, ...] = ()  # and beyond it


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
    choice_bias: bool = False  # a bias for the choice alone, moved against the load (DeepSeek-V3)
    bias_rate: float = 1e-3
    capacity: float | None = None  # tokens of an expert, as a multiple of the even share; None drops none
    balance: float = 0.01  # weight of the balance loss
    router_z: float = 0.0  # weight of the router's z-loss


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: keys and values through a narrow waist, positions on a part of their own."""

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None  # None: queries without a waist


@dataclass(frozen=True)
class Mamba:
    """A selective state-space block (Mamba-2). Its inner width is heads * head_dim."""

    heads: int
    head_dim: int = 64
    state: int = 128
    groups: int = 1
    conv: int = 4
    chunk: int = 128  # changes cost, not results: 64 to 128 were the fastest on a CPU
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
    ffn: int  # 0: no feed-forward part
    tied: bool = True
    norm_eps: float = 1e-5
    # attention
    qk_norm: Literal["none", "head", "full"] = "none"  # of each head, or over all heads at once (OLMo 2)
    attention_scale: float | None = None  # of the logits; None: head_dim ** -0.5
    attention_cap: float | None = None  # cap * tanh(logits / cap)
    windows: tuple[int, ...] = (0,)  # keys that a position sees, itself among them; 0: all. Repeated over the layers
    blocks: tuple[int, int] = (0, 0)  # block-sparse: size of a block, and how many before its own a position sees
    causal: bool = True
    positions: Positions = "rope"
    max_positions: int = 0  # of learned positions; else what the model is said to be good for
    rope: Rope = Rope()
    local_theta: float | None = None  # unscaled rotary base of windowed layers (Gemma 3)
    relative_buckets: int = 32  # T5's relative bias
    relative_distance: int = 128
    alibi_rounded: bool = False  # slope * key position in bfloat16, scaled as the logits are (Falcon-RW)
    mla: Mla | None = None
    # block
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0  # the norm's weight is this much more than stored (Gemma: 1)
    norm_place: Literal["pre", "post", "sandwich", "branch"] = "pre"  # branch: on what a branch adds (OLMo 2)
    parallel: Literal["none", "one_norm", "two_norms"] = "none"  # both branches read the same x
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
    decoder_layers: int = 0  # an encoder-decoder (T5): `layers` are the encoder's
    wrapped: str = ""  # the config.json of a model that transformers runs; the fields above describe it roughly
    wrapped_parameters: int = 0  # and its size as counted

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_dim(self) -> int:
        """Of one head's queries and keys."""
        return self.mla.nope_dim + self.mla.rope_dim if self.mla else self.head_dim

    @property
    def parameters(self) -> int:
        """All parameters, a tied embedding counted once."""
        return sum(count.parts(self).values())

    def flops_per_token(self, context: int) -> int:
        """Training FLOPs per token, forward and backward: 6 N + 12 L d T, attention in full (the PaLM convention)."""
        return count.flops_per_token(self, context)

    def window(self, layer: int) -> int:
        return self.windows[layer % len(self.windows)]

    def mixer(self, layer: int) -> str:
        return self.mixers[layer % len(self.mixers)]

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    def layer_rope(self, layer: int) -> Rope:
        """Windowed layers may have their own base, which is never stretched."""
        if self.local_theta is not None and self.window(layer):
            return Rope(theta=self.local_theta, share=self.rope.share, interleaved=self.rope.interleaved)
        return self.rope

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> ModelShape:
        """The inverse of `to_dict`, also after a trip through JSON."""
        parts = {"rope": Rope, "moe": Moe, "mla": Mla, "mamba": Mamba}
        found = {
            key: _tuples(parts[key], value) if key in parts and value is not None else _frozen(value)
            for key, value in data.items()
        }
        return ModelShape(**found)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _tuples(kind: type, value: dict[str, Any]) -> Any:
    return kind(**{key: _frozen(item) for key, item in value.items()})


def _decoder(
    width: int, layers: int, heads: int, kv_heads: int, ffn: int, theta: float = 1e4, **more: Any
) -> ModelShape:
    return ModelShape(0, width, layers, heads, kv_heads, width // heads, ffn, rope=Rope(theta=theta), **more)


# Names are the size with the vocabulary the shape is usually given (2K at 1M ... 128K at 70B).
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
    """The shape of that name (case does not matter), vocabulary 0, or None."""
    by_lower = {key.lower(): key for key in PRESETS}
    key = by_lower.get(name.lower()) or ALIASES.get(name.lower())
    return PRESETS[key] if key else None


def with_vocab(shape: ModelShape, vocab: int) -> ModelShape:
    return replace(shape, vocab=vocab)
