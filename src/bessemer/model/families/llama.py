"""Llama and its close relatives: Mistral, Qwen2, Qwen3, OLMo 2 (norms on branch outputs, full query-key norms), Phi-3/4
(fused matrices, LongRoPE), Gemma 2 and 3 (sandwich norms stored as distance from 1, sliding windows, soft caps).

The functions that most Hugging Face decoders share come first; other families use them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bessemer.errors import UserError
from bessemer.model.families.registry import (
    COMMON_KEYS,
    Config,
    Family,
    WeightMapping,
    activation,
    fused,
    layers,
    need,
    read_keys,
    read_rope,
    refuse,
    rename,
    write_keys,
    write_rope,
)
from bessemer.spec.shape import Activation, ModelShape, Rope

ACTIVATIONS: dict[Activation, str] = {
    "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip

# Defaults of transformers' config classes.
DEFAULTS = {
    "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


def read_dense(values: Config, partial_rotary: bool = False) -> ModelShape:
    """The keys that nearly every decoder's config.json shares; `values` includes the family's defaults."""
    rope = read_rope(values)
    if rope.share != 1.0 and not partial_rotary:
        refuse({"partial_rotary_factor": rope.share}, "partial_rotary_factor", why="this family rotates full heads")
    width, heads = int(need(values, "hidden_size")), int(need(values, "num_attention_heads"))
    return ModelShape(
        vocab=int(need(values, "vocab_size")), width=width, layers=int(need(values, "num_hidden_layers")), heads=heads,
        kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=int(values.get("head_dim") or width // heads),
        ffn=int(need(values, "intermediate_size")), tied=bool(values["tie_word_embeddings"]),
        norm_eps=float(values["rms_norm_eps"]), activation=activation(values, "hidden_act"), rope=rope,
        max_positions=int(need(values, "max_position_embeddings")),
    )  # fmt: skip


def write_dense(family: Family, shape: ModelShape) -> dict[str, Any]:
    return write_keys(family, shape, COMMON_KEYS) | {
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "rms_norm_eps": shape.norm_eps,
        "hidden_act": ACTIVATIONS[shape.activation], **write_rope(shape.rope),
    }  # fmt: skip


def linear(hf: str, native: str, bias: bool) -> Iterator[WeightMapping]:
    yield rename(f"{hf}.weight", f"{native}.weight")
    if bias:
        yield rename(f"{hf}.bias", f"{native}.bias")


def embedding_and_head(shape: ModelShape) -> Iterator[WeightMapping]:
    """Embedding, final norm and head."""
    yield rename("model.embed_tokens.weight", "embedding.weight")
    yield rename("model.norm.weight", "norm.weight")
    if not shape.tied:
        yield rename("lm_head.weight", "head.weight")


def attention(shape: ModelShape, hf: str, native: str) -> Iterator[WeightMapping]:
    """Separate query, key, value and output matrices, and query-key norms."""
    for hf_name, native_name in (("q", "query"), ("k", "key"), ("v", "value")):
        yield from linear(f"{hf}.{hf_name}_proj", f"{native}.{native_name}", shape.qkv_bias)
    yield from linear(f"{hf}.o_proj", f"{native}.out", shape.out_bias)
    if shape.qk_norm != "none":
        yield rename(f"{hf}.q_norm.weight", f"{native}.query_norm.weight")
        yield rename(f"{hf}.k_norm.weight", f"{native}.key_norm.weight")


def feed_forward(shape: ModelShape, hf: str, native: str) -> Iterator[WeightMapping]:
    for name in ("gate", "up", "down"):
        yield from linear(f"{hf}.{name}_proj", f"{native}.{name}", shape.ffn_bias)


def windows_of_layers(types: Any, window: int | None, layers: int) -> tuple[int, ...]:
    """Windows from a list of layer types, shortened if they are all equal."""
    kinds = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != layers or not kinds.keys() >= set(types):
        raise UserError(f"config.json: layer_types: {types!r} must list one of {', '.join(kinds)} per layer")
    if window is None and "sliding_attention" in types:
        raise UserError("config.json: layer_types has sliding_attention, but sliding_window is not set")
    windows = tuple(kinds[kind] or 0 for kind in types)
    return windows[:1] if len(set(windows)) == 1 else windows


@dataclass(frozen=True)
class Llama:
    """`windows`: no layer has one, all have the same, or some have one (Qwen's layer types)."""

    name: str = "llama"
    architectures: tuple[str, ...] = ("LlamaForCausalLM",)
    ignored: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    biases: Literal["config", "qkv", "none"] = "config"
    head_norm: bool = False
    windows: Literal["none", "all", "some"] = "none"

    def shape(self, config: Config) -> ModelShape:
        values = {**DEFAULTS, **self.defaults, **config}
        biased = bool(values["attention_bias"]) if self.biases == "config" else self.biases == "qkv"
        return replace(
            read_dense(values), windows=self._windows(values), qk_norm="head" if self.head_norm else "none",
            qkv_bias=biased, out_bias=biased and self.biases == "config",
            ffn_bias=self.name == "llama" and bool(values["mlp_bias"]),
        )  # fmt: skip

    def _windows(self, values: Config) -> tuple[int, ...]:
        layers = values["num_hidden_layers"]
        if self.windows == "some":
            window = values["sliding_window"] if values["use_sliding_window"] else None
            full = values["max_window_layers"] if window else layers
            types = ["full_attention"] * min(full, layers) + ["sliding_attention"] * max(layers - full, 0)
            return windows_of_layers(values.get("layer_types") or types, window, layers)
        window = values["sliding_window"] if self.windows == "all" else None
        kind = "sliding_attention" if window else "full_attention"
        refuse(values, "layer_types", [kind] * layers, why=f"{self.name} has one kind of layer")
        return (window or 0,)

    def config(self, shape: ModelShape) -> dict[str, Any]:
        config = write_dense(self, shape)
        if self.name == "llama":
            if shape.width % shape.heads:  # transformers' Llama requires it, its Mistral does not
                raise UserError(f"llama: width {shape.width} is not a multiple of {shape.heads} heads")
            config |= {"mlp_bias": shape.ffn_bias}
        if self.biases == "config":
            config |= {"attention_bias": shape.qkv_bias}
        if self.windows == "all":
            config |= {"sliding_window": shape.window(0) or None}
        elif self.windows == "some":
            windows = [shape.window(layer) for layer in range(shape.layers)]
            config |= {
                "use_sliding_window": any(windows), "sliding_window": max(windows) or None,
                "max_window_layers": next((i for i, window in enumerate(windows) if window), shape.layers),
                "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
            }  # fmt: skip
        return config

    def weight_mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        yield from embedding_and_head(shape)
        for hf, native in layers(shape, "model.layers"):
            yield rename(f"{hf}.input_layernorm.weight", f"{native}.attention_norm.weight")
            yield from attention(shape, f"{hf}.self_attn", f"{native}.attention")
            yield rename(f"{hf}.post_attention_layernorm.weight", f"{native}.ffn_norm.weight")
            yield from feed_forward(shape, f"{hf}.mlp", f"{native}.ffn")


_QWEN = {
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    "num_key_value_heads": 32,
}  # fmt: skip

LLAMA = Llama()
MISTRAL = Llama(
    "mistral", ("MistralForCausalLM",), biases="none", windows="all",
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
)  # fmt: skip
QWEN2 = Llama("qwen2", ("Qwen2ForCausalLM",), biases="qkv", windows="some", defaults=_QWEN)
QWEN3 = Llama("qwen3", ("Qwen3ForCausalLM",), head_norm=True, windows="some", defaults=_QWEN | {"head_dim": 128})


@dataclass(frozen=True)
class Olmo2:
    name: str = "olmo2"
    architectures: tuple[str, ...] = ("Olmo2ForCausalLM",)
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        values = {**DEFAULTS, "rms_norm_eps": 1e-5, **config}
        refuse(values, "clip_qkv")
        biased = bool(values["attention_bias"])
        return replace(read_dense(values), norm_place="branch", qk_norm="full", qkv_bias=biased, out_bias=biased)

    def config(self, shape: ModelShape) -> dict[str, Any]:
        return write_dense(self, shape) | {"attention_bias": shape.qkv_bias}

    def weight_mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        yield from embedding_and_head(shape)
        for hf, native in layers(shape, "model.layers"):
            yield from attention(shape, f"{hf}.self_attn", f"{native}.attention")
            yield rename(f"{hf}.post_attention_layernorm.weight", f"{native}.attention_out_norm.weight")
            yield from feed_forward(shape, f"{hf}.mlp", f"{native}.ffn")
            yield rename(f"{hf}.post_feedforward_layernorm.weight", f"{native}.ffn_out_norm.weight")


OLMO2 = Olmo2()


@dataclass(frozen=True)
class Phi3:
    name: str = "phi3"
    architectures: tuple[str, ...] = ("Phi3ForCausalLM",)
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        values = {**DEFAULTS, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **config}
        values.setdefault("original_max_position_embeddings", 4096)
        for key in ("rope_scaling", "rope_parameters"):
            scaling = values.get(key) or {}
            if scaling.get("rope_type", scaling.get("type")) in ("su", "yarn"):  # older names
                values[key] = {**scaling, "rope_type": "longrope"}
        refuse(values, "attention_bias", False, why="Phi-3 has no attention bias")
        shape = replace(read_dense(values, partial_rotary=True), windows=(values.get("sliding_window") or 0,))
        if shape.rope.scaling not in ("none", "longrope"):
            raise UserError(f"config.json: rope scaling {shape.rope.scaling!r}: Phi-3 supports only 'longrope'")
        return shape

    def config(self, shape: ModelShape) -> dict[str, Any]:
        return write_dense(self, shape) | {
            # Takes precedence over the value inside rope_scaling.
            "original_max_position_embeddings": shape.rope.original or shape.max_positions,
            "partial_rotary_factor": shape.rope.share, "sliding_window": shape.window(0) or None,
        }  # fmt: skip

    def weight_mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        yield from embedding_and_head(shape)
        kv_width = shape.kv_heads * shape.head_dim
        for hf, native in layers(shape, "model.layers"):
            yield rename(f"{hf}.input_layernorm.weight", f"{native}.attention_norm.weight")
            qkv = tuple(f"{native}.attention.{name}.weight" for name in ("query", "key", "value"))
            yield fused(f"{hf}.self_attn.qkv_proj.weight", qkv, (shape.attention_width, kv_width, kv_width))
            yield rename(f"{hf}.self_attn.o_proj.weight", f"{native}.attention.out.weight")
            yield rename(f"{hf}.post_attention_layernorm.weight", f"{native}.ffn_norm.weight")
            gate_up = f"{native}.ffn.gate.weight", f"{native}.ffn.up.weight"
            yield fused(f"{hf}.mlp.gate_up_proj.weight", gate_up, (shape.ffn, shape.ffn))
            yield rename(f"{hf}.mlp.down_proj.weight", f"{native}.ffn.down.weight")


PHI3 = Phi3()


_GEMMA_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "attention_bias": False, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_GEMMA2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000, "max_position_embeddings": 8192, "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0, "sliding_window_pattern": 2,
}  # fmt: skip
_GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208, "max_position_embeddings": 131_072, "final_logit_softcapping": None,
    "attn_logit_softcapping": None, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}  # fmt: skip
