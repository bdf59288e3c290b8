"""The story that the guard was built for: a healthy run, a poisoned shard, a spike; then rollback, a verdict that names
the shard and its rows, recovery, and a report. Everything is real: files, stores, the run, the records."""

import json
import random
import statistics

import pytest

from bessemer.data.stream.exclusions import read_exclusions
from bessemer.run.directory import Run
from bessemer.session.replay import documents_of
from bessemer.session.session import train
from bessemer.spec.schema import RunSpec

# Two runs of 220 steps. Each part of the story is fast in test_incident.py and test_exclude.py.
pytestmark = pytest.mark.slow
STEPS, FIRST_BAD, BAD_STEPS = 220, 160, 5
WORDS = ["the", "steel", "was", "poured", "while", "blower", "watched", "flame", "and", "turned", "vessel", "low"]


def sentence(rng):
    return " ".join(rng.choice(WORDS) for _ in range(40))


def write_shards(folder, poisoned=frozenset()):
    """Two shards of 2,400 documents; the poisoned rows of one of them are noise."""
    rng = random.Random(0)
    folder.mkdir(exist_ok=True)
    for name in ("web-0016", "web-0017"):
        lines = []
        for row in range(1, 2401):  # rows are counted from 1, as in an editor
            text = sentence(rng)
            if name == "web-0017" and row in poisoned:
                noise = random.Random(row)
                text = "".join(chr(noise.randrange(0x4E00, 0x9FFF)) for _ in range(120))
            lines.append(json.dumps({"text": text}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def spec_of(folder, name, **changes):
    """Nothing is held out, and all runs use one tokenizer: with both, the same documents come at the same steps."""
    tokenizer = folder / "runs" / "clean" / "tokenizer.json"
    spec = {
        "name": name, "runs": str(folder / "runs"), "model": {"width": 32, "layers": 1, "heads": 2},
        "tokenizer": {"vocab": 320} if name == "clean" else {"path": str(tokenizer)},
        "budget": {"steps": STEPS, "batch": 16 * 48}, "optimizer": {"lr": 1e-2},
        "data": {
            "context": 48, "validation": 0, "packing": "pad", "padding": {"long": "truncate"},
            "sources": {"web": str(folder / "shards" / "*.jsonl")}, **changes,
        },
        "precision": "fp32", "parallel": {"device": "cpu", "threads": 1},
        "checkpoint": {"every": 50},
    }  # fmt: skip
    return RunSpec.model_validate(spec)


def mean_loss(run):
    return statistics.fmean(record["loss"] for record in list(run.metrics())[-20:])


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """The clean run tells which documents the bad steps read; those of one shard are poisoned, and it is run again."""
    folder = tmp_path_factory.mktemp("story")
    write_shards(folder / "shards")
    assert train(spec_of(folder, "clean")).kind == "finished"
    rows = set()
    for step in range(FIRST_BAD, FIRST_BAD + BAD_STEPS):
        found = documents_of(folder / "runs" / "clean", step)
        rows |= {document["row"] for document in found if document["file"].endswith("web-0017.jsonl")}
    write_shards(folder / "shards", rows)
    outcome = train(spec_of(folder, "poisoned"))
    return folder, rows, outcome


def test_the_spike_is_vetoed_and_rolled_back(story):
    folder, _, outcome = story
    run = Run(folder / "runs" / "poisoned")
    assert outcome.kind == "finished"
    vetoed = [event["step"] for event in run.events("veto")]
    assert vetoed == list(range(FIRST_BAD, FIRST_BAD + BAD_STEPS))
    (back,) = run.events("rollback")
    assert back["step"] == vetoed[-1] and back["to_step"] <= FIRST_BAD - 16
    assert [record["step"] for record in run.metrics()] == list(range(STEPS))


def test_the_verdict_names_the_shard_and_its_rows(story):
    folder, rows, _ = story
    run = Run(folder / "runs" / "poisoned")
    assert {event["verdict"] for event in run.events("trial")} == {"data"}
    convicted = read_exclusions(run.folder / "exclusions.jsonl")
    assert {entry.row for entry in convicted} == rows
    assert all(entry.file.endswith("web-0017.jsonl") for entry in convicted)


def test_the_run_recovers_and_the_report_says_so(story):
    folder, rows, _ = story
    run = Run(folder / "runs" / "poisoned")
    report = json.loads((run.folder / "reports" / f"anomaly-{FIRST_BAD:06d}.json").read_text())
    assert report["trial"]["verdict"] == "data" and report["recovery"]["rejoined_at"] is not None
    assert {action["kind"] for action in report["actions"]} >= {"veto", "rollback", "exclude"}
    accused = {entry["row"] for entry in report["trial"]["accused"] if entry["convicted"]}
    assert accused and accused <= rows
    text = (run.folder / "reports" / f"anomaly-{FIRST_BAD:06d}.md").read_text()
    assert "web-0017.jsonl" in text and "data" in text
    ends = [mean_loss(Run(folder / "runs" / name)) for name in ("poisoned", "clean")]
    assert ends[0] == pytest.approx(ends[1], rel=0.01)


def test_a_later_run_is_offered_the_list_and_leaves_the_documents_out(story):
    folder, rows, _ = story
    assert train(spec_of(folder, "offered")).kind == "finished"
    offers = [event["reason"] for event in Run(folder / "runs" / "offered").events("exclusions_offered")]
    assert any("poisoned/exclusions.jsonl" in line for line in offers)
    listed = str(folder / "runs" / "poisoned" / "exclusions.jsonl")
    assert train(spec_of(folder, "without", exclude=[listed])).kind == "finished"
    run = Run(folder / "runs" / "without")
    (excluded,) = run.events("excluded")
    assert excluded["documents"] == len(rows)
    assert not list(run.events("veto"))
