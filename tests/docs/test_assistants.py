"""docs/assistants.md names what exists: assistants with their files, projects, tools and resources."""

import json
import re
from pathlib import Path

from bessemer.assist.access import TOOLS
from bessemer.assist.install import TARGETS
from bessemer.cli.assist import all_verbs
from bessemer.starters.project import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "assistants.md").read_text()


def rows(section: str) -> dict[str, str]:
    """The first cells of a section's table with their lines."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `") and "| `--" not in line]
    return {name: line for line in lines for name in re.findall(r"`([\w-]+)`", line.split("|")[1])}


def test_every_assistant_with_its_files() -> None:
    table = rows("Install for an assistant")
    assert table.keys() == TARGETS.keys()
    for name, target in TARGETS.items():
        for path in filter(None, (target.skill, target.rules, target.settings)):
            assert path in table[name], (name, path)


def test_every_project() -> None:
    assert rows("Starter projects").keys() == set(KINDS)


def test_the_tools_exist() -> None:
    verbs = {verb.tool_name for verb in all_verbs() if verb.path in TOOLS}
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)*)`", PAGE.partition("| tools |")[2].partition("\n")[0]))
    assert len(named) > 10 and named <= verbs


def test_the_entry_by_hand_is_json() -> None:
    block = re.search(r"```json\n(.*?)```", PAGE, re.S)
    assert block and json.loads(block[1])["mcpServers"]["bessemer"]["args"][0] == "mcp"
