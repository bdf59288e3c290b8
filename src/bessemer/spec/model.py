"""The model, tasks, loss and dropout sections, and `model_shape`, which turns a model section into a ModelShape.

A model is a preset, a Hugging Face folder, or a design. Keys have the names of the ModelShape fields that they
override. Keys that are left out come from the preset or folder.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from bessemer.spec.quantity import MAX_CONTEXT, ShortSection, SpecSection, setting
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

SHAPE_PARTS: dict[str, type] = {"rope": Rope, "moe": Moe, "mla": Mla, "mamba": Mamba}


def model_shape(model: ModelSpec, vocab: int, given: ModelShape | None = None) -> ModelShape:
    """The shape of a model section; `given` is the shape of a folder of weights. Without it and without a preset: as
    many KV heads as heads, ffn 8/3 of the width, tied embeddings below width 2048."""
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
        override = getattr(model, field.name, None)
        if override is not None:
            base = replace(base, **{field.name: _apply_override(field.name, override, base)})
    if model.init == "mup":
        # muP scales the logits with the width, so that one learning rate works for all widths.
        base = replace(base, logit_scale=base.logit_scale * model.mup_width / base.width)
    return base


def _apply_override(name: str, override: Any, base: ModelShape) -> Any:
    """A value of the spec over that of the shape; sections such as rope key by key."""
    if not isinstance(override, SpecSection):
        return tuple(override) if isinstance(override, list) else override
    keys = {key: tuple(v) if isinstance(v, list) else v for key, v in override.model_dump(exclude_none=True).items()}
    before = getattr(base, name)
    if before is not None:
        return replace(before, **keys)
    if name == "moe":
        keys.setdefault("ffn", base.ffn)
    return SHAPE_PARTS[name](**keys)


Probability = Annotated[float, Field(ge=0, lt=1)]
# Settings of each objective with their defaults.
SETTINGS: dict[str, dict[str, float]] = {
    "causal": {},
    "masked": {"rate": 0.15, "mask": 0.8, "random": 0.1},
    "denoise": {"rate": 0.15, "span": 3.0},
    "prefix": {},
    "infill": {"rate": 0.5, "suffix_first": 0.5},
}
TOKENS = {"masked": ["<mask>"], "infill": ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"]}


class ObjectiveSpec(ShortSection, short="kind"):
    """A training objective. `causal` is short for `{kind: causal}`. With several objectives, each row gets one, chosen
    by a hash of its position. Keys of another kind are errors.
    """

    kind: Literal["causal", "masked", "denoise", "prefix", "infill"] = setting(
        "causal",
        "causal (the next token), masked (BERT), denoise (T5: spans behind sentinels), prefix (prefix-LM) or infill "
        "(fill-in-the-middle)",
        "causal",
    )
    share: float = setting(1.0, "share of rows, relative to the other objectives", 0.5, gt=0, le=1e9)
    sources: list[str] = setting(
        [],
        "only for rows of these sources; a source named by any objective only gets objectives that name it",
        ["code"],
    )
    rate: float | None = setting(
        None,
        "masked, denoise: share of tokens to predict (0.15); infill: share of documents rearranged (0.5)",
        0.15,
        gt=0,
        le=1,
    )
    mask: float | None = setting(None, "masked: share of them replaced by the mask token (0.8)", 0.8, ge=0, le=1)
    random: float | None = setting(
        None, "masked: share replaced by random tokens (0.1); the rest stay", 0.1, ge=0, le=1
    )
    span: float | None = setting(None, "denoise: mean tokens per span (3)", 3.0, ge=1, le=1e6)
    suffix_first: float | None = setting(None, "infill: share of these with the suffix first (0.5)", 0.5, ge=0, le=1)
    tokens: list[str] = setting(
        [],
        "special tokens: for masked <mask>; for infill <fim_prefix>, <fim_middle>, <fim_suffix>; for denoise "
        "<extra_id_0>, <extra_id_1>, ..., one per span of a row",
        ["[MASK]"],
    )

    @model_validator(mode="after")
    def _check_kind(self) -> ObjectiveSpec:
        for key in ("rate", "mask", "random", "span", "suffix_first"):
            if getattr(self, key) is not None and key not in SETTINGS[self.kind]:
                owners = " and ".join(kind for kind, keys in SETTINGS.items() if key in keys)
                raise ValueError(f"{key} is a key of {owners}: remove it, or write kind: {owners.split()[0]}")
        settings = self.settings()
        if self.kind in ("masked", "denoise") and settings["rate"] >= 1:
            raise ValueError(f"rate {settings['rate']:g} leaves no context: write less than 1, such as 0.15")
        if self.kind == "masked" and settings["mask"] + settings["random"] > 1 + 1e-9:
            total = settings["mask"] + settings["random"]
            raise ValueError(f"mask and random add up to {total:g}: lower them to 1 or less")
        needed = len(TOKENS.get(self.kind, []))
        if self.tokens and self.kind != "denoise" and len(self.tokens) != needed:
            names = ", ".join(TOKENS.get(self.kind, [])) or "none"
            raise ValueError(f"{self.kind} uses {needed} tokens ({names}), not {len(self.tokens)}: list {needed}")
        if len(set(self.tokens)) < len(self.tokens):
            raise ValueError(f"tokens lists a token twice: {', '.join(self.tokens)}; write different ones")
        return self

    def settings(self) -> dict[str, float]:
        """The settings of this kind; those left out have the values of its paper."""
        return {
            key: default if (value := getattr(self, key)) is None else value
            for key, default in SETTINGS[self.kind].items()
        }

    def special_tokens(self, context: int) -> list[str]:
        """The special tokens that the tokenizer needs; a denoise document can be as long as the context."""
        if self.kind == "denoise" and not self.tokens:
            return [f"<extra_id_{k}>" for k in range(count_spans(context, **self.settings())[1])]
        return self.tokens or TOKENS.get(self.kind, [])


def count_spans(length: int, rate: float, span: float) -> tuple[int, int]:
    """(tokens in spans, spans) of a text of at least 2 tokens, by the rule of T5's random_spans_noise_mask."""
    noise = min(max(round(length * rate), 1), length - 1)
    return noise, min(max(round(noise / span), 1), length - noise)


