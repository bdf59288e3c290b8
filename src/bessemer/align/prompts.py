"""Prompts of reinforcement learning: rows of any file format, held in memory with all their columns.

Every process reads all files at its start: a million prompts of 100 tokens take about 1 GB and one to two minutes. The
prompts are numbered as in the files, so that order, mixtures and positions are those of other data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bessemer.data.read import BadRow, divide_source, list_files, read_part
from bessemer.data.read.entry import Document
from bessemer.data.read.rows import PieceReader, Row, list_names
from bessemer.data.store.shard import Origin
from bessemer.data.stream.rows import PADDING, Ints, RowBlock, Spans
from bessemer.data.tokenizer.chat import find_problems
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec
from bessemer.train.trained import ReadsText, TextReader

_FORMAT = 1  # raise it when the same rows give other prompts
PROMPT = "prompt"


@dataclass(slots=True)
class Prompt:
    """A text or a conversation to answer, and the columns that rewards read."""

    content: str | list[dict[str, Any]]
    columns: dict[str, Any]
    file: str
    row: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.row}"

    @property
    def text(self) -> str:
        """The prompt as one line of JSON, or the text itself."""
        return self.content if isinstance(self.content, str) else json.dumps(self.content, ensure_ascii=False)


class PromptReader(PieceReader):
    """Reads every column of a row; the text of the document is its prompt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._all_columns: list[str] = []
        self._prompt = prompt_column(self.source)

    @property
    def fields(self) -> list[str]:
        return self._all_columns or [self._prompt]

    def check_columns(self, names: Any) -> None:
        self._all_columns = list(names)
        if self._prompt not in self._all_columns:
            raise UserError(f"{self.file}: {self._missing(self._all_columns)}")

    def document(self, row: int, record: Mapping[str, Any], raw: bytes | str | None = None) -> Row | None:
        if self._prompt not in record:
            return self.bad(row, self._missing(record))
        content = record[self._prompt]
        if isinstance(content, list) and (problems := find_problems([*content, {"role": "assistant", "content": "x"}])):
            return self.bad(row, problems[0])
        if not isinstance(content, (str, list)) or not content:
            return self.bad(row, f"{self._prompt!r} holds no prompt: write a text, or a list of messages")
        return Document("", self.file, row, fields={"": content} | dict(record))

    def _missing(self, names: Any) -> str:
        fix = "name it, such as columns: {prompt: question}"
        return f"no column {self._prompt!r}; it has {list_names(names)}: {fix}"


def prompt_column(source: SourceSpec) -> str:
    """The column that holds the prompts."""
    return source.messages_field or (source.columns or {}).get(PROMPT, PROMPT)


def read_prompts(name: str, source: SourceSpec, bad_rows: float) -> Iterator[Prompt]:
    """The prompts of a source's files in order. UserError if more than the share `bad_rows` of them cannot be used."""
    # Prompts may be lists, which the readers of tables accept in a column of messages only.
    reading = source.model_copy(update={"messages_field": prompt_column(source), "columns": None})
    bad: list[BadRow] = []
    count = 0
    for part in divide_source(name, list_files(source), reading):
        for row in read_part(part, reading, reader=PromptReader):
            count += 1
            if isinstance(row, BadRow):
                bad.append(row)
                continue
            content = row.fields.pop("")
            yield Prompt(content, row.fields, row.file, row.row)
    if len(bad) > bad_rows * count:
        first = f"{bad[0].file}:{bad[0].row}: {bad[0].reason}"
        raise UserError(f"{first} ({len(bad):,} of {count:,} rows cannot be used; data.bad_rows is {bad_rows:.3g})")


def prompts_of_dataset(name: str, dataset: Sequence[Any], column: str) -> Iterator[Prompt]:
    """The same for a caller's dataset, whose items are mappings."""
    for number in range(len(dataset)):
        item = dataset[number]
        if not isinstance(item, Mapping) or not isinstance(item.get(column), (str, list)) or not item[column]:
            raise UserError(f"dataset {name}[{number}]: return a mapping with {column!r}: a text or a list of messages")
        yield Prompt(item[column], dict(item), f"dataset {name}", number + 1)


