"""The memory section: bytes of a parameter, by hand, and combinations that cannot work."""

import pytest

from bessemer.spec.optimizer import SETTINGS, MemorySpec, OptimizerSpec, memory_problems, optimizer_bytes

EIGHT = 2 * (1 + 4 / 256)


@pytest.mark.parametrize(
    ("memory", "weights", "gradients", "moments", "working", "host"),
    [
        ({}, 4, 4, 8, 2, 0),
        ({"moments": "bf16"}, 4, 4, 4, 2, 0),
        ({"moments": "8bit"}, 4, 4, EIGHT, 2, 0),
        ({"weights": "stochastic"}, 2, 2, 8, 0, 0),
        ({"weights": "kahan"}, 2, 2, 10, 0, 0),
        ({"weights": "stochastic", "moments": "8bit", "update": "in_backward"}, 2, 0, EIGHT, 0, 0),
        ({"offload_optimizer": True}, 4, 4, 0, 2, 8),
        ({"weights": "kahan", "moments": "bf16", "offload_optimizer": True}, 2, 2, 0, 0, 6),
    ],
    ids=str,
)
def test_bytes_of_adamw(memory, weights, gradients, moments, working, host):
    counted = optimizer_bytes(OptimizerSpec(), MemorySpec(**memory))
    found = (counted.weights, counted.gradients, counted.moments, counted.working, counted.host)
    assert found == (weights, gradients, moments, working, host)
    assert counted.device == weights + gradients + moments + working
    assert optimizer_bytes(OptimizerSpec(), MemorySpec(**memory), "fp32").working == 0


def test_bytes_of_the_other_optimizers():
    numbers = {
        "adamw": 2, "adam": 2, "sgd": 1, "adagrad": 1, "rmsprop": 1, "nadam": 2, "radam": 2, "adamax": 2, "lion": 1,
        "adafactor": 0, "muon": 1, "lamb": 2, "lars": 1, "sm3": 1, "schedule_free": 3, "soap": 2,
        "ademamix": 3, "mars": 3, "sophia": 3,  # the gradients of sampled labels are held beside the step's
    }  # fmt: skip
    assert {n: optimizer_bytes(OptimizerSpec(name=n), MemorySpec()).moments / 4 for n in SETTINGS} == numbers
    assert optimizer_bytes(OptimizerSpec(name="sgd", momentum=0.0), MemorySpec()).moments == 0
    assert optimizer_bytes(OptimizerSpec(name="rmsprop", momentum=0.9), MemorySpec()).moments == 8


def faults(memory, precision="auto", **optimizer):
    return dict(memory_problems(OptimizerSpec(**optimizer), MemorySpec(**memory), precision))


def test_what_works_has_no_fault():
    assert faults({}, name="muon") == {}
    assert faults({"weights": "kahan", "moments": "8bit", "offload_optimizer": True}) == {}
    assert faults({"moments": "8bit"}, "fp16", name="lion") == {}
    assert faults({"activations": "full"}, "fp32", name="sgd", veto="host") == {}


def test_what_cannot_work_is_named_with_the_fix():
    found = faults({"moments": "8bit", "update": "in_backward"}, name="sgd")
    assert set(found) == {"moments", "update"} and "optimizer.name: adamw, adam, lion" in found["moments"]
    assert "write precision: bf16" in faults({"weights": "stochastic"}, "fp32")["weights"]
    assert "write precision: bf16" in faults({"update": "in_backward"}, "fp16")["update"]
    assert "remove optimizer.veto (host)" in faults({"update": "in_backward"}, veto="host")["update"]
