"""Continued pre-training: a new run from another's weights, what it may not forget, and what it may not touch."""

import json
import pydoc_data.topics
import random
import sysconfig
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bessemer.checkpoint.store import CheckpointStore
from bessemer.checkpoint.tensors import SavedTensors
from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Outcome

from .conftest import spec_data, train_until, write_corpus

Continue = Callable[..., RunSpec]
BATCH = 128


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words that a first run learns, and numbers that it has never seen."""
    folder = tmp_path_factory.mktemp("continue")
    write_corpus(folder / "words.jsonl")
    draw = random.Random(1)
    with (folder / "numbers.jsonl").open("w") as file:
        for _ in range(120):
            file.write(json.dumps({"text": " ".join(str(draw.randint(100, 120)) for _ in range(60))}) + "\n")
    first = RunSpec.model_validate(spec_data("base", folder / "words.jsonl", folder / "runs", budget={"steps": 60}))
    assert Session(first).train().kind == "finished"
    return folder


def newest(folder: Path) -> Path:
    return CheckpointStore(folder / "checkpoints").committed()[-1][0]


@pytest.fixture
def go_on(home: Path, tmp_path: Path) -> Continue:
    """A spec that goes on from the first run with so much of the words, and later with none of them."""

    def make(name: str = "more", words: float = 1.0, then: int | None = None, **parts: Any) -> RunSpec:
        sources = {
            "words": {"path": str(home / "words.jsonl"), "weight": words},
            "numbers": str(home / "numbers.jsonl"),
        }
        phases = [{"start": then * BATCH, "weights": {"numbers": 1.0}}] if then else []
        forget = {"sources": ["words"], "limit": "5%"}
        data = spec_data(name, home, tmp_path / "runs", start_from=str(newest(home / "runs" / "base")), **parts)
        data["data"] |= {"sources": sources, "phases": phases}
        data["guard"] = {"forget": {**forget, **parts.get("guard", {}).get("forget", {})}}
        data["tokenizer"] = {"path": str(home / "runs" / "base" / "tokenizer.json")}
        return RunSpec.model_validate(data)

    return make


def train(spec: RunSpec) -> Outcome:
    return Session(spec).train()


def curve(spec: RunSpec, source: str) -> dict[int, float]:
    return {record["step"]: record["per_source"][source] for record in Run(run_folder(spec)).validations()}


def events(spec: RunSpec, kind: str) -> list[dict[str, Any]]:
    return list(Run(run_folder(spec)).events(kind))


def test_a_run_that_forgets_is_stopped_with_the_verdict(go_on: Continue) -> None:
    spec = go_on(words=0.0)
    outcome = train(spec)
    assert (outcome.kind, outcome.step) == ("stopped", 20)  # the second evaluation beyond the limit
    (alarm,) = events(spec, "alarm")
    evidence, words = alarm["evidence"], curve(spec, "words")
    assert (alarm["alarm"], alarm["severity"], evidence["source"], evidence["since"]) == (
        "forgetting",
        "stop",
        "words",
        10,
    )
    assert (evidence["before"], evidence["now"]) == (words[0], words[20]) and words[20] > 1.05 * words[0]
    assert evidence["mixture"] == {"numbers": 1.0} and "0% of what is read is words" in alarm["cause"]
    assert newest(run_folder(spec)).name == "step-00000020.a1"
    report = (run_folder(spec) / "reports" / "forgetting.md").read_text()
    assert outcome.reason.split(";")[0] in report and f"| 20 | {words[20]:.4f} |" in report and alarm["fix"] in report
    again = train(spec)  # nothing was changed: it forgets on, and is stopped at its next evaluation
    assert (again.kind, again.step) == ("stopped", 30)


def test_a_mixture_that_keeps_what_was_known_goes_through(go_on: Continue) -> None:
    spec = go_on(words=1.0)
    assert train(spec).kind == "finished"
    assert not events(spec, "alarm")
    words, numbers = curve(spec, "words"), curve(spec, "numbers")
    assert numbers[40] < numbers[0] - 1 and words[40] < 1.05 * words[0]
    last = list(Run(run_folder(spec)).validations())[-1]
    assert last["rise"] == {"words": pytest.approx(words[40] / words[0] - 1)}
    figure = ElementTree.parse(run_folder(spec) / "reports" / "forgetting.svg").getroot()
    assert figure.tag == "{http://www.w3.org/2000/svg}svg"
    told = {node.text for node in figure.iter("{http://www.w3.org/2000/svg}text")}
    assert {"words", "numbers", "limit of words", "step"} <= told


def test_a_note_lets_the_run_go_on(go_on: Continue) -> None:
    spec = go_on(words=0.0, guard={"forget": {"action": "note"}})
    assert train(spec).kind == "finished"
    (alarm,) = events(spec, "alarm")
    assert (alarm["step"], alarm["severity"]) == (20, "note")


def test_a_rollback_ends_at_the_last_checkpoint_that_remembers(go_on: Continue) -> None:
    """Saves are three times as frequent as evaluations: without its tag the good one would be deleted by then."""
    spec = go_on(
        then=26, budget={"steps": 80}, evaluate={"every": 12, "tokens": 512}, guard={"forget": {"action": "rollback"}},
        checkpoint={"every": 4, "keep_last": 2, "keep_best": False},
    )  # fmt: skip
    outcome = train(spec)
    words = curve(spec, "words")
    (back,), (alarm,) = events(spec, "rollback"), events(spec, "alarm")
    good = max(step for step in words if words[step] <= 1.05 * words[0])
    assert alarm["severity"] == "rollback" and good >= 24
    assert outcome.kind == "stopped" and outcome.step == back["to_step"] <= good
    assert good - back["to_step"] <= 4 and back["abandoned"]
    assert newest(run_folder(spec)).name == back["origin"]
    assert f"went back to {back['origin']}" in (run_folder(spec) / "reports" / "forgetting.md").read_text()
    train(spec)
    assert events(spec, "started")[-1]["resumed_from"] == back["origin"]
    assert curve(spec, "words")[0] == words[0]


def test_without_a_checkpoint_from_before_a_rollback_stops_where_it_is(go_on: Continue) -> None:
    spec = go_on(words=0.0, guard={"forget": {"action": "rollback"}})
    outcome = train(spec)
    assert (outcome.kind, outcome.step) == ("stopped", 20)
    assert "found no checkpoint from before" in outcome.reason and not events(spec, "rollback")


def test_a_resumed_run_is_judged_as_an_unbroken_one(go_on: Continue) -> None:
    """Interrupted after the first evaluation beyond the limit, and before the second."""
    how: dict[str, Any] = {
        "then": 22, "budget": {"steps": 60}, "guard": {"forget": {"limit": "30%"}}, "schedule": {"warmup": "2%"}
    }  # fmt: skip
    broken, whole = go_on("broken", **how), go_on("whole", **how)
    assert train_until(broken, 44).kind == "interrupted"
    outcome, expected = train(broken), train(whole)
    assert (outcome.kind, outcome.step) == (expected.kind, expected.step) == ("stopped", 50)
    (alarm,), (other,) = events(broken, "alarm"), events(whole, "alarm")
    assert alarm["evidence"] == other["evidence"]


def test_a_source_without_a_held_out_part_is_refused_before_training(go_on: Continue) -> None:
    with pytest.raises(
        UserError, match=r"guard\.forget\.sources: 'wrods' has no held-out part \(there are: words, numb"
    ):
        train(go_on(guard={"forget": {"sources": ["wrods"]}}))


def test_frozen_layers_keep_every_bit_and_the_plan_says_what_trains(go_on: Continue, home: Path) -> None:
    freeze = ["embedding", "blocks.0.attention"]
    spec = go_on(optimizer={"freeze": freeze}, budget={"steps": 10}, guard={"forget": {"limit": "100%"}})
    assert train(spec).kind == "finished"
    before, after = SavedTensors(newest(home / "runs" / "base")), SavedTensors(newest(run_folder(spec)))
    for name, tensor in before.items():
        if name.startswith("model."):
            still = name.startswith(("model.embedding.", "model.blocks.0.attention."))
            assert tensor.equal(after[name]) == still, name
    assert not any(name.startswith("optimizer.embedding") for name in after)
    plan = {d["key"]: d for d in json.loads((run_folder(spec) / "plan.json").read_text())["decisions"]}
    assert "parameters train; the head is the embedding" in plan["optimizer.freeze"]["reason"]
    more = spec.model_copy(update={"budget": spec.budget.model_copy(update={"steps": 14})})
    outcome = train(more)  # and it resumes
    assert (outcome.kind, outcome.step) == ("finished", 14)


# The whole story on real text: Python's own library, then its reference manual.

CONTEXT, STORY_BATCH = 64, 2048


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt some Python."""
    folder = tmp_path_factory.mktemp("library")
    with (folder / "manual.jsonl").open("w") as file:
        for text in pydoc_data.topics.topics.values():
            for start in range(0, len(text), 3000):
                file.write(json.dumps({"text": text[start : start + 3000]}) + "\n")
    assert Session(story(folder, "base", {"general": 1.0}, [], 300, 6e-3)).train().kind == "finished"
    return folder


