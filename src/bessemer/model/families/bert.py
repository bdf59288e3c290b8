"""BERT: every token sees all others, norms after each branch, learned positions and segments, a transform before the
tied head. Next-sentence heads and poolers of its first training are left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bessemer.model.families.family import Config, Piece, activation, refuse, same
from bessemer.model.families.llama import ACTIVATIONS, linear
from bessemer.spec.shape import ModelShape

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "tie_word_embeddings": True,
}  # fmt: skip


class Bert:
    name = "bert"
    architectures: tuple[str, ...] = ("BertForMaskedLM", "BertForPreTraining")
    ignored: tuple[str, ...] = (r"^cls\.seq_relationship\.", r"^bert\.pooler\.", r"^cls\.predictions\.decoder\.bias$")

    def shape(self, config: Config) -> ModelShape:
        said = _DEFAULTS | dict(config)
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