def hold_out(prompts: Sequence[Prompt], share: float, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to train on and held-out ones, chosen by a hash of the prompt: equal prompts are on one side."""
    keys = [xxhash.xxh3_64_intdigest(prompt.text.encode("utf-8", "replace"), seed=seed) for prompt in prompts]
    limit = min(int(share * 2**64), 2**64 - 1)
    if share > 0 and len(set(keys)) > 1:  # at least one on each side
        limit = min(max(limit, min(keys)), max(keys) - 1)
    elif share <= 0 or not keys:
        return list(prompts), []
    sides: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt, key in zip(prompts, keys, strict=True):
        sides[key <= limit].append(prompt)
    return sides


@dataclass
class PromptRows:
    """Prompts with their ids, as the rows of a source: a row is a prompt alone, and nothing in it is learned."""

    prompts: list[Prompt]
    ids: list[Ints]
    length: int
    tokenizer_fingerprint: str = ""
    packing: str = field(default="rollouts", init=False)
    full: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        content = xxhash.xxh3_128(f"{_FORMAT} {self.tokenizer_fingerprint} ".encode())
        for prompt, ids in zip(self.prompts, self.ids, strict=True):
            columns = json.dumps(prompt.columns, sort_keys=True, default=str)
            content.update(columns.encode("utf-8", "replace") + ids.astype("<i8").tobytes())
        self.fingerprint = content.hexdigest()

    @property
    def count(self) -> int:
        return len(self.prompts)

    def spans(self, sequences: Ints) -> Spans:
        lengths = np.array([min(self.ids[number].size, self.length) for number in sequences.tolist()], np.int64)
        n, zeros = sequences.size, np.zeros(sequences.size, np.int64)
        pairs = ((np.arange(n), np.arange(n)), (zeros, lengths), (lengths, self.length - lengths),
                 (sequences, zeros + PADDING), (zeros, zeros))  # fmt: skip
        row, column, length, document, weight = (np.stack(pair, axis=1).ravel() for pair in pairs)
        some = length > 0
        return Spans(row[some], column[some], length[some], document[some], weight[some])

    def assemble(self, sequences: Ints) -> RowBlock:
        shape = sequences.size, self.length
        tokens, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, number in enumerate(sequences.tolist()):
            ids = self.ids[number][: self.length]
            targets[row, : ids.size] = ids
            tokens[row, 1 : ids.size] = ids[:-1]
        return RowBlock(tokens, targets, np.zeros(shape, np.float32), self.spans(sequences))

    def origin_of_document(self, document: int) -> Origin:
        prompt = self.prompts[document]
        return Origin(prompt.file, prompt.row, "", document, 0, int(self.ids[document].size))


@dataclass(frozen=True)
class PromptData:
    """The prompts of a run by source, and how its model reads and ends texts."""

    tokenizer: Tokenizer
    train: dict[str, list[Prompt]]
    validation: dict[str, list[Prompt]]
    folder: Path
    reader: TextReader

    def rows(self, prompts: list[Prompt], context: int, max_tokens: int, answers: int = 1) -> PromptRows:
        """The prompts with their ids. UserError for a prompt that leaves no room for `answers` answers in a row."""
        ids = [encode_prompt(self.reader, prompt) for prompt in prompts]
        for prompt, tokens in zip(prompts, ids, strict=True):
            if answers * (tokens.size + max_tokens) > context:
                twice = " for each answer of a pair" if answers > 1 else ""
                raise UserError(
                    f"{prompt.place}: its prompt of {tokens.size:,} tokens and rl.max_tokens {max_tokens:,}{twice} "
                    f"exceed data.context {context:,}: raise the context, lower max_tokens, or remove the row"
                )
        return PromptRows(prompts, ids, context, self.tokenizer.fingerprint)


def encode_prompt(reader: ReadsText, prompt: Prompt) -> Ints:
    """What the model reads: a text is one turn of the user if the model has a chat template."""
    content = prompt.content
    if isinstance(content, str) and reader.template is None:
        return np.array(reader.prompt(content), np.int64)
    try:
        return np.array(
            reader.chat_prompt([{"role": "user", "content": content}] if isinstance(content, str) else content)
        )
    except UserError as error:
        raise UserError(f"{prompt.place}: {error}") from None
