"""Mamba-2: state-space mixers alone, without attention, positions or feed-forward parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bessemer.errors import UserError
from bessemer.model.families.family import Config, Piece, need, refuse, same
from bessemer.model.families.llama import linear
from bessemer.model.mamba import HF_NAMES
from bessemer.spec.shape import Mamba, ModelShape

_DEFAULTS = {
    "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "expand": 2, "conv_kernel": 4,
    "chunk_size": 256, "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False, "time_step_limit": (0.0, float("inf")),
}  # fmt: skip


class Mamba2Family:
    name = "mamba2"
    architectures: tuple[str, ...] = ("Mamba2ForCausalLM",)
    ignored: tuple[str, ...] = ()

    def shape(self, config: Config) -> ModelShape:
        said = {**_DEFAULTS, **config}
        refuse(said, "hidden_act", "silu", "swish")
        heads, head_dim, width = int(said["num_heads"]), int(said["head_dim"]), int(need(said, "hidden_size"))
        if heads * head_dim != said["expand"] * width:
            inner = f"num_heads * head_dim is {heads * head_dim}"
            raise UserError(f"config.json: {inner}, and expand * hidden_size {said['expand'] * width}: make them equal")
        low, high = map(_number, said["time_step_limit"])
        mamba = Mamba(
            heads, head_dim, int(said["state_size"]), int(said["n_groups"]), int(said["conv_kernel"]),
            int(said["chunk_size"]), bool(said["use_conv_bias"]), bool(said["use_bias"]), (low, high),
        )  # fmt: skip
        return ModelShape(
            int(need(said, "vocab_size")), width, int(need(said, "num_hidden_layers")), heads, heads, head_dim, ffn=0,
            tied=bool(said["tie_word_embeddings"]), norm_eps=float(said["layer_norm_epsilon"]), positions="none",
            mixers=("mamba",), mamba=mamba,
        )  # fmt: skip

    def config(self, shape: ModelShape) -> dict[str, Any]:
        mamba = shape.mamba
        assert mamba is not None, "no state-space layers"
        found = {
            "architectures": [self.architectures[0]], "model_type": self.name, "vocab_size": shape.vocab,
            "hidden_size": shape.width, "num_hidden_layers": shape.layers, "num_heads": mamba.heads,
            "head_dim": mamba.head_dim, "expand": mamba.heads * mamba.head_dim // shape.width,
            "state_size": mamba.state, "n_groups": mamba.groups, "conv_kernel": mamba.conv, "chunk_size": mamba.chunk,
            "use_conv_bias": mamba.conv_bias, "use_bias": mamba.bias, "layer_norm_epsilon": shape.norm_eps,
            "tie_word_embeddings": shape.tied,
        }  # fmt: skip
        # The usual limits are left out: JSON has no infinity, and versions of transformers write it in two ways.
        return found if mamba.dt_limit == (0.0, float("inf")) else found | {"time_step_limit": list(mamba.dt_limit)}

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        assert shape.mamba is not None
        yield same("backbone.embeddings.weight", "embedding.weight")
        yield same("backbone.norm_f.weight", "norm.weight")
        if not shape.tied:
            yield same("lm_head.weight", "head.weight")
        for i in range(shape.layers):
            theirs, ours = f"backbone.layers.{i}.mixer", f"blocks.{i}.mamba"
            yield same(f"backbone.layers.{i}.norm.weight", f"blocks.{i}.attention_norm.weight")
            biased = {"input": shape.mamba.bias, "out": shape.mamba.bias, "conv": shape.mamba.conv_bias, "norm": False}
            for our, their in HF_NAMES.items():
                if our in biased:
                    yield from linear(f"{theirs}.{their}", f"{ours}.{our}", biased[our])
                else:
                    yield same(f"{theirs}.{their}", f"{ours}.{our}")


def _number(value: Any) -> float:
    """transformers 5 writes infinity as an object."""
    return float(value["__float__"] if isinstance(value, dict) else value)


MAMBA2 = Mamba2Family()
