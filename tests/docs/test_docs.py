"""What the documents show is what the program does."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bessemer.cli.main import app
from bessemer.spec.load import load_spec
from bessemer.spec.schema import configuration_markdown
from bessemer.spec.stages import has_stages, load_chain

ROOT = Path(__file__).parents[2]


def test_the_configuration_reference_is_current() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert "=None" not in text and "='" not in text, "defaults are shown as YAML, not as Python"
    assert text == configuration_markdown(), "run: .venv/bin/python -m bessemer.spec.schema > docs/configuration.md"


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_recipes_are_valid(path: Path) -> None:
    if has_stages(path):
        load_chain(path)
    else:
        load_spec(path)


def test_the_spec_in_the_readme_is_valid(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", readme, re.S)):
        path = tmp_path / f"readme-{number}.yaml"
        path.write_text(block)
        load_spec(path)


def test_the_commands_in_the_documents_exist() -> None:
    texts = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    verbs = set(re.findall(r"`?bessemer ([a-z]+)", re.sub(r"from bessemer.*|import bessemer.*", "", texts)))
    known = {*(command.name for command in app.registered_commands), *(group.name for group in app.registered_groups)}
    assert verbs
    assert verbs <= known
    for verb in known:
        result = CliRunner().invoke(app, [verb, "--help"])
        assert result.exit_code == 0


def test_links_in_the_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
