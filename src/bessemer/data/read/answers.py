"""Rows with a prompt and its answers: `columns: {prompt, completion}`, with `label` for a thumb up or down,
`columns: {prompt, chosen, rejected}`, `columns: {prompt, answers}` (ranked), `columns: {turns, rewards}` (a
conversation with a reward for each turn of the assistant) or `columns: {instruction, input, output}`.

A row becomes one document whose messages are the prompt's turns and then the turns of each answer, marked by their
column. Steps of `clean` see the row as one conversation; before tokenization it is divided, one for each answer, and
ranked answers into pairs. The prompt of a turn with a reward is what precedes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from bessemer.data.read.entry import Document

ANSWERS = ("completion", "chosen", "rejected", "output")
PAIRED = ("chosen", "rejected")
RANKED = "answers"
CHOSEN, MARGIN = "chosen", "margin"
TURNS, REWARDS = "turns", "rewards"
LABEL, PAIRS, ANNOTATORS = "label", "pairs", "annotators"  # fields of such a row's document, as REWARDS
_MARK = "answer"  # key of an answer's messages: the column it came from

Message = dict[str, Any]
ReadMessages = Callable[[Any, str], list[Message]]


class UnusableAnswer(Exception):
    """The reason why a row's columns cannot be used."""


def answer_messages(record: Mapping[str, Any], columns: Mapping[str, str], read: ReadMessages) -> list[Message]:
    """The marked messages of a row. A text is one turn, of the user or the assistant; `read` reads lists of messages.
    An answer may repeat the prompt's messages; without a prompt column, the prompt is what both answers begin with."""
    if TURNS in columns:
        return _rated_turns(record, columns, read)
    answers = {
        role: _turns(record[columns[role]], columns[role], "assistant", read) for role in ANSWERS if role in columns
    }
    if RANKED in columns:
        values = record[columns[RANKED]]
        if not isinstance(values, list) or len(values) < 2:
            raise UnusableAnswer(
                f"{columns[RANKED]!r} holds no list of two answers or more; write one, or delete the row"
            )
        answers = {f"{RANKED} {i}": _turns(value, columns[RANKED], "assistant", read) for i, value in enumerate(values)}
    if "prompt" in columns or "instruction" in columns:
        prompt = _prompt(record, columns, read)
        answers = {role: turns[len(prompt) :] if _begins(turns, prompt) else turns for role, turns in answers.items()}
    else:
        prompt = _common(*answers.values())
        answers = {role: turns[len(prompt) :] for role, turns in answers.items()}
    for role, turns in answers.items():
        spoken = [turn for turn in turns if turn["role"] == "assistant"]
        if not any(turn["content"].strip() or turn.get("tool_calls") for turn in spoken):
            name = columns[role.partition(" ")[0]]
            raise UnusableAnswer(f"{name!r} holds no answer; write one, or delete the row")
    marked = [{**turn, _MARK: role} for role, turns in answers.items() for turn in turns]
    return [*prompt, *marked]


def answer_fields(record: Mapping[str, Any], columns: Mapping[str, str], ranked: str) -> dict[str, Any]:
    """The label of an answer (True: desirable), the pairs of ranked answers, and the votes of annotators."""
    made: dict[str, Any] = {}
    if LABEL in columns:
        made[LABEL] = _desirable(record[columns[LABEL]], columns[LABEL])
    if REWARDS in columns:
        made[REWARDS] = list(record[columns[REWARDS]])
    if RANKED in columns:
        count = len(record[columns[RANKED]])
        scores = record[columns["scores"]] if "scores" in columns else list(range(count, 0, -1))
        usable = isinstance(scores, list) and len(scores) == count and all(map(_is_number, scores))
        if not usable:
            raise UnusableAnswer(f"{columns['scores']!r} holds no list of {count} scores; write one for each answer")
        if not (pairs := ranked_pairs(scores, ranked)):
            raise UnusableAnswer(f"{columns['scores']!r} are all equal: no answer is better; delete the row")
        made[PAIRS] = pairs
    if MARGIN in columns:
        if not _is_number(margin := record[columns[MARGIN]]):
            raise UnusableAnswer(f"{columns[MARGIN]!r} holds {margin!r} and not a finite number; correct it")
        made[MARGIN] = margin
    if ANNOTATORS in columns and (votes := record.get(columns[ANNOTATORS])) is not None:
        if not isinstance(votes, (list, dict)):
            raise UnusableAnswer(f"{columns[ANNOTATORS]!r} holds a {type(votes).__name__}; write a list of their votes")
        made[ANNOTATORS] = [str(vote) for vote in (votes.values() if isinstance(votes, dict) else votes)]
    return made


