"""Rows with labels: from the columns of a row to the tokens of a document and the fields stored beside them.

The tokens are those that transformers makes of the same text: the special tokens of the tokenizer's post-processor
([CLS], [SEP], a beginning of sentence) are added, and the store's end-of-document token comes after them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.read.entry import Document
from bessemer.data.tokenizer.tokenizer import Tokenizer, added_tokens
from bessemer.errors import UserError
from bessemer.spec.classify import ClassifySpec

LABEL, WORDS = "label", "words"
IGNORED = -100  # the label of what is not classified, as in torch and transformers


@dataclass
class EncodedRow:
    """A document for the store. `fields` are of the document, `token_fields` have a value for every token."""

    tokens: npt.NDArray[Any]
    mask: npt.NDArray[np.uint8] | None = None
    fields: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    token_fields: dict[str, npt.NDArray[Any]] = field(default_factory=dict)


class LabelReader:
    """Reads the labels of `objective: classify`. An unusable label raises UserError with its file and row."""

    def __init__(self, spec: ClassifySpec) -> None:
        self.spec = spec
        self.numbers = {name: number for number, name in enumerate(spec.labels)}

    def read(self, document: Document) -> npt.NDArray[Any]:
        """The numbers of a row's labels: one of each word, a 1 or 0 for each name of several, or one."""
        if LABEL not in document.fields:
            has = ", ".join(document.fields) or "none"
            raise UserError(
                f"{document.place}: no label; name its column under the source: columns: {{label: COLUMN}} (set: {has})"
            )
        value = document.fields[LABEL]
        if self.spec.kind == "token":
            return self._of_words(document, document.fields.get(WORDS), value)
        if self.spec.problem == "regression":
            return np.array([self._number(document, value)], np.float32)
        if self.spec.problem == "multi":
            return self._several(document, value)
        return np.array([self._label(document, value)], np.int32)

    def _of_words(self, document: Document, words: Any, labels: Any) -> npt.NDArray[np.int32]:
        if not isinstance(words, list) or not isinstance(labels, list) or len(words) != len(labels):
            sizes = [str(len(each)) if isinstance(each, list) else "no list" for each in (words, labels)]
            raise UserError(
                f"{document.place}: {sizes[0]} words and {sizes[1]} labels; write a list of words and as many labels, "
                "and columns: {words: COLUMN, label: COLUMN}"
            )
        numbers = [IGNORED if label is None or label == IGNORED else self._label(document, label) for label in labels]
        return np.array(numbers, np.int32)

    def _label(self, document: Document, value: Any) -> int:
        known = ", ".join(self.spec.labels[:12]) + (", ..." if len(self.spec.labels) > 12 else "")
        if isinstance(value, str) and value in self.numbers:
            return self.numbers[value]
        if isinstance(value, bool) or not isinstance(value, int):
            number = self.numbers.get(str(value))
            if number is not None:
                return number
            raise UserError(f"{document.place}: label {value!r} is none of {known}; add it to classify.labels")
        if not 0 <= value < len(self.spec.labels):
            raise UserError(f"{document.place}: label {value} is outside 0 to {len(self.spec.labels) - 1} ({known})")
        return value

    def _several(self, document: Document, value: Any) -> npt.NDArray[np.float32]:
        """A list of labels."""
        if not isinstance(value, list):
            raise UserError(f"{document.place}: label {value!r} is no list; write a list of labels, which may be empty")
        row = np.zeros(len(self.spec.labels), np.float32)
        row[[self._label(document, each) for each in value]] = 1.0
        return row

    def _number(self, document: Document, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, bool) or not math.isfinite(number):
            raise UserError(
                f"{document.place}: label {value!r} is no finite number, which regression needs; correct it"
            )
        return number


class LabelledRows(LabelReader):
    """Encodes rows with their labels."""

    def __init__(self, spec: ClassifySpec, tokenizer: Tokenizer) -> None:
        super().__init__(spec)
        self.tokenizer = tokenizer
        self.prefix, self.suffix = added_tokens(tokenizer)

    def encode(self, document: Document, tokens: npt.NDArray[Any]) -> EncodedRow:
        """The row of a document, whose text has these tokens with the end-of-document token."""
        labels, dtype = self.read(document), tokens.dtype
        ends = np.array(self.prefix, dtype), np.array([*self.suffix, self.tokenizer.eos_id], dtype)
        if self.spec.kind == "token":
            return self._encode_words(document.fields[WORDS], labels, *ends)
        return EncodedRow(np.concatenate([ends[0], tokens[:-1], ends[1]]), fields={LABEL: labels})

    def _encode_words(
        self, words: list[str], labels: npt.NDArray[Any], before: npt.NDArray[Any], after: npt.NDArray[Any]
    ) -> EncodedRow:
        """A word's label is that of its first token, as transformers' examples have it; its other tokens have none."""
        texts = [word if i == 0 else f" {word}" for i, word in enumerate(words)]
        pieces = self.tokenizer.encode_batch(texts, [i > 0 for i in range(len(texts))])
        ids, numbers = [*before.tolist()], [IGNORED] * before.size
        for piece, number in zip(pieces, labels.tolist(), strict=True):
            ids += piece
            numbers += [number, *[IGNORED] * (len(piece) - 1)] if piece else []
        tokens = np.concatenate([np.array(ids, before.dtype), after])
        token_labels = np.array([*numbers, *[IGNORED] * after.size], np.int32)
        return EncodedRow(tokens, token_fields={LABEL: token_labels})


def label_columns(columns: Mapping[str, str] | None) -> dict[str, str]:
    """The columns that become fields of a document: all but its text."""
    return {role: name for role, name in (columns or {}).items() if role != "text"}
