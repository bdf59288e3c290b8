"""The published filters of Gopher, C4 and FineWeb, with their published limits, decided as in FineWeb's reference
pipeline, including its corner cases: C4 counts words before it removes citations, and a curly bracket only counts in a
line that passed the earlier rules. Runs of n words are compared as 64-bit hashes sorted by numpy; only those that
repeat are examined one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from heapq import nlargest

import numpy as np

from bessemer.data.curate.dedup.shuffle import begins
from bessemer.data.curate.filters.word_splitter import LINE_ENDS, split
from bessemer.data.curate.filters.words import (
    Hashes,
    Ints,
    WordCounts,
    WordSpans,
    chunk_count,
    count_sentences,
    powers,
    shared_words,
)
from bessemer.data.curate.step import Drop, Outcome, PerDocumentStep
from bessemer.data.read.entry import Document
from bessemer.spec.text_steps import C4Spec, FineWebSpec, GopherQualitySpec, GopherRepetitionSpec


class GopherQuality(PerDocumentStep):
    """Drops documents that do not look like prose: by words, marks, lines, letters and stop words, in that order."""

    def __init__(self, spec: GopherQualitySpec, seed: int) -> None:
        self._spec = spec
        self._words = shared_words()
        self._stop_words = frozenset(spec.stop_words)
        # A stop word between spaces is a word of the text, unless the splitter would split it.
        alone = (word for word in spec.stop_words if word.split() == [word] and split(word) == (word,))
        self._between_spaces = [f" {word} " for word in alone]

    def outcome(self, document: Document) -> Outcome:
        text = document.text
        counts = self._words.counts(text)
        shape = self._length(counts) or self._marks(text, counts.words) or self._lines(text)
        return shape or self._letters(counts) or self._stops(text)

    def _length(self, counts: WordCounts) -> Drop | None:
        spec = self._spec
        if spec.min_words and counts.plain < spec.min_words:
            return Drop(f"fewer than {spec.min_words} words", counts.plain)
        if spec.max_words and counts.plain > spec.max_words:
            return Drop(f"more than {spec.max_words} words", counts.plain)
        if not counts.plain:
            return None  # no mean word length without words
        mean = counts.plain_chars / counts.plain
        if spec.min_word_length and mean < spec.min_word_length:
            return Drop(f"mean word length below {spec.min_word_length:g}", mean)
        if spec.max_word_length and mean > spec.max_word_length:
            return Drop(f"mean word length above {spec.max_word_length:g}", mean)
        return None

    def _marks(self, text: str, words: int) -> Drop | None:
        most = self._spec.max_hashes
        if most and (share := text.count("#") / max(words, 1)) > most:
            return Drop(f"more than {most:g} # for each word", share)
        most = self._spec.max_ellipses
        if most and (share := _count_ellipses(text) / max(words, 1)) > most:
            return Drop(f"more than {most:g} ellipses for each word", share)
        return None

    def _lines(self, text: str) -> Drop | None:
        """Examines lines only if the text has enough marks to violate the rule."""
        least_lines = max(text.count("\n"), 1)
        most = self._spec.max_bullet_lines
        if most and (text.count("-") + text.count("•")) / least_lines > most:
            lines = text.splitlines()
            share = sum(line.lstrip().startswith(("•", "-")) for line in lines) / len(lines)
            if share > most:
                return Drop(f"lines that start with a bullet above {most:g}", share)
        most = self._spec.max_ellipsis_lines
        if most and _count_ellipses(text) / least_lines > most:
            lines = text.splitlines()
            share = sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines)
            if share > most:
                return Drop(f"lines that end with an ellipsis above {most:g}", share)
        return None

    def _letters(self, counts: WordCounts) -> Drop | None:
        least = self._spec.min_alphabetic_words
        share = counts.alphabetic / max(counts.words, 1)
        return Drop(f"words with a letter below {least:g}", share) if least and share < least else None

    def _stops(self, text: str) -> Drop | None:
        least = self._spec.min_stop_words
        if not least or sum(word in text for word in self._between_spaces) >= least:
            return None
        count = len(self._stop_words & self._words.distinct(text))
        return Drop(f"fewer than {least} different stop words", count) if count < least else None


def _count_ellipses(text: str) -> int:
    return text.count("...") + text.count("…")


_LONG_WORDS = 1 << 16  # longer texts are processed one n at a time


class GopherRepetition(PerDocumentStep):
    """Drops documents that repeat themselves. Takes up to 15 bytes of memory per character of a document."""

    def __init__(self, spec: GopherRepetitionSpec, seed: int) -> None:
        self._spec = spec
        self._words = shared_words()
        self._top = _positive_limits(spec.max_top_ngrams)
        self._repeated = _positive_limits(spec.max_repeated_ngrams)

    def outcome(self, document: Document) -> Outcome:
        text = document.text
        if not text:
            return None  # `length` drops empty documents
        return self._repeated_blocks(text) or self._repeated_runs(text)

    def _repeated_blocks(self, text: str) -> Drop | None:
        spec = self._spec
        rules = (
            ("paragraphs", split_paragraphs, spec.max_repeated_paragraphs, spec.max_repeated_paragraph_chars),
            ("lines", split_lines, spec.max_repeated_lines, spec.max_repeated_line_chars),
        )
        for name, cut, most, most_chars in rules:
            blocks = cut(text)
            again, chars = count_repeated(blocks)
            if most and again / len(blocks) > most:
                return Drop(f"repeated {name} above {most:g}", again / len(blocks))
            if most_chars and chars / len(text) > most_chars:
                return Drop(f"characters in repeated {name} above {most_chars:g}", chars / len(text))
        return None

    def _repeated_runs(self, text: str) -> Drop | None:
        if not self._top and not self._repeated:
            return None
        spans, chars = self._words.spans(text), len(text)
        joined = Runs(spans, gap=1)
        for n, most in self._top:
            share = joined.top_share(n, chars, most)
            if share > most:
                return Drop(f"characters in the top {n}-gram above {most:g}", share)
        repeated_chars = Runs(spans, gap=0).repeated_chars([n for n, _ in self._repeated])
        for (n, most), again in zip(self._repeated, repeated_chars, strict=False):
            if again / chars > most:
                return Drop(f"characters in repeated {n}-grams above {most:g}", again / chars)
        return None


def _positive_limits(limits: dict[int, float]) -> list[tuple[int, float]]:
    return [(n, most) for n, most in sorted(limits.items()) if most]


def split_paragraphs(text: str) -> list[str]:
    """The blocks between empty lines, without white space around the text."""
    blocks = text.strip().split("\n\n")
    return [block.lstrip("\n") for block in blocks if block] if len(blocks) > 1 else blocks


def split_lines(text: str) -> list[str]:
    """The lines; several newlines count as one, and newlines at either end add an empty line."""
    ends = [""] * (text.startswith("\n") + text.endswith("\n"))
    return [*filter(None, text.split("\n")), *ends]


def count_repeated(blocks: Sequence[str]) -> tuple[int, int]:
    """How many blocks occurred before, and their characters."""
    different = set(blocks)
    if len(different) == len(blocks):
        return 0, 0
    return len(blocks) - len(different), sum(map(len, blocks)) - sum(map(len, different))


class Runs:
    """Runs of n words of one text. The hash of a run is that of its joined text. With a gap of 1 between words, equal
    hashes mean equal words; without a gap, words may be split differently."""

    def __init__(self, spans: WordSpans, gap: int) -> None:
        self._words = len(spans.lengths)
        self._gap = gap
        self._ends = np.zeros(self._words + 1, np.int64)
        np.cumsum(spans.lengths + gap, out=self._ends[1:])
        starts = self._ends[:-1]
        self._sums = np.zeros(self._words + 1, np.uint64)
        np.cumsum(spans.hashes * powers(starts), out=self._sums[1:])
        self._shift = powers(starts, inverse=True)

    def hashes(self, n: int) -> Hashes:
        """One per run, in order; none if there are fewer than n words."""
        runs = max(self._words - n + 1, 0)
        return (self._sums[n:] - self._sums[:runs]) * self._shift[:runs]

    def lengths(self, n: int) -> Ints:
        """Characters of each run, including the gaps between words."""
        return self._ends[n:] - self._ends[: max(self._words - n + 1, 0)] - self._gap

    def top_share(self, n: int, chars: int, most: float) -> float:
        """The share of `chars` in all occurrences of the most frequent run, the first of several; 0 where it cannot
        exceed `most`."""
        lengths = self.lengths(n)
        if not len(lengths):
            return 0.0
        # How often the longest run would have to occur. Usually none does, which is quick to check.
        least = max(int(most * chars / int(lengths.max())), 1)
        if least > len(lengths):
            return 0.0
        hashes = self.hashes(n)
        ordered = np.sort(hashes)
        if not (ordered[least - 1 :] == ordered[: len(ordered) - least + 1]).any():
            return 0.0
        edges = np.append(np.flatnonzero(begins(ordered)), ordered.size)
        counts = edges[1:] - edges[:-1]
        times = int(counts.max())
        firsts = np.minimum.reduceat(np.argsort(hashes), edges[:-1])
        return times * int(lengths[firsts[counts == times].min()]) / chars

    def repeated_chars(self, ns: Sequence[int]) -> Iterator[int]:
        """For each n the characters in repeated runs, scanning from left to right and skipping past each of them."""
        # All n at once, as rows, because numpy's call overhead dominates on short texts. Long texts save memory.
        together = len(ns) if self._words < _LONG_WORDS else 1
        for first in range(0, len(ns), together):
            yield from self._repeated_chars(ns[first : first + together])

    def _repeated_chars(self, ns: Sequence[int]) -> Iterator[int]:
        positions, hashes = self._candidates(ns)
        cuts = np.searchsorted(positions, np.arange(len(ns) + 1) * self._words).tolist()
        ends = self._ends.tolist() if self._words < _LONG_WORDS else self._ends
        for row, n in enumerate(ns):
            before = row * self._words  # positions continue from row to row
            seen: set[int] = set()
            chars = resume_at = 0
            for first in range(cuts[row], cuts[row + 1], _LONG_WORDS):  # Python integers take much memory
                part = slice(first, min(first + _LONG_WORDS, cuts[row + 1]))
                for place, run_hash in zip(positions[part].tolist(), hashes[part].tolist(), strict=True):
                    if place >= resume_at:
                        if run_hash in seen:
                            chars += int(ends[place - before + n] - ends[place - before])
                            resume_at = place + n
                        else:
                            seen.add(run_hash)
            yield chars

    def _candidates(self, ns: Sequence[int]) -> tuple[Ints, Hashes]:
        """The starts of runs that occur more than once, one row per n, and their hashes. May include a few others,
        which never repeat and so do no harm."""
        hashes = np.empty((len(ns), self._words), np.uint64)
        hashes[:] = np.arange(self._words, dtype=np.uint64)  # distinct values at the end, where no run begins
        for row, n in zip(hashes, ns, strict=True):
            row[: max(self._words - n + 1, 0)] = self.hashes(n)
        ordered = np.sort(hashes, axis=1)
        again = ordered[:, 1:] == ordered[:, :-1]
        # A table of the hashes' first bits takes less than half the time of sorting positions.
        bits = max(12, self._words.bit_length() + 3)
        tables = np.arange(len(ns), dtype=np.uint64)[:, None] << np.uint64(bits)
        marked = np.zeros(len(ns) << bits, np.bool_)
        shift = np.uint64(64 - bits)
        marked[((ordered[:, 1:] >> shift) | tables).view(np.int64)[again]] = True  # faster than unsigned
        chosen = marked[((hashes >> shift) | tables).view(np.int64)]
        for row, n in zip(chosen, ns, strict=True):
            row[max(self._words - n + 1, 0) :] = False
        positions = np.flatnonzero(chosen)
        return positions, hashes.ravel()[positions]


_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_LINE_ENDS = (".", "?", "!", '"', "'")
_PLACEHOLDER = "lorem ipsum"
_POLICIES = (
    "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies",
)  # fmt: skip


class C4(PerDocumentStep):
    """Drops lines, then perhaps the document. Most documents need no word split, because every line is at least a
    sentence."""

    def __init__(self, spec: C4Spec, seed: int) -> None:
        self._spec = spec

    def outcome(self, document: Document) -> Outcome:
        text = document.text
        spec = self._spec
        if spec.min_paragraphs:
            lines = nlargest(spec.min_paragraphs, map(len, text.split("\n")))
            if len(lines) < spec.min_paragraphs or lines[-1] < spec.min_paragraph_chars:
                count = sum(length >= spec.min_paragraph_chars for length in lines)
                long = f"lines of {spec.min_paragraph_chars} characters"
                return Drop(f"fewer than {spec.min_paragraphs} {long}", count)
        kept_lines = self._kept_lines(text)
        if isinstance(kept_lines, Drop):
            return kept_lines
        if spec.min_sentences and (count := _sentences(kept_lines, spec.min_sentences)) < spec.min_sentences:
            return Drop(f"fewer than {spec.min_sentences} sentences", count)
        cleaned = "\n".join(kept_lines).strip()
        if not cleaned:
            return Drop("no line left")
        return cleaned if cleaned != text else None

    def _kept_lines(self, text: str) -> list[str] | Drop:
        """The lines that stay, or why the document is dropped."""
        spec = self._spec
        # Checks the whole text first, so that most lines need no lower-casing.
        cites = spec.remove_citations and "[" in text
        lower = (_CITATION.sub("", text) if cites else text).lower()
        placeholder = spec.drop_lorem_ipsum and _PLACEHOLDER in lower
        script = spec.drop_javascript_lines and "javascript" in lower
        bracket = spec.drop_curly_brackets and "{" in text
        policy = spec.drop_policy_lines and any(phrase in lower for phrase in _POLICIES)
        any_phrase = placeholder or script or policy or bracket
        min_words, longest = spec.min_line_words or 0, spec.max_word_chars or 0
        kept_lines = []
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
            kept_lines.append(line)
        return kept_lines


def _sentences(lines: list[str], most: int) -> int:
    """Sentences in the lines, counted up to `most`. Every line has at least one, so few lines are split."""
    count = len(lines)
    for line in lines:
        if count >= most:
            break
        count += count_sentences(line, most) - 1
    return min(count, most)


class FineWeb(PerDocumentStep):
    """Drops documents by the shape of their lines. Splits words only where a cheap bound does not decide."""

    def __init__(self, spec: FineWebSpec, seed: int) -> None:
        self._spec = spec
        self._words = shared_words()
        self._line_ends = frozenset(LINE_ENDS if spec.line_ends is None else spec.line_ends)

    def outcome(self, document: Document) -> Outcome:
        text = document.text
        lines = [line for line in text.split("\n") if line and not line.isspace()]
        if not lines:
            return Drop("empty")
        return self._line_shapes(lines) or self._repeated(text, lines) or self._list(text)

    def _line_shapes(self, lines: list[str]) -> Drop | None:
        spec, ends = self._spec, self._line_ends
        least = spec.min_ended_lines
        if least:
            share = sum([line[-1] in ends for line in lines]) / len(lines)
            if share < least and not (share == 0 and spec.allow_no_ended_lines):
                return Drop(f"lines that end in punctuation below {least:g}", share)
        most = spec.max_short_lines
        if most:
            share = sum([len(line) <= spec.short_line_chars for line in lines]) / len(lines)
            if share > most:
                return Drop(f"lines of at most {spec.short_line_chars} characters above {most:g}", share)
        return None

    def _repeated(self, text: str, lines: list[str]) -> Drop | None:
        most = self._spec.max_repeated_line_chars
        if not most:
            return None
        chars = count_repeated(lines)[1]
        share = chars / (len(text) - text.count("\n")) if chars else 0.0
        return Drop(f"characters in repeated lines above {most:g}", share) if share > most else None

    def _list(self, text: str) -> Drop | None:
        most = self._spec.max_newlines
        newlines = text.count("\n")
        # There are at least as many words as chunks between spaces, which are quick to count.
        if not most or newlines / chunk_count(text) <= most:
            return None
        share = newlines / self._words.count(text)
        return Drop(f"newlines for each word above {most:g}", share) if share > most else None
