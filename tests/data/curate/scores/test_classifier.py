"""The steps that use a trained classifier: which documents stay, what they are labelled, and what their key covers."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.data.curate.scores.classifier import Domain, Quality
from bessemer.data.curate.scores.train import train_classifier
from bessemer.data.curate.step import Collected, Drop, is_global, make_step, step_identity
from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.spec.curate.scores import DomainSpec, QualitySpec

SUBJECTS = {
    "sports": "the team won the match after the goal in the second half said the coach of the league",
    "cooking": "chop the onion and fry it in butter then add salt and flour to the pan and stir well",
    "law": "the court held that the party to the contract was liable for damages under the statute",
}


def texts(name: str, count: int = 60) -> list[str]:
    chance = np.random.default_rng(len(name))
    return [" ".join(chance.choice(SUBJECTS[name].split(), 40)) + f" {i}" for i in range(count)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in SUBJECTS:
        (root / name).mkdir()
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts(name))
        (root / name / "a.jsonl").write_text(rows)
    three = {name: [root / name] for name in SUBJECTS}
    train_classifier(three, root / "domain", bits=14, epochs=8)
    train_classifier({"good": [root / "law"], "other": [root / "cooking"]}, root / "quality", bits=14, epochs=8)
    return root


def documents(found: list[str]) -> list[Document]:
    return [Document(text, "f.jsonl", i + 1) for i, text in enumerate(found)]


def here(function: Any, tasks: Any) -> list[Any]:
    return [function(task) for task in tasks]


def run(step: Quality, parts: list[list[str]], folder: Path, batch: int, each: Any = here) -> tuple[list[Any], Any]:
    """As a pipeline does it, with documents in batches."""
    collected = []
    for number, found in enumerate(parts):
        arrays: dict[str, list[Any]] = {}
        for at in range(0, len(found), batch):
            some = documents(found)[at : at + batch]
            for name, array in step.collect(some, np.arange(at, at + len(some))).items():
                arrays.setdefault(name, []).append(array)
        path = folder / f"{number}.npz"
        np.savez(path, **{name: np.concatenate(those) for name, those in arrays.items()})
        collected.append(Collected(number, path, "web", len(found)))
    decisions_by_part, summary = step.resolve(collected, folder, each)
    outcomes = []
    for found, decisions in zip(parts, decisions_by_part, strict=True):
        for at in range(0, len(found), batch):
            some = documents(found)[at : at + batch]
            outcomes += step.apply(some, np.arange(at, at + len(some)), decisions)
            outcomes += [document.labels for document in some]
    return outcomes, summary


def test_quality_keeps_what_is_like_the_good_folder(models: Path, tmp_path: Path) -> None:
    step = Quality(QualitySpec(model=str(models / "quality"), keep=0.5), 0)
    both = [*texts("law", 5), *texts("cooking", 5)]
    outcomes, summary = run(step, [both], tmp_path, batch=100)
    assert outcomes[:5] == [None] * 5
    assert all(isinstance(o, Drop) and o.reason == "quality below 0.5" and o.value < 0.5 for o in outcomes[5:10])
    assert all(0.5 <= labels["quality"] <= 1 for labels in outcomes[10:15]) and outcomes[15:] == [{}] * 5
    assert summary["documents"] == 10 and summary["kept"] == 5


def test_the_best_share_is_the_same_for_any_batches_and_workers(models: Path, tmp_path: Path) -> None:
    parts = [texts("law", 11), texts("cooking", 7) + texts("law", 2), texts("sports", 8)]
    step = Quality(QualitySpec(model=str(models / "quality"), keep="best 25%"), 0)
    whole, summary = run(step, parts, tmp_path, batch=10_000)
    assert summary["kept"] == 7
    with ProcessPoolExecutor(2) as pool:
        split, again = run(step, parts, tmp_path, 10_000, lambda function, tasks: list(pool.map(function, tasks)))
    assert split == whole and again == summary
    by_batch = [
        [outcome for outcome in run(step, parts, tmp_path, batch)[0] if not isinstance(outcome, dict)]
        for batch in (1, 4, 10_000)
    ]
    assert by_batch[0] == by_batch[1] == by_batch[2]
    assert sum(outcome is None for outcome in by_batch[0]) == 7


def test_domain_labels_and_filters(models: Path) -> None:
    found = [texts(name, 1)[0] for name in SUBJECTS]
    some = documents(found)
    assert Domain(DomainSpec(model=str(models / "domain")), 0).apply(some) == [None] * 3
    assert [document.labels["domain"] for document in some] == list(SUBJECTS)
    some = documents(found)
    step = Domain(DomainSpec(model=str(models / "domain"), keep=["law", "cooking"]), 0)
    assert step.apply(some) == [Drop("domain not among those kept", "sports"), None, None]


def test_an_unsure_domain_says_so(models: Path) -> None:
    some = documents(["", texts("law", 1)[0]])
    chances = (
        Domain(DomainSpec(model=str(models / "domain")), 0).model.probabilities([d.text for d in some]).max(axis=1)
    )
    between = float(chances.mean())
    assert chances[0] < between < chances[1]
    step = Domain(DomainSpec(model=str(models / "domain"), min_probability=between, keep=["law"]), 0)
    assert step.apply(some) == [Drop("domain not among those kept", "unsure"), None]
    exactly = Domain(DomainSpec(model=str(models / "domain"), min_probability=float(chances[0])), 0)
    exactly.apply(some)
    assert some[0].labels["domain"] != "unsure"


def test_a_domain_that_the_model_does_not_know_is_refused(models: Path) -> None:
    with pytest.raises(UserError, match=r"domain\.keep: .* has no class 'politics'; it has sports, cooking, law"):
        Domain(DomainSpec(model=str(models / "domain"), keep=["politics"]), 0)


def test_the_key_follows_the_content_of_the_model(models: Path, tmp_path: Path) -> None:
    copy = tmp_path / "m"
    copy.write_bytes((models / "quality").read_bytes())
    spec = QualitySpec(model=str(copy))
    before = step_identity(make_step(spec, 0))
    assert before == step_identity(Quality(QualitySpec(model=str(models / "quality")), 0)) and before[1]
    data = bytearray(copy.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(bytes(data))
    assert step_identity(make_step(spec, 0)) != before
    assert step_identity(make_step(DomainSpec(model=str(models / "domain")), 0))[1]


def test_which_steps_need_the_whole_corpus(models: Path) -> None:
    assert is_global(make_step(QualitySpec(model=str(models / "quality")), 0))
    assert not is_global(make_step(DomainSpec(model=str(models / "domain")), 0))


def test_a_missing_model_is_named_when_the_step_is_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing: no such file"):
        Quality(QualitySpec(model=str(tmp_path / "nothing")), 0)


def test_workers_need_no_torch(models: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from bessemer.data.curate.scores import classifier, perplexity, user_function; "
        f"classifier.load({str(models / 'quality')!r}).scores(['a b']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_tasks_can_be_sent_to_workers(models: Path, tmp_path: Path) -> None:
    step = Quality(QualitySpec(model=str(models / "quality"), keep="best 50%"), 0)

    def pickled(function: Any, tasks: Any) -> list[Any]:
        function, tasks = pickle.loads(pickle.dumps((function, tasks)))
        return [pickle.loads(pickle.dumps(function(task))) for task in tasks]

    _, summary = run(step, [texts("law", 4)], tmp_path, 2, pickled)
    assert summary["kept"] == 2
