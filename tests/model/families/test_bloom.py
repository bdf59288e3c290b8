"""BLOOM of transformers and ours are the same model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import Pair, check_all, check_config, check_export, check_logits
from transformers import BloomConfig

from bessemer.errors import UserError
from bessemer.model.families.gpt import BLOOM

BLOOM_560M = {  # as on the Hub: names of two times
    "apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"],
    "layer_norm_epsilon": 1e-5, "masked_softmax_fusion": True, "model_type": "bloom", "n_embed": 1024, "n_inner": None,
    "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100, "pretraining_tp": 1, "seq_length": 2048,
    "skip_bias_add": True, "slow_but_exact": False, "vocab_size": 250880,
}  # fmt: skip


def pair_of(config, seed=0):
    pair = Pair(config, BLOOM, seed)
    for block in pair.theirs_exact.transformer.h:  # its own writes sqrt(2 / pi) with eight digits
        block.mlp.gelu_impl = torch.nn.GELU(approximate="tanh")
    return pair


@pytest.mark.parametrize(("heads", "tied"), [(4, True), (6, False)])
def test_same_model(heads, tied):
    check_all(pair_of(BloomConfig(vocab_size=53, hidden_size=24, n_head=heads, tie_word_embeddings=tied)))


@given(
    heads=st.sampled_from([1, 2, 3, 5, 8]), head_dim=st.sampled_from([3, 4]), layers=st.integers(1, 3),
    tied=st.booleans(), eps=st.sampled_from([1e-5, 1e-3]), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=8, deadline=None)
def test_any_configuration(heads, head_dim, layers, tied, eps, seed):
    config = BloomConfig(
        vocab_size=31, hidden_size=heads * head_dim, n_head=heads, n_layer=layers, tie_word_embeddings=tied,
        layer_norm_epsilon=eps,
    )  # fmt: skip
    pair = pair_of(config, seed)
    check_config(pair)
    check_logits(pair)
    check_export(pair)


def test_old_and_new_files():
    old = BLOOM.shape(BLOOM_560M)
    assert (old.parameters, old.heads, old.max_positions) == (559_214_592, 16, 2048)
    assert BLOOM.shape(BloomConfig(**BLOOM_560M).to_dict()) == old
    assert BLOOM.shape({}) == BLOOM.shape(BloomConfig().to_dict())


@pytest.mark.parametrize("key", ["apply_residual_connection_post_layernorm", "slow_but_exact"])
def test_refused_by_name(key):
    with pytest.raises(UserError, match=f"{key}: True is not supported"):
        BLOOM.shape({key: True})
