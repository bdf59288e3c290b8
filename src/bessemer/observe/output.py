"""Standard streams that are closed, full or no longer read. The work goes on without them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO


def open_missing_streams() -> None:
    """Put the null device in the place of a stream that was closed at the start (`>&-`): otherwise the next file that
    is opened would become the standard output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)
        try:
            os.fstat(number)
        except OSError:  # nobody has taken the number meanwhile
            os.dup2(opened, number)
            os.close(opened)
            opened = number
        os.set_inheritable(opened, True)
        stream = os.fdopen(opened, "w" if number else "r", encoding="utf-8", closefd=False)
        setattr(sys, name, stream)


def silence(stream: IO[str]) -> None:
    """Send what a stream still holds, and all that follows, to the null device, so that no later flush fails."""
    with suppress(OSError, ValueError):  # ValueError: not a real file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()


def output_fault(probe: str = "") -> OSError | None:
    """Why what was printed cannot be written; None if it was. The stream is silenced then. An unbuffered one has told
    already: a `probe` is written to hear it again."""
    try:
        sys.stdout.write(probe)
        sys.stdout.flush()
    except OSError as error:
        silence(sys.stdout)
        return error
    return None
