"""Llama, Mistral, Qwen2 and Qwen3 are what transformers says they are, over random configurations."""

from dataclasses import replace

import parity
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.model.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CLASSES = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}


def config_of(family, **more):
    return getattr(transformers, CLASSES[family.name])(**SIZES | more)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        (LLAMA, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        (MISTRAL, {"sliding_window": 8, "head_dim": 10}),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        (QWEN3, {"head_dim": 8, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_is_the_model_of_transformers(family, more):
    parity.check_all(parity.Pair(config_of(family, **more), family))


ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 40},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0, "truncate": False},
}


@pytest.mark.parametrize("kind", ROPES)
def test_stretched_positions(kind):
    """Beyond the original context too: 100 positions."""
    rope = {"rope_type": kind, "rope_theta": 500.0, **ROPES[kind]}
    pair = parity.Pair(config_of(LLAMA, rope_parameters=rope), LLAMA)
    assert pair.shape.rope.scaling == kind
    parity.check_config(pair)
    parity.check_logits(pair, length=24)
    parity.check_logits(pair, length=100)


def test_older_files_say_rope_otherwise():
    new = config_of(LLAMA, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **ROPES["llama3"]}).to_dict()
    old = new | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **ROPES["llama3"]}, "torch_dtype": "bfloat16"}
    del old["rope_parameters"]
    assert LLAMA.shape(old) == LLAMA.shape(new)
    assert LLAMA.shape(old).rope.theta == 5e5


@pytest.mark.parametrize("family", [QWEN2, QWEN3], ids=lambda family: family.name)
@pytest.mark.parametrize("full", [0, 1, 2, 28])
def test_older_files_say_windows_otherwise(family, full):
    """The first so many layers see all; newer files name each layer's kind."""
    new = config_of(family, use_sliding_window=True, sliding_window=6, max_window_layers=full).to_dict()
    old = {key: value for key, value in new.items() if key != "layer_types"}
    shape = family.shape(old)
    assert shape == family.shape(new)
    assert [shape.window(layer) for layer in range(3)] == [6 if layer >= full else 0 for layer in range(3)]
    assert family.config(shape)["max_window_layers"] == min(full, 3)


@st.composite
def configs(draw):
    family = draw(st.sampled_from([LLAMA, MISTRAL, QWEN2, QWEN3]))
    kv_heads, group, layers = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2])), draw(st.integers(1, 3))
    heads = kv_heads * group
    more = {
        "vocab_size": draw(st.integers(20, 90)), "hidden_size": heads * draw(st.sampled_from([4, 6])),
        "intermediate_size": draw(st.integers(1, 50)), "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "hidden_act": draw(st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh", "relu"])),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw(st.sampled_from([100.0, 10_000.0, 1e6]))},
    }  # fmt: skip
    if family is not QWEN2:
        more["head_dim"] = draw(st.sampled_from([4, 6, 10]))
    if family in (LLAMA, QWEN3):
        more["attention_bias"] = draw(st.booleans())
    if family is LLAMA:
        more["mlp_bias"] = draw(st.booleans())
    if family is MISTRAL:
        more["sliding_window"] = draw(st.sampled_from([None, 1, 5, 100]))
    if family in (QWEN2, QWEN3) and draw(st.booleans()):
        kinds = st.sampled_from(["full_attention", "sliding_attention"])
        more |= {"use_sliding_window": True, "sliding_window": draw(st.sampled_from([1, 7]))}
        more |= {"layer_types": draw(st.lists(kinds, min_size=layers, max_size=layers))}
    return family, more


@settings(max_examples=25)
@given(configs())
def test_any_configuration(found):
    family, more = found
    pair = parity.Pair(config_of(family, **more), family)
    parity.check_config(pair)
    parity.check_logits(pair)
    parity.check_export(pair)


@settings(max_examples=40)
@given(st.sampled_from([LLAMA, MISTRAL, QWEN2, QWEN3]), st.data())
def test_keys_left_out_mean_the_defaults_of_transformers(family, data):
    kind = getattr(transformers, CLASSES[family.name])
    whole = config_of(family, num_attention_heads=32, hidden_size=4096, num_hidden_layers=30).to_dict()
    needed = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    left_out = data.draw(st.sets(st.sampled_from(sorted(whole.keys() - needed))))
    part = {key: value for key, value in whole.items() if key not in left_out}
    assert family.shape(part) == family.shape(kind.from_dict(part).to_dict())


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA, {"hidden_act": "tanh"}, "hidden_act: 'tanh'"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        (LLAMA, {"rope_scaling": {"type": "spiral"}}, "'spiral'"),
        (MISTRAL, {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        (QWEN2, {"layer_types": ["full_attention", "round_attention", "full_attention"]}, "layer_types"),
        (QWEN3, {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False}, "sliding_window is not set"),
    ],
)
def test_refusals_name_the_key(family, more, message):
    with pytest.raises(UserError, match=message):
        family.shape(SIZES | more)


def test_real_configurations():
    """Llama 3.1 8B, Mistral 7B v0.1 and Qwen3 0.6B, as their files say it."""
    llama = LLAMA.shape({
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    })  # fmt: skip
    assert llama.parameters == 8_030_261_248
    assert (llama.rope.scaling, llama.rope.original, llama.max_positions) == ("llama3", 8192, 131072)
    mistral = MISTRAL.shape({
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
    })  # fmt: skip
    assert (mistral.parameters, mistral.windows) == (7_241_732_096, (4096,))
    qwen = QWEN3.shape({
        "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    })  # fmt: skip
    assert (qwen.parameters, qwen.windows, qwen.qk_norm) == (596_049_920, (0,), "head")


def test_no_llama_is_written_that_transformers_refuses():
    shape = replace(LLAMA.shape(SIZES), width=26)
    with pytest.raises(UserError, match="26 is not a multiple of 4"):
        LLAMA.config(shape)
    assert MISTRAL.shape(MISTRAL.config(shape)) == shape
    tokens = torch.zeros(1, 3, dtype=torch.long)
    assert transformers.MistralForCausalLM(transformers.MistralConfig(**MISTRAL.config(shape)))(tokens).logits.shape