class LossSpec(SpecSection):
    """Terms added to the minimised cross-entropy. The reported and checked loss stays the plain cross-entropy."""

    smoothing: Probability = setting(0.0, "label smoothing", 0.1)
    focal: float = setting(0.0, "focal loss: multiply by (1 - p) to this power", 2.0, ge=0, le=100)
    z: float = setting(0.0, "z-loss: this times the squared log of the softmax denominator", 1e-4, ge=0, le=1e3)


class DropoutSpec(SpecSection):
    """Dropout probabilities during training. Draws depend only on seed and step, so steps can be replayed."""

    embedding: Probability = setting(0.0, "of the embeddings", 0.1)
    attention: Probability = setting(0.0, "of the attention weights", 0.1)
    residual: Probability = setting(0.0, "of the output of each residual branch", 0.1)


MAX_DIMENSION = 1_000_000  # of a matrix: a typing error is refused here
MAX_FACTOR = 1e6
Side = Annotated[int, Field(ge=1, le=MAX_DIMENSION)]
Window = Annotated[int, Field(ge=0, le=MAX_CONTEXT)]
Factor = Annotated[float, Field(gt=0, le=MAX_FACTOR)]
QkNorm = Annotated[
    Literal["none", "head", "full"],
    BeforeValidator(lambda value: ("none", "head")[value] if isinstance(value, bool) else value),
]
Init = Literal["gpt", "depth", "small", "xavier", "kaiming", "mup", "zero"]


class RopeSpec(SpecSection):
    """Rotary position embeddings, and their scaling to a longer context than the model was trained with."""

    theta: float | None = setting(None, "rotary base", 500_000.0, gt=1, le=1e12)
    share: float | None = setting(None, "share of each head that is rotated", 0.25, gt=0, le=1)
    interleaved: bool | None = setting(None, "rotate adjacent pairs instead of halves", False)
    scaling: Scaling | None = setting(None, "none, linear, ntk, dynamic, yarn, longrope or llama3", "yarn")
    factor: float | None = setting(None, "factor by which the context grows", 8.0, ge=1, le=MAX_FACTOR)
    original: Side | None = setting(None, "the context before scaling, in tokens", 4096)
    low_freq: Factor | None = setting(None, "llama3: frequencies below this are fully scaled", 1.0)
    high_freq: Factor | None = setting(None, "llama3: frequencies above this are not scaled", 4.0)
    beta_fast: Factor | None = setting(None, "yarn: rotations above which nothing is scaled", 32.0)
    beta_slow: Factor | None = setting(None, "yarn: rotations below which scaling is full", 1.0)
    attention_factor: Factor | None = setting(None, "factor on cos and sin", 1.0)
    short: list[Factor] | None = setting(None, "longrope: divisors for lengths up to the original context", [1.0])
    long: list[Factor] | None = setting(None, "longrope: divisors for longer lengths", [1.2])


