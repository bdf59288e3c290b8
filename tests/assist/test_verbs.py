"""All verbs: each that answers has --json; the command line of a tool call; what a call may do; secrets."""

import json
from pathlib import Path

import pytest

from bessemer.assist.access import TOOLS, Level, Permission, check_paths, needed_level, redact
from bessemer.assist.verbs import ALWAYS_JSON, Verb
from bessemer.cli.assist import all_verbs
from bessemer.errors import UserError

VERBS = {verb.path: verb for verb in all_verbs()}
# Servers, dialogues and a show: they print no answer.
WITHOUT_ANSWER = {"serve", "watch page", "mcp", "demo", "align vote", "plan interview"}


def test_every_verb_that_answers_has_json() -> None:
    assert len(VERBS) > 60
    assert {path for path, verb in VERBS.items() if not verb.answers_json} == WITHOUT_ANSWER
    assert set(ALWAYS_JSON) <= VERBS.keys()


def test_the_verbs_of_a_training_engineer_are_tools() -> None:
    expected = {
        "plan run", "spec check", "data check", "train", "launch submit", "launch status", "runs list", "runs metrics",
        "replay", "report", "checkpoints list", "evaluate model", "export",
    }  # fmt: skip
    assert expected <= TOOLS.keys() & VERBS.keys()
    assert TOOLS.keys() - VERBS.keys() <= {"diagnose", "review", "doctor"}
    assert all(VERBS[path].answers_json for path in TOOLS.keys() & VERBS.keys())


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.path)
def test_schemas_are_json_schemas(verb: Verb) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(json.dumps(verb.schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert len(schema["properties"]) == len(verb.parameters)


def test_the_command_line_of_a_call() -> None:
    words = VERBS["runs metrics"].command({"run": "runs/a", "names": "loss,lr", "from": 3, "to": None})
    assert words == ["runs", "metrics", "--json", "--names=loss,lr", "--from=3", "runs/a"]
    words = VERBS["train"].command({"spec": "a.yaml", "set": ["seed=1", "runs=r"], "restart": True, "plain": False})
    assert words == ["train", "--json", "--set=seed=1", "--set=runs=r", "--restart", "a.yaml"]
    assert VERBS["checkpoints lineage"].command({"run": "runs/a"}) == ["checkpoints", "lineage", "runs/a"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"spec": "--restart"}, "starts with -"),
        ({"spec": "a.yaml", "nonsense": 1}, "no such argument"),
        ({}, "spec: missing"),
        ({"spec": "a.yaml", "restart": "yes"}, "not of type boolean"),
        ({"spec": "a.yaml", "profile_steps": True}, "not of type integer"),
        ({"spec": 5}, "not of type string"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        VERBS["train"].command(arguments)


@pytest.mark.parametrize(
    ("verb", "arguments", "level"),
    [
        ("plan run", {"model": "7b", "write": None}, Level.READ),
        ("plan run", {"model": "7b", "write": "a.yaml"}, Level.WRITE),
        ("train", {"spec": "a.yaml"}, Level.RUN),
        ("launch submit", {"spec": "a.yaml"}, Level.RUN),
        ("launch submit", {"spec": "a.yaml", "dry_run": True}, Level.READ),
        ("export", {"source": "runs/a", "to": "hf"}, Level.WRITE),
        ("export", {"source": "runs/a", "to": "hf", "overwrite": True}, Level.RUN),
        ("checkpoints prune", {"run": "runs/a", "dry_run": False}, Level.RUN),
        ("review", {"paths": ["train.py"], "patch": True}, Level.READ),
        ("review", {"paths": ["train.py"], "fix": True}, Level.RUN),
        ("doctor", {"folder": "runs"}, Level.READ),
        ("doctor", {"folder": "runs", "nodes": "gpu1,gpu2"}, Level.RUN),
    ],
)
def test_what_a_call_needs(verb: str, arguments: dict, level: Level) -> None:
    assert needed_level(verb, arguments) == level


def test_permissions() -> None:
    assert Permission.parse([]) == Permission(Level.READ, False)
    assert Permission.parse(["ask", "write"]) == Permission(Level.WRITE, True)
    assert Permission.parse(["run"]).level == Level.RUN
    with pytest.raises(UserError, match="write write, run or ask"):
        Permission.parse(["everything"])


@pytest.mark.parametrize(
    "value",
    [
        "/etc/passwd", "../other", "data/../../other", "~/.ssh", "link/file", "runs/a:../../b", "https://host/x",
        ["ok", "/etc"], "data.sources.text.path=/etc", "data={sources: {a: {path: ['/etc/passwd']}}}", "file:///etc/x",
    ],
)  # fmt: skip
def test_files_outside_the_root_are_refused(value: object, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"is outside|URLs are not opened"):
        check_paths({"x": value}, tmp_path / "root")


@pytest.mark.parametrize("value", ["runs/a:best", "8xA100-80GB", "optimizer.lr=3e-4", "a b/c.txt", ["x"], 3, "", None])
def test_other_values_are_not(value: object, tmp_path: Path) -> None:
    check_paths({"x": value, "prompt": "see /etc/passwd", "out": str(tmp_path / "new folder" / "file")}, tmp_path)


def test_secrets_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", 'value-"with"-quotes')
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "falsefalse")
    text = 'a value-"with"-quotes ' + json.dumps('value-"with"-quotes') + " hf_" + "x" * 20 + " https://me:pw@host/x"
    assert redact(text + " falsefalse") == 'a [redacted] "[redacted]" [redacted] https://host/x falsefalse'
