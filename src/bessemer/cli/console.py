"""Shared by the commands: group help, common options, tables, and messages that name the spec.

Tables are as wide as the terminal, and never cut where there is none.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer
from typer.core import TyperGroup

from bessemer.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NO_TERMINAL_COLUMNS = 10_000  # a pipe or a file has no width

VALUES = {Path: "PATH", int: "N", float: "NUMBER"}  # what help calls the values of options

SPEC = typer.Argument(help="The run's YAML file.")
RUN = typer.Argument(help="The run's folder, such as runs/demo.")
SETTINGS = typer.Option([], "--set", help="Override a key, such as --set optimizer.lr=3e-4. Repeatable.")
AS_JSON = typer.Option(False, "--json", help="Print JSON.")
CHECKPOINT = typer.Option("last", "--checkpoint", help="last, best, a tag, or a name such as step-00001000.a1.")
DEVICE = typer.Option("auto", "--device", help="auto, cpu, cuda or mps.")


def first_sentence(help: str) -> str:
    """The first sentence of a docstring or help text. `Kubernetes, ...` does not end one."""
    paragraph = " ".join(help.split("\n\n")[0].split())
    return re.split(r"(?<=[^.]\.) (?=[A-Z`])", paragraph)[0]


def name_values(command: Any) -> None:
    """Give the values of a command the words that the documentation uses: SPEC and RUN for arguments; PATH, N, NUMBER
    and TEXT for options, instead of the names of Python types."""
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.metavar = parameter.metavar or parameter.name.upper()
        elif not (parameter.is_flag or parameter.count):
            annotation = parameter.type_descriptor.annotation
            kind = next((kind for kind in get_args(annotation) if kind is not type(None)), annotation)
            parameter.metavar = parameter.metavar or VALUES.get(kind, "TEXT")


class CommandGroup(TyperGroup):
    """A group whose help shows the complete first sentence of each command; typer cuts it at the terminal's width."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command:
            name_values(command)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, first_sentence(command.help or "")) for name, command in commands if command and not command.hidden
        ]
        for title, members in self.sections(rows):
            with formatter.section(title):
                formatter.write_dl(members)

    def sections(self, rows: list[tuple[str, str]]) -> list[tuple[str, list[tuple[str, str]]]]:
        """The titles of the help's sections with names and summaries of their commands."""
        return [("Commands", rows)] if rows else []


def group_with_default(default: str, alone: bool = False) -> type[CommandGroup]:
    """A group in which the command `default` may be left out: `launch SPEC` is `launch submit SPEC`. With `alone` the
    group's name by itself is the command too, rather than a call for help."""

    class DefaultGroup(CommandGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            known = {*self.commands, "-h", "--help"}
            left_out = args[0] not in known if args else alone
            return super().parse_args(ctx, [default, *args] if left_out else args)

    return DefaultGroup


def table_console() -> Console:
    """A console to print tables on."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = NO_TERMINAL_COLUMNS
    return console


def print_table(table: Table) -> None:
    """Print a table without trailing spaces: one long cell would pad every row."""
    console = table_console()
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        print(line.rstrip())


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in columns without a frame."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for _ in rows[0]:
        table.add_column()
    for row in rows:
        table.add_row(*row)
    print_table(table)


def print_json(value: Any, **options: Any) -> None:
    """Print a value as indented JSON; options are those of json.dumps."""
    print(json.dumps(value, indent=1, **options))


@contextmanager
def lines_on_stderr(as_json: bool) -> Iterator[None]:
    """With --json, lines printed inside, also by child processes, go to stderr: stdout holds the JSON alone."""
    if not as_json:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def name_spec(message: str, spec: Path, settings: Sequence[str] = ()) -> str:
    """The message with `bessemer data prepare SPEC` completed by this command's spec and settings."""
    from bessemer.data.store.format import PREPARE_COMMAND

    overrides = [part for setting in settings for part in ("--set", setting)]
    return message.replace(PREPARE_COMMAND, shlex.join([*PREPARE_COMMAND.split()[:-1], str(spec), *overrides]))


@contextmanager
def naming_spec(spec: Path, settings: Sequence[str]) -> Iterator[None]:
    """Errors raised inside name the spec, as in `name_spec`."""
    try:
        yield
    except UserError as error:
        error.args = (name_spec(str(error), spec, settings),)
        raise
