"""Steps that clean a text and keep its meaning. `extract` turns web pages into their main text with trafilatura, as for
FineWeb, with every option fixed; its deduplication stays off, because it remembers earlier pages of the process.
`unicode`, `whitespace` and `boilerplate` repair characters, white space, and lines of a web page's frame."""

from __future__ import annotations

import copy
import functools
import logging
import re
import unicodedata
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version as version_of
from typing import Any, Literal

from bessemer.data.curate.filters.word_splitter import characters, in_brackets
from bessemer.data.curate.step import Drop, Outcome, PerDocumentStep
from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.spec.text_steps import BoilerplateSpec, ExtractSpec, UnicodeSpec, WhitespaceSpec

_HTML, _TEXT = "html", "text"  # values of the label `type`


class Extract(PerDocumentStep):
    """Replaces documents that readers labelled as HTML by their main text, labelled `type: text`. Others are
    unchanged."""

    def __init__(self, spec: ExtractSpec, seed: int) -> None:
        self._spec = spec
        try:
            import trafilatura
        except ImportError as error:
            raise UserError(f"extract: needs trafilatura ({error}); pip install 'bessemer[data]'") from error
        logger = logging.getLogger("trafilatura")
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.CRITICAL)  # it warns about every page without text
        self._extract = trafilatura.extract
        self._options = {
            "favor_precision": spec.favour == "precision",
            "favor_recall": spec.favour == "recall",
            "include_tables": spec.include_tables,
            "include_comments": False,
            "include_formatting": False,
            "include_links": False,
            "include_images": False,
            "deduplicate": False,
            "with_metadata": False,
            "output_format": "txt",
            "config": _config(),
        }

    @property
    def identity(self) -> str:
        """The library versions: another version may extract another text."""
        return f"trafilatura {version_of('trafilatura')}, lxml {version_of('lxml')}"

    def outcome(self, document: Document) -> Outcome:
        if document.labels.get("type") != _HTML:
            return None
        if len(document.text) > self._spec.max_page_chars:
            return Drop("page too long", len(document.text))
        try:
            extracted = self._extract(document.text, **self._options)
        except Exception as error:  # its parsers may raise anything
            return Drop("page cannot be parsed", type(error).__name__)
        text = (extracted or "").strip()
        if len(text) < self._spec.min_chars:
            return Drop("no main text", len(text))
        document.labels["type"] = _TEXT
        return text


def _config() -> Any:
    """The library's published settings, whatever a settings file on the machine says."""
    from trafilatura.settings import DEFAULT_CONFIG

    config = copy.deepcopy(DEFAULT_CONFIG)
    config["DEFAULT"].update({"MIN_EXTRACTED_SIZE": "250", "MIN_OUTPUT_SIZE": "1", "MAX_TREE_SIZE": ""})
    return config


PIECE_CHARS = 1 << 16  # lines longer than this are repaired in pieces

# Control characters other than white space, the byte-order mark, annotation marks, deprecated format characters and
# noncharacters.
_CONTROLS = re.compile(
    f"[{in_brackets(characters('0-8 E-1B 7F-84 86-9F 206A-206F FDD0-FDEF FEFF FFF9-FFFB FFFE-FFFF'))}"
    + "".join(chr((plane << 16) + 0xFFFE) + chr((plane << 16) + 0xFFFF) for plane in range(1, 17))
    + "]"
)
_MAX_MARKS = 30  # consecutive combining marks: Unicode's limit for stream-safe text

