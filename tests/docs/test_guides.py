"""The pages for newcomers say what is true: keys of the migration tables exist, the plans of the scaling guide work."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bessemer import plan_run
from bessemer.cli.main import app
from bessemer.errors import UserError
from bessemer.spec.hints import our_key
from bessemer.spec.load import load_spec, spec_key
from bessemer.spec.schema import OBJECTIVES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MIGRATION, SCALING, COMPARISON = ((DOCS / f"{name}.md").read_text() for name in ("migration", "scaling", "comparison"))
SECTIONS = re.split(r"\n## ", MIGRATION)
KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)*")


def table(section: str) -> list[list[str]]:
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


@pytest.mark.parametrize("section", SECTIONS[3:], ids=lambda section: section.splitlines()[0])
def test_the_keys_of_the_migration_tables_exist(section: str) -> None:
    rows = table(section)
    assert len(rows) > 8
    for row in rows:
        for name in re.findall(r"`([^`]+)`", row[1]):
            if name.startswith("bessemer ") or name == "parallel":
                continue
            key, _, value = name.partition(": ")
            assert KEY.fullmatch(key) and spec_key(key) == key, name
            assert key != "objective" or value in OBJECTIVES, name


def test_the_program_translates_what_the_table_of_trainer_says() -> None:
    section = next(section for section in SECTIONS if section.startswith("Hugging Face Trainer"))
    for theirs, ours in table(section):
        assert our_key(theirs.strip("`")) == ours.strip("`")


def test_the_answer_of_spec_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: 1M\ndata: {sources: {a: x.txt}}\nlearning_rate: 0.0005\nnum_train_epochs: 3\n")
    with pytest.raises(UserError) as caught:
        load_spec("run.yaml")
    shown = re.search(r"```\n(run\.yaml:3.*?)\n```", MIGRATION, re.S)
    assert shown and str(caught.value) == shown[1]


COMMANDS = sorted({
    command
    for page in (SCALING, COMPARISON, (DOCS / "zh.md").read_text())
    for command in re.findall(r"`(bessemer plan (?:search |simulate )?--[^`]+)`", page)
})  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_plans_are_made(command: str) -> None:
    result = CliRunner().invoke(app, [*shlex.split(command)[1:], "--json"], catch_exceptions=False)
    facts = json.loads(result.stdout)
    assert result.exit_code == 0 and facts["decisions"] and facts["best"]["tokens_per_s"] > 0
    if gpus := re.search(r"(\d+)x", command):
        degrees = facts["best"]["layout"]
        used = degrees["dp_replicate"] * degrees["dp_shard"] * degrees["tp"] * degrees["cp"] * degrees["pp"]
        assert used + facts["idle_gpus"] == int(gpus[1])


@pytest.mark.parametrize(
    ("model", "gpus", "settings", "fits"),
    [
        ("1b", "1xRTX 4090", {}, True),
        ("7b", "2xA100-80GB", {}, True),
        ("7b", "1xA100-80GB", {}, False),
        (
            "7b",
            "1xA100-80GB",
            {"memory.weights": "kahan", "memory.activations": "full", "memory.moments": "8bit"},
            True,
        ),
        ("70b", "16xA100-80GB", {}, True),
        ("70b", "8xA100-80GB", {}, False),
    ],
)
def test_the_smallest_places(model: str, gpus: str, settings: dict[str, str], fits: bool) -> None:
    section = table(SCALING.partition("## Which size")[2])
    row = next(row for row in section if row[0].lower() == model)
    assert all(f"{key}: {value}" in row[1] for key, value in settings.items())
    if fits:
        plan_run(None, settings, model=model, tokens="20B", gpus=gpus)
    else:
        with pytest.raises(UserError, match="nothing fits"):
            plan_run(None, settings, model=model, tokens="20B", gpus=gpus)


SPEED = (DOCS / "performance.md").read_text().partition("## Speed beside other frameworks")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    ("page", "fewest"),
    [(COMPARISON.partition("## Measured")[2], 16), ((ROOT / "README.md").read_text().partition("## Speed")[2], 9)],
    ids=["comparison.md", "README.md"],
)
def test_numbers_of_the_speed_tables_agree(page: str, fewest: int) -> None:
    """Those of performance.md come from the dated files; a number that is changed there must change elsewhere too."""
    numbers = set(re.findall(r"\d+,\d{3}|\d+\.\d+(?= (?:in|GiB|pairs|answers|\||;|$))", page))
    assert len(numbers) >= fewest
    assert [number for number in numbers if number not in SPEED] == []
