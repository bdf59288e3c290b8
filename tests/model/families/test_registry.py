"""Which family a configuration is of, and which families can hold a native model."""

from dataclasses import replace

import pytest

from bessemer.errors import UserError
from bessemer.model.families.llama import LLAMA, QWEN3
from bessemer.model.families.registry import (
    FAMILIES,
    families_for,
    family_named,
    family_of,
    nearest_difference,
    read_shape,
)
from bessemer.spec.shape import PRESETS, Rope

SHAPE = replace(PRESETS["1M"], vocab=64)


def names(shape):
    return [family.name for family in families_for(shape)]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_is_found_by_its_class_and_by_its_type(model_type):
    family = family_named(model_type)
    assert family.name == model_type
    assert family_of({"model_type": model_type}) is family
    for architecture in family.architectures:
        assert family_of({"architectures": [architecture], "model_type": model_type}) is family
        assert family_of({"architectures": [architecture]}) is family


def test_no_class_belongs_to_two():
    found = [architecture for name in FAMILIES for architecture in family_named(name).architectures]
    assert len(found) == len(set(found))


def test_transformers_knows_them():
    transformers = pytest.importorskip("transformers")
    for name in FAMILIES:
        written = family_named(name).architectures[0]
        assert getattr(transformers, written).config_class.model_type == name


def test_only_the_one_asked_for_is_imported(monkeypatch):
    monkeypatch.setitem(FAMILIES, "broken", "nowhere.BROKEN")
    assert family_of({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}) is LLAMA


def test_the_unknown_is_refused_with_the_way_out():
    with pytest.raises(UserError, match=r"model_type: 'rwkv' is not supported .*\(?llama, qwen3.*wrap: true"):
        family_of({"model_type": "rwkv"})
    with pytest.raises(UserError, match=r"model_type: None"):
        family_of({})
    with pytest.raises(UserError, match=r"LlamaForSequenceClassification is not supported .*\(LlamaForCausalLM\)"):
        family_of({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]})


@pytest.mark.parametrize(
    "wrong",
    [{"hidden_size": "wide"}, {"num_attention_heads": 0}, {"rope_scaling": "yarn"}, {"num_key_value_heads": 3}],
    ids=str,
)
def test_values_of_a_wrong_kind_are_the_files_fault(wrong):
    config = LLAMA.config(SHAPE)
    assert read_shape(config) == (LLAMA, SHAPE)
    with pytest.raises(UserError, match=r"config.json: no valid llama config .*save it again"):
        read_shape(config | wrong)


@pytest.mark.parametrize("preset", PRESETS)
def test_native_presets_are_llamas(preset):
    assert names(replace(PRESETS[preset], vocab=64))[0] == "llama"


def test_a_model_goes_to_those_that_can_hold_it():
    assert LLAMA in families_for(SHAPE)
    assert QWEN3 not in families_for(SHAPE)
    assert names(replace(SHAPE, qk_norm="head"))[0] == "qwen3"
    assert names(replace(SHAPE, qk_norm="full", norm_place="branch")) == ["olmo2"]
    assert names(replace(SHAPE, windows=(64,)))[0] == "mistral"
    assert names(replace(SHAPE, windows=(0, 64), qk_norm="head"))[0] == "qwen3"  # a pattern, said layer by layer there
    assert "phi3" in names(replace(SHAPE, rope=Rope(share=0.5)))


def test_what_none_can_hold_is_named():
    odd = replace(SHAPE, positions="sinusoidal")
    assert families_for(odd) == []
    assert nearest_difference(odd) == "the nearest is llama, which cannot hold positions 'sinusoidal'"
    assert "ntk" in nearest_difference(replace(SHAPE, rope=Rope(scaling="ntk", factor=2.0)))
