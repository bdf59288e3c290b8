"""From the spec's model section to a shape: the preset, or a given shape, with the user's fields laid over it.

What is learnt from a row of tokens: the objectives of pre-training, the loss over them, and dropout.

The network as a user asks for it: a preset, a Hugging Face folder, or a design. What is left out comes from there.

Every key of `shape.ModelShape` that a design may choose is here under the same name; `resolve.py` lays them over it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from bessemer.spec.quantity import MOST_CONTEXT, ShortSection, SpecSection
from bessemer.spec.shape import (
    ALIASES,
    PRESETS,
    Activation,
    Mamba,
    Mla,
    ModelShape,
    Moe,
    Positions,
    Rope,
    Scaling,
    preset,
)

PARTS: dict[str, type] = {"rope": Rope, "moe": Moe, "mla": Mla, "mamba": Mamba}


def model_shape(model: ModelSpec, vocab: int, given: ModelShape | None = None) -> ModelShape:
    """The shape asked for; `given` is what a folder of weights says. Without it and without a preset: as many KV heads
    as heads, ffn 8/3 of the width, tied below width 2048."""
    named = given or (preset(model.preset) if model.preset else None)
    width = model.width or (named.width if named else 0)
    heads = model.heads or (named.heads if named else 1)
    resized = model.width is not None or model.heads is not None
    base = named or ModelShape(0, width, 1, heads, heads, 1, 0)
    head_dim = base.head_dim if named and not resized else max(1, width // heads)
    kv_heads = base.kv_heads if named and not model.heads else heads
    ffn = base.ffn if named and not model.width else -(-8 * width // (3 * 32)) * 32
    tied = base.tied if named else width < 2048
    base = replace(
        base, vocab=vocab, width=width, heads=heads, head_dim=head_dim, kv_heads=kv_heads, ffn=ffn, tied=tied
    )
    for field in fields(ModelShape):
        written = getattr(model, field.name, None)
        if written is not None:
            base = replace(base, **{field.name: _laid_over(field.name, written, base)})
    if model.init == "mup":
        # The head's logits shrink as the width grows, so that one learning rate serves all widths.
        base = replace(base, logit_scale=base.logit_scale * model.mup_width / base.width)
    return base


def _laid_over(name: str, written: Any, base: ModelShape) -> Any:
    """A part of the spec over the part of the shape, key by key."""
    if not isinstance(written, SpecSection):
        return tuple(written) if isinstance(written, list) else written
    keys = {key: tuple(v) if isinstance(v, list) else v for key, v in written.model_dump(exclude_none=True).items()}
    before = getattr(base, name)
    if before is not None:
        return replace(before, **keys)
    if name == "moe":
        keys.setdefault("ffn", base.ffn)
    return PARTS[name](**keys)


Probability = Annotated[float, Field(ge=0, lt=1)]
# What each objective takes, and the value where none is written.
SETTINGS: dict[str, dict[str, float]] = {
    "causal": {},
    "masked": {"rate": 0.15, "mask": 0.8, "random": 0.1},
    "denoise": {"rate": 0.15, "span": 3.0},
    "prefix": {},
    "infill": {"rate": 0.5, "suffix_first": 0.5},
}
TOKENS = {"masked": ["<mask>"], "infill": ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"]}


class ObjectiveSpec(ShortSection):
    """What is learnt from a row. `causal` is short for `{kind: causal}`. Of several objectives, each row has one,
    chosen by a hash of its position; a key that the kind does not have is refused.
    """

    kind: Literal["causal", "masked", "denoise", "prefix", "infill"] = Field(
        "causal",
        description="causal (the next token), masked (BERT), denoise (T5: spans behind sentinels), prefix (prefix-LM) "
        "or infill (fill-in-the-middle)",
        examples=["causal"],
    )
    share: float = Field(
        1.0, gt=0, le=1e9, description="share of the rows, relative to other objectives", examples=[0.5]
    )
    sources: list[str] = Field(
        [],
        description="only rows of these sources; a named source has no objectives but those that name it",
        examples=[["code"]],
    )
    rate: float | None = Field(
        None,
        gt=0,
        le=1,
        description="masked, denoise: share of tokens to restore (0.15); infill: share of documents rearranged (0.5)",
        examples=[0.15],
    )
    mask: float | None = Field(
        None, ge=0, le=1, description="masked: share of these that the mask token hides (0.8)", examples=[0.8]
    )
    random: float | None = Field(
        None, ge=0, le=1, description="masked: share of these replaced at random (0.1); the rest stay", examples=[0.1]
    )
    span: float | None = Field(None, ge=1, le=1e6, description="denoise: mean tokens in a span (3)", examples=[3.0])
    suffix_first: float | None = Field(
        None, ge=0, le=1, description="infill: share of the rearranged with the suffix first (0.5)", examples=[0.5]
    )
    tokens: list[str] = Field(
        [],
        description="special tokens to use: masked: <mask>; infill: <fim_prefix>, <fim_middle>, <fim_suffix>; denoise: "
        "<extra_id_0>, <extra_id_1> and so on, as many as a row has spans",
        examples=[["[MASK]"]],
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits_its_kind(self) -> ObjectiveSpec:
        for key in ("rate", "mask", "random", "span", "suffix_first"):
            if getattr(self, key) is not None and key not in SETTINGS[self.kind]:
                owners = " and ".join(kind for kind, keys in SETTINGS.items() if key in keys)
                raise ValueError(f"{key} belongs to {owners}: remove it, or write kind: {owners.split()[0]}")
        settings = self.settings()
        if self.kind in ("masked", "denoise") and settings["rate"] >= 1:
            raise ValueError(f"rate {settings['rate']:g} leaves nothing to go by: write less than 1, such as 0.15")
        if self.kind == "masked" and settings["mask"] + settings["random"] > 1 + 1e-9:
            total = settings["mask"] + settings["random"]
            raise ValueError(f"mask and random add up to {total:g}: lower them to 1 or less")
        wanted = len(TOKENS.get(self.kind, []))
        if self.tokens and self.kind != "denoise" and len(self.tokens) != wanted:
            names = ", ".join(TOKENS.get(self.kind, [])) or "none"
            raise ValueError(f"{self.kind} uses {wanted} tokens ({names}), not {len(self.tokens)}: write as many")
        if len(set(self.tokens)) < len(self.tokens):
            raise ValueError(f"tokens names one twice: {', '.join(self.tokens)}; write different ones")
        return self

    def settings(self) -> dict[str, float]:
        """The parameters of the kind, as written or as its paper has them."""
        written = {key: getattr(self, key) for key in SETTINGS[self.kind]}
        return {key: SETTINGS[self.kind][key] if value is None else value for key, value in written.items()}

    def special_tokens(self, context: int) -> list[str]:
        """The names that the tokenizer must have; a document of denoise can be as long as the context."""
        if self.kind == "denoise" and not self.tokens:
            return [f"<extra_id_{k}>" for k in range(spans_of(context, **self.settings())[1])]
        return self.tokens or TOKENS.get(self.kind, [])


def spans_of(length: int, rate: float, span: float) -> tuple[int, int]:
    """(tokens in spans, spans) of a text of at least 2 tokens, by the rule of T5's random_spans_noise_mask."""
    noise = min(max(round(length * rate), 1), length - 1)
    return noise, min(max(round(noise / span), 1), length - noise)