class MoeSpec(SpecSection):
    """A mixture of experts instead of the feed-forward layer."""

    experts: Side | None = setting(None, "experts per layer", 8)
    top_k: Side | None = setting(None, "experts per token", 2)
    ffn: Side | None = setting(None, "inner size of an expert (default: the model's ffn)", 1408)
    shared: int | None = setting(None, "shared experts, used by every token", 1, ge=0, le=MAX_DIMENSION)
    dense_layers: list[Annotated[int, Field(ge=0, le=MAX_DIMENSION)]] | None = setting(
        None, "layers without experts, from 0", [0]
    )
    score: Literal["softmax", "sigmoid"] | None = setting(None, "score function of the router", "softmax")
    normalise: bool | None = setting(None, "normalise the weights of the chosen experts to sum to 1", True)
    scale: Factor | None = setting(None, "factor on the weights of the chosen experts", 1.0)
    groups: Side | None = setting(None, "groups of experts", 1)
    top_groups: Side | None = setting(None, "groups that a token can be routed to", 1)
    choice_bias: bool | None = setting(None, "balance the load with a routing bias (DeepSeek-V3)", True)
    bias_rate: float | None = setting(None, "update rate of that bias", 0.001, gt=0, le=1)
    capacity: Factor | None = setting(None, "capacity factor of an expert; left out: no token is dropped", 1.25)
    balance: float | None = setting(None, "weight of the balance loss", 0.01, ge=0, le=1e3)
    router_z: float | None = setting(None, "weight of the router's z-loss", 0.001, ge=0, le=1e3)


class MlaSpec(SpecSection):
    """Multi-head latent attention (DeepSeek): keys and values are compressed to a low rank."""

    kv_rank: Side = setting(..., "rank of keys and values", 512)
    nope_dim: Side = setting(..., "size of the part of a head without positions", 128)
    rope_dim: Side = setting(..., "size of the part with rotary positions; even", 64)
    value_dim: Side = setting(..., "size of the values of a head", 128)
    q_rank: Side | None = setting(None, "rank of the queries; left out: not compressed", 1536)


class MambaSpec(SpecSection):
    """A selective state-space layer (Mamba-2), for layers whose `mixers` entry is mamba."""

    heads: Side = setting(..., "heads; heads x head_dim is the inner width", 24)
    head_dim: Side = setting(64, "size of a head", 64)
    state: Side = setting(128, "size of the state", 128)
    groups: Side = setting(1, "groups of heads that share B and C", 1)
    conv: int = setting(4, "width of the convolution", 4, ge=1, le=16)
    chunk: Side = setting(128, "positions per chunk of the scan", 128)


BASE = "base"  # as the path of a further model: the run's own model without its adapter


class OtherModelSpec(ShortSection, short="path"):
    """A further model of a run, for objectives that use one: a reference, a teacher, a reward model, a critic. `name:
    PATH` is short for `name: {path: PATH}`."""

    path: str = setting(
        ...,
        "a run, a checkpoint, an import, a Hugging Face folder, or base: the run's model without its adapter",
        "runs/base",
        min_length=1,
    )
    checkpoint: str = setting("last", "of a run: last, best or a checkpoint's name", "best")
    train: bool = setting(False, "train it with the run's model; otherwise it is frozen", True)
    head: Literal["own", "score"] = setting(
        "own", "own, or score: a new head that gives a number for each position", "score"
    )


