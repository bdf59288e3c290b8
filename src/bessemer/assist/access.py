"""What an assistant may do: which verbs are tools, what each call needs, which files it may name, which text is secret.

A verb that is not in the table is no tool. Hints of the protocol only inform: every call is checked here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from bessemer.errors import UserError


class Level(IntEnum):
    """READ changes nothing; WRITE adds files; RUN trains, submits, changes live runs, replaces or removes files."""

    READ = 0
    WRITE = 1
    RUN = 2


# A verb that this version lacks has no tool; those of later versions appear by themselves.
TOOLS = {
    **dict.fromkeys(
        (
            "plan run", "plan search", "plan simulate", "plan memory", "plan serve", "plan check", "plan forecast",
            "spec check", "spec show",
            "spec schema", "data check", "data report", "data verify", "runs list", "runs metrics", "replay",
            "diagnose", "review", "doctor", "report", "checkpoints list", "checkpoints verify", "checkpoints diff",
            "checkpoints lineage", "launch status", "launch queue", "launch logs", "evaluate compare", "model show",
            "inspect lr", "inspect gradients", "generate",
        ),
        Level.READ,
    ),
    **dict.fromkeys(
        ("evaluate model", "export", "compress", "data prepare", "checkpoints tag", "plan job", "new", "watch export"),
        Level.WRITE,
    ),
    **dict.fromkeys(
        ("train", "sweep", "launch submit", "launch cancel", "control", "checkpoints prune", "checkpoints restore"),
        Level.RUN,
    ),
}  # fmt: skip
# Arguments that raise the level of a call.
_WRITES = frozenset({"write", "out", "html", "picture", "emit", "add_digests"})
_REPLACES = frozenset({"overwrite", "restart", "move", "trust", "fix"})
_OTHER_MACHINES = frozenset({"nodes", "srun_options"})  # of doctor
_FREE_TEXT = frozenset({"prompt", "system", "stop", "image", "install"})  # no paths
_SEPARATORS = re.compile(r"[=,;:{}\[\]\s\"']+")
_SECRET_NAME = re.compile(r"(^|_)(KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH)(_|$)", re.IGNORECASE)
_SECRET_SHAPE = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|AKIA[0-9A-Z]{16}|gh[pousr]_\w{20,})")
_URL_PASSWORD = re.compile(r"(?<=://)[^\s/@\"]+@")
_SHORTEST_SECRET = 8


@dataclass(frozen=True)
class Permission:
    """`level` is allowed at once; with `ask` a person is asked about calls above it."""

    level: Level = Level.READ
    ask: bool = False

    @classmethod
    def parse(cls, words: list[str]) -> Permission:
        """The access that the values of --allow give."""
        if unknown := [word for word in words if word not in ("write", "run", "ask")]:
            raise UserError(f"--allow {unknown[0]}: write write, run or ask")
        level = Level.RUN if "run" in words else Level.WRITE if "write" in words else Level.READ
        return cls(level, "ask" in words)


def needed_level(verb: str, arguments: Mapping[str, Any]) -> Level:
    """What a call needs: that of its verb, more if it writes or replaces files, less if it is a dry run."""
    level = TOOLS[verb]
    active = {name for name, value in arguments.items() if value not in (None, False, "", [])}
    if "dry_run" in active:
        level = Level.READ
    if active & _WRITES and "dry_run" not in active:
        level = max(level, Level.WRITE)
    remote = verb == "doctor" and active & _OTHER_MACHINES
    return max(level, Level.RUN) if remote or active & _REPLACES else level


def refusal(verb: str, level: Level) -> str:
    """The message for a call that is not allowed."""
    option = "run" if level is Level.RUN else "write"
    return (
        f"{verb}: not allowed: this server was started without `--allow {option}`. Ask the user to run the command "
        f"themselves, or to restart the server with `bessemer mcp --allow {option}`"
    )


def check_paths(arguments: Mapping[str, Any], root: Path) -> None:
    """Refuses values that name a file outside `root`, also through a link, and URLs."""
    for name, value in arguments.items():
        for text in _texts(value) if name not in _FREE_TEXT else ():
            if "://" in text:
                raise UserError(f"{name}: {text}: URLs are not opened for assistants: name a file below {root}")
            if text.startswith("/") and _inside(text, root):
                continue  # its name may have separators
            for token in (text, *_SEPARATORS.split(text)):
                if token and not _inside(token, root):
                    raise UserError(f"{name}: {text}: is outside {root}; start the server with another --root")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _inside(text: str, root: Path) -> bool:
    """Whether a text, read as a path, is below the root. Most texts are no paths and name nothing that exists."""
    if text.startswith("~"):
        return False
    try:
        return (root / text).resolve().is_relative_to(root.resolve())
    except (OSError, ValueError):  # too long or with a null character: no path
        return "\0" not in text and not text.startswith("/")


def redact(text: str) -> str:
    """The text without passwords in URLs, keys of well-known shapes, and the values of secret environment variables."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "[redacted]").replace(json.dumps(value)[1:-1], "[redacted]")
    return _URL_PASSWORD.sub("", _SECRET_SHAPE.sub("[redacted]", text))
