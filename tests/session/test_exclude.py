"""A poisoned document in a real file: it is convicted by name, left out of the rest of the run and of the next ones."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bessemer.checkpoint.store import CheckpointStore
from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.session.recovery import incident
from bessemer.session.replay import stream_of
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec

from .conftest import spec_data

Make = Callable[..., RunSpec]
STEPS = 110


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Row 1 is a document like any other, row 2 is random control characters."""
    path = tmp_path_factory.mktemp("noise") / "noise.jsonl"
    bad = "".join(map(chr, random.Random(0).choices(range(1, 32), k=300)))
    path.write_text(json.dumps({"text": "steel iron ore"}) + "\n" + json.dumps({"text": bad}) + "\n")
    return path


@pytest.fixture(scope="module")
def make(corpus: Path, noise: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    runs = tmp_path_factory.mktemp("runs")

    def make_one(name: str, exclude: list[str] | None = None, **parts: Any) -> RunSpec:
        sources = {"words": {"path": [str(corpus)]}, "noise": {"path": [str(noise)], "weight": 0.02}}
        data = {"sources": sources, "context": 32, "validation": 0.0, "exclude": exclude or []}
        guard = {
            "warmup": 8, "window": 64, "loss_sigma": 5, "ladder": {"careful": 4}, **parts.pop("guard", {}),
        }  # fmt: skip
        budget = parts.pop("budget", {"steps": STEPS, "batch": 64})
        return RunSpec.model_validate(
            {**spec_data(name, corpus, runs, guard=guard, budget=budget, **parts), "data": data}
        )

    return make_one


@pytest.fixture(scope="module")
def convicted(make: Make) -> RunSpec:
    """A run that met the document."""
    spec = make("first")
    assert Session(spec).train().kind == "finished"
    return spec


def events(spec: RunSpec, kind: str) -> list[dict[str, Any]]:
    return list(Run(run_folder(spec)).events(kind))


def listed(spec: RunSpec) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder(spec) / "exclusions.jsonl").read_text().splitlines()]


def counts_of_metrics(spec: RunSpec) -> list[int]:
    totals = [record["tokens"] for record in Run(run_folder(spec)).metrics()]
    return [now - before for before, now in zip([0, *totals], totals, strict=False)]


def counts_of_replay(spec: RunSpec) -> list[int]:
    _, stream, _, _ = stream_of(run_folder(spec))
    return [int(stream.step_count(step)) for step in range(len(counts_of_metrics(spec)))]


def steps_with(spec: RunSpec, noise: Path) -> list[int]:
    """Steps in which the bad document has a place, whatever it weighs."""
    _, stream, _, _ = stream_of(run_folder(spec))
    steps = range(len(counts_of_metrics(spec)))
    return [step for step in steps if (str(noise), 2) in {(part.file, part.row) for part in stream.origins(step)}]


def test_the_document_is_convicted_by_name_and_left_out_from_there_on(convicted: RunSpec, noise: Path) -> None:
    (exclude,) = events(convicted, "exclude")
    assert exclude["documents"] == [f"{noise}:2"]
    (entry,) = listed(convicted)
    assert (entry["file"], entry["row"], entry["source"], entry["run"]) == (str(noise), 2, "noise", "first")
    (veto,) = events(convicted, "veto")
    assert entry["step"] == veto["step"] and entry["from_step"] == exclude["step"]
    assert veto["documents"][0]["file"] == str(noise) and veto["documents"][0]["share"] > 0.5
    assert veto["statistics"]["loss_z"] > 5
    found = steps_with(convicted, noise)
    later = [step for step in found if step >= exclude["step"]]
    assert later, "it comes again"
    counts = counts_of_metrics(convicted)
    assert all(counts[step] < 64 for step in later)
    assert [step for step, count in enumerate(counts) if count < 64] == later


def test_a_replay_counts_what_was_counted_in_training(convicted: RunSpec) -> None:
    """Steps before the conviction as they were, steps after it without the document."""
    assert counts_of_replay(convicted) == counts_of_metrics(convicted)


def test_a_run_with_the_list_leaves_its_documents_out_from_the_first_step_on(
    make: Make, convicted: RunSpec, noise: Path
) -> None:
    path = str(run_folder(convicted) / "exclusions.jsonl")
    spec = make("second", [path])
    Session(make("second", [path], budget={"steps": 40, "batch": 64})).train()
    assert Session(spec).train().kind == "finished"  # and once more, from step 40
    assert [event["documents"] for event in events(spec, "excluded")] == [1, 1]
    assert not events(spec, "veto") and not events(spec, "exclusions_offered")
    found = steps_with(spec, noise)
    counts = counts_of_metrics(spec)
    assert found and [step for step, count in enumerate(counts) if count < 64] == found
    assert counts_of_replay(spec) == counts
    bans = CheckpointStore(run_folder(spec) / "checkpoints").committed()[-1][1].guard["bans"]
    assert bans == [["noise", listed(convicted)[0]["document"], 0]]


def test_a_run_that_does_not_use_the_list_is_offered_it(make: Make, convicted: RunSpec) -> None:
    spec = make("third", budget={"steps": 3, "batch": 64})
    Session(spec).train()
    (offered,) = events(spec, "exclusions_offered")
    path = run_folder(convicted) / "exclusions.jsonl"
    assert f"{path} convicts 1 document" in offered["reason"] and "data: {exclude:" in offered["reason"]


def test_an_entry_that_no_longer_fits_is_told_and_bans_nothing(make: Make, noise: Path, tmp_path: Path) -> None:
    stale = tmp_path / "old.jsonl"
    entries = [{"file": "gone.jsonl", "row": 1}, {"file": str(noise), "row": 2, "document_id": "another text"}]
    stale.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    spec = make("fourth", [str(stale)], budget={"steps": 3, "batch": 64})
    assert Session(spec).train().kind == "finished"
    assert [event["documents"] for event in events(spec, "excluded")] == [0]
    told = sorted(event["reason"] for event in events(spec, "exclusion_stale"))
    assert "another text is in that row" in told[0] and told[1].startswith("gone.jsonl:1: not found")


def test_a_list_that_is_none_is_refused_by_line(make: Make, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"file": "a", "row": 1}\nnonsense\n')
    with pytest.raises(UserError, match=r"bad\.jsonl:2: not an exclusion"):
        Session(make("fifth", [str(bad)])).train()
    with pytest.raises(UserError, match=r"missing\.jsonl: cannot be read .* data\.exclude"):
        Session(make("fifth", [str(tmp_path / "missing.jsonl")])).train()


def test_convictions_can_be_written_down_and_not_acted_upon(make: Make, noise: Path) -> None:
    spec = make("sixth", guard={"trial": {"exclude": False}})
    assert Session(spec).train().kind == "finished"
    assert (str(noise), 2) in {(entry["file"], entry["row"]) for entry in listed(spec)}
    assert set(counts_of_metrics(spec)) == {64}
    assert CheckpointStore(run_folder(spec) / "checkpoints").committed()[-1][1].guard["bans"] == []


def test_a_disk_that_refuses_the_list_does_not_end_the_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(incident, "append_exclusions", full)
    spec = make("seventh")
    assert Session(spec).train().kind == "finished"
    assert "the exclusion list" in events(spec, "save_failed")[0]["reason"]
    assert len(events(spec, "veto")) == 1, "the document is left out all the same"