class LossSpec(SpecSection):
    """What is added to the cross-entropy that is minimised; the loss that is shown and judged stays plain."""

    smoothing: Probability = Field(0.0, description="label smoothing", examples=[0.1])
    focal: float = Field(0.0, ge=0, le=100, description="focal loss: times (1 - p) to this power", examples=[2.0])
    z: float = Field(0.0, ge=0, le=1e3, description="z-loss: this times the squared log of the sum", examples=[1e-4])


class DropoutSpec(SpecSection):
    """Chance of each value to be zeroed in training; drawn from the seed and the step, so it replays."""

    embedding: Probability = Field(0.0, description="of the embeddings", examples=[0.1])
    attention: Probability = Field(0.0, description="of the attention weights", examples=[0.1])
    residual: Probability = Field(0.0, description="of what each branch adds to the residual stream", examples=[0.1])


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


class RopeSpec(SpecSection):
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


class MoeSpec(SpecSection):
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


class MlaSpec(SpecSection):
    """Multi-head latent attention (DeepSeek): keys and values through a narrow waist."""

    kv_rank: Side = Field(description="size of the waist", examples=[512])
    nope_dim: Side = Field(description="part of a head without positions", examples=[128])
    rope_dim: Side = Field(description="part with rotary positions; even", examples=[64])
    value_dim: Side = Field(description="size of a head's values", examples=[128])
    q_rank: Side | None = Field(None, description="size of the queries' waist; left out: none", examples=[1536])


class MambaSpec(SpecSection):
    """A selective state-space mixer (Mamba-2), for layers whose `mixers` entry is mamba."""

    heads: Side = Field(description="heads; heads times head_dim is its inner width", examples=[24])
    head_dim: Side = Field(64, description="size of a head", examples=[64])
    state: Side = Field(128, description="size of the state", examples=[128])
    groups: Side = Field(1, description="groups of heads that share B and C", examples=[1])
    conv: int = Field(4, ge=1, le=16, description="width of the convolution", examples=[4])
    chunk: Side = Field(128, description="positions that are scanned together", examples=[128])


class ModelSpec(ShortSection):
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
