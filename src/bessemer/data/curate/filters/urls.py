"""robots.txt and ai.txt: who may take which page, by RFC 9309, and what their owners say about training. Rules are
matched by plain search, part by part, so no rule can make a match slow. ai.txt is the file of the same form in which
sites tell data miners which types of files they may use (`Disallow: *.txt`).

The steps that judge a document by where it comes from: `block_urls` and `opt_out`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote

import xxhash

from bessemer.data.curate.filters.lists import ListFile, NameList, UrlAddress, UrlLists, normal_escapes, split_url
from bessemer.data.curate.step import Drop, Outcome
from bessemer.data.document import Document
from bessemer.errors import UserError
from bessemer.spec.curate.dedup import BlockUrlsSpec, OptOutSpec

_LONGEST_BYTES = 512_000  # a parser must read 500 KiB (RFC 9309, 2.5)
_TRAINING = {"content-signal": ("ai-train", "no"), "content-usage": ("train-ai", "n")}


class RobotsRule(NamedTuple):
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
class RobotsGroup:
    """What stands below one or more User-agent lines. `training` are rules from signals: may it be trained on?"""

    rules: list[RobotsRule] = field(default_factory=list)
    training: list[RobotsRule] = field(default_factory=list)


Robots = dict[str, RobotsGroup]  # by agent, in small letters; * is everyone


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
            robots.setdefault(agents[-1], RobotsGroup())
        elif key in ("allow", "disallow"):
            naming = False
            if value:  # an empty Disallow forbids nothing
                for agent in agents:
                    robots[agent].rules.append(RobotsRule(key == "allow", normal_path(value)))
        elif key in _TRAINING:
            naming = False
            if rule := _signal(value, *_TRAINING[key]):
                for agent in agents or ["*"]:
                    robots.setdefault(agent, RobotsGroup()).training.append(rule)
    return robots


def _agent(value: str) -> str:
    """GPTBot/1.0 and gptbot* are gptbot."""
    return value.partition("/")[0].strip().lower().rstrip("*") or "*"


def _signal(value: str, name: str, no: str) -> RobotsRule | None:
    """`search=yes, ai-train=no`, perhaps after a path."""
    path, _, rest = value.partition(" ") if value.startswith("/") else ("/", "", value)
    for entry in re.split("[,;]", rest):
        key, _, answer = entry.partition("=")
        if key.strip().lower() == name:
            return RobotsRule(answer.strip().lower() != no, normal_path(path))
    return None


def normal_path(path: str) -> str:
    """A path or rule in one writing: %7e is ~, %c3 is %C3, ü is %C3%BC."""
    return normal_escapes(path if path.isascii() else quote(path, safe="%/?:@!$&'()*+,;=~-._[]"))


def is_allowed(rules: Sequence[RobotsRule], path: str) -> bool:
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


def _of_type(rule: RobotsRule) -> RobotsRule:
    """`*.txt` names a type of file: it ends there."""
    whole = rule.path.startswith("*.") and not rule.path.endswith("$")
    return RobotsRule(rule.allow, rule.path + "$") if whole else rule


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


_WORD = re.compile(r"[^\W_]+")
_HOST = re.compile(r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")  # one that can be a file's name
_SHA256 = re.compile("[0-9a-f]{64}")


class BlockUrls:
    """Drops documents whose URL is on a list, matches a pattern or has certain words."""

    version = 1

    def __init__(self, spec: BlockUrlsSpec, seed: int) -> None:
        self.spec = spec
        self._blocked = UrlLists(spec.domains, spec.urls, spec.lists, "block_urls")
        named = [entry for entry in spec.allow if "/" not in entry]
        self._allowed = UrlLists(named, [entry for entry in spec.allow if "/" in entry], [], "block_urls")
        self._patterns = (*map(re.compile, spec.patterns), *self._blocked.patterns)
        words = _site_files(spec.word_lists, "block_urls.word_lists")
        soft = _site_files(spec.soft_word_lists, "block_urls.soft_word_lists")
        self._words = frozenset(word.lower() for word in spec.words) | _words(words)
        self._soft_words = frozenset(word.lower() for word in spec.soft_words) | _words(soft)
        self.identity = "/".join([self._blocked.content, *(file.content() for file in (*words, *soft))])

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        addresses = _addresses(documents)
        listed = self._blocked.name(addresses)
        allowed = self._allowed.name(addresses)
        outcomes: list[Outcome] = []
        for document, address, entry, exempt in zip(documents, addresses, listed, allowed, strict=True):
            if address is None or exempt:
                outcomes.append(None)
            elif entry:
                outcomes.append(Drop(f"blocked {entry[0]}", entry[1]))
            else:
                outcomes.append(self._by_writing(document.url))
        return outcomes

    def _by_writing(self, url: str) -> Outcome:
        for pattern in self._patterns:
            if pattern.search(url):
                return Drop("blocked pattern", pattern.pattern)
        if self._words or self._soft_words:
            found = set(_WORD.findall(unquote(url).lower()))
            if hard := self._words & found:
                return Drop("blocked word", min(hard))
            soft = self._soft_words & found
            if len(soft) >= self.spec.soft_hits:
                return Drop("blocked words", " ".join(sorted(soft)))
        return None


class OptOut:
    """Drops documents that their owners took out: by id, text, domain, robots.txt or ai.txt."""

    version = 1

    def __init__(self, spec: OptOutSpec, seed: int) -> None:
        self.spec = spec
        self._lists = UrlLists(spec.domains, [], spec.lists, "opt_out")
        self._ids = _site_files(spec.ids, "opt_out.ids")
        self._hashes = _site_files(spec.hashes, "opt_out.hashes")
        self._folders = [_folder(path) for path in spec.robots]

    @cached_property
    def identity(self) -> str:
        """The content of all lists, and the name, size and time of every robots.txt."""
        files = [file.content() for file in (*self._ids, *self._hashes)]
        return "/".join([self._lists.content, *files, *map(_listing, self._folders)])

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        ids = _names(self._ids).holds([document.id for document in documents])
        taken = _hashed(self._hashes)
        hashes = [hashlib.sha256(document.text.encode()).hexdigest() for document in documents if len(taken)]
        texts = taken.holds(hashes) if hashes else [False] * len(documents)
        addresses = _addresses(documents)
        listed = self._lists.name(addresses)
        outcomes: list[Outcome] = []
        for place, (document, address) in enumerate(zip(documents, addresses, strict=True)):
            if document.id and ids[place]:
                outcomes.append(Drop("opted out by id"))
            elif texts[place]:
                outcomes.append(Drop("opted out by its text"))
            elif entry := listed[place]:
                outcomes.append(Drop(f"opted out by {entry[0]}", entry[1]))
            else:
                outcomes.append(self._by_site(address) if address else None)
        return outcomes

    def _by_site(self, address: UrlAddress) -> Outcome:
        if not _HOST.fullmatch(address.host):
            return None
        for folder in self._folders:
            robots, ai = read_site(folder, address.host)
            agent = forbidding_agent(robots, self.spec.agents, self.spec.all_agents, address.path)
            if agent:
                return Drop("opted out by robots.txt", agent)
            if self.spec.signals and forbids_training(robots, self.spec.agents, address.path):
                return Drop("opted out by a signal in robots.txt")
            if forbids_mining(ai, self.spec.agents, address.path):
                return Drop("opted out by ai.txt")
        return None


def _site_files(paths: Sequence[str], key: str) -> tuple[ListFile, ...]:
    return tuple(ListFile.of(path, key) for path in paths)


@lru_cache(maxsize=16)
def _words(files: tuple[ListFile, ...]) -> frozenset[str]:
    return frozenset(line.lower() for file in files for _, line in file.lines())


def _addresses(documents: Sequence[Document]) -> list[UrlAddress | None]:
    return [split_url(document.url) if document.url else None for document in documents]


@lru_cache(maxsize=16)
def _names(files: tuple[ListFile, ...]) -> NameList:
    return NameList.of(line for file in files for _, line in file.lines())


@lru_cache(maxsize=16)
def _hashed(files: tuple[ListFile, ...]) -> NameList:
    return NameList.of(_read_hashes(files))


def _read_hashes(files: tuple[ListFile, ...]) -> Iterator[str]:
    for file in files:
        for row, line in file.lines():
            written = line.split()[0].lower()  # sha256sum writes a name after it
            if not _SHA256.fullmatch(written):
                raise UserError(f"{file.path}:{row}: {line[:80]!r} is no SHA-256; write 64 hex digits a line")
            yield written


def _folder(path: str) -> str:
    full = os.path.expanduser(path)
    if not os.path.isdir(full):
        raise UserError(f"opt_out.robots: no folder {path}; give one with HOST/robots.txt for each host")
    return full


def _listing(folder: str) -> str:
    found = xxhash.xxh3_128()
    for inside, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(inside, name)
            stat = os.stat(path)
            found.update(f"{os.path.relpath(path, folder)}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return found.hexdigest()
