"""Where trouble starts: the module and the parameter that were changed are the ones that are named."""

import math

import pytest

from bessemer.trial import measure as layers


@pytest.fixture
def looks(stage):
    job, scene, _ = stage(0, last=34)
    normal = layers.sample_layers(job.engine, scene.batches)

    def make(change):
        change(job.engine.model)
        return layers.compare_layers(layers.sample_layers(job.engine, scene.batches), normal)

    return job, make


def test_the_first_module_that_is_not_finite(looks):
    job, make = looks
    found = make(lambda model: model.blocks[1].attention.query.weight.detach()[0, 0].fill_(math.inf))
    assert (found[0].name, found[0].quantity) == ("blocks.1.attention.query", "non-finite outputs")
    assert found[0].value > 0 == found[0].normal
    assert layers.damaged_weights(job.engine)[0].name == "blocks.1.attention.query.weight"


def test_the_first_module_with_large_outputs_and_the_gradients_that_grew(looks):
    _, make = looks
    found = make(lambda model: model.blocks[1].ffn.up.weight.detach().mul_(50))
    assert (found[0].name, found[0].quantity) == ("blocks.1.ffn.up", "output rms")
    assert found[0].value == pytest.approx(50 * found[0].normal, rel=1e-3)
    assert any(layer.quantity == "gradient norm" for layer in found)


def test_nothing_is_named_where_nothing_changed_and_no_hook_stays(looks):
    job, make = looks
    assert make(lambda model: None) == []
    assert not any(module._forward_hooks for module in job.engine.model.modules())
    assert all(parameter.grad is None for parameter in job.engine.model.parameters())