class ModelSpec(ShortSection, short="preset"):
    """The network. `model: 10M` is short for `model: {preset: 10M}`. Other keys override the preset or the Hugging Face
    folder."""

    preset: str | None = setting(None, "a named shape: " + ", ".join(PRESETS), "10M")
    hf: str | None = setting(None, "Hugging Face folder: shape, weights and tokenizer", "Qwen3-0.6B/", min_length=1)
    wrap: bool = setting(False, "run the folder's model with transformers, for families without native support", True)
    width: int | None = setting(None, "size of the residual stream", 320, ge=8, le=MAX_DIMENSION)
    layers: Side | None = setting(None, "number of blocks", 6)
    heads: Side | None = setting(None, "attention heads", 5)
    kv_heads: Side | None = setting(None, "key-value heads; divides heads", 5)
    head_dim: int | None = setting(None, "size of a head (default width / heads)", 64, ge=2, le=MAX_DIMENSION)
    ffn: int | None = setting(None, "inner size of the feed-forward layer; 0: none", 864, ge=0, le=MAX_DIMENSION)
    tied: bool | None = setting(None, "share input and output embeddings", True)
    norm_eps: float | None = setting(None, "epsilon of the norms", 1e-5, gt=0, le=0.1)
    qk_norm: QkNorm | None = setting(None, "norm of queries and keys: none, head (or true) or full", "head")
    attention_scale: Factor | None = setting(None, "scale of the attention logits", 0.125)
    attention_cap: Factor | None = setting(None, "soft cap of attention logits", 50.0)
    windows: list[Window] | None = setting(
        None, "attention window of each layer, repeated over the layers; 0: full attention", [1024, 0], min_length=1
    )
    blocks: tuple[Annotated[int, Field(ge=1, le=MAX_CONTEXT)], Window] | None = setting(
        None,
        "block-sparse attention: block size, and how many previous blocks a position attends to",
        [64, 4],
        strict=False,
    )
    global_tokens: Window | None = setting(
        None, "first positions of a document that attend and are attended to everywhere, whatever windows say", 1
    )
    causal: bool | None = setting(None, "causal attention; false: bidirectional (BERT)", True)
    positions: Positions | None = setting(None, "rope, learned, sinusoidal, alibi, relative (T5) or none", "rope")
    max_positions: Side | None = setting(None, "number of learned positions", 2048)
    rope: RopeSpec | None = setting(None, "rotary position embeddings")
    local_theta: float | None = setting(None, "rotary base of layers with a window", 10_000.0, gt=1, le=1e12)
    mla: MlaSpec | None = setting(
        None, "multi-head latent attention", {"kv_rank": 64, "nope_dim": 32, "rope_dim": 16, "value_dim": 32}
    )
    norm: Literal["rms", "layer"] | None = setting(None, "rms or layer", "rms")
    norm_place: Literal["pre", "post", "sandwich", "branch"] | None = setting(
        None, "pre, post, sandwich (both) or branch (on the output of each branch)", "pre"
    )
    parallel: Literal["none", "one_norm", "two_norms"] | None = setting(None, "parallel attention and FFN", "none")
    activation: Activation | None = setting(None, "relu, gelu, gelu_tanh, silu or relu2", "silu")
    gated: bool | None = setting(None, "gated feed-forward layer (SwiGLU, GeGLU)", True)
    qkv_bias: bool | None = setting(None, "biases of queries, keys and values", False)
    out_bias: bool | None = setting(None, "bias of the attention output", False)
    ffn_bias: bool | None = setting(None, "biases of the feed-forward layer", False)
    moe: MoeSpec | None = setting(None, "a mixture of experts", {"experts": 8, "top_k": 2})
    mixers: list[Literal["attention", "mamba"]] | None = setting(
        None,
        "attention or mamba for each layer, repeated over the layers",
        ["mamba", "mamba", "attention"],
        min_length=1,
    )
    mamba: MambaSpec | None = setting(None, "the state-space layer", {"heads": 24})
    logit_cap: Factor | None = setting(None, "soft cap of the output logits", 30.0)
    init: Init = setting("gpt", "initial weights: gpt, depth, small, xavier, kaiming, mup or zero", "gpt")
    mup_width: Side = setting(256, "with init: mup: the width at which hyperparameters were tuned", 256)

    @field_validator("preset")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and preset(value) is None:
            raise ValueError(f"no preset {value!r}; write one of {', '.join([*PRESETS, *ALIASES])}")
        return value
