"""`bessemer assist install`: every assistant's files, twice, over a user's own settings, and what is refused."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from bessemer import __version__
from bessemer.assist import install
from bessemer.assist.install import NAME, TARGETS, plan_install, write_changes
from bessemer.cli.assist import all_verbs
from bessemer.errors import UserError

VERBS = all_verbs()
SETTINGS = {name: target.settings.removeprefix("~/") for name, target in TARGETS.items()}


def run(names: list[str], folder: Path) -> dict[str, str]:
    """Action by file, relative to the folder, which is the home as well."""
    changes = plan_install(names, folder, folder, VERBS)
    write_changes(changes)
    return {str(change.path.relative_to(folder)): change.action for change in changes}


def servers(name: str, folder: Path) -> dict:
    path = folder / SETTINGS[name]
    settings = tomllib.loads(path.read_text()) if path.suffix == ".toml" else json.loads(path.read_text())
    for key in TARGETS[name].keys:
        settings = settings[key]
    return settings


@pytest.mark.parametrize("name", TARGETS)
def test_an_assistant_twice(name: str, tmp_path: Path) -> None:
    first = run([name], tmp_path)
    assert set(first.values()) == {"written"} and SETTINGS[name] in first
    again = run([name], tmp_path)
    assert again.keys() == first.keys() and set(again.values()) == {"unchanged"}
    entry = servers(name, tmp_path)[NAME]
    command = entry["command"] if isinstance(entry["command"], list) else [entry["command"], *entry["args"]]
    assert command == [sys.executable, "-m", "bessemer", "mcp", "--root", str(tmp_path)]
    assert "TOKEN" not in json.dumps(entry) and "env" not in entry


def test_the_command_of_an_entry_starts(tmp_path: Path) -> None:
    run(["claude"], tmp_path)
    entry = servers("claude", tmp_path)[NAME]
    printed = subprocess.run([entry["command"], *entry["args"], "--help"], capture_output=True, text=True, check=True)
    assert "--root" in printed.stdout


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.skill])
def test_a_skill_has_the_form_that_assistants_read(name: str, tmp_path: Path) -> None:
    run([name], tmp_path)
    folder = tmp_path / TARGETS[name].skill.removeprefix("~/")
    text = (folder / "SKILL.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["name"] == folder.name == NAME and 0 < len(head["description"]) <= 1024
    assert text.count("\n") < 500 and "{{" not in text and __version__ in text
    assert "`bessemer runs metrics`" in text and "`bessemer plan run`" in text
    for line in text.splitlines():
        if "](references/" in line:
            assert (folder / line.split("](")[1].split(")")[0]).is_file(), line


def test_a_later_version_replaces_our_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(["claude"], tmp_path)
    monkeypatch.setattr(install, "__version__", "99.0")
    actions = run(["claude"], tmp_path)
    assert actions.pop(".mcp.json") == "unchanged" and set(actions.values()) == {"updated"}
    assert "99.0" in (tmp_path / ".claude/skills/bessemer/SKILL.md").read_text()


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "codex"])
def test_other_settings_stay(name: str, tmp_path: Path) -> None:
    path = tmp_path / SETTINGS[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    own: dict = {"theme": "dark", "zoë": [1, None]}
    place = own
    for key in TARGETS[name].keys:
        place = place.setdefault(key, {})
    place["other"] = {"command": "x"}
    path.write_text(json.dumps(own))
    assert run([name], tmp_path)[SETTINGS[name]] == "updated"
    assert servers(name, tmp_path).keys() == {"other", NAME}
    after = json.loads(path.read_text())
    assert after["theme"] == "dark" and after["zoë"] == [1, None]
    changed = servers(name, tmp_path)[NAME] | {"env": {"A": "b"}}
    settings = json.loads(path.read_text())
    place = settings
    for key in TARGETS[name].keys:
        place = place[key]
    place[NAME] = changed
    path.write_text(json.dumps(settings))
    assert run([name], tmp_path)[SETTINGS[name]] == "kept"
    assert servers(name, tmp_path)[NAME] == changed


def test_comments_of_codex_stay(tmp_path: Path) -> None:
    path = tmp_path / ".codex/config.toml"
    path.parent.mkdir()
    own = '# mine\nmodel = "x"\n\n[mcp_servers.other]\ncommand = "y" # why\n'
    path.write_text(own)
    run(["codex"], tmp_path)
    assert path.read_text().startswith(own)
    assert servers("codex", tmp_path).keys() == {"other", NAME}


def test_both_versions_of_opencode(tmp_path: Path) -> None:
    path = tmp_path / "opencode.json"
    path.write_text(json.dumps({"mcp": {"other": {"type": "local", "command": ["x"], "enabled": True}}}))
    run(["opencode"], tmp_path)
    entry = json.loads(path.read_text())["mcp"][NAME]
    assert entry["enabled"] is True and isinstance(entry["command"], list)


@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        ("gemini", ".gemini/settings.json", '{"a": 1, // comment\n}'),
        ("gemini", ".gemini/settings.json", "[1]"),
        ("gemini", ".gemini/settings.json", '{"mcpServers": []}'),
        ("codex", ".codex/config.toml", "mcp_servers = {other = {command = 'x'}}\n"),
        ("codex", ".codex/config.toml", "a = = b"),
        ("claude", ".claude/skills/bessemer/SKILL.md", "my own skill"),
    ],
)
def test_files_that_cannot_be_extended_are_refused_untouched(name: str, file: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(UserError, match=path.name):
        run([name], tmp_path)
    assert path.read_text() == text and [each for each in tmp_path.rglob("*") if each.is_file()] == [path]


def test_an_unknown_assistant(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="write claude, cursor"):
        plan_install(["nobody"], tmp_path, tmp_path, VERBS)
