"""How long a run takes here, and the smaller run that takes 20 minutes."""

from dataclasses import replace

import pytest

from bessemer.errors import UserError
from bessemer.plan.decide import Interval, TrainPlan
from bessemer.plan.expect import ExpectedRun, RunSetup, predict_run
from bessemer.plan.hardware import Machine
from bessemer.plan.local import check_options, estimate_duration, local_json, local_lines, plan_local, rough_time
from bessemer.plan.request import request_from_spec
from bessemer.plan.search.layout import ONE_PROCESS
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import PRESETS, ModelShape, with_vocab

CPU = Machine("cpu", "Some CPU", 16 << 30, 2, {"fp32": 1e11, "bf16": 1e10})
STEPS, ROWS, CONTEXT = 1500, 64, 512


def first_run(machine: Machine = CPU, preset: str = "10M", **spec: object) -> RunSetup:
    training = TrainPlan(
        context=CONTEXT, batch_rows=((0, ROWS),), micro_rows=32, activations="none", total_steps=STEPS, peak_lr=1e-3,
        warmup_steps=30, precision="fp32", weights="fp32", compile="off", evaluate=Interval(100, None),
        evaluate_tokens=ROWS * CONTEXT * 3, save=Interval(100, None), look=Interval(50, None), copy=Interval(32, None),
        mixtures=(),
    )  # fmt: skip
    written = RunSpec.model_validate({"model": preset, "data": {"sources": {"notes": "data/"}}, **spec})
    return RunSetup(written, with_vocab(PRESETS[preset], 8192), training, machine, ONE_PROCESS, 1, peak_flops=1e11)


def at(rate: float, occasion: RunSetup) -> ExpectedRun:
    return predict_run(occasion, [], measured_s=ROWS * CONTEXT / rate)


def test_the_duration_is_that_of_the_steps_left_and_their_evaluations() -> None:
    occasion = first_run()
    tokens = STEPS * ROWS * CONTEXT
    evaluations = 15 * ROWS * CONTEXT * 3 / 3  # a forward pass is a third of a step
    found = estimate_duration(occasion, at(1000.0, occasion))
    assert found is not None and found.smaller is None  # nobody to measure smaller models
    assert found.seconds == pytest.approx((tokens + evaluations) / 1000.0)
    half = estimate_duration(occasion, at(1000.0, occasion), start_step=STEPS // 2)
    assert half is not None and half.seconds == pytest.approx(found.seconds / 2)
    assert str(found) == "about 14 h here (1,000 tokens/s)"
    unknown = replace(at(1000.0, occasion), step_s=None, tokens_per_s=None)
    assert estimate_duration(occasion, unknown) is None


def test_a_long_run_names_the_largest_preset_of_twenty_minutes() -> None:
    measured: list[int] = []
    occasion = first_run(preset="30M")
    rate = 6000.0

    def rate_of(shape: ModelShape) -> float:
        measured.append(shape.width)
        return rate * occasion.shape.flops_per_token(CONTEXT) / shape.flops_per_token(CONTEXT)

    found = estimate_duration(occasion, at(rate, occasion), rate_of=rate_of)
    assert found is not None and found.smaller is not None and found.seconds > 3600
    assert (found.smaller.preset, found.smaller.tokens) == ("3M", None) and 600 < found.smaller.seconds <= 1200
    assert str(found) == "about 2.3 h here (6,000 tokens/s); `model: 3M` takes 19 min"
    assert measured == [192]  # larger presets take too long even at this model's FLOP/s, and are not tried


def test_where_no_preset_is_fast_enough_the_smallest_reads_fewer_tokens() -> None:
    occasion = first_run()
    found = estimate_duration(occasion, at(100.0, occasion), rate_of=lambda shape: 500.0)
    assert found is not None and found.smaller is not None
    assert (found.smaller.preset, found.smaller.seconds) == ("1M", 1200)
    assert str(found).endswith("`model: 1M` with `budget.tokens: 590K` takes 20 min")
    continued = first_run(start_from="runs/other")
    kept = estimate_duration(continued, at(100.0, continued), rate_of=lambda shape: 1e9)
    assert kept is not None and kept.smaller is not None and kept.smaller.preset is None
    assert "; `budget.tokens: 110K` takes 20 min" in str(kept)


def test_short_runs_and_gpus_have_no_suggestion() -> None:
    occasion = first_run()
    quick = estimate_duration(occasion, at(1e5, occasion), rate_of=lambda shape: 1e9)
    assert quick is not None and quick.smaller is None
    gpu = first_run(replace(CPU, device="mps"))
    slow = estimate_duration(gpu, at(100.0, gpu), rate_of=lambda shape: 1e9)
    assert slow is not None and slow.smaller is None


@pytest.mark.parametrize(
    ("seconds", "words"), [(40, "40 s"), (1200, "20 min"), (12_600, "3.5 h"), (198_000, "55 h"), (1_036_800, "12 days")]
)
def test_rough_times(seconds: float, words: str) -> None:
    assert rough_time(seconds) == words


def test_a_spec_is_planned_for_this_machine_as_training_would_decide() -> None:
    spec = RunSpec.model_validate(
        {"model": "10M", "data": {"sources": {"notes": "data/"}, "context": 512}, "budget": {"tokens": "50M"}}
    )
    found = plan_local(request_from_spec(spec), CPU, lambda shape, context, precision: 1000.0, [])
    keys = set(found.plan.decisions)
    assert {"precision", "budget.batch", "budget.micro_batch", "steps", "optimizer.lr"} <= keys
    assert not keys & {"epochs", "evaluate.tokens"}, "what only the data can settle"
    assert found.training.precision == "fp32" and found.training.context == 512
    assert found.tokens == pytest.approx(50e6, rel=0.01) and found.duration is not None
    text = "\n".join(local_lines(found))
    assert "this machine (Some CPU, 2 threads" in text and "about 15 h here (1,000 tokens/s)" in text
    assert "others  --gpus 8xH100" in text and "--budget" in text
    assert local_json(found)["duration"]["seconds"] == found.duration.seconds
    unknown = plan_local(request_from_spec(spec), CPU, lambda shape, context, precision: None, [])
    assert unknown.duration is None and "is not in the catalogue" in "\n".join(local_lines(unknown))
    epochs = spec.model_copy(update={"budget": spec.budget.model_copy(update={"tokens": "auto", "epochs": 2.0})})
    with pytest.raises(UserError, match="a plan reads no data"):
        plan_local(request_from_spec(epochs), CPU, lambda shape, context, precision: 1.0, [])


def test_what_only_gpus_of_the_catalogue_have_is_refused() -> None:
    check_options({"--write": None, "--simulate": False})
    with pytest.raises(UserError, match=r"--simulate: .* write --gpus"):
        check_options({"--write": None, "--simulate": True})
