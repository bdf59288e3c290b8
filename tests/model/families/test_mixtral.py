"""Mixtral is what transformers says it is, and a native mixture leaves as one."""

from dataclasses import replace

import parity
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.model.families.experts_llama import MIXTRAL
from bessemer.model.families.registry import families_for
from bessemer.spec import shape as count
from bessemer.spec.shape import PRESETS, Moe

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_local_experts": 5,
}  # fmt: skip


def config_of(**more):
    return transformers.MixtralConfig(**SIZES | more)


def test_is_the_model_of_transformers():
    parity.check_all(parity.Pair(config_of(sliding_window=8, num_experts_per_tok=3, head_dim=8), MIXTRAL))


@settings(max_examples=6)
@given(
    st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from([None, 1, 5]),
    st.sampled_from([0.0, 0.001, 0.02, 1 / 3]),
)  # fmt: skip
def test_any_configuration(experts, top_k, kv_heads, tied, window, balance):
    top_k = min(top_k, experts)
    pair = parity.Pair(config_of(
        num_local_experts=experts, num_experts_per_tok=top_k, num_key_value_heads=kv_heads, tie_word_embeddings=tied,
        sliding_window=window, router_aux_loss_coef=round(balance, 12),
    ), MIXTRAL)  # fmt: skip
    parity.check_config(pair)
    parity.check_logits(pair)
    parity.check_export(pair)


def test_the_balance_loss_is_scaled_to_ours():
    """Theirs grows with the experts of a token."""
    shape = MIXTRAL.shape(config_of(num_experts_per_tok=3, router_aux_loss_coef=0.02).to_dict())
    assert shape.moe.balance == pytest.approx(0.06)
    assert MIXTRAL.config(shape)["router_aux_loss_coef"] == 0.02


@settings(max_examples=20)
@given(st.data())
def test_keys_left_out_mean_the_defaults_of_transformers(data):
    whole = config_of(hidden_size=64, num_attention_heads=8).to_dict()
    needed = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    left_out = data.draw(st.sets(st.sampled_from(sorted(whole.keys() - needed))))
    part = {key: value for key, value in whole.items() if key not in left_out}
    assert MIXTRAL.shape(part) == MIXTRAL.shape(transformers.MixtralConfig.from_dict(part).to_dict())


def test_noise_in_the_router_is_refused():
    with pytest.raises(UserError, match=r"router_jitter_noise: 0.1"):
        MIXTRAL.shape(SIZES | {"router_jitter_noise": 0.1})


def test_mixtral_8x7b():
    """As its file says it; 46.7B and 12.9B active are the announcement's numbers."""
    shape = MIXTRAL.shape({
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    })  # fmt: skip
    assert shape.parameters == 46_702_792_704
    assert round(count.active_parameters(shape) / 1e9, 1) == 12.9


def test_a_native_mixture_leaves_as_the_family_that_can_hold_it():
    def names(moe, **more):
        return [family.name for family in families_for(replace(PRESETS["1M"], vocab=64, moe=moe, **more))]

    plain = Moe(4, 2, 48)
    assert names(plain)[0] == "mixtral"
    # How it was trained does not matter: neither losses nor capacity.
    assert names(replace(plain, balance=0.1, router_z=0.001, capacity=1.25))[0] == "mixtral"
    assert names(plain, qk_norm="head") == ["qwen3_moe"]
    assert names(replace(plain, dense_layers=(1,)), qk_norm="head") == ["qwen3_moe"]
    assert names(replace(plain, score="sigmoid")) == []
    assert names(replace(plain, shared=1)) == []


def test_one_piece_for_a_matrix_of_all_experts():
    """Memory holds one stack at a time, and experts keep their order."""
    pair = parity.Pair(config_of(num_hidden_layers=1), MIXTRAL)
    pieces = {piece.native_names: piece for piece in MIXTRAL.weight_mappings(pair.shape)}
    piece = pieces["blocks.0.ffn.up",]
    assert piece.hf_names == tuple(f"model.layers.0.block_sparse_moe.experts.{e}.w3.weight" for e in range(5))
    stack = torch.arange(5.0)[:, None, None].expand(5, 20, 24)
    assert [part[0, 0].item() for part in piece.to_hf([stack])] == [0, 1, 2, 3, 4]
