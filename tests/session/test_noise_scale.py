"""The gradient noise scale that a run measures, and the rule that ends a run by its forecast."""

from collections.abc import Callable

import pytest

from bessemer.diagnose.gradients import estimate_noise
from bessemer.plan.batch_ramp import ramp_of_run
from bessemer.run.directory import Run
from bessemer.session.replay import job_of
from bessemer.session.session import run_folder, train
from bessemer.spec.checks import check_stop_rules
from bessemer.spec.schema import RunSpec

Make = Callable[..., RunSpec]


def test_it_is_that_of_the_first_micro_batch_and_changes_no_loss(make_spec: Make) -> None:
    budget = {"steps": 20, "micro_batch": 1}
    plain, measured = make_spec("plain", budget=budget), make_spec("noise", budget=budget, observe={"noise_every": 2})
    for spec in (plain, measured):
        assert train(spec).kind == "finished"
    records = list(Run(run_folder(measured)).metrics())
    assert [r["loss"] for r in records] == [r["loss"] for r in Run(run_folder(plain)).metrics()]
    assert [r["step"] for r in records if "noise" in r] == list(range(0, 20, 2))
    job, _ = job_of(run_folder(measured))  # with the first weights
    engine, sizes = job.engine, []
    for batches in ([job.data.stream.micro_batches(0, 1)[0]], job.data.stream.micro_batches(0, 1)):
        inputs = engine.inputs(batches)
        tokens = sum(part.count for part in inputs)
        norm = engine.reduce(engine.compute_gradients(inputs, tokens))
        engine.discard_gradients()
        sizes.append((tokens, float(norm) ** 2))
    signal, noise = estimate_noise(sizes[:1], sizes[1])
    assert records[0]["noise"] == pytest.approx(noise, rel=1e-3)
    assert records[0]["gradient_square"] == pytest.approx(signal, rel=1e-2)
    assert len(ramp_of_run(Run(run_folder(measured)), None, None).windows) == 1


def test_a_run_whose_loss_is_forecast_above_the_limit_ends_there(make_spec: Make) -> None:
    """Far above; and one that is not goes on to its end."""
    ends = {}
    for limit in (0.01, 50.0):
        spec = make_spec(f"limit-{limit}", budget={"steps": 160, "stop": {"forecast": limit}}, evaluate={"every": 40})
        outcome = train(spec)
        assert outcome.kind == "finished"
        ends[limit] = (outcome.step, outcome.reason)
    step, reason = ends[0.01]
    assert step < 160 and reason.startswith("budget.stop.forecast: the final loss is forecast at ")
    assert ends[50.0] == (160, "the budget is spent")


def test_a_forecast_rule_is_refused_where_there_is_no_law_or_no_evaluation(make_spec: Make) -> None:
    stop = make_spec(budget={"steps": 8, "stop": {"forecast": 2.0}})
    assert not list(check_stop_rules(stop))
    for changes in ({"objective": "sft"}, {"data": stop.data.model_copy(update={"validation": 0.0})}):
        [(path, _)] = check_stop_rules(stop.model_copy(update=changes))
        assert path == ("budget", "stop", "forecast")
