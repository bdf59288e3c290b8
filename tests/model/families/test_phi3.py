"""Phi-3 is what transformers says it is: fused matrices, LongRoPE, partly rotated heads, windows."""

import parity
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.model.families.llama import PHI3

transformers = pytest.importorskip("transformers")


def config_of(**more):
    sizes = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None,
        "original_max_position_embeddings": 128,
    }  # fmt: skip
    return transformers.Phi3Config(**sizes | more)


def longrope(original, pairs=4, **more):
    said = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0 + 0.1 * i for i in range(pairs)]}
    said |= {"long_factor": [2.0 + 0.3 * i for i in range(pairs)], **more}
    return {"rope_parameters": said, "original_max_position_embeddings": original}


@pytest.mark.parametrize(
    "more",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75}},
        {"sliding_window": 7, "tie_word_embeddings": True, **longrope(64)},
    ],
    ids=["partly", "longrope"],
)
def test_is_the_model_of_transformers(more):
    parity.check_all(parity.Pair(config_of(**more), PHI3))


@settings(max_examples=15)
@given(
    st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from([0.5, 1.0]), st.sampled_from([None, 1, 9]),
    st.sampled_from([None, 8, 40]),
)  # fmt: skip
def test_any_configuration(kv_heads, tied, share, window, original):
    """Original contexts below and above the 24 positions that are compared."""
    more = {"num_key_value_heads": kv_heads, "tie_word_embeddings": tied, "sliding_window": window}
    if original is None:
        more["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": share}
    else:
        more |= longrope(original, int(8 * share) // 2, partial_rotary_factor=share)
    pair = parity.Pair(config_of(**more), PHI3)
    parity.check_config(pair)
    parity.check_logits(pair)
    parity.check_export(pair)


@pytest.mark.parametrize("word", ["su", "longrope", "yarn"])
def test_older_files_say_rope_otherwise(word):
    """The first files of Phi-3 said `su` and `yarn` of what is LongRoPE."""
    new = config_of(**longrope(64)).to_dict()
    said = new.pop("rope_parameters")
    stretch = {"type": word, "short_factor": said["short_factor"], "long_factor": said["long_factor"]}
    old = new | {"rope_theta": 100.0, "rope_scaling": stretch}
    assert PHI3.shape(old) == PHI3.shape(config_of(**longrope(64)).to_dict())
    if word != "su":  # which transformers 5.22 cannot read
        assert PHI3.shape(old) == PHI3.shape(transformers.Phi3Config.from_dict(old).to_dict())
    assert (PHI3.shape(old).rope.scaling, PHI3.shape(old).rope.factor) == ("longrope", 2.0)


def test_keys_left_out_mean_the_defaults_of_transformers():
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    part = {key: config_of().to_dict()[key] for key in needed}
    assert PHI3.shape(part) == PHI3.shape(transformers.Phi3Config.from_dict(part).to_dict())


def test_the_original_context_left_out_is_4096():
    rope = longrope(64)["rope_parameters"]
    part = config_of(rope_parameters=rope, max_position_embeddings=8192).to_dict()
    del part["original_max_position_embeddings"], part["rope_parameters"]["original_max_position_embeddings"]
    assert (PHI3.shape(part).rope.original, PHI3.shape(part).rope.factor) == (4096, 2.0)
    assert PHI3.shape(part) == PHI3.shape(transformers.Phi3Config.from_dict(part).to_dict())


def test_refusals_name_the_key():
    whole = config_of().to_dict()
    with pytest.raises(UserError, match="attention_bias: True"):
        PHI3.shape(whole | {"attention_bias": True})
    with pytest.raises(UserError, match="'linear': Phi-3 supports only 'longrope'"):
        PHI3.shape(whole | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}})


def test_phi3_mini():
    shape = PHI3.shape({
        "attention_bias": False, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
        "vocab_size": 32064,
    })  # fmt: skip
    assert (shape.parameters, shape.windows) == (3_821_079_552, (2047,))
