"""Families that share little with Llama: BERT (bidirectional, post-norm; next-sentence head and pooler are dropped), T5
(encoder-decoder with relative biases; 1.0 has ReLU and scaled, tied logits, 1.1 and Flan gated GELU and an untied head)
and Mamba-2 (state-space layers only).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bessemer.errors import UserError
from bessemer.model.families.llama import ACTIVATIONS, linear
from bessemer.model.families.registry import (
    COMMON_KEYS,
    Config,
    WeightMapping,
    activation,
    layers,
    need,
    read_keys,
    refuse,
    rename,
    write_keys,
)
from bessemer.spec.shape import Mamba, ModelShape

_BERT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "tie_word_embeddings": True,
}  # fmt: skip


_BERT_KEYS = COMMON_KEYS | {"type_vocab_size": "token_types", "layer_norm_eps": "norm_eps"}


class Bert:
    name = "bert"
    architectures: tuple[str, ...] = ("BertForMaskedLM", "BertForPreTraining")
    ignored: tuple[str, ...] = (r"^cls\.seq_relationship\.", r"^bert\.pooler\.", r"^cls\.predictions\.decoder\.bias$")

    def shape(self, config: Config) -> ModelShape:
        values = _BERT_DEFAULTS | dict(config)
        refuse(values, "is_decoder", False)
        refuse(values, "add_cross_attention", False)
        refuse(values, "position_embedding_type", "absolute")
        width, heads = values["hidden_size"], values["num_attention_heads"]
        return ModelShape(
            **read_keys(values, _BERT_KEYS), kv_heads=heads, head_dim=width // heads, causal=False, positions="learned",
            norm="layer", norm_place="post", activation=activation(values, "hidden_act"), gated=False, qkv_bias=True,
            out_bias=True, ffn_bias=True, embedding_norm=True, head_bias=True, head_transform=True,
        )  # fmt: skip

    def config(self, shape: ModelShape) -> dict[str, Any]:
        return write_keys(self, shape, _BERT_KEYS) | {"hidden_act": ACTIVATIONS[shape.activation]}

    def weight_mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        yield rename("bert.embeddings.word_embeddings.weight", "embedding.weight")
        yield rename("bert.embeddings.position_embeddings.weight", "position.weight")
        yield rename("bert.embeddings.token_type_embeddings.weight", "types.weight")
        yield from linear("bert.embeddings.LayerNorm", "embedding_norm", bias=True)
        for hf, native in layers(shape, "bert.encoder.layer"):
            for name in ("query", "key", "value"):
                yield from linear(f"{hf}.attention.self.{name}", f"{native}.attention.{name}", bias=True)
            yield from linear(f"{hf}.attention.output.dense", f"{native}.attention.out", bias=True)
            yield from linear(f"{hf}.attention.output.LayerNorm", f"{native}.attention_norm", bias=True)
            yield from linear(f"{hf}.intermediate.dense", f"{native}.ffn.up", bias=True)
            yield from linear(f"{hf}.output.dense", f"{native}.ffn.down", bias=True)
            yield from linear(f"{hf}.output.LayerNorm", f"{native}.ffn_norm", bias=True)
        if not shape.head_transform:
            return
        yield from linear("cls.predictions.transform.dense", "transform.linear", bias=True)
        yield from linear("cls.predictions.transform.LayerNorm", "transform.norm", bias=True)
        if shape.tied:
            yield rename("cls.predictions.bias", "head_bias")
        else:
            yield rename("cls.predictions.decoder.weight", "head.weight")
            # transformers saves an untied model's bias twice and reads the decoder's.
            both = ("cls.predictions.decoder.bias", "cls.predictions.bias")
            yield WeightMapping(both, ("head_bias",), lambda tensors: tensors[:1], lambda tensors: tensors * 2)


BERT = Bert()


_T5_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu", "tie_word_embeddings": True,
}  # fmt: skip
_T5_KEYS = {
    "vocab_size": "vocab", "d_model": "width", "d_kv": "head_dim", "d_ff": "ffn", "num_layers": "layers",
    "num_heads": "heads", "relative_attention_num_buckets": "relative_buckets",
    "relative_attention_max_distance": "relative_distance", "layer_norm_epsilon": "norm_eps",
}  # fmt: skip
_T5_NAMES = {"gelu_tanh": "gelu_new"}
_T5_GATED_NAMES = {"gelu_tanh": "gelu", "gelu": "gelu_python"}  # `gated-gelu` means the tanh approximation


class T5Family:
    name = "t5"
    architectures: tuple[str, ...] = ("T5ForConditionalGeneration", "T5WithLMHeadModel")
    # Older files have copies of the embedding and an unused relative bias.
    ignored: tuple[str, ...] = (r"^(en|de)coder\.embed_tokens\.weight$", r"EncDecAttention\.relative_attention_bias")

    def shape(self, config: Config) -> ModelShape:
        values = _T5_DEFAULTS | dict(config)
        refuse(values, "is_encoder_decoder", True)
        refuse(values, "is_decoder", False)
        layers, tied = values["num_layers"], bool(values["tie_word_embeddings"])
        gated, name = _parse_activation(values["feed_forward_proj"])
        # transformers 5 has a key for what older versions derived from tied embeddings.
        scaled = values.get("scale_decoder_outputs", tied)
        return ModelShape(
            **read_keys(values, _T5_KEYS), kv_heads=values["num_heads"], tied=tied, attention_scale=1.0,
            positions="relative", activation=activation({"feed_forward_proj": name}, "feed_forward_proj"), gated=gated,
            logit_scale=values["d_model"] ** -0.5 if scaled else 1.0,
            decoder_layers=layers if values.get("num_decoder_layers") is None else values["num_decoder_layers"],
        )  # fmt: skip

    def config(self, shape: ModelShape) -> dict[str, Any]:
        names, prefix = (_T5_GATED_NAMES, "gated-") if shape.gated else (_T5_NAMES, "")
        return write_keys(self, shape, _T5_KEYS) | {
            "is_encoder_decoder": True, "num_decoder_layers": shape.decoder_layers,
            "feed_forward_proj": prefix + names.get(shape.activation, shape.activation),
            "tie_word_embeddings": shape.tied, "scale_decoder_outputs": shape.logit_scale != 1.0,
        }  # fmt: skip

    def weight_mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        yield rename("shared.weight", "embedding.weight")
        for stack, prefix, first, count in (
            ("encoder", "encoder_", 0, shape.layers), ("decoder", "", shape.layers, shape.decoder_layers),
        ):  # fmt: skip
            bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            yield rename(bias, f"{prefix}relative.weight")
            for i in range(count):
                yield from _t5_block(f"{stack}.block.{i}.layer", f"blocks.{first + i}", shape.gated, stack == "decoder")
            yield rename(f"{stack}.final_layer_norm.weight", f"{prefix}norm.weight")
        if not shape.tied:
            yield rename("lm_head.weight", "head.weight")


def _t5_block(hf: str, native: str, gated: bool, crosses: bool) -> Iterator[WeightMapping]:
    branches = [("SelfAttention", "attention")] + [("EncDecAttention", "cross")] * crosses
    for number, (hf_name, native_name) in enumerate(branches):
        yield rename(f"{hf}.{number}.layer_norm.weight", f"{native}.{native_name}_norm.weight")
        for short, name in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
            yield rename(f"{hf}.{number}.{hf_name}.{short}.weight", f"{native}.{native_name}.{name}.weight")
    last = f"{hf}.{len(branches)}"
    yield rename(f"{last}.layer_norm.weight", f"{native}.ffn_norm.weight")
    inner = (("wi_0", "gate"), ("wi_1", "up")) if gated else (("wi", "up"),)
    for hf_name, native_name in (*inner, ("wo", "down")):
        yield rename(f"{last}.DenseReluDense.{hf_name}.weight", f"{native}.ffn.{native_name}.weight")


def _parse_activation(name: str) -> tuple[bool, str]:
    """Whether `feed_forward_proj` is gated, and the name of its activation."""
    gate, _, activation = name.rpartition("-")
    if gate not in ("", "gated"):
        raise UserError(f"config.json: feed_forward_proj: {name!r} is neither ACTIVATION nor gated-ACTIVATION")
    return gate == "gated", "gelu_new" if name == "gated-gelu" else activation


T5 = T5Family()


# Native names of the mixer's parts -> names in Hugging Face's Mamba2Mixer; the shapes are equal.
MAMBA_NAMES = {
    "input": "in_proj", "conv": "conv1d", "step_bias": "dt_bias", "decay_log": "A_log", "skip": "D",
    "norm": "norm", "out": "out_proj",
}  # fmt: skip
_MAMBA2_DEFAULTS = {
    "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "expand": 2, "conv_kernel": 4,
    "chunk_size": 256, "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False, "time_step_limit": (0.0, float("inf")),
}  # fmt: skip


class Mamba2Family:
    name = "mamba2"
    architectures: tuple[str, ...] = ("Mamba2ForCausalLM",)
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        values = {**_MAMBA2_DEFAULTS, **config}
        refuse(values, "hidden_act", "silu", "swish")
        heads, head_dim, width = int(values["num_heads"]), int(values["head_dim"]), int(need(values, "hidden_size"))
        if heads * head_dim != values["expand"] * width:
            inner = f"num_heads * head_dim is {heads * head_dim}"
            raise UserError(f"config.json: {inner}, expand * hidden_size {values['expand'] * width}: make them equal")
        low, high = map(_number, values["time_step_limit"])
        mamba = Mamba(
            heads, head_dim, int(values["state_size"]), int(values["n_groups"]), int(values["conv_kernel"]),
            int(values["chunk_size"]), bool(values["use_conv_bias"]), bool(values["use_bias"]), (low, high),
        )  # fmt: skip
        return ModelShape(
            int(need(values, "vocab_size")), width, int(need(values, "num_hidden_layers")), heads, heads, head_dim,
            ffn=0, tied=bool(values["tie_word_embeddings"]), norm_eps=float(values["layer_norm_epsilon"]),
            positions="none", mixers=("mamba",), mamba=mamba,
        )  # fmt: skip

    def config(self, shape: ModelShape) -> dict[str, Any]:
        mamba = shape.mamba
        assert mamba is not None, "no state-space layers"
        config = {
            "architectures": [self.architectures[0]], "model_type": self.name, "vocab_size": shape.vocab,
            "hidden_size": shape.width, "num_hidden_layers": shape.layers, "num_heads": mamba.heads,
            "head_dim": mamba.head_dim, "expand": mamba.heads * mamba.head_dim // shape.width,
            "state_size": mamba.state, "n_groups": mamba.groups, "conv_kernel": mamba.conv, "chunk_size": mamba.chunk,
            "use_conv_bias": mamba.conv_bias, "use_bias": mamba.bias, "layer_norm_epsilon": shape.norm_eps,
            "tie_word_embeddings": shape.tied,
        }  # fmt: skip
        # Default limits are omitted: JSON has no infinity, and transformers versions write it differently.
        return config if mamba.dt_limit == (0.0, float("inf")) else config | {"time_step_limit": list(mamba.dt_limit)}

    def weight_mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        assert shape.mamba is not None
        yield rename("backbone.embeddings.weight", "embedding.weight")
        yield rename("backbone.norm_f.weight", "norm.weight")
        if not shape.tied:
            yield rename("lm_head.weight", "head.weight")
        for i in range(shape.layers):
            hf, native = f"backbone.layers.{i}.mixer", f"blocks.{i}.mamba"
            yield rename(f"backbone.layers.{i}.norm.weight", f"blocks.{i}.attention_norm.weight")
            biased = {"input": shape.mamba.bias, "out": shape.mamba.bias, "conv": shape.mamba.conv_bias, "norm": False}
            for native_name, hf_name in MAMBA_NAMES.items():
                if native_name in biased:
                    yield from linear(f"{hf}.{hf_name}", f"{native}.{native_name}", biased[native_name])
                else:
                    yield rename(f"{hf}.{hf_name}", f"{native}.{native_name}")


def _number(value: Any) -> float:
    """transformers 5 writes infinity as an object."""
    return float(value["__float__"] if isinstance(value, dict) else value)


MAMBA2 = Mamba2Family()
