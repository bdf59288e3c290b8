"""Names the language of a text: by fastText's model where the `data` extra is installed, else by the script of its
letters."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import lru_cache

from bessemer.data.read.entry import Document
from bessemer.errors import UserError

_CODE = re.compile(r"```.*?(```|\Z)", re.S)
_READ_CHARS = 1000
_LETTER_SHARE = 0.6  # of what is not white space; code and formulas have less
_MODEL_LETTERS = 40  # fewer are too short for the model
_SCRIPT_LETTERS = 20  # of an alphabet; a word of Chinese, Japanese or Korean has one or two
_BLOCK_LETTERS = 4
# Scripts of one language.
_LANGUAGES = {"CJK": "zh", "HIRAGANA": "ja", "HANGUL": "ko", "THAI": "th", "GREEK": "el", "HEBREW": "he"}


class LanguageDetector:
    """`detect` gives a language code, the name of a script, or None where the text does not tell."""

    def __init__(self) -> None:
        from bessemer.data.curate.filters.content import Language
        from bessemer.spec.text_steps import LanguageSpec

        self._model: Language | None
        try:
            self._model = Language(LanguageSpec(), 0)
        except UserError:  # not installed
            self._model = None

    @property
    def method(self) -> str:
        return "by fastText" if self._model else "by script"

    def detect(self, text: str) -> str | None:
        text = _CODE.sub(" ", text)[:_READ_CHARS]
        letters = [letter for letter in text if letter.isalpha()]
        name = _script(letters)
        if name is None or len(letters) < _LETTER_SHARE * len("".join(text.split())):
            return None
        if name in _LANGUAGES:
            return _LANGUAGES[name] if len(letters) >= _BLOCK_LETTERS else None
        if self._model is None:
            return f"{name.title()} script" if len(letters) >= _SCRIPT_LETTERS else None
        if len(letters) < _MODEL_LETTERS:
            return None
        document = Document(text, "", 1)
        self._model.outcome(document)
        sure = float(document.labels.get("language_score", 0)) >= self._model.spec.min_confidence
        return str(document.labels["language"]) if sure else None


def _script(letters: list[str]) -> str | None:
    """The script of most letters. Japanese mixes Kana with Chinese letters."""
    counts = Counter(map(_script_of, letters))
    kana = counts.pop("KATAKANA", 0) + counts.pop("HIRAGANA", 0)
    if kana:
        counts["HIRAGANA"] = kana + (counts.pop("CJK", 0) if kana * 10 >= counts["CJK"] else 0)
    if not counts:
        return None
    name, count = counts.most_common(1)[0]
    return name if count >= 0.7 * len(letters) else None


@lru_cache(maxsize=4096)
def _script_of(letter: str) -> str:
    return unicodedata.name(letter, "UNKNOWN").split(maxsplit=1)[0]
