"""Qwen3-MoE is what transformers says it is."""

import parity
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.model.families.experts_llama import QWEN3_MOE
from bessemer.spec import shape as count

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts": 6, "num_experts_per_tok": 3,
    "moe_intermediate_size": 10,
}  # fmt: skip


def config_of(**more):
    return transformers.Qwen3MoeConfig(**SIZES | more)


def test_is_the_model_of_transformers():
    more = {"mlp_only_layers": [0], "head_dim": 8, "attention_bias": True, "norm_topk_prob": True}
    parity.check_all(parity.Pair(config_of(**more), QWEN3_MOE))


@st.composite
def configs(draw):
    experts = draw(st.integers(1, 5))
    return {
        "num_experts": experts, "num_experts_per_tok": draw(st.integers(1, experts)),
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4])), "norm_topk_prob": draw(st.booleans()),
        "mlp_only_layers": draw(st.sets(st.integers(0, 2)).map(sorted)),
        "decoder_sparse_step": draw(st.sampled_from([1, 2])), "tie_word_embeddings": draw(st.booleans()),
        "use_sliding_window": draw(st.booleans()), "sliding_window": draw(st.sampled_from([1, 6])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "router_aux_loss_coef": draw(st.sampled_from([0.0, 0.001])),
    }  # fmt: skip


@settings(max_examples=6)
@given(configs())
def test_any_configuration(more):
    pair = parity.Pair(config_of(**more), QWEN3_MOE)
    parity.check_config(pair)
    parity.check_logits(pair)
    parity.check_export(pair)


@settings(max_examples=20)
@given(st.data())
def test_keys_left_out_mean_the_defaults_of_transformers(data):
    whole = config_of(hidden_size=64, num_attention_heads=8).to_dict()
    needed = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    left_out = data.draw(st.sets(st.sampled_from(sorted(whole.keys() - needed))))
    part = {key: value for key, value in whole.items() if key not in left_out}
    assert QWEN3_MOE.shape(part) == QWEN3_MOE.shape(transformers.Qwen3MoeConfig.from_dict(part).to_dict())


def test_earlier_files_name_the_experts_otherwise():
    new = config_of().to_dict()
    old = {key: value for key, value in new.items() if key != "num_local_experts"} | {"num_experts": 6}
    assert "num_local_experts" in new
    assert QWEN3_MOE.shape(old) == QWEN3_MOE.shape(new)


def test_qwen3_30b_a3b():
    """As its file says it; 30.5B and 3.3B active are the model card's numbers."""
    shape = QWEN3_MOE.shape({
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    })  # fmt: skip
    assert shape.parameters == 30_532_122_624
    assert 3.3e9 <= count.active_parameters(shape) < 3.4e9
