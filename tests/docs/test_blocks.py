"""Every command, Python block and YAML block of README and docs: commands parse with their options, Python compiles and
imports what exists, YAML is a valid spec or a valid part of one. Pages whose blocks run have tests of their own."""

import ast
import copy
import importlib
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from bessemer.cli.main import app
from bessemer.errors import UserError
from bessemer.spec.document import parse_yaml
from bessemer.spec.load import SpecError, load_document
from bessemer.spec.schema import RunSpec

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
INLINE = re.compile(r"`(bessemer [^`]+)`")


def blocks(page: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(page.read_text()) if language in languages]


def words_of(line: str) -> list[str] | None:
    """The arguments of a `bessemer ...` line without comments, pipes and redirections. None for other lines, and where
    an ellipsis stands for what the reader adds."""
    start = re.match(r"(?:\s*(?:\$ |\w+=\S+ |\S*/)*)bessemer (.*)", line)
    if not start or re.search(r"\.\.\.|…", start[1]) or start[1].startswith("--install"):  # which would install
        return None
    line = re.split(r"\s(?:&&|\||>|2>|;)\s?", start[1])[0]
    return shlex.split(re.sub(r"(?<=--step )N\b", "1", line), comments=True)


def shown_commands(page: Path) -> list[list[str]]:
    """Those of blocks, which a reader copies."""
    bodies = blocks(page, "", "sh", "bash", "console", "text")
    lines = [line for body in bodies for line in re.sub(r"\\\n\s*", " ", body).splitlines()]
    return [words for line in lines if (words := words_of(line))]


def named_commands(page: Path) -> list[list[str]]:
    """Those that the text names, perhaps without their arguments."""
    prose = FENCE.sub("", page.read_text())
    return [words for command in INLINE.findall(prose) if (words := words_of(" ".join(command.split())))]


@cache
def whole_program() -> Any:
    return get_command(app)


def parse(words: list[str]) -> str:
    """What is wrong with the arguments of `bessemer`; empty if nothing is."""
    command: Any = whole_program()
    context = None
    try:
        while True:
            context = command.make_context(command.name or "bessemer", list(words), parent=context)
            if not hasattr(command, "resolve_command"):
                return ""
            rest = [*getattr(context, "_protected_args", []), *context.args]
            if not rest:
                return ""
            _, command, words = command.resolve_command(context, rest)
    except UserError as error:
        return str(error)
    except SystemExit as stop:
        return "" if not stop.code else f"exit {stop.code}"
    except Exception as error:  # click's errors, whose classes depend on what typer brings
        if type(error).__name__ in ("Exit", "NoArgsIsHelpError"):
            return ""
        return f"{type(error).__name__}: {getattr(error, 'message', error)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page: Path) -> None:
    wrong = {" ".join(words): problem for words in shown_commands(page) if (problem := parse(words))}
    for words in named_commands(page):
        problem = parse(words)
        if problem and not problem.startswith(("MissingParameter", "BadOptionUsage")):
            wrong[" ".join(words)] = problem
    assert wrong == {}


def test_a_wrong_command_is_noticed() -> None:
    assert parse(["train", "run.yaml", "--plainn"]) and parse(["nonsense"]) and parse(["plan", "memory"])
    assert not parse(["train", "run.yaml", "--plain"])
    assert sum(len(shown_commands(page)) for page in PAGES) > 150


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_blocks_compile_and_import_what_exists(page: Path) -> None:
    for body in blocks(page, "python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bessemer":
                module = importlib.import_module(str(node.module))
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


SMALLEST: dict[str, Any] = {"model": "1M", "data": {"sources": {"text": "data/"}}}
# A part alone misses what it goes with (`dpo:` its objective); wrong keys and values are wrong in any spec.
WRONG = re.compile(r"unknown key|: expected |did you mean")


def spec_problems(part: dict[str, Any]) -> list[str]:
    """What is wrong with the keys and values of a part of a spec."""
    spec = copy.deepcopy(SMALLEST) | part
    spec["data"] = SMALLEST["data"] | (part.get("data") or {})
    try:
        load_document(spec)
    except SpecError as error:
        return [problem for problem in error.problems if WRONG.search(problem)]
    return []


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=lambda page: page.name)
def test_yaml_blocks_are_parts_of_specs(page: Path) -> None:
    for body in blocks(page, "yaml"):
        document = parse_yaml(body, page.name)
        assert document.problems == []
        parts = document.data.pop("stages", [document.data])
        for part in parts:
            for key in ("from", "repeat", "make") if part is not document.data else ():
                part.pop(key, None)  # keys of a stage
            if part.keys() & RunSpec.model_fields.keys():  # else the block is no spec: prices, principles
                assert spec_problems(part) == [], body


def test_a_wrong_part_is_noticed() -> None:
    assert spec_problems({"optimizer": {"lrr": 1}}) and spec_problems({"optimizer": {"lr": "fast"}})
    assert not spec_problems({"dpo": {"beta": 0.1}})
