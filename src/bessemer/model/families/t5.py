"""T5: an encoder and a decoder with biases by distance. 1.0 has ReLU and one embedding for all, by which logits are
scaled; 1.1 and Flan have gated GELU and a head of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bessemer.errors import UserError
from bessemer.model.families.family import Config, Piece, activation, refuse, same
from bessemer.spec.shape import ModelShape

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu", "tie_word_embeddings": True,
}  # fmt: skip
_NAMES = {"gelu_tanh": "gelu_new"}
_GATED = {"gelu_tanh": "gelu", "gelu": "gelu_python"}  # `gated-gelu` has always meant the approximation


class T5Family:
    name = "t5"
    architectures: tuple[str, ...] = ("T5ForConditionalGeneration", "T5WithLMHeadModel")
    # Older files have copies of the embedding, and a bias by distance where there is none.
    ignored: tuple[str, ...] = (r"^(en|de)coder\.embed_tokens\.weight$", r"EncDecAttention\.relative_attention_bias")

    def shape(self, config: Config) -> ModelShape:
        said = _DEFAULTS | dict(config)
        refuse(said, "is_encoder_decoder", True)
        refuse(said, "is_decoder", False)
        layers, heads, tied = said["num_layers"], said["num_heads"], bool(said["tie_word_embeddings"])
        gated, name = _activation(said["feed_forward_proj"])
        # transformers 5 says by a key of its own what older versions concluded from the tie.
        scaled = said.get("scale_decoder_outputs", tied)
        return ModelShape(
            vocab=said["vocab_size"], width=said["d_model"], layers=layers, heads=heads, kv_heads=heads,
            head_dim=said["d_kv"], ffn=said["d_ff"], tied=tied, norm_eps=said["layer_norm_epsilon"],
            attention_scale=1.0, positions="relative", relative_buckets=said["relative_attention_num_buckets"],
            relative_distance=said["relative_attention_max_distance"],
            activation=activation({"feed_forward_proj": name}, "feed_forward_proj"), gated=gated,
            logit_scale=said["d_model"] ** -0.5 if scaled else 1.0,
            decoder_layers=layers if said.get("num_decoder_layers") is None else said["num_decoder_layers"],
        )  # fmt: skip

    def config(self, shape: ModelShape) -> dict[str, Any]:
        names, before = (_GATED, "gated-") if shape.gated else (_NAMES, "")
        return {
            "architectures": [self.architectures[0]], "model_type": self.name, "is_encoder_decoder": True,
            "vocab_size": shape.vocab, "d_model": shape.width, "d_kv": shape.head_dim, "d_ff": shape.ffn,
            "num_layers": shape.layers, "num_decoder_layers": shape.decoder_layers, "num_heads": shape.heads,
            "relative_attention_num_buckets": shape.relative_buckets,
            "relative_attention_max_distance": shape.relative_distance, "layer_norm_epsilon": shape.norm_eps,
            "feed_forward_proj": before + names.get(shape.activation, shape.activation),
            "tie_word_embeddings": shape.tied, "scale_decoder_outputs": shape.logit_scale != 1.0,
        }  # fmt: skip

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        yield same("shared.weight", "embedding.weight")
        for stack, prefix, first, count in (
            ("encoder", "encoder_", 0, shape.layers), ("decoder", "", shape.layers, shape.decoder_layers),
        ):  # fmt: skip
            bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            yield same(bias, f"{prefix}relative.weight")
            for i in range(count):
                yield from _block(f"{stack}.block.{i}.layer", f"blocks.{first + i}", shape.gated, stack == "decoder")
            yield same(f"{stack}.final_layer_norm.weight", f"{prefix}norm.weight")
        if not shape.tied:
            yield same("lm_head.weight", "head.weight")


def _block(theirs: str, ours: str, gated: bool, crosses: bool) -> Iterator[Piece]:
    branches = [("SelfAttention", "attention")] + [("EncDecAttention", "cross")] * crosses
    for number, (their, our) in enumerate(branches):
        yield same(f"{theirs}.{number}.layer_norm.weight", f"{ours}.{our}_norm.weight")
        for short, name in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
            yield same(f"{theirs}.{number}.{their}.{short}.weight", f"{ours}.{our}.{name}.weight")
    last = f"{theirs}.{len(branches)}"
    yield same(f"{last}.layer_norm.weight", f"{ours}.ffn_norm.weight")
    inner = (("wi_0", "gate"), ("wi_1", "up")) if gated else (("wi", "up"),)
    for their, our in (*inner, ("wo", "down")):
        yield same(f"{last}.DenseReluDense.{their}.weight", f"{ours}.ffn.{our}.weight")


def _activation(said: str) -> tuple[bool, str]:
    """Whether `feed_forward_proj` has a gate, and its activation's name."""
    gate, _, name = said.rpartition("-")
    if gate not in ("", "gated"):
        raise UserError(f"config.json: feed_forward_proj: {said!r} is neither ACTIVATION nor gated-ACTIVATION")
    return gate == "gated", "gelu_new" if said == "gated-gelu" else name


T5 = T5Family()
