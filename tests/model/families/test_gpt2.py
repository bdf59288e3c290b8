"""GPT-2 of transformers and ours are the same model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import Pair, check_all, check_config, check_export, check_logits
from safetensors.torch import load_file, save_file
from transformers import GPT2Config

from bessemer.errors import UserError
from bessemer.model.families.folder import HfFolder, complete_names, load_weights
from bessemer.model.families.gpt import GPT2
from bessemer.model.transformer import Decoder

SMALL = {"vocab_size": 53, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False, "n_inner": 24, "scale_attn_weights": False}], ids=["usual", "odd"]
)
def test_same_model(changes):
    check_all(Pair(GPT2Config(**SMALL | changes), GPT2))


@given(
    heads=st.sampled_from([1, 2, 4]), head_dim=st.sampled_from([4, 6]), layers=st.integers(1, 3),
    inner=st.sampled_from([None, 20]), tied=st.booleans(), scaled=st.booleans(), eps=st.sampled_from([1e-5, 1e-3]),
    activation=st.sampled_from(["gelu_new", "gelu", "relu", "silu", "gelu_pytorch_tanh"]), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=8, deadline=None)
def test_any_configuration(heads, head_dim, layers, inner, tied, scaled, eps, activation, seed):
    pair = Pair(
        GPT2Config(
            vocab_size=31, n_embd=heads * head_dim, n_layer=layers, n_head=heads, n_positions=32, n_inner=inner,
            tie_word_embeddings=tied, scale_attn_weights=scaled, layer_norm_epsilon=eps, activation_function=activation,
        ),
        GPT2, seed,
    )  # fmt: skip
    check_config(pair)
    check_logits(pair)
    check_export(pair)


def test_what_the_class_takes_for_missing_keys():
    assert GPT2.shape({}) == GPT2.shape(GPT2Config().to_dict())
    assert GPT2.shape({}).parameters == 124_439_808  # GPT-2 small


@pytest.mark.parametrize("key", ["scale_attn_by_inverse_layer_idx", "add_cross_attention"])
def test_refused_by_name(key):
    assert GPT2.shape({key: False})
    with pytest.raises(UserError, match=f"{key}: True is not supported"):
        GPT2.shape({key: True})


@pytest.mark.parametrize("tied", [True, False])
def test_files_without_the_first_part_of_names(tied):
    """As on the Hub: no `transformer.`, and the masks that old versions saved."""
    pair = Pair(GPT2Config(**SMALL, tie_word_embeddings=tied), GPT2)
    saved = load_file(pair.path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in saved.items()}
    bare |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(2)}
    save_file(bare, pair.path / "model.safetensors")
    folder, model = HfFolder(pair.path), Decoder(pair.shape)
    load_weights(model, folder, GPT2)
    assert all(torch.equal(tensor, pair.ours.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_whole_files_keep_their_names():
    pair = Pair(GPT2Config(**SMALL), GPT2)
    names = set(pair.folder.tensors)
    complete_names(pair.folder, pair.shape, GPT2)
    assert set(pair.folder.tensors) == names
