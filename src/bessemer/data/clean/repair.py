"""Steps that mend a text and leave its meaning: Unicode, white space, and (in `boilerplate`) a web page's frame."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Literal

from bessemer.data.clean.boilerplate import Boilerplate
from bessemer.data.clean.characters import characters, in_brackets
from bessemer.data.document import Document
from bessemer.data.step import Drop, Outcome
from bessemer.errors import UserError
from bessemer.spec.clean.text import UnicodeSpec, WhitespaceSpec

__all__ = ["Boilerplate", "Unicode", "Whitespace"]

PIECE_CHARS = 1 << 16  # mojibake is looked for in lines, and in pieces of this size in longer ones

# Control characters that are no white space, the byte-order mark, marks for annotations, deprecated format characters
# and code points that will never be characters.
_CONTROLS = re.compile(
    f"[{in_brackets(characters('0-8 E-1B 7F-84 86-9F 206A-206F FDD0-FDEF FEFF FFF9-FFFB FFFE-FFFF'))}"
    + "".join(chr((plane << 16) + 0xFFFE) + chr((plane << 16) + 0xFFFF) for plane in range(1, 17))
    + "]"
)
_MOST_MARKS = 30  # combining marks in a row that belong together: Unicode's own limit for text in streams

_LINE_ENDS = re.compile("\r\n|[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_OTHER_SPACES = str.maketrans(dict.fromkeys(characters("A0 1680 2000-200A 202F 205F 3000"), " "))


class Unicode:
    """Repairs, then removes controls, then normalises. ASCII costs one look for controls."""

    version = 1

    def __init__(self, spec: UnicodeSpec, seed: int) -> None:
        self._spec = spec
        self._repair = _mojibake_repair() if spec.mojibake else None

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        return [_changed(document.text, self._clean(document.text)) for document in documents]

    def _clean(self, text: str) -> str:
        if self._repair and not text.isascii():
            text = self._repair(text)
        if self._spec.controls:
            text = _CONTROLS.sub("", text)
        return text if self._spec.form == "none" else normalise(text, self._spec.form)


class Whitespace:
    """Mends lines; indentation is part of the text and stays."""

    version = 1

    def __init__(self, spec: WhitespaceSpec, seed: int) -> None:
        self._spec = spec
        self._empty_lines = re.compile(rf"\n{{{spec.most_empty_lines + 2},}}")
        # Looking behind first, a run of spaces is tried once and not from each of its spaces.
        self._spaces = re.compile(rf"(?<=\S)[ \t]{{{spec.most_spaces + 1},}}") if spec.most_spaces else None

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        return [_changed(document.text, self._clean(document.text)) for document in documents]

    def _clean(self, text: str) -> str:
        spec = self._spec
        text = _LINE_ENDS.sub("\n", text)
        if spec.plain_spaces and not text.isascii():
            text = text.translate(_OTHER_SPACES)
        text = "\n".join([line.rstrip() for line in text.split("\n")])
        if self._spaces and spec.most_spaces:
            text = self._spaces.sub(" " * spec.most_spaces, text)
        return self._empty_lines.sub("\n" * (spec.most_empty_lines + 1), text).strip("\n")


def normalise(text: str, form: Literal["NFC", "NFKC"]) -> str:
    """The normal form, in linear time.

    More than 30 combining marks in a row are normalised in parts: sorting them takes the square of their number
    (20,000 pairs: 1.4 s), and no language has them.
    """
    if text.isascii():
        return text
    marks = _combining_marks()
    if not re.search(rf"[{marks}]{{{_MOST_MARKS + 1}}}", text):
        return unicodedata.normalize(form, text)
    parts = re.split(rf"(?<=[{marks}]{{{_MOST_MARKS}}})", text)
    return "".join(unicodedata.normalize(form, part) for part in parts)


@functools.cache
def _combining_marks() -> str:
    """The regex class of what sorts among its neighbours, in itself or once it is taken apart."""
    every = (chr(i) for i in range(0x300, 0x1F000) if not 0xD800 <= i < 0xE000)
    return in_brackets(
        "".join(mark for mark in every if unicodedata.combining(unicodedata.normalize("NFKD", mark)[0]))
    )


def _mojibake_repair() -> Callable[[str], str]:
    """Repairs text line by line, and only lines that look wrong: the look is cheap, the repair is not."""
    try:
        from ftfy import fix_encoding
        from ftfy.badness import is_bad
    except ImportError as error:
        raise UserError(
            "clean: unicode repairs mojibake with ftfy, which is not installed: pip install 'bessemer[data]', "
            "or set mojibake: false"
        ) from error

    def repair(text: str) -> str:
        if not is_bad(text):
            return text
        return "\n".join([repaired(line) for line in text.split("\n")])

    def repaired(line: str) -> str:
        if len(line) > PIECE_CHARS:
            parts = [line[i : i + PIECE_CHARS] for i in range(0, len(line), PIECE_CHARS)]
            return "".join(map(repaired, parts))
        return fix_encoding(line) if is_bad(line) else line

    return repair


def _changed(before: str, after: str) -> Outcome:
    if not after or after.isspace():
        return Drop("no text")
    return after if after != before else None
