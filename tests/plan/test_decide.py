"""The rules behind `auto`, each against numbers worked out by hand, and the plan that a run is resumed with."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.plan.decide import (
    Interval,
    TrainPlan,
    decide_batch,
    decide_context,
    decide_evaluation,
    decide_guard,
    decide_interval,
    decide_lr,
    decide_precision,
    decide_tokens,
    decide_training,
    decide_vocab,
    decide_warmup,
)
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.plan.mixtures import SourceSize, decide_mixtures
from bessemer.plan.schedule import steps_for, tokens_after
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import PRESETS, ModelShape

SHAPE = ModelShape(vocab=1000, width=64, layers=2, heads=2, kv_heads=2, head_dim=32, ffn=256)
PARAMETERS = 1000 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 256 + 2 * 64) + 64  # 195,392
FLOPS_AT_128 = 6 * (PARAMETERS - 5 * 64) + 12 * 2 * 64 * 128  # five norms are no products


def corpus_of(tokens: int) -> dict[str, SourceSize]:
    """The sources of these tests, `web` holding all the tokens."""
    size = SourceSize(tokens, tokens // 128)
    return {"web": size, "code": SourceSize(0, 0), "off": SourceSize(0, 0)}


GPU = Machine("cuda", "NVIDIA H100 80GB HBM3", 80 * 10**9, 8, {"fp32": 50e12, "bf16": 600e12})
CPU = Machine("cpu", "x86_64", 16 * 10**9, 8, {"fp32": 1e11, "bf16": 1.2e11})


def spec_with(**changes: Any) -> RunSpec:
    """A small spec with dotted keys set; `__` stands for the dot."""
    data: dict[str, Any] = {"model": "1M", "data": {"sources": {"web": "data/"}}}
    for key, value in changes.items():
        *sections, last = key.split("__")
        target = data
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
    return RunSpec.model_validate(copy.deepcopy(data))


def test_the_shape_of_these_tests() -> None:
    assert SHAPE.parameters == PARAMETERS == 195_392
    assert SHAPE.flops_per_token(128) == FLOPS_AT_128 == 1_367_040


@pytest.mark.parametrize(
    ("corpus_bytes", "vocab"), [(0, 512), (8_192_000, 512), (8_192_001, 1024), (100_000_000, 8192), (10**12, 65_536)]
)
def test_vocabulary(corpus_bytes: int, vocab: int) -> None:
    """About 16,000 bytes for each token, in powers of two from 512 to 65,536."""
    plan = Plan()
    assert decide_vocab(spec_with(model="125M"), corpus_bytes, plan) == vocab
    assert plan.value("tokenizer.vocab") == vocab


@pytest.mark.parametrize("model", ["1M", {"width": 255, "layers": 1, "heads": 1, "head_dim": 2}])
def test_a_narrow_model_gets_a_small_vocabulary_by_preset_or_by_width(model: Any) -> None:
    plan = Plan()
    assert decide_vocab(spec_with(model=model), 10**12, plan) == 4096
    assert "width of" in plan.decisions["tokenizer.vocab"].reason


@pytest.mark.parametrize(
    ("parameters", "context"),
    [(19_999_999, 256), (20_000_000, 1024), (499_999_999, 1024), (500_000_000, 4096), (70 * 10**9, 4096)],
)
def test_context(parameters: int, context: int) -> None:
    shape = ModelShape(parameters - 8, 1, 0, 1, 1, 1, 0, norm="rms")
    shape = replace(shape, vocab=shape.vocab + parameters - shape.parameters)
    assert decide_context(spec_with(), shape, Plan()) == context


def test_the_context_is_what_the_model_has_positions_for() -> None:
    assert decide_context(spec_with(), replace(PRESETS["1M"], max_positions=128), Plan()) == 128


@pytest.mark.parametrize(("bf16", "value"), [(1.3e11, "fp32"), (1.31e11, "bf16"), (0.0, "fp32"), (None, "fp32")])
def test_precision_by_measured_products(bf16: float | None, value: str) -> None:
    matmul = {"fp32": 1e11} | ({} if bf16 is None else {"bf16": bf16})
    plan = Plan()
    assert decide_precision(spec_with(), Machine("cpu", "x", 1, 1, matmul), plan) == value
    assert plan.decisions["precision"].source == "measured"


@pytest.mark.parametrize(("bf16", "value"), [(1100.0, "fp32"), (1101.0, "bf16")])
def test_precision_by_measured_training_goes_before_products(bf16: float, value: str) -> None:
    machine = Machine("cpu", "x", 1, 1, {"fp32": 1e11, "bf16": 9e11}, {"fp32": 1000.0, "bf16": bf16})
    assert decide_precision(spec_with(), machine, Plan()) == value


def test_precision_that_was_asked_for_or_decided_before() -> None:
    plan, previous = Plan(), Plan()
    assert decide_precision(spec_with(precision="fp32"), GPU, plan) == "fp32"
    assert plan.decisions["precision"].source == "asked"
    previous.add("precision", "fp32", "measured on another machine", "measured")
    assert decide_precision(spec_with(), GPU, Plan(), previous) == "fp32"
    assert decide_precision(spec_with(precision="bf16"), CPU, Plan(), previous) == "bf16"
    assert decide_precision(spec_with(), GPU, Plan(), Plan()) == "bf16"  # a plan that says nothing of it


def test_length_in_tokens() -> None:
    plan = Plan()
    assert decide_tokens(spec_with(), SHAPE, 10**6, plan) == 20 * PARAMETERS
    assert plan.decisions["budget.tokens"].source.startswith("Chinchilla")
    assert decide_tokens(spec_with(budget__tokens="5M"), SHAPE, 10**6, Plan()) == 5_000_000
    assert decide_tokens(spec_with(budget__epochs=2.5), SHAPE, 10**6, Plan()) == 2_500_000
    assert decide_tokens(spec_with(budget__epochs=1e-9), SHAPE, 10**6, Plan()) == 1
    assert decide_tokens(spec_with(budget__steps=7), SHAPE, 10**6, Plan()) is None


def test_batch_by_the_laws() -> None:
    """1e9 tokens of 195,392 parameters: DeepSeek's law 0.292 C^0.3271 gives 24.8K, the Step Law 0.58 D^0.571 79.9K, and
    published runs had 0.5M: the middle is 624 sequences of 128."""
    plan = Plan()
    assert decide_batch(spec_with(), SHAPE, 128, 10**9, plan) == 624
    assert plan.value("budget.batch") == 624 * 128
    assert "the middle of DeepSeek LLM 2024 24.8K" in plan.decisions["budget.batch"].reason
    assert plan.decisions["budget.batch"].source.startswith("DeepSeek")


def test_batch_leaves_a_hundred_steps_but_is_never_below_four_sequences() -> None:
    assert decide_batch(spec_with(), SHAPE, 128, 128 * 1000, Plan()) == 10
    assert decide_batch(spec_with(), SHAPE, 128, 128, Plan()) == 4


def test_a_batch_that_was_asked_for_is_whole_sequences() -> None:
    plan = Plan()
    assert decide_batch(spec_with(budget__batch=1280), SHAPE, 128, 10**9, plan) == 10
    assert plan.decisions["budget.batch"].reason == "written in the spec"
    assert decide_batch(spec_with(budget__batch=1300), SHAPE, 128, 10**9, plan) == 10
    assert plan.value("budget.batch") == 1280
    assert "1,300 rounded to 10 whole sequences of 128" in plan.decisions["budget.batch"].reason


def test_a_batch_smaller_than_a_context_that_was_left_to_the_planner_is_refused() -> None:
    with pytest.raises(UserError, match=r"budget.batch: 127 tokens are fewer than one sequence of 128"):
        decide_batch(spec_with(budget__batch=127), SHAPE, 128, 10**9, Plan())
    changed = spec_with(budget__batch_changes=[{"from_step": 1, "batch": 100}])
    with pytest.raises(UserError, match=r"budget.batch_changes.0.batch: 100 tokens"):
        decide_training(changed, SHAPE, 128, CPU, corpus_of(10**6), 10**4, Plan())


LARGE = 10**9  # tokens of a batch that no law asks for


@pytest.mark.parametrize(
    ("tokens", "lr"),
    [
        (10**15, 7.2e-4),  # DeepSeek's law between published runs and the Step Law: C = 1.172e21, C^0.125 = 430.2
        (10**12, 1.7e-3),  # C = 1.172e18, C^0.125 = 181.4
        (10**9, 3e-3),  # C = 1.172e15 asks for 4.1e-3, over the limit
    ],
)
def test_learning_rate(tokens: int, lr: float) -> None:
    plan = Plan()
    assert decide_lr(spec_with(), SHAPE, tokens, LARGE, plan) == lr
    assert ("kept between" in plan.decisions["optimizer.lr"].reason) == (lr == 3e-3)


def test_the_rate_falls_with_the_root_of_the_batch_and_never_rises_with_it() -> None:
    """At 1e12 tokens the laws ask for batches of 500K and 1.7e-3."""
    plan = Plan()
    rates = [decide_lr(spec_with(), SHAPE, 10**12, batch, plan) for batch in (5000, 125_000, 500_000, 50_000_000)]
    assert rates == [1.7e-4, 8.5e-4, 1.7e-3, 1.7e-3]
    decide_lr(spec_with(), SHAPE, 10**12, 125_000, small := Plan())
    decision = small.decisions["optimizer.lr"]
    assert "at 500K tokens, times the root of 0.25" in decision.reason and "Malladi" in decision.source


def test_lion_gets_a_fifth() -> None:
    adam, lion = (decide_lr(spec_with(optimizer__name=name), SHAPE, 10**12, LARGE, Plan()) for name in ("adam", "lion"))
    assert lion == pytest.approx(adam / 5, rel=0.02)


def test_trained_weights_get_a_third_of_what_suits_their_size() -> None:
    plan, few, enough = Plan(), 10**6, 20 * SHAPE.parameters
    fresh = decide_lr(spec_with(), SHAPE, 10**15, LARGE, Plan())
    for parts in ({"start_from": "x"}, {"model": {"hf": "x"}}):
        spec = spec_with(**parts)
        assert decide_lr(spec, SHAPE, 10**15, LARGE, plan) == pytest.approx(fresh / 3, rel=0.02)
        assert decide_lr(spec, SHAPE, few, LARGE, plan) == decide_lr(spec, SHAPE, enough, LARGE, plan)
    assert "a third of that for trained weights" in plan.decisions["optimizer.lr"].reason
    assert decide_lr(spec_with(start_from="x", optimizer__lr=0.5), SHAPE, 10**9, LARGE, Plan()) == 0.5


def test_a_large_model_that_is_tuned_in_small_batches_gets_what_people_use() -> None:
    shape = PRESETS["7B"]
    found = decide_lr(spec_with(start_from="x"), shape, 10**7, 128 * 512, Plan())
    assert 1e-5 < found < 4e-5  # 2e-5 in the recipes of Alpaca and Tulu 2


def test_learning_rate_has_a_floor_and_can_be_asked_for() -> None:
    assert decide_lr(spec_with(), SHAPE, 10**12, 1, Plan()) >= 1e-6
    assert decide_lr(spec_with(optimizer__lr=0.5), SHAPE, 10**9, LARGE, Plan()) == 0.5


@pytest.mark.parametrize(
    ("warmup", "total", "steps"),
    [
        ("auto", 1000, 40),  # as the second moment needs
        ("auto", 4000, 80),
        ("auto", 10, 1),
        ("auto", 10**6, 2000),
        ("5%", 1000, 50),
        ("0%", 1000, 0),
        ("300 steps", 1000, 300),
        ("10,001 tokens", 1000, 11),
    ],
)
def test_warmup(warmup: str, total: int, steps: int) -> None:
    assert decide_warmup(spec_with(schedule__warmup=warmup), total, 1000, Plan()) == steps


@pytest.mark.parametrize("warmup", ["100%", "1000 steps", "1M tokens"])
def test_a_warmup_as_long_as_the_run_is_refused(warmup: str) -> None:
    with pytest.raises(UserError, match=r"schedule.warmup: 1,000 steps are the whole run of 1,000: write 2%"):
        decide_warmup(spec_with(schedule__warmup=warmup), 1000, 1000, Plan())


@pytest.mark.parametrize(
    ("written", "total", "seconds", "interval"),
    [
        (7, 100, 600.0, Interval(7, None)),
        ("90.0 s", 100, 600.0, Interval(None, 90.0)),
        ("auto", 100, None, Interval(5, None)),
        ("auto", 101, 600.0, Interval(6, 600.0)),
        ("auto", 3, None, Interval(1, None)),
    ],
)
def test_intervals(written: int | str, total: int, seconds: float | None, interval: Interval) -> None:
    plan = Plan()
    assert decide_interval("evaluate.every", written, total, 20, seconds, plan) == interval
    assert plan.decisions["evaluate.every"].source == ("rule" if written == "auto" else "asked")


@pytest.mark.parametrize(
    ("tokens", "held_out", "wanted"),
    [
        (20_000_000, 10**9, 150_000),  # 15 % of the million between two evaluations
        (20_000_000, 100_000, 100_000),
        (1000, 10**9, 8 * 128),
        (1000, 500, 500),
        (1000, 0, 0),
    ],
)
def test_evaluation(tokens: int, held_out: int, wanted: int) -> None:
    assert decide_evaluation(spec_with(), 128, tokens, held_out, Plan()) == wanted
    assert decide_evaluation(spec_with(evaluate__tokens=777), 128, tokens, held_out, Plan()) == 777


def test_looks_and_copies_have_intervals_of_their_own() -> None:
    plan = Plan()
    assert decide_guard(spec_with(), plan) == (Interval(50, 15.0), Interval(32, None))
    rows = {row[0]: row for row in plan.rows()}
    assert rows["guard.look_every"][1] == "50 steps, at most every 15 s" and rows["guard.copy_every"][1] == "32 steps"
    asked = spec_with(guard__look_every="10 steps", guard__copy_every="5 min")
    assert decide_guard(asked, Plan()) == (Interval(10, None), Interval(None, 300.0))


def test_mixtures_and_what_is_really_given() -> None:
    spec = spec_with(
        data__sources={"web": {"path": "a", "weight": 3.0}, "code": "b", "off": {"path": "c", "weight": 0}},
        data__phases=[{"start": 1000, "weights": {"code": 0.7, "web": 0.3}}],
    )
    plan = Plan()
    (first, mixture), (second, later) = decide_mixtures(spec, 128, corpus_of(10**6), 10**6, plan)
    assert (first, mixture.names, mixture.counts) == (0, ("web", "code"), (3, 1))
    assert (second, later.counts) == (1000 // 128, (179, 77))
    assert plan.value("data.mixture@0") == {"web": "3/4", "code": "1/4"}
    # 179/256 against 0.7 is 0.11 % off, 77/256 against 0.3 is 0.26 % off.
    assert "within 0.26%" in plan.decisions["data.mixture@896"].reason
    assert "within 0.00%" in plan.decisions["data.mixture@0"].reason


@pytest.mark.parametrize(("starts", "key", "least"), [([127], 0, 128), ([128, 255], 1, 256)])
def test_phases_within_one_sequence_are_refused(starts: list[int], key: int, least: int) -> None:
    spec = spec_with(data__phases=[{"start": start, "weights": {"web": 1.0}} for start in starts])
    with pytest.raises(UserError, match=rf"data.phases.{key}.start: .* write at least {least}"):
        decide_mixtures(spec, 128, corpus_of(10**6), 10**6, Plan())


phases_of = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), min_size=1, max_size=5)


def build(parts: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """(length, rows) pairs to (from_step, rows)."""
    starts = [sum(length for length, _ in parts[:i]) for i in range(len(parts))]
    return tuple((start, rows) for start, (_, rows) in zip(starts, parts, strict=True))


@given(phases_of, st.integers(1, 5000))
def test_steps_for_is_the_least_that_reads_so_many_sequences(parts: list[tuple[int, int]], sequences: int) -> None:
    phases = build(parts)
    steps = steps_for(phases, sequences)
    assert tokens_after(phases, steps) >= sequences > tokens_after(phases, steps - 1)


@given(phases_of, st.integers(1, 500))
def test_steps_for_undoes_tokens_after(parts: list[tuple[int, int]], steps: int) -> None:
    phases = build(parts)
    assert steps_for(phases, tokens_after(phases, steps)) == steps
    read = sum(next(rows for start, rows in reversed(phases) if start <= step) for step in range(steps))
    assert tokens_after(phases, steps) == read


def decided(previous: Plan | None = None, **changes: Any) -> tuple[TrainPlan, Plan]:
    plan = Plan()
    spec = spec_with(**changes)
    return decide_training(spec, SHAPE, 128, CPU, corpus_of(10**6), 10**4, plan, previous), plan


def test_a_whole_plan() -> None:
    training, plan = decided(budget__tokens="1M", budget__batch=1280)
    assert training.total_steps == 782  # 7,812.5 sequences in tens
    assert training.batch_rows == ((0, 10),)
    assert training.micro_rows == 10
    assert (training.context, training.precision, training.warmup_steps) == (128, "fp32", 40)
    assert training.evaluate == Interval(40, None)
    assert training.save == Interval(40, 600.0)
    assert training.evaluate_tokens == 7500
    assert plan.value("steps") == 782 and plan.value("epochs") == 1.0
    assert all(decision.reason and decision.source for decision in plan.decisions.values())


def test_a_plan_in_steps_with_batch_changes() -> None:
    changes = [{"from_step": 10, "batch": 256}, {"from_step": 20, "batch": 2560}]
    training, plan = decided(budget__steps=30, budget__batch=1280, budget__batch_changes=changes)
    assert training.batch_rows == ((0, 10), (10, 2), (20, 20))
    assert training.total_steps == 30
    assert training.micro_rows == 2  # no more than the smallest batch
    assert plan.value("epochs") == round(128 * (100 + 20 + 200) / 10**6, 3)


def test_a_batch_change_after_the_end_does_not_count() -> None:
    training, _ = decided(budget__steps=9, budget__batch=1280, budget__batch_changes=[{"from_step": 9, "batch": 256}])
    assert training.micro_rows == 10


KEPT = ("precision", "budget.batch", "budget.micro_batch", "optimizer.lr", "evaluate.tokens")


def test_a_resumed_run_keeps_what_it_decided_when_its_budget_grows() -> None:
    before, plan = decided(budget__tokens="1M")
    after, resumed = decided(previous=Plan.from_json(plan.to_json()), budget__tokens="900M")
    fresh, other = decided(budget__tokens="900M")
    assert after.total_steps > before.total_steps
    assert (after.batch_rows, after.micro_rows) == (before.batch_rows, before.micro_rows)
    assert (after.peak_lr, after.evaluate_tokens) == (before.peak_lr, before.evaluate_tokens)
    assert fresh.batch_rows != before.batch_rows  # without the earlier plan it would have changed its mind
    assert all(resumed.decisions[key] == plan.decisions[key] for key in KEPT)
    assert other.value("budget.batch") != plan.value("budget.batch")


def test_what_the_user_writes_goes_before_the_earlier_plan() -> None:
    _, plan = decided(budget__tokens="1M")
    after, _ = decided(
        previous=plan,
        precision="bf16",
        budget__batch=2560,
        budget__micro_batch=5,
        optimizer__lr=0.5,
        evaluate__tokens=999,
    )
    assert (after.precision, after.batch_rows, after.micro_rows) == ("bf16", ((0, 20),), 5)
    assert (after.peak_lr, after.evaluate_tokens) == (0.5, 999)


def test_a_kept_micro_batch_that_no_longer_fits_is_decided_anew() -> None:
    previous = Plan()
    previous.add("budget.micro_batch", 64, "", "")
    assert decided(previous=previous, budget__batch=1280)[0].micro_rows == 10


@given(st.integers(1, 10**7), st.integers(0, 10**9), st.integers(0, 10**7), st.sampled_from([CPU, GPU]))
def test_any_budget_gives_a_plan_that_can_be_trained(tokens: int, corpus: int, held_out: int, machine: Machine) -> None:
    spec = spec_with(budget__tokens=tokens)
    training = decide_training(spec, SHAPE, 128, machine, corpus_of(corpus), held_out, Plan())
    rows = training.batch_rows[0][1]
    assert rows % training.micro_rows == 0
    assert training.total_steps >= 1 and training.total_steps * rows * 128 >= tokens
    assert 1e-5 <= training.peak_lr <= 3e-3
    assert TrainPlan.from_json(training.to_json()) == training


def test_a_rule_of_thumb_says_what_it_rests_on() -> None:
    """What was asked, counted, estimated or measured needs no basis."""
    _, plan = decided(budget__epochs=1)
    _, asked = decided(budget__tokens="1M", budget__batch=1280, optimizer__lr=1e-3)
    facts = {"asked", "counted", "estimate", "measured"}
    for decision in (*plan.decisions.values(), *asked.decisions.values()):
        thumb = decision.source not in facts and not decision.key.startswith("data.mixture")  # which is arithmetic
        assert bool(decision.basis) == thumb, decision
    rows = {row[0]: row for row in plan.rows()}
    assert rows["schedule.warmup"][3].endswith("2,000 steps, established")
    assert rows["optimizer.lr"][3].endswith("open question")  # a model far below those of the laws
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_of_everything_survives_json() -> None:
    training, plan = decided(
        budget__steps=30,
        budget__batch_changes=[{"from_step": 10, "batch": 256}],
        data__phases=[{"start": 1000, "weights": {"web": 1.0}}],
        checkpoint__every="10 min",
    )
    assert TrainPlan.from_json(training.to_json()) == training
    assert Plan.from_json(plan.to_json()) == plan
