"""A log made readable: colours and rank prefixes removed, progress bars split, and the rank of each line remembered.

Tracebacks are collected rank by rank, because launchers interleave the lines of all ranks.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
# torchrun and NCCL write `[rank0]:`, torchrun --tee `[default0]:`, Ray `(Actor pid=9, ip=10.0.0.2)`.
_PREFIX = re.compile(r"\s*(?:\[[a-z_]+?(?P<rank>\d+)\]:\s?|\([\w.:-]+ pid=\d+(?:, ip=[\d.]+)?\)\s?)")
# A progress bar has no end of line: what is written next comes behind its `]`.
_BAR_END = re.compile(r"(\[[^\[\]]*(?:it/s|s/it)[^\[\]]*\])(?=\S)")
_HEAD = "Traceback (most recent call last):"
_STEP = re.compile(
    r"\b(?:global_)?(?:step|iter|iteration)s?['\"]?\s*[:=]?\s*(\d{1,9})\b(?!\.\d)|\b(\d{1,9})/\d{1,9} "
    r"\[\d",
    re.IGNORECASE,
)
# A word of every error text. Of a log over REDUCED_BYTES only the lines around them are searched: all patterns together
# cost about a second a megabyte.
HINTS = (
    "rror", "xception", "Traceback", "Assertion", "ail", "FAIL", "Xid", "NVRM", "illed", "SIG", "signal", "CANCELLED",
    "oom", "OOM", "ut of ", "ut Of ", "No space", "uota", "limit", "symbol", "not found", "No module", "exitcode",
    "return code", "atchdog", "NVIDIA", "capabilit", "OVERFLOW", "Unsupported", "Too Many", "gated", "Segmentation",
    "in use", "annot", "efused", "issing", "ismatch", "git-lfs", "doesn't", "not set", "not been", "does not",
    "world_size", "WORLD_SIZE", "num_processes", "NET/IB", "_dynamo", "stuck", "Duplicate", "not all", "NumPy 1",
    "NVSMI", "egal", "too old", "only", "busy", "Too many", "too many",
)  # fmt: skip
REDUCED_BYTES = 2 << 20
CONTEXT = 80  # lines on both sides
_STEP_REACH = 200_000  # characters before an error in which its step is looked for
_TRACEBACK = re.compile(
    r"^(?P<indent>[ |+]*)Traceback \(most recent call last\):\n(?P<body>(?:(?P=indent)[ \t]+.*\n|[ \t]*\n)*)"
    r"(?P=indent)(?P<kind>[A-Za-z_][\w.]*)(?::[ \t]?(?P<message>.*))?",
    re.MULTILINE,
)
# The end of a traceback whose head is cut off or broken by another line.
_TRACEBACK_END = re.compile(
    r"^(?P<body>(?P<indent>[ |+]*)[ \t]*File \"[^\"\n]+\", line \d+, in .*\n(?:(?P=indent)[ \t]+.*\n|[ \t]*\n)*)"
    r"(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Expired|Timeout|Iteration))"
    r"(?::[ \t]?(?P<message>.*))?$",
    re.MULTILINE,
)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_LIBRARY = re.compile(r"(site|dist)-packages|/lib/python\d|<frozen|\.local/lib")


@dataclass(frozen=True)
class RaisedError:
    """One Python traceback. `place` is the innermost frame outside of installed packages."""

    kind: str
    message: str
    place: str
    function: str
    rank: int | None
    line: int
    body: str


class LogText:
    """The cleaned text of a log. Line numbers are those of the file, from 1."""

    def __init__(self, raw: str) -> None:
        lines: list[str] = []
        self.numbers: list[int] = []
        self.ranks: list[int | None] = []
        for number, raw_line in _numbered_lines(_ANSI.sub("", raw)):
            for part in _parts(raw_line):
                rank = None
                while prefix := _PREFIX.match(part):
                    rank = int(prefix["rank"]) if prefix["rank"] else rank
                    part = part[prefix.end() :]
                for line in _split_head(part):
                    lines.append(line)
                    self.numbers.append(number)
                    self.ranks.append(rank)
        self.lines = lines
        self.text = "\n".join(lines)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    def _index(self, offset: int) -> int:
        return bisect_right(self._starts, offset) - 1

    def line_of(self, offset: int) -> int:
        """The number of the file's line at an offset of the cleaned text."""
        return self.numbers[self._index(offset)]

    def rank_of(self, offset: int) -> int | None:
        return self.ranks[self._index(offset)]

    def line_text(self, offset: int) -> str:
        return self.lines[self._index(offset)].strip()

    def step_before(self, offset: int) -> int | None:
        """The last step that the log printed before an offset."""
        steps = _STEP.findall(self.text, max(0, offset - _STEP_REACH), offset)
        return int(steps[-1][0] or steps[-1][1]) if steps else None

    @cached_property
    def errors(self) -> list[RaisedError]:
        """All tracebacks, in the order of the log. Of a chain of exceptions the first is the origin."""
        streams: dict[int | None, list[int]] = defaultdict(list)
        for i, rank in enumerate(self.ranks):
            streams[rank].append(i)
        errors = []
        for rank, indices in streams.items():
            text = "\n".join(self.lines[i] for i in indices)
            matches = list(_TRACEBACK.finditer(text)) if "Traceback" in text else []
            for match in matches or (_TRACEBACK_END.finditer(text) if 'File "' in text else ()):
                line = self.numbers[indices[text.count("\n", 0, match.start())]]
                errors.append(_raised(match, rank, line))
        return sorted(errors, key=lambda error: error.line)

    def error_before(self, offset: int) -> str:
        """The traceback whose last line holds an offset, or the lines before it."""
        line = self.line_of(offset)
        enclosing = [error for error in self.errors if error.line <= line]
        if enclosing and line - enclosing[-1].line <= enclosing[-1].body.count("\n") + 2:
            return enclosing[-1].body
        return "\n".join(self.lines[max(0, self._index(offset) - 40) : self._index(offset)])


