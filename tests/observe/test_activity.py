"""Long silent work: quiet at first, then what it is, how far and for how long; a bar on a terminal, lines elsewhere."""

import io
import os
import pty
import subprocess
import sys

import pytest

from bessemer.observe.progress import Activity, PlainLines, working


def test_a_line_says_what_how_far_and_how_long() -> None:
    start = Activity("writing tensors", began_s=100.0)
    later = start.next("writing tensors", 10, 40)
    later.last_s = 120.0
    assert later.line(120.0) == "writing tensors  10/40  25%  20s, 1m 00s left"
    assert later.line(130.0) == "writing tensors  10/40  25%  30s, 50s left"  # it goes on while one of them is written
    assert start.line(101.0) == "writing tensors"
    assert start.line(110.0) == "writing tensors  10s"


def test_another_text_is_another_work_unless_only_its_numbers_differ() -> None:
    start = Activity("tokenizing 3 % 1.5 MB/s", began_s=100.0)
    assert start.next("tokenizing 4 % 1.25 MB/s").began_s == 100.0
    assert start.next("merging 4 parts").began_s > 100.0


def test_lines_come_after_a_while_and_then_now_and_then() -> None:
    with PlainLines(print, quiet_s=3.0, every_s=10.0) as lines:
        lines("hashing")
        began = lines.current.began_s
        assert [second for second in range(30) if lines.due(began + second)] == [3, 13, 23]
        lines("")
        assert lines.due(began + 100) is None


def test_one_call_that_takes_long_is_seen_from_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bessemer.observe.progress.QUIET_S", 0.0)
    seen: list[str] = []
    with PlainLines(seen.append, quiet_s=0.01, every_s=0.0) as lines:
        lines("compiling")
        lines._thread.join(0.2)
    assert seen and seen[0].startswith("compiling")


def test_short_work_prints_nothing() -> None:
    out = io.StringIO()
    with working("opening", out) as report:
        report("reading", 3, 4)
    assert out.getvalue() == ""


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    code = """
import time
from bessemer.observe import progress
progress.QUIET_S = 0.05
with progress.working("writing tensors") as report:
    report("writing tensors", 10, 40)
    print("a result", flush=True)
    time.sleep(0.6)
"""
    mine, theirs = pty.openpty()
    done = subprocess.run([sys.executable, "-c", code], stderr=theirs, stdout=subprocess.PIPE, text=True)
    os.close(theirs)
    shown = os.read(mine, 1 << 16).decode()
    os.close(mine)
    assert done.stdout == "a result\n"  # a file gets the results and nothing else
    assert "━" in shown and "writing tensors  10/40  25%" in shown
    assert "\x1b[2K" in shown  # erased at the end