def ranked_pairs(scores: Sequence[float], ranked: str) -> list[tuple[int, int]]:
    """(better, worse) indices: neighbours (adjacent), the best with each other (best), or all. Equal ones are none."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    places = range(len(order))
    chosen = {
        "adjacent": [(i, i + 1) for i in places[:-1]],
        "best": [(0, i) for i in places[1:]],
        "all": [(i, j) for i in places for j in places[i + 1 :]],
    }[ranked]
    return [(order[i], order[j]) for i, j in chosen if scores[order[i]] > scores[order[j]]]


def _rated_turns(record: Mapping[str, Any], columns: Mapping[str, str], read: ReadMessages) -> list[Message]:
    """The conversation; each turn of the assistant with a reward is marked with its number."""
    messages, rewards = read(record[columns[TURNS]], columns[TURNS]), record[columns[REWARDS]]
    spoken = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not isinstance(rewards, list) or len(rewards) != len(spoken):
        fix = "write a number or null for each turn of the assistant"
        raise UnusableAnswer(f"{columns[REWARDS]!r} holds no list of {len(spoken)} rewards; {fix}")
    if wrong := [reward for reward in rewards if reward is not None and not _is_number(reward)]:
        raise UnusableAnswer(f"{columns[REWARDS]!r} holds {wrong[0]!r} and not a finite number or null; correct it")
    if all(reward is None for reward in rewards):
        raise UnusableAnswer(f"{columns[REWARDS]!r} has no reward; write one, or delete the row")
    marks = {number: turn for turn, number in enumerate(spoken) if rewards[turn] is not None}
    return [
        {**message, _MARK: f"{TURNS} {marks[number]}"} if number in marks else message
        for number, message in enumerate(messages)
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_GOOD = {
    "true",
    "1",
    "up",
    "thumbs_up",
    "thumbs up",
    "thumbsup",
    "+1",
    "👍",
    "good",
    "like",
    "desirable",
    "chosen",
    "yes",
}
_BAD = {
    "false", "0", "down", "thumbs_down", "thumbs down", "thumbsdown", "-1", "👎", "bad", "dislike", "undesirable",
    "rejected", "no",
}  # fmt: skip


def _desirable(value: Any, column: str) -> bool:
    text = f"{value:g}" if isinstance(value, float) else str(value).strip().lower()
    if text not in _GOOD and text not in _BAD:
        raise UnusableAnswer(f"{column!r} is {value!r}, not a label; write true or false, 1 or 0, or up or down")
    return text in _GOOD


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
    of a pair have the field `group` in common, and `chosen` is 1 for the better one, or for a desirable one."""
    for document in documents:
        messages = document.messages or []
        names = list(dict.fromkeys(message[_MARK] for message in messages if _MARK in message))
        if not names:
            yield document
            continue
        if REWARDS in document.fields:
            yield from _divide_turns(document, learn_prompts)
            continue
        prompt = [message for message in messages if _MARK not in message]
        if not learn_prompts:
            prompt = [{**message, "weight": 0} for message in prompt]
        pairs = document.fields.get(PAIRS)
        for name, fields in _sides(document, pairs) if pairs else ((name, _fields(document, name)) for name in names):
            turns = [
                {key: value for key, value in message.items() if key != _MARK}
                for message in messages
                if message.get(_MARK) == name
            ]
            yield replace(document, messages=[*prompt, *turns], fields=fields)


def _divide_turns(document: Document, learn_prompts: bool) -> Iterator[Document]:
    """A document for each turn with a reward, which is desirable if that is above zero."""
    before: list[Message] = []
    for message in document.messages or []:
        mark = message.get(_MARK)
        plain = {key: value for key, value in message.items() if key != _MARK}
        if mark:
            reward = document.fields[REWARDS][int(mark.partition(" ")[2])]
            yield replace(document, messages=[*before, plain], fields={CHOSEN: np.array([reward > 0], np.int32)})
        before.append(plain if learn_prompts else {**plain, "weight": 0})


def _sides(document: Document, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The answers of ranked pairs, the better one first, with their fields."""
    for number, sides in enumerate(pairs):
        for side, better in zip(sides, (True, False), strict=True):
            yield f"{RANKED} {side}", _pair_fields(f"{document.place} {number}", better)


def _fields(document: Document, name: str) -> dict[str, Any]:
    if name in PAIRED:
        margin = {MARGIN: np.array([document.fields[MARGIN]], np.float32)} if MARGIN in document.fields else {}
        return _pair_fields(document.place, name == CHOSEN) | margin
    if LABEL in document.fields:
        return {CHOSEN: np.array([document.fields[LABEL]], np.int32)}
    return {}


def _pair_fields(key: str, chosen: bool) -> dict[str, Any]:
    group = xxhash.xxh3_64_intdigest(key.encode()) >> 1
    return {"group": np.array([group], np.int64), CHOSEN: np.array([chosen], np.int32)}
