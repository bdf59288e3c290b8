"""Rows with a prompt and its answers: `columns: {prompt, completion}`, `columns: {prompt, chosen, rejected}` or
`columns: {instruction, input, output}`.

A row becomes one document whose messages are the prompt's turns and then the turns of each answer, marked by their
column. Steps of `clean` see the row as one conversation; before tokenization it is divided, one for each answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from bessemer.data.read.entry import Document

ANSWERS = ("completion", "chosen", "rejected", "output")
PAIRED = ("chosen", "rejected")
CHOSEN, MARGIN = "chosen", "margin"
_MARK = "answer"  # key of an answer's messages: the column it came from

Message = dict[str, Any]
ReadMessages = Callable[[Any, str], list[Message]]


class UnusableAnswer(Exception):
    """The reason why a row's columns cannot be used."""


def answer_messages(record: Mapping[str, Any], columns: Mapping[str, str], read: ReadMessages) -> list[Message]:
    """The marked messages of a row. A text is one turn, of the user or the assistant; `read` reads lists of messages.
    An answer may repeat the prompt's messages; without a prompt column, the prompt is what both answers begin with."""
    answers = {
        role: _turns(record[columns[role]], columns[role], "assistant", read) for role in ANSWERS if role in columns
    }
    if "prompt" in columns or "instruction" in columns:
        prompt = _prompt(record, columns, read)
        answers = {role: turns[len(prompt) :] if _begins(turns, prompt) else turns for role, turns in answers.items()}
    else:
        prompt = _common(*answers.values())
        answers = {role: turns[len(prompt) :] for role, turns in answers.items()}
    for role, turns in answers.items():
        spoken = [turn for turn in turns if turn["role"] == "assistant"]
        if not any(turn["content"].strip() or turn.get("tool_calls") for turn in spoken):
            raise UnusableAnswer(f"{columns[role]!r} holds no answer; write one, or delete the row")
    marked = [{**turn, _MARK: role} for role, turns in answers.items() for turn in turns]
    return [*prompt, *marked]


def check_margin(value: Any, column: str) -> None:
    """Refuses what is no number to subtract from the difference of two rewards."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UnusableAnswer(f"{column!r} holds {value!r} and not a finite number; correct it, or delete the row")


def _prompt(record: Mapping[str, Any], columns: Mapping[str, str], read: ReadMessages) -> list[Message]:
    """The prompt's turns: of one column, or Alpaca's instruction and input, one per line, as one turn."""
    if "prompt" in columns:
        prompt = _turns(record[columns["prompt"]], columns["prompt"], "user", read)
    else:
        values = [record.get(columns[role]) for role in ("instruction", "input") if role in columns]
        if wrong := [value for value in values if value is not None and not isinstance(value, str)]:
            raise UnusableAnswer(f"instruction or input holds a {type(wrong[0]).__name__}, not text; correct it")
        prompt = [{"role": "user", "content": "\n".join(value for value in values if value)}]
    system = record.get(columns["system"]) if "system" in columns else None
    return [{"role": "system", "content": system}, *prompt] if isinstance(system, str) and system.strip() else prompt


def _turns(value: Any, column: str, role: str, read: ReadMessages) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else read(value, column)


def _begins(turns: list[Message], prompt: list[Message]) -> bool:
    return turns[: len(prompt)] == prompt


def _common(first: list[Message], *others: list[Message]) -> list[Message]:
    """The messages before the first difference, and before the last message of each."""
    most = min(len(turns) for turns in (first, *others)) - 1
    size = next((i for i in range(max(most, 0)) if any(turns[i] != first[i] for turns in others)), max(most, 0))
    return first[:size]


def divide_answers(documents: Iterator[Document], learn_prompts: bool = False) -> Iterator[Document]:
    """One document for each answer, with only that answer to learn from; other documents as they are. The two answers
    of a pair have the field `group` in common, and `chosen` is 1 for the better one."""
    for document in documents:
        messages = document.messages or []
        names = list(dict.fromkeys(message[_MARK] for message in messages if _MARK in message))
        if not names:
            yield document
            continue
        prompt = [message for message in messages if _MARK not in message]
        if not learn_prompts:
            prompt = [{**message, "weight": 0} for message in prompt]
        for name in names:
            turns = [
                {key: value for key, value in message.items() if key != _MARK}
                for message in messages
                if message.get(_MARK) == name
            ]
            yield replace(document, messages=[*prompt, *turns], fields=_fields(document, name))


def _fields(document: Document, name: str) -> dict[str, Any]:
    if name not in PAIRED:
        return {}
    group = xxhash.xxh3_64_intdigest(document.place.encode()) >> 1
    fields = {"group": np.array([group], np.int64), CHOSEN: np.array([name == CHOSEN], np.int32)}
    if MARGIN in document.fields:
        fields[MARGIN] = np.array([document.fields[MARGIN]], np.float32)
    return fields
