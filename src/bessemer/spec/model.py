"""The network as a user asks for it: a preset, a Hugging Face folder, or a design. What is left out comes from there.

Every key of `shape.ModelShape` that a design may choose is here under the same name; `resolve.py` lays them over it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from bessemer.spec.part import Part, ShortPart
from bessemer.spec.quantity import MOST_CONTEXT
from bessemer.spec.shape import ALIASES, PRESETS, Activation, Positions, Scaling, preset

LARGEST_SIDE = 1_000_000  # of a matrix: a slip of the finger is refused here rather than counted for ever
LARGEST_FACTOR = 1e6
Side = Annotated[int, Field(ge=1, le=LARGEST_SIDE)]
Window = Annotated[int, Field(ge=0, le=MOST_CONTEXT)]
Factor = Annotated[float, Field(gt=0, le=LARGEST_FACTOR)]
QkNorm = Annotated[
    Literal["none", "head", "full"],
    BeforeValidator(lambda value: ("none", "head")[value] if isinstance(value, bool) else value),
]
Init = Literal["gpt", "depth", "small", "xavier", "kaiming", "mup"]


class RopeSpec(Part):
    """Rotary positions, and how they are stretched to a longer context than the model was trained with."""

    theta: float | None = Field(None, gt=1, le=1e12, description="base", examples=[500_000.0])
    share: float | None = Field(None, gt=0, le=1, description="part of a head that is rotated", examples=[0.25])
    interleaved: bool | None = Field(None, description="pair neighbours instead of halves", examples=[False])
    scaling: Scaling | None = Field(
        None, description="none, linear, ntk, dynamic, yarn, longrope or llama3", examples=["yarn"]
    )
    factor: float | None = Field(
        None, ge=1, le=LARGEST_FACTOR, description="how much longer the context becomes", examples=[8.0]
    )
    original: Side | None = Field(None, description="the context before scaling, in tokens", examples=[4096])
    low_freq: Factor | None = Field(None, description="llama3: where stretching is full", examples=[1.0])
    high_freq: Factor | None = Field(None, description="llama3: where it begins", examples=[4.0])
    beta_fast: Factor | None = Field(None, description="yarn: rotations beyond which none", examples=[32.0])
    beta_slow: Factor | None = Field(None, description="yarn: rotations below which full", examples=[1.0])
    attention_factor: Factor | None = Field(None, description="factor of cos and sin", examples=[1.0])
    short: list[Factor] | None = Field(
        None, description="longrope: divisors up to the original context", examples=[[1.0]]
    )
    long: list[Factor] | None = Field(None, description="longrope: divisors beyond it", examples=[[1.2]])


class MoeSpec(Part):
    """A mixture of experts in place of the feed-forward part."""

    experts: Side | None = Field(None, description="experts of a layer", examples=[8])
    top_k: Side | None = Field(None, description="experts that a token is sent to", examples=[2])
    ffn: Side | None = Field(None, description="inner size of an expert (default: the model's ffn)", examples=[1408])
    shared: int | None = Field(None, ge=0, le=LARGEST_SIDE, description="experts that every token passes", examples=[1])
    dense_layers: list[Annotated[int, Field(ge=0, le=LARGEST_SIDE)]] | None = Field(
        None, description="layers without experts, from 0", examples=[[0]]
    )
    score: Literal["softmax", "sigmoid"] | None = Field(None, description="of the router", examples=["softmax"])
    normalise: bool | None = Field(None, description="chosen weights sum to one", examples=[True])
    scale: Factor | None = Field(None, description="of the chosen weights", examples=[1.0])
    groups: Side | None = Field(None, description="groups of experts", examples=[1])
    top_groups: Side | None = Field(None, description="groups that a token may choose from", examples=[1])
    choice_bias: bool | None = Field(None, description="balance by a bias of the choice (DeepSeek-V3)", examples=[True])
    bias_rate: float | None = Field(None, gt=0, le=1, description="how fast that bias moves", examples=[0.001])
    capacity: Factor | None = Field(
        None, description="tokens of an expert over its even share; left out: none is dropped", examples=[1.25]
    )
    balance: float | None = Field(None, ge=0, le=1e3, description="weight of the balance loss", examples=[0.01])
    router_z: float | None = Field(None, ge=0, le=1e3, description="weight of the router's z-loss", examples=[0.001])


class MlaSpec(Part):
    """Multi-head latent attention (DeepSeek): keys and values through a narrow waist."""

    kv_rank: Side = Field(description="size of the waist", examples=[512])
    nope_dim: Side = Field(description="part of a head without positions", examples=[128])
    rope_dim: Side = Field(description="part with rotary positions; even", examples=[64])
    value_dim: Side = Field(description="size of a head's values", examples=[128])
    q_rank: Side | None = Field(None, description="size of the queries' waist; left out: none", examples=[1536])


class MambaSpec(Part):
    """A selective state-space mixer (Mamba-2), for layers whose `mixers` entry is mamba."""

    heads: Side = Field(description="heads; heads times head_dim is its inner width", examples=[24])
    head_dim: Side = Field(64, description="size of a head", examples=[64])
    state: Side = Field(128, description="size of the state", examples=[128])
    groups: Side = Field(1, description="groups of heads that share B and C", examples=[1])
    conv: int = Field(4, ge=1, le=16, description="width of the convolution", examples=[4])
    chunk: Side = Field(128, description="positions that are scanned together", examples=[128])


class ModelSpec(ShortPart):
    """The network. `model: 10M` is short for `model: {preset: 10M}`; any field overrides the preset, or what a Hugging
    Face folder says."""

    preset: str | None = Field(None, description="a named shape: " + ", ".join(PRESETS), examples=["10M"])
    hf: str | None = Field(
        None,
        min_length=1,
        description="a Hugging Face model folder: its shape, weights and tokenizer",
        examples=["Qwen3-0.6B/"],
    )
    wrap: bool = Field(
        False, description="let transformers run the folder's model, where it is of no native family", examples=[True]
    )
    width: int | None = Field(None, ge=8, le=LARGEST_SIDE, description="size of the residual stream", examples=[320])
    layers: Side | None = Field(None, description="number of blocks", examples=[6])
    heads: Side | None = Field(None, description="attention heads", examples=[5])
    kv_heads: Side | None = Field(None, description="key-value heads; divides heads", examples=[5])
    head_dim: int | None = Field(
        None, ge=2, le=LARGEST_SIDE, description="size of a head (default width / heads)", examples=[64]
    )
    ffn: int | None = Field(
        None, ge=0, le=LARGEST_SIDE, description="inner size of the feed-forward part; 0: none", examples=[864]
    )
    tied: bool | None = Field(None, description="share input and output embeddings", examples=[True])
    norm_eps: float | None = Field(None, gt=0, le=0.1, description="epsilon of the norms", examples=[1e-5])
    qk_norm: QkNorm | None = Field(
        None, description="norm of queries and keys: none, head (or true) or full", examples=["head"]
    )
    attention_scale: Factor | None = Field(None, description="of attention logits", examples=[0.125])
    attention_cap: Factor | None = Field(None, description="soft cap of attention logits", examples=[50.0])
    windows: list[Window] | None = Field(
        None,
        min_length=1,
        description="keys that a position sees in each layer, repeated; 0: all",
        examples=[[1024, 0]],
    )
    blocks: tuple[Annotated[int, Field(ge=1, le=MOST_CONTEXT)], Window] | None = Field(
        None,
        strict=False,
        description="block-sparse attention: size of a block, and how many before its own it sees",
        examples=[[64, 4]],
    )
    causal: bool | None = Field(None, description="false: every position sees all (BERT)", examples=[True])
    positions: Positions | None = Field(
        None, description="rope, learned, sinusoidal, alibi, relative (T5) or none", examples=["rope"]
    )
    max_positions: Side | None = Field(None, description="learned positions", examples=[2048])
    rope: RopeSpec | None = Field(None, description="rotary positions")
    local_theta: float | None = Field(
        None, gt=1, le=1e12, description="rotary base of windowed layers", examples=[10_000.0]
    )
    mla: MlaSpec | None = Field(
        None,
        description="latent attention",
        examples=[{"kv_rank": 64, "nope_dim": 32, "rope_dim": 16, "value_dim": 32}],
    )
    norm: Literal["rms", "layer"] | None = Field(None, description="rms or layer", examples=["rms"])
    norm_place: Literal["pre", "post", "sandwich", "branch"] | None = Field(
        None, description="pre, post, sandwich (both) or branch (on what a branch adds)", examples=["pre"]
    )
    parallel: Literal["none", "one_norm", "two_norms"] | None = Field(
        None, description="attention and feed-forward side by side", examples=["none"]
    )
    activation: Activation | None = Field(None, description="relu, gelu, gelu_tanh, silu or relu2", examples=["silu"])
    gated: bool | None = Field(None, description="a gate in the feed-forward part (SwiGLU, GeGLU)", examples=[True])
    qkv_bias: bool | None = Field(None, description="biases of queries, keys and values", examples=[False])
    out_bias: bool | None = Field(None, description="bias of attention's output", examples=[False])
    ffn_bias: bool | None = Field(None, description="biases of the feed-forward part", examples=[False])
    moe: MoeSpec | None = Field(None, description="a mixture of experts", examples=[{"experts": 8, "top_k": 2}])
    mixers: list[Literal["attention", "mamba"]] | None = Field(
        None,
        min_length=1,
        description="what mixes positions in each layer, repeated",
        examples=[["mamba", "mamba", "attention"]],
    )
    mamba: MambaSpec | None = Field(None, description="the state-space mixer", examples=[{"heads": 24}])
    logit_cap: Factor | None = Field(None, description="soft cap of the output logits", examples=[30.0])
    init: Init = Field("gpt", description="first weights: gpt, depth, small, xavier, kaiming or mup", examples=["gpt"])
    mup_width: Side = Field(
        256, description="with init: mup, the width that hyperparameters were tuned at", examples=[256]
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"preset": value} if isinstance(value, str) else value

    @field_validator("preset")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and preset(value) is None:
            raise ValueError(f"no preset {value!r}; there are {', '.join([*PRESETS, *ALIASES])}")
        return value
