"""Gemma 2 and the text part of Gemma 3 of transformers and ours are the same models."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import Pair, check_all, check_config, check_export, check_logits, transformers
from transformers import Gemma2Config, Gemma3TextConfig

from bessemer.errors import UserError
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.families.folder import HfFolder, load_weights
from bessemer.model.families.llama import GEMMA2, GEMMA3
from bessemer.model.transformer import Decoder
from bessemer.spec.shape import Rope

SMALL = {
    "vocab_size": 53, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 40, "sliding_window": 5, "query_pre_attn_scalar": 12,
}  # fmt: skip
FAMILIES = {GEMMA2.name: (GEMMA2, Gemma2Config), GEMMA3.name: (GEMMA3, Gemma3TextConfig)}
GEMMA_2_2B = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
    "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32", "vocab_size": 256000,
}  # fmt: skip
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
    "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "vocab_size": 262144,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma2", {}),
        pytest.param(
            "gemma2", {"tie_word_embeddings": False, "attention_bias": True, "attn_logit_softcapping": None},
            marks=pytest.mark.slow,
        ),
        ("gemma3_text", {"sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ],
)  # fmt: skip
def test_same_model(name, changes):
    family, config = FAMILIES[name]
    check_all(Pair(config(**SMALL | changes), family), rounding=1e-3)


@given(
    name=st.sampled_from(sorted(FAMILIES)), kv_heads=st.sampled_from([1, 2]), of=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([4, 8]), windows=st.lists(st.booleans(), min_size=1, max_size=4),
    window=st.sampled_from([1, 3, 64]), scalar=st.sampled_from([4, 8, 24]), cap=st.sampled_from([None, 3.0]),
    final_cap=st.sampled_from([None, 5.0]), tied=st.booleans(), bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=10, deadline=None)
def test_any_configuration(name, kv_heads, of, head_dim, windows, window, scalar, cap, final_cap, tied, bias, seed):
    family, config = FAMILIES[name]
    pair = Pair(
        config(
            vocab_size=31, hidden_size=6 * kv_heads * of, num_hidden_layers=len(windows), head_dim=head_dim,
            num_attention_heads=kv_heads * of, num_key_value_heads=kv_heads, intermediate_size=20,
            layer_types=["sliding_attention" if narrow else "full_attention" for narrow in windows],
            sliding_window=window, query_pre_attn_scalar=scalar, final_logit_softcapping=final_cap,
            attn_logit_softcapping=cap if name == "gemma2" else None, tie_word_embeddings=tied, attention_bias=bias,
        ),
        family, seed,
    )  # fmt: skip
    check_config(pair)
    check_logits(pair, rounding=1e-3)
    check_export(pair)


def test_old_and_new_files():
    two, three = GEMMA2.shape(GEMMA_2_2B), GEMMA3.shape(GEMMA_3_1B)
    assert (two.parameters, two.windows, two.attention_scale) == (2_614_341_888, (4096, 0), None)
    assert (three.parameters, three.windows) == (999_885_952, (512, 512, 512, 512, 512, 0))
    assert (three.rope, three.local_theta) == (Rope(theta=1e6), 1e4)
    for family, config, old in ((GEMMA2, Gemma2Config, GEMMA_2_2B), (GEMMA3, Gemma3TextConfig, GEMMA_3_1B)):
        assert family.shape(config(**old).to_dict()) == family.shape(old)
        assert family.shape({}) == family.shape(config().to_dict())


def test_embedding_is_scaled_in_the_type_of_the_weights():
    """sqrt(3072) is 55.4 in float32 and 55.5 in bfloat16, which Gemma was trained with."""
    pair = Pair(Gemma2Config(**SMALL | {"hidden_size": 12}), GEMMA2)
    tokens = pair.tokens()
    ours, theirs = pair.ours.bfloat16(), pair.theirs.bfloat16()
    assert torch.equal(ours.embed(tokens, AttentionMask()), theirs.model.embed_tokens(tokens))


@pytest.mark.parametrize(
    ("family", "said", "told"),
    [
        (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention: True is not supported"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention: True is not supported"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0 is not supported"),
        (GEMMA2, {"layer_types": ["full_attention"]}, "layer_types"),
        (
            GEMMA3,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention: 'linear' is not supported",
        ),
    ],
)
def test_refused_by_name(family, said, told):
    with pytest.raises(UserError, match=told):
        family.shape(said)


def test_text_part_of_a_multimodal_model(tmp_path):
    """It is refused, and the way out that the refusal names leads to the right weights."""
    text = Gemma3TextConfig(**SMALL, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=4, image_token_index=52
    )
    whole = transformers.Gemma3ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path / "whole")
    saved = HfFolder(tmp_path / "whole").config
    assert saved["architectures"][0] in GEMMA3.architectures
    with pytest.raises(UserError) as refusal:
        GEMMA3.shape(saved)
    command = re.search(r"Gemma3ForCausalLM\..*\)", str(refusal.value)).group()
    known = {"Gemma3ForCausalLM": transformers.Gemma3ForCausalLM}
    eval(command, known | {"FOLDER": tmp_path / "whole", "NEW": tmp_path / "text"})
    folder = HfFolder(tmp_path / "text")
    model = Decoder(GEMMA3.shape(folder.config))
    load_weights(model, folder, GEMMA3)
    inner = whole.model.language_model.layers[1].mlp.up_proj.weight
    assert torch.equal(model.blocks[1].ffn.up.weight, inner)