def _numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a text, with their numbers from 1; of a long text those near a hint."""
    lines = text.split("\n")
    if len(text) <= REDUCED_BYTES:
        yield from enumerate(lines, 1)
        return
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
    chosen: set[int] = set()
    for hint in HINTS:
        at = text.find(hint)
        while at >= 0:
            index = bisect_right(starts, at) - 1
            chosen.add(index)
            at = text.find(hint, starts[index + 1])
    end = 0
    for index in sorted(chosen):
        for near in range(max(end, index - CONTEXT), min(len(lines), index + CONTEXT + 1)):
            yield near + 1, lines[near]
        end = max(end, index + CONTEXT + 1)


def _parts(line: str) -> Iterator[str]:
    """The versions of a line that carriage returns overwrite, each without what is glued to the end of its bar."""
    for version in re.split(r"\r+", line):
        if "it/s" in version or "s/it" in version:
            yield from _BAR_END.sub(r"\1\n", version).split("\n")
        else:
            yield version


def _split_head(line: str) -> list[str]:
    """A line. The head of a traceback that follows other text becomes a separate line."""
    at = line.find(_HEAD)
    before = line[: max(at, 0)]
    if not before.strip(" |+\t") or before.endswith("Exception Group "):
        return [line]
    return [before, line[at:]]


def _raised(match: re.Match[str], rank: int | None, line: int) -> RaisedError:
    frames = list(_FRAME.finditer(match["body"]))
    user_frames = [frame for frame in frames if not _LIBRARY.search(frame["file"])] or frames
    frame = user_frames[-1] if user_frames else None
    place = f"{frame['file']}:{frame['line']}" if frame else ""
    function = frame["function"] if frame else ""
    return RaisedError(match["kind"], (match["message"] or "").strip(), place, function, rank, line, match["body"])