_LINE_ENDS = re.compile("\r\n|[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_OTHER_SPACES = str.maketrans(dict.fromkeys(characters("A0 1680 2000-200A 202F 205F 3000"), " "))


class _RewriteStep(PerDocumentStep):
    """A step that rewrites the text; drops a document without text."""

    def outcome(self, document: Document) -> Outcome:
        after = self._clean(document.text)
        if not after or after.isspace():
            return Drop("no text")
        return after if after != document.text else None

    @abstractmethod
    def _clean(self, text: str) -> str: ...


class Unicode(_RewriteStep):
    """Repairs mojibake, removes control characters, then normalises. ASCII text costs one search for controls."""

    def __init__(self, spec: UnicodeSpec, seed: int) -> None:
        self._spec = spec
        self._repair = _mojibake_repair() if spec.mojibake else None

    def _clean(self, text: str) -> str:
        if self._repair and not text.isascii():
            text = self._repair(text)
        if self._spec.controls:
            text = _CONTROLS.sub("", text)
        return text if self._spec.form == "none" else normalise(text, self._spec.form)


class Whitespace(_RewriteStep):
    """Cleans line ends, empty lines and trailing spaces; indentation stays."""

    def __init__(self, spec: WhitespaceSpec, seed: int) -> None:
        self._spec = spec
        self._empty_lines = re.compile(rf"\n{{{spec.most_empty_lines + 2},}}")
        # The lookbehind makes the regex try each run of spaces once instead of from every space.
        self._spaces = re.compile(rf"(?<=\S)[ \t]{{{spec.most_spaces + 1},}}") if spec.most_spaces else None

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
    """The normal form, in linear time. More than 30 consecutive combining marks are normalised in parts: sorting them
    takes quadratic time (20,000 pairs: 1.4 s), and no language has them."""
    if text.isascii():
        return text
    marks = _combining_marks()
    if not re.search(rf"[{marks}]{{{_MAX_MARKS + 1}}}", text):
        return unicodedata.normalize(form, text)
    parts = re.split(rf"(?<=[{marks}]{{{_MAX_MARKS}}})", text)
    return "".join(unicodedata.normalize(form, part) for part in parts)


@functools.cache
def _combining_marks() -> str:
    """The regex class of characters that are reordered among combining marks, as they are or once decomposed."""
    every = (chr(i) for i in range(0x300, 0x1F000) if not 0xD800 <= i < 0xE000)
    sorting = (mark for mark in every if unicodedata.combining(unicodedata.normalize("NFKD", mark)[0]))
    return in_brackets("".join(sorting))


def _mojibake_repair() -> Callable[[str], str]:
    """Repairs text line by line, and only suspicious lines: the check is cheap, the repair is not."""
    try:
        from ftfy import fix_encoding
        from ftfy.badness import is_bad
    except ImportError as error:
        problem = "clean: unicode repairs mojibake with ftfy, which is not installed"
        raise UserError(f"{problem}: pip install 'bessemer[data]', or set mojibake: false") from error

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


# Phrases, in lower case, of short lines in a page's frame.
_PHRASES = """
accept all cookies | accept cookies | we use cookies | this site uses cookies | this website uses cookies |
cookie policy | cookie settings | privacy policy | terms of use | terms of service | terms and conditions | all
rights reserved | share on facebook | share on twitter | share on linkedin | share on whatsapp | share this
article | share this page | share this post | tweet this | pin it on pinterest | follow us on | like us on |
sign up for our newsletter | subscribe to our newsletter | subscribe to our mailing list | enter your email
address | click here to | skip to main content | skip to content | skip to navigation | jump to navigation |
toggle navigation | back to top | read more » | leave a comment | leave a reply | log in to comment | powered by
wordpress | please enable javascript | javascript is disabled | your browser does not support | add to cart |
forgot your password
"""
# Entries of a site's menu, on their own line or between bars.
_MENU = """
home | about | about us | contact | contact us | blog | news | events | shop | store | cart | checkout | search
| menu | close | login | log in | logout | log out | sign in | sign up | sign out | register | join | subscribe
| my account | account | profile | help | support | faq | faqs | careers | jobs | press | media | gallery
| downloads | products | services | solutions | pricing | resources | documentation | team | our team | partners
| sitemap | site map | privacy | terms | legal | imprint | cookies | archive | archives | categories | tags | links
| forum | forums | community | share | tweet | email | print | previous | next | facebook | twitter | instagram
| linkedin | youtube | pinterest | rss | donate | newsletter | advertise | feedback | accessibility | read more
| learn more | more
"""
PHRASES = [phrase.strip() for phrase in " ".join(_PHRASES.split()).split("|")]
MENU = frozenset(entry.strip() for entry in _MENU.split("|"))
_BARS = re.compile(r"\s*[|•·›»]\s*")
_BULLETS = " \t•*-–·|›»>"


class Boilerplate(PerDocumentStep):
    """Drops frame lines, and documents of nothing else."""

    def __init__(self, spec: BoilerplateSpec, seed: int) -> None:
        self._spec = spec
        self._phrases = [*(PHRASES if spec.builtin else ()), *(phrase.lower() for phrase in spec.phrases)]
        self._patterns = [re.compile(pattern) for pattern in spec.patterns]

    def outcome(self, document: Document) -> Outcome:
        text = document.text
        lower = text.lower()
        phrases = [phrase for phrase in self._phrases if phrase in lower]
        lines = text.split("\n")
        menu = set(_menu_lines(lines, self._spec.menu_lines)) if self._spec.menu_lines else set()
        if not phrases and not menu and not self._patterns:
            return None
        kept_lines = [line for i, line in enumerate(lines) if i not in menu and not self._is_frame(line, phrases)]
        if len(kept_lines) == len(lines):
            return None
        cleaned = "\n".join(kept_lines)
        return cleaned if cleaned and not cleaned.isspace() else Drop("nothing but boilerplate")

    def _is_frame(self, line: str, phrases: Sequence[str]) -> bool:
        if any(pattern.search(line) for pattern in self._patterns):
            return True
        lower = line.lower()
        return any(phrase in lower for phrase in phrases) and len(line.split()) <= self._spec.max_words


def _menu_lines(lines: Sequence[str], least: int) -> Iterator[int]:
    """Lines that are a menu between bars, and runs of at least `least` lines that are one entry each; empty lines do
    not break a run."""
    run: list[int] = []
    for i, line in enumerate(lines):
        if len(line) > 300:  # too long for an entry or menu
            entry = "-"
        else:
            entry = line.strip(_BULLETS).lower()
            entries = _BARS.split(entry)
            if len(entries) > 2 and 2 * sum(part in MENU for part in entries) >= len(entries):
                yield i
                continue
        if entry in MENU:
            run.append(i)
        elif entry:
            if len(run) >= least:
                yield from run
            run = []
    if len(run) >= least:
        yield from run
