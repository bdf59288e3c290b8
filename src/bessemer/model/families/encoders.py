"""BERT: every token sees all others, norms after each branch, learned positions and segments, a transform before the
tied head. Next-sentence heads and poolers of its first training are left out.

T5: an encoder and a decoder with biases by distance. 1.0 has ReLU and one embedding for all, by which logits are
scaled; 1.1 and Flan have gated GELU and a head of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bessemer.errors import UserError
from bessemer.model.families.family import Config, Piece, activation, refuse, same
from bessemer.model.families.llama import ACTIVATIONS, linear
from bessemer.spec.shape import ModelShape

_BERT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "tie_word_embeddings": True,
}  # fmt: skip


class Bert:
    name = "bert"
    architectures: tuple[str, ...] = ("BertForMaskedLM", "BertForPreTraining")
    ignored: tuple[str, ...] = (r"^cls\.seq_relationship\.", r"^bert\.pooler\.", r"^cls\.predictions\.decoder\.bias$")

    def shape(self, config: Config) -> ModelShape:
        said = _BERT_DEFAULTS | dict(config)
        refuse(said, "is_decoder", False)
        refuse(said, "add_cross_attention", False)
        refuse(said, "position_embedding_type", "absolute")
        width, heads = said["hidden_size"], said["num_attention_heads"]
        return ModelShape(
            vocab=said["vocab_size"], width=width, layers=said["num_hidden_layers"], heads=heads, kv_heads=heads,
            head_dim=width // heads, ffn=said["intermediate_size"], tied=said["tie_word_embeddings"],
            norm_eps=said["layer_norm_eps"], causal=False, positions="learned",
            max_positions=said["max_position_embeddings"], norm="layer", norm_place="post",
            activation=activation(said, "hidden_act"), gated=False, qkv_bias=True, out_bias=True, ffn_bias=True,
            embedding_norm=True, token_types=said["type_vocab_size"], head_bias=True, head_transform=True,
        )  # fmt: skip

    def config(self, shape: ModelShape) -> dict[str, Any]:
        return {
            "architectures": [self.architectures[0]], "model_type": self.name, "vocab_size": shape.vocab,
            "hidden_size": shape.width, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
            "intermediate_size": shape.ffn, "hidden_act": ACTIVATIONS[shape.activation],
            "max_position_embeddings": shape.max_positions, "type_vocab_size": shape.token_types,
            "layer_norm_eps": shape.norm_eps, "tie_word_embeddings": shape.tied,
        }  # fmt: skip

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        yield same("bert.embeddings.word_embeddings.weight", "embedding.weight")
        yield same("bert.embeddings.position_embeddings.weight", "position.weight")
        yield same("bert.embeddings.token_type_embeddings.weight", "types.weight")
        yield from linear("bert.embeddings.LayerNorm", "embedding_norm", bias=True)
        for i in range(shape.layers):
            theirs, ours = f"bert.encoder.layer.{i}", f"blocks.{i}"
            for name in ("query", "key", "value"):
                yield from linear(f"{theirs}.attention.self.{name}", f"{ours}.attention.{name}", bias=True)
            yield from linear(f"{theirs}.attention.output.dense", f"{ours}.attention.out", bias=True)
            yield from linear(f"{theirs}.attention.output.LayerNorm", f"{ours}.attention_norm", bias=True)
            yield from linear(f"{theirs}.intermediate.dense", f"{ours}.ffn.up", bias=True)
            yield from linear(f"{theirs}.output.dense", f"{ours}.ffn.down", bias=True)
            yield from linear(f"{theirs}.output.LayerNorm", f"{ours}.ffn_norm", bias=True)
        if not shape.head_transform:
            return
        yield from linear("cls.predictions.transform.dense", "transform.linear", bias=True)
        yield from linear("cls.predictions.transform.LayerNorm", "transform.norm", bias=True)
        if shape.tied:
            yield same("cls.predictions.bias", "head_bias")
        else:
            yield same("cls.predictions.decoder.weight", "head.weight")
            # Of an untied model transformers saves the bias twice and reads the decoder's.
            both = ("cls.predictions.decoder.bias", "cls.predictions.bias")
            yield Piece(both, ("head_bias",), lambda tensors: tensors[:1], lambda tensors: tensors * 2)


BERT = Bert()


_T5_DEFAULTS: dict[str, Any] = {
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
        said = _T5_DEFAULTS | dict(config)
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