def story(
    folder: Path, name: str, weights: dict[str, float], phases: list[dict[str, Any]], steps: int, lr: float, **more: Any
) -> RunSpec:
    code = [str(path) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:90]]
    paths = {"general": {"path": code, "format": "source"}, "domain": {"path": str(folder / "manual.jsonl")}}
    return RunSpec.model_validate({
        "name": name, "runs": str(folder / "runs"), "tokenizer": {"vocab": 512},
        "model": {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 160},
        "data": {
            "sources": {name: {**paths[name], "weight": weight} for name, weight in weights.items()},
            "phases": phases, "context": CONTEXT, "validation": "10%",
        },
        "budget": {"steps": steps, "batch": STORY_BATCH}, "optimizer": {"lr": lr}, "precision": "fp32",
        "parallel": {"device": "cpu", "threads": 1}, "evaluate": {"every": 20, "tokens": "32K"},
        "checkpoint": {"every": 20}, **more,
    })  # fmt: skip


def continued(folder: Path, name: str, weights: dict[str, float], phases: list[dict[str, Any]]) -> RunSpec:
    base = folder / "runs" / "base"
    return story(
        folder, name, weights, phases, 180, 2e-3, start_from=str(newest(base)),
        tokenizer={"path": str(base / "tokenizer.json")}, guard={"forget": {"sources": ["general"], "limit": "5%"}},
    )  # fmt: skip


