"""OLMo 2 is what transformers says it is."""

import parity
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.model.families.llama import OLMO2

transformers = pytest.importorskip("transformers")


def config_of(**more):
    sizes = {
        "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    return transformers.Olmo2Config(**sizes | more)


def test_is_the_model_of_transformers():
    parity.check_all(parity.Pair(config_of(attention_bias=True), OLMO2))


@settings(max_examples=5)
@given(st.sampled_from([1, 2, 4]), st.booleans(), st.booleans(), st.sampled_from([1e-6, 1e-2]))
def test_any_configuration(kv_heads, tied, biased, eps):
    more = {"num_key_value_heads": kv_heads, "tie_word_embeddings": tied, "attention_bias": biased, "rms_norm_eps": eps}
    pair = parity.Pair(config_of(**more), OLMO2)
    parity.check_config(pair)
    parity.check_logits(pair)
    parity.check_export(pair)


def test_keys_left_out_mean_the_defaults_of_transformers():
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    part = {key: config_of().to_dict()[key] for key in needed}
    assert OLMO2.shape(part) == OLMO2.shape(transformers.Olmo2Config.from_dict(part).to_dict())


def test_olmo2_1b():
    shape = OLMO2.shape({
        "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 16, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000,
        "tie_word_embeddings": False, "vocab_size": 100352,
    })  # fmt: skip
    assert shape.parameters == 1_484_916_736
