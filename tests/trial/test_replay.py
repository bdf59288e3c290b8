"""Recorded steps again: bit for bit the run's own weights, vetoes and rates included."""

import math

import pytest
import torch

from bessemer.errors import UserError
from bessemer.trial.replay import excess_over_spread, first_divergent_step, replay_to, tensor_differences


def weights(job):
    return {name: tensor.clone() for name, tensor in job.state().items()}


def test_a_replay_ends_at_the_run_s_weights_with_its_vetoes_and_rates(stage):
    def spoil(job):
        job.engine.model.norm.weight.grad.fill_(math.nan)

    job, scene, earlier = stage(0, faults={"gradients": {50: spoil}, "rates": {47: 0.5, 55: 3.0}})
    assert scene.history[50]["veto"]
    judged = weights(job)
    earlier[0].load()
    assert tensor_differences(judged, job.state())
    path = replay_to(job, scene.step, scene.history, earlier[0].step)
    assert not tensor_differences(judged, job.state())
    assert [step.step for step in path] == list(range(30, scene.step))
    for step in path:
        record = scene.history[step.step]
        assert (step.loss, step.vetoed) == (record["loss"], bool(record["veto"]))
        assert step.vetoed or step.grad_norm == record["grad_norm"]
    again = [replay_to(job, scene.step, scene.history, 60)]
    assert again == [[]]


def test_other_rates_and_vetoes_change_what_they_say(stage):
    job, scene, earlier = stage(0)
    earlier[1].load()
    start = weights(job)
    path = replay_to(job, 50, scene.history, 45, lr=lambda record: 0.0)
    assert set(tensor_differences(start, job.state())) <= {n for n in start if n.startswith("optimizer.")}
    assert {step.lr for step in path} == {0.0}
    earlier[1].load()
    path = replay_to(job, 50, scene.history, 45, veto=lambda step, loss, norm: True)
    assert all(step.vetoed for step in path) and not tensor_differences(start, job.state())
    assert all(parameter.grad is None for parameter in job.engine.model.parameters())


def test_a_missing_record_is_named(stage):
    job, scene, earlier = stage(0, last=34)
    earlier[0].load()
    with pytest.raises(UserError, match="step 32 is not in the run's metrics"):
        replay_to(job, 34, [record for record in scene.history if record["step"] != 32], 30)


def test_differences_count_elements_and_see_what_is_not_a_number():
    a = {"model.w": torch.tensor([1.0, 2.0, math.nan, 4.0]), "optimizer.w.step": torch.tensor(3.0)}
    b = {"model.w": torch.tensor([1.0, 2.5, math.nan, 4.0]), "optimizer.w.step": torch.tensor(3.0)}
    found = tensor_differences(a, b)
    assert list(found) == ["model.w"]
    assert (found["model.w"].elements, found["model.w"].of, found["model.w"].largest) == (1, 4, 0.5)
    b["model.w"][2] = 0.0
    assert tensor_differences(a, b)["model.w"].largest == math.inf
    b["optimizer.w.step"] += 1
    assert list(tensor_differences(a, b)) == ["model.w", "optimizer.w.step"]


def test_a_difference_is_measured_by_that_of_two_replays():
    zero = {"model.a": torch.zeros(100), "model.b": torch.zeros(100)}
    noise = {name: torch.full((100,), 1e-6) for name in zero}
    found = {"model.a": torch.full((100,), 2e-6), "model.b": torch.zeros(100)}
    found["model.b"][5] = 1e-3
    ratios = excess_over_spread(tensor_differences(found, zero), tensor_differences(noise, zero))
    assert ratios["model.a"] == pytest.approx(2, rel=1e-3) and ratios["model.b"] == pytest.approx(1000, rel=1e-3)
    assert set(excess_over_spread(tensor_differences(found, zero), {}).values()) == {math.inf}


def test_the_first_step_that_does_not_come_back(stage):
    job, scene, earlier = stage(0, last=50)
    earlier[1].load()
    path = replay_to(job, 50, scene.history, 45)

    def first(change):
        records = [{**record, **change.get(record["step"], {})} for record in scene.history]
        return first_divergent_step(records, path, path)

    assert first({}) is None
    assert first({47: {"loss": 9.0}, 49: {"loss": 9.0}}) == 46  # damaged before the pass: by the update before
    assert first({47: {"grad_norm": 9.0}}) == 47
    assert first({45: {"loss": "nan"}}) == 45
