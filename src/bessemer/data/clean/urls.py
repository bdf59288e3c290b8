"""The steps that judge a document by where it comes from: `block_urls` and `opt_out`."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from urllib.parse import unquote

import xxhash

from bessemer.data.clean.lists import Address, ListFile, Names, UrlLists, split_url
from bessemer.data.clean.robots import forbidding_agent, forbids_mining, forbids_training, read_site
from bessemer.data.document import Document
from bessemer.data.step import Drop, Outcome
from bessemer.errors import UserError
from bessemer.spec.clean.privacy import BlockUrlsSpec, OptOutSpec

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
        words = _files(spec.word_lists, "block_urls.word_lists")
        soft = _files(spec.soft_word_lists, "block_urls.soft_word_lists")
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
        self._ids = _files(spec.ids, "opt_out.ids")
        self._hashes = _files(spec.hashes, "opt_out.hashes")
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

    def _by_site(self, address: Address) -> Outcome:
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


def _files(paths: Sequence[str], key: str) -> tuple[ListFile, ...]:
    return tuple(ListFile.of(path, key) for path in paths)


@lru_cache(maxsize=16)
def _words(files: tuple[ListFile, ...]) -> frozenset[str]:
    return frozenset(line.lower() for file in files for _, line in file.lines())


def _addresses(documents: Sequence[Document]) -> list[Address | None]:
    return [split_url(document.url) if document.url else None for document in documents]


@lru_cache(maxsize=16)
def _names(files: tuple[ListFile, ...]) -> Names:
    return Names.of(line for file in files for _, line in file.lines())


@lru_cache(maxsize=16)
def _hashed(files: tuple[ListFile, ...]) -> Names:
    return Names.of(_read_hashes(files))


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
