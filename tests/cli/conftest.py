"""Calls `bessemer` as a user would, in this process."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bessemer.cli import main


class Said:
    """What a call printed and how it ended."""

    def __init__(self, code: object, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Call = Callable[..., Said]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Calls `bessemer ARGUMENTS` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["bessemer", *arguments])
        with pytest.raises(SystemExit) as left:
            main.run()
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return Said(left.value.code or 0, printed.out, printed.err)

    return run