_GEMMA_KEYS = COMMON_KEYS | {
    "num_key_value_heads": "kv_heads", "head_dim": "head_dim", "rms_norm_eps": "norm_eps",
    "final_logit_softcapping": "logit_cap", "attn_logit_softcapping": "attention_cap",
}  # fmt: skip
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass
class Gemma:
    name: str
    architectures: tuple[str, ...]
    gemma3: bool
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        if "text_config" in config:
            raise UserError(
                "config.json: Gemma3ForConditionalGeneration is multimodal, which is not supported; extract its text "
                "model: Gemma3ForCausalLM.from_pretrained(FOLDER, key_mapping={'^language_model.': ''})"
                ".save_pretrained(NEW, save_original_format=False)"
            )
        values = _GEMMA_DEFAULTS | (_GEMMA3_DEFAULTS if self.gemma3 else _GEMMA2_DEFAULTS) | dict(config)
        refuse(values, "use_bidirectional_attention", False)
        if self.gemma3:
            refuse(values, "attn_logit_softcapping", why="transformers' Gemma 3 ignores it")
        rope, local_theta = _read_ropes(values) if self.gemma3 else (read_rope(values), None)
        head_dim, scalar, bias = values["head_dim"], values["query_pre_attn_scalar"], values["attention_bias"]
        return ModelShape(
            **read_keys(values, _GEMMA_KEYS), qk_norm="head" if self.gemma3 else "none",
            attention_scale=None if scalar == head_dim else scalar**-0.5,
            windows=_gemma_windows(values), rope=rope, local_theta=local_theta, norm_offset=1.0,
            norm_place="sandwich", activation=activation(values, "hidden_activation"), qkv_bias=bias, out_bias=bias,
            embedding_scale=values["hidden_size"] ** 0.5,
        )  # fmt: skip

    def config(self, shape: ModelShape) -> dict[str, Any]:
        scalar = shape.head_dim if shape.attention_scale is None else round(shape.attention_scale**-2, 6)
        config = write_keys(self, shape, _GEMMA_KEYS) | {
            "hidden_activation": ACTIVATIONS[shape.activation], "attention_bias": shape.qkv_bias,
            "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
            "sliding_window": max(shape.windows) or _GEMMA_DEFAULTS["sliding_window"],
            "layer_types": [_SLIDING if shape.window(i) else _FULL for i in range(shape.layers)],
        } | write_rope(shape.rope)  # fmt: skip
        return config | ({} if shape.local_theta is None else {"rope_local_base_freq": shape.local_theta})

    def weight_mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        yield from embedding_and_head(shape)
        for hf, native in layers(shape, "model.layers"):
            for hf_name, native_name in _NORMS.items():
                yield rename(f"{hf}.{hf_name}.weight", f"{native}.{native_name}.weight")
            yield from attention(shape, f"{hf}.self_attn", f"{native}.attention")
            yield from feed_forward(shape, f"{hf}.mlp", f"{native}.ffn")


