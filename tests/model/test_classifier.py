"""Classifiers: a head of labels on any body, as transformers has it (parity: families/test_bert.py)."""

import pytest
import torch

from bessemer.model.classifier import classifier_families, head_of_folder, without_head
from bessemer.model.transformer import Decoder, init_weights
from bessemer.spec.classify import ClassifySpec, as_classifier
from bessemer.spec.shape import ModelShape

SEQUENCE, TOKEN = ClassifySpec(labels=["a", "b", "c", "d"]), ClassifySpec(kind="token", labels=["a", "b", "c", "d"])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", [SEQUENCE, TOKEN], ids=["sequence", "token"])
def test_only_the_head_is_another(shape_of, spec, causal):
    """Also where the language model has a head of its own, with a bias and a layer before it."""
    plain = shape_of(causal=causal, tied=False, head_bias=True, head_transform=True)
    shape = as_classifier(plain, spec)
    model = Decoder(shape)
    own = {name for name, _ in model.named_parameters()} - {name for name, _ in Decoder(plain).named_parameters()}
    sizes = {name: tuple(p.shape) for name, p in model.named_parameters() if name.startswith("head")}
    biased = spec.kind == "token" or not causal
    assert sizes == {"head.weight": (4, shape.width)} | ({"head_bias": (4,)} if biased else {})
    assert not own  # the pooler has the place of the layer before the head
    assert shape.pooler == (spec.kind == "sequence" and not causal) == hasattr(model.transform, "linear")
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    assert model.logits(model(torch.zeros(2, 6, dtype=torch.int64))).shape == (2, 6, 4)
    assert without_head(shape) == without_head(plain)


def test_every_parameter_learns(shape_of):
    model = Decoder(as_classifier(shape_of(causal=False), SEQUENCE))
    init_weights(model, 1)
    model.logits(model(torch.arange(12).view(2, 6))).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_the_shape_of_a_language_model_is_saved_as_before(shape_of):
    shape = shape_of()
    assert "labels" not in shape.to_dict() and "pooler" not in shape.to_dict()
    classifier = as_classifier(shape, SEQUENCE)
    assert ModelShape.from_dict(classifier.to_dict()) == classifier


def test_which_families_can_be_written(shape_of):
    assert "llama" in [family.name for family in classifier_families(as_classifier(shape_of(), SEQUENCE))]
    assert head_of_folder({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, shape_of()) is None