def told(spec: RunSpec, outcome: Outcome) -> tuple[list[float], list[float]]:
    general, domain = list(curve(spec, "general").values()), list(curve(spec, "domain").values())
    print(f"\n{spec.name}: {outcome.kind}, {outcome.reason}")
    for step, a, b in zip(curve(spec, "general"), general, domain, strict=True):
        print(f"  step {step:3}  general {a:.4f} ({a / general[0] - 1:+.1%})  domain {b:.4f}")
    return general, domain


@pytest.mark.slow
def test_three_phases_learn_the_domain_and_keep_the_rest(library: Path) -> None:
    phases = [
        {"start": 60 * STORY_BATCH, "weights": {"general": 0.5, "domain": 0.5}},
        {"start": 120 * STORY_BATCH, "weights": {"general": 0.3, "domain": 0.7}},
    ]
    spec = continued(library, "phases", {"general": 0.6, "domain": 0.4}, phases)
    outcome = Session(spec).train()
    general, domain = told(spec, outcome)
    assert outcome.kind == "finished" and not events(spec, "alarm")
    assert domain[-1] < domain[0] - 0.5 and max(general) < 1.05 * general[0]
    figure = (run_folder(spec) / "reports" / "forgetting.svg").read_text()
    assert all(word in figure for word in ("general", "domain", "data mixture 60", "data mixture 120"))


@pytest.mark.slow
def test_the_wrong_mixture_is_stopped_by_the_guard(library: Path) -> None:
    spec = continued(library, "wrong", {"general": 0.0, "domain": 1.0}, [])
    outcome = Session(spec).train()
    general, domain = told(spec, outcome)
    assert outcome.kind == "stopped" and outcome.step < 100
    assert general[-1] > 1.05 * general[0] and domain[-1] < domain[0]
    assert "general is being forgotten" in outcome.reason
    assert "0% of what is read is general" in events(spec, "alarm")[0]["cause"]
