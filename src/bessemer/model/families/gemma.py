"""Gemma 2 and the text part of Gemma 3: norms around every branch that store their distance from one, windowed layers
between those that see everything, soft caps (2), or normed queries and keys and a rotary base for each kind (3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bessemer.errors import UserError
from bessemer.model.families.family import Config, Piece, activation, read_rope, refuse, same, write_rope
from bessemer.model.families.llama import ACTIVATIONS, attention, by_layer, ends, feed_forward
from bessemer.spec.shape import ModelShape, Rope

_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "attention_bias": False, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_SECOND: dict[str, Any] = {
    "vocab_size": 256_000, "max_position_embeddings": 8192, "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0, "sliding_window_pattern": 2,
}  # fmt: skip
_THIRD: dict[str, Any] = {
    "vocab_size": 262_208, "max_position_embeddings": 131_072, "final_logit_softcapping": None,
    "attn_logit_softcapping": None, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}  # fmt: skip
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass
class Gemma:
    name: str
    architectures: tuple[str, ...]
    third: bool
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        if "text_config" in config:
            raise UserError(
                "config.json: Gemma3ForConditionalGeneration reads images, which the native model does not; take its "
                "text part: Gemma3ForCausalLM.from_pretrained(FOLDER, key_mapping={'^language_model.': ''})"
                ".save_pretrained(NEW, save_original_format=False) of transformers writes it"
            )
        said = _DEFAULTS | (_THIRD if self.third else _SECOND) | dict(config)
        refuse(said, "use_bidirectional_attention", False)
        if self.third:
            refuse(said, "attn_logit_softcapping", why="transformers' own Gemma 3 ignores it")
        rope, local_theta = _read_ropes(said) if self.third else (read_rope(said), None)
        head_dim, scalar, bias = said["head_dim"], said["query_pre_attn_scalar"], said["attention_bias"]
        return ModelShape(
            vocab=said["vocab_size"], width=said["hidden_size"], layers=said["num_hidden_layers"],
            heads=said["num_attention_heads"], kv_heads=said["num_key_value_heads"], head_dim=head_dim,
            ffn=said["intermediate_size"], tied=said["tie_word_embeddings"], norm_eps=said["rms_norm_eps"],
            qk_norm="head" if self.third else "none", attention_scale=None if scalar == head_dim else scalar**-0.5,
            attention_cap=said["attn_logit_softcapping"], windows=_windows(said),
            max_positions=said["max_position_embeddings"], rope=rope, local_theta=local_theta, norm_offset=1.0,
            norm_place="sandwich", activation=activation(said, "hidden_activation"), qkv_bias=bias, out_bias=bias,
            embedding_scale=said["hidden_size"] ** 0.5, logit_cap=said["final_logit_softcapping"],
        )  # fmt: skip

    def config(self, shape: ModelShape) -> dict[str, Any]:
        scalar = shape.head_dim if shape.attention_scale is None else round(shape.attention_scale**-2, 6)
        found = {
            "architectures": [self.architectures[0]], "model_type": self.name, "vocab_size": shape.vocab,
            "hidden_size": shape.width, "intermediate_size": shape.ffn, "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
            "hidden_activation": ACTIVATIONS[shape.activation],
            "max_position_embeddings": shape.max_positions, "rms_norm_eps": shape.norm_eps,
            "tie_word_embeddings": shape.tied, "attention_bias": shape.qkv_bias,
            "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
            "sliding_window": max(shape.windows) or _DEFAULTS["sliding_window"],
            "layer_types": [_SLIDING if shape.window(i) else _FULL for i in range(shape.layers)],
            "final_logit_softcapping": shape.logit_cap, "attn_logit_softcapping": shape.attention_cap,
        } | write_rope(shape.rope)  # fmt: skip
        return found | ({} if shape.local_theta is None else {"rope_local_base_freq": shape.local_theta})

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        yield from ends(shape)
        for i in range(shape.layers):
            theirs, ours = f"model.layers.{i}", f"blocks.{i}"
            for their, our in _NORMS.items():
                yield same(f"{theirs}.{their}.weight", f"{ours}.{our}.weight")
            yield from attention(shape, f"{theirs}.self_attn", f"{ours}.attention")
            yield from feed_forward(shape, f"{theirs}.mlp", f"{ours}.ffn")


_NORMS = {
    "input_layernorm": "attention_norm", "post_attention_layernorm": "attention_out_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "ffn_out_norm",
}  # fmt: skip


def _read_ropes(said: Config) -> tuple[Rope, float]:
    """Of layers that see everything, and the base of windowed ones."""
    both = said.get("rope_parameters") or {}
    own = {"rope_theta": said["rope_local_base_freq"], "rope_type": "default"} | (both.get(_SLIDING) or {})
    if own["rope_type"] != "default":
        scaled = f"rope_parameters: {_SLIDING}: {own['rope_type']!r}"
        raise UserError(f"config.json: {scaled} is not supported: windowed layers are not stretched; write 'default'")
    full = {"rope_theta": said["rope_theta"]} | (said.get("rope_scaling") or {}) | (both.get(_FULL) or {})
    return read_rope(said, full), float(own["rope_theta"])


def _windows(said: Config) -> tuple[int, ...]:
    """Of each layer, as the shortest pattern that repeats."""
    layers, pattern = said["num_hidden_layers"], said["sliding_window_pattern"]
    kinds = said.get("layer_types") or [_SLIDING if (i + 1) % pattern else _FULL for i in range(layers)]
    windows = by_layer(kinds, said["sliding_window"], layers)
    length = next(n for n in range(1, layers + 1) if all(w == windows[i % n] for i, w in enumerate(windows)))
    return windows[:length]


GEMMA2 = Gemma("gemma2", ("Gemma2ForCausalLM", "Gemma2Model"), third=False)
GEMMA3 = Gemma("gemma3_text", ("Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3ForConditionalGeneration"), third=True)