_NORMS = {
    "input_layernorm": "attention_norm", "post_attention_layernorm": "attention_out_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "ffn_out_norm",
}  # fmt: skip


def _read_ropes(values: Config) -> tuple[Rope, float]:
    """The rope of full-attention layers, and the base of sliding-window layers."""
    both = values.get("rope_parameters") or {}
    local = {"rope_theta": values["rope_local_base_freq"], "rope_type": "default"} | (both.get(_SLIDING) or {})
    if local["rope_type"] != "default":
        scaled = f"rope_parameters: {_SLIDING}: {local['rope_type']!r}"
        raise UserError(f"config.json: {scaled} is not supported for sliding-window layers; write 'default'")
    full = {"rope_theta": values["rope_theta"]} | (values.get("rope_scaling") or {}) | (both.get(_FULL) or {})
    return read_rope(values, full), float(local["rope_theta"])


def _gemma_windows(values: Config) -> tuple[int, ...]:
    """The window of each layer, as the shortest repeating pattern."""
    layers, pattern = values["num_hidden_layers"], values["sliding_window_pattern"]
    kinds = values.get("layer_types") or [_SLIDING if (i + 1) % pattern else _FULL for i in range(layers)]
    windows = windows_of_layers(kinds, values["sliding_window"], layers)
    length = next(n for n in range(1, layers + 1) if all(w == windows[i % n] for i, w in enumerate(windows)))
    return windows[:length]


GEMMA2 = Gemma("gemma2", ("Gemma2ForCausalLM", "Gemma2Model"), gemma3=False)
GEMMA3 = Gemma("gemma3_text", ("Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3ForConditionalGeneration"), gemma3=True)
