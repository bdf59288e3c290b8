"""Looks inside: clean ones raise nothing, each fault raises its own kind, and it names the layer."""

import numpy as np
import pytest

from bessemer.guard.detectors import Detectors
from bessemer.spec.guard import GuardSpec

LAYERS = ["embedding", *(f"blocks.{i}" for i in range(12)), "norm"]
BLOCKS = LAYERS[1:-1]


def look_at(rng, t):
    """A healthy model after t looks: gradients fall, logits settle at 40, entropy at 0.4; noise of 30 %."""
    layers = {}
    for i, name in enumerate(LAYERS):
        noise = np.exp(0.3 * rng.standard_normal(8))
        values = {
            "grad_norm": (0.1 + np.exp(-t / 5)) * (1 + i % 3) * noise[0],
            "weight_norm": 20 + 0.05 * t,
            "update_ratio": 2e-3 * noise[1],
        }
        if name in BLOCKS:
            values |= {
                "rms": (0.5 + 0.2 * i + t / 100) * noise[2],
                "largest": 30 * noise[3],
                "dead": 0.01 * noise[4],
                "saturated": 0.002 * noise[5],
                "logit": (10 + 30 * (1 - np.exp(-t / 20))) * noise[6],
                "entropy": min(1.0, (0.4 + 0.5 * np.exp(-t / 10)) * noise[7] ** 0.3),
            }
        layers[name] = {key: float(value) for key, value in values.items()}
    shares = {name: rng.dirichlet(np.full(8, 5.0)).tolist() for name in BLOCKS}
    return {"layers": layers, "router": shares}


def watching(look_of, looks=60, seed=0):
    rng = np.random.default_rng(seed)
    watch = Detectors(GuardSpec(), None, 10**6)
    watch.settings.lr = 1e-3
    return [alarm for t in range(looks) for alarm in watch.check_layers(50 * t, look_of(rng, t))]


def test_healthy_looks_raise_nothing():
    assert [a for seed in range(8) for a in watching(look_at, seed=seed)] == []


def times(quantity, factor):
    return lambda values: values.update({quantity: values[quantity] * factor})


def becomes(quantity, value):
    return lambda values: values.update({quantity: value})


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("layer_gradient_exploding", times("grad_norm", 200)),
        ("layer_gradient_vanishing", times("grad_norm", 1e-4)),
        ("layer_gradient_vanishing", becomes("grad_norm", 0.0)),
        ("update_large", times("update_ratio", 200)),
        ("update_large", becomes("update_ratio", 0.5)),
        ("update_small", becomes("update_ratio", 1e-10)),
        ("activation_growth", times("rms", 100)),
        ("dead_units", becomes("dead", 0.4)),
        ("saturated_units", becomes("saturated", 0.4)),
        ("attention_logit_growth", times("logit", 8)),
        ("attention_logit_growth", becomes("logit", 3000.0)),
        ("attention_entropy_collapse", becomes("entropy", 0.01)),
        ("nonfinite_layer", becomes("rms", float("nan"))),
    ],
)
def test_each_fault_in_a_layer_is_named_at_its_second_look(kind, change):
    for seed in range(4):
        onset, layer = 20 + seed, f"blocks.{3 * seed}"

        def look(rng, t, onset=onset, layer=layer):
            found = look_at(rng, t)
            if t >= onset:
                change(found["layers"][layer])
            return found

        found = watching(look, seed=seed)
        assert [alarm.kind for alarm in found] == [kind]
        assert found[0].step == 50 * (onset + (kind != "nonfinite_layer"))
        assert list(found[0].finding.evidence["layers"]) == [layer] and layer in found[0].finding.symptom


def test_logits_that_grow_slowly_are_reported_past_the_bound():
    def look(rng, t):
        found = look_at(rng, t)
        found["layers"]["blocks.5"]["logit"] = 40 * 1.025 ** max(0, t - 20)
        return found

    found = watching(look, looks=80)
    assert [a.kind for a in found] == ["attention_logit_growth"]
    assert 50 * 57 <= found[0].step <= 50 * 62  # 100 is passed at look 58


def test_a_router_that_collapses_is_reported_and_an_uneven_one_is_not():
    def look(rng, t, shares):
        found = look_at(rng, t)
        if t >= 20:
            found["router"]["blocks.2"] = shares
        return found

    collapsed = [0.9, 0.1, 0, 0, 0, 0, 0, 0]  # exp(0.325) of 8 experts: 0.17
    assert [a.kind for a in watching(lambda rng, t: look(rng, t, collapsed))] == ["router_collapse"]
    uneven = [0.3, 0.3, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05]
    assert watching(lambda rng, t: look(rng, t, uneven)) == []


def test_a_vetoed_step_has_no_update_and_that_is_no_fault():
    def look(rng, t):
        found = look_at(rng, t)
        if t % 3:
            for values in found["layers"].values():
                values["update_ratio"] = 0.0
        return found

    assert watching(look) == []


def test_one_odd_look_is_not_enough_and_the_fault_can_come_again():
    def look(rng, t):
        found = look_at(rng, t)
        if t in (20, 30, 31, 33, 34, 50, 51):
            found["layers"]["blocks.1"]["dead"] = 0.5
        return found

    assert [a.step for a in watching(look)] == [50 * 31, 50 * 51]
