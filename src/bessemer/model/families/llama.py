"""Llama, Mistral, Qwen2 and Qwen3: one decoder that differs in biases, query-key norms and windows.

What most decoders of Hugging Face share stands first, as functions: other families use them.

OLMo 2: norms on what a branch adds, and on all queries and all keys at once.

Phi-3 and Phi-4: a Llama with fused matrices and LongRoPE; small ones rotate a part of each head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bessemer.errors import UserError
from bessemer.model.families.family import Config, Piece, activation, joined, need, read_rope, refuse, same, write_rope
from bessemer.spec.shape import Activation, ModelShape

ACTIVATIONS: dict[Activation, str] = {
    "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip

# What transformers' configuration classes take for a key that is not there.
DEFAULTS = {
    "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


def read_dense(said: Config, partly_rotated: bool = False) -> ModelShape:
    """What nearly every decoder's config.json says under the same keys; `said` has the family's defaults in it."""
    rope = read_rope(said)
    if rope.share != 1.0 and not partly_rotated:
        refuse({"partial_rotary_factor": rope.share}, "partial_rotary_factor", why="this family rotates whole heads")
    width, heads = int(need(said, "hidden_size")), int(need(said, "num_attention_heads"))
    return ModelShape(
        vocab=int(need(said, "vocab_size")), width=width, layers=int(need(said, "num_hidden_layers")), heads=heads,
        kv_heads=int(said.get("num_key_value_heads") or heads), head_dim=int(said.get("head_dim") or width // heads),
        ffn=int(need(said, "intermediate_size")), tied=bool(said["tie_word_embeddings"]),
        norm_eps=float(said["rms_norm_eps"]), activation=activation(said, "hidden_act"), rope=rope,
        max_positions=int(need(said, "max_position_embeddings")),
    )  # fmt: skip


def write_dense(shape: ModelShape, name: str, architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture], "model_type": name, "vocab_size": shape.vocab, "hidden_size": shape.width,
        "intermediate_size": shape.ffn, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "hidden_act": ACTIVATIONS[shape.activation],
        "max_position_embeddings": shape.max_positions, "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied, **write_rope(shape.rope),
    }  # fmt: skip


def linear(theirs: str, ours: str, bias: bool) -> Iterator[Piece]:
    yield same(f"{theirs}.weight", f"{ours}.weight")
    if bias:
        yield same(f"{theirs}.bias", f"{ours}.bias")


def ends(shape: ModelShape) -> Iterator[Piece]:
    """Embedding, last norm and head."""
    yield same("model.embed_tokens.weight", "embedding.weight")
    yield same("model.norm.weight", "norm.weight")
    if not shape.tied:
        yield same("lm_head.weight", "head.weight")


def attention(shape: ModelShape, theirs: str, ours: str) -> Iterator[Piece]:
    """Queries, keys, values and out, each a matrix of its own, and norms on queries and keys."""
    for their, our in (("q", "query"), ("k", "key"), ("v", "value")):
        yield from linear(f"{theirs}.{their}_proj", f"{ours}.{our}", shape.qkv_bias)
    yield from linear(f"{theirs}.o_proj", f"{ours}.out", shape.out_bias)
    if shape.qk_norm != "none":
        yield same(f"{theirs}.q_norm.weight", f"{ours}.query_norm.weight")
        yield same(f"{theirs}.k_norm.weight", f"{ours}.key_norm.weight")


def feed_forward(shape: ModelShape, theirs: str, ours: str) -> Iterator[Piece]:
    for name in ("gate", "up", "down"):
        yield from linear(f"{theirs}.{name}_proj", f"{ours}.{name}", shape.ffn_bias)


def by_layer(types: Any, window: int | None, layers: int) -> tuple[int, ...]:
    """Windows from a list of layer types, as short as they can be said."""
    known = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != layers or not known.keys() >= set(types):
        raise UserError(f"config.json: layer_types: {types!r} must name one of {', '.join(known)} for each layer")
    if window is None and "sliding_attention" in types:
        raise UserError("config.json: layer_types has sliding_attention, but no sliding_window is set")
    windows = tuple(known[kind] or 0 for kind in types)
    return windows[:1] if len(set(windows)) == 1 else windows


@dataclass(frozen=True)
class Llama:
    """`windows`: no layer has one, all have the same, or some have (Qwen's layer types)."""

    name: str = "llama"
    architectures: tuple[str, ...] = ("LlamaForCausalLM",)
    ignored: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    biases: Literal["said", "qkv", "none"] = "said"
    head_norm: bool = False
    windows: Literal["none", "all", "some"] = "none"

    def shape(self, config: Config) -> ModelShape:
        said = {**DEFAULTS, **self.defaults, **config}
        biased = bool(said["attention_bias"]) if self.biases == "said" else self.biases == "qkv"
        return replace(
            read_dense(said), windows=self._windows(said), qk_norm="head" if self.head_norm else "none",
            qkv_bias=biased, out_bias=biased and self.biases == "said",
            ffn_bias=self.name == "llama" and bool(said["mlp_bias"]),
        )  # fmt: skip

    def _windows(self, said: Config) -> tuple[int, ...]:
        layers = said["num_hidden_layers"]
        if self.windows == "some":
            window = said["sliding_window"] if said["use_sliding_window"] else None
            full = said["max_window_layers"] if window else layers
            types = ["full_attention"] * min(full, layers) + ["sliding_attention"] * max(layers - full, 0)
            return by_layer(said.get("layer_types") or types, window, layers)
        window = said["sliding_window"] if self.windows == "all" else None
        kind = "sliding_attention" if window else "full_attention"
        refuse(said, "layer_types", [kind] * layers, why=f"{self.name} has one kind of layer")
        return (window or 0,)

    def config(self, shape: ModelShape) -> dict[str, Any]:
        found = write_dense(shape, self.name, self.architectures[0])
        if self.name == "llama":
            if shape.width % shape.heads:  # transformers reads no such Llama, but such a Mistral
                raise UserError(f"llama: width {shape.width} is not a multiple of {shape.heads} heads")
            found |= {"mlp_bias": shape.ffn_bias}
        if self.biases == "said":
            found |= {"attention_bias": shape.qkv_bias}
        if self.windows == "all":
            found |= {"sliding_window": shape.window(0) or None}
        elif self.windows == "some":
            windows = [shape.window(layer) for layer in range(shape.layers)]
            found |= {
                "use_sliding_window": any(windows), "sliding_window": max(windows) or None,
                "max_window_layers": next((i for i, window in enumerate(windows) if window), shape.layers),
                "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
            }  # fmt: skip
        return found

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        yield from ends(shape)
        for i in range(shape.layers):
            theirs, ours = f"model.layers.{i}", f"blocks.{i}"
            yield same(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight")
            yield from attention(shape, f"{theirs}.self_attn", f"{ours}.attention")
            yield same(f"{theirs}.post_attention_layernorm.weight", f"{ours}.ffn_norm.weight")
            yield from feed_forward(shape, f"{theirs}.mlp", f"{ours}.ffn")


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
        said = {**DEFAULTS, "rms_norm_eps": 1e-5, **config}
        refuse(said, "clip_qkv")
        biased = bool(said["attention_bias"])
        return replace(read_dense(said), norm_place="branch", qk_norm="full", qkv_bias=biased, out_bias=biased)

    def config(self, shape: ModelShape) -> dict[str, Any]:
        return write_dense(shape, self.name, self.architectures[0]) | {"attention_bias": shape.qkv_bias}

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        yield from ends(shape)
        for i in range(shape.layers):
            theirs, ours = f"model.layers.{i}", f"blocks.{i}"
            yield from attention(shape, f"{theirs}.self_attn", f"{ours}.attention")
            yield same(f"{theirs}.post_attention_layernorm.weight", f"{ours}.attention_out_norm.weight")
            yield from feed_forward(shape, f"{theirs}.mlp", f"{ours}.ffn")
            yield same(f"{theirs}.post_feedforward_layernorm.weight", f"{ours}.ffn_out_norm.weight")


OLMO2 = Olmo2()


@dataclass(frozen=True)
class Phi3:
    name: str = "phi3"
    architectures: tuple[str, ...] = ("Phi3ForCausalLM",)
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        said = {**DEFAULTS, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **config}
        said.setdefault("original_max_position_embeddings", 4096)
        for key in ("rope_scaling", "rope_parameters"):
            stretch = said.get(key) or {}
            if stretch.get("rope_type", stretch.get("type")) in ("su", "yarn"):  # the first files' words for it
                said[key] = {**stretch, "rope_type": "longrope"}
        refuse(said, "attention_bias", False, why="Phi-3 has none")
        shape = replace(read_dense(said, partly_rotated=True), windows=(said.get("sliding_window") or 0,))
        if shape.rope.scaling not in ("none", "longrope"):
            raise UserError(f"config.json: rope scaling {shape.rope.scaling!r}: Phi-3 has only 'longrope'")
        return shape

    def config(self, shape: ModelShape) -> dict[str, Any]:
        return write_dense(shape, self.name, self.architectures[0]) | {
            # Here it counts for more than inside rope_scaling.
            "original_max_position_embeddings": shape.rope.original or shape.max_positions,
            "partial_rotary_factor": shape.rope.share, "sliding_window": shape.window(0) or None,
        }  # fmt: skip

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        yield from ends(shape)
        kv_width = shape.kv_heads * shape.head_dim
        for i in range(shape.layers):
            theirs, ours = f"model.layers.{i}", f"blocks.{i}"
            yield same(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight")
            qkv = tuple(f"{ours}.attention.{name}.weight" for name in ("query", "key", "value"))
            yield joined(f"{theirs}.self_attn.qkv_proj.weight", qkv, (shape.attention_width, kv_width, kv_width))
            yield same(f"{theirs}.self_attn.o_proj.weight", f"{ours}.attention.out.weight")
            yield same(f"{theirs}.post_attention_layernorm.weight", f"{ours}.ffn_norm.weight")
            gate_up = f"{ours}.ffn.gate.weight", f"{ours}.ffn.up.weight"
            yield joined(f"{theirs}.mlp.gate_up_proj.weight", gate_up, (shape.ffn, shape.ffn))
            yield same(f"{theirs}.mlp.down_proj.weight", f"{ours}.ffn.down.weight")


PHI3 = Phi3()
