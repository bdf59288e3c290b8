"""Mamba-2 is what transformers says it is."""

import json
from dataclasses import replace

import parity
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.model.families.bert_t5_mamba import MAMBA2
from bessemer.model.families.registry import families_for
from bessemer.spec.shape import Mamba, ModelShape

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "n_groups": 2,
    "state_size": 5, "chunk_size": 8,
}  # fmt: skip


def config_of(**more):
    return transformers.Mamba2Config(**SIZES | more)


def test_is_the_model_of_transformers():
    """A row of three chunks, and text from the state."""
    parity.check_all(parity.Pair(config_of(use_bias=True, tie_word_embeddings=True), MAMBA2))


@settings(max_examples=6)
@given(
    st.sampled_from([(2, 16, 2), (8, 8, 4), (8, 6, 3)]), st.integers(1, 4), st.integers(1, 4), st.booleans(),
    st.booleans(), st.booleans(), st.sampled_from([(0.0, float("inf")), (0.01, 0.4), (0.5, float("inf"))]),
)  # fmt: skip
def test_any_configuration(heads, state, conv, biased, conv_biased, tied, limit):
    number, size, expand = heads
    pair = parity.Pair(config_of(
        num_heads=number, head_dim=size, expand=expand, state_size=state, conv_kernel=conv, use_bias=biased,
        use_conv_bias=conv_biased, tie_word_embeddings=tied, time_step_limit=limit,
    ), MAMBA2)  # fmt: skip
    assert pair.shape.mamba.dt_limit == limit
    parity.check_config(pair)
    parity.check_logits(pair)
    parity.check_export(pair)


def test_infinity_as_older_files_write_it():
    old = config_of().to_dict() | {"time_step_limit": [0.0, float("inf")]}
    assert "Infinity" in json.dumps(old)
    assert MAMBA2.shape(json.loads(json.dumps(old))) == MAMBA2.shape(config_of().to_dict())
    assert "Infinity" not in json.dumps(MAMBA2.config(MAMBA2.shape(old)))


@settings(max_examples=20)
@given(st.data())
def test_keys_left_out_mean_the_defaults_of_transformers(data):
    whole = config_of(num_heads=128, head_dim=64, hidden_size=4096).to_dict()
    needed = {"vocab_size", "hidden_size", "num_hidden_layers"}
    left_out = data.draw(st.sets(st.sampled_from(sorted(whole.keys() - needed))))
    part = {key: value for key, value in whole.items() if key not in left_out}
    assert MAMBA2.shape(part) == MAMBA2.shape(transformers.Mamba2Config.from_dict(part).to_dict())


def test_refusals():
    with pytest.raises(UserError, match=r"num_heads \* head_dim is 40, expand \* hidden_size 32"):
        MAMBA2.shape(SIZES | {"num_heads": 5})
    with pytest.raises(UserError, match="hidden_act: 'gelu'"):
        MAMBA2.shape(SIZES | {"hidden_act": "gelu"})


def test_a_native_model_without_attention_leaves_as_one():
    shape = ModelShape(64, 16, 2, 4, 2, 4, ffn=0, mixers=("mamba",), mamba=Mamba(4, 8, 5))
    assert families_for(shape) == [MAMBA2]
    assert families_for(replace(shape, mixers=("mamba", "attention"))) == []
    assert families_for(replace(shape, mamba=Mamba(3, 8, 5))) == []  # its files want a multiple of the width


def test_codestral_mamba_7b():
    """As transformers' defaults are: 7.3B, the model card's number, with its 64 layers of width 4096."""
    assert round(MAMBA2.shape(transformers.Mamba2Config().to_dict()).parameters / 1e9, 1) == 7.3
