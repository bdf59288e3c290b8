"""A plan as a spec: valid, commented throughout, and the same plan again when it is planned."""

from dataclasses import asdict
from pathlib import Path

import pytest

from bessemer.errors import UserError
from bessemer.plan.hardware import parse_cluster
from bessemer.plan.present import spec_text, write_spec
from bessemer.plan.request import fixed_degrees, request_from_spec
from bessemer.plan.search.proposal import Proposal, propose
from bessemer.plan.search.search import FixedDegrees
from bessemer.spec.document import parse_yaml
from bessemer.spec.lints import lint_spec
from bessemer.spec.load import validate
from bessemer.spec.schema import RunSpec

from .plans import plan_on, request

BILLION = 10**9


@pytest.fixture(autouse=True)
def nothing_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def spec_of(text: str) -> RunSpec:
    return validate(parse_yaml(text, "spec.yaml"))


@pytest.mark.parametrize(
    ("model", "gpus"),
    [
        ("10M", "1xL4"),
        ("1B", "1xH200"),
        ("7B", "8xA100-80GB"),
        ("27B", "64xH100"),
        ("405B", "4096xH100"),
        ("1B", "8xV100-32GB"),
    ],
)
def test_a_written_plan_is_a_spec_without_warnings_and_the_same_plan_again(model: str, gpus: str) -> None:
    first = plan_on(model, gpus)
    text = spec_text(first, "bessemer plan")
    spec = spec_of(text)
    assert lint_spec(spec) == []
    again = propose(request_from_spec(spec), first.goal.cluster)
    assert again.shape == first.shape and again.tokens == first.tokens and again.goal.rows == first.goal.rows
    assert again.best.layout == first.best.layout and again.best.micro_rows == first.best.micro_rows
    assert again.seconds == pytest.approx(first.seconds)
    assert spec_of(spec_text(again)).model_dump() == spec.model_dump(), "what is settled stays as it is written"


def test_every_decision_has_its_comment() -> None:
    found = plan_on("27B", "64xH100")
    lines = spec_text(found).splitlines()
    words = " ".join(line.strip().lstrip("# ") for line in lines)
    for decision in found.plan.decisions.values():
        reason = " ".join(decision.reason.split())
        assert reason in words, decision.key
        if decision.basis:
            assert f"{decision.source}; {decision.basis}]" in words, decision.key


def spec(**sections: object) -> RunSpec:
    return RunSpec.model_validate({"model": "7B", "data": {"sources": {"web": "data/"}}, **sections})


def planned(run: RunSpec, gpus: str = "8xA100-80GB") -> Proposal:
    return propose(request_from_spec(run), parse_cluster(gpus))


def test_a_spec_keeps_what_it_says_and_is_told_the_rest() -> None:
    run = spec(
        budget={"tokens": "30B", "batch": "1Mi", "micro_batch": 1}, precision="fp16", parallel={"tp": 2},
        optimizer={"lr": 1e-4}, schedule={"warmup": "3%"}, memory={"activations": "full"},
        checkpoint={"every": "20 min"}, tokenizer={"vocab": 50_000},
    )  # fmt: skip
    run = run.model_copy(update={"data": run.data.model_copy(update={"context": 2048})})
    found = planned(run)
    asked = {key for key, decision in found.plan.decisions.items() if decision.source == "asked"}
    assert asked >= {"data.context", "budget.tokens", "budget.batch", "budget.micro_batch", "precision", "parallel.tp",
                     "optimizer.lr", "schedule.warmup", "memory.activations", "checkpoint.every"}  # fmt: skip
    assert found.best.layout.tp == 2 and found.best.micro_rows == 1 and found.best.activations == "full"
    assert found.goal.context == 2048 and found.goal.rows == 512 and found.shape.vocab == 50_000
    steps = found.plan.value("steps")
    assert steps == -(-30 * BILLION // 2**20) and found.plan.value("schedule.warmup") == round(0.03 * steps)
    decided = {key for key in found.plan.decisions if key.startswith("parallel.")} - asked
    assert "parallel.dp_shard" in decided
    assert found.request.spec.data.sources.keys() == {"web"} and "web: data/" in spec_text(found)


def test_an_optimizer_that_keeps_less_fits_more() -> None:
    plain = planned(spec()).best.needs
    lean = planned(spec(memory={"moments": "8bit"})).best.needs
    assert lean.moments < 0.3 * plain.moments * 2


def test_degrees_that_are_written_are_those_that_are_kept() -> None:
    assert fixed_degrees(spec()) == FixedDegrees()
    assert fixed_degrees(spec(parallel={"tp": 1, "dp_shard": "auto"})) == FixedDegrees(tp=1)
    pipeline = {"pp": 4, "pipeline": {"schedule": "interleaved", "stages": 4}}
    assert fixed_degrees(spec(parallel=pipeline)) == FixedDegrees(pp=4, stages=4)


@pytest.mark.parametrize(
    ("sections", "gpus", "words"),
    [
        ({"parallel": {"tp": 3}}, "9xA100", r"parallel\.tp: 3 does not divide 32 heads.*write 1, or 2, 4"),
        ({"parallel": {"tp": 8}}, "4xA100", r"parallel: tp 8 needs 8 GPUs, and there are 4: write lower degrees"),
        ({"parallel": {"cp": 3}}, "3xA100", r"parallel\.cp: 3 does not divide"),
        ({"parallel": {"pp": 64}}, "64xA100", r"parallel\.pp: .* the model has 32"),
        ({"budget": {"epochs": 1.0}}, "8xA100", r"budget\.epochs: a plan reads no data: write --tokens"),
        ({"budget": {"steps": 10}}, "8xA100", r"budget\.steps: .* write budget\.batch"),
        ({"precision": "fp8"}, "8xA100", r"A100-80GB has no fp8 units: write one of"),
    ],
    ids=str,
)
def test_what_a_spec_cannot_have_is_one_line(sections: dict[str, object], gpus: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as fault:
        planned(spec(**sections), gpus)
    assert "\n" not in str(fault.value)


def test_what_training_does_not_take_is_said() -> None:
    found = planned(spec(precision="fp8"), "8xH100")
    assert any("precision: fp8" in note for note in found.notes)
    assert planned(spec(), "8xH100").notes == ()


def test_trained_weights_get_a_lower_rate() -> None:
    fresh = planned(spec(budget={"tokens": "20B"})).plan.value("optimizer.lr")
    continued = planned(spec(budget={"tokens": "20B"}, start_from="base")).plan.decisions["optimizer.lr"]
    assert continued.value < 0.7 * fresh and "a third" in continued.reason


def test_old_gpus_train_in_fp16() -> None:
    found = plan_on("1B", "8xV100-32GB")
    assert found.goal.precision == "fp16" and "loss scaled" in found.plan.decisions["precision"].reason


def test_nothing_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    write_spec(path, "a: 1\n")
    with pytest.raises(UserError, match="the file exists"):
        write_spec(path, "a: 2\n")
    assert path.read_text() == "a: 1\n"
    with pytest.raises(UserError, match="cannot be written"):
        write_spec(tmp_path / "none" / "run.yaml", "a: 1\n")


def test_decisions_of_words_and_of_a_spec_say_so() -> None:
    words = propose(request("1B", 20 * BILLION), parse_cluster("1xH200")).plan.decisions["budget.tokens"]
    told = planned(spec(budget={"tokens": "20B"}, model="1B"), "1xH200").plan.decisions["budget.tokens"]
    assert asdict(words) | {"reason": ""} == asdict(told) | {"reason": ""}
    assert (words.reason, told.reason) == ("as asked", "written in the spec")
