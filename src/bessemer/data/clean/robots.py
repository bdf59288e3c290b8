"""robots.txt and ai.txt: who may take which page, by RFC 9309, and what their owners say about training. Rules are
matched by plain search, part by part, so no rule can make a match slow. ai.txt is the file of the same form in which
sites tell data miners which types of files they may use (`Disallow: *.txt`)."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote

from bessemer.data.clean.lists import normal_escapes

_LONGEST_BYTES = 512_000  # a parser must read 500 KiB (RFC 9309, 2.5)
_TRAINING = {"content-signal": ("ai-train", "no"), "content-usage": ("train-ai", "n")}


class Rule(NamedTuple):
    """A path with * and, at its end, $."""

    allow: bool
    path: str

    def matches(self, path: str) -> bool:
        whole = self.path.endswith("$")
        first, *others = (self.path[:-1] if whole else self.path).split("*")
        if not path.startswith(first):
            return False
        if not others:
            return not whole or path == first
        at = len(first)
        for part in others[:-1]:
            at = path.find(part, at)
            if at < 0:
                return False
            at += len(part)
        if whole:
            return len(path) - len(others[-1]) >= at and path.endswith(others[-1])
        return path.find(others[-1], at) >= 0


@dataclass
class Group:
    """What stands below one or more User-agent lines. `training` are rules from signals: may it be trained on?"""

    rules: list[Rule] = field(default_factory=list)
    training: list[Rule] = field(default_factory=list)


Robots = dict[str, Group]  # by agent, in small letters; * is everyone


def parse_robots(text: str) -> Robots:
    """The groups of a file; several groups of one agent are one. What is not understood is skipped, as the RFC asks."""
    robots: Robots = {}
    agents: list[str] = []
    naming = False
    for line in text.removeprefix("\ufeff").splitlines():
        key, colon, value = line.partition("#")[0].partition(":")
        key, value = key.strip().lower(), value.strip()
        if not colon:
            continue
        if key in ("user-agent", "useragent"):
            agents = [*agents, _agent(value)] if naming else [_agent(value)]
            naming = True
            robots.setdefault(agents[-1], Group())
        elif key in ("allow", "disallow"):
            naming = False
            if value:  # an empty Disallow forbids nothing
                for agent in agents:
                    robots[agent].rules.append(Rule(key == "allow", normal_path(value)))
        elif key in _TRAINING:
            naming = False
            if rule := _signal(value, *_TRAINING[key]):
                for agent in agents or ["*"]:
                    robots.setdefault(agent, Group()).training.append(rule)
    return robots


def _agent(value: str) -> str:
    """GPTBot/1.0 and gptbot* are gptbot."""
    return value.partition("/")[0].strip().lower().rstrip("*") or "*"


def _signal(value: str, name: str, no: str) -> Rule | None:
    """`search=yes, ai-train=no`, perhaps after a path."""
    path, _, rest = value.partition(" ") if value.startswith("/") else ("/", "", value)
    for entry in re.split("[,;]", rest):
        key, _, answer = entry.partition("=")
        if key.strip().lower() == name:
            return Rule(answer.strip().lower() != no, normal_path(path))
    return None


def normal_path(path: str) -> str:
    """A path or rule in one writing: %7e is ~, %c3 is %C3, ü is %C3%BC."""
    return normal_escapes(path if path.isascii() else quote(path, safe="%/?:@!$&'()*+,;=~-._[]"))


def is_allowed(rules: Sequence[Rule], path: str) -> bool:
    """The longest rule that matches decides, of two as long the one that allows; nothing matches: allowed."""
    best = max(((len(rule.path), rule.allow) for rule in rules if rule.matches(path)), default=(0, True))
    return best[1]


def forbidding_agent(robots: Robots, agents: Sequence[str], everyone: bool, path: str) -> str | None:
    """The first of the agents that may not fetch the path. `everyone`: the rules for * count where it has none."""
    path = normal_path(path)
    for agent in agents:
        group = robots.get(agent.lower()) or (robots.get("*") if everyone else None)
        if group and not is_allowed(group.rules, path):
            return agent
    return None


def forbids_training(robots: Robots, agents: Sequence[str], path: str) -> bool:
    """Whether a signal for everyone or for one of the agents says that the path is not for training."""
    path = normal_path(path)
    groups = (robots.get(agent.lower()) for agent in ("*", *agents))
    return any(group and not is_allowed(group.training, path) for group in groups)


def forbids_mining(ai: Robots, agents: Sequence[str], path: str) -> bool:
    """Whether an ai.txt, which speaks to miners alone, forbids the path or its type. No ending means html."""
    path = normal_path(path.partition("?")[0])
    last = path.rpartition("/")[2]
    kind = path if "." in last else path + ("index.html" if path.endswith("/") else ".html")
    groups = (ai.get(agent.lower()) for agent in ("*", *agents))
    return any(group and not is_allowed([_of_type(rule) for rule in group.rules], kind) for group in groups)


def _of_type(rule: Rule) -> Rule:
    """`*.txt` names a type of file: it ends there."""
    whole = rule.path.startswith("*.") and not rule.path.endswith("$")
    return Rule(rule.allow, rule.path + "$") if whole else rule


@lru_cache(maxsize=8192)
def read_site(folder: str, host: str) -> tuple[Robots, Robots]:
    """The robots.txt and ai.txt of a host in a folder: HOST/robots.txt or HOST.robots.txt, and so for ai.txt. Those of
    www.HOST and HOST stand for one another where one of them has none."""
    other = host.removeprefix("www.") if host.startswith("www.") else f"www.{host}"
    found = []
    for file in ("robots.txt", "ai.txt"):
        names = [name for one in (host, other) for name in (f"{one}/{file}", f"{one}.{file}")]
        texts = (text for name in names if (text := _read(os.path.join(folder, name))) is not None)
        found.append(parse_robots(next(texts, "")))
    return found[0], found[1]


def _read(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return file.read(_LONGEST_BYTES).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
