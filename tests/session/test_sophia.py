"""A run with Sophia, whose curvature comes from labels that are drawn from the model's own logits."""

import json
from collections.abc import Callable

import pytest
import torch

from bessemer.run.directory import Run
from bessemer.session.replay import job_of
from bessemer.session.session import run_folder, train
from bessemer.spec.document import parse_yaml
from bessemer.spec.load import SpecError, validate
from bessemer.spec.schema import RunSpec
from bessemer.trial.replay import replay_to

Make = Callable[..., RunSpec]
SOPHIA = {"name": "sophia", "lr": 0.01, "interval": 3}


def losses(spec: RunSpec) -> list[float]:
    return [record["loss"] for record in Run(run_folder(spec)).metrics()]


def test_it_trains_resumes_and_replays_bit_for_bit(make_spec: Make) -> None:
    schedule = {"length": 12, "warmup": 2}
    parallel = {"device": "cpu", "threads": 1}
    unbroken = make_spec("unbroken", optimizer=SOPHIA, schedule=schedule, budget={"steps": 12}, parallel=parallel)
    half = make_spec("half", optimizer=SOPHIA, schedule=schedule, budget={"steps": 7}, parallel=parallel)
    for spec in (half, half.model_copy(update={"budget": unbroken.budget}), unbroken):
        assert train(spec).kind == "finished"
    once = losses(unbroken)
    assert losses(half) == once and once[-1] < once[0] - 0.5
    job, _ = job_of(run_folder(half))
    curvature = {name: tensor for name, tensor in job.engine.optimizer.state().items() if name.endswith("curvature")}
    assert curvature and not any(bool(tensor.any()) for tensor in curvature.values())
    path = replay_to(job, 12, list(Run(run_folder(half)).metrics()), 0)
    assert [step.loss for step in path] == once
    assert all(bool((tensor > 0).any()) for tensor in curvature.values())


def test_the_labels_do_not_depend_on_the_micro_batch(make_spec: Make) -> None:
    curves = []
    for micro in (1, 4):
        budget = {"steps": 8, "micro_batch": micro}
        spec = make_spec(f"micro-{micro}", optimizer=SOPHIA, budget=budget)
        assert train(spec).kind == "finished"
        curves.append(losses(spec))
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


def test_the_curvature_is_the_square_of_sampled_gradients_times_the_tokens(make_spec: Make) -> None:
    """With labels drawn by hand. The step's own gradients are as they were."""
    job, _ = job_of(run_folder(_trained(make_spec)))
    engine, stream = job.engine, job.data.stream
    batches = stream.micro_batches(3, job.plan.micro_rows, 0, 1)
    named = dict(engine.model.named_parameters())
    for parameter in named.values():
        parameter.grad = torch.full_like(parameter, 0.5)
    before = {k: t.clone() for k, t in engine.optimizer.state().items() if k.endswith("curvature")}
    drawn = []
    sample = engine.objective.sample_targets

    def record(model, feed, seeds):  # type: ignore[no-untyped-def]
        drawn.append(sample(model, feed, seeds))
        return drawn[-1]

    engine.objective.sample_targets = record  # type: ignore[method-assign]
    engine.follow_curvature(batches, stream.step_count(3), 3, torch.zeros(()))
    assert all(bool((p.grad == 0.5).all()) for p in named.values() if p.grad is not None)
    engine.optimizer.discard()
    total = sum(float(feed.weights_BT.sum()) for feed in drawn)
    for feed in drawn:
        logits = engine.objective.logits(engine.model, engine.model(feed.tokens_BT, feed.attention_mask))
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), feed.targets_BT.flatten(), reduction="none")
        ((nll * feed.weights_BT.flatten()).sum() / total).backward()
    for name, parameter in named.items():
        assert parameter.grad is not None
        wanted = 0.99 * before[f"{name}.curvature"] + 0.01 * total * parameter.grad**2
        found = engine.optimizer.state()[f"{name}.curvature"]
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-9)


def _trained(make_spec: Make) -> RunSpec:
    spec = make_spec("short", optimizer=SOPHIA, budget={"steps": 4})
    assert train(spec).kind == "finished"
    return spec


@pytest.mark.parametrize(
    "changes", [{"parallel": {"tp": 2}}, {"memory": {"update": "in_backward"}}, {"objective": "sft"}], ids=str
)
def test_what_it_cannot_train_is_refused(changes: dict[str, object]) -> None:
    spec = {"name": "x", "model": "1M", "data": {"sources": {"a": "x"}}, "optimizer": {"name": "sophia"}, **changes}
    with pytest.raises(SpecError) as error:
        validate(parse_yaml(json.dumps(spec), "x.yaml"))
    assert any("optimizer.name" in problem for problem in error.value.problems)
