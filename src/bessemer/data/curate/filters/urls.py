"""The steps `block_urls` and `opt_out`, which judge a document by its origin. robots.txt and ai.txt are read as in RFC
9309, including signals about training. Rules are matched by plain search, part by part, so no rule can be slow. ai.txt
has the same form and tells data miners which file types they may use (`Disallow: *.txt`)."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote

import xxhash

from bessemer.data.curate.filters.lists import ListFile, NameList, UrlAddress, UrlLists, normal_escapes, split_url
from bessemer.data.curate.step import Drop, Outcome
from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.spec.curate.dedup import BlockUrlsSpec, OptOutSpec

_LONGEST_BYTES = 512_000  # RFC 9309, 2.5 requires at least 500 KiB
_TRAINING = {"content-signal": ("ai-train", "no"), "content-usage": ("train-ai", "n")}


class RobotsRule(NamedTuple):
    """A path with * and, at its end, $."""

    allow: bool
    path: str

    def matches(self, path: str) -> bool:
        anchored = self.path.endswith("$")
        first, *others = (self.path[:-1] if anchored else self.path).split("*")
        if not path.startswith(first):
            return False
        if not others:
            return not anchored or path == first
        at = len(first)
        for part in others[:-1]:
            at = path.find(part, at)
            if at < 0:
                return False
            at += len(part)
        if anchored:
            return len(path) - len(others[-1]) >= at and path.endswith(others[-1])
        return path.find(others[-1], at) >= 0


@dataclass
class RobotsGroup:
    """The rules below one or more User-agent lines. `training` holds rules from signals about training."""

    rules: list[RobotsRule] = field(default_factory=list)
    training: list[RobotsRule] = field(default_factory=list)


Robots = dict[str, RobotsGroup]  # by agent, in lower case; * is everyone


def parse_robots(text: str) -> Robots:
    """The groups of a file; groups of the same agent are merged. Unknown lines are skipped, as the RFC requires."""
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
    """GPTBot/1.0 and gptbot* become gptbot."""
    return value.partition("/")[0].strip().lower().rstrip("*") or "*"


def _signal(value: str, name: str, no: str) -> RobotsRule | None:
    """Parses `search=yes, ai-train=no`, optionally after a path."""
    path, _, rest = value.partition(" ") if value.startswith("/") else ("/", "", value)
    for entry in re.split("[,;]", rest):
        key, _, answer = entry.partition("=")
        if key.strip().lower() == name:
            return RobotsRule(answer.strip().lower() != no, normal_path(path))
    return None


def normal_path(path: str) -> str:
    """A path or rule in one form: %7e becomes ~, %c3 becomes %C3, ü becomes %C3%BC."""
    return normal_escapes(path if path.isascii() else quote(path, safe="%/?:@!$&'()*+,;=~-._[]"))


def is_allowed(rules: Sequence[RobotsRule], path: str) -> bool:
    """The longest matching rule decides, between equals the allowing one; without a match, allowed."""
    best = max(((len(rule.path), rule.allow) for rule in rules if rule.matches(path)), default=(0, True))
    return best[1]


def forbidding_agent(robots: Robots, agents: Sequence[str], everyone: bool, path: str) -> str | None:
    """The first agent that may not fetch the path. With `everyone`, the rules for * apply to agents without
    their own."""
    path = normal_path(path)
    for agent in agents:
        group = robots.get(agent.lower()) or (robots.get("*") if everyone else None)
        if group and not is_allowed(group.rules, path):
            return agent
    return None


def forbids_training(robots: Robots, agents: Sequence[str], path: str) -> bool:
    """Whether a signal for everyone or for one of the agents forbids training on the path."""
    path = normal_path(path)
    groups = (robots.get(agent.lower()) for agent in ("*", *agents))
    return any(group and not is_allowed(group.training, path) for group in groups)


def forbids_mining(ai: Robots, agents: Sequence[str], path: str) -> bool:
    """Whether an ai.txt forbids the path or its type. A path without an extension counts as html."""
    path = normal_path(path.partition("?")[0])
    if "." not in path.rpartition("/")[2]:
        path += "index.html" if path.endswith("/") else ".html"
    for group in filter(None, (ai.get(agent.lower()) for agent in ("*", *agents))):
        # `*.txt` names a file type, so it must match the end.
        rules = [
            rule._replace(path=rule.path + "$" if rule.path.startswith("*.") and rule.path[-1] != "$" else rule.path)
            for rule in group.rules
        ]
        if not is_allowed(rules, path):
            return True
    return False


@lru_cache(maxsize=8192)
def read_site(folder: str, host: str) -> tuple[Robots, Robots]:
    """The robots.txt and ai.txt of a host in a folder: HOST/robots.txt or HOST.robots.txt, likewise for ai.txt.
    www.HOST and HOST replace each other where one is missing."""
    alternative = host.removeprefix("www.") if host.startswith("www.") else f"www.{host}"
    parsed = []
    for file in ("robots.txt", "ai.txt"):
        names = [f"{site}{separator}{file}" for site in (host, alternative) for separator in "/."]
        texts = (text for name in names if (text := _read(os.path.join(folder, name))) is not None)
        parsed.append(parse_robots(next(texts, "")))
    return parsed[0], parsed[1]


def _read(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return file.read(_LONGEST_BYTES).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


_WORD = re.compile(r"[^\W_]+")
_HOST = re.compile(r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")  # usable as a file name
_SHA256 = re.compile("[0-9a-f]{64}")


class BlockUrls:
    """Drops documents whose URL is on a list, matches a pattern or contains certain words."""

    version = 1

    def __init__(self, spec: BlockUrlsSpec, seed: int) -> None:
        self.spec = spec
        self._blocked = UrlLists(spec.domains, spec.urls, spec.lists, "block_urls")
        domains = [entry for entry in spec.allow if "/" not in entry]
        self._allowed = UrlLists(domains, [entry for entry in spec.allow if "/" in entry], [], "block_urls")
        self._patterns = (*map(re.compile, spec.patterns), *self._blocked.patterns)
        words = _list_files(spec.word_lists, "block_urls.word_lists")
        soft = _list_files(spec.soft_word_lists, "block_urls.soft_word_lists")
        self._words = frozenset(word.lower() for word in spec.words) | _words(words)
        self._soft_words = frozenset(word.lower() for word in spec.soft_words) | _words(soft)
        self.identity = "/".join([self._blocked.content, *(file.content() for file in (*words, *soft))])

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        addresses = _addresses(documents)
        blocked = self._blocked.match(addresses)
        allowed = self._allowed.match(addresses)
        outcomes: list[Outcome] = []
        for document, address, entry, exempt in zip(documents, addresses, blocked, allowed, strict=True):
            if address is None or exempt:
                outcomes.append(None)
            elif entry:
                outcomes.append(Drop(f"blocked {entry[0]}", entry[1]))
            else:
                outcomes.append(self._by_text(document.url))
        return outcomes

    def _by_text(self, url: str) -> Outcome:
        for pattern in self._patterns:
            if pattern.search(url):
                return Drop("blocked pattern", pattern.pattern)
        if self._words or self._soft_words:
            words = set(_WORD.findall(unquote(url).lower()))
            if hard := self._words & words:
                return Drop("blocked word", min(hard))
            soft = self._soft_words & words
            if len(soft) >= self.spec.soft_hits:
                return Drop("blocked words", " ".join(sorted(soft)))
        return None


class OptOut:
    """Drops documents whose owners opted out: by id, text, domain, robots.txt or ai.txt."""

    version = 1

    def __init__(self, spec: OptOutSpec, seed: int) -> None:
        self.spec = spec
        self._lists = UrlLists(spec.domains, [], spec.lists, "opt_out")
        self._ids = _list_files(spec.ids, "opt_out.ids")
        self._hashes = _list_files(spec.hashes, "opt_out.hashes")
        self._folders = [_folder(path) for path in spec.robots]

    @cached_property
    def identity(self) -> str:
        """The content of all lists, and the name, size and time of every robots.txt."""
        files = [file.content() for file in (*self._ids, *self._hashes)]
        return "/".join([self._lists.content, *files, *map(_hash_listing, self._folders)])

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        ids = _names(self._ids).contains([document.id for document in documents])
        opted_out = _hashed(self._hashes)
        hashes = [hashlib.sha256(document.text.encode()).hexdigest() for document in documents if len(opted_out)]
        texts = opted_out.contains(hashes) if hashes else [False] * len(documents)
        addresses = _addresses(documents)
        matches = self._lists.match(addresses)
        outcomes: list[Outcome] = []
        for place, (document, address) in enumerate(zip(documents, addresses, strict=True)):
            if document.id and ids[place]:
                outcomes.append(Drop("opted out by id"))
            elif texts[place]:
                outcomes.append(Drop("opted out by its text"))
            elif entry := matches[place]:
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


def _list_files(paths: Sequence[str], key: str) -> tuple[ListFile, ...]:
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
    hashes = []
    for file in files:
        for row, line in file.lines():
            hashes.append(line.split()[0].lower())  # sha256sum appends a name
            if not _SHA256.fullmatch(hashes[-1]):
                raise UserError(f"{file.path}:{row}: {line[:80]!r} is no SHA-256; write 64 hex digits a line")
    return NameList.of(hashes)


def _folder(path: str) -> str:
    full = os.path.expanduser(path)
    if not os.path.isdir(full):
        raise UserError(f"opt_out.robots: no folder {path}; give one with HOST/robots.txt for each host")
    return full


def _hash_listing(folder: str) -> str:
    digest = xxhash.xxh3_128()
    for inside, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(inside, name)
            stat = os.stat(path)
            digest.update(f"{os.path.relpath(path, folder)}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
