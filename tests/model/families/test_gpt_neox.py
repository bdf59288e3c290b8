"""GPT-NeoX (Pythia) of transformers and ours are the same model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import Pair, check_all, check_config, check_export, check_logits
from transformers import GPTNeoXConfig

from bessemer.model.families.gpt import GPT_NEOX
from bessemer.spec.shape import Rope

SMALL = {
    "vocab_size": 53, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40,
}  # fmt: skip
PYTHIA_160M = {
    "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072,
    "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 12,
    "num_hidden_layers": 12, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
    "torch_dtype": "float16", "use_parallel_residual": True, "vocab_size": 50304,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{}, {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True, "rotary_pct": 1.0}],
    ids=["parallel", "sequential"],
)
def test_same_model(changes):
    check_all(Pair(GPTNeoXConfig(**SMALL | changes), GPT_NEOX))


@given(
    heads=st.sampled_from([1, 2, 4]), share=st.sampled_from([0.25, 0.5, 1.0]), layers=st.integers(1, 3),
    parallel=st.booleans(), bias=st.booleans(), tied=st.booleans(), base=st.sampled_from([100.0, 10_000.0]),
    scaling=st.sampled_from([None, {"rope_type": "linear", "factor": 2.5}, {"rope_type": "dynamic", "factor": 2.0}]),
    act=st.sampled_from(["gelu", "gelu_new", "relu"]), eps=st.sampled_from([1e-5, 0.1]), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=8, deadline=None)
def test_any_configuration(heads, share, layers, parallel, bias, tied, base, scaling, act, eps, seed):
    config = GPTNeoXConfig(
        vocab_size=31, hidden_size=16 * heads, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=20, rotary_pct=share, rotary_emb_base=base, use_parallel_residual=parallel,
        attention_bias=bias, tie_word_embeddings=tied, rope_scaling=dict(scaling) if scaling else None,
        hidden_act=act, layer_norm_eps=eps, max_position_embeddings=16,
    )  # fmt: skip
    pair = Pair(config, GPT_NEOX, seed)
    check_config(pair)
    check_logits(pair)  # 24 tokens, so that dynamic scaling has something to do
    check_export(pair)


def test_old_and_new_files():
    old = GPT_NEOX.shape(PYTHIA_160M)
    assert old.parameters == 162_322_944
    assert old.rope == Rope(theta=10_000.0, share=0.25)
    assert GPT_NEOX.shape(GPTNeoXConfig(**PYTHIA_160M).to_dict()) == old
    assert GPT_NEOX.shape({}) == GPT_NEOX.shape(GPTNeoXConfig().to_dict())
