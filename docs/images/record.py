"""Draws what a command leaves on a terminal: `python docs/images/record.py docs/images/demo.svg -- bessemer demo`.

The command runs in a real terminal of COLUMNS columns; nothing of its output is edited. Needs `pip install pyte`. A
recording that `script` made is drawn with `record.py FILE.svg < RECORDING`.
"""

import io
import os
import pty
import re
import sys
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.text import Text

COLUMNS, LINES = 110, 300  # as many lines as no output has, so that none scrolls away


def run_in_terminal(command: list[str]) -> bytes:
    """The bytes that the command writes to its terminal."""
    parts: list[bytes] = []

    def read(descriptor: int) -> bytes:
        parts.append(os.read(descriptor, 1 << 16))
        return parts[-1]

    os.environ |= {"COLUMNS": str(COLUMNS), "LINES": "44"}
    if code := os.waitstatus_to_exitcode(pty.spawn(command, read)):
        sys.exit(f"{command[0]} ended with exit code {code}")
    return b"".join(parts)


def style(cell: pyte.screens.Char) -> str:
    """The cell's colour and weight as rich names them."""
    color = f"#{cell.fg}" if re.fullmatch("[0-9a-f]{6}", cell.fg) else cell.fg.replace("bright", "bright_")
    color = color.replace("brown", "yellow").replace("default", "")
    return f"bold {color}" if cell.bold else color


def draw(output: bytes, title: str) -> str:
    screen = pyte.Screen(COLUMNS, LINES)
    pyte.ByteStream(screen).feed(output)
    last = max(row for row, line in enumerate(screen.display) if line.strip())
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for row in range(last + 1):
        cells = [screen.buffer[row][column] for column in range(COLUMNS)]
        line = Text(no_wrap=True)
        for look, group in groupby(cells, key=style):
            line.append("".join(cell.data for cell in group), look)
        line.rstrip()
        console.print(line, soft_wrap=True)
    return console.export_svg(title=title, unique_id="demo")


if __name__ == "__main__":
    target, *command = (word for word in sys.argv[1:] if word != "--")
    output = run_in_terminal(command) if command else sys.stdin.buffer.read()
    Path(target).write_text(draw(output, " ".join(command) or "bessemer demo"))
