"""C4's rules: lines that are no prose go, and documents with too few sentences, placeholder text or code. Decided as
in the reference pipeline of FineWeb, odd corners included: words are counted before citations are taken out, and a
curly bracket only counts in a line that got as far as that rule."""

from __future__ import annotations

import re
from heapq import nlargest

from bessemer.data.clean.each_document import EachDocument
from bessemer.data.clean.words import sentences
from bessemer.data.document import Document
from bessemer.data.step import Drop, Outcome
from bessemer.spec.clean.text import C4Spec

_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_LINE_ENDS = (".", "?", "!", '"', "'")
_PLACEHOLDER = "lorem ipsum"
_POLICIES = (
    "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies",
)  # fmt: skip


class C4(EachDocument):
    """Drops lines, then perhaps the document. Most documents need no word split: every line is a sentence at least."""

    def __init__(self, spec: C4Spec, seed: int) -> None:
        self._spec = spec

    def outcome(self, document: Document) -> Outcome:
        text = document.text
        spec = self._spec
        if spec.min_paragraphs:
            lines = nlargest(spec.min_paragraphs, map(len, text.split("\n")))
            if len(lines) < spec.min_paragraphs or lines[-1] < spec.min_paragraph_chars:
                found = sum(length >= spec.min_paragraph_chars for length in lines)
                long = f"lines of {spec.min_paragraph_chars} characters"
                return Drop(f"fewer than {spec.min_paragraphs} {long}", found)
        kept = self._kept_lines(text)
        if isinstance(kept, Drop):
            return kept
        if spec.min_sentences and (found := _sentences(kept, spec.min_sentences)) < spec.min_sentences:
            return Drop(f"fewer than {spec.min_sentences} sentences", found)
        cleaned = "\n".join(kept).strip()
        if not cleaned:
            return Drop("no line left")
        return cleaned if cleaned != text else None

    def _kept_lines(self, text: str) -> list[str] | Drop:
        """The lines that stay, or why the document does not."""
        spec = self._spec
        # What the whole text does not contain, no line does: most lines then need no lower-casing.
        cites = spec.remove_citations and "[" in text
        lower = (_CITATION.sub("", text) if cites else text).lower()
        placeholder = spec.drop_lorem_ipsum and _PLACEHOLDER in lower
        script = spec.drop_javascript_lines and "javascript" in lower
        bracket = spec.drop_curly_brackets and "{" in text
        policy = spec.drop_policy_lines and any(phrase in lower for phrase in _POLICIES)
        any_phrase = placeholder or script or policy or bracket
        min_words, longest = spec.min_line_words or 0, spec.max_word_chars or 0
        kept = []
        for line in text.splitlines():
            line = line.strip()
            words = line.split()
            if longest and len(line) > longest and max(map(len, words), default=0) > longest:
                continue
            if cites and "[" in line:
                line = _CITATION.sub("", line)
            if spec.line_end_punctuation and (not line.endswith(_LINE_ENDS) or line.endswith("...")):
                continue
            if len(words) < min_words:
                continue
            if any_phrase:
                lower = line.lower()
                if placeholder and _PLACEHOLDER in lower:
                    return Drop("contains lorem ipsum")
                if script and "javascript" in lower:
                    continue
                if bracket and "{" in line:
                    return Drop("contains a curly bracket")
                if policy and any(phrase in lower for phrase in _POLICIES):
                    continue
            kept.append(line)
        return kept


def _sentences(lines: list[str], most: int) -> int:
    """Sentences in the lines, counted up to `most`: every line has one at least, so few lines need a closer look."""
    found = len(lines)
    for line in lines:
        if found >= most:
            break
        found += sentences(line, most) - 1
    return min(found, most)
