"""DeepSeek-V2 and V3 are what transformers says they are."""

from dataclasses import replace

import parity
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bessemer.errors import UserError
from bessemer.model.families.experts_llama import DEEPSEEK_V2, DEEPSEEK_V3
from bessemer.model.families.folder import HfFolder, check_folder, expected_shapes
from bessemer.model.families.registry import families_for
from bessemer.model.transformer import Decoder
from bessemer.spec import shape as count

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "kv_lora_rank": 8, "q_lora_rank": 6,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 6, "v_head_dim": 5, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 10, "first_k_dense_replace": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
    "mscale": 0.7, "mscale_all_dim": 1.2, "rope_theta": 100.0,
}  # fmt: skip
BOTH = pytest.mark.parametrize("family", [DEEPSEEK_V2, DEEPSEEK_V3], ids=lambda family: family.name)


def class_of(family):
    return transformers.DeepseekV3Config if family is DEEPSEEK_V3 else transformers.DeepseekV2Config


def config_of(family, **more):
    groups = {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
    if family is DEEPSEEK_V3:
        groups["topk_method"] = "noaux_tc"
    return class_of(family)(**SIZES | groups | more)


@BOTH
def test_is_the_model_of_transformers(family):
    """With groups of experts, biases, and positions stretched as in the published models."""
    scale = {"routed_scaling_factor": 1.7, "attention_bias": True, "rope_parameters": YARN, "aux_loss_alpha": 0.001}
    pair = parity.Pair(config_of(family, **scale), family)
    assert (pair.shape.rope.scaling, pair.shape.moe.groups, pair.shape.moe.balance) == ("yarn", 4, 0.001)
    parity.check_all(pair)
    parity.check_logits(pair, length=60)  # beyond the original context


@st.composite
def configs(draw):
    family = draw(st.sampled_from([DEEPSEEK_V2, DEEPSEEK_V3]))
    groups = draw(st.sampled_from([1, 2, 4]))
    even = 2 if family is DEEPSEEK_V2 else 1  # there transformers rotates complex numbers, in place
    more = {
        "q_lora_rank": draw(st.sampled_from([None, 3])), "kv_lora_rank": even * draw(st.sampled_from([1, 7])),
        "qk_nope_head_dim": even * draw(st.integers(1, 3)), "qk_rope_head_dim": draw(st.sampled_from([2, 4])),
        "v_head_dim": draw(st.integers(1, 9)), "first_k_dense_replace": draw(st.integers(0, 4)),
        "n_group": groups, "topk_group": draw(st.integers(max(1, groups // 2), groups)),
        "num_experts_per_tok": draw(st.integers(1, 4)), "n_shared_experts": draw(st.integers(1, 3)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])), "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()), "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
    }  # fmt: skip
    if family is DEEPSEEK_V3:
        more |= {"rope_interleave": draw(st.booleans()), "norm_topk_prob": draw(st.booleans())}
    else:
        more |= {"topk_method": draw(st.sampled_from(["greedy", "group_limited_greedy"]))}
    if draw(st.booleans()):
        more["rope_parameters"] = YARN | {"mscale_all_dim": draw(st.sampled_from([0.0, 0.7, 1.0]))}
    return family, more


@settings(max_examples=12)
@given(configs())
def test_any_configuration(found):
    family, more = found
    pair = parity.Pair(config_of(family, **more), family)
    parity.check_config(pair)
    parity.check_logits(pair)
    parity.check_export(pair)


@BOTH
@settings(max_examples=20)
@given(st.data())
def test_keys_left_out_mean_the_defaults_of_transformers(family, data):
    whole = config_of(family).to_dict()
    needed = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    needed |= {"num_experts_per_tok"} if family is DEEPSEEK_V2 else set()  # there it has none
    left_out = data.draw(st.sets(st.sampled_from(sorted(whole.keys() - needed))))
    if family is DEEPSEEK_V3:
        left_out -= {"num_key_value_heads"}  # 128 there, which only its own size can have
    part = {key: value for key, value in whole.items() if key not in left_out}
    assert family.shape(part) == family.shape(class_of(family).from_dict(part).to_dict())


def test_greedy_choice_knows_no_groups():
    """Files of DeepSeek-V2-Lite name groups that nobody reads."""
    pair = parity.Pair(config_of(DEEPSEEK_V2, topk_method="greedy"), DEEPSEEK_V2)
    assert (pair.shape.moe.groups, pair.shape.moe.top_groups) == (1, 1)
    parity.check_logits(pair)


def test_the_choice_bias_stays_in_float32():
    """It is a buffer, and a step of 0.001 would be lost in bf16."""
    pair = parity.Pair(config_of(DEEPSEEK_V3), DEEPSEEK_V3)
    bias = pair.ours.get_buffer("blocks.1.ffn.choice_bias")
    saved = load_file(pair.path / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    assert torch.equal(bias, saved)
    assert bias.any()


def test_the_layer_that_predicts_further_tokens_is_left_out(tmp_path):
    """Published files number it after the last, 61; any other tensor too many is refused."""
    (tmp_path / "config.json").write_text("{}")
    with torch.device("meta"):
        model = Decoder(DEEPSEEK_V3.shape(SIZES | {"num_hidden_layers": 61, "first_k_dense_replace": 61}))
    tensors = {name: torch.zeros(shape) for name, shape in expected_shapes(model, DEEPSEEK_V3).items()}
    more = {"model.layers.61.eh_proj.weight": torch.ones(4, 8), "model.layers.61.mlp.gate.weight": torch.ones(8, 4)}
    save_file(tensors | more, tmp_path / "model.safetensors")
    check_folder(model, HfFolder(tmp_path), DEEPSEEK_V3)
    save_file(tensors | {"model.layers.62.enorm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"unexpected 'model.layers.62.enorm.weight'"):
        check_folder(model, HfFolder(tmp_path), DEEPSEEK_V3)


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc'"),
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob: True"),
        (DEEPSEEK_V2, {"mlp_bias": True}, "mlp_bias: True"),
        (DEEPSEEK_V2, {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        (DEEPSEEK_V2, {"scoring_func": "sigmoid"}, "scoring_func: 'sigmoid'"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method: 'greedy'"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq: 2"),
        (DEEPSEEK_V3, {"num_key_value_heads": 2}, "num_key_value_heads: 2"),
        (DEEPSEEK_V3, {"n_shared_experts": 0}, "n_shared_experts: 0"),
    ],
)
def test_refusals_name_the_key(family, more, message):
    with pytest.raises(UserError, match=message):
        family.shape(SIZES | more)


def test_a_native_model_leaves_whatever_its_training_and_unread_keys():
    shape = DEEPSEEK_V3.shape(SIZES | {"n_group": 1, "topk_group": 1})
    moe = replace(shape.moe, bias_rate=0.1, router_z=0.01, balance=0.2, capacity=2.0, group_score="max")
    native = replace(shape, moe=moe, head_dim=6, kv_heads=2)
    assert [family.name for family in families_for(native)] == ["deepseek_v3"]
    again = DEEPSEEK_V3.shape(DEEPSEEK_V3.config(native))
    assert (again.kv_heads, again.head_dim, again.mla) == (4, 10, shape.mla)
    assert families_for(replace(native, moe=replace(moe, dense_layers=(1,)))) == []  # only the first may be plain


LONG = {
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "max_position_embeddings": 163840, "rope_theta": 10000, "attention_bias": False, "hidden_act": "silu",
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "moe_layer_freq": 1, "num_attention_heads": 128, "num_key_value_heads": 128, "rms_norm_eps": 1e-06,
    "seq_aux": True, "aux_loss_alpha": 0.001, "tie_word_embeddings": False, "ep_size": 1, "pretraining_tp": 1,
}  # fmt: skip


def test_deepseek_v3():
    """As its file says it; 671B and 37B active are the paper's numbers, which leave the 62nd layer out."""
    shape = DEEPSEEK_V3.shape(LONG | {
        "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_nextn_predict_layers": 1,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
        "vocab_size": 129280,
    })  # fmt: skip
    assert round(shape.parameters / 1e9) == 671
    assert 37e9 <= count.active_parameters(shape) < 38e9
    assert shape.attention_scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)
    with torch.device("meta"):
        built = sum(parameter.numel() for parameter in Decoder(replace(shape, layers=4)).parameters())
    assert built == replace(shape, layers=4).parameters


def test_deepseek_v2():
    """As its file says it; 236B and 21B active are the paper's numbers."""
    scaling = LONG["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707}
    shape = DEEPSEEK_V2.shape(LONG | {
        "model_type": "deepseek_v2", "first_k_dense_replace": 1, "hidden_size": 5120, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "n_group": 8, "n_routed_experts": 160, "n_shared_experts": 2,
        "norm_topk_prob": False, "num_experts_per_tok": 6, "num_hidden_layers": 60, "routed_scaling_factor": 16.0,
        "scoring_func": "softmax", "topk_group": 3, "topk_method": "group_limited_greedy", "vocab_size": 102400,
        "rope_scaling": scaling,
    })  # fmt: skip
    assert round(shape.parameters / 1e9) == 236
    assert 21e9 <= count.active_parameters(shape) < 22e9
