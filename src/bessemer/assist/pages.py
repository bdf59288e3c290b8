"""The documentation as an assistant reads it: the pages of docs/, the reference of all verbs, and that of the spec."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bessemer.assist.verbs import Verb
from bessemer.errors import UserError

INSTALLED = Path(__file__).parent / "docs"  # where a wheel has the pages
REPOSITORY = Path(__file__).parents[3] / "docs"


class DocsPages:
    """DocsPages by name. `verbs` and `configuration` are generated, so that they fit this version."""

    def __init__(self, verbs: Sequence[Verb]) -> None:
        self.verbs = verbs
        folder = INSTALLED if INSTALLED.is_dir() else REPOSITORY
        self.files = {path.stem: path for path in sorted(folder.glob("*.md")) if path.stem != "configuration"}

    def titles(self) -> dict[str, str]:
        generated = {"verbs": "Every command with its options", "configuration": "Every key of a spec"}
        return generated | {name: _title(path) for name, path in self.files.items()}

    def text(self, name: str) -> str:
        if name == "verbs":
            return verbs_markdown(self.verbs)
        if name == "configuration":
            from bessemer.spec.schema import configuration_markdown

            return configuration_markdown()
        if name not in self.files:
            raise UserError(f"{name}: no such page; there are {', '.join(self.titles())}")
        return self.files[name].read_text(encoding="utf-8")


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").strip()


def verbs_markdown(verbs: Sequence[Verb]) -> str:
    """The reference of all verbs."""
    parts = ["# Verbs\n"]
    for verb in verbs:
        parts.append(f"## bessemer {verb.path}\n\n{verb.summary}\n")
        parts.append(f"Example: `{verb.example}`\n" if verb.example else "")
        rows = [f"- `{each.flag or each.name.upper()}` {each.help}".rstrip() for each in verb.parameters]
        parts.append("\n".join(rows) + "\n" if rows else "")
    return "\n".join(part for part in parts if part)
