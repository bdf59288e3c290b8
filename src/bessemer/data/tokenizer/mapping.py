"""Two vocabularies: which tokens of a student a teacher has too, and where both have read the same of a text.

Tokens are equal if they stand for the same bytes (special tokens: if they have the same name, or both end documents).
A teacher's prediction compares with a student's where both have read the same bytes. This is the exact match of FuseLLM
(Wan et al. 2024). Sorting the probabilities (ULD, Boizard et al. 2024) needs no common tokens, but pulls the student
towards another order of probabilities, not towards the teacher's words.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bessemer.data.tokenizer.load import byte_characters
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError

_SPACE = "▁"  # SentencePiece


def token_bytes(tokenizer: Tokenizer, name: str) -> dict[int, bytes]:
    """The bytes of each token but special ones. `name` is the setting of the tokenizer, for messages."""
    definition, kind = tokenizer.inner.to_str(), type(tokenizer.inner.model).__name__
    vocab = {word: i for word, i in tokenizer.inner.get_vocab().items() if word not in tokenizer.special}
    if kind in ("BPE", "Unigram") and '"ByteLevel"' in definition:
        to_byte = {character: byte for byte, character in byte_characters().items()}
        plain = {i: word for word, i in vocab.items() if all(character in to_byte for character in word)}
        return {i: bytes(to_byte[character] for character in word) for i, word in plain.items()}
    if kind in ("BPE", "Unigram") and ('"Metaspace"' in definition or '"ByteFallback"' in definition):
        return {i: _piece_bytes(word) for word, i in vocab.items()}
    raise UserError(
        f"{name}: its tokens are neither byte-level nor SentencePiece's, so they cannot be mapped: use a model with "
        "the student's tokenizer, or train on its answers (bessemer generate --write)"
    )


def _piece_bytes(word: str) -> bytes:
    if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        return bytes([int(word[3:5], 16)])
    return word.replace(_SPACE, " ").encode()


@dataclass(frozen=True)
class AlignedText:
    """A document as the teacher reads it, and for each of the student's inputs the index of the teacher's input after
    which both have read the same; -1 where there is none."""

    ids: list[int]
    after: list[int]


class TokenMap:
    """`begin` are the ids that the teacher reads before a text."""

    def __init__(self, student: Tokenizer, teacher: Tokenizer, begin: Sequence[int]) -> None:
        self.student, self.teacher, self.begin = student, teacher, list(begin)
        self._student_bytes = token_bytes(student, "tokenizer")
        self._teacher_bytes = token_bytes(teacher, "models.teacher")

    @cached_property
    def to_teacher(self) -> dict[int, int]:
        """The teacher's token for each token of the student that it has too."""
        by_bytes = {content: i for i, content in sorted(self._teacher_bytes.items(), reverse=True)}
        common = {i: by_bytes[content] for i, content in self._student_bytes.items() if content in by_bytes}
        specials = self.student.special.items()
        common |= {i: self.teacher.special[name] for name, i in specials if name in self.teacher.special}
        return common | {self.student.eos_id: self.teacher.eos_id}

    @cached_property
    def pairs(self) -> npt.NDArray[np.int64]:
        """(2, N): the common tokens by the student's and the teacher's ids, each of the teacher's once."""
        unique = {theirs: ours for ours, theirs in sorted(self.to_teacher.items(), reverse=True)}
        return np.array([list(unique.values()), list(unique)], np.int64)

    def align(self, inputs: Sequence[int]) -> AlignedText:
        """The student's inputs in one document of a row: first the end of the document before it, or, if the row starts
        inside a document, its previous token."""
        starts = inputs[0] == self.student.eos_id
        body = list(inputs[1:] if starts else inputs)
        ids, offset = list(self.begin), 0
        reached = {0: len(ids) - 1}  # bytes read (special tokens count 1) -> index of the teacher's last input
        ends = [0] * starts  # bytes read after each of the student's inputs
        for special, run in itertools.groupby(body, key=lambda i: i not in self._student_bytes):
            if special:
                for i in run:
                    offset += 1
                    ends.append(offset)
                    if i in self.to_teacher:
                        ids.append(self.to_teacher[i])
                        reached[offset] = len(ids) - 1
                continue
            pieces = [self._student_bytes[i] for i in run]
            ends += [offset + n for n in itertools.accumulate(map(len, pieces))]
            content = b"".join(pieces)
            for i, end in self._encode(content, first=starts and offset == 0):
                ids.append(i)
                if end >= 0:
                    reached[offset + end] = len(ids) - 1
            offset += len(content)
        return AlignedText(ids, [reached.get(end, -1) for end in ends])

    def _encode(self, content: bytes, first: bool) -> list[tuple[int, int]]:
        """The teacher's tokens of a text, and how much of it each has read at its end; -1 if that cannot be told, such
        as after a normalization."""
        start = next((n for n in range(min(4, len(content))) if content[n] & 0xC0 != 0x80), 0)  # rows cut characters
        text = content[start:].decode(errors="ignore")
        ids = self.teacher.encode_batch([text], [not first])[0] if text else []
        pieces = [self._teacher_bytes.get(i, b"") for i in ids]
        if first and pieces and pieces[0].startswith(b" ") and not content.startswith(b" "):
            pieces[0] = pieces[0][1:]  # the space that SentencePiece adds
        same = content[start:].startswith(b"".join(pieces))
        return [
            (i, start + n if same else -1) for i, n in zip(ids, itertools.accumulate(map(len, pieces)), strict=True)
        ]
