"""Falcon of transformers and ours are the same model, in each of its layouts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import Pair, check_all, check_config, check_export, check_logits, logits_of_ours
from transformers import FalconConfig

from bessemer.errors import UserError
from bessemer.model.families.gpt import FALCON

SMALL = {"vocab_size": 53, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}
RW = {"alibi": True, "bias": True, "parallel_attn": False, "multi_query": False}
LAYOUTS = {
    "7B": {},
    "7B, plain heads": {"multi_query": False, "bias": True},
    "40B": NEW,
    "11B": NEW | {"num_ln_in_parallel_attn": 1, "tie_word_embeddings": False, "ffn_hidden_size": 40},
    "RW": RW,
    "RW, rotary": RW | {"alibi": False, "multi_query": True},
}


def pair_of(config, seed=0):
    pair = Pair(config, FALCON, seed)
    if config.alibi:  # with eager attention transformers adds ALiBi twice: in the mask and in the logits
        for model in (pair.theirs, pair.theirs_exact):
            model.config._attn_implementation = "sdpa"
    return pair


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if "," in name else ()) for name in LAYOUTS]
)
def test_same_model(layout):
    check_all(pair_of(FalconConfig(**SMALL | LAYOUTS[layout])))


def test_alibi_is_rounded_where_it_matters():
    """Slopes of 16 heads are no powers of two: in bfloat16 distant keys fall together, as they did in training."""
    pair = pair_of(FalconConfig(**SMALL | RW | {"num_attention_heads": 16, "hidden_size": 64}))
    check_logits(pair, length=300)
    tokens = pair.tokens(1, 300)
    before = logits_of_ours(pair.ours_exact, tokens)
    object.__setattr__(pair.ours_exact.shape, "alibi_rounded", False)
    assert (logits_of_ours(pair.ours_exact, tokens) - before).abs().max() > 0.01


@given(
    layout=st.sampled_from(sorted(LAYOUTS)), groups=st.sampled_from([1, 2, 3]), of=st.sampled_from([1, 2]),
    layers=st.integers(1, 3), tied=st.booleans(), bias=st.booleans(), inner=st.sampled_from([None, 20]),
    scaling=st.sampled_from([None, {"rope_type": "linear", "factor": 2.5}, {"rope_type": "dynamic", "factor": 2.0}]),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=10, deadline=None)
def test_any_configuration(layout, groups, of, layers, tied, bias, inner, scaling, seed):
    said = {
        "vocab_size": 31, "hidden_size": 8 * groups * of, "num_attention_heads": groups * of, "num_kv_heads": groups,
        "num_hidden_layers": layers, "tie_word_embeddings": tied, "bias": bias, "ffn_hidden_size": inner,
        "max_position_embeddings": 16, "rope_scaling": dict(scaling) if scaling else None,
    }  # fmt: skip
    said = LAYOUTS[layout] | said
    if not said.get("multi_query", True):
        said["num_kv_heads"] = None
    pair = pair_of(FalconConfig(**said), seed)
    check_config(pair)
    check_logits(pair)
    check_export(pair)


def test_what_the_class_takes_for_missing_keys():
    assert FALCON.shape({}) == FALCON.shape(FalconConfig().to_dict())
    assert FALCON.shape({}).parameters == 6_921_720_704  # Falcon 7B with tied embeddings


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn: 2 is not supported"),
        (NEW | {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn: 3 is not supported"),
        (NEW | {"parallel_attn": False}, "parallel_attn: false contradicts new_decoder_architecture"),
    ],
)
def test_refused_by_name(said, told):
    with pytest.raises(UserError, match=told):
        FALCON.shape(said)
